// The two-tower loss: formula, training, state, errors that change nothing; the operators of a step
// as functions.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

namespace {

using torch::Tensor;
using xsoftmax::TwoTowerOptions;
using xsoftmax::nn::TwoTowerLoss;
using xsoftmax::samplers::StreamingCounts;
namespace F = torch::nn::functional;

constexpr int64_t kItems = 20, kWidth = 6, kQueries = 8;

class TwoTowers : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(0); }

  std::vector<std::pair<std::string, Tensor>> state(const TwoTowerLoss& loss) {
    std::vector<std::pair<std::string, Tensor>> found;
    for (const auto& tensors : {loss->named_parameters(), loss->named_buffers()}) {
      for (const auto& item : tensors) {
        found.emplace_back(item.key(), item.value().detach().clone());
      }
    }
    return found;
  }

  void expect_same(const TwoTowerLoss& loss,
                   const std::vector<std::pair<std::string, Tensor>>& before) {
    const auto now = state(loss);
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(torch::equal(now[i].second, before[i].second)) << before[i].first;
    }
  }

  Tensor query = torch::randn({kQueries, kWidth}), item = torch::randn({kQueries, kWidth});
  Tensor ids = torch::arange(kQueries);
};

TEST_F(TwoTowers, UncorrectedLossOfDifferentItemsIsCrossEntropyOfTheBatch) {
  TwoTowerLoss loss(TwoTowerOptions{.temperature = 0.5, .similarity = "cosine"}, nullptr);
  const auto unit = [](const Tensor& vectors) {
    return F::normalize(vectors, F::NormalizeFuncOptions().dim(1));
  };
  const Tensor want = F::cross_entropy(unit(query).mm(unit(item).t()) / 0.5, ids);
  EXPECT_TRUE(torch::allclose(loss(query, item, ids), want));
}

// Users and items are of four kinds. The towers learn to find an item of the user's kind, popular
// or not.
TEST_F(TwoTowers, TwoTowersLearn) {
  torch::nn::Linear users(4, kWidth);
  torch::nn::Embedding items(kItems, kWidth);
  TwoTowerLoss loss(TwoTowerOptions{.num_items = kItems,
                                    .temperature = 0.2,
                                    .similarity = "cosine",
                                    .memory = 32,
                                    .dim = kWidth},
                    StreamingCounts(kItems),
                    /*learn_temperature=*/true);
  std::vector<Tensor> parameters = users->parameters();
  for (const auto& more : {items->parameters(), loss->parameters()}) {
    parameters.insert(parameters.end(), more.begin(), more.end());
  }
  torch::optim::Adam optimizer(parameters, torch::optim::AdamOptions(0.02));
  for (int step = 0; step < 200; ++step) {
    const Tensor chosen = torch::randint(kItems, {32}),
                 kind = F::one_hot(chosen.remainder(4), 4).to(torch::kFloat),
                 drawn = torch::randint(kItems, {8});
    optimizer.zero_grad();
    loss(users(kind), items(chosen), chosen, std::make_tuple(items(drawn), drawn)).backward();
    optimizer.step();
  }
  EXPECT_NE(loss->temperature.item<float>(), 0.2f);
  EXPECT_EQ(loss->counts->total.item<int64_t>(), 200 * 32);
  EXPECT_TRUE(torch::equal(loss->memory_state, torch::tensor({200 * 32, 200}, torch::kLong)));
  const Tensor scores =
      users(torch::eye(4)).mm(F::normalize(items->weight, F::NormalizeFuncOptions().dim(1)).t());
  EXPECT_TRUE(torch::equal(std::get<1>(scores.topk(kItems / 4, 1)).remainder(4),
                           torch::arange(4).unsqueeze(1).expand({4, kItems / 4})));
}

TEST_F(TwoTowers, OnlyTrainingTakesABatchIn) {
  TwoTowerLoss loss(TwoTowerOptions{.num_items = kItems, .memory = 5, .dim = kWidth});
  const Tensor first = loss(query, item, ids);
  const auto before = state(loss);
  loss->eval();
  loss(query, item, ids + 3);
  expect_same(loss, before);
  loss->train();
  loss->counts->eval(); // frozen counts do not change
  loss(query, item, ids + 3);
  EXPECT_EQ(loss->counts->total.item<int64_t>(), kQueries);
  EXPECT_EQ(loss->memory_state[0].item<int64_t>(), 2 * kQueries);
}

TEST_F(TwoTowers, AnErrorChangesNothing) {
  TwoTowerLoss loss(TwoTowerOptions{.num_items = kItems, .memory = 5, .dim = kWidth});
  loss(query, item, ids);
  const auto before = state(loss);
  EXPECT_THROW(loss(query, item, ids + kItems), c10::IndexError);
  EXPECT_THROW(loss(query, item, ids, std::make_tuple(item, ids + kItems)), c10::IndexError);
  EXPECT_THROW(loss(query, item, ids.to(torch::kInt)), c10::TypeError);
  EXPECT_THROW(loss(query.narrow(1, 0, 3), item.narrow(1, 0, 3), ids), c10::ValueError);
  EXPECT_THROW(loss(query, item, ids, std::nullopt, torch::ones(3)), c10::ValueError);
  expect_same(loss, before);
  EXPECT_THROW(TwoTowerLoss(TwoTowerOptions{.temperature = 0.0}), c10::ValueError);
  EXPECT_THROW(TwoTowerLoss(TwoTowerOptions{.memory = 3}), c10::ValueError);
  EXPECT_THROW(TwoTowerLoss(TwoTowerOptions{.num_items = 3}, StreamingCounts(4)), c10::ValueError);
}

TEST_F(TwoTowers, ALossThatGrewIsALargerOne) {
  TwoTowerLoss grown(TwoTowerOptions{.num_items = kQueries, .memory = 5, .dim = kWidth});
  TwoTowerLoss larger(TwoTowerOptions{.num_items = kItems, .memory = 5, .dim = kWidth});
  for (auto& loss : {grown, larger}) {
    TwoTowerLoss each = loss;
    each(query, item, ids);
  }
  EXPECT_THROW(grown(query, item, ids + 1), c10::IndexError);
  EXPECT_THROW(grown->resize_classes(0), c10::ValueError);
  grown->resize_classes(kItems);
  EXPECT_TRUE(torch::equal(grown(query, item, ids + 1), larger(query, item, ids + 1)));
  expect_same(grown, state(larger));
  grown->resize_classes(6); // of the newest five ids, 4 to 8, two remain
  EXPECT_TRUE(torch::equal(grown->memory_id, torch::tensor({4, 5, 0, 0, 0}, torch::kLong)));
  EXPECT_EQ(grown->counts->count.size(0), 6);
}

TEST_F(TwoTowers, TopkIsThatOfLogSoftmax) {
  TwoTowerLoss loss(TwoTowerOptions{.temperature = 0.1, .similarity = "cosine"});
  const Tensor vectors = torch::randn({kItems, kWidth}),
               seen = torch::randint(kItems, {kQueries, 3});
  const auto unit = [](const Tensor& rows) {
    return F::normalize(rows, F::NormalizeFuncOptions().dim(1));
  };
  const Tensor want = torch::log_softmax(unit(query).mm(unit(vectors).t()) / 0.1, 1);
  const auto [values, rows] = loss->topk(query, vectors, 5);
  EXPECT_TRUE(torch::allclose(values, std::get<0>(want.topk(5)), 1e-4, 1e-5));
  EXPECT_TRUE(torch::equal(rows, std::get<1>(want.topk(5))));
  EXPECT_TRUE(torch::equal(std::get<1>(loss->topk(query, vectors, 5, seen)),
                           std::get<1>(want.scatter(1, seen, -INFINITY).topk(5))));
  EXPECT_THROW(loss->topk(query, vectors, kItems + 1), c10::ValueError);
}

TEST_F(TwoTowers, CastsKeepIdsAndCounts) {
  TwoTowerLoss loss(
      TwoTowerOptions{.num_items = kItems, .temperature = 0.07, .memory = 5, .dim = kWidth});
  loss(query, item, ids);
  const Tensor id = loss->memory_id.clone(), number = loss->memory_state.clone();
  loss->to(torch::kCPU, torch::kDouble);
  EXPECT_EQ(loss->memory.scalar_type(), torch::kDouble);
  EXPECT_TRUE(torch::equal(loss->memory_id, id) && torch::equal(loss->memory_state, number));
  loss->to(torch::kHalf);
  EXPECT_EQ(loss->temperature.item<double>(), 0.07);
  EXPECT_EQ(loss->counts->count.scalar_type(), torch::kLong);
  EXPECT_TRUE(loss(query, item, ids).isfinite().item<bool>());
}

TEST_F(TwoTowers, AMeanOverNoQueryIsNaN) {
  const Tensor none = torch::zeros({0, kWidth}), no_ids = torch::zeros({0}, torch::kLong);
  EXPECT_TRUE(TwoTowerLoss(TwoTowerOptions{})(none, none, no_ids).isnan().item<bool>());
  EXPECT_EQ(TwoTowerLoss(TwoTowerOptions{.reduction = "sum"})(none, none, no_ids).item<float>(), 0);
}

TEST_F(TwoTowers, TheirLossAsAFunction) {
  const Tensor log_count = torch::rand({kQueries});
  xsoftmax::TowerOptions options;
  options.reduction = "none";
  const Tensor got =
      xsoftmax::tower_loss(query, item, ids, {item}, {{ids, log_count, {}, true}}, options);
  const Tensor positive = (query * item).sum(1, true),
               others = (query.mm(item.t()) - log_count)
                            .masked_fill(torch::eye(kQueries).to(torch::kBool), -INFINITY);
  EXPECT_TRUE(
      torch::allclose(got, torch::cat({positive, others}, 1).logsumexp(1) - positive.squeeze(1)));
}

TEST_F(TwoTowers, SeveralPositivesAsAFunction) {
  const Tensor table = torch::randn({kItems, kWidth}), target = torch::stack({ids, ids + 5}, 1);
  const Tensor scores = query.mm(table.t()), of_target = scores.gather(1, target);
  const Tensor others = scores.scatter(1, target, -INFINITY).logsumexp(1, true);
  xsoftmax::ExactPositivesOptions options;
  EXPECT_TRUE(torch::allclose(xsoftmax::linear_positives_loss(query, table, std::nullopt, target),
                              F::softplus(others - of_target).mean()));
  options.positives = "sum";
  const Tensor want = F::softplus(others - of_target.logsumexp(1, true)).mean();
  EXPECT_TRUE(torch::allclose(
      xsoftmax::linear_positives_loss(query, table, std::nullopt, target, std::nullopt, options),
      want));
}

} // namespace
