#pragma once

// Samplers whose draws follow the class table: MIDX, LSH, kernels. The same as in Python: same draws, same names of state.

#include <xsoftmax/adaptive_options.h>
#include <xsoftmax/sampler.h>

#include <vector>

namespace xsoftmax::samplers {

/// Base of samplers whose q follows the class table, from an index that `prepare` brings up to date: at step 0, ever less often up to step
/// `refresh_every`, then at its multiples (0: never again). Counts are exact for what is drawn also while the table moves on. A table with a
/// bias where the options say none, or the other way round, is a ValueError; so is one with a NaN or an infinity, which leaves the index, the
/// step and the generator as they were.
class AdaptiveSamplerImpl : public DescribedSamplerImpl {
 public:
  std::string describe() const override { return family_.name + ":" + std::to_string(tables_.size()) + ":" + options_; }
  std::vector<torch::Tensor> state_tensors() const override { return tables_; }
  std::map<std::string, double> refresh(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias = std::nullopt) override;
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;
  /// "ranking" for private independent draws.
  std::string default_estimator() const override { return shared() || distinct() ? "sampled_softmax" : "ranking"; }
  bool follows_table() const override { return true; }
  /// New classes are placed under the codewords, planes or directions that the sampler has; without their rows, and before the first refresh, all classes are
  /// drawn alike until the next step refreshes. O(N), no pass over rows but the new ones.
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias) override;
  /// An index that is not there, or that is one of other options or of another head, is built anew by the next step.
  void load(torch::serialize::InputArchive& archive) override;
  /// Private independent draws (but of the exact form of MIDX): new classes are placed as by plan_resize, and drawn evenly, each as if all classes were, until
  /// the index is next laid out: by a refresh, an update, or where a quarter as many would have come. O(the new classes).
  std::function<void()> plan_growth(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias) override;
  using SamplerImpl::to;
  /// `recent` and `step` stay on the CPU: every step of training reads them.
  void to(torch::Device device, bool non_blocking = false) override;

  /// A table of the index, by the name that it has in the state.
  torch::Tensor table(const std::string& name) const;
  /// The classes that are never drawn, int64.
  torch::Tensor excluded() const;

 protected:
  /// What a family of samplers calls its operators, its tables, the one of [num_classes] that is negative for an excluded class, and the
  /// statistics of a refresh.
  struct Family {
    std::string name;
    std::vector<std::string> tables;
    std::string places;
    std::vector<std::string> statistics;
    std::vector<std::string> learnt = {}; ///< tables that are parameters
  };

  AdaptiveSamplerImpl(const char* name, Family family, int64_t num_classes, int64_t dim, int64_t num_samples, bool shared, bool distinct,
                      const torch::Tensor& exclude, std::string options);
  /// A sampler with these options that never draws `exclude`.
  virtual std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const = 0;
  /// The index without its last table, `step`: what operators take that write to it.
  std::vector<torch::Tensor> tables() const;
  const std::string& options() const { return options_; }
  int64_t dim() const { return dim_; }

 private:
  Family family_;
  int64_t dim_;
  std::string options_;
  std::vector<torch::Tensor> tables_;
};

/// Draws classes by their scores under a quantised copy of the class table (fast MIDX, Theorem 2).
class MidxSamplerImpl : public AdaptiveSamplerImpl {
 public:
  MidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options = {});

  /// Codes the classes `rows` (int64 [R]) again under the present codebooks, and takes in all biases.
  void update(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias, const torch::Tensor& rows);

 protected:
  MidxSamplerImpl(const char* name, const char* form, int64_t num_classes, int64_t dim, MidxOptions options);
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
  MidxSampler(int64_t num_classes, int64_t dim, const MidxOptions& options = {}) : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit MidxSampler(...) = delete; // expected: num_classes, dim[, MidxOptions]
};

/// Theorem 1: q is the softmax itself, from a copy of the table that each training step renews, at O(N D) a query. Private independent draws.
class ExactMidxSamplerImpl : public MidxSamplerImpl {
 public:
  ExactMidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options = {});

 protected:
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override { return like_this<ExactMidxSamplerImpl>(exclude); }
};
class ExactMidxSampler : public Holder<ExactMidxSamplerImpl> {
 public:
  using Holder::Holder;
  ExactMidxSampler(int64_t num_classes, int64_t dim, const MidxOptions& options = {}) : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit ExactMidxSampler(...) = delete; // expected: num_classes, dim[, MidxOptions]
};

/// Classes that the codewords describe badly are drawn more often, by what their score may be.
class SpreadMidxSamplerImpl : public MidxSamplerImpl {
 public:
  SpreadMidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options = {});

 protected:
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override { return like_this<SpreadMidxSamplerImpl>(exclude); }
};
class SpreadMidxSampler : public Holder<SpreadMidxSamplerImpl> {
 public:
  using Holder::Holder;
  SpreadMidxSampler(int64_t num_classes, int64_t dim, const MidxOptions& options = {}) : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit SpreadMidxSampler(...) = delete; // expected: num_classes, dim[, MidxOptions]
};

/// The codewords are parameters; a refresh codes the classes anew under what they have become.
class LearnableMidxSamplerImpl : public MidxSamplerImpl {
 public:
  LearnableMidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options = {}, int64_t learn_rows = 1024);

  /// What the codewords minimise, over learn_rows classes drawn anew: add it to the loss. A scalar; queries of zeros do not count.
  torch::Tensor codebook_loss(const torch::Tensor& queries, const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
                              std::optional<at::Generator> generator = std::nullopt);

 protected:
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override;

 private:
  int64_t learn_rows_;
};
class LearnableMidxSampler : public Holder<LearnableMidxSamplerImpl> {
 public:
  using Holder::Holder;
  LearnableMidxSampler(int64_t num_classes, int64_t dim, const MidxOptions& options = {}, int64_t learn_rows = 1024)
      : Holder(std::make_shared<Impl>(num_classes, dim, options, learn_rows)) {}
  explicit LearnableMidxSampler(...) = delete; // expected: num_classes, dim[, MidxOptions[, learn_rows]]
};

/// Draws classes that share a bucket with the query in one of several hash tables. Private independent draws.
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
  LshSampler(int64_t num_classes, int64_t dim, const LshOptions& options = {}) : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit LshSampler(...) = delete; // expected: num_classes, dim[, LshOptions]
};

/// Base of samplers with q in proportion to a kernel, drawn by a binary tree of feature sums. Private independent draws.
class KernelSamplerImpl : public AdaptiveSamplerImpl {
 protected:
  KernelSamplerImpl(const char* name, const char* kernel, int64_t num_classes, int64_t dim, KernelOptions options);
  KernelOptions kernel_options_;
};

/// q_i in proportion to alpha s_i^2 + 1, s_i the score.
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
  SphereSampler(int64_t num_classes, int64_t dim, const KernelOptions& options = {}) : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit SphereSampler(...) = delete; // expected: num_classes, dim[, KernelOptions]
};

/// Random Fourier features of the Gaussian kernel on normalised vectors.
class RffSamplerImpl : public KernelSamplerImpl {
 public:
  RffSamplerImpl(int64_t num_classes, int64_t dim, const KernelOptions& options = {}) : KernelSamplerImpl("RffSampler", "rff", num_classes, dim, options) {}

 protected:
  std::shared_ptr<AdaptiveSamplerImpl> like(const torch::Tensor& exclude) const override;
};
class RffSampler : public Holder<RffSamplerImpl> {
 public:
  using Holder::Holder;
  RffSampler(int64_t num_classes, int64_t dim, const KernelOptions& options = {}) : Holder(std::make_shared<Impl>(num_classes, dim, options)) {}
  explicit RffSampler(...) = delete; // expected: num_classes, dim[, KernelOptions]
};

} // namespace xsoftmax::samplers
