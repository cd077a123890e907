// C++ losses: agreement with the functional operators on the samplers' draws, training.

#include "modules.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace modules_test;

TEST_F(Modules, SoftTargetsLogProbabilitiesAndEntropyAreThoseOfDenseLogits) {
  LinearCrossEntropyLoss loss(kWidth, kClasses, LossOptions{.bias = true});
  SampledSoftmaxLoss sampled(kWidth, kClasses,
                             samplers::FixedSampler(kClasses, torch::arange(kClasses)).ptr(),
                             SamplingOptions{}, LossOptions{.linear = loss->linear});
  const Tensor ids = torch::randint(kClasses, {7, 3}), prob = torch::rand({7, 3});
  const Tensor log_p = torch::log_softmax(loss->linear->forward(input), -1);
  EXPECT_TRUE(torch::allclose(loss->log_prob(input, ids), log_p.gather(1, ids), 1e-5, 1e-5));
  EXPECT_TRUE(torch::allclose(loss->log_prob(input), log_p, 1e-5, 1e-5));
  EXPECT_TRUE(torch::allclose(loss->entropy(input), -(log_p.exp() * log_p).sum(1), 1e-5, 1e-5));
  const Tensor want = -(prob * log_p.gather(1, ids)).sum(1).mean();
  EXPECT_TRUE(torch::allclose(loss->forward(input, ids, prob), want, 1e-5, 1e-5));
  EXPECT_TRUE(torch::allclose(loss->exact(input, ids, prob), want, 1e-5, 1e-5));
  EXPECT_TRUE(
      torch::allclose(sampled->forward(input, ids, generator(5), std::nullopt, std::nullopt, prob),
                      want, 1e-5, 1e-5));
  EXPECT_THROW(loss->forward(input, ids, prob.narrow(1, 0, 2)), c10::Error);
}

TEST_F(Modules, SampledLossIsTheOpOnTheSamplersDraws) {
  for (const std::string estimator : {"sampled_softmax", "ranking"}) {
    for (const bool shared : {true, false}) {
      const SamplingOptions sampling{.estimator = estimator, .head = torch::arange(4)};
      SampledSoftmaxLoss loss(kWidth, kClasses, uniform(8, shared), sampling,
                              LossOptions{.bias = true});
      const Tensor got = loss->forward(input, target, generator(5));

      const auto drawn =
          loss->sampler->sample(input, target.masked_fill(target.lt(0), -1), generator(5));
      EXPECT_GE(drawn.at(0).ids.min().item<int64_t>(), 4);
      EXPECT_EQ(drawn.at(0).distinct, shared);
      xsoftmax::SampledSoftmaxOptions options;
      options.estimator = estimator;
      const Tensor want = xsoftmax::sampled_softmax_loss(
          input, loss->linear->weight, loss->linear->bias, target,
          {{torch::arange(4), torch::zeros(4), {}, true}, drawn.at(0)}, options);
      EXPECT_TRUE(torch::equal(got, want)) << estimator << ", shared " << shared;
      EXPECT_TRUE(std::isfinite(got.item<float>()));
    }
  }
}

TEST_F(Modules, DrawsAreThoseOfTheSeed) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform());
  torch::manual_seed(3);
  const Tensor first = loss->forward(input, target), second = loss->forward(input, target);
  torch::manual_seed(3);
  EXPECT_TRUE(torch::equal(loss->forward(input, target), first));
  EXPECT_FALSE(torch::equal(first, second));
  EXPECT_TRUE(torch::equal(loss->forward(input, target, generator(3)), first));
}

TEST_F(Modules, EvalIsExact) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), SamplingOptions{},
                          LossOptions{.bias = true});
  loss->eval();
  EXPECT_TRUE(torch::allclose(loss->forward(input, target), cross_entropy(*loss, input, target)));
  // Also [B, T, D], reduction "none" and class weights.
  const Tensor weight = torch::linspace(0.1, 2, kClasses);
  LinearCrossEntropyLoss none(
      kWidth, kClasses, LossOptions{.weight = weight, .reduction = "none", .ignore_index = 17});
  const Tensor sequences = torch::randn({2, 3, kWidth}),
               targets = torch::randint(kClasses, {2, 3}, torch::kLong);
  const Tensor want = F::cross_entropy(
      none->linear->forward(sequences).flatten(0, 1), targets.flatten(),
      F::CrossEntropyFuncOptions().weight(weight).ignore_index(17).reduction(torch::kNone));
  EXPECT_TRUE(torch::allclose(none->forward(sequences, targets), want.view({2, 3})));
}

TEST_F(Modules, PredictionIsThatOfTheLogits) {
  LinearCrossEntropyLoss loss(kWidth, kClasses, LossOptions{.bias = true});
  const Tensor sequences = torch::randn({2, 3, kWidth});
  const Tensor want = torch::log_softmax(loss->linear->forward(sequences), -1);
  const auto [values, ids] = loss->topk(sequences, 4);
  const auto [want_values, want_ids] = want.topk(4);
  EXPECT_TRUE(torch::allclose(values, want_values, 1e-4, 1e-5));
  EXPECT_TRUE(torch::equal(ids, want_ids));
  EXPECT_TRUE(torch::equal(loss->predict(sequences), want.argmax(-1)));
  EXPECT_TRUE(torch::allclose(loss->log_prob(sequences), want));
}

TEST_F(Modules, LogitsAreScaledAndCapped) {
  const LossOptions options{.bias = true, .logit_scale = 1.7, .softcap = 3.0, .z_loss = 0.1};
  const auto check = [&](xsoftmax::nn::LinearLossImpl& loss) {
    const Tensor logits = 3.0 * (loss.linear->forward(input) * (1.7 / 3.0)).tanh();
    const Tensor z =
        logits.logsumexp(1).square().index_select(0, target.ge(0).nonzero().squeeze(1)).mean();
    EXPECT_TRUE(loss.exact(input, target).allclose(F::cross_entropy(logits, target) + 0.1 * z));
    EXPECT_TRUE(loss.log_prob(input).allclose(logits.log_softmax(1)));
    const auto [values, ids] = loss.topk(input, 3);
    EXPECT_TRUE(values.allclose(std::get<0>(logits.log_softmax(1).topk(3)), 1e-4, 1e-6));
    EXPECT_TRUE(ids.equal(std::get<1>(loss.linear->forward(input).topk(3))));
  };
  LinearCrossEntropyLoss exact(kWidth, kClasses, options);
  check(*exact);
  SampledSoftmaxLoss sampled(kWidth, kClasses, Sampler(),
                             SamplingOptions{.head = torch::arange(kClasses)}, options);
  check(*sampled);
  EXPECT_TRUE(sampled->forward(input, target).allclose(sampled->exact(input, target)));
}

TEST_F(Modules, PredictionLeavesOutWhatIsExcluded) {
  LinearCrossEntropyLoss loss(kWidth, kClasses, LossOptions{.bias = true});
  const Tensor sequences = torch::randn({2, 3, kWidth});
  Tensor exclude = torch::randint(kClasses, {2, 3, 5}, torch::kLong);
  exclude.index_put_({torch::indexing::Slice(), 0, torch::indexing::Slice(1)},
                     -1);  // the first of each sequence: one id, and padding
  // An extra class absorbs the padding.
  const Tensor places = torch::where(exclude < 0, kClasses, exclude);
  const Tensor mask = torch::zeros({2, 3, kClasses + 1})
                          .scatter(-1, places, -std::numeric_limits<double>::infinity())
                          .narrow(-1, 0, kClasses);
  const Tensor without = torch::log_softmax(loss->linear->forward(sequences), -1) + mask;
  const auto [want_values, want_ids] = without.topk(4);
  const auto [values, ids] = loss->topk(sequences, 4, exclude);
  EXPECT_TRUE(torch::allclose(values, want_values, 1e-4, 1e-5));
  EXPECT_TRUE(torch::equal(ids, want_ids));
}

TEST_F(Modules, HeadOfAllButOneClassIsExact) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(1),
                          SamplingOptions{.head = torch::arange(kClasses - 1)});
  EXPECT_TRUE(
      torch::allclose(loss->forward(input, target), cross_entropy(*loss, input, target), 1e-4));
}

TEST_F(Modules, HeadMayBeAnyIds) {
  const Tensor head = torch::tensor({30, 2, 17}, torch::kLong);
  SampledSoftmaxLoss loss(kWidth, kClasses,
                          samplers::LogUniformSampler(kClasses, kClasses - 3).ptr(),
                          SamplingOptions{.head = head});
  EXPECT_TRUE(torch::equal(loss->head, std::get<0>(head.sort())));
  EXPECT_TRUE(loss->sampler->log_count(input, head).isneginf().all().item<bool>());
  EXPECT_TRUE(
      torch::allclose(loss->forward(input, target), cross_entropy(*loss, input, target), 1e-4));
}

TEST_F(Modules, TiedTablesHaveOneGradient) {
  torch::nn::Embedding embedding(kClasses, kWidth);
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), SamplingOptions{.sparse_grad = false});
  loss->linear->weight = embedding->weight;
  loss->forward(embedding->forward(target.clamp_min(0)), target, generator(1)).backward();
  EXPECT_TRUE(embedding->weight.grad().is_same(loss->linear->weight.grad()));
  EXPECT_TRUE(embedding->weight.grad().ne(0).any().item<bool>());
}

TEST_F(Modules, TrainingReducesTheExactLoss) {
  const auto counts = torch::arange(1, kClasses + 1);
  for (const std::string name : {"uniform", "log_uniform", "unigram", "in_batch"}) {
    torch::manual_seed(0);
    const auto sampler = samplers::make_sampler(
        name,
        {.num_classes = kClasses,
         .num_samples = name == "in_batch" ? std::nullopt : std::optional<int64_t>(8),
         .counts = counts});
    SampledSoftmaxLoss loss(kWidth, kClasses, sampler, SamplingOptions{.sparse_grad = true},
                            LossOptions{.bias = true});
    xsoftmax::optim::RowAdam optimizer(loss->parameters(), xsoftmax::optim::RowAdamOptions(0.05));
    const Tensor targets = torch::arange(kClasses).repeat({4});
    const Tensor queries = torch::randn({kClasses, kWidth}).index_select(0, targets) +
        0.1 * torch::randn({4 * kClasses, kWidth});
    const float before = cross_entropy(*loss, queries, targets).item<float>();
    for (int step = 0; step < 60; ++step) {
      optimizer.zero_grad();
      loss->forward(queries, targets).backward();
      EXPECT_TRUE(loss->linear->weight.grad().is_sparse());
      optimizer.step();
    }
    loss->eval();
    EXPECT_LT(loss->forward(queries, targets).item<float>(), 0.5f * before) << name;
  }
}

TEST_F(Modules, GivenNegativesAreAFixedPartOfAUnion) {
  const Tensor ids = torch::tensor({5, 17, 39}, torch::kLong),
               padded = torch::tensor({17, -1, 5, 39, 5}, torch::kLong);
  for (const std::string estimator : {"sampled_softmax", "ranking", "nce"}) {
    for (const bool of_query : {false, true}) {
      const SamplingOptions sampling{.estimator = estimator};
      SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), sampling);
      SampledSoftmaxLoss joined(
          kWidth, kClasses,
          samplers::UnionSampler(
              std::vector<Sampler>{uniform(), samplers::FixedSampler(kClasses, ids).ptr()})
              .ptr(),
          sampling);
      joined->linear->weight = loss->linear->weight;
      const Tensor got =
          loss->forward(input, target, generator(5), of_query ? padded.expand({7, 5}) : padded);
      EXPECT_TRUE(torch::allclose(got, joined->forward(input, target, generator(5)), 1e-5, 1e-6))
          << estimator << ", of a query " << of_query;
    }
  }
  SampledSoftmaxLoss none(kWidth, kClasses, Sampler(nullptr));
  EXPECT_TRUE(torch::allclose(none->forward(input, target, {}, torch::arange(kClasses)),
                              none->exact(input, target), 1e-5, 1e-6));
  EXPECT_THROW(none->forward(input, target), c10::ValueError);
  EXPECT_THROW(none->forward(input, target, {}, torch::tensor({kClasses}, torch::kLong)),
               c10::Error);
  EXPECT_THROW(none->forward(input, target, {}, std::nullopt, torch::zeros({3})), c10::Error);
}

TEST_F(Modules, SeveralPositives) {
  const Tensor several = torch::stack({target, target, target.masked_fill(target.ge(0), 11)}, 1);
  for (const std::string positives : {"mean", "sum"}) {
    const LossOptions options{.reduction = "none", .positives = positives};
    SampledSoftmaxLoss loss(kWidth, kClasses, Sampler(nullptr), SamplingOptions{}, options);
    const Tensor scores = loss->linear->forward(input), first = target.clamp_min(0);
    const Tensor both = torch::stack({first, torch::full_like(first, 11)}, 1),
                 of_both = scores.gather(1, both);
    const Tensor others = scores.scatter(1, both, -INFINITY).logsumexp(1, true);
    const Tensor each =
        torch::softplus(others - (positives == "sum" ? of_both.logsumexp(1, true) : of_both))
            .mean(1);
    const Tensor want = each.masked_fill(target.lt(0), 0);
    EXPECT_TRUE(torch::allclose(loss->exact(input, several), want, 1e-5, 1e-6)) << positives;
    EXPECT_TRUE(torch::allclose(loss->forward(input, several, {}, torch::arange(kClasses)), want,
                                1e-5, 1e-6))
        << positives;
  }
}

TEST_F(Modules, NamesMakeSamplers) {
  SampledSoftmaxLoss loss(kWidth, kClasses, "uniform",
                          SamplingOptions{.num_samples = 4, .shared = false});
  EXPECT_EQ(loss->sampler->num_samples(), 4);
  EXPECT_FALSE(loss->sampler->shared());
  SampledSoftmaxLoss cane(
      kWidth, kClasses, "uniform",
      SamplingOptions{.estimator = "cane", .head = torch::arange(3), .num_samples = 4});
  // Noise is private: it represents the classes outside a query's candidates.
  EXPECT_FALSE(cane->sampler->shared());
  SampledSoftmaxLoss outside(kWidth, kClasses, "log_uniform",
                             SamplingOptions{.estimator = "complementary_sum", .num_samples = 4});
  EXPECT_EQ(outside->sampler->num_samples(), 4);
  for (auto& each : {loss, cane, outside}) {
    EXPECT_TRUE(each.ptr()->forward(input, target).isfinite().item<bool>());
  }
}

TEST_F(Modules, FromALinearSharesItsParameters) {
  torch::nn::Linear linear(kWidth, kClasses);
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), SamplingOptions{},
                          LossOptions{.linear = linear});
  loss->forward(input, target).backward();
  EXPECT_TRUE(loss->linear->weight.is_same(linear->weight));
  EXPECT_TRUE(linear->weight.grad().defined() && linear->bias.grad().defined());
  EXPECT_THROW(SampledSoftmaxLoss(kWidth + 1, kClasses, uniform(), SamplingOptions{},
                                  LossOptions{.linear = linear}),
               c10::ValueError);
}

TEST_F(Modules, ALogZLowersAllScores) {
  SampledSoftmaxLoss fixed(kWidth, kClasses, uniform(),
                           SamplingOptions{.estimator = "nce", .log_z = 2.0});
  SampledSoftmaxLoss learned(kWidth, kClasses, uniform(),
                             SamplingOptions{.estimator = "nce", .log_z = 2.0, .learn_log_z = true},
                             LossOptions{.linear = fixed->linear});
  const Tensor loss = learned->forward(input, target, generator(1));
  EXPECT_TRUE(torch::equal(loss, fixed->forward(input, target, generator(1))));
  loss.backward();
  EXPECT_NE(learned->log_z.grad().item<float>(), 0.0f);
  EXPECT_THROW(SampledSoftmaxLoss(kWidth, kClasses, uniform(), SamplingOptions{.log_z = 1.0}),
               c10::ValueError);
}

} // namespace
