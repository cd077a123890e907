// IdTable: rows, resets and state. The eviction policy itself is tested in
// tests/python/table/test_id_table.py, on the same operators.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <cmath>
#include <sstream>

namespace {

using torch::Tensor;
namespace optim = xsoftmax::optim;

constexpr int64_t kCapacity = 12, kWidth = 4;

Tensor longs(std::vector<int64_t> values) { return torch::tensor(values, torch::kLong); }

// Rows 1 to 11 hold ids 1 to 11; id i was seen i times.
xsoftmax::nn::IdTable full_table(const xsoftmax::IdTableOptions& options = {}) {
  xsoftmax::nn::IdTable ids(kCapacity, options);
  const Tensor numbers = torch::arange(1, kCapacity);
  ids(numbers.repeat_interleave(numbers));
  return ids;
}

TEST(IdTable, GivesRowsToNewIdsWhileTraining) {
  xsoftmax::nn::IdTable ids(4);
  EXPECT_TRUE(torch::equal(ids(longs({7, -5, 7})), longs({1, 2, 1})));
  EXPECT_EQ(ids->size(), 2);
  const auto [rows, evicted] = ids->insert(longs({8, 9}));
  EXPECT_TRUE(torch::equal(rows, longs({3, 2})));
  EXPECT_TRUE(torch::equal(evicted, longs({2})));
  EXPECT_TRUE(torch::equal(ids->ids_of(torch::arange(4), 0), longs({0, 7, 9, 8})));
  EXPECT_TRUE(torch::equal(ids->remove(longs({9, 5})), longs({2, 0})));
  ids->eval();
  EXPECT_TRUE(torch::equal(ids(longs({7, 9, 8})), longs({1, 0, 3})));
  EXPECT_EQ(ids->size(), 2);
}

TEST(IdTable, ARowThatAnotherIdGetsIsReset) {
  xsoftmax::nn::IdTable ids = full_table();
  xsoftmax::samplers::UniformSampler sampler(kCapacity, 5);
  xsoftmax::nn::SampledSoftmaxLoss loss(kWidth, kCapacity, sampler.ptr(),
                                        xsoftmax::nn::SamplingOptions(),
                                        xsoftmax::nn::LossOptions{.bias = true});
  xsoftmax::samplers::StreamingCounts counts(kCapacity);
  const Tensor table = torch::ones({kCapacity, 2}).requires_grad_();
  ids->attach(loss->linear);
  ids->attach(counts);
  ids->attach(table, [](Tensor rows) { torch::nn::init::constant_(rows, 3); });
  std::vector<Tensor> parameters = loss->parameters();
  parameters.push_back(table);
  optim::RowAdam optimizer(parameters);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    (loss(torch::randn({40, kWidth}), torch::randint(kCapacity, {40})) + table.square().sum())
        .backward();
    optimizer.step();
  }
  counts->update(torch::arange(kCapacity));
  const Tensor weight = loss->linear->weight.detach().clone(),
               bias = loss->linear->bias.detach().clone();

  const Tensor gone = std::get<1>(ids->insert(longs({500})));
  ASSERT_TRUE(torch::equal(gone, longs({1})));
  const double bound = 1 / std::sqrt(double(kWidth));
  for (const auto& [now, before] : {std::pair(loss->linear->weight.detach(), weight),
                                    std::pair(loss->linear->bias.detach(), bias)}) {
    EXPECT_TRUE(now[1].ne(before[1]).all().item<bool>());
    EXPECT_LE(now[1].abs().max().item<double>(), bound);
    EXPECT_TRUE(torch::equal(now.slice(0, 2), before.slice(0, 2)));
  }
  EXPECT_TRUE(table[1].eq(3).all().item<bool>());
  EXPECT_FALSE(table[2].eq(3).any().item<bool>());
  const auto& state = static_cast<const optim::RowParamState&>(
                          *optimizer.state().at(loss->linear->weight.unsafeGetTensorImpl()))
                          .tensors;
  EXPECT_FALSE(state.at("exp_avg")[1].any().item<bool>());
  EXPECT_TRUE(state.at("exp_avg").slice(0, 2).any().item<bool>());
  EXPECT_EQ(counts->count[1].item<int64_t>(), 0);
  EXPECT_EQ(counts->total.item<int64_t>(), kCapacity - 1);
}

TEST(IdTable, AnInitThatDoesNotFitSaysSoWhenItIsAttached) {
  xsoftmax::nn::IdTable ids = full_table();
  torch::manual_seed(7);
  const Tensor expected = torch::rand({1});
  torch::manual_seed(7);
  EXPECT_THROW(ids->attach(torch::ones({kCapacity}),
                           [](Tensor rows) { torch::nn::init::kaiming_uniform_(rows); }),
               c10::Error); // needs two or more dimensions
  ids->attach(torch::ones({kCapacity, 2}), [](Tensor rows) { torch::nn::init::normal_(rows); });
  // Attaching tries the init without advancing the generator.
  EXPECT_TRUE(torch::equal(torch::rand({1}), expected));
  ids(longs({500}));
}

TEST(IdTable, RowsNotResetBecauseOfAnErrorAreResetByTheNextCall) {
  xsoftmax::nn::IdTable ids = full_table();
  const Tensor first = torch::ones({kCapacity, 2}), second = torch::ones({kCapacity, 2});
  bool fails = false;
  ids->attach(first, [](Tensor rows) { torch::nn::init::constant_(rows, 3); });
  ids->attach(second, [&](Tensor rows) {
    TORCH_CHECK(!fails, "no memory");
    torch::nn::init::constant_(rows, 3);
  });
  fails = true;
  EXPECT_THROW(ids(longs({500})), c10::Error);
  fails = false;
  const auto [rows, started] = ids->insert(longs({500}));
  EXPECT_TRUE(torch::equal(rows, started));
  EXPECT_EQ(started.numel(), 1);
  for (const Tensor& table : {first, second}) {
    EXPECT_TRUE(table.index_select(0, started).eq(3).all().item<bool>());
    EXPECT_EQ(table.eq(3).sum().item<int64_t>(), 2);
  }
  EXPECT_EQ(std::get<1>(ids->insert(longs({500}))).numel(), 0);
}

TEST(IdTable, StateGoesOnAndADamagedOneIsRefused) {
  const xsoftmax::IdTableOptions options{.eviction = "lru", .admission = 2};
  xsoftmax::nn::IdTable ids = full_table(options), other(kCapacity, options);
  for (int step = 0; step < 20; ++step) {
    ids(torch::randint(40, {15}));
  }
  std::stringstream stream;
  torch::save(ids, stream);
  torch::load(other, stream);
  for (int step = 0; step < 20; ++step) {
    const Tensor batch = torch::randint(40, {15});
    EXPECT_TRUE(torch::equal(ids(batch), other(batch)));
  }
  ids->seen.select(0, 1).zero_();
  std::stringstream damaged;
  torch::save(ids, damaged);
  const Tensor before = other->slots.clone();
  EXPECT_THROW(torch::load(other, damaged), c10::ValueError);
  EXPECT_TRUE(torch::equal(other->slots, before));
}

TEST(IdTable, RefusesWhatDoesNotFit) {
  xsoftmax::nn::IdTable ids = full_table();
  EXPECT_THROW(xsoftmax::nn::IdTable(1), c10::ValueError);
  EXPECT_THROW(xsoftmax::nn::IdTable(4, xsoftmax::IdTableOptions{.eviction = "fifo"}),
               c10::ValueError);
  EXPECT_THROW(ids(torch::randn({3})), c10::TypeError);
  EXPECT_THROW(ids->attach(torch::nn::Linear(kWidth, kCapacity + 1)), c10::ValueError);
  EXPECT_THROW(
      ids->attach(torch::nn::Embedding(torch::nn::EmbeddingOptions(kCapacity, 2).padding_idx(3))),
      c10::ValueError);
  EXPECT_THROW(ids->attach(xsoftmax::samplers::StreamingCounts(kCapacity + 1)), c10::ValueError);
  EXPECT_THROW(ids->attach(torch::zeros({kCapacity}), nullptr), c10::ValueError);
  ids->to(torch::kFloat);
  EXPECT_EQ(ids->slots.scalar_type(), torch::kLong);
  EXPECT_EQ(ids->size(), kCapacity - 1);
}

TEST(IdTable, ChangesNothingIfTheSizeOfAnAttachedTableHasChanged) {
  xsoftmax::nn::IdTable ids = full_table();
  xsoftmax::nn::LinearCrossEntropyLoss loss(kWidth, kCapacity);
  ids->attach(loss->linear);
  loss->resize_classes(kCapacity - 1);
  const Tensor before = ids->counters.clone();
  EXPECT_THROW(ids(longs({500})), c10::ValueError);
  EXPECT_TRUE(torch::equal(ids->counters, before));
}

TEST(ResetRows, IsAsBeforeTheFirstGradientAndChangesNothingWhereRefused) {
  const Tensor table = torch::randn({kCapacity, kWidth}).requires_grad_();
  optim::RowAdagrad optimizer({table},
                              optim::RowAdagradOptions(0.1).initial_accumulator_value(0.5));
  table.mutable_grad() = torch::ones_like(table);
  optimizer.step();
  const Tensor before = table.detach().clone();
  EXPECT_THROW(xsoftmax::reset_rows(table, longs({kCapacity}), torch::zeros({1, kWidth})),
               c10::IndexError);
  EXPECT_TRUE(torch::equal(table, before));
  xsoftmax::reset_rows(table, longs({3}), torch::zeros({1, kWidth}));
  EXPECT_FALSE(table[3].any().item<bool>());
  const auto& sum =
      static_cast<const optim::RowParamState&>(*optimizer.state().at(table.unsafeGetTensorImpl()))
          .tensors.at("sum");
  EXPECT_TRUE(sum[3].eq(0.5).all().item<bool>());
  EXPECT_TRUE(sum[4].eq(1.5).all().item<bool>());
}

} // namespace
