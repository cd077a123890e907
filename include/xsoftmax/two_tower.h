#pragma once

// The loss of two towers as a module.
//
//     xsoftmax::nn::TwoTowerLoss loss(xsoftmax::TwoTowerOptions{.num_items = items, .temperature = 0.1, .similarity = "cosine"});
//     loss(query_tower(users), item_tower(items), item_id).backward();

#include <xsoftmax/holder.h>
#include <xsoftmax/loss_options.h>
#include <xsoftmax/streaming_counts.h>

#include <torch/nn/module.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>

#include <optional>
#include <string>
#include <tuple>

namespace xsoftmax::nn {

using xsoftmax::TwoTowerOptions;

/// Each query against its item, with the items of the batch, of past ones and of more as candidates: xsoftmax.TwoTowerLoss, whose names of state are the
/// same. Counts and memory take in what they are given in train() alone.
class TwoTowerLossImpl : public torch::nn::Module {
 public:
  /// Frequencies of options.num_items ids, or of open ids, that never forget.
  explicit TwoTowerLossImpl(const TwoTowerOptions& options = {});
  /// With counts that a caller made, or none (nullptr): no correction. learn_temperature: it is a parameter.
  TwoTowerLossImpl(const TwoTowerOptions& options, samplers::StreamingCounts counts, bool learn_temperature = false);

  /// query and item [Q, D], item_id int64 [Q]; negatives: vectors and ids, ([S, D], [S]) for all queries or ([Q, P, D], [Q, P]); weight [Q]. A scalar, or
  /// [Q] for "none".
  torch::Tensor forward(const torch::Tensor& query, const torch::Tensor& item, const torch::Tensor& item_id,
                        const std::optional<std::tuple<torch::Tensor, torch::Tensor>>& negatives = std::nullopt,
                        const std::optional<torch::Tensor>& weight = std::nullopt);

  /// (log-probabilities, rows of item_vectors), both [*, k], best first: log_softmax(scores, -1).topk(k) with the scores
  /// query @ item_vectors.T / temperature, cosines where similarity is "cosine". query [*, D], item_vectors [N, D]; exclude:
  /// rows [*, E] that a query does not want, -1 for none; -inf and -1 behind the last of fewer than k.
  std::tuple<torch::Tensor, torch::Tensor> topk(const torch::Tensor& query, const torch::Tensor& item_vectors, int64_t k,
                                                const torch::Tensor& exclude = {}) const;

  /// Gives the loss another number of items, in place. New items were never seen; items past the end leave counts and
  /// memory. Nothing happens where any int64 is an id. Errors, before anything changes: ValueError.
  void resize_classes(int64_t num_items);

  /// Ids and counts keep their dtype, and so does a temperature that is not learned.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  torch::Tensor temperature; ///< 0-dim: a parameter, or a float64 number that no checkpoint holds
  samplers::StreamingCounts counts{nullptr};
  torch::Tensor memory, memory_id, memory_state; ///< [M, D], [M], and [2]: items and calls so far

 protected:
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(std::optional<std::tuple<torch::Tensor, torch::Tensor>>())},
                           {4, torch::nn::AnyValue(std::optional<torch::Tensor>())})

 private:
  std::string options_;
};
class TwoTowerLoss : public Holder<TwoTowerLossImpl> {
 public:
  using Holder::Holder;
  explicit TwoTowerLoss(const TwoTowerOptions& options = {}) : Holder(std::make_shared<Impl>(options)) {}
  TwoTowerLoss(const TwoTowerOptions& options, samplers::StreamingCounts counts, bool learn_temperature = false)
      : Holder(std::make_shared<Impl>(options, std::move(counts), learn_temperature)) {}
  explicit TwoTowerLoss(const Anything&, ...) = delete; // expected: [TwoTowerOptions[, StreamingCounts or nullptr[, learn_temperature]]]
};

} // namespace xsoftmax::nn
