// Memory-mapped tables. The state stored in files is tested in
// tests/python/table/test_mapped_tables.py, on the same operators.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace {

using torch::Tensor;
namespace fs = std::filesystem;
namespace tables = xsoftmax::tables;

constexpr int64_t kClasses = 500, kWidth = 8;

class Tables : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = fs::temp_directory_path() / "xsoftmax_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder = name;
    path = folder / "classes.safetensors";
  }
  void TearDown() override { fs::remove_all(folder); }

  std::string state(const std::string& suffix = "") const {
    std::ifstream file(path.string() + suffix, std::ios::binary);
    std::string begin(64, '\0');
    file.read(begin.data(), 64);
    for (const char* word : {"begun", "dirty", "whole"}) {
      if (begin.find(word) != std::string::npos) {
        return word;
      }
    }
    return "none";
  }

  Tensor make() const {
    torch::manual_seed(3);
    return tables::mapped(path, kClasses, kWidth);
  }

  fs::path folder, path;
};

// A loss over a table, and an optimizer.
struct Training {
  explicit Training(const Tensor& weight)
      : loss(kWidth, kClasses, xsoftmax::samplers::UniformSampler(kClasses, 40).ptr(),
             xsoftmax::nn::SamplingOptions(),
             xsoftmax::nn::LossOptions{.linear = tables::linear(weight)}),
        optimizer(loss->parameters(), xsoftmax::optim::RowAdagradOptions(0.1)) {}

  void step(int64_t seed) {
    torch::manual_seed(uint64_t(seed));
    optimizer.zero_grad();
    loss(torch::randn({16, kWidth}), torch::randint(kClasses, {16})).backward();
    optimizer.step();
  }

  xsoftmax::nn::SampledSoftmaxLoss loss;
  xsoftmax::optim::RowAdagrad optimizer;
};

TEST_F(Tables, TrainInAFileAsInMemory) {
  Tensor weight = make();
  EXPECT_EQ(state(), "whole");
  EXPECT_TRUE(weight.requires_grad() &&
              weight.abs().max().item<double>() <= 1 / std::sqrt(double(kWidth)));
  const Tensor plain = weight.detach().clone().requires_grad_();
  {
    Training in_file(weight), in_memory(plain);
    for (int64_t step = 0; step < 4; ++step) {
      tables::prefetch(weight, torch::arange(10));
      in_file.step(step);
      in_memory.step(step);
    }
    EXPECT_EQ(state() + state(".row_adagrad"), "dirtydirty");
    tables::flush(weight);
    EXPECT_EQ(state() + state(".row_adagrad"), "wholewhole");
    in_file.step(4);
    in_memory.step(4);
    EXPECT_TRUE(torch::equal(weight, plain));
    EXPECT_EQ(state(), "dirty");
  }
  weight = Tensor();
  EXPECT_EQ(state(), "whole"); // written when the last tensor is released
  weight = tables::mapped(path, kClasses, kWidth);
  EXPECT_TRUE(torch::equal(weight, plain));
}

TEST_F(Tables, StateIsFoundAgainAndLoaded) {
  const Tensor weight = make(), plain = weight.detach().clone().requires_grad_();
  Training in_memory(plain);
  in_memory.step(0);
  Training(weight).step(0);
  in_memory.step(1);
  Training second(weight); // finds the optimizer state of the first
  second.step(1);
  EXPECT_TRUE(torch::equal(weight, plain));

  std::stringstream saved;
  torch::save(second.optimizer, saved);
  second.step(2);
  torch::load(second.optimizer, saved); // writes to the file
  weight.detach().copy_(plain.detach());
  tables::flush(weight);
  second.step(3);
  in_memory.step(3);
  EXPECT_TRUE(torch::equal(weight, plain));
}

// Errors in the state of the last parameter are found before anything changes: the file of the
// first, and its pending updates.
TEST_F(Tables, ARefusedLoadChangesNothing) {
  const auto step = [](auto& optimizer, std::vector<Tensor> params, int64_t row) {
    for (Tensor& param : params) {
      param.mutable_grad() = torch::sparse_coo_tensor(
          torch::full({1, 1}, row), torch::ones({1, kWidth}, param.options()), param.sizes());
    }
    optimizer.step();
  };
  const auto of_memory = [](at::ScalarType dtype) {
    return torch::zeros({kClasses, kWidth}, torch::TensorOptions(dtype).requires_grad(true));
  };
  const std::vector<Tensor> params{make(), of_memory(torch::kFloat)},
      others{of_memory(torch::kFloat), of_memory(torch::kDouble)};
  const std::vector<Tensor> twins{params[0].detach().clone().requires_grad_(),
                                  of_memory(torch::kFloat)};
  using Adam = xsoftmax::optim::RowAdam;
  Adam optimizer(params, 0.1), twin(twins, 0.1), other(others, 0.2);
  step(other, others, 7);
  std::stringstream saved;
  torch::save(other, saved);
  for (int64_t row = 0; row < 3; ++row) {
    step(optimizer, params, row);
    step(twin, twins, row);
  }
  EXPECT_THROW(torch::load(optimizer, saved), c10::Error);
  step(optimizer, params, 1);
  step(twin, twins, 1);
  tables::flush(params[0]);
  xsoftmax::catch_up(params[1]);
  twin.flush();
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(torch::equal(params[i], twins[i])) << i;
  }
}

TEST_F(Tables, SayWhatDoesNotFit) {
  make();
  EXPECT_THROW(tables::mapped(path, kClasses + 1, kWidth), c10::ValueError);
  EXPECT_THROW(tables::mapped(path, kClasses), c10::ValueError);
  EXPECT_THROW(tables::open(folder / "none"), c10::Error);
  EXPECT_THROW(tables::mapped(folder / "none" / "x", 3, 4), c10::Error);
  EXPECT_THROW(tables::flush(torch::ones({3, 4})), c10::ValueError);
  EXPECT_THROW(
      tables::mapped(folder / "x", 3, 4, {.init = [](Tensor) { throw std::runtime_error("no"); }}),
      std::runtime_error);
  EXPECT_FALSE(fs::exists(folder / "x"));
  fs::resize_file(path, 5000);
  EXPECT_THROW(tables::open(path), c10::ValueError);
  std::ofstream(folder / "foreign") << "something else";
  EXPECT_THROW(tables::open(folder / "foreign"), c10::ValueError);
}

TEST_F(Tables, PinnedNeedsACudaDevice) {
  EXPECT_THROW(tables::pinned(3, 4, {.device = torch::kCPU}), c10::ValueError);
  EXPECT_THROW(tables::pinned(3, 4, {.dtype = torch::kLong}), c10::TypeError);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::pinned_table", "");
  if (torch::cuda::is_available() && op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
    const Tensor weight = tables::pinned(3, 4);
    EXPECT_TRUE(weight.is_cuda() && weight.requires_grad() && weight.any().item<bool>());
    EXPECT_FALSE(tables::pinned(3, std::nullopt, {.init = nullptr}).any().item<bool>());
  }
}

TEST_F(Tables, AreMadeByBlocksThatTellHowFarTheyAre) {
  std::vector<int64_t> told;
  const Tensor bias =
      tables::mapped(path, 10, std::nullopt,
                     {.dtype = torch::kBFloat16,
                      .init = [](Tensor rows) { rows.fill_(2); },
                      .progress = [&](int64_t done, int64_t all) { told = {done, all}; }});
  EXPECT_EQ(told, (std::vector<int64_t>{10, 10}));
  EXPECT_TRUE(torch::equal(bias.detach().to(torch::kFloat), torch::full({10}, 2.0f)));
  EXPECT_FALSE(tables::mapped(folder / "zeros", 10, 3, {.init = nullptr}).any().item<bool>());
}

} // namespace
