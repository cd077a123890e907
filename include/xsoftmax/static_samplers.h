#pragma once

// Samplers whose draws do not follow the class table: fixed laws, fixed classes, the batch's own targets.

#include <xsoftmax/sampler.h>
#include <xsoftmax/streaming_counts.h>

#include <vector>

namespace xsoftmax::samplers {

/// How a sampler with fixed weights draws.
struct DrawOptions {
  std::optional<bool> shared = std::nullopt;   ///< one set for the batch, or one for each query; none: one for the batch
  std::optional<bool> distinct = std::nullopt; ///< no class twice in a set; none: shared sets are distinct, private ones independent
  torch::Tensor exclude = {};                  ///< int64 [K], classes that are never drawn
};

/// Draws classes in proportion to fixed weights, q_i = w_i / sum(w). Independent draws may repeat, expected count M q_i; distinct ones are
/// systematic, with inclusion probability min(1, c q_i) where c makes them sum to M. Only the number of queries matters. Tables follow from
/// the constructor's arguments, so a checkpoint does not hold them; `to` moves them.
class StaticSamplerImpl : public DescribedSamplerImpl {
 public:
  /// weights [N], N >= 1, any real dtype: finite, not negative, not all zero.
  StaticSamplerImpl(const torch::Tensor& weights, int64_t num_samples, const DrawOptions& options = {});

  std::string describe() const override;
  std::vector<torch::Tensor> state_tensors() const override { return tables_; }
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;
  /// New classes weigh as much as the lightest one that is drawn; in a log-uniform law what it gives their ids. Tables are laid out anew, O(N), where classes
  /// go that have not come since the last time, and where a quarter as many have come.
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias) override;

  using SamplerImpl::to;
  void to(torch::Device device, bool non_blocking = false) override;

 protected:
  struct Law; // tables and options, as the operator static_tables makes them
  explicit StaticSamplerImpl(const Law& law);
  /// That of a class whose weights follow from the number of classes, else empty.
  virtual const char* law() const { return ""; }

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

/// Every class that is not excluded alike. Needs no tables, whatever num_classes is, unless `exclude` leaves no range of classes.
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

/// Classes sorted by falling frequency: q_i = (ln(i + 2) - ln(i + 1)) / (ln(N + 1) - ln(h + 1)) for i in [h, N), the classes below h excluded.
/// Independent draws need no tables unless `exclude` names ids that are not 0, 1, ...; distinct ones do.
class LogUniformSamplerImpl : public StaticSamplerImpl {
 public:
  LogUniformSamplerImpl(int64_t num_classes, int64_t num_samples, const DrawOptions& options = {});
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;

 protected:
  explicit LogUniformSamplerImpl(const Law& law) : StaticSamplerImpl(law) {}
  const char* law() const override { return "log_uniform"; }
};
class LogUniformSampler : public Holder<LogUniformSamplerImpl> {
 public:
  using Holder::Holder;
  LogUniformSampler(int64_t num_classes, int64_t num_samples, const DrawOptions& options = {})
      : Holder(std::make_shared<Impl>(num_classes, num_samples, options)) {}
  explicit LogUniformSampler(...) = delete; // expected: num_classes, num_samples[, DrawOptions]
};

/// q_i = counts_i^power / sum_j counts_j^power; a class of zero count is never drawn.
class UnigramSamplerImpl : public StaticSamplerImpl {
 public:
  /// counts [N], any real dtype: finite, not negative, not all zero; power finite, at least 0.
  UnigramSamplerImpl(const torch::Tensor& counts, int64_t num_samples, double power = 0.75, const DrawOptions& options = {});
  /// Follows a stream: each `sample` while training counts the targets, and rebuilds the tables from the counts where a refresh is due. Counts of draws are
  /// those of the tables. Buffers: step, on the CPU, and the tables.
  UnigramSamplerImpl(StreamingCounts counts, int64_t num_samples, const FollowOptions& follow = {}, const DrawOptions& options = {});

  std::string describe() const override;
  std::vector<torch::Tensor> state_tensors() const override;
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;
  /// New classes of a stream weigh as the lightest one until the tables are next rebuilt.
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias) override;
  /// The tables of another law, of other excluded classes or of another size stay out: they are then rebuilt by the next step.
  void load(torch::serialize::InputArchive& archive) override;

  using SamplerImpl::to;
  void to(torch::Device device, bool non_blocking = false) override;

  StreamingCounts streaming = nullptr; ///< null where the counts are fixed
  torch::Tensor step;

 private:
  FollowOptions follow_;
  DrawOptions draws_;
  torch::Tensor excluded_;
};
class UnigramSampler : public Holder<UnigramSamplerImpl> {
 public:
  using Holder::Holder;
  UnigramSampler(const torch::Tensor& counts, int64_t num_samples, double power = 0.75, const DrawOptions& options = {})
      : Holder(std::make_shared<Impl>(counts, num_samples, power, options)) {}
  UnigramSampler(const torch::Tensor& counts, int64_t num_samples, const DrawOptions& options)
      : Holder(std::make_shared<Impl>(counts, num_samples, 0.75, options)) {}
  UnigramSampler(StreamingCounts counts, int64_t num_samples, const FollowOptions& follow = {}, const DrawOptions& options = {})
      : Holder(std::make_shared<Impl>(std::move(counts), num_samples, follow, options)) {}
  explicit UnigramSampler(...) = delete; // expected: counts or StreamingCounts, num_samples[, power or FollowOptions][, DrawOptions]
};

/// Classes that are always there: log_count 0.
class FixedSamplerImpl : public StaticSamplerImpl {
 public:
  /// ids int64 [K] in [0, num_classes), in any order; one that stands twice counts once.
  FixedSamplerImpl(int64_t num_classes, const torch::Tensor& ids);
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;
};
class FixedSampler : public Holder<FixedSamplerImpl> {
 public:
  using Holder::Holder;
  FixedSampler(int64_t num_classes, const torch::Tensor& ids) : Holder(std::make_shared<Impl>(num_classes, ids)) {}
  explicit FixedSampler(...) = delete; // expected: num_classes, ids
};

/// The candidates of each query are the targets of the others in the batch, with log_count = log((n - 1) p), n the queries that count,
/// p_i the frequency of class i among the targets of the training batches (the batch at hand included while training). This p is an estimate. Buffers:
/// counts int64 [N], total int64; with counts of a stream theirs alone.
class InBatchSamplerImpl : public DescribedSamplerImpl {
 public:
  explicit InBatchSamplerImpl(int64_t num_classes, StreamingCounts counts = nullptr);

  std::string describe() const override;
  std::vector<torch::Tensor> state_tensors() const override;
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias) override;

  using SamplerImpl::to;
  void to(torch::Device device, bool non_blocking = false) override;

  torch::Tensor counts, total;         ///< undefined with counts of a stream
  StreamingCounts streaming = nullptr; ///< null: counts and total, for ever

 private:
  std::string options_;       // of the counts
  torch::Tensor drawn_;       // how many queries of the last batch count
  torch::Tensor last_, seen_; // empty, beside counts and total
};
class InBatchSampler : public Holder<InBatchSamplerImpl> {
 public:
  using Holder::Holder;
  explicit InBatchSampler(int64_t num_classes, StreamingCounts counts = nullptr) : Holder(std::make_shared<Impl>(num_classes, std::move(counts))) {}
  explicit InBatchSampler(...) = delete; // expected: num_classes[, StreamingCounts]
};

} // namespace xsoftmax::samplers
