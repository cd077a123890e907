#pragma once

// Samplers: modules that propose which classes to score for a query, and say how often each would be proposed. The same as
// xsoftmax.samplers in Python: same distributions, same draws from the same generator state, same buffer names.
//
//     xsoftmax::samplers::UnigramSampler sampler(counts);
//     auto proposal = sampler->sample(input, 512, /*shared=*/true, target);
//
// Shapes: input [Q, D] (static samplers use its number of rows and its device only), target int64 [Q] of valid ids, ids int64 of any
// shape. Bad arguments throw c10::ValueError, c10::TypeError or c10::IndexError.

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

namespace xsoftmax::samplers {

/// Classes to score, and the expected count of each: a candidate weighs 1 / expected count in an estimate of a sum over all classes.
struct Proposal {
  torch::Tensor ids;              ///< int64, [M] shared by the batch or [Q, M] private to each query
  torch::Tensor log_count;        ///< float32, the shape of ids: log(M q) of independent draws, log pi of distinct ones
  torch::Tensor target_log_count; ///< float32 [Q], the same for the targets; undefined where none were given
  bool distinct = false;          ///< no class stands twice in a set
};

/// What all samplers with fixed weights take.
struct StaticOptions {
  /// Whether a set holds no class twice. None: shared sets are distinct, private ones independent.
  std::optional<bool> distinct = std::nullopt;
  /// Classes never drawn: the ids below this one ...
  int64_t exclude_below = 0;
  /// ... and these, int64 [K].
  std::optional<torch::Tensor> exclude = std::nullopt;
};

/// Base of all samplers. One int64 is drawn a call from `generator` (on input's device), or from the default one of that device.
class SamplerImpl : public torch::nn::Module {
 public:
  explicit SamplerImpl(int64_t num_classes) : num_classes_(num_classes) {}

  /// Draws `num_samples` classes for the batch (`shared`) or for each query.
  virtual Proposal sample(const torch::Tensor& input, int64_t num_samples, bool shared,
                          const std::optional<torch::Tensor>& target = std::nullopt,
                          std::optional<at::Generator> generator = std::nullopt) = 0;
  /// log q of any ids: float32 of their shape, -inf for a class that is never drawn.
  virtual torch::Tensor log_prob(const torch::Tensor& input, const torch::Tensor& ids) = 0;
  /// Adapts the sampler to the class table `weight` [N, D] and returns statistics. A static sampler has nothing to do.
  virtual std::map<std::string, double> refresh(const torch::Tensor& weight);
  /// Whether draws are best shared by the batch.
  virtual bool shared_by_default() const { return true; }
  /// Whether the candidates are the targets themselves: `sample` then takes -1 for a target that does not count, and gives it a log
  /// count of +inf: no candidate.
  virtual bool proposes_targets() const { return false; }
  /// A sampler like this one that never draws the classes `ids` (int64 [K]). Throws TypeError where that cannot be.
  virtual std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids);
  int64_t num_classes() const { return num_classes_; }

 protected:
  int64_t num_classes_;
};

/// Draws classes in proportion to fixed weights: q_i = w_i / sum(w), where excluded classes weigh 0. Independent draws take an alias
/// table; distinct ones are systematic, pi_i = min(1, c q_i) with sum pi = M. More distinct classes than have a weight throw ValueError.
///
/// Buffers: probability float64 [N]; threshold, alias unless `distinct` is true; order, cumulative unless it is false.
class StaticSamplerImpl : public SamplerImpl {
 public:
  /// weights [N], N >= 1, any real dtype: finite, not negative, not all zero.
  explicit StaticSamplerImpl(const torch::Tensor& weights, const StaticOptions& options = {});

  Proposal sample(const torch::Tensor& input, int64_t num_samples, bool shared,
                  const std::optional<torch::Tensor>& target = std::nullopt,
                  std::optional<at::Generator> generator = std::nullopt) override;
  torch::Tensor log_prob(const torch::Tensor& input, const torch::Tensor& ids) override;

  /// Only the device of the tables moves: they stay float64.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) override;

  torch::Tensor probability, threshold, alias, order, cumulative; ///< undefined where not built

 protected:
  /// Without tables.
  StaticSamplerImpl(int64_t num_classes, std::optional<bool> distinct);
  void init_tables(const torch::Tensor& weights, bool with_alias, bool with_systematic);

  /// ids, and log c (float64, 0-dim) where a class's expected count is c q.
  virtual std::tuple<torch::Tensor, torch::Tensor> draw(const torch::Tensor& seed, std::optional<int64_t> num_queries,
                                                        int64_t num_samples, bool distinct);
  /// float64.
  virtual torch::Tensor log_q(const torch::Tensor& ids);

  std::optional<bool> distinct_;
};
TORCH_MODULE(StaticSampler);

/// Every class that is not excluded alike. Without tables, whatever num_classes is, unless `exclude` names ids that are not 0, 1, ...
class UniformSamplerImpl : public StaticSamplerImpl {
 public:
  explicit UniformSamplerImpl(int64_t num_classes, const StaticOptions& options = {});

  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) override;

 protected:
  std::tuple<torch::Tensor, torch::Tensor> draw(const torch::Tensor& seed, std::optional<int64_t> num_queries, int64_t num_samples,
                                                bool distinct) override;
  torch::Tensor log_q(const torch::Tensor& ids) override;

  int64_t low_ = 0;
  bool from_tables_ = false;
};
TORCH_MODULE(UniformSampler);

/// Classes sorted by falling frequency: q_i = (ln(i + 2) - ln(i + 1)) / (ln(N + 1) - ln(h + 1)) for i in [h, N), h classes excluded.
/// Independent draws need no tables unless `exclude` names ids that are not 0, 1, ...; distinct ones do.
class LogUniformSamplerImpl : public StaticSamplerImpl {
 public:
  explicit LogUniformSamplerImpl(int64_t num_classes, const StaticOptions& options = {});

 protected:
  std::tuple<torch::Tensor, torch::Tensor> draw(const torch::Tensor& seed, std::optional<int64_t> num_queries, int64_t num_samples,
                                                bool distinct) override;
  torch::Tensor log_q(const torch::Tensor& ids) override;

  int64_t low_ = 0;
  bool from_tables_ = false;
};
TORCH_MODULE(LogUniformSampler);

/// q_i = counts_i^power / sum_j counts_j^power; a class of zero count is never drawn.
class UnigramSamplerImpl : public StaticSamplerImpl {
 public:
  /// counts [N], any real dtype: finite, not negative, not all zero; power finite, at least 0.
  explicit UnigramSamplerImpl(const torch::Tensor& counts, double power = 0.75, const StaticOptions& options = {});
};
TORCH_MODULE(UnigramSampler);

/// The candidates of every query are the targets of the whole batch, with log_count = log(Q p_i), p_i = counts_i / total streamed over
/// the training batches (the batch at hand included, in train() mode). This q is an estimate. `num_samples` and `generator` are
/// ignored; `target` is needed and `shared` must be true. Buffers: counts int64 [N], total int64.
class InBatchSamplerImpl : public SamplerImpl {
 public:
  explicit InBatchSamplerImpl(int64_t num_classes);

  Proposal sample(const torch::Tensor& input, int64_t num_samples, bool shared,
                  const std::optional<torch::Tensor>& target = std::nullopt,
                  std::optional<at::Generator> generator = std::nullopt) override;
  torch::Tensor log_prob(const torch::Tensor& input, const torch::Tensor& ids) override;
  bool proposes_targets() const override { return true; }

  /// Only the device of the counts moves: they stay int64.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  torch::Tensor counts, total;

 private:
  torch::Tensor log_q(const torch::Tensor& ids);
};
TORCH_MODULE(InBatchSampler);

/// A sampler by name: "uniform", "log_uniform", "unigram" (needs counts) or "in_batch" (takes no options).
std::shared_ptr<SamplerImpl> make_sampler(const std::string& name, int64_t num_classes, const StaticOptions& options = {},
                                          const std::optional<torch::Tensor>& counts = std::nullopt, double power = 0.75);

} // namespace xsoftmax::samplers
