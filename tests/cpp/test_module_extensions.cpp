// Samplers and estimators defined outside the library do what built-in ones do.

#include "modules.h"

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

using namespace modules_test;

// A user-defined sampler: q proportional to i + 1, private samples with replacement.
class LinearSamplerImpl : public samplers::SamplerImpl {
 public:
  LinearSamplerImpl(int64_t num_classes, int64_t num_samples)
      : SamplerImpl("LinearSampler", num_classes, num_samples, /*shared=*/false) {
    const Tensor weights = torch::arange(1, num_classes + 1, torch::kDouble);
    log_q_ = (weights / weights.sum()).log().to(torch::kFloat);
  }
  xsoftmax::Proposal sample(const Tensor& queries, const Tensor& of = {},
                            std::optional<at::Generator> from = std::nullopt) override {
    const Tensor ids =
        at::multinomial(log_q_.exp().expand({queries.size(0), -1}), num_samples(), true, from);
    return {{ids, log_count(queries, ids),
             of.defined() ? log_count(queries, of.clamp_min(0)) : Tensor(), false}};
  }
  Tensor log_count(const Tensor&, const Tensor& ids) override {
    return log_q_.index({ids}) + std::log(static_cast<double>(num_samples()));
  }

 private:
  Tensor log_q_;
};

TEST_F(Modules, ASamplerFromOutsideDoesWhatABuiltInOneDoes) {
  samplers::register_sampler("linear", [](const samplers::SamplerRequest& request) -> Sampler {
    return std::make_shared<LinearSamplerImpl>(request.num_classes,
                                               request.num_samples.value_or(4));
  });
  EXPECT_THROW(samplers::register_sampler("linear", nullptr), c10::ValueError);
  const auto outside = [](int64_t draws) -> Sampler {
    return std::make_shared<LinearSamplerImpl>(kClasses, draws);
  };
  const auto builtin = [](int64_t draws) -> Sampler {
    return samplers::UnigramSampler(torch::arange(1, kClasses + 1), draws, 1.0,
                                    samplers::DrawOptions{.shared = false})
        .ptr();
  };
  const std::vector<std::function<Sampler(const Sampler&)>> ways{
      [](const Sampler& made) { return made; },
      [](const Sampler& made) -> Sampler {
        return samplers::UnionSampler(std::vector<Sampler>{uniform(3), made}).ptr();
      },
      [](const Sampler& made) -> Sampler { return samplers::ComplementSampler(made, 2).ptr(); }};
  for (const auto& way : ways) {
    std::vector<Tensor> losses;
    for (const Sampler& made : {way(outside(4)), way(builtin(4))}) {
      torch::manual_seed(1);
      SampledSoftmaxLoss loss(kWidth, kClasses, made, SamplingOptions{},
                              LossOptions{.reduction = "none"});
      torch::manual_seed(2);
      losses.push_back(loss->forward(torch::randn({1, kWidth}).expand({4000, kWidth}),
                                     torch::full({4000}, 7, torch::kLong))
                           .detach());
    }
    const double error = std::sqrt((losses[0].var() + losses[1].var()).item<double>() /
                                   1000); // generous: draws may be shared
    EXPECT_NEAR(losses[0].mean().item<double>(), losses[1].mean().item<double>(), 4.5 * error);
  }
  // With a head it cannot leave out classes, so counts add up. Also as noise, and by its name.
  SampledSoftmaxLoss head(kWidth, kClasses, "linear",
                          SamplingOptions{.head = torch::tensor({1, 8}, torch::kLong)});
  EXPECT_EQ(head->head.numel(), 0);
  const auto sets = head->propose(torch::zeros({2, kWidth}), torch::zeros({2}, torch::kLong));
  Tensor count = 4 * torch::arange(1, kClasses + 1) / (kClasses * (kClasses + 1) / 2.0);
  count.index_add_(0, torch::tensor({1, 8}, torch::kLong), torch::ones({2}));
  for (const auto& set : sets) {
    EXPECT_TRUE(torch::allclose(set.log_count.exp(), count.index({set.ids}), 1e-5, 1e-6));
  }
  xsoftmax::nn::CaneLoss cane(
      kWidth, kClasses,
      xsoftmax::nn::CaneOptions{
          .candidates = torch::arange(5), .num_noises = 2, .noise_sampler = outside(8)});
  EXPECT_TRUE(cane->forward(input, target).isfinite().item<bool>());
}

// A user-defined estimator with the formula of a built-in one gives the same losses and gradients:
// in a union, with a head, and for CANE with noise.
TEST_F(Modules, AnEstimatorFromOutsideDoesWhatABuiltInOneDoes) {
  xsoftmax::register_estimator(
      "outside",
      {.renormalizes = true, .weighs = true, .drops_distinct_hits = true, .drops_drawn_hits = true},
      [](const xsoftmax::CandidateBatch& batch) {
        return torch::logaddexp(batch.adjusted.logsumexp(1), batch.target) - batch.target;
      });
  EXPECT_THROW(
      xsoftmax::register_estimator(
          "outside", {}, [](const xsoftmax::CandidateBatch& batch) { return batch.target; }),
      c10::ValueError);
  const std::vector<std::function<SampledSoftmaxLoss(const SamplingOptions&)>> ways{
      [](const SamplingOptions& options) {
        return SampledSoftmaxLoss(kWidth, kClasses, uniform(), options);
      },
      [](const SamplingOptions& options) {
        const Sampler both =
            samplers::UnionSampler(std::vector<Sampler>{uniform(3), uniform(4, false)}).ptr();
        return SampledSoftmaxLoss(kWidth, kClasses, both, options, LossOptions{.bias = true});
      },
      [](SamplingOptions options) {
        options.head = torch::arange(4);
        return SampledSoftmaxLoss(kWidth, kClasses, uniform(5, false), options);
      }};
  for (const auto& way : ways) {
    std::vector<Tensor> losses, gradients;
    for (const std::string estimator : {"sampled_softmax", "outside"}) {
      torch::manual_seed(1);
      SampledSoftmaxLoss loss = way(SamplingOptions{.estimator = estimator});
      losses.push_back(loss->forward(input, target, generator(3)));
      losses.back().backward();
      gradients.push_back(loss->linear->weight.grad().to_dense());
    }
    EXPECT_TRUE(torch::allclose(losses[0], losses[1], 1e-5));
    EXPECT_TRUE(torch::allclose(gradients[0], gradients[1], 1e-4, 1e-6));
    EXPECT_GT(gradients[0].abs().max().item<double>(), 0);
  }
}

} // namespace
