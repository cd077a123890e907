#pragma once

// The base class of samplers: a module that proposes classes and gives the expected count of each. A sampler of your own derives from SamplerImpl.

#include <xsoftmax/candidates.h>
#include <xsoftmax/holder.h>

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace xsoftmax::samplers {

/// Base of modules whose buffers are tables.
class KeepsTables : public torch::nn::Module {
 public:
  using Module::Module;

  /// The state of another module, or none, changes nothing: a checkpoint's class table loads into any loss.
  void load(torch::serialize::InputArchive& archive) override;
  /// Only the device moves: counts and tables are what they are whatever the dtype of a loss.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
};

/// Base of all samplers: `sample` and `log_count`, and `prepare` where a sampler follows the class table.
class SamplerImpl : public KeepsTables {
 public:
  static constexpr int64_t kOfBatch = -1;

  /// num_samples: draws for the batch (shared) or for each query; kOfBatch where the batch decides. distinct: no class stands twice in a set.
  SamplerImpl(std::string name, int64_t num_classes, int64_t num_samples, bool shared, bool distinct = false);

  /// What one step proposes. queries [Q, D], zeros where a query does not count; target int64 [Q], -1 where it does not, or [Q, T], several
  /// classes of each query: the sets say the expected counts of those, too. Undefined: all queries count. generator: on queries' device,
  /// none: the default one; one int64 is drawn a call.
  virtual Proposal sample(const torch::Tensor& queries, const torch::Tensor& target = {}, std::optional<at::Generator> generator = std::nullopt) = 0;
  /// log expected count of any classes in what `sample` proposes, float32, -inf for a class that is never drawn: of ids [S], [S], or [Q, S]
  /// where it depends on the query; of ids [Q, P], [Q, P].
  virtual torch::Tensor log_count(const torch::Tensor& queries, const torch::Tensor& ids) = 0;
  /// What a loss calls before it draws while training: a sampler that follows the class table weight [N, D], bias [N] brings itself up to date.
  virtual void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias, std::optional<at::Generator> generator = std::nullopt);
  /// At once, whatever the schedule says; statistics by name.
  virtual std::map<std::string, double> refresh(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias = std::nullopt);
  /// Draws from another number of classes from now on: those that are gone are never drawn, new ones as the sampler says. rows [A, D] and bias
  /// [num_classes]: of a class table, the rows of the A new classes and all biases, for what follows the table. An error changes nothing.
  void resize(int64_t num_classes, const torch::Tensor& rows = {}, const std::optional<torch::Tensor>& bias = std::nullopt);
  /// Returns a function that grows the sampler in O(A), for A new classes; bias [A] covers these alone. Empty: use plan_resize. Default: plan_resize, for a
  /// sampler that does not follow the table.
  virtual std::function<void()> plan_growth(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias);
  /// Checks everything, then returns a function that resizes and cannot fail. Override it in samplers of your own that support resizing, and call
  /// set_num_classes. Default: throws.
  virtual std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias);
  /// A sampler like this one that does not draw the classes `ids` either; null where it cannot leave classes out: their counts then add up.
  virtual std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const;
  /// One whose draws are this one's, from the classes other than the target: what the estimator "complementary_sum" asks for. This one belongs
  /// to it from then on.
  virtual std::shared_ptr<SamplerImpl> outside_target();
  /// The estimator that suits its draws.
  virtual std::string default_estimator() const { return "sampled_softmax"; }
  /// Whether it defines `prepare`, and so goes with losses that have a class table alone.
  virtual bool follows_table() const { return false; }

  int64_t num_classes() const { return num_classes_; }
  int64_t num_samples() const { return num_samples_; }
  bool shared() const { return shared_; }
  bool distinct() const { return distinct_; }
  /// Whether some of its sets are distinct, or independent draws: more than one kind only in a union.
  virtual bool has_distinct() const { return distinct_; }
  virtual bool has_independent() const { return !distinct_; }

  /// A sampler belongs to one loss: the second claim is an error.
  void claim(const std::string& owner);
  bool claimed() const { return !owner_.empty(); }

 protected:
  void set_num_classes(int64_t num_classes) { num_classes_ = num_classes; }

 private:
  int64_t num_classes_, num_samples_;
  bool shared_, distinct_;
  std::string owner_;
};

/// Holds a sampler of any class, or none. What takes a sampler takes this: it is made from any holder of a sampler, those of TORCH_MODULE
/// included, and from a pointer.
class Sampler : public Holder<SamplerImpl> {
 public:
  using Holder::Holder;
  Sampler() : Holder(nullptr) {}
  template <std::derived_from<SamplerImpl> Derived>
  Sampler(const torch::nn::ModuleHolder<Derived>& sampler) : Holder(sampler.is_empty() ? nullptr : std::shared_ptr<SamplerImpl>(sampler.ptr())) {}
  template <std::derived_from<SamplerImpl> Derived>
  Sampler(std::shared_ptr<Derived> sampler) : Holder(std::shared_ptr<SamplerImpl>(std::move(sampler))) {}

  /// Returns the pointer, null where there is no sampler.
  const std::shared_ptr<SamplerImpl>& or_null() const { return impl_; }
};

/// Holds a sampler, or the name of one that the loss makes for its classes: an option may be `UniformSampler(n, 20)` or "log_uniform".
class SamplerOrName : public Sampler {
 public:
  using Sampler::Sampler;
  SamplerOrName() = default;
  SamplerOrName(const Sampler& sampler) : Sampler(sampler) {}
  SamplerOrName(std::string name) : name_(std::move(name)) {}
  SamplerOrName(const char* name) : name_(name) {}

  /// Returns the name, empty where there is none.
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

/// Base of the samplers of the library: a description and its tensors, from which operators draw.
class DescribedSamplerImpl : public SamplerImpl {
 public:
  using SamplerImpl::SamplerImpl;

  Proposal sample(const torch::Tensor& queries, const torch::Tensor& target = {}, std::optional<at::Generator> generator = std::nullopt) override;
  torch::Tensor log_count(const torch::Tensor& queries, const torch::Tensor& ids) override;
  void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias, std::optional<at::Generator> generator = std::nullopt) override;

  /// As operators take it: kind:number of tensors:options.
  virtual std::string describe() const = 0;
  virtual std::vector<torch::Tensor> state_tensors() const = 0;
};

/// What a sampler that is named by a string is made for.
struct SamplerRequest {
  int64_t num_classes = 0;
  std::optional<int64_t> num_samples = std::nullopt; ///< none: as many as the sampler draws by default
  int64_t dim = 0;                                   ///< of the class table, and whether it has a bias
  bool bias = false;
  std::optional<bool> shared = std::nullopt;         ///< none: as suits it
  torch::Tensor exclude = {};                        ///< int64, classes that are never drawn
  torch::Tensor counts = {};                         ///< [num_classes], of "unigram" alone
};

/// make_sampler("name", request) from here on makes one by `factory`. Names are those of Python.
void register_sampler(const std::string& name, std::function<std::shared_ptr<SamplerImpl>(const SamplerRequest&)> factory);
/// "uniform", "log_uniform", "unigram" (needs counts), "in_batch", "midx", "lsh", "sphere", "rff", or what was registered.
std::shared_ptr<SamplerImpl> make_sampler(const std::string& name, const SamplerRequest& request);

} // namespace xsoftmax::samplers
