// Features that only MIDX has, as C++ modules. Features of all samplers that follow the class table
// are tested in test_adaptive_samplers.cpp.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/adaptive_samplers.h>

#include <cmath>

namespace {

using torch::Tensor;
using namespace xsoftmax::samplers;

constexpr int64_t kClasses = 300, kWidth = 7, kQueries = 4;

class Midx : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    weight = torch::randn({kClasses, kWidth});
    bias = torch::randn({kClasses});
    queries = torch::randn({kQueries, kWidth});
    target = torch::tensor({9, -1, 12, 80}, torch::kLong);
  }

  std::optional<Tensor> maybe_bias() const {
    return GetParam() ? std::optional<Tensor>(bias) : std::nullopt;
  }
  MidxOptions options() const {
    return {.codewords = 6, .bias = GetParam(), .exclude = torch::arange(5)};
  }

  template <typename Sampler = MidxSampler>
  Sampler make(MidxOptions options) const {
    Sampler sampler(kClasses, kWidth, options);
    sampler->refresh(weight, maybe_bias());
    return sampler;
  }

  Tensor weight, bias, queries, target;
};

INSTANTIATE_TEST_SUITE_P(WithAndWithoutBias, Midx, testing::Bool());

TEST_P(Midx, SharedSetsAreDistinctAndSumToTheirSize) {
  for (const char* kind : {"rq", "pq"}) {
    MidxOptions asked = options();
    asked.num_samples = 40, asked.shared = true, asked.kind = kind;
    MidxSampler sampler = make(asked);
    const auto drawn = sampler->sample(queries, target)[0];
    EXPECT_TRUE(drawn.distinct);
    EXPECT_EQ(std::get<0>(at::_unique(drawn.ids)).numel(), 40);
    EXPECT_EQ(sampler->default_estimator(), "sampled_softmax");
    // The queries that are not ignored.
    const Tensor count = sampler->log_count(queries.index_select(0, torch::tensor({0, 2, 3})),
                                            torch::arange(kClasses));
    EXPECT_NEAR(count.exp().sum().item<double>(), 40, 1e-3);
    EXPECT_TRUE(torch::allclose(count.index_select(0, drawn.ids), drawn.log_count, 1e-4, 1e-4));
  }
}

TEST_P(Midx, RefreshSaysHowWellTheIndexFits) {
  const auto stats = make(options())->refresh(weight, maybe_bias());
  for (const char* name : {"distortion", "mean_square", "inertia1", "inertia2", "cells"}) {
    EXPECT_EQ(stats.count(name), 1u) << name;
  }
  EXPECT_LT(stats.at("distortion"), stats.at("mean_square"));
}

TEST_P(Midx, ADrawWhileTrainingMarksWhatWillBeScored) {
  MidxOptions asked = options();
  asked.update_every = 4;
  MidxSampler sampler = make(asked);
  sampler->eval();
  sampler->sample(queries, target);
  EXPECT_EQ(sampler->table("touched").sum().item<int64_t>(), 0);
  sampler->train();
  const Tensor ids =
      sampler->sample(queries, target)[0].ids.index_select(0, torch::tensor({0, 2, 3}));
  const Tensor scored =
      std::get<0>(at::_unique(torch::cat({ids.flatten(), torch::tensor({9, 12, 80})})));
  EXPECT_TRUE(torch::equal(sampler->table("touched").nonzero().squeeze(1), scored));
  // An update recodes exactly these classes.
  const Tensor before = sampler->table("cell").clone();
  weight.normal_();
  sampler->update(weight, maybe_bias(), scored);
  const Tensor moved = sampler->table("cell").ne(before).nonzero().squeeze(1);
  EXPECT_GT(moved.numel(), 0);
  EXPECT_TRUE(torch::isin(moved, scored).all().item<bool>());
}

TEST_P(Midx, ExactDrawsAreThoseOfTheSoftmax) {
  auto sampler = make<ExactMidxSampler>(options());
  weight.normal_();
  sampler->prepare(weight, maybe_bias()); // a step reads the current table
  Tensor scores = torch::mm(queries, weight.t()) + (GetParam() ? bias : torch::zeros({kClasses}));
  scores.narrow(1, 0, 5).fill_(-INFINITY);
  EXPECT_TRUE(torch::allclose(sampler->log_count(queries, torch::arange(kClasses)),
                              scores.log_softmax(1) + std::log(20.0), 1e-4, 1e-4));
  MidxOptions shared = options();
  shared.shared = true;
  EXPECT_THROW(ExactMidxSampler(kClasses, kWidth, shared), c10::ValueError);
}

TEST_P(Midx, SpreadKeepsTheMeanOfQueriesThatCount) {
  auto sampler = make<SpreadMidxSampler>(options());
  sampler->sample(queries, target);
  const Tensor counted =
      queries.index_select(0, torch::tensor({0, 2, 3})).to(torch::kDouble).square().sum(1).mean();
  EXPECT_TRUE(torch::allclose(sampler->table("query_square"), counted));
}

TEST_P(Midx, LearnableCodewordsHaveTheGradientOfTheirLoss) {
  auto sampler = make<LearnableMidxSampler>(options());
  ASSERT_EQ(sampler->parameters().size(), 2u);
  sampler->codebook_loss(queries, weight, maybe_bias()).backward();
  for (const Tensor& codewords : sampler->parameters()) {
    EXPECT_GT(codewords.grad().abs().sum().item<double>(), 0.0);
  }
  const Tensor before = sampler->table("codewords1").detach().clone();
  weight.normal_();
  sampler->refresh(weight, maybe_bias()); // keeps the learned codewords
  EXPECT_TRUE(torch::equal(sampler->table("codewords1"), before));
  EXPECT_THROW(LearnableMidxSampler(kClasses, kWidth, options(), 0), c10::ValueError);
}

TEST_P(Midx, BadArgumentsThrow) {
  EXPECT_THROW(MidxSampler(kClasses, kWidth, MidxOptions{.codewords = 0}), c10::ValueError);
  EXPECT_THROW(MidxSampler(kClasses, kWidth, MidxOptions{.kind = "opq"}), c10::ValueError);
  EXPECT_THROW(MidxSampler(kClasses, 1, MidxOptions{.kind = "pq"}), c10::ValueError);
  EXPECT_THROW(
      MidxSampler(kClasses, kWidth, MidxOptions{.num_samples = kClasses + 1, .shared = true}),
      c10::ValueError);
  EXPECT_THROW(make(options())->log_count(queries, torch::tensor({kClasses})), c10::IndexError);
}

} // namespace
