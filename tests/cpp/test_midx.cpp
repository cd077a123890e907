// The MIDX and union samplers as C++ modules.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <cmath>
#include <sstream>

namespace {

using torch::Tensor;
using xsoftmax::nn::LossOptions;
using xsoftmax::nn::SampledSoftmaxLoss;
using xsoftmax::nn::SamplingOptions;
using xsoftmax::samplers::MidxOptions;
using xsoftmax::samplers::MidxSampler;
using xsoftmax::samplers::UnigramSampler;
using xsoftmax::samplers::UnionSampler;

constexpr int64_t kClasses = 300, kWidth = 7, kQueries = 4;

class Midx : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    weight = torch::randn({kClasses, kWidth});
    bias = torch::randn({kClasses});
    input = torch::randn({kQueries, kWidth});
    target = torch::randint(5, kClasses, {kQueries}, torch::kLong);
  }

  MidxSampler make(const std::string& kind = "rq") const {
    MidxSampler sampler(kClasses, kWidth, MidxOptions{.codewords = 6, .kind = kind, .bias = GetParam(), .exclude_below = 5});
    sampler->refresh(weight, GetParam() ? std::optional<Tensor>(bias) : std::nullopt);
    return sampler;
  }

  Tensor weight, bias, input, target;
};

INSTANTIATE_TEST_SUITE_P(WithAndWithoutBias, Midx, testing::Bool());

TEST_P(Midx, ProbabilitiesSumToOneAndDrawsSayTheirCounts) {
  for (const char* kind : {"rq", "pq"}) {
    MidxSampler sampler = make(kind);
    const Tensor log_q = sampler->log_prob(input, torch::arange(kClasses));
    EXPECT_TRUE(torch::allclose(log_q.exp().sum(1), torch::ones(kQueries), 1e-4));
    EXPECT_TRUE(log_q.narrow(1, 0, 5).isneginf().all().item<bool>());
    const auto draws = sampler->sample(input, 30, false, target);
    EXPECT_TRUE(torch::allclose(draws.log_count, log_q.gather(1, draws.ids) + std::log(30.0), 1e-4, 1e-4));
    EXPECT_TRUE(torch::allclose(draws.target_log_count, log_q.gather(1, target.unsqueeze(1)).squeeze(1) + std::log(30.0), 1e-4, 1e-4));
    const auto shared = sampler->sample(input, 40, true);
    EXPECT_EQ(std::get<0>(at::_unique(shared.ids)).numel(), 40);
  }
}

TEST_P(Midx, RefreshSaysHowWellTheIndexFits) {
  const auto stats = make()->refresh(weight, GetParam() ? std::optional<Tensor>(bias) : std::nullopt);
  for (const char* name : {"distortion", "mean_square", "inertia1", "inertia2", "cells"}) {
    EXPECT_EQ(stats.count(name), 1u) << name;
  }
  EXPECT_LT(stats.at("distortion"), stats.at("mean_square"));
}

TEST_P(Midx, ALossBuildsTheIndexAndTrains) {
  for (const bool with_unigram : {false, true}) {
    MidxSampler midx(kClasses, kWidth, MidxOptions{.codewords = 6, .refresh_every = 16, .update_every = 4});
    std::shared_ptr<xsoftmax::samplers::SamplerImpl> sampler = midx.ptr();
    if (with_unigram) {
      UnigramSampler unigram(torch::arange(1, kClasses + 1));
      sampler = UnionSampler(std::vector<xsoftmax::samplers::UnionSamplerImpl::Part>{{unigram.ptr(), 20}, {midx.ptr(), 10}}).ptr();
    }
    SampledSoftmaxLoss loss(kWidth, kClasses, sampler, SamplingOptions{.num_samples = 20, .head_classes = 8},
                            LossOptions{.bias = GetParam()});
    xsoftmax::optim::RowAdam optimizer(loss->parameters(), xsoftmax::optim::RowAdamOptions(0.05));
    const double before = loss->exact(input, target).item<double>();
    for (int step = 0; step < 60; ++step) {
      optimizer.zero_grad();
      loss(input, target).backward();
      optimizer.step();
    }
    optimizer.flush();
    EXPECT_LT(loss->exact(input, target).item<double>(), before / 4);
  }
}

TEST_P(Midx, ExactDrawsAreThoseOfTheSoftmax) {
  SampledSoftmaxLoss loss(kWidth, kClasses, MidxSampler(kClasses, kWidth, MidxOptions{.codewords = 6, .exact = true}).ptr(),
                          SamplingOptions{.num_samples = 9}, LossOptions{.bias = GetParam()});
  loss(input, target);
  const Tensor log_p = loss->log_prob(input);
  EXPECT_TRUE(torch::allclose(loss->sampler->log_prob(input, torch::arange(kClasses)), log_p, 1e-4, 1e-4));
  const auto draws = loss->sampler->sample(input, 9, false, target);
  EXPECT_TRUE(torch::allclose(draws.log_count, log_p.gather(1, draws.ids) + std::log(9.0), 1e-4, 1e-4));
  EXPECT_THROW(loss->sampler->sample(input, 9, true), c10::ValueError);
}

TEST_P(Midx, LearnableCodewordsAreTrainedBesideTheLoss) {
  MidxSampler sampler(kClasses, kWidth, MidxOptions{.codewords = 6, .bias = GetParam(), .learnable = true});
  SampledSoftmaxLoss loss(kWidth, kClasses, sampler.ptr(), SamplingOptions{.num_samples = 9}, LossOptions{.bias = GetParam()});
  EXPECT_EQ(loss->parameters().size(), size_t(GetParam() ? 4 : 3));
  loss(input, target).backward();
  EXPECT_GT(sampler->codewords1.grad().abs().sum().item<double>(), 0.0);
  EXPECT_GT(sampler->codewords2.grad().abs().sum().item<double>(), 0.0);
}

TEST_P(Midx, SavedWithItsIndex) {
  MidxSampler sampler = make();
  MidxSampler other(kClasses, kWidth, MidxOptions{.codewords = 6, .bias = GetParam(), .exclude_below = 5});
  std::stringstream stream;
  torch::save(sampler, stream);
  torch::load(other, stream);
  other->to(torch::kHalf);
  EXPECT_TRUE(torch::equal(other->log_prob(input, target), sampler->log_prob(input, target)));
}

TEST_P(Midx, BadArgumentsThrow) {
  EXPECT_THROW(MidxSampler(kClasses, kWidth, MidxOptions{.codewords = 0}), c10::ValueError);
  EXPECT_THROW(MidxSampler(kClasses, kWidth, MidxOptions{.kind = "opq"}), c10::ValueError);
  EXPECT_THROW(MidxSampler(kClasses, 1, MidxOptions{.kind = "pq"}), c10::ValueError);
  EXPECT_THROW(make()->sample(input, kClasses, true), c10::ValueError);
  EXPECT_THROW(make()->log_prob(input, torch::tensor({kClasses})), c10::IndexError);
  EXPECT_THROW(SampledSoftmaxLoss(kWidth + 1, kClasses, make().ptr(), SamplingOptions{.num_samples = 3}), c10::ValueError);
  EXPECT_THROW(UnionSampler(std::vector<xsoftmax::samplers::UnionSamplerImpl::Part>{}), c10::ValueError);
}

// Private draws that follow the table, alone or in a union: "ranking", unless another estimator is named.
TEST(MidxLoss, TheEstimatorSuitsTheSampler) {
  const auto value = [](const std::string& estimator, bool united, std::optional<bool> shared) {
    torch::manual_seed(1);
    std::shared_ptr<xsoftmax::samplers::SamplerImpl> sampler = MidxSampler(kClasses, kWidth, MidxOptions{.codewords = 6}).ptr();
    if (united) {
      UnigramSampler unigram(torch::arange(kClasses, 0, -1));
      sampler = UnionSampler(std::vector<xsoftmax::samplers::UnionSamplerImpl::Part>{{unigram.ptr(), 20}, {sampler, 10}}).ptr();
    }
    SampledSoftmaxLoss loss(kWidth, kClasses, sampler, SamplingOptions{.num_samples = 30, .shared = shared, .estimator = estimator});
    return loss(torch::randn({kQueries, kWidth}), torch::arange(kQueries)).item<float>();
  };
  EXPECT_EQ(value("", false, std::nullopt), value("ranking", false, std::nullopt));
  EXPECT_NE(value("", false, std::nullopt), value("sampled_softmax", false, std::nullopt));
  EXPECT_EQ(value("", true, std::nullopt), value("sampled_softmax", true, std::nullopt)); // some draws are distinct
  EXPECT_NE(value("", true, std::nullopt), value("ranking", true, std::nullopt));
  EXPECT_EQ(value("", false, true), value("sampled_softmax", false, true));
}

TEST(MidxLoss, IgnoredQueriesSayNothing) {
  for (const bool shared : {false, true}) {
    const auto value = [&](double padding) {
      torch::manual_seed(1);
      SampledSoftmaxLoss loss(kWidth, kClasses, MidxSampler(kClasses, kWidth, MidxOptions{.codewords = 6}).ptr(),
                              SamplingOptions{.num_samples = 20, .shared = shared});
      auto input = torch::randn({kQueries, kWidth});
      auto target = torch::arange(kQueries);
      input[0].fill_(padding);
      target[0] = -100;
      return loss(input, target).item<float>();
    };
    EXPECT_TRUE(std::isfinite(value(0)));
    EXPECT_EQ(value(0), value(std::nan("")));
  }
}

TEST(MidxSampler, OptionsThatContradictEachOther) {
  EXPECT_THROW(MidxSampler(kClasses, kWidth, MidxOptions{.exact = true, .learnable = true}), c10::ValueError);
  EXPECT_THROW(MidxSampler(kClasses, kWidth, MidxOptions{.distinct = true, .exact = true}), c10::ValueError);
  EXPECT_THROW(UnionSampler(std::vector<xsoftmax::samplers::UnionSamplerImpl::Part>{{MidxSampler(kClasses, kWidth).ptr(), 0}}), c10::ValueError);
}

} // namespace
