#pragma once

#include <xsoftmax/sampler.h>

#include <concepts>
#include <initializer_list>
#include <memory>
#include <vector>

namespace xsoftmax::samplers {

/// The draws of several samplers together: what one of them misses, another proposes. Expected counts add up: a class's count is the sum of
/// what each sampler would draw of it, whoever drew it (the balance heuristic). State: parts.0, parts.1, ...
///
/// The shared parts draw first, then the private ones, one after another, those of distinct draws last. A private part is asked what it would
/// draw of the ids before it while it draws, so a part whose counts only a draw knows may be in a union as its last.
class UnionSamplerImpl : public SamplerImpl {
 public:
  /// At least one part, all of one number of classes; each belongs to this union from here on.
  explicit UnionSamplerImpl(std::vector<std::shared_ptr<SamplerImpl>> parts);

  Proposal sample(const torch::Tensor& queries, const torch::Tensor& target = {}, std::optional<at::Generator> generator = {}) override;
  torch::Tensor log_count(const torch::Tensor& queries, const torch::Tensor& ids) override;
  void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias, std::optional<at::Generator> generator = {}) override;
  /// Of every part; their statistics by the number of the part: "1.distortion".
  std::map<std::string, double> refresh(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias = {}) override;
  std::function<void()> plan_growth(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias) override;
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias) override;
  /// Null where a part cannot leave classes out.
  std::shared_ptr<SamplerImpl> excluding(const torch::Tensor& ids) const override;
  /// "ranking" where all parts draw private independent classes and one of them says "ranking".
  bool has_distinct() const override;
  bool has_independent() const override;
  std::string default_estimator() const override;
  bool follows_table() const override; ///< where a part does

  const std::vector<std::shared_ptr<SamplerImpl>>& parts() const { return parts_; }

 private:
  std::vector<std::shared_ptr<SamplerImpl>> parts_;
};
class UnionSampler : public Holder<UnionSamplerImpl> {
 public:
  using Holder::Holder;
  explicit UnionSampler(const std::vector<std::shared_ptr<SamplerImpl>>& parts) : Holder(std::make_shared<Impl>(parts)) {}
  explicit UnionSampler(const std::vector<Sampler>& parts) : UnionSampler(pointers(parts.begin(), parts.end())) {}
  UnionSampler(std::initializer_list<Sampler> parts) : UnionSampler(pointers(parts.begin(), parts.end())) {}
  /// UnionSampler(uniform, midx), as in Python.
  template <typename... Parts>
    requires(sizeof...(Parts) > 0 && (std::convertible_to<const Parts&, Sampler> && ...))
  explicit UnionSampler(const Parts&... parts) : UnionSampler(std::vector<Sampler>{Sampler(parts)...}) {}
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
