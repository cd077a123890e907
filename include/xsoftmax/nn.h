#pragma once

// Losses over a class table as modules: the same as xsoftmax.SampledSoftmaxLoss and xsoftmax.LinearCrossEntropyLoss in Python, with the
// same parameter names, so the state of one loads into the other.
//
//     xsoftmax::nn::SampledSoftmaxLoss loss(width, classes, xsoftmax::samplers::UniformSampler(classes).ptr(), {.num_samples = 512});
//     loss(hidden, target).backward();

#include <xsoftmax/samplers.h>

#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>

namespace xsoftmax::nn {

/// What every loss over a class table takes.
struct LossOptions {
  bool bias = false;
  torch::Tensor weight = {};        ///< [N], rescales the loss of each class; undefined: none
  std::string reduction = "mean";   ///< "mean" (weighted, over targets that are not ignored), "sum" or "none"
  int64_t ignore_index = -100;      ///< targets of this value have no loss and no gradient
  double label_smoothing = 0.0;     ///< in [0, 1]
};

/// How candidates are drawn and weighed.
struct SamplingOptions {
  int64_t num_samples = 0;                    ///< draws for the batch (shared) or for each query
  std::optional<bool> shared = std::nullopt;  ///< none: as suits the sampler
  std::string estimator = "sampled_softmax";  ///< or "ranking", "nce", ...: see xsoftmax::candidate_loss
  bool remove_accidental_hits = true;
  int64_t head_classes = 0;                   ///< so many of the first ids are always scored; the sampler draws from the rest
  torch::Tensor head = {};                    ///< or these ids, int64 [H]
  bool sparse_grad = true;                    ///< row-sparse gradient of the table
};

/// Base: the table as `linear`, the exact loss, prediction.
class LinearLossImpl : public torch::nn::Module {
 public:
  LinearLossImpl(int64_t in_features, int64_t num_classes, const LossOptions& options);

  /// The exact loss, without the [Q, N] logits: input [*, D], target [*] int64; a scalar, or [*] for "none".
  torch::Tensor exact(const torch::Tensor& input, const torch::Tensor& target) const;
  /// log_softmax(linear(input)): [*, N].
  torch::Tensor log_prob(const torch::Tensor& input);
  /// (log-probabilities, ids), both [*, k], best first.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& input, int64_t k) const;
  /// The best class: [*, D] -> [*].
  torch::Tensor predict(const torch::Tensor& input) const;

  torch::nn::Linear linear{nullptr}; ///< share or tie the table by assigning linear->weight
  torch::Tensor weight;              ///< class weights, undefined: none

 protected:
  /// input as [Q, D]; checks that target fits.
  torch::Tensor flatten(const torch::Tensor& input, const torch::Tensor& target) const;

  int64_t num_classes_;
  LossOptions options_;
  int64_t reduction_;
};

/// The exact loss, in train() and eval() alike.
class LinearCrossEntropyLossImpl : public LinearLossImpl {
 public:
  LinearCrossEntropyLossImpl(int64_t in_features, int64_t num_classes, const LossOptions& options = {});
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target);
};
TORCH_MODULE(LinearCrossEntropyLoss);

/// Sampled in train(), exact in eval().
class SampledSoftmaxLossImpl : public LinearLossImpl {
 public:
  /// `sampler` draws from num_classes classes; with a head it is replaced by `sampler->excluding(head)`.
  SampledSoftmaxLossImpl(int64_t in_features, int64_t num_classes, std::shared_ptr<samplers::SamplerImpl> sampler,
                         const SamplingOptions& sampling, const LossOptions& options = {});
  /// Draws from `generator`, or from the default one of input's device.
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target, std::optional<at::Generator> generator = std::nullopt);

  /// The head and the sampler's tables move with the device alone.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// A checkpoint of LinearCrossEntropyLoss, or of a loss whose sampler keeps nothing, loads as well: the sampler stays as it is.
  void load(torch::serialize::InputArchive& archive) override;

  std::shared_ptr<samplers::SamplerImpl> sampler;
  torch::Tensor head; ///< int64 [H], sorted; not in a checkpoint, which so goes with any head

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Generator>())})

 private:
  SamplingOptions sampling_;
  bool shared_;
};
TORCH_MODULE(SampledSoftmaxLoss);

} // namespace xsoftmax::nn
