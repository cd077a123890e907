#pragma once

#include <xsoftmax/sampler.h>

namespace xsoftmax::samplers {

/// Draws from the classes outside the target, or outside a set: the complementary sums of Botev et al. (2017), the noise of CANE. A draw of
/// `sampler` is made up to `tries` times, until it is outside; if none is, it is uniform over the classes outside:
/// q_x(j) = q_j (1 + f + ... + f^(tries - 1)) + f^tries / (N - |C|), f the mass that q gives the set C. Private independent draws.
class ComplementSamplerImpl : public SamplerImpl {
 public:
  /// sampler draws private independent classes, tries num_samples of them a query, and belongs to this one from here on.
  ComplementSamplerImpl(std::shared_ptr<SamplerImpl> sampler, int64_t num_samples);
  /// Uniform over what is outside.
  ComplementSamplerImpl(int64_t num_classes, int64_t num_samples);

  /// Outside the target; of several classes a query, outside the first.
  Proposal sample(const torch::Tensor& queries, const torch::Tensor& target = {}, std::optional<at::Generator> generator = {}) override;
  /// Outside candidates int64 [C] or [Q, C], no class twice in a set, -1 where there is none. Log counts of +inf where nothing is outside; of
  /// targets inside, -inf.
  CandidateSet sample_outside(const torch::Tensor& queries, const torch::Tensor& candidates, const torch::Tensor& target = {},
                              std::optional<at::Generator> generator = {});
  /// Throws: the counts depend on the target, so only a draw knows them.
  torch::Tensor log_count(const torch::Tensor& queries, const torch::Tensor& ids) override;
  std::shared_ptr<SamplerImpl> outside_target() override { return std::static_pointer_cast<SamplerImpl>(shared_from_this()); }
  std::function<void()> plan_growth(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias) override;
  std::function<void()> plan_resize(int64_t num_classes, const torch::Tensor& rows, const std::optional<torch::Tensor>& bias) override;
  bool follows_table() const override { return sampler_ != nullptr && sampler_->follows_table(); }
  void prepare(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias, std::optional<at::Generator> generator = {}) override;
  std::map<std::string, double> refresh(const torch::Tensor& weight, const std::optional<torch::Tensor>& bias = {}) override;

 private:
  std::function<void()> planned(int64_t num_classes, std::function<void()> plan); // with that of the sampler, where it has one

  std::shared_ptr<SamplerImpl> sampler_; // null: uniform
  std::string options_;
};
class ComplementSampler : public Holder<ComplementSamplerImpl> {
 public:
  using Holder::Holder;
  ComplementSampler(const Sampler& sampler, int64_t num_samples) : Holder(std::make_shared<Impl>(sampler.or_null(), num_samples)) {}
  ComplementSampler(int64_t num_classes, int64_t num_samples) : Holder(std::make_shared<Impl>(num_classes, num_samples)) {}
  explicit ComplementSampler(...) = delete; // expected: a sampler or num_classes, num_samples
};

} // namespace xsoftmax::samplers
