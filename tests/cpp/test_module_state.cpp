// State of C++ losses: names of the Python modules, checkpoints, casts and moves.

#include "modules.h"

#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

using namespace modules_test;

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

} // namespace
