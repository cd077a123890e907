#pragma once

// Samplers that do not follow the class table: fixed distributions, fixed classes, and the targets
// of the batch.

#include <xsoftmax/options.h>
#include <xsoftmax/sampler.h>

#include <vector>

// Counts of the ids in a stream of batches.

namespace xsoftmax::samplers {

/// Estimates the probability of each id in a stream of batches, with more weight on recent batches.
/// Dense ids have exact decayed counts; open ids have smoothed gaps in hashed buckets. See
/// xsoftmax.samplers.StreamingCounts in Python, which has the same state names. Counts only in
/// train().
class StreamingCountsImpl : public TableBuffers {
 public:
  explicit StreamingCountsImpl(const StreamingOptions& options);
  explicit StreamingCountsImpl(int64_t num_ids)
      : StreamingCountsImpl(StreamingOptions{.num_ids = num_ids}) {}

  /// Counts a batch.
  ///
  /// - ids: int64 of any shape, dense ids in [0, N), or -1 for entries to skip.
  /// - mask: bool, the shape of ids, true for the ids to count. nullopt: all.
  void update(const torch::Tensor& ids, const std::optional<torch::Tensor>& mask = std::nullopt);
  /// Resets dense ids to the state of ids never seen, when they are reassigned.
  void forget(const torch::Tensor& ids);
  /// Returns the decayed counts of ids in float64. For open ids this is total * q.
  torch::Tensor counts(const torch::Tensor& ids) const;
  /// Returns log q in float32, -inf for ids never seen.
  torch::Tensor log_prob(const torch::Tensor& ids) const;
  /// Calls update, then returns log_prob.
  torch::Tensor forward(const torch::Tensor& ids);

  /// Changes the number of dense ids; new ids start as never seen. Does nothing for open ids.
  void resize(int64_t num_ids);

  using TableBuffers::to;
  void to(torch::Device device, bool non_blocking = false) override;

  std::optional<int64_t> num_ids() const { return num_ids_; }
  /// Returns the options as the text that operators take.
  const std::string& options() const { return options_; }

  torch::Tensor count, total, last, seen;

 private:
  std::optional<int64_t> num_ids_;
  std::string options_;
};
class StreamingCounts : public Holder<StreamingCountsImpl> {
 public:
  using Holder::Holder;
  explicit StreamingCounts(const StreamingOptions& options)
      : Holder(std::make_shared<Impl>(options)) {}
  explicit StreamingCounts(int64_t num_ids) : Holder(std::make_shared<Impl>(num_ids)) {}
  explicit StreamingCounts(...) = delete; // expected: StreamingOptions or num_ids
};

/// How a sampler with fixed weights draws.
struct DrawOptions {
  /// true: one set for the batch; false: one set per query. nullopt: true
  std::optional<bool> shared = std::nullopt;
  /// Whether to sample without replacement, so that no class appears twice in a set. nullopt: true
  /// for shared sets, false for private ones.
  std::optional<bool> distinct = std::nullopt;
  torch::Tensor exclude = {}; ///< int64 [K], classes that are never drawn
};

/// Draws classes in proportion to fixed weights, q_i = w_i / sum(w).
///
/// With replacement, the expected count is M q_i. Without replacement, draws are systematic, with
/// inclusion probability min(1, c q_i), where c makes the probabilities sum to M. The values of the
/// queries do not matter, only their number. Tables are computed from the constructor's arguments,
/// so checkpoints do not hold them; `to` moves them.
class StaticSamplerImpl : public DescribedSamplerImpl {
 public:
  /// weights: [N] with N >= 1, any real dtype; finite, nonnegative, not all zero.
  StaticSamplerImpl(const torch::Tensor& weights, int64_t num_samples,
                    const DrawOptions& options = {});

  std::string describe() const override;
  std::vector<torch::Tensor> state_tensors() const override { return tables_; }
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;
  /// New classes get the weight of the lightest class that can be drawn; a log-uniform distribution
  /// gives them the probability of their ids. The tables are rebuilt in O(N) if classes are removed
  /// other than those added since the last rebuild, or once a quarter as many classes have been
  /// added.
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows,
                                    const std::optional<torch::Tensor>& bias) override;

  using SamplerImpl::to;
  void to(torch::Device device, bool non_blocking = false) override;

 protected:
  struct Distribution; // tables and options, as the operator static_tables returns them
  explicit StaticSamplerImpl(const Distribution& distribution);
  /// Returns the name of a distribution that is determined by the number of classes; empty for
  /// fixed weights.
  virtual const char* distribution() const { return ""; }

  std::vector<torch::Tensor> tables_;
  std::string options_;
};
class StaticSampler : public Holder<StaticSamplerImpl> {
 public:
  using Holder::Holder;
  StaticSampler(const torch::Tensor& weights, int64_t num_samples, const DrawOptions& options = {})
      : Holder(std::make_shared<Impl>(weights, num_samples, options)) {}
  explicit StaticSampler(...) = delete; // expected: weights, num_samples[, DrawOptions]
};

/// Draws all classes that are not excluded with equal probability. Needs no tables, however large
/// num_classes is, unless `exclude` leaves more than one range of classes.
class UniformSamplerImpl : public StaticSamplerImpl {
 public:
  UniformSamplerImpl(int64_t num_classes, int64_t num_samples, const DrawOptions& options = {});
};
class UniformSampler : public Holder<UniformSamplerImpl> {
 public:
  using Holder::Holder;
  UniformSampler(int64_t num_classes, int64_t num_samples, const DrawOptions& options = {})
      : Holder(std::make_shared<Impl>(num_classes, num_samples, options)) {}
  explicit UniformSampler(...) = delete; // expected: num_classes, num_samples[, DrawOptions]
};

/// Draws classes from a log-uniform distribution, for classes sorted by descending frequency.
///
/// q_i = (ln(i + 2) - ln(i + 1)) / (ln(N + 1) - ln(h + 1)) for i in [h, N), where the classes below
/// h are excluded. Draws with replacement need tables only if `exclude` contains ids other than 0,
/// 1, ...; draws without replacement always need them.
class LogUniformSamplerImpl : public StaticSamplerImpl {
 public:
  LogUniformSamplerImpl(int64_t num_classes, int64_t num_samples, const DrawOptions& options = {});
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;

 protected:
  explicit LogUniformSamplerImpl(const Distribution& distribution)
      : StaticSamplerImpl(distribution) {}
  const char* distribution() const override { return "log_uniform"; }
};
class LogUniformSampler : public Holder<LogUniformSamplerImpl> {
 public:
  using Holder::Holder;
  LogUniformSampler(int64_t num_classes, int64_t num_samples, const DrawOptions& options = {})
      : Holder(std::make_shared<Impl>(num_classes, num_samples, options)) {}
  explicit LogUniformSampler(...) = delete; // expected: num_classes, num_samples[, DrawOptions]
};

/// Draws classes from the unigram distribution, q_i = counts_i^power / sum_j counts_j^power. A
/// class with a count of 0 is never drawn.
class UnigramSamplerImpl : public StaticSamplerImpl {
 public:
  /// counts: [N], any real dtype; finite, nonnegative, not all zero. power: finite and at least 0.
  UnigramSamplerImpl(const torch::Tensor& counts, int64_t num_samples, double power = 0.75,
                     const DrawOptions& options = {});
  /// Follows a stream: in train(), each call of `sample` counts the targets, and rebuilds the
  /// tables from the counts when a refresh is due. Expected counts are those of the current tables.
  /// Buffers: `step`, on the CPU, and the tables.
  UnigramSamplerImpl(StreamingCounts counts, int64_t num_samples, const FollowOptions& follow = {},
                     const DrawOptions& options = {});

  std::string describe() const override;
  std::vector<torch::Tensor> state_tensors() const override;
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;
  /// With streamed counts, new classes get the weight of the lightest class until the tables are
  /// next rebuilt.
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows,
                                    const std::optional<torch::Tensor>& bias) override;
  /// Skips tables of another distribution, other excluded classes or another size. The next step
  /// then rebuilds them.
  void load(torch::serialize::InputArchive& archive) override;

  using SamplerImpl::to;
  void to(torch::Device device, bool non_blocking = false) override;

  StreamingCounts streaming = nullptr; ///< null if the counts are fixed
  torch::Tensor step;

 private:
  FollowOptions follow_;
  DrawOptions draws_;
  torch::Tensor excluded_;
};
class UnigramSampler : public Holder<UnigramSamplerImpl> {
 public:
  using Holder::Holder;
  UnigramSampler(const torch::Tensor& counts, int64_t num_samples, double power = 0.75,
                 const DrawOptions& options = {})
      : Holder(std::make_shared<Impl>(counts, num_samples, power, options)) {}
  UnigramSampler(const torch::Tensor& counts, int64_t num_samples, const DrawOptions& options)
      : Holder(std::make_shared<Impl>(counts, num_samples, 0.75, options)) {}
  UnigramSampler(StreamingCounts counts, int64_t num_samples, const FollowOptions& follow = {},
                 const DrawOptions& options = {})
      : Holder(std::make_shared<Impl>(std::move(counts), num_samples, follow, options)) {}
  explicit UnigramSampler(...) = delete; // expected: counts, num_samples[, power][, DrawOptions]
};

/// Proposes a fixed set of classes that are always scored, with a log_count of 0.
class FixedSamplerImpl : public StaticSamplerImpl {
 public:
  /// ids: int64 [K] in [0, num_classes), in any order; repeats count once.
  FixedSamplerImpl(int64_t num_classes, const torch::Tensor& ids);
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;
};
class FixedSampler : public Holder<FixedSamplerImpl> {
 public:
  using Holder::Holder;
  FixedSampler(int64_t num_classes, const torch::Tensor& ids)
      : Holder(std::make_shared<Impl>(num_classes, ids)) {}
  explicit FixedSampler(...) = delete; // expected: num_classes, ids
};

/// Uses the targets of the other queries in the batch as the candidates of each query.
///
/// log_count = log((n - 1) p_i), where n is the number of queries that are not ignored and p_i is
/// the frequency of class i among the targets of the training batches, including the current batch
/// in train(). The frequency is an estimate, so the expected count is too.
///
/// Buffers: counts int64 [N] and total int64; with streamed counts, only those of the
/// StreamingCounts.
class InBatchSamplerImpl : public DescribedSamplerImpl {
 public:
  explicit InBatchSamplerImpl(int64_t num_classes, StreamingCounts counts = nullptr);

  std::string describe() const override;
  std::vector<torch::Tensor> state_tensors() const override;
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows,
                                    const std::optional<torch::Tensor>& bias) override;

  using SamplerImpl::to;
  void to(torch::Device device, bool non_blocking = false) override;

  torch::Tensor counts, total; ///< undefined with streamed counts
  StreamingCounts streaming = nullptr; ///< null: counts and total, which never decay

 private:
  std::string options_; // options of the counts, as text
  torch::Tensor drawn_; // number of queries in the last batch that are not ignored
  torch::Tensor last_, seen_; // empty; used with counts and total
};
class InBatchSampler : public Holder<InBatchSamplerImpl> {
 public:
  using Holder::Holder;
  explicit InBatchSampler(int64_t num_classes, StreamingCounts counts = nullptr)
      : Holder(std::make_shared<Impl>(num_classes, std::move(counts))) {}
  explicit InBatchSampler(...) = delete; // expected: num_classes[, StreamingCounts]
};

} // namespace xsoftmax::samplers
