// Gradients computed in chunks of a batch equal those of one step.

#include <xsoftmax/xsoftmax.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

namespace {

using torch::Tensor;
using Vectors = std::vector<Tensor>;

struct Towers {
  torch::nn::Linear query{6, 4}, item{5, 4};
  torch::nn::Dropout dropout{0.5};
  xsoftmax::nn::TwoTowerLoss loss{xsoftmax::TwoTowerOptions{.num_items = 30}};
  Tensor queries = torch::randn({7, 6}), items = torch::randn({7, 5}), item_id = torch::arange(7);

  std::vector<xsoftmax::CachedTower> parts() {
    return {{[this](const Vectors& inputs) { return dropout(query(inputs[0])); }, {queries}},
            {[this](const Vectors& inputs) { return item(inputs[0]) * inputs[1]; },
             {items, torch::ones({7, 1})}}};
  }
  std::vector<Tensor> gradients() const {
    return {query->weight.grad(), query->bias.grad(), item->weight.grad(), item->bias.grad()};
  }
};

TEST(CachedStep, GivesTheGradientsOfOneStep) {
  for (const int64_t chunk : {1, 3, 7, 100}) {
    torch::manual_seed(5);
    Towers once, chunks;
    for (const bool query : {true, false}) {
      auto& from = query ? once.query : once.item;
      auto& to = query ? chunks.query : chunks.item;
      torch::NoGradGuard guard;
      to->weight.copy_(from->weight);
      to->bias.copy_(from->bias);
    }
    chunks.queries = once.queries, chunks.items = once.items;
    const auto loss_of = [](Towers& towers) {
      return [&](const Vectors& vectors) {
        return towers.loss(vectors[0], vectors[1], towers.item_id);
      };
    };
    torch::manual_seed(9);
    const Tensor value = xsoftmax::cached_step(loss_of(chunks), chunks.parts(), chunk);
    EXPECT_FALSE(value.requires_grad());
    const Tensor after = torch::rand({1});
    torch::manual_seed(9);
    Vectors rows; // dropout masks are drawn per chunk
    for (int64_t begin = 0; begin < 7; begin += chunk) {
      rows.push_back(once.parts()[0].tower({once.queries.slice(0, begin, begin + chunk)}));
    }
    const Tensor want =
        loss_of(once)({torch::cat(rows), once.parts()[1].tower(once.parts()[1].inputs)});
    want.backward();
    // The second pass leaves the generator in the state it has after one step.
    EXPECT_TRUE(torch::rand({1}).equal(after));
    EXPECT_TRUE(torch::allclose(value, want));
    for (size_t i = 0; i < once.gradients().size(); ++i) {
      EXPECT_TRUE(torch::allclose(chunks.gradients()[i], once.gradients()[i], 1e-4, 1e-6)) << i;
    }
  }
}

TEST(CachedStep, RefusesWhatDoesNotFit) {
  Towers towers;
  const auto loss = [](const Vectors& vectors) { return vectors[0].sum(); };
  EXPECT_THROW(xsoftmax::cached_step(loss, towers.parts(), 0), c10::ValueError);
  EXPECT_THROW(xsoftmax::cached_step(loss, {{[](const Vectors& x) { return x[0]; }, {}}}, 2),
               c10::ValueError);
  EXPECT_THROW(xsoftmax::cached_step(
                   loss, {{[](const Vectors& x) { return x[0].sum(0); }, {towers.queries}}}, 2),
               c10::ValueError);
  EXPECT_THROW(
      xsoftmax::cached_step(
          loss, {{[](const Vectors& x) { return x[0]; }, {towers.queries, torch::ones({3})}}}, 2),
      c10::ValueError);
  bool called = false;
  xsoftmax::cached_step(loss, towers.parts(), 2, [&](const Tensor& value) {
    called = true;
    value.backward();
  });
  EXPECT_TRUE(called);
  EXPECT_FALSE(towers.gradients()[2].defined()); // the loss does not depend on it
}

} // namespace
