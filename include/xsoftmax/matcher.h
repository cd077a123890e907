#pragma once

// Extreme multi-label classification by a hierarchical linear model.

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace xsoftmax {

class BeamLayer;

/// The layers of a tree of labels, with a sparse linear classifier for each child of each node (PECOS paper, section 3). Never changes; any
/// number of threads may ask it at once.
class XRLinear : public torch::CustomClassHolder {
 public:
  /// first_child, chunk, feature, entry, child, value: those of each layer, from the top (csrc/matcher/linear_layer.h). labels int64 [L]:
  /// the label of each node of the last layer. features: of a query. bias: the value of the column that every query has beside them.
  /// Checked: throws ValueError, TypeError or IndexError where the parts do not fit together.
  XRLinear(int64_t features, double bias, at::Tensor labels, std::vector<at::Tensor> first_child, std::vector<at::Tensor> chunk,
           std::vector<at::Tensor> feature, std::vector<at::Tensor> entry, std::vector<at::Tensor> child, std::vector<at::Tensor> value);
  ~XRLinear() override;

  using Predictions = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

  /// The topk labels of each query by beam search: offsets int64 [n + 1], labels int64 and scores float32, best first in each row, equal
  /// scores in the order of the last layer.
  ///
  /// Queries are sparse rows: offsets int64 [n + 1], columns int32 or int64, values float32; or a dense block, float32 [n, d], which are the
  /// features from dense_begin on; or both.
  ///
  /// beam: nodes of a layer that are looked below. transform: "l1-hinge" .. "l6-hinge", e^-max(0, 1 - z)^p of a score z; "sigmoid";
  /// "identity"; "log-" before the first two for their logs. combiner: what a node's score makes of its parent's: "multiply", "add", or
  /// "last", itself alone. only: int64, the labels among which the best are wanted; none: all.
  Predictions predict(const at::Tensor& offsets, const at::Tensor& columns, const at::Tensor& values,
                      const std::optional<at::Tensor>& dense = std::nullopt, int64_t dense_begin = 0, int64_t topk = 10, int64_t beam = 10,
                      const std::string& transform = "l3-hinge", const std::string& combiner = "multiply",
                      const std::optional<at::Tensor>& only = std::nullopt) const;

  int64_t features() const { return features_; }
  double bias() const { return bias_; }
  int64_t num_labels() const { return labels_.size(0); }
  int64_t depth() const { return int64_t(value_.size()); }
  /// The parts of a layer: first_child, chunk, feature, entry, child, value.
  std::vector<at::Tensor> layer(int64_t depth) const;
  at::Tensor labels() const { return labels_; }

 private:
  /// Of each layer the nodes above some label of `only`.
  std::vector<std::vector<bool>> allowed_nodes(const at::Tensor& only) const;

  int64_t features_;
  double bias_;
  at::Tensor labels_;
  std::vector<at::Tensor> first_child_, chunk_, feature_, entry_, child_, value_;
  std::vector<BeamLayer> layers_;
};

} // namespace xsoftmax
