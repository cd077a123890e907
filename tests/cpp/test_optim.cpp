// The C++ optimizers and clip_grad_norm_ compared with torch::optim and torch::nn::utils on dense
// gradients.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/optim.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>

namespace {

using torch::Tensor;
namespace optim = xsoftmax::optim;

Tensor parameter(const Tensor& table) { return table.clone().requires_grad_(); }

Tensor table_of(torch::optim::Optimizer& optimizer) {
  return optimizer.param_groups()[0].params()[0];
}

Tensor sparse(const Tensor& rows, const Tensor& values, at::IntArrayRef shape) {
  return torch::sparse_coo_tensor(rows.unsqueeze(0), values, shape);
}

// Runs both optimizers on gradients that do not depend on the parameters: sparse for one, the same
// gradients made dense for the other.
template <typename Ours, typename Theirs>
void run_both(Ours& ours, Theirs& theirs, int steps, bool every_row) {
  Tensor mine = table_of(ours), other = table_of(theirs);
  const int64_t rows = mine.size(0), width = mine.size(1);
  for (int i = 0; i < steps; ++i) {
    Tensor ids = torch::randint(rows, {6}, torch::kLong);
    ids = every_row ? torch::cat({ids, torch::arange(rows)}) : ids;
    mine.mutable_grad() = sparse(ids, torch::randn({ids.size(0), width}), mine.sizes());
    other.mutable_grad() = mine.grad().to_dense();
    ours.step();
    theirs.step();
  }
}

TEST(RowSGD, EqualsDenseSgdAfterFlush) {
  for (const bool nesterov : {false, true}) {
    torch::manual_seed(0);
    const Tensor table = torch::randn({12, 5});
    optim::RowSGD ours({parameter(table)},
                       optim::RowSGDOptions(0.05).momentum(0.9).nesterov(nesterov));
    torch::optim::SGD theirs({parameter(table)},
                             torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(nesterov));
    run_both(ours, theirs, 30, false);
    EXPECT_FALSE(torch::allclose(table_of(ours), table_of(theirs), 1e-4));
    ours.flush();
    EXPECT_TRUE(torch::allclose(table_of(ours), table_of(theirs), 1e-5, 1e-6));
  }
}

TEST(RowAdagrad, EqualsDenseAdagrad) {
  const Tensor table = torch::randn({12, 5});
  optim::RowAdagrad ours(
      {parameter(table)},
      optim::RowAdagradOptions(0.1).lr_decay(0.1).initial_accumulator_value(0.2));
  torch::optim::Adagrad theirs(
      {parameter(table)},
      torch::optim::AdagradOptions(0.1).lr_decay(0.1).initial_accumulator_value(0.2));
  run_both(ours, theirs, 20, false);
  EXPECT_TRUE(torch::allclose(table_of(ours), table_of(theirs), 1e-5, 1e-6));
}

TEST(RowAdam, EqualsAdamWWhereEveryRowIsTouched) {
  const Tensor table = torch::randn({12, 5});
  optim::RowAdam ours({parameter(table)},
                      optim::RowAdamOptions(0.01).weight_decay(0.2).betas({0.8, 0.95}));
  torch::optim::AdamW theirs({parameter(table)},
                             torch::optim::AdamWOptions(0.01).weight_decay(0.2).betas({0.8, 0.95}));
  run_both(ours, theirs, 20, true);
  EXPECT_TRUE(torch::allclose(table_of(ours), table_of(theirs), 1e-5, 1e-6));
}

TEST(RowAdam, RowWiseIsItsDenseFormula) {
  const auto float64 = torch::kFloat64;
  const Tensor table = torch::randn({12, 5}, float64), mine = parameter(table);
  Tensor expected = table.clone(), first = torch::zeros({12, 5}, float64),
         second = torch::zeros({12}, float64);
  optim::RowAdam ours({mine}, optim::RowAdamOptions(0.01).row_wise(true).eps(0));
  for (int t = 1; t <= 30; ++t) {
    const Tensor ids = t == 1 ? torch::arange(12) : torch::randint(12, {3}, torch::kLong);
    mine.mutable_grad() = sparse(ids, torch::randn({ids.size(0), 5}, float64), mine.sizes());
    const Tensor g = mine.grad().to_dense();
    ours.step();
    first = 0.9 * first + 0.1 * g;
    second = 0.999 * second + 0.001 * g.square().mean(1);
    expected -= 0.01 / (1 - std::pow(0.9, t)) * first /
        (second / (1 - std::pow(0.999, t))).sqrt().unsqueeze(1);
  }
  EXPECT_FALSE(torch::allclose(mine, expected)); // has pending updates
  ours.flush();
  EXPECT_TRUE(torch::allclose(mine, expected, 1e-11, 1e-13));
}

template <typename Ours, typename Theirs>
void expect_dense_equal(Ours ours, Theirs theirs) {
  Tensor mine = table_of(ours), other = table_of(theirs);
  for (int i = 0; i < 5; ++i) {
    mine.mutable_grad() = torch::randn_like(mine);
    other.mutable_grad() = mine.grad().clone();
    ours.step();
    theirs.step();
  }
  EXPECT_TRUE(torch::allclose(mine, other, 1e-5, 1e-6)) << mine << other;
}

TEST(Optimizers, DenseGradientsEqualTorch) {
  // A contiguous table, and a transposed one that is not.
  for (const Tensor& table : {torch::randn({6, 4}), torch::randn({4, 6}).t()}) {
    expect_dense_equal(
        optim::RowSGD({parameter(table)},
                      optim::RowSGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.1)),
        torch::optim::SGD(
            {parameter(table)},
            torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.1)));
    expect_dense_equal(
        optim::RowAdagrad({parameter(table)},
                          optim::RowAdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1)),
        torch::optim::Adagrad({parameter(table)},
                              torch::optim::AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1)));
    expect_dense_equal(
        optim::RowAdam({parameter(table)}, optim::RowAdamOptions(0.1).weight_decay(0.1)),
        torch::optim::AdamW({parameter(table)}, torch::optim::AdamWOptions(0.1).weight_decay(0.1)));
  }
}

template <typename Optimizer, typename Options>
void expect_resumes(const Options& options) {
  const auto gradient = [](int step, const Tensor& param) {
    torch::manual_seed(step);
    return sparse(torch::randint(12, {6}, torch::kLong), torch::randn({6, 5}), param.sizes());
  };
  Tensor first = parameter(torch::randn({12, 5}));
  Optimizer whole({first}, options);
  for (int i = 0; i < 4; ++i) {
    first.mutable_grad() = gradient(i, first);
    whole.step();
  }
  std::stringstream file;
  torch::save(whole, file); // applies pending updates to the table
  Tensor second = parameter(first.detach());
  Optimizer resumed({second}, Options(0.7));
  torch::load(resumed, file);
  for (int i = 4; i < 8; ++i) {
    first.mutable_grad() = gradient(i, first);
    second.mutable_grad() = gradient(i, second);
    whole.step();
    resumed.step();
  }
  whole.flush();
  resumed.flush();
  EXPECT_TRUE(torch::equal(first, second));
}

TEST(Optimizers, ResumeBitForBit) {
  expect_resumes<optim::RowSGD>(optim::RowSGDOptions(0.1).momentum(0.9).weight_decay(0.1));
  expect_resumes<optim::RowAdagrad>(optim::RowAdagradOptions(0.1).lr_decay(0.1).row_wise(true));
  expect_resumes<optim::RowAdam>(optim::RowAdamOptions(0.1).weight_decay(0.1).betas({0.7, 0.8}));
}

template <typename Optimizer, typename Options>
void expect_ascent(const Options& options) {
  for (const bool is_sparse : {true, false}) {
    Tensor up = parameter(torch::ones({12, 5})), down = parameter(torch::ones({12, 5}));
    Optimizer ascends({up}, Options(options).maximize(true)), descends({down}, options);
    for (int i = 0; i < 4; ++i) {
      const Tensor grad =
          sparse(torch::randint(12, {6}, torch::kLong), torch::randn({6, 5}), {12, 5});
      up.mutable_grad() = is_sparse ? grad : grad.to_dense();
      down.mutable_grad() = is_sparse ? -grad : -grad.to_dense();
      ascends.step();
      descends.step();
    }
    ascends.flush();
    descends.flush();
    EXPECT_TRUE(torch::equal(up, down));
    EXPECT_FALSE(torch::equal(up, torch::ones({12, 5})));
  }
}

TEST(Optimizers, MaximizeIsTheSignOfTheGradient) {
  expect_ascent<optim::RowSGD>(optim::RowSGDOptions(0.1).momentum(0.9));
  expect_ascent<optim::RowAdagrad>(optim::RowAdagradOptions(0.1).weight_decay(0.1));
  expect_ascent<optim::RowAdagrad>(optim::RowAdagradOptions(0.1).row_wise(true));
  expect_ascent<optim::RowAdam>(optim::RowAdamOptions(0.1).weight_decay(0.1));
  expect_ascent<optim::RowAdam>(optim::RowAdamOptions(0.1).row_wise(true));
}

// Returns the error message when `other` loads the archive of `ours`. The load must change nothing.
template <typename Other, typename Ours>
std::string refusal(Other other, Ours ours) {
  for (torch::optim::Optimizer* each : {static_cast<torch::optim::Optimizer*>(&other),
                                        static_cast<torch::optim::Optimizer*>(&ours)}) {
    table_of(*each).mutable_grad() = torch::ones_like(table_of(*each));
    each->step();
  }
  std::stringstream file;
  torch::save(other, file);
  const double lr = ours.param_groups()[0].options().get_lr();
  const auto* state = ours.state().begin()->second.get();
  std::string message;
  try {
    torch::load(ours, file);
  } catch (const c10::ValueError& error) {
    message = error.what_without_backtrace();
  }
  EXPECT_EQ(ours.param_groups()[0].options().get_lr(), lr);
  EXPECT_EQ(ours.state().begin()->second.get(), state);
  return message;
}

TEST(Optimizers, ArchivesOfOtherOptimizersAreRefusedByName) {
  const auto table = [] { return std::vector<Tensor>{parameter(torch::ones({4, 2}))}; };
  const auto expect = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect(refusal(torch::optim::AdamW(table()), optim::RowAdam(table())), "such as torch::optim's");
  expect(refusal(torch::optim::Adagrad(table()), optim::RowAdagrad(table())),
         "such as torch::optim's");
  expect(refusal(torch::optim::SGD(table(), torch::optim::SGDOptions(0.1).momentum(0.9)),
                 optim::RowSGD(table())),
         "RowSGD: expected the archive of a RowSGD");
  expect(refusal(optim::RowSGD(table()), optim::RowAdam(table())),
         "RowAdam: expected options among lr");
  expect(refusal(optim::RowAdam(table()), optim::RowAdagrad(table())),
         "RowAdagrad: expected options among lr");
}

TEST(Optimizers, FollowDenseUnderASchedule) {
  const auto options = torch::kDouble;
  const Tensor table = torch::randn({12, 5}, options);
  optim::RowAdam ours({parameter(table)}, optim::RowAdamOptions(0.05).weight_decay(0.1));
  torch::optim::AdamW theirs({parameter(table)},
                             torch::optim::AdamWOptions(0.05).weight_decay(0.1));
  const Tensor mine = table_of(ours), other = table_of(theirs);
  for (int t = 0; t < 100; ++t) {
    const double lr = 0.05 * (1 - t / 100.);
    ours.param_groups()[0].options().set_lr(lr);
    theirs.param_groups()[0].options().set_lr(lr);
    const Tensor rows = t == 0 ? torch::arange(12) : torch::randint(12, {2}, torch::kLong);
    mine.mutable_grad() = sparse(rows, torch::randn({rows.size(0), 5}, options), mine.sizes());
    other.mutable_grad() = mine.grad().to_dense();
    ours.step();
    theirs.step();
  }
  EXPECT_GT((mine - other).abs().max().item<double>(), 1e-3);
  xsoftmax::catch_up(mine.detach());
  EXPECT_LT((mine - other).abs().max().item<double>(), 1e-6);
  const Tensor before = mine.detach().clone();
  ours.flush();
  EXPECT_TRUE(torch::equal(mine, before));
}

TEST(Optimizers, DestroyingAnOptimizerFlushesItsTables) {
  Tensor left = parameter(torch::ones({4, 2})), before;
  {
    optim::RowSGD optimizer({left}, optim::RowSGDOptions(0.1).momentum(0.9));
    for (const int row : {1, 2}) {
      left.mutable_grad() = sparse(torch::tensor({row}), torch::ones({1, 2}), left.sizes());
      optimizer.step();
    }
    before = left.detach().clone();
  }
  EXPECT_TRUE(torch::allclose(left[1], before[1] - 0.09));
  EXPECT_TRUE(torch::equal(left[2], before[2]));
}

// Replaces the CPU's device guard: its stream captures a graph until end().
class Capture {
 public:
  Capture() {
    static auto* const capturing = new Capturing; // guards are never destroyed
    slot().store(capturing);
  }
  ~Capture() { end(); }
  void end() { slot().store(before_); }

 private:
  struct Capturing : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CPU> {
    bool isStreamCapturing(const c10::Stream&) const override { return true; }
  };
  static std::atomic<const c10::impl::DeviceGuardImplInterface*>& slot() {
    return c10::impl::device_guard_impl_registry[size_t(c10::DeviceType::CPU)];
  }
  const c10::impl::DeviceGuardImplInterface* before_ = slot().load();
};

// Otherwise the flush would run again with every replay of the graph.
TEST(Optimizers, DestroyingAnOptimizerDuringACaptureFlushesItsTablesAfterIt) {
  const auto train = [](Tensor& table) {
    auto optimizer = std::make_unique<optim::RowSGD>(std::vector<Tensor>{table},
                                                     optim::RowSGDOptions(0.1).momentum(0.9));
    for (const int row : {1, 2}) {
      table.mutable_grad() = sparse(torch::tensor({row}), torch::ones({1, 2}), table.sizes());
      optimizer->step();
    }
    return optimizer;
  };
  Tensor want = parameter(torch::ones({4, 2})), other = parameter(torch::ones({4, 2}));
  train(want).reset();
  const std::vector<std::function<void(Tensor&)>> looks{
      [](Tensor& table) { xsoftmax::catch_up(table.detach()); },
      [&](Tensor&) { xsoftmax::catch_up(other); },
      [&](Tensor&) { optim::RowAdam(std::vector<Tensor>{other}).step(); },
      [&](Tensor&) { optim::RowAdagrad(std::vector<Tensor>{other}).flush(); },
      [&](Tensor&) { optim::RowSGD optimizer(std::vector<Tensor>{other}); }};
  for (const auto& look : looks) {
    Tensor table = parameter(torch::ones({4, 2}));
    auto optimizer = train(table);
    const Tensor pending = table.detach().clone();
    Capture capture;
    optimizer.reset();
    xsoftmax::catch_up(other); // does not flush while the stream is capturing
    EXPECT_TRUE(torch::equal(table, pending));
    capture.end();
    look(table);
    EXPECT_FALSE(torch::equal(table, pending));
    EXPECT_TRUE(torch::equal(table, want));
  }
}

TEST(Optimizers, ALearningRateThatIsATensorStepsAsItsNumber) {
  torch::manual_seed(0);
  const Tensor table = torch::randn({12, 5}), rate = torch::tensor(0.05, torch::kFloat64);
  optim::RowAdam of_tensor({parameter(table)}, optim::RowAdamOptions(1.0).lr_tensor(rate));
  optim::RowAdam of_number({parameter(table)}, optim::RowAdamOptions(0.05));
  for (const double next : {0.05, 0.02, 0.01}) {
    of_tensor.param_groups()[0].options().set_lr(next); // changes the tensor in place
    of_number.param_groups()[0].options().set_lr(next);
    EXPECT_EQ(rate.item<double>(), next);
    const Tensor ids = torch::randint(12, {6}, torch::kLong), values = torch::randn({6, 5});
    for (optim::RowAdam* each : {&of_tensor, &of_number}) {
      table_of(*each).mutable_grad() = sparse(ids, values, {12, 5});
      each->step();
    }
  }
  of_tensor.flush();
  of_number.flush();
  EXPECT_TRUE(torch::equal(table_of(of_tensor), table_of(of_number)));
  rate.fill_(-1);
  EXPECT_THROW(of_tensor.step(), c10::ValueError);
  rate.fill_(0.01);
  std::stringstream saved;
  torch::save(of_tensor, saved);
  optim::RowAdam resumed({parameter(table)}, optim::RowAdamOptions(0.5));
  torch::load(resumed, saved);
  EXPECT_EQ(resumed.param_groups()[0].options().get_lr(), 0.01);
  std::stringstream again;
  torch::save(of_tensor, again);
  const Tensor held = torch::tensor(0.5, torch::kFloat64); // the tensor that a captured step reads
  optim::RowAdam resumed_on_device({parameter(table)}, optim::RowAdamOptions(0.5).lr_tensor(held));
  torch::load(resumed_on_device, again);
  EXPECT_EQ(held.item<double>(), 0.01);
  resumed_on_device.param_groups()[0].options().set_lr(0.02);
  EXPECT_EQ(held.item<double>(), 0.02);
}

// Torch's fused kernels for 16-bit parameters give wrong results on the CPU.
TEST(Optimizers, DenseGradientsOf16BitParameters) {
  const Tensor table = torch::randn({8, 8}).to(torch::kBFloat16);
  optim::RowSGD ours({parameter(table)}, optim::RowSGDOptions(0.1).momentum(0.9));
  torch::optim::SGD theirs({parameter(table)}, torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int i = 0; i < 3; ++i) {
    table_of(ours).mutable_grad() = torch::randn({8, 8}).to(torch::kBFloat16);
    table_of(theirs).mutable_grad() = table_of(ours).grad().clone();
    ours.step();
    theirs.step();
  }
  EXPECT_TRUE(torch::allclose(table_of(ours), table_of(theirs), 5e-2, 2e-2));
}

TEST(Optimizers, ARefusedStepChangesNothing) {
  Tensor good = parameter(torch::ones({4, 2})), bad = parameter(torch::ones({4, 2}));
  optim::RowAdam optimizer({good, bad}, optim::RowAdamOptions(0.1));
  const auto step = [&](int64_t row) {
    good.mutable_grad() = sparse(torch::tensor({1}), torch::ones({1, 2}), {4, 2});
    bad.mutable_grad() = sparse(torch::tensor({1}), torch::ones({1, 2}), {4, 2});
    bad.grad()._indices().fill_(row);
    optimizer.step();
  };
  EXPECT_THROW(step(4), c10::IndexError);
  EXPECT_TRUE(torch::equal(good, torch::ones({4, 2})));
  EXPECT_TRUE(optimizer.state().empty());
  step(1);
  EXPECT_FALSE(torch::equal(good, torch::ones({4, 2})));
}

TEST(Optimizers, Errors) {
  const Tensor table = parameter(torch::randn({12, 5}));
  EXPECT_THROW(optim::RowSGD({table}, optim::RowSGDOptions(-1)), c10::ValueError);
  EXPECT_THROW(optim::RowSGD({table}, optim::RowSGDOptions(0.1).nesterov(true)), c10::ValueError);
  EXPECT_THROW(optim::RowAdagrad({table}, optim::RowAdagradOptions(0.1).eps(-1)), c10::ValueError);
  EXPECT_THROW(optim::RowAdam({table}, optim::RowAdamOptions(0.1).betas({1.0, 0.9})),
               c10::ValueError);
  table.mutable_grad() = torch::ones({12, 5}).to_sparse();
  EXPECT_THROW(optim::RowAdam({table}).step(), c10::Error);
}

TEST(ClipGradNorm, EqualsTorchOnDense) {
  for (const double norm_type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    std::vector<Tensor> params, twins;
    for (const Tensor& rows : {torch::tensor({3, 1, 3}), torch::tensor({2, 0, 4})}) {
      params.push_back(parameter(torch::zeros({5, 4})));
      params.back().mutable_grad() = sparse(rows, torch::randn({3, 4}), {5, 4});
    }
    params.push_back(parameter(torch::zeros({7})));
    params.back().mutable_grad() = torch::randn({7});
    for (const Tensor& param : params) {
      twins.push_back(parameter(param.detach()));
      twins.back().mutable_grad() = param.grad().to_dense().clone();
    }
    const double norm = xsoftmax::clip_grad_norm_(params, 0.5, norm_type);
    EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(twins, 0.5, norm_type), 1e-5);
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_TRUE(torch::allclose(params[i].grad().to_dense(), twins[i].grad()));
    }
  }
}

// Error messages name the function of this library. As documented, a finite norm leaves row-sparse
// gradients unclipped.
TEST(ClipGradNorm, OfTorchOnRowSparseGradients) {
  const Tensor table = parameter(torch::zeros({5, 4})), twin = parameter(torch::zeros({5, 4}));
  const auto fresh = [&] {
    table.mutable_grad() = sparse(torch::tensor({3, 1, 3}), torch::randn({3, 4}), {5, 4});
    twin.mutable_grad() = table.grad().to_dense().clone();
  };
  fresh();
  torch::nn::utils::clip_grad_norm_(table, 1e-3);
  EXPECT_TRUE(torch::equal(table.grad().to_dense(), twin.grad()));
  xsoftmax::clip_grad_norm_({table}, 1e-3);
  EXPECT_LT(table.grad().to_dense().norm().item<float>(), 1.1e-3);
  const auto message_of = [&](const auto& call) -> std::string {
    fresh();
    try {
      call();
    } catch (const c10::NotImplementedError& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  for (const std::string& message :
       {message_of([&] {
          torch::nn::utils::clip_grad_norm_(table, 0.5, std::numeric_limits<double>::infinity());
        }),
        message_of([&] { torch::nn::utils::clip_grad_value_(table, 0.5); })}) {
    EXPECT_NE(message.find("xsoftmax::clip_grad_norm_"), std::string::npos) << message;
  }
}

} // namespace
