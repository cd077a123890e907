// Module holders accept the arguments that their documentation lists: a sampler as a holder, a
// pointer, or a name with options.

#include <xsoftmax/xsoftmax.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using namespace xsoftmax::nn;
using namespace xsoftmax::samplers;
using torch::Tensor;

constexpr int64_t kClasses = 20, kWidth = 4, kDraws = 6;

class FirstClassesImpl : public SamplerImpl {
 public:
  explicit FirstClassesImpl(int64_t num_classes)
      : SamplerImpl("FirstClasses", num_classes, 2, /*shared=*/true, /*distinct=*/true) {}
  xsoftmax::Proposal sample(const Tensor& queries, const Tensor&,
                            std::optional<at::Generator>) override {
    const Tensor ids = torch::arange(2, queries.device());
    return {{ids, log_count(queries, ids), {}, true}};
  }
  Tensor log_count(const Tensor&, const Tensor& ids) override {
    return torch::where(ids < 2, 0.0f, -INFINITY).to(torch::kFloat);
  }
};
TORCH_MODULE(FirstClasses); // as in user code

double value_of(SampledSoftmaxLoss loss) {
  torch::manual_seed(3);
  const Tensor input = torch::randn({5, kWidth}), target = torch::arange(5) + 10;
  {
    const torch::NoGradGuard guard;
    loss->linear->weight.uniform_(-1, 1);
  }
  return loss(input, target).item<double>();
}

TEST(Holders, LossesTakeASamplerInEachForm) {
  UniformSampler uniform(kClasses, kDraws);
  const std::shared_ptr<SamplerImpl> pointer = UniformSampler(kClasses, kDraws).ptr();
  const SamplingOptions draws{.num_samples = kDraws};
  const double expected = value_of(SampledSoftmaxLoss(kWidth, kClasses, uniform));
  EXPECT_EQ(value_of(SampledSoftmaxLoss(kWidth, kClasses, UniformSampler(kClasses, kDraws).ptr())),
            expected);
  EXPECT_EQ(value_of(SampledSoftmaxLoss(kWidth, kClasses, pointer)), expected);
  EXPECT_EQ(value_of(SampledSoftmaxLoss(kWidth, kClasses,
                                        UniformSampler(kClasses, kDraws, {.shared = true}))),
            expected);
  EXPECT_EQ(
      value_of(SampledSoftmaxLoss(kWidth, kClasses, Sampler(UniformSampler(kClasses, kDraws)))),
      expected);
  EXPECT_EQ(value_of(SampledSoftmaxLoss(kWidth, kClasses, "uniform", kDraws)), expected);
  EXPECT_EQ(value_of(SampledSoftmaxLoss(kWidth, kClasses, "uniform", 6, {.shared = true})),
            expected);
  EXPECT_EQ(value_of(SampledSoftmaxLoss(kWidth, kClasses, "uniform", draws)), expected);
  EXPECT_EQ(value_of(SampledSoftmaxLoss(kWidth, kClasses, std::string("uniform"),
                                        {.num_samples = kDraws})),
            expected);
  EXPECT_EQ(value_of(SampledSoftmaxLoss(kWidth, kClasses, "uniform",
                                        {.estimator = "sampled_softmax", .num_samples = kDraws},
                                        {.bias = false})),
            expected);
  EXPECT_EQ(value_of(SampledSoftmaxLoss(kWidth, kClasses, "uniform", kDraws, {},
                                        {.label_smoothing = 0.0})),
            expected);
  EXPECT_NE(value_of(SampledSoftmaxLoss(kWidth, kClasses, "uniform", kDraws + 1)), expected);
  EXPECT_THROW(SampledSoftmaxLoss(kWidth, kClasses, "uniform", kDraws, draws), c10::ValueError);
  EXPECT_THROW(SampledSoftmaxLoss(kWidth, kClasses, "uniform"),
               c10::ValueError); // has no default number of samples
}

TEST(Holders, LossesTakeEverySampler) {
  const Tensor counts = torch::arange(1, kClasses + 1);
  const DrawOptions apart{.shared = false};
  const std::vector<Sampler> samplers{
      StaticSampler(counts, 3),
      UniformSampler(kClasses, 3),
      LogUniformSampler(kClasses, 3, apart),
      UnigramSampler(counts, 3),
      UnigramSampler(counts, 3, {.shared = false}),
      UnigramSampler(counts, 3, 1.0, apart),
      UnigramSampler(StreamingCounts(kClasses), 3, {.power = 1.0}),
      FixedSampler(kClasses, torch::arange(3)),
      InBatchSampler(kClasses),
      InBatchSampler(kClasses, StreamingCounts({.num_ids = kClasses})),
      MidxSampler(kClasses, kWidth, {.codewords = 4}),
      ExactMidxSampler(kClasses, kWidth, {.codewords = 4}),
      SpreadMidxSampler(kClasses, kWidth, {.codewords = 4}),
      LearnableMidxSampler(kClasses, kWidth, {.codewords = 4}, 8),
      LshSampler(kClasses, kWidth),
      SphereSampler(kClasses, kWidth, {.num_samples = 3}),
      RffSampler(kClasses, kWidth),
      ComplementSampler(kClasses, 3),
      ComplementSampler(UniformSampler(kClasses, 6, apart), 3),
      UnionSampler(UniformSampler(kClasses, 3), MidxSampler(kClasses, kWidth, {.codewords = 4})),
      FirstClasses(kClasses)};
  for (const Sampler& sampler : samplers) {
    SampledSoftmaxLoss loss(kWidth, kClasses, sampler);
    EXPECT_TRUE(loss(torch::randn({3, kWidth}), torch::tensor({1, 7, 19})).isfinite().item<bool>())
        << sampler->name();
    EXPECT_EQ(loss->sampler, sampler.ptr());
  }
}

TEST(Holders, EmptyBracesAreOptions) {
  EXPECT_EQ(
      SampledSoftmaxLoss(kWidth, kClasses, UniformSampler(kClasses, 3), {})->sampler->num_samples(),
      3);
  EXPECT_EQ(SampledSoftmaxLoss(kWidth, kClasses, "uniform", 3, {})->sampler->num_samples(), 3);
  EXPECT_THROW(SampledSoftmaxLoss(kWidth, kClasses, "uniform", {}),
               c10::ValueError); // no number of samples
}

TEST(Holders, ALossWithoutASamplerTakesNullptr) {
  const Tensor input = torch::randn({3, kWidth}), target = torch::arange(3);
  SampledSoftmaxLoss none(kWidth, kClasses, nullptr),
      head(kWidth, kClasses, nullptr, {.head = torch::arange(4)}),
      empty(kWidth, kClasses, Sampler());
  EXPECT_THROW(none(input, target), c10::ValueError);
  EXPECT_THROW(empty(input, target), c10::ValueError);
  EXPECT_TRUE(head(input, target).isfinite().item<bool>());
}

TEST(Holders, SamplersTakeSamplers) {
  const auto parts_of = [](const UnionSampler& sampler) { return sampler->parts().size(); };
  UniformSampler first(kClasses, 3);
  const auto uniform = [] { return UniformSampler(kClasses, 3); };
  EXPECT_EQ(parts_of(UnionSampler(first, InBatchSampler(kClasses))), 2);
  EXPECT_EQ(parts_of(UnionSampler(uniform())), 1);
  EXPECT_EQ(parts_of(UnionSampler(uniform().ptr(), uniform(), FirstClasses(kClasses))), 3);
  EXPECT_EQ(parts_of(UnionSampler({uniform(), InBatchSampler(kClasses)})), 2);
  EXPECT_EQ(parts_of(UnionSampler(std::vector<Sampler>{uniform(), uniform()})), 2);
  EXPECT_EQ(parts_of(UnionSampler(
                std::vector<std::shared_ptr<SamplerImpl>>{uniform().ptr(), uniform().ptr()})),
            2);
  EXPECT_THROW(UnionSampler(uniform(), Sampler()), c10::ValueError);
  EXPECT_THROW(ComplementSampler(Sampler(), 2), c10::ValueError);
  const UnionSampler made(uniform());
  UnionSampler same = made;
  EXPECT_EQ(same.ptr(), made.ptr()); // a copy shares the module instead of making a union of one
  const DrawOptions apart{.shared = false};
  CaneLoss cane(kWidth, kClasses,
                {.candidate_sampler = MidxSampler(kClasses, kWidth, {.codewords = 4}),
                 .noise_sampler = UniformSampler(kClasses, 4, apart)});
  BeamTreeLoss tree(kWidth, xsoftmax::LabelTree::balanced(kClasses),
                    {.num_candidates = 2,
                     .num_noises = 1,
                     .noise_sampler = LogUniformSampler(kClasses, 2, apart)});
  const Tensor input = torch::randn({3, kWidth}), target = torch::arange(3);
  EXPECT_TRUE((cane(input, target) + tree(input, target)).isfinite().item<bool>());
}

double noisy(CaneLoss loss) {
  torch::manual_seed(3);
  const Tensor input = torch::randn({5, kWidth}), target = torch::arange(5) + 10;
  const torch::NoGradGuard guard;
  loss->linear->weight.uniform_(-1, 1);
  return loss(input, target).item<double>();
}

TEST(Holders, NoiseIsGivenByName) {
  const auto noise = [](const SamplerOrName& sampler) {
    return noisy(
        CaneLoss(kWidth, kClasses,
                 {.candidates = torch::arange(4), .num_noises = 3, .noise_sampler = sampler}));
  };
  const DrawOptions apart{.shared = false};
  const double log_uniform = noise(LogUniformSampler(kClasses, 12, apart)),
               uniform = noise({}); // four tries each
  EXPECT_EQ(noise("log_uniform"), log_uniform);
  EXPECT_EQ(noise(std::string("log_uniform")), log_uniform);
  EXPECT_EQ(noise("uniform"), uniform);
  EXPECT_EQ(noise(nullptr), uniform);
  EXPECT_NE(log_uniform, uniform);
  EXPECT_THROW(noise("log uniform"), c10::ValueError);
  EXPECT_TRUE(std::isfinite(noise("rff"))); // needs the width of the table
  const auto tree = [](const char* name) {
    return BeamTreeLoss(kWidth, xsoftmax::LabelTree::balanced(kClasses),
                        {.num_candidates = 2, .num_noises = 1, .noise_sampler = name});
  };
  EXPECT_TRUE(
      tree("log_uniform")(torch::randn({3, kWidth}), torch::arange(3)).isfinite().item<bool>());
  EXPECT_THROW(tree("rff"), c10::ValueError); // a tree has no table to follow
}

TEST(Holders, BehaveAsThoseOfTorch) {
  UniformSampler none = nullptr;
  EXPECT_TRUE(none.is_empty());
  EXPECT_TRUE(Sampler(none).is_empty());
  EXPECT_TRUE(Sampler().is_empty());
  none = UniformSampler(kClasses, 3);
  EXPECT_EQ(none->num_samples(), 3);
  TwoTowerLoss towers, named({.temperature = 0.5});
  EXPECT_EQ(named->temperature.item<double>(), 0.5);
  EXPECT_TRUE(TwoTowerLoss({.num_items = kClasses}, nullptr)->counts.is_empty());
  torch::nn::AnyModule any(LinearCrossEntropyLoss(kWidth, kClasses, {.bias = true}));
  EXPECT_TRUE(any.forward(torch::randn({3, kWidth}), torch::arange(3)).isfinite().item<bool>());
}

// Calls that match no constructor fail to compile at the call, not inside torch's headers.
static_assert(!std::is_constructible_v<SampledSoftmaxLoss, int, int, UniformSampler, LossOptions>);
static_assert(!std::is_constructible_v<SampledSoftmaxLoss, int, int, const char*, LossOptions>);
static_assert(!std::is_constructible_v<SampledSoftmaxLoss, int, int, int>);
static_assert(!std::is_constructible_v<SampledSoftmaxLoss, int, int>);
static_assert(!std::is_constructible_v<UnionSampler, UniformSampler, int>);
static_assert(!std::is_constructible_v<ComplementSampler, Tensor, int>);
static_assert(!std::is_constructible_v<TwoTowerLoss, int>);
static_assert(!std::is_constructible_v<HierarchicalMatcher, int, int>);
static_assert(!std::is_default_constructible_v<UniformSampler>);

} // namespace
