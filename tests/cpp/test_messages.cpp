// Error messages that new users of the C++ modules see: they say what to do, in the same words as
// the Python modules.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <xsoftmax/xsoftmax.h>

#include <functional>
#include <limits>
#include <sstream>

namespace {

using torch::Tensor;
using torch::autograd::AnomalyMode;
using xsoftmax::nn::HierarchicalSoftmaxLoss;
using xsoftmax::nn::LinearCrossEntropyLoss;
using xsoftmax::nn::SampledSoftmaxLoss;
using xsoftmax::nn::SamplingOptions;
namespace samplers = xsoftmax::samplers;

constexpr int64_t kWidth = 6, kClasses = 40;

/// Expects the call to throw an `Error` whose message contains `words`.
template <typename Error>
void refuses(const std::function<void()>& call, const std::string& words) {
  try {
    call();
    ADD_FAILURE() << "no error, expected one with: " << words;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find(words), std::string::npos)
        << error.what_without_backtrace();
  }
}

const Tensor kTarget = torch::tensor({3, 0, 39}, torch::kLong);

TEST(Messages, DtypesSayWhatToCast) {
  LinearCrossEntropyLoss exact(kWidth, kClasses);
  SampledSoftmaxLoss sampled(kWidth, kClasses, "uniform", SamplingOptions{.num_samples = 8});
  HierarchicalSoftmaxLoss tree(kWidth, xsoftmax::LabelTree::balanced(kClasses, 3));
  const Tensor half = torch::randn({3, kWidth}).to(torch::kHalf), input = torch::randn({3, kWidth});
  const std::string words =
      "expected input of the table's dtype float32, got float16: cast the input, "
      "input.to(torch.float32), or call loss.to(torch.float16)";
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { exact->forward(half, kTarget); }, [&] { sampled->forward(half, kTarget); },
           [&] { tree->forward(half, kTarget); }, [&] { exact->topk(half, 2); },
           [&] { exact->log_prob(half); }, [&] { tree->log_prob(half); }}) {
    refuses<c10::TypeError>(call, words);
  }
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { exact->forward(input, kTarget.to(torch::kInt)); },
           [&] { sampled->forward(input, kTarget.to(torch::kInt)); }}) {
    refuses<c10::TypeError>(call, "expected target of dtype int64, got int32: use target.long()");
  }
}

TEST(Messages, ArgumentsThatAreConfused) {
  LinearCrossEntropyLoss exact(kWidth, kClasses);
  refuses<c10::ValueError>([&] { exact->forward(torch::randn({3, kClasses}), kTarget); },
                           "in_features comes before num_classes");
  refuses<c10::ValueError>([&] { exact->log_prob(torch::randn({3, kClasses})); },
                           "in_features comes before num_classes");
  refuses<c10::ValueError>(
      [&] {
        SampledSoftmaxLoss(kWidth, kClasses, samplers::UniformSampler(kClasses, 8).ptr(),
                           SamplingOptions{.num_samples = 8});
      },
      "SampledSoftmaxLoss: expected no num_samples with a sampler object");
  refuses<c10::ValueError>(
      [&] { SampledSoftmaxLoss(kWidth, kClasses, "uniform", SamplingOptions{.num_samples = 41}); },
      "expected num_samples of at most 40, the number of classes that can be drawn, since a class "
      "is drawn at most once, got 41");
  refuses<c10::ValueError>([&] { SampledSoftmaxLoss(kWidth, kClasses, "unifom"); },
                           "make_sampler: expected one of \"in_batch\", \"log_uniform\"");
}

TEST(Messages, CheckpointsOfAnotherNumberOfClasses) {
  LinearCrossEntropyLoss saved(kWidth, kClasses + 1), loss(kWidth, kClasses);
  std::stringstream stream;
  torch::save(saved, stream);
  const std::string text = stream.str();
  const auto load = [&] {
    std::stringstream again(text);
    torch::load(loss, again);
  };
  refuses<c10::ValueError>(load, "got [41, 6]: call resize_classes(41) first");
  loss->resize_classes(kClasses + 1);
  load();
  EXPECT_TRUE(torch::equal(loss->linear->weight, saved->linear->weight));
}

TEST(Messages, AnomalyDetectionNamesHiddenStatesThatAreNotFinite) {
  LinearCrossEntropyLoss loss(kWidth, kClasses);
  Tensor input = torch::randn({3, kWidth});
  input[1][2] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(loss->forward(input, kTarget).isnan().item<bool>());
  AnomalyMode::set_enabled(true);
  refuses<c10::ValueError>([&] { loss->forward(input, kTarget); },
                           "expected input with finite values, got nan at [1, 2]");
  AnomalyMode::set_enabled(false);
}

} // namespace
