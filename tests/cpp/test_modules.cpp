// The C++ losses and samplers: the functional operators on the samplers' draws, the state of their Python namesakes, training.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <functional>
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

std::shared_ptr<samplers::SamplerImpl> uniform() { return samplers::UniformSampler(kClasses).ptr(); }

Tensor cross_entropy(xsoftmax::nn::LinearLossImpl& loss, const Tensor& input, const Tensor& target) {
  return F::cross_entropy(loss.linear->forward(input), target);
}

class Modules : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(0); }

  Tensor input = torch::randn({7, kWidth});
  Tensor target = torch::tensor({3, 0, 39, -100, 2, 17, 17}, torch::kLong);
};

TEST_F(Modules, SampledLossIsTheOpOnTheSamplersDraws) {
  for (const std::string estimator : {"sampled_softmax", "ranking"}) {
    for (const bool shared : {true, false}) {
      const SamplingOptions sampling{.num_samples = 8, .shared = shared, .estimator = estimator, .head_classes = 4};
      SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), sampling, LossOptions{.bias = true});
      const Tensor got = loss->forward(input, target, generator(5));

      const auto drawn = loss->sampler->sample(input, 8, shared, target.clamp_min(0), generator(5));
      EXPECT_GE(drawn.ids.min().item<int64_t>(), 4);
      EXPECT_EQ(drawn.distinct, shared);
      const Tensor head = torch::arange(4), zeros = torch::zeros(4);
      Tensor count = drawn.target_log_count;
      if (estimator == "ranking") { // a class of the head is always there
        count = count.masked_fill(target.clamp_min(0).lt(4), 0.0);
      }
      const auto& linear = loss->linear;
      const Tensor want = shared
          ? xsoftmax::sampled_softmax_loss(input, linear->weight, linear->bias, target, std::nullopt, torch::cat({head, drawn.ids}),
                                           std::nullopt, torch::cat({zeros, drawn.log_count}), count, std::nullopt, estimator, true, 0, 12)
          : xsoftmax::sampled_softmax_loss(input, linear->weight, linear->bias, target, drawn.ids, head, drawn.log_count, zeros, count,
                                           std::nullopt, estimator, true, 0, 4);
      EXPECT_TRUE(torch::equal(got, want)) << estimator << ", shared " << shared;
      EXPECT_TRUE(std::isfinite(got.item<float>()));
    }
  }
}

TEST_F(Modules, DrawsAreThoseOfTheSeed) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), SamplingOptions{.num_samples = 8});
  torch::manual_seed(3);
  const Tensor first = loss->forward(input, target), second = loss->forward(input, target);
  torch::manual_seed(3);
  EXPECT_TRUE(torch::equal(loss->forward(input, target), first));
  EXPECT_FALSE(torch::equal(first, second));
  EXPECT_TRUE(torch::equal(loss->forward(input, target, generator(3)), first));
}

TEST_F(Modules, EvalIsExact) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), SamplingOptions{.num_samples = 8}, LossOptions{.bias = true});
  loss->eval();
  EXPECT_TRUE(torch::allclose(loss->forward(input, target), cross_entropy(*loss, input, target)));
  // [B, T, D] and "none" as well, and class weights.
  const Tensor weight = torch::linspace(0.1, 2, kClasses);
  LinearCrossEntropyLoss none(kWidth, kClasses, LossOptions{.weight = weight, .reduction = "none", .ignore_index = 17});
  const Tensor sequences = torch::randn({2, 3, kWidth}), targets = torch::randint(kClasses, {2, 3}, torch::kLong);
  const Tensor want = F::cross_entropy(none->linear->forward(sequences).flatten(0, 1), targets.flatten(),
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

TEST_F(Modules, HeadOfAllButOneClassIsExact) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), SamplingOptions{.num_samples = 1, .head_classes = kClasses - 1});
  EXPECT_TRUE(torch::allclose(loss->forward(input, target), cross_entropy(*loss, input, target), 1e-4));
}

TEST_F(Modules, HeadMayBeAnyIds) {
  const Tensor head = torch::tensor({30, 2, 17}, torch::kLong);
  SampledSoftmaxLoss loss(kWidth, kClasses, samplers::LogUniformSampler(kClasses).ptr(),
                          SamplingOptions{.num_samples = kClasses - 3, .head = head});
  EXPECT_TRUE(torch::equal(loss->head, std::get<0>(head.sort())));
  EXPECT_TRUE(loss->sampler->log_prob(input, head).isneginf().all().item<bool>());
  EXPECT_TRUE(torch::allclose(loss->forward(input, target), cross_entropy(*loss, input, target), 1e-4));
}

TEST_F(Modules, StateHasTheNamesOfPython) {
  SampledSoftmaxLoss loss(kWidth, kClasses, samplers::InBatchSampler(kClasses).ptr(), SamplingOptions{},
                          LossOptions{.bias = true, .weight = torch::ones(kClasses)});
  std::set<std::string> names;
  for (const auto& item : loss->named_parameters()) names.insert(item.key());
  for (const auto& item : loss->named_buffers()) names.insert(item.key());
  for (const std::string name : {"linear.weight", "linear.bias", "weight", "sampler.counts", "sampler.total"}) {
    EXPECT_EQ(names.count(name), 1u) << name;
  }
}

TEST_F(Modules, SaveAndLoadKeepWhatTrainingMade) {
  const auto make = [] {
    return SampledSoftmaxLoss(kWidth, kClasses, samplers::InBatchSampler(kClasses).ptr(), SamplingOptions{}, LossOptions{.bias = true});
  };
  SampledSoftmaxLoss loss = make(), other = make();
  loss->forward(input, target);
  std::stringstream stream;
  torch::save(loss, stream);
  torch::load(other, stream);
  EXPECT_TRUE(torch::equal(other->linear->weight, loss->linear->weight));
  EXPECT_EQ(std::dynamic_pointer_cast<samplers::InBatchSamplerImpl>(other->sampler)->total.item<int64_t>(), 6);
  EXPECT_TRUE(torch::equal(other->forward(input, target), loss->forward(input, target)));
}

// What follows from the constructor's arguments is not in a checkpoint: the table of any loss goes into any other.
TEST_F(Modules, CheckpointsGoIntoLossesWithAnotherHead) {
  LinearCrossEntropyLoss exact(kWidth, kClasses);
  SampledSoftmaxLoss plain(kWidth, kClasses, samplers::LogUniformSampler(kClasses).ptr(), SamplingOptions{.num_samples = 5});
  for (const auto& save : std::vector<std::function<void(std::ostream&)>>{[&](std::ostream& to) { torch::save(exact, to); },
                                                                          [&](std::ostream& to) { torch::save(plain, to); }}) {
    SampledSoftmaxLoss loss(kWidth, kClasses, samplers::UniformSampler(kClasses).ptr(),
                            SamplingOptions{.num_samples = kClasses - 4, .head_classes = 4});
    std::stringstream stream;
    save(stream);
    torch::load(loss, stream);
    EXPECT_EQ(loss->head.numel(), 4);
    EXPECT_TRUE(torch::allclose(loss(input, target), cross_entropy(*loss, input, target), 1e-4)); // all classes stand
  }
}

TEST_F(Modules, CastsLeaveHeadAndTablesAsTheyAre) {
  const auto counts = torch::arange(1, kClasses + 1);
  for (const auto dtype : {torch::kBFloat16, torch::kDouble}) {
    SampledSoftmaxLoss loss(kWidth, kClasses, samplers::UnigramSampler(counts).ptr(), SamplingOptions{.num_samples = 5, .head_classes = 3});
    const auto before = loss->sampler->log_prob(input, torch::arange(kClasses));
    loss->to(dtype);
    loss->to(torch::kCPU, dtype);
    EXPECT_EQ(loss->linear->weight.scalar_type(), dtype);
    EXPECT_TRUE(torch::equal(loss->sampler->log_prob(input, torch::arange(kClasses)), before));
    EXPECT_TRUE(loss(input.to(dtype), target).isfinite().all().item<bool>());
  }
}

TEST_F(Modules, TheTableHasARowForEachClass) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), SamplingOptions{.num_samples = 5});
  loss->linear->weight = torch::randn({kClasses + 1, kWidth}, torch::requires_grad());
  EXPECT_THROW(loss(input, target), c10::ValueError);
}

TEST_F(Modules, TiedTablesHaveOneGradient) {
  torch::nn::Embedding embedding(kClasses, kWidth);
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), SamplingOptions{.num_samples = 8, .sparse_grad = false});
  loss->linear->weight = embedding->weight;
  loss->forward(embedding->forward(target.clamp_min(0)), target, generator(1)).backward();
  EXPECT_TRUE(embedding->weight.grad().is_same(loss->linear->weight.grad()));
  EXPECT_TRUE(embedding->weight.grad().ne(0).any().item<bool>());
}

TEST_F(Modules, TrainingReducesTheExactLoss) {
  const auto counts = torch::arange(1, kClasses + 1);
  for (const std::string name : {"uniform", "log_uniform", "unigram", "in_batch"}) {
    torch::manual_seed(0);
    const auto sampler = samplers::make_sampler(name, kClasses, {}, counts);
    SampledSoftmaxLoss loss(kWidth, kClasses, sampler, SamplingOptions{.num_samples = 8}, LossOptions{.bias = true});
    xsoftmax::optim::RowAdam optimizer(loss->parameters(), xsoftmax::optim::RowAdamOptions(0.05));
    const Tensor targets = torch::arange(kClasses).repeat({4});
    const Tensor queries = torch::randn({kClasses, kWidth}).index_select(0, targets) + 0.1 * torch::randn({4 * kClasses, kWidth});
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

TEST_F(Modules, BadArgumentsThrow) {
  const auto make = [](const SamplingOptions& sampling, const LossOptions& options = {},
                       const std::shared_ptr<samplers::SamplerImpl>& sampler = uniform()) {
    SampledSoftmaxLoss(kWidth, kClasses, sampler, sampling, options);
  };
  EXPECT_THROW(make({.num_samples = -1}), c10::ValueError);
  EXPECT_THROW(make({.num_samples = kClasses - 1, .head_classes = 2}), c10::ValueError);
  EXPECT_THROW(make({.num_samples = 2}, {}, samplers::UnigramSampler((torch::arange(kClasses) == 3).to(torch::kFloat)).ptr()), c10::ValueError);
  EXPECT_THROW(make({.num_samples = 2}, {}, samplers::UnionSampler(std::vector<samplers::UnionSamplerImpl::Part>{
                                                {samplers::UniformSampler(kClasses).ptr(), kClasses + 1}}).ptr()), c10::ValueError);
  EXPECT_THROW(make({.estimator = "nce2"}), c10::ValueError);
  EXPECT_THROW(make({.head_classes = kClasses + 1}), c10::ValueError);
  EXPECT_THROW(make({.head_classes = 1, .head = torch::tensor({1}, torch::kLong)}), c10::ValueError);
  EXPECT_THROW(make({.head = torch::tensor({int64_t(1), kClasses}, torch::kLong)}), c10::IndexError);
  EXPECT_THROW(make({.head = torch::tensor({1, 1}, torch::kLong)}), c10::ValueError);
  EXPECT_THROW(make({.head = torch::tensor({1.0})}), c10::TypeError);
  EXPECT_THROW(make({}, {.reduction = "max"}), c10::ValueError);
  EXPECT_THROW(make({}, {.label_smoothing = 1.5}), c10::ValueError);
  EXPECT_THROW(make({}, {.weight = torch::ones(3)}), c10::ValueError);
  EXPECT_THROW(make({}, {.weight = torch::ones(kClasses), .label_smoothing = 0.1}), c10::ValueError);
  EXPECT_THROW(make({}, {}, std::shared_ptr<samplers::SamplerImpl>()), c10::ValueError);
  EXPECT_THROW(make({}, {}, samplers::UniformSampler(kClasses - 1).ptr()), c10::ValueError);
  EXPECT_THROW(make({.shared = false}, {}, samplers::InBatchSampler(kClasses).ptr()), c10::ValueError);
  EXPECT_THROW(make({.head_classes = 2}, {}, samplers::InBatchSampler(kClasses).ptr()), c10::TypeError);
  EXPECT_THROW(samplers::make_sampler("zipf", kClasses), c10::ValueError);
  EXPECT_THROW(LinearCrossEntropyLoss(kWidth, 0), c10::ValueError);
}

TEST_F(Modules, BadBatchesThrow) {
  SampledSoftmaxLoss loss(kWidth, kClasses, uniform(), SamplingOptions{.num_samples = 8});
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
