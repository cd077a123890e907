#pragma once

#include <cstdint>
#include <optional>
#include <string>

// What operators of losses take as `options`, as text: "estimator=ranking,reduction=sum". A field that the text does not name has its default.

namespace xsoftmax {

/// How the scores of the target and of the candidates become a loss.
struct EstimatorOptions {
  std::string estimator = "sampled_softmax"; ///< see xsoftmax::candidate_loss
  bool remove_accidental_hits = true;        ///< candidates that are the target take no part, where the estimator can do without them
  double label_smoothing = 0.0;              ///< in [0, 1]

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("estimator", estimator);
    visitor("remove_accidental_hits", remove_accidental_hits);
    visitor("label_smoothing", label_smoothing);
  }
  bool operator==(const EstimatorOptions&) const = default;
};

/// What tower_loss takes.
struct TowerOptions : EstimatorOptions {
  std::string reduction = "mean"; ///< "mean" (weighted), "sum" or "none"

  template <typename Visitor>
  void visit(Visitor& visitor) {
    EstimatorOptions::visit(visitor);
    visitor("reduction", reduction);
  }
  bool operator==(const TowerOptions&) const = default;
};

/// Of two towers, as xsoftmax.TwoTowerLoss explains them.
struct TwoTowerOptions {
  std::optional<int64_t> num_items = std::nullopt; ///< ids are in [0, num_items); none: any int64 is one
  std::string estimator = "sampled_softmax";       ///< one of the library without noise
  double temperature = 1.0;                        ///< above 0: similarities are divided by it
  std::string similarity = "dot";                  ///< or "cosine"
  bool remove_accidental_hits = true;              ///< items equal to the query's are no candidates, as far as the estimator can do without them
  int64_t memory = 0;                              ///< how many items of past batches are candidates too
  std::optional<int64_t> dim = std::nullopt;       ///< width of the vectors in memory, needed beside one
  int64_t memory_warmup = 0;                       ///< how many calls come before memory takes part
  std::string reduction = "mean";                  ///< "mean" (weighted), "sum" or "none"

  template <typename Visitor>
  void visit(Visitor& v) {
    v("num_items", num_items);
    v("estimator", estimator);
    v("temperature", temperature);
    v("similarity", similarity);
    v("remove_accidental_hits", remove_accidental_hits);
    v("memory", memory);
    v("dim", dim);
    v("memory_warmup", memory_warmup);
    v("reduction", reduction);
  }
  bool operator==(const TwoTowerOptions&) const = default;
};

/// How the losses of queries are put together, as in torch.nn.CrossEntropyLoss.
struct ReductionOptions {
  std::string reduction = "mean"; ///< "mean" (weighted, over targets that are not ignored), "sum" or "none"
  int64_t ignore_index = -100;    ///< targets of this value have no loss and no gradient

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("reduction", reduction);
    visitor("ignore_index", ignore_index);
  }
  bool operator==(const ReductionOptions&) const = default;
};

/// How scores s, products of queries and rows with the bias added, become the logits of the softmax:
///     softcap * tanh(logit_scale * s / softcap), or logit_scale * s without a cap
struct LogitOptions {
  double logit_scale = 1.0; ///< above 0
  double softcap = 0.0;     ///< above 0: logits stay in (-softcap, softcap); 0: no cap

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("logit_scale", logit_scale);
    visitor("softcap", softcap);
  }
  bool operator==(const LogitOptions&) const = default;
};

/// Options of linear_cross_entropy.
struct CrossEntropyOptions : ReductionOptions, LogitOptions {
  double label_smoothing = 0.0; ///< in [0, 1]
  double z_loss = 0.0;          ///< at least 0: adds z_loss * (log normaliser)^2 to the loss of each query
  int64_t workspace_mb = 512;   ///< on CUDA: MB of logits, and of their gradients, that exist at once; at least 1

  template <typename Visitor>
  void visit(Visitor& visitor) {
    ReductionOptions::visit(visitor);
    LogitOptions::visit(visitor);
    visitor("label_smoothing", label_smoothing);
    visitor("z_loss", z_loss);
    visitor("workspace_mb", workspace_mb);
  }
  bool operator==(const CrossEntropyOptions&) const = default;
};

/// How the losses of several positives of a query are reduced, target [*, T].
struct PositivesOptions {
  std::string positives = "mean"; ///< "mean" of their losses, each without the others among the candidates; "sum": the log of their summed probability

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("positives", positives);
  }
  bool operator==(const PositivesOptions&) const = default;
};

/// Options of linear_positives_loss. label_smoothing: 0.
struct ExactPositivesOptions : CrossEntropyOptions, PositivesOptions {
  template <typename Visitor>
  void visit(Visitor& visitor) {
    CrossEntropyOptions::visit(visitor);
    PositivesOptions::visit(visitor);
  }
  bool operator==(const ExactPositivesOptions&) const = default;
};

/// What sampled_softmax_loss takes.
struct SampledSoftmaxOptions : EstimatorOptions, ReductionOptions, PositivesOptions, LogitOptions {
  /// The gradient of the table is row-sparse, with a static number of rows R; false: dense; none: row-sparse where R is at most N, the table's rows.
  std::optional<bool> sparse_grad = std::nullopt;
  double z_loss = 0.0; ///< at least 0: adds z_loss * (estimated log normaliser)^2 to the loss of each query

  template <typename Visitor>
  void visit(Visitor& visitor) {
    EstimatorOptions::visit(visitor);
    ReductionOptions::visit(visitor);
    PositivesOptions::visit(visitor);
    LogitOptions::visit(visitor);
    visitor("sparse_grad", sparse_grad);
    visitor("z_loss", z_loss);
  }
  bool operator==(const SampledSoftmaxOptions&) const = default;
};

} // namespace xsoftmax
