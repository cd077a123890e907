// LSH, sphere and RFF samplers as C++ modules.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <cmath>
#include <sstream>

namespace {

using torch::Tensor;
namespace samplers = xsoftmax::samplers;
using xsoftmax::nn::LossOptions;
using xsoftmax::nn::SampledSoftmaxLoss;
using xsoftmax::nn::SamplingOptions;

constexpr int64_t kClasses = 300, kWidth = 7, kQueries = 4, kHead = 5;

class Adaptive : public testing::TestWithParam<std::tuple<const char*, bool>> {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    weight = torch::randn({kClasses, kWidth});
    bias = torch::randn({kClasses});
    input = torch::randn({kQueries, kWidth});
    target = torch::randint(kHead, kClasses, {kQueries}, torch::kLong);
  }

  bool has_bias() const { return std::get<1>(GetParam()); }

  // As a loss makes it.
  std::shared_ptr<samplers::SamplerImpl> make() const {
    auto sampler = samplers::make_sampler(std::get<0>(GetParam()), kClasses, kWidth)->excluding(torch::arange(kHead));
    auto other = sampler->for_table(kWidth, has_bias());
    return other ? other : sampler;
  }

  std::optional<Tensor> maybe_bias() const { return has_bias() ? std::optional<Tensor>(bias) : std::nullopt; }

  Tensor weight, bias, input, target;
};

INSTANTIATE_TEST_SUITE_P(Every, Adaptive, testing::Combine(testing::Values("midx", "lsh", "sphere", "rff"), testing::Bool()));

TEST_P(Adaptive, ProbabilitiesSumToOneAndDrawsSayTheirCounts) {
  auto sampler = make();
  sampler->refresh(weight, maybe_bias());
  const Tensor log_q = sampler->log_prob(input, torch::arange(kClasses));
  EXPECT_TRUE(torch::allclose(log_q.exp().sum(1), torch::ones(kQueries), 1e-4));
  EXPECT_TRUE(log_q.narrow(1, 0, kHead).isneginf().all().item<bool>());
  const auto draws = sampler->sample(input, 30, false, target);
  EXPECT_TRUE(torch::allclose(draws.log_count, log_q.gather(1, draws.ids) + std::log(30.0), 1e-4, 1e-4));
  EXPECT_TRUE(torch::allclose(draws.target_log_count, log_q.gather(1, target.unsqueeze(1)).squeeze(1) + std::log(30.0), 1e-4, 1e-4));
  EXPECT_TRUE(torch::allclose(sampler->log_count(input, 30, false, draws.ids), draws.log_count, 1e-4, 1e-4));
}

TEST_P(Adaptive, ALossKeepsItUpToDate) {
  SampledSoftmaxLoss loss(kWidth, kClasses, make(), SamplingOptions{.num_samples = 20, .head_classes = 8}, LossOptions{.bias = has_bias()});
  xsoftmax::optim::RowAdam optimizer(loss->parameters(), xsoftmax::optim::RowAdamOptions(0.05));
  const Tensor x = torch::randn({64, kWidth}), y = torch::randint(kClasses, {64});
  const auto exact = [&] {
    const torch::NoGradGuard guard;
    loss->eval();
    const double value = loss(x, y).item<double>();
    loss->train();
    return value;
  };
  const double before = exact();
  for (int i = 0; i < 40; ++i) {
    optimizer.zero_grad();
    loss(x, y).backward();
    optimizer.step();
  }
  optimizer.flush();
  EXPECT_LT(exact(), before - 0.5);
  EXPECT_EQ(dynamic_cast<samplers::AdaptiveSamplerImpl&>(*loss->sampler).step.item<int64_t>(), 40);
}

TEST_P(Adaptive, SavedWithItsIndex) {
  auto sampler = make(), other = make();
  sampler->refresh(weight, maybe_bias());
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  sampler->save(out);
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  other->load(in);
  EXPECT_TRUE(torch::equal(other->log_prob(input, target), sampler->log_prob(input, target)));
}

TEST(Adaptive, BadArgumentsThrow) {
  using samplers::LshOptions, samplers::RffOptions, samplers::SphereOptions;
  EXPECT_THROW(samplers::LshSampler(kClasses, kWidth, LshOptions{.tables = 0}), c10::ValueError);
  EXPECT_THROW(samplers::LshSampler(kClasses, kWidth, LshOptions{.bits = 21}), c10::ValueError);
  EXPECT_THROW(samplers::LshSampler(kClasses, kWidth, LshOptions{.uniform = 2}), c10::ValueError);
  EXPECT_THROW(samplers::SphereSampler(kClasses, 0), c10::ValueError);
  EXPECT_THROW(samplers::SphereSampler(kClasses, kWidth, SphereOptions{.alpha = 0}), c10::ValueError);
  EXPECT_THROW(samplers::RffSampler(kClasses, kWidth, RffOptions{.features = 0}), c10::ValueError);
  EXPECT_THROW(samplers::RffSampler(kClasses, kWidth, RffOptions{.floor = -1}), c10::ValueError);
  EXPECT_THROW(samplers::make_sampler("uniform", kClasses, kWidth), c10::ValueError);
  samplers::LshSampler sampler(kClasses, kWidth);
  EXPECT_THROW(sampler->sample(torch::randn({2, kWidth}), 3, true), c10::ValueError);
  EXPECT_THROW(sampler->for_table(kWidth + 1, false), c10::ValueError);
}

} // namespace
