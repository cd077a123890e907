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
#include <utility>
#include <vector>

namespace xsoftmax::samplers {

/// Classes to score, and the expected count of each: a candidate weighs 1 / expected count in an estimate of a sum over all classes.
struct Proposal {
  torch::Tensor ids;              ///< int64, [M] shared by the batch or [Q, M] private to each query
  torch::Tensor log_count;        ///< float32, the shape of ids: log(M q) of independent draws, log pi of distinct ones
  torch::Tensor target_log_count; ///< float32 [Q], the same for the targets; undefined where none were given
  bool distinct = false;          ///< no class stands twice in a set
  torch::Tensor shared_ids;       ///< int64 [S]: classes for all queries beside private ids; only of a union, as the rest
  torch::Tensor shared_log_count; ///< float32 [S] or [Q, S], their log counts
  int64_t shared_distinct = 0;    ///< how many of the first shared_ids are drawn without replacement
  torch::Tensor target_log_draws; ///< float32 [Q]: the targets' log counts among independent draws; target_log_count: among all
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
  /// Adapts the sampler to the class table `weight` [N, D], `bias` [N], and returns statistics. A static sampler has nothing to do.
  virtual std::map<std::string, double> refresh(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias = std::nullopt);
  /// What a loss calls before it draws while training: an adaptive sampler refreshes itself here when its time has come.
  virtual void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
                       std::optional<at::Generator> generator = std::nullopt);
  /// Whether there is an auxiliary_loss.
  virtual bool learns() const { return false; }
  /// Where draws that hit a target are dropped, whether the others may be renormalised by how many are left: all independent draws come
  /// from one distribution.
  virtual bool renormalises() const { return true; }
  /// What a sampler that learns would minimise, a scalar; a loss adds its gradient, not its value, while training. Undefined: nothing.
  /// Queries that do not count are zeros in `input`.
  virtual torch::Tensor auxiliary_loss(const torch::Tensor& input, const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
                                       std::optional<at::Generator> generator = std::nullopt);
  /// What a loss calls with the classes whose rows a step changes, int64 of any shape.
  virtual void note(const torch::Tensor& ids);
  /// Whether a set, shared or private, holds no class twice.
  virtual bool draws_distinct(bool shared) const { return false; }
  /// How many of num_samples are distinct ones, and how many independent.
  virtual std::pair<int64_t, int64_t> draws_by_kind(int64_t num_samples, bool shared) const {
    return draws_distinct(shared) ? std::pair{num_samples, int64_t(0)} : std::pair{int64_t(0), num_samples};
  }
  /// How many classes are ever drawn.
  virtual int64_t num_drawable() const { return num_classes_; }
  /// Throws ValueError where a set of `num_samples` different classes cannot be drawn: what a loss asks when it is built.
  virtual void check_num_samples(int64_t num_samples, bool shared) const;
  /// The log expected count of any `ids` in the draws that `sample` makes: of ids' shape, or [Q, S] for ids [S]. Throws ValueError where
  /// a sampler cannot tell.
  virtual torch::Tensor log_count(const torch::Tensor& input, int64_t num_samples, bool shared, const torch::Tensor& ids);
  /// Whether draws are best shared by the batch.
  virtual bool shared_by_default() const { return true; }
  /// Whether the candidates are the targets themselves: `sample` then takes -1 for a target that does not count, and gives it a log
  /// count of +inf: no candidate.
  virtual bool proposes_targets() const { return false; }
  /// Whether `sample` takes target [Q, T] where draws are private, several classes for each query, and counts them all.
  virtual bool counts_beside() const { return false; }
  /// A sampler like this one that never draws the classes `ids` (int64 [K]). Throws TypeError where that cannot be.
  virtual std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids);
  /// A sampler like this one for a class table of width `dim`, with or without a bias; null: this one does.
  virtual std::shared_ptr<SamplerImpl> for_table(int64_t dim, bool bias);

  /// Only the device of the tables moves: their precision stays.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  int64_t num_classes() const { return num_classes_; }

 protected:
  int64_t num_classes_;
};

/// Draws classes in proportion to fixed weights: q_i = w_i / sum(w), where excluded classes weigh 0. Independent draws take an alias
/// table; distinct ones are systematic, pi_i = min(1, c q_i) with sum pi = M. More distinct classes than have a weight throw ValueError.
///
/// Tables: probability float64 [N]; threshold, alias unless `distinct` is true; order, cumulative unless it is false. They follow from
/// the constructor's arguments, so a checkpoint does not hold them; `to` moves them.
class StaticSamplerImpl : public SamplerImpl {
 public:
  /// weights [N], N >= 1, any real dtype: finite, not negative, not all zero.
  explicit StaticSamplerImpl(const torch::Tensor& weights, const StaticOptions& options = {});

  Proposal sample(const torch::Tensor& input, int64_t num_samples, bool shared,
                  const std::optional<torch::Tensor>& target = std::nullopt,
                  std::optional<at::Generator> generator = std::nullopt) override;
  torch::Tensor log_prob(const torch::Tensor& input, const torch::Tensor& ids) override;
  bool draws_distinct(bool shared) const override { return distinct_.value_or(shared); }
  int64_t num_drawable() const override;
  torch::Tensor log_count(const torch::Tensor& input, int64_t num_samples, bool shared, const torch::Tensor& ids) override;

  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) override;

  using SamplerImpl::to;
  void to(torch::Device device, bool non_blocking = false) override;

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
  int64_t low_ = 0; ///< the classes below it are excluded, where no tables say so

 private:
  torch::Tensor scaled_count(const torch::Tensor& log_scale, const torch::Tensor& ids, bool distinct);
};
TORCH_MODULE(StaticSampler);

/// Every class that is not excluded alike. Without tables, whatever num_classes is, unless `exclude` names ids that are not 0, 1, ...
class UniformSamplerImpl : public StaticSamplerImpl {
 public:
  explicit UniformSamplerImpl(int64_t num_classes, const StaticOptions& options = {});

  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) override;
  /// Whether no class is excluded.
  bool draws_from_all() const { return low_ == 0 && !from_tables_; }

 protected:
  std::tuple<torch::Tensor, torch::Tensor> draw(const torch::Tensor& seed, std::optional<int64_t> num_queries, int64_t num_samples,
                                                bool distinct) override;
  torch::Tensor log_q(const torch::Tensor& ids) override;

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

  torch::Tensor counts, total;

 private:
  torch::Tensor log_q(const torch::Tensor& ids);
};
TORCH_MODULE(InBatchSampler);

/// Base of samplers whose q follows the class table, from an index that a loss brings up to date while training: at step 0, ever less often
/// up to step `refresh_every`, then at its multiples (0: never again). q is exact for what is drawn also while the table moves on. Draws
/// are private by default.
class AdaptiveSamplerImpl : public SamplerImpl {
 public:
  bool shared_by_default() const override { return false; }
  /// The classes that are never drawn, int64.
  virtual torch::Tensor excluded() const = 0;
  int64_t num_drawable() const override { return num_classes_ - excluded().size(0); }
  torch::Tensor log_count(const torch::Tensor& input, int64_t num_samples, bool shared, const torch::Tensor& ids) override;
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) override;
  std::shared_ptr<SamplerImpl> for_table(int64_t dim, bool bias) override;
  void check_num_samples(int64_t num_samples, bool shared) const override;
  /// An index that is not there, or that is one of other options or of another head, is built anew by the next step.
  void load(torch::serialize::InputArchive& archive) override;

  torch::Tensor step;

 protected:
  AdaptiveSamplerImpl(const char* name, int64_t num_classes, int64_t dim, bool bias);
  virtual std::shared_ptr<SamplerImpl> like(const torch::Tensor& excluded, bool bias) const = 0;
  /// Whether it can draw one set for the batch.
  virtual bool shares() const { return false; }
  void check_input(const torch::Tensor& input) const;
  void check_table(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias) const;

  const char* name_;
  int64_t dim_;
  bool bias_;
};

/// What MidxSampler takes beside the number of classes and their width; see xsoftmax.samplers.MidxSampler.
struct MidxOptions {
  int64_t codewords = 64;                 ///< K, in [1, 1024]
  std::string kind = "rq";                ///< or "pq"
  bool bias = false;                      ///< the class table has a bias; a loss sets it
  std::optional<bool> distinct = std::nullopt; ///< none: shared sets are distinct, private ones independent
  int64_t exclude_below = 0;
  std::optional<torch::Tensor> exclude = std::nullopt;
  std::string mixture = "mean";           ///< or "rms"
  int64_t refresh_every = 500;            ///< steps; 0: only at step 0
  int64_t update_every = 0;               ///< steps; 0: never
  int64_t iterations = 10;
  std::optional<int64_t> train_points = std::nullopt; ///< none: 256 a codeword
  bool spread = false;                    ///< classes that codewords describe badly weigh more, by what their score may be
  bool exact = false;                     ///< q is the softmax itself (Theorem 1), O(N D) a query: for study
  bool learnable = false;                 ///< the codewords are parameters, which a loss trains beside its own
  int64_t learn_rows = 1024;              ///< classes that learnable codebooks look at in a step
};

/// Draws classes by their scores under a quantised copy of the class table (fast MIDX, Theorem 2). Private draws by default; while
/// training, a loss refreshes the index by the schedule in the options. Buffers and draws as those of the class in Python.
class MidxSamplerImpl : public AdaptiveSamplerImpl {
 public:
  MidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options = {});

  Proposal sample(const torch::Tensor& input, int64_t num_samples, bool shared,
                  const std::optional<torch::Tensor>& target = std::nullopt,
                  std::optional<at::Generator> generator = std::nullopt) override;
  /// ids [S]: for every query, [Q, S]; ids [Q, P]: [Q, P].
  torch::Tensor log_prob(const torch::Tensor& input, const torch::Tensor& ids) override;
  /// log q of ids [S] in the mixture from which a shared set is drawn.
  torch::Tensor mixture_log_prob(const torch::Tensor& input, const torch::Tensor& ids);
  /// New codebooks, every class coded: "distortion", "mean_square", "inertia1", "inertia2", "cells".
  std::map<std::string, double> refresh(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias = std::nullopt) override;
  /// Codes the classes `rows` (int64 [R]) again under the present codebooks, and takes in all biases.
  void update(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias, const torch::Tensor& rows);
  void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
               std::optional<at::Generator> generator = std::nullopt) override;
  torch::Tensor auxiliary_loss(const torch::Tensor& input, const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
                               std::optional<at::Generator> generator = std::nullopt) override;
  bool learns() const override { return options_.learnable; }
  bool counts_beside() const override { return !options_.exact; }
  void note(const torch::Tensor& ids) override;
  bool draws_distinct(bool shared) const override { return options_.distinct.value_or(shared); }
  torch::Tensor log_count(const torch::Tensor& input, int64_t num_samples, bool shared, const torch::Tensor& ids) override;

  torch::Tensor codewords1, codewords2, cell, order, start, mass, log_weight, prefix, heaviest, table, table_bias, spread, query_square, touched;

 protected:
  bool shares() const override { return !options_.exact; }
  torch::Tensor excluded() const override;
  std::shared_ptr<SamplerImpl> like(const torch::Tensor& excluded, bool bias) const override;

 private:
  void copy_table(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias);

  MidxOptions options_;
};
TORCH_MODULE(MidxSampler);

/// What LshSampler takes; see xsoftmax.samplers.LshSampler.
struct LshOptions {
  int64_t tables = 16;
  int64_t bits = 4;     ///< in [1, 20]
  double uniform = 0.1; ///< the share of draws from all classes alike
  bool bias = false;    ///< the class table has a bias; a loss sets it
  int64_t exclude_below = 0;
  std::optional<torch::Tensor> exclude = std::nullopt;
  int64_t refresh_every = 500;
};

/// Draws classes that share a bucket with the query in one of several hash tables. Private independent draws only.
class LshSamplerImpl : public AdaptiveSamplerImpl {
 public:
  LshSamplerImpl(int64_t num_classes, int64_t dim, const LshOptions& options = {});

  Proposal sample(const torch::Tensor& input, int64_t num_samples, bool shared,
                  const std::optional<torch::Tensor>& target = std::nullopt,
                  std::optional<at::Generator> generator = std::nullopt) override;
  /// ids [S]: for every query, [Q, S]; ids [Q, P]: [Q, P].
  torch::Tensor log_prob(const torch::Tensor& input, const torch::Tensor& ids) override;
  /// Hashes every row. "largest": the share of the classes that the fullest bucket holds.
  std::map<std::string, double> refresh(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias = std::nullopt) override;
  void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
               std::optional<at::Generator> generator = std::nullopt) override;

  torch::Tensor planes, code, order, start;

 protected:
  torch::Tensor excluded() const override;
  std::shared_ptr<SamplerImpl> like(const torch::Tensor& excluded, bool bias) const override;

 private:
  LshOptions options_;
};
TORCH_MODULE(LshSampler);

/// Base of samplers with q in proportion to a kernel, drawn by a binary tree of feature sums. Private independent draws only.
class KernelSamplerImpl : public AdaptiveSamplerImpl {
 public:
  Proposal sample(const torch::Tensor& input, int64_t num_samples, bool shared,
                  const std::optional<torch::Tensor>& target = std::nullopt,
                  std::optional<at::Generator> generator = std::nullopt) override;
  /// ids [S]: for every query, [Q, S]; ids [Q, P]: [Q, P].
  torch::Tensor log_prob(const torch::Tensor& input, const torch::Tensor& ids) override;
  std::map<std::string, double> refresh(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias = std::nullopt) override;
  void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
               std::optional<at::Generator> generator = std::nullopt) override;

  torch::Tensor rows, sums, order, place, directions;

 protected:
  KernelSamplerImpl(const char* name, int64_t num_classes, int64_t dim, bool bias, int64_t refresh_every, double scale);
  torch::Tensor excluded() const override;
  void make_tree(int64_t exclude_below, const std::optional<torch::Tensor>& exclude, int64_t width, int64_t features, int64_t leaf_size);

 private:
  int64_t refresh_every_;
  double scale_;
};

/// What SphereSampler takes.
struct SphereOptions {
  double alpha = 100;
  bool bias = false; ///< the class table has a bias; a loss sets it
  int64_t exclude_below = 0;
  std::optional<torch::Tensor> exclude = std::nullopt;
  int64_t refresh_every = 500;
};

/// q_i in proportion to alpha s_i^2 + 1, s_i the score.
class SphereSamplerImpl : public KernelSamplerImpl {
 public:
  SphereSamplerImpl(int64_t num_classes, int64_t dim, const SphereOptions& options = {});

 protected:
  std::shared_ptr<SamplerImpl> like(const torch::Tensor& excluded, bool bias) const override;

 private:
  SphereOptions options_;
};
TORCH_MODULE(SphereSampler);

/// What RffSampler takes; see xsoftmax.samplers.RffSampler.
struct RffOptions {
  int64_t features = 32;
  double tau = 4;
  double floor = 0.01;
  bool bias = false; ///< the class table has a bias; a loss sets it
  int64_t exclude_below = 0;
  std::optional<torch::Tensor> exclude = std::nullopt;
  int64_t refresh_every = 500;
};

/// Random Fourier features of the Gaussian kernel on normalised vectors.
class RffSamplerImpl : public KernelSamplerImpl {
 public:
  RffSamplerImpl(int64_t num_classes, int64_t dim, const RffOptions& options = {});

 protected:
  std::shared_ptr<SamplerImpl> like(const torch::Tensor& excluded, bool bias) const override;

 private:
  RffOptions options_;
};
TORCH_MODULE(RffSampler);

/// The draws of several samplers together; expected counts add up (the balance heuristic). Each draws as suits it, shared or private;
/// num_samples and `shared` of `sample` are ignored, and a loss is given shared = false.
class UnionSamplerImpl : public SamplerImpl {
 public:
  using Part = std::pair<std::shared_ptr<SamplerImpl>, int64_t>; ///< and how many it draws

  explicit UnionSamplerImpl(std::vector<Part> parts);

  Proposal sample(const torch::Tensor& input, int64_t num_samples, bool shared,
                  const std::optional<torch::Tensor>& target = std::nullopt,
                  std::optional<at::Generator> generator = std::nullopt) override;
  torch::Tensor log_prob(const torch::Tensor& input, const torch::Tensor& ids) override;
  /// Of every part; their statistics by the number of the part: "1.distortion".
  std::map<std::string, double> refresh(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias = std::nullopt) override;
  void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
               std::optional<at::Generator> generator = std::nullopt) override;
  torch::Tensor auxiliary_loss(const torch::Tensor& input, const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
                               std::optional<at::Generator> generator = std::nullopt) override;
  bool learns() const override;
  bool renormalises() const override;
  std::pair<int64_t, int64_t> draws_by_kind(int64_t num_samples, bool shared) const override;
  void note(const torch::Tensor& ids) override;
  bool shared_by_default() const override { return false; }
  void check_num_samples(int64_t num_samples, bool shared) const override;
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) override;
  std::shared_ptr<SamplerImpl> for_table(int64_t dim, bool bias) override;

 private:
  std::vector<Part> parts_;
};
TORCH_MODULE(UnionSampler);

/// A sampler by name: "uniform", "log_uniform", "unigram" (needs counts) or "in_batch" (takes no options).
std::shared_ptr<SamplerImpl> make_sampler(const std::string& name, int64_t num_classes, const StaticOptions& options = {},
                                          const std::optional<torch::Tensor>& counts = std::nullopt, double power = 0.75);
/// One that follows a class table of width `dim`, with its default options: "midx", "lsh", "sphere" or "rff".
std::shared_ptr<SamplerImpl> make_sampler(const std::string& name, int64_t num_classes, int64_t dim);

/// Draws of a sampler restricted to the classes outside a set of its own for each query: the noise of CANE. A draw is made up to `tries`
/// times, until it is outside; if none is, it is uniform over the classes outside: q_x(j) = q_j (1 + f + ... + f^(tries - 1)) +
/// f^tries / (N - |C|), f the mass that q gives the set C.
class ComplementSampler {
 public:
  explicit ComplementSampler(std::shared_ptr<SamplerImpl> sampler, int64_t tries = 4);

  /// Independent private draws, log counts log(num_samples q_x). candidates int64 [C] or [Q, C], no class twice in a set, -1 where there is
  /// none; target int64 [Q]: its log count means nothing inside the set. Where nothing is outside: log counts of +inf.
  Proposal sample(const torch::Tensor& input, int64_t num_samples, const torch::Tensor& candidates, const torch::Tensor& target,
                  std::optional<at::Generator> generator = std::nullopt) const;

  const std::shared_ptr<SamplerImpl>& sampler() const { return sampler_; }

 private:
  std::shared_ptr<SamplerImpl> sampler_;
  int64_t tries_;
};

} // namespace xsoftmax::samplers
