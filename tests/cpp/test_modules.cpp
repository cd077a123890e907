// C++ losses and samplers: agreement with the functional operators on the samplers' draws, state
// names of the Python modules, training.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <functional>
#include <limits>
#include <set>

namespace {

using torch::Tensor;
using xsoftmax::nn::LinearCrossEntropyLoss;
using xsoftmax::nn::LossOptions;
using xsoftmax::nn::SampledSoftmaxLoss;
using xsoftmax::nn::SamplingOptions;
namespace F = torch::nn::functional;
namespace samplers = xsoftmax::samplers;

constexpr int64_t kWidth = 6, kClasses = 40;

at::Generator generator(uint64_t seed) {
  at::Generator made = at::detail::createCPUGenerator();
  made.set_current_seed(seed);
  return made;
}

using Sampler = std::shared_ptr<samplers::SamplerImpl>;

Sampler uniform(int64_t num_samples = 8, std::optional<bool> shared = {}) {
  return samplers::UniformSampler(kClasses, num_samples, samplers::DrawOptions{.shared = shared})
      .ptr();
}

Tensor cross_entropy(xsoftmax::nn::LinearLossImpl& loss, const Tensor& input,
                     const Tensor& target) {
  return F::cross_entropy(loss.linear->forward(input), target);
}

class Modules : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(0); }

  Tensor input = torch::randn({7, kWidth});
  Tensor target = torch::tensor({3, 0, 39, -100, 2, 17, 17}, torch::kLong);
};

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

TEST_F(Modules, StateHasTheNamesOfPython) {
  SampledSoftmaxLoss loss(kWidth, kClasses, samplers::InBatchSampler(kClasses).ptr(),
                          SamplingOptions{},
                          LossOptions{.bias = true, .weight = torch::ones(kClasses)});
  std::set<std::string> names;
  for (const auto& item : loss->named_parameters()) names.insert(item.key());
  for (const auto& item : loss->named_buffers()) names.insert(item.key());
  for (const std::string name :
       {"linear.weight", "linear.bias", "weight", "sampler.counts", "sampler.total"}) {
    EXPECT_EQ(names.count(name), 1u) << name;
  }
}

TEST_F(Modules, SaveAndLoadKeepWhatTrainingMade) {
  const auto make = [] {
    return SampledSoftmaxLoss(kWidth, kClasses, samplers::InBatchSampler(kClasses).ptr(),
                              SamplingOptions{}, LossOptions{.bias = true});
  };
  SampledSoftmaxLoss loss = make(), other = make();
  loss->forward(input, target);
  std::stringstream stream;
  torch::save(loss, stream);
  torch::load(other, stream);
  EXPECT_TRUE(torch::equal(other->linear->weight, loss->linear->weight));
  EXPECT_EQ(std::dynamic_pointer_cast<samplers::InBatchSamplerImpl>(other->sampler)
                ->total.item<int64_t>(),
            6);
  EXPECT_TRUE(torch::equal(other->forward(input, target), loss->forward(input, target)));
}

// Values that follow from the constructor's arguments are not in a checkpoint, so the table of any
// loss can be loaded into any other.
TEST_F(Modules, CheckpointsGoIntoLossesWithAnotherHead) {
  LinearCrossEntropyLoss exact(kWidth, kClasses);
  SampledSoftmaxLoss plain(kWidth, kClasses, samplers::LogUniformSampler(kClasses, 5).ptr());
  for (const auto& save : std::vector<std::function<void(std::ostream&)>>{
           [&](std::ostream& to) { torch::save(exact, to); },
           [&](std::ostream& to) { torch::save(plain, to); }}) {
    SampledSoftmaxLoss loss(kWidth, kClasses, uniform(kClasses - 4),
                            SamplingOptions{.head = torch::arange(4)});
    std::stringstream stream;
    save(stream);
    torch::load(loss, stream);
    EXPECT_EQ(loss->head.numel(), 4);
    EXPECT_TRUE(torch::allclose(loss(input, target), cross_entropy(*loss, input, target),
                                1e-4)); // all classes are loaded
  }
}

TEST_F(Modules, TheStateOfAnotherSamplerStaysOut) {
  const auto midx = [] {
    return samplers::MidxSampler(kClasses, kWidth,
                                 samplers::MidxOptions{.num_samples = 4, .codewords = 4})
        .ptr();
  };
  const auto batch = [] { return samplers::InBatchSampler(kClasses).ptr(); };
  const std::vector<std::function<Sampler()>> makers{
      midx, batch,
      [&] { return samplers::UnionSampler(std::vector<Sampler>{batch(), midx()}).ptr(); },
      [&] { return samplers::ComplementSampler(midx(), 2).ptr(); }, [] { return uniform(); }};
  for (const auto& from : makers) {
    SampledSoftmaxLoss saved(kWidth, kClasses, from());
    saved->forward(input, target);
    for (const auto& to : makers) {
      SampledSoftmaxLoss loss(kWidth, kClasses, to());
      std::stringstream stream;
      torch::save(saved, stream);
      torch::load(loss, stream);
      EXPECT_TRUE(torch::equal(loss->linear->weight, saved->linear->weight));
      EXPECT_TRUE(loss->forward(input, target).isfinite().item<bool>());
    }
  }
}

// Tables without elements may be missing. If an index is incomplete, the error names the missing
// table.
TEST_F(Modules, APartOfAnIndexIsRefused) {
  const auto load = [&](const std::string& lost) {
    samplers::MidxSampler from(kClasses, kWidth,
                               samplers::MidxOptions{.num_samples = 4, .codewords = 4});
    samplers::MidxSampler to(kClasses, kWidth,
                             samplers::MidxOptions{.num_samples = 4, .codewords = 4});
    from->refresh(torch::randn({kClasses, kWidth}), std::nullopt);
    torch::serialize::OutputArchive archive;
    for (const auto& item : from->named_buffers()) {
      if (item.key() != lost && item.value().numel() > 0) {
        archive.write(item.key(), item.value(), /*is_buffer=*/true);
      }
    }
    std::stringstream stream;
    archive.save_to(stream);
    torch::serialize::InputArchive saved;
    saved.load_from(stream);
    to->load(saved);
    EXPECT_TRUE(torch::equal(to->table("codewords1"), from->table("codewords1")));
    EXPECT_EQ(to->table("prefix").numel(), 0);
  };
  load("");
  EXPECT_THROW(load("mass"), c10::ValueError);
}

TEST_F(Modules, ACheckpointOfAnotherShapeChangesNothing) {
  SampledSoftmaxLoss saved(kWidth, kClasses + 1, "in_batch"), loss(kWidth, kClasses, "in_batch");
  const Tensor before = loss->linear->weight.clone();
  std::stringstream stream;
  torch::save(saved, stream);
  EXPECT_THROW(torch::load(loss, stream), c10::ValueError);
  EXPECT_TRUE(torch::equal(loss->linear->weight, before));
}

TEST_F(Modules, CastsLeaveHeadAndTablesAsTheyAre) {
  const auto counts = torch::arange(1, kClasses + 1);
  for (const auto dtype : {torch::kBFloat16, torch::kDouble}) {
    SampledSoftmaxLoss loss(kWidth, kClasses, samplers::UnigramSampler(counts, 5).ptr(),
                            SamplingOptions{.head = torch::arange(3)});
    const auto before = loss->sampler->log_count(input, torch::arange(kClasses));
    loss->to(dtype);
    loss->to(torch::kCPU, dtype);
    EXPECT_EQ(loss->linear->weight.scalar_type(), dtype);
    EXPECT_TRUE(torch::equal(loss->sampler->log_count(input, torch::arange(kClasses)), before));
    EXPECT_TRUE(loss(input.to(dtype), target).isfinite().all().item<bool>());
  }
}

TEST_F(Modules, TheTableHasARowForEachClass) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(5));
  loss->linear->weight = torch::randn({kClasses + 1, kWidth}, torch::requires_grad());
  EXPECT_THROW(loss(input, target), c10::ValueError);
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

// Pending updates of the old table must not change the loaded one.
TEST_F(Modules, LoadingATableDropsItsPendingUpdates) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform());
  std::stringstream stream;
  torch::save(loss, stream);
  const Tensor before = loss->linear->weight.detach().clone();
  {
    xsoftmax::optim::RowSGD optimizer(loss->parameters(),
                                      xsoftmax::optim::RowSGDOptions(0.5).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss->forward(input, target).backward();
      optimizer.step();
    }
    torch::load(loss, stream);
  }
  EXPECT_TRUE(torch::equal(loss->linear->weight, before));
}

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

TEST_F(Modules, AMoveAppliesPendingUpdates) {
  const auto deferred = [&](bool move) {
    torch::manual_seed(3);
    SampledSoftmaxLoss loss(kWidth, kClasses, "uniform", SamplingOptions{.num_samples = 3});
    xsoftmax::optim::RowAdam optimizer(loss->parameters(),
                                       xsoftmax::optim::RowAdamOptions(0.05).weight_decay(0.5));
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      loss->forward(input, target, generator(step)).backward();
      optimizer.step();
    }
    move ? loss->to(torch::kDouble) : optimizer.flush();
    return loss->linear->weight.detach().to(torch::kDouble);
  };
  EXPECT_TRUE(torch::allclose(deferred(true), deferred(false), 1e-6, 1e-7));
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
