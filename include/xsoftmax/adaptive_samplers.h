#pragma once

// Samplers that follow the class table: MIDX, LSH and kernel samplers. Draws and state names equal
// those in Python.

#include <xsoftmax/options.h>
#include <xsoftmax/sampler.h>

#include <vector>

namespace xsoftmax::samplers {

/// Base class of samplers whose distribution q follows the class table through an index.
///
/// `prepare` refreshes the index at step 0, then at growing intervals up to step `refresh_every`,
/// then at the multiples of `refresh_every` (0: only at step 0). Expected counts come from the same
/// index, so they are exact for the draws even while the index is stale. Throws ValueError for a
/// table whose bias does not match the option `bias`, and for a table with NaN or infinite values;
/// the index, the step and the generator then keep their state.
class AdaptiveSamplerImpl : public DescribedSamplerImpl {
 public:
  std::string describe() const override {
    return family_.name + ":" + std::to_string(tables_.size()) + ":" + options_;
  }
  std::vector<torch::Tensor> state_tensors() const override { return tables_; }
  std::map<std::string, double> refresh(
      const torch::Tensor& weight,
      const std::optional<torch::Tensor>& bias = std::nullopt) override;
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;
  bool follows_table() const override { return true; }
  /// Assigns new classes to the existing codewords, planes or directions, in O(N), reading only the
  /// new rows. Without the rows of new classes, or before the first refresh, all classes are drawn
  /// uniformly until the next step refreshes the index.
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows,
                                    const std::optional<torch::Tensor>& bias) override;
  /// Loads the index. An index that is missing, or was built with other options or another head, is
  /// rebuilt by the next step.
  void load(torch::serialize::InputArchive& archive) override;
  /// Grows the index in O(new classes), for samplers with private draws with replacement except
  /// ExactMidxSampler. New classes are assigned as by plan_resize, and each is drawn with the
  /// probability of a uniform draw until the index is next rebuilt: by a refresh, by an update, or
  /// once a quarter as many classes have been added.
  std::function<void()> plan_growth(int64_t num_classes, const torch::Tensor& rows,
                                    const std::optional<torch::Tensor>& bias) override;
  using SamplerImpl::to;
  /// Moves the index, except for `recent` and `step`, which stay on the CPU because every training
  /// step reads them.
  void to(torch::Device device, bool non_blocking = false) override;

  /// Returns a table of the index by its state name.
  torch::Tensor table(const std::string& name) const;
  /// Returns the ids of the classes that are never drawn, int64.
  torch::Tensor excluded() const;

 protected:
  /// Describes a family of samplers: the prefix of its operators, the names of its tables, the name
  /// of the table [num_classes] that is negative for an excluded class, and the names of the
  /// statistics that a refresh returns.
  struct Family {
    std::string name;
    std::vector<std::string> tables;
    std::string places;
    std::vector<std::string> statistics;
    std::vector<std::string> learnt = {}; ///< names of the tables that are parameters
  };

  AdaptiveSamplerImpl(const char* name, Family family, int64_t num_classes, int64_t dim,
                      int64_t num_samples, bool shared, bool distinct, const torch::Tensor& exclude,
                      std::string options);
  /// Constructs a sampler with the same options that never draws `exclude`.
  virtual std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const = 0;
  /// Returns the index without its last table, `step`, as the operators that modify it take it.
  std::vector<torch::Tensor> tables() const;
  const std::string& options() const { return options_; }
  int64_t dim() const { return dim_; }

 private:
  Family family_;
  int64_t dim_;
  std::string options_;
  std::vector<torch::Tensor> tables_;
};

/// Draws classes by their scores under a quantised copy of the class table (fast MIDX, Theorem 2 of
/// Chen et al., 2025).
class MidxSamplerImpl : public AdaptiveSamplerImpl {
 public:
  MidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options = {});

  /// Reassigns the classes `rows` (int64 [R]) to codewords under the current codebooks, and reads
  /// all biases.
  void update(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
              const torch::Tensor& rows);

 protected:
  MidxSamplerImpl(const char* name, const char* form, int64_t num_classes, int64_t dim,
                  MidxOptions options);
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override;
  const MidxOptions& midx_options() const { return midx_options_; }
  template <typename Sampler>
  std::shared_ptr<AdaptiveSamplerImpl> like_this(const torch::Tensor& exclude) const {
    MidxOptions options = midx_options_;
    options.exclude = exclude;
    return std::make_shared<Sampler>(num_classes(), dim(), options);
  }

 private:
  MidxOptions midx_options_;
};
class MidxSampler : public Holder<MidxSamplerImpl> {
 public:
  using Holder::Holder;
  MidxSampler(int64_t num_classes, int64_t dim, const MidxOptions& options = {})
      : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit MidxSampler(...) = delete; // expected: num_classes, dim[, MidxOptions]
};

/// Draws from the exact softmax (Theorem 1 of Chen et al., 2025). Every training step copies the
/// table, and a query costs O(N D). Draws are private and with replacement.
class ExactMidxSamplerImpl : public MidxSamplerImpl {
 public:
  ExactMidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options = {});

 protected:
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override {
    return like_this<ExactMidxSamplerImpl>(exclude);
  }
};
class ExactMidxSampler : public Holder<ExactMidxSamplerImpl> {
 public:
  using Holder::Holder;
  ExactMidxSampler(int64_t num_classes, int64_t dim, const MidxOptions& options = {})
      : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit ExactMidxSampler(...) = delete; // expected: num_classes, dim[, MidxOptions]
};

/// Draws more often the classes that their codewords approximate badly, by how far their scores may
/// be off.
class SpreadMidxSamplerImpl : public MidxSamplerImpl {
 public:
  SpreadMidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options = {});

 protected:
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override {
    return like_this<SpreadMidxSamplerImpl>(exclude);
  }
};
class SpreadMidxSampler : public Holder<SpreadMidxSamplerImpl> {
 public:
  using Holder::Holder;
  SpreadMidxSampler(int64_t num_classes, int64_t dim, const MidxOptions& options = {})
      : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit SpreadMidxSampler(...) = delete; // expected: num_classes, dim[, MidxOptions]
};

/// A MIDX sampler whose codewords are parameters. A refresh reassigns the classes to the current
/// codewords.
class LearnableMidxSamplerImpl : public MidxSamplerImpl {
 public:
  LearnableMidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options = {},
                           int64_t learn_rows = 1024);

  /// Returns the loss that trains the codewords, a scalar to add to the training loss. It is
  /// computed over learn_rows classes, drawn anew in each call. Queries that are all zeros are
  /// ignored.
  torch::Tensor codebook_loss(const torch::Tensor& queries, const torch::Tensor& weight,
                              const std::optional<torch::Tensor>& bias,
                              std::optional<at::Generator> generator = std::nullopt);

 protected:
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override;

 private:
  int64_t learn_rows_;
};
class LearnableMidxSampler : public Holder<LearnableMidxSamplerImpl> {
 public:
  using Holder::Holder;
  LearnableMidxSampler(int64_t num_classes, int64_t dim, const MidxOptions& options = {},
                       int64_t learn_rows = 1024)
      : Holder(std::make_shared<Impl>(num_classes, dim, options, learn_rows)) {}
  explicit LearnableMidxSampler(...) = delete; // expected: num_classes, dim[, options, learn_rows]
};

/// Draws classes that share a bucket with the query in one of several hash tables. Draws are
/// private and with replacement.
class LshSamplerImpl : public AdaptiveSamplerImpl {
 public:
  LshSamplerImpl(int64_t num_classes, int64_t dim, const LshOptions& options = {});

 protected:
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override;

 private:
  LshOptions lsh_options_;
};
class LshSampler : public Holder<LshSamplerImpl> {
 public:
  using Holder::Holder;
  LshSampler(int64_t num_classes, int64_t dim, const LshOptions& options = {})
      : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit LshSampler(...) = delete; // expected: num_classes, dim[, LshOptions]
};

/// Base class of samplers that draw in proportion to a kernel, through a binary tree of feature
/// sums. Draws are private and with replacement.
class KernelSamplerImpl : public AdaptiveSamplerImpl {
 protected:
  KernelSamplerImpl(const char* name, const char* kernel, int64_t num_classes, int64_t dim,
                    KernelOptions options);
  KernelOptions kernel_options_;
};

/// Draws classes with q_i proportional to alpha s_i^2 + 1, where s_i is the score.
class SphereSamplerImpl : public KernelSamplerImpl {
 public:
  SphereSamplerImpl(int64_t num_classes, int64_t dim, const KernelOptions& options = {})
      : KernelSamplerImpl("SphereSampler", "sphere", num_classes, dim, options) {}

 protected:
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override;
};
class SphereSampler : public Holder<SphereSamplerImpl> {
 public:
  using Holder::Holder;
  SphereSampler(int64_t num_classes, int64_t dim, const KernelOptions& options = {})
      : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit SphereSampler(...) = delete; // expected: num_classes, dim[, KernelOptions]
};

/// Draws classes with q_i proportional to a Gaussian kernel on normalised vectors, approximated
/// with random Fourier features.
class RffSamplerImpl : public KernelSamplerImpl {
 public:
  RffSamplerImpl(int64_t num_classes, int64_t dim, const KernelOptions& options = {})
      : KernelSamplerImpl("RffSampler", "rff", num_classes, dim, options) {}

 protected:
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override;
};
class RffSampler : public Holder<RffSamplerImpl> {
 public:
  using Holder::Holder;
  RffSampler(int64_t num_classes, int64_t dim, const KernelOptions& options = {})
      : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit RffSampler(...) = delete; // expected: num_classes, dim[, KernelOptions]
};

} // namespace xsoftmax::samplers
