#pragma once

// The fixture of the tests of C++ losses (Modules), whose files are test_modules.cpp and
// test_module_*.cpp.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <memory>
#include <optional>

namespace modules_test {

using torch::Tensor;
using xsoftmax::nn::LinearCrossEntropyLoss;
using xsoftmax::nn::LossOptions;
using xsoftmax::nn::SampledSoftmaxLoss;
using xsoftmax::nn::SamplingOptions;
namespace F = torch::nn::functional;
namespace samplers = xsoftmax::samplers;

constexpr int64_t kWidth = 6, kClasses = 40;

inline at::Generator generator(uint64_t seed) {
  at::Generator made = at::detail::createCPUGenerator();
  made.set_current_seed(seed);
  return made;
}

using Sampler = std::shared_ptr<samplers::SamplerImpl>;

inline Sampler uniform(int64_t num_samples = 8, std::optional<bool> shared = {}) {
  return samplers::UniformSampler(kClasses, num_samples, samplers::DrawOptions{.shared = shared})
      .ptr();
}

inline Tensor cross_entropy(xsoftmax::nn::LinearLossImpl& loss, const Tensor& input,
                            const Tensor& target) {
  return F::cross_entropy(loss.linear->forward(input), target);
}

class Modules : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(0); }

  Tensor input = torch::randn({7, kWidth});
  Tensor target = torch::tensor({3, 0, 39, -100, 2, 17, 17}, torch::kLong);
};

} // namespace modules_test
