#pragma once

// The base classes of samplers. A sampler is a module that proposes candidate classes and reports
// the expected count of each. Derive custom samplers from SamplerImpl.

#include <xsoftmax/holder.h>
#include <xsoftmax/ops.h>

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace xsoftmax::samplers {

/// Base class of modules whose buffers are lookup tables.
class TableBuffers : public torch::nn::Module {
 public:
  using Module::Module;

  /// Loads the module's state. An archive without it, or with the state of another module, leaves
  /// the buffers unchanged, so a checkpoint of a class table loads into any loss.
  void load(torch::serialize::InputArchive& archive) override;
  /// Moves the buffers to another device. Their dtypes never change, because counts and tables do
  /// not depend on the dtype of the loss.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
};

/// Base class of all samplers. Subclasses override `sample` and `log_count`, and also `prepare` if
/// the sampler follows the class table.
class SamplerImpl : public TableBuffers {
 public:
  /// Value of num_samples for samplers whose number of draws depends on the batch.
  static constexpr int64_t kOfBatch = -1;

  /// Constructs the base of a sampler.
  ///
  /// - num_classes: N, at least 1.
  /// - num_samples: draws for the batch (shared) or per query; kOfBatch if the batch decides.
  /// - shared: whether the batch shares one set of candidates; if false, each query has its own
  ///   set.
  /// - distinct: whether classes are sampled without replacement, so that no class appears twice in
  ///   a set.
  SamplerImpl(std::string name, int64_t num_classes, int64_t num_samples, bool shared,
              bool distinct = false);

  /// Draws the candidates of one step.
  ///
  /// - queries: floating [Q, D], zeros for ignored queries.
  /// - target: int64 [Q], -1 for ignored queries; or [Q, T] for several classes per query. If
  ///   defined, the sets also hold the expected counts of these classes. Undefined: no query is
  ///   ignored.
  /// - generator: on the device of queries; nullopt: the default generator. Each call draws one
  ///   int64 from it.
  virtual Proposal sample(const torch::Tensor& queries, const torch::Tensor& target = {},
                          std::optional<at::Generator> generator = std::nullopt) = 0;
  /// Returns the log expected count of the given classes in a draw of `sample`, in float32; -inf
  /// for a class that is never drawn.
  ///
  /// - ids: int64 [S] or [Q, P].
  ///
  /// The result is [S] for ids [S], or [Q, S] if the counts depend on the query, and [Q, P] for ids
  /// [Q, P].
  virtual torch::Tensor log_count(const torch::Tensor& queries, const torch::Tensor& ids) = 0;
  /// Brings a sampler that follows the class table up to date. Losses call it in train() before
  /// each draw. weight [N, D] and bias [N] are the class table. The default does nothing.
  virtual void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
                       std::optional<at::Generator> generator = std::nullopt);
  /// Rebuilds the sampler from the class table immediately, whatever its schedule. Returns
  /// statistics by name.
  virtual std::map<std::string, double> refresh(
      const torch::Tensor& weight, const std::optional<torch::Tensor>& bias = std::nullopt);
  /// Changes the number of classes. Removed classes are never drawn again; each sampler documents
  /// how it draws new classes. An error changes nothing.
  ///
  /// - num_classes: the new number of classes, at least 1.
  /// - rows: [A, D], the class table's rows of the A new classes, for samplers that follow the
  ///   table.
  /// - bias: [num_classes], the biases of all classes.
  void resize(int64_t num_classes, const torch::Tensor& rows = {},
              const std::optional<torch::Tensor>& bias = std::nullopt);
  /// Returns a function that grows the sampler in O(A) for A new classes. `bias` [A] covers the new
  /// classes only. Returns an empty function if only plan_resize can resize the sampler. By
  /// default, samplers that do not follow the table return plan_resize.
  virtual std::function<void()> plan_growth(int64_t num_classes, const torch::Tensor& rows,
                                            const std::optional<torch::Tensor>& bias);
  /// Checks all arguments, then returns a function that resizes the sampler and cannot fail.
  /// Override it in custom samplers that support resizing, and call set_num_classes in the returned
  /// function. The default throws.
  virtual std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows,
                                            const std::optional<torch::Tensor>& bias);
  /// Returns a sampler like this one that also never draws the classes `ids`. Returns null if the
  /// sampler cannot exclude classes; expected counts then add up.
  virtual std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const;
  /// Returns a sampler that draws from this sampler's distribution restricted to classes other than
  /// the target, as the estimator "complementary_sum" needs. The new sampler takes ownership of
  /// this one.
  virtual std::shared_ptr<SamplerImpl> outside_target();
  /// Returns the estimator that suits this sampler's draws: "ranking" for private draws with
  /// replacement, which are usually few, so that each has a large weight; else "sampled_softmax".
  virtual std::string default_estimator() const {
    return shared() || distinct() ? "sampled_softmax" : "ranking";
  }
  /// Whether the sampler overrides `prepare`. Such a sampler works only with losses that have a
  /// class table.
  virtual bool follows_table() const { return false; }

  int64_t num_classes() const { return num_classes_; }
  int64_t num_samples() const { return num_samples_; }
  bool shared() const { return shared_; }
  bool distinct() const { return distinct_; }
  /// Whether any of its sets is drawn without replacement (has_distinct) or with replacement
  /// (has_independent). Only a union can have both kinds.
  virtual bool has_distinct() const { return distinct_; }
  virtual bool has_independent() const { return !distinct_; }

  /// Registers the loss that uses this sampler. A sampler belongs to one loss: a second call
  /// throws.
  void claim(const std::string& owner);
  bool claimed() const { return !owner_.empty(); }

 protected:
  void set_num_classes(int64_t num_classes) { num_classes_ = num_classes; }

 private:
  int64_t num_classes_, num_samples_;
  bool shared_, distinct_;
  std::string owner_;
};

/// Holds a sampler of any class, or none. It converts from any holder of a sampler, including those
/// that TORCH_MODULE defines, and from a pointer. Functions that take a sampler take this type.
class Sampler : public Holder<SamplerImpl> {
 public:
  using Holder::Holder;
  Sampler() : Holder(nullptr) {}
  template <std::derived_from<SamplerImpl> Derived>
  Sampler(const torch::nn::ModuleHolder<Derived>& sampler)
      : Holder(sampler.is_empty() ? nullptr : std::shared_ptr<SamplerImpl>(sampler.ptr())) {}
  template <std::derived_from<SamplerImpl> Derived>
  Sampler(std::shared_ptr<Derived> sampler)
      : Holder(std::shared_ptr<SamplerImpl>(std::move(sampler))) {}

  /// Returns the pointer, or null if there is no sampler.
  const std::shared_ptr<SamplerImpl>& or_null() const { return impl_; }
};

/// Holds a sampler, or the name of a sampler that the loss constructs. An option of this type
/// accepts both `UniformSampler(n, 20)` and "log_uniform".
class SamplerOrName : public Sampler {
 public:
  using Sampler::Sampler;
  SamplerOrName() = default;
  SamplerOrName(const Sampler& sampler) : Sampler(sampler) {}
  SamplerOrName(std::string name) : name_(std::move(name)) {}
  SamplerOrName(const char* name) : name_(name) {}

  /// Returns the name, empty if there is none.
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

/// Base class of the library's samplers. Each is a text description and a list of tensors;
/// operators draw from these.
class DescribedSamplerImpl : public SamplerImpl {
 public:
  using SamplerImpl::SamplerImpl;

  Proposal sample(const torch::Tensor& queries, const torch::Tensor& target = {},
                  std::optional<at::Generator> generator = std::nullopt) override;
  torch::Tensor log_count(const torch::Tensor& queries, const torch::Tensor& ids) override;
  void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
               std::optional<at::Generator> generator = std::nullopt) override;

  /// Returns the description that operators take: "kind:number of tensors:options".
  virtual std::string describe() const = 0;
  virtual std::vector<torch::Tensor> state_tensors() const = 0;
};

/// Arguments from which make_sampler constructs a sampler by name.
struct SamplerRequest {
  int64_t num_classes = 0;
  std::optional<int64_t> num_samples = std::nullopt; ///< nullopt: the sampler's default
  int64_t dim = 0; ///< width of the class table
  bool bias = false;
  std::optional<bool> shared = std::nullopt; ///< nullopt: the sampler's default
  torch::Tensor exclude = {}; ///< int64 [K], classes that are never drawn
  torch::Tensor counts = {}; ///< [num_classes], for "unigram" only
};

/// Registers `factory` under a name, for later calls of make_sampler. Built-in names are those of
/// Python.
void register_sampler(const std::string& name,
                      std::function<std::shared_ptr<SamplerImpl>(const SamplerRequest&)> factory);
/// Constructs a sampler by name: "uniform", "log_uniform", "unigram" (needs counts), "in_batch",
/// "midx", "lsh", "sphere", "rff", or a name passed to register_sampler.
std::shared_ptr<SamplerImpl> make_sampler(const std::string& name, const SamplerRequest& request);

/// Draws classes outside the target, or outside a set of candidates: the complementary sums of
/// Botev et al. (2017), and the noise of CANE.
///
/// Each sample is redrawn from `sampler` up to `tries` times until it falls outside. If every try
/// falls inside, the sample is uniform over the classes outside. With f the probability that q
/// assigns to the set C, the distribution is
///
///     q_x(j) = q_j (1 + f + ... + f^(tries - 1)) + f^tries / (N - |C|)
///
/// Draws are private to each query and with replacement.
class ComplementSamplerImpl : public SamplerImpl {
 public:
  /// Draws from `sampler`, which must make private draws with replacement, tries * num_samples of
  /// them per query. The new sampler takes ownership of `sampler`.
  ComplementSamplerImpl(std::shared_ptr<SamplerImpl> sampler, int64_t num_samples);
  /// Draws uniformly from the classes outside.
  ComplementSamplerImpl(int64_t num_classes, int64_t num_samples);

  /// Draws classes other than the target. With several targets per query, only the first is
  /// excluded.
  Proposal sample(const torch::Tensor& queries, const torch::Tensor& target = {},
                  std::optional<at::Generator> generator = {}) override;
  /// Draws classes outside `candidates`, int64 [C] or [Q, C], with no class repeated within a set
  /// and -1 as padding. Log counts are +inf for a query without classes outside, and the target log
  /// count is -inf for a target inside.
  CandidateSet sample_outside(const torch::Tensor& queries, const torch::Tensor& candidates,
                              const torch::Tensor& target = {},
                              std::optional<at::Generator> generator = {});
  /// Throws, because the counts depend on the target and only a draw knows them.
  torch::Tensor log_count(const torch::Tensor& queries, const torch::Tensor& ids) override;
  std::shared_ptr<SamplerImpl> outside_target() override {
    return std::static_pointer_cast<SamplerImpl>(shared_from_this());
  }
  /// Returns "sampled_softmax", since the target is never drawn.
  std::string default_estimator() const override { return "sampled_softmax"; }
  std::function<void()> plan_growth(int64_t num_classes, const torch::Tensor& rows,
                                    const std::optional<torch::Tensor>& bias) override;
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows,
                                    const std::optional<torch::Tensor>& bias) override;
  bool follows_table() const override { return sampler_ != nullptr && sampler_->follows_table(); }
  void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
               std::optional<at::Generator> generator = {}) override;
  std::map<std::string, double> refresh(const torch::Tensor& weight,
                                        const std::optional<torch::Tensor>& bias = {}) override;

 private:
  // runs `plan` and the plan of sampler_, if any
  std::function<void()> planned(int64_t num_classes, std::function<void()> plan);

  std::shared_ptr<SamplerImpl> sampler_; // null: uniform
  std::string options_;
};
class ComplementSampler : public Holder<ComplementSamplerImpl> {
 public:
  using Holder::Holder;
  ComplementSampler(const Sampler& sampler, int64_t num_samples)
      : Holder(std::make_shared<Impl>(sampler.or_null(), num_samples)) {}
  ComplementSampler(int64_t num_classes, int64_t num_samples)
      : Holder(std::make_shared<Impl>(num_classes, num_samples)) {}
  explicit ComplementSampler(...) = delete; // expected: a sampler or num_classes, num_samples
};

/// Draws from several samplers and merges their sets. A class's expected count is the sum of its
/// expected counts under all samplers, whichever one drew it (the balance heuristic). State:
/// parts.0, parts.1, ...
///
/// Shared parts draw first, then private parts one after another, with private parts without
/// replacement last. While a private part draws, it also computes its expected counts of the ids
/// that earlier parts drew. A part whose counts only a draw knows can therefore be the last part of
/// a union.
class UnionSamplerImpl : public SamplerImpl {
 public:
  /// Takes ownership of at least one sampler, all over the same number of classes.
  explicit UnionSamplerImpl(std::vector<std::shared_ptr<SamplerImpl>> parts);

  Proposal sample(const torch::Tensor& queries, const torch::Tensor& target = {},
                  std::optional<at::Generator> generator = {}) override;
  torch::Tensor log_count(const torch::Tensor& queries, const torch::Tensor& ids) override;
  void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias,
               std::optional<at::Generator> generator = {}) override;
  /// Refreshes every part. Statistics are prefixed with the index of the part: "1.distortion".
  std::map<std::string, double> refresh(const torch::Tensor& weight,
                                        const std::optional<torch::Tensor>& bias = {}) override;
  std::function<void()> plan_growth(int64_t num_classes, const torch::Tensor& rows,
                                    const std::optional<torch::Tensor>& bias) override;
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows,
                                    const std::optional<torch::Tensor>& bias) override;
  /// Returns null if a part cannot exclude classes.
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;
  /// Whether any part has sets of this kind.
  bool has_distinct() const override;
  bool has_independent() const override;
  /// Returns "ranking" if all parts make private draws with replacement and the default estimator
  /// of one of them is "ranking"; otherwise "sampled_softmax".
  std::string default_estimator() const override;
  bool follows_table() const override; ///< true if any part does

  const std::vector<std::shared_ptr<SamplerImpl>>& parts() const { return parts_; }

 private:
  std::vector<std::shared_ptr<SamplerImpl>> parts_;
};
class UnionSampler : public Holder<UnionSamplerImpl> {
 public:
  using Holder::Holder;
  explicit UnionSampler(const std::vector<std::shared_ptr<SamplerImpl>>& parts)
      : Holder(std::make_shared<Impl>(parts)) {}
  explicit UnionSampler(const std::vector<Sampler>& parts)
      : UnionSampler(pointers(parts.begin(), parts.end())) {}
  UnionSampler(std::initializer_list<Sampler> parts)
      : UnionSampler(pointers(parts.begin(), parts.end())) {}
  /// Constructs a union from samplers: UnionSampler(uniform, midx), as in Python.
  template <typename... Parts>
    requires(sizeof...(Parts) > 0 && (std::convertible_to<const Parts&, Sampler> && ...))
  explicit UnionSampler(const Parts&... parts)
      : UnionSampler(std::vector<Sampler>{Sampler(parts)...}) {}
  explicit UnionSampler(...) = delete; // expected: samplers, or a std::vector of them

 private:
  template <typename Iterator>
  static std::vector<std::shared_ptr<SamplerImpl>> pointers(Iterator begin, Iterator end) {
    std::vector<std::shared_ptr<SamplerImpl>> found;
    for (; begin != end; ++begin) {
      found.push_back(begin->or_null());
    }
    return found;
  }
};

} // namespace xsoftmax::samplers
