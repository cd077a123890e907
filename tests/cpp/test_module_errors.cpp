// C++ losses reject wrong arguments and batches.

#include "modules.h"

namespace {

using namespace modules_test;

TEST_F(Modules, TheTableHasARowForEachClass) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(5));
  loss->linear->weight = torch::randn({kClasses + 1, kWidth}, torch::requires_grad());
  EXPECT_THROW(loss(input, target), c10::ValueError);
}

TEST_F(Modules, BadArgumentsThrow) {
  EXPECT_THROW(LinearCrossEntropyLoss(kWidth, kClasses,
                                      LossOptions{.weight = torch::ones({kClasses}, torch::kLong)}),
               c10::TypeError);
  EXPECT_THROW(SampledSoftmaxLoss(kWidth, kClasses, "midx", SamplingOptions{.estimator = "cane"}),
               c10::ValueError);
  EXPECT_THROW(
      SampledSoftmaxLoss(
          kWidth, kClasses, "uniform",
          SamplingOptions{.estimator = "complementary_sum", .num_samples = 4, .shared = true}),
      c10::ValueError);
  const auto make = [](const SamplingOptions& sampling, const LossOptions& options = {},
                       const Sampler& sampler = uniform()) {
    SampledSoftmaxLoss(kWidth, kClasses, sampler, sampling, options);
  };
  EXPECT_THROW(uniform(-1), c10::ValueError);
  EXPECT_THROW(make({.head = torch::arange(2)}, {}, uniform(kClasses - 1)), c10::ValueError);
  EXPECT_THROW(make({}, {}, uniform(0)), c10::ValueError);
  EXPECT_THROW(make({.num_samples = 4}), c10::ValueError);
  EXPECT_THROW(make({.estimator = "nce2"}), c10::ValueError);
  EXPECT_THROW(make({.head = torch::tensor({int64_t(1), kClasses}, torch::kLong)}),
               c10::IndexError);
  EXPECT_THROW(make({.head = torch::tensor({1, 1}, torch::kLong)}), c10::ValueError);
  EXPECT_THROW(make({.head = torch::tensor({1.0})}), c10::TypeError);
  EXPECT_THROW(make({}, {.reduction = "max"}), c10::ValueError);
  EXPECT_THROW(make({}, {.label_smoothing = 1.5}), c10::ValueError);
  EXPECT_THROW(make({}, {.logit_scale = 0.0}), c10::ValueError);
  EXPECT_THROW(make({}, {.softcap = -1.0}), c10::ValueError);
  EXPECT_THROW(make({}, {.z_loss = -0.1}), c10::ValueError);
  EXPECT_THROW(make({.estimator = "nce"}, {.z_loss = 0.1}), c10::ValueError);
  EXPECT_THROW(make({}, {.weight = torch::ones(3)}), c10::ValueError);
  EXPECT_THROW(make({}, {.weight = torch::ones(kClasses), .label_smoothing = 0.1}),
               c10::ValueError);
  EXPECT_THROW(make({}, {}, samplers::UniformSampler(kClasses - 1, 3).ptr()), c10::ValueError);
  EXPECT_THROW(samplers::make_sampler("zipf", {.num_classes = kClasses}), c10::ValueError);
  EXPECT_THROW(LinearCrossEntropyLoss(kWidth, 0), c10::ValueError);
}

// A sampler is claimed only if the loss is constructed successfully.
TEST_F(Modules, ASamplerBelongsToOneLoss) {
  const Sampler sampler = uniform();
  EXPECT_THROW(SampledSoftmaxLoss(kWidth, kClasses, sampler, SamplingOptions{.log_z = 1.0}),
               c10::ValueError);
  EXPECT_FALSE(sampler->claimed());
  SampledSoftmaxLoss first(kWidth, kClasses, sampler);
  EXPECT_THROW(SampledSoftmaxLoss(kWidth, kClasses, sampler), c10::ValueError);
}

TEST_F(Modules, BadBatchesThrow) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform());
  for (const bool train : {true, false}) {
    loss->train(train);
    EXPECT_THROW(loss->forward(input, target.slice(0, 0, 3)), c10::ValueError);
    EXPECT_THROW(loss->forward(input.slice(1, 0, 3), target), c10::ValueError);
    EXPECT_THROW(loss->forward(input, torch::full_like(target, kClasses)), c10::IndexError);
    EXPECT_THROW(loss->forward(input.to(torch::kDouble), target), c10::TypeError);
    EXPECT_THROW(loss->forward(input, target.to(torch::kInt)), c10::TypeError);
  }
}

} // namespace
