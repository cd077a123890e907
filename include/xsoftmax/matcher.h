#pragma once

// Extreme multi-label classification by a hierarchical linear model.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace xsoftmax {

class BeamLayer;
struct Examples;
struct XRLinearTrainOptions;

/// Options of XRLinear::predict and XRLinear::topk, set by calls: XRLinearPredictOptions().topk(5).beam(20).
struct XRLinearPredictOptions {
  /// Labels of each query, at least 0.
  TORCH_ARG(int64_t, topk) = 10;
  /// Nodes of a layer whose children are scored, at least 1.
  TORCH_ARG(int64_t, beam) = 10;
  /// Of a score z: "l1-hinge" .. "l6-hinge", e^-max(0, 1 - z)^p; "sigmoid"; "identity"; "log-" before the first two for their logs; empty: the model's.
  TORCH_ARG(std::string, transform) = "";
  /// Of that and the parent's score: "multiply", "add", or "last", itself alone; empty: "add" beside a transform to logs and "identity", else "multiply".
  TORCH_ARG(std::string, combiner) = "";
  /// int64: the labels among which the best are wanted; none: all.
  TORCH_ARG(std::optional<at::Tensor>, only) = std::nullopt;
  /// float32 [n, d]: the features from dense_begin on, beside the sparse ones or alone.
  TORCH_ARG(std::optional<at::Tensor>, dense) = std::nullopt;
  TORCH_ARG(int64_t, dense_begin) = 0;
};

/// The layers of a tree of labels, with a sparse linear classifier for each child of each node (Yu et al., 2022, section 3). Never changes; any
/// number of threads may ask it at once.
class XRLinear : public torch::CustomClassHolder {
 public:
  /// layers: of each, from the top, first_child, chunk, feature, more, child and value (csrc/matcher/linear_layer.h). labels int64 [L]: the
  /// label of each node of the last layer. features: of a query. bias: the value of the column that every query has beside them. transform:
  /// what predict() uses where it is not told otherwise. Checked: throws ValueError, TypeError or IndexError where the parts do not fit
  /// together.
  XRLinear(int64_t features, double bias, const std::string& transform, at::Tensor labels, std::vector<std::vector<at::Tensor>> layers);
  ~XRLinear() override;

  /// Trains a linear classifier for each node of a tree, layer after layer from the top: the model that xsoftmax.XRLinear.train makes of the same examples,
  /// options and generator, bit for bit. Include matcher_training.h. Says how far it is, and can be stopped (long_work.h). Throws ValueError, TypeError and
  /// IndexError for examples and options that do not fit.
  static c10::intrusive_ptr<XRLinear> train(const Examples& examples, const XRLinearTrainOptions& options,
                                            std::optional<at::Generator> generator = std::nullopt);
  static c10::intrusive_ptr<XRLinear> train(const Examples& examples);

  using Predictions = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

  /// Returns the best labels of each query by beam search: offsets int64 [n + 1], labels int64 and
  /// scores float32, best first in each row, equal scores in the order of the last layer.
  ///
  /// The search adds logs where scores are products or sums of values above 0: the order is right
  /// where float32 rounds scores to 0 or 1. No reported score is 0, which sparse formats drop: the
  /// smallest normal numbers, 2^-126 and those after it, take the place of smaller ones, in order.
  ///
  /// Queries are sparse rows: offsets [n + 1] and columns int32 or int64, values float32; or the dense block of the options; or both.
  Predictions predict(const at::Tensor& offsets, const at::Tensor& columns, const at::Tensor& values, const XRLinearPredictOptions& options = {}) const;

  /// Returns (scores float32 [n, k], labels int64 [n, k]) of predict(), k = options.topk(), 0 and -1 where fewer labels are found. exclude: int64 [n, E],
  /// the labels that each query does not want, -1 for none; the beam should have room for them.
  std::tuple<at::Tensor, at::Tensor> topk(const at::Tensor& offsets, const at::Tensor& columns, const at::Tensor& values,
                                          const XRLinearPredictOptions& options = {}, const std::optional<at::Tensor>& exclude = std::nullopt) const;

  /// predict() of a sparse CSR tensor [n, features], as one [n, L] of the scores, the entries of a row by label.
  at::Tensor predict_csr(const at::Tensor& queries, const XRLinearPredictOptions& options = {}) const;

  /// Writes the model to the folder `path`, as a whole or not at all: a folder that holds a model and nothing else is replaced, and goes on
  /// to serve who reads it; any other is left alone. notes: any text, kept with the model, and beside it as
  /// notes.json, for people; empty: notes().
  void save(const std::string& path, const std::string& notes = "") const;
  /// Throws what save(path) would say of what stands there: before hours of training.
  static void check_target(const std::string& path);
  /// What save() wrote, checked. Weights are mapped into memory, read-only: processes share them.
  static c10::intrusive_ptr<XRLinear> load(const std::string& path);

  int64_t features() const { return features_; }
  double bias() const { return bias_; }
  const std::string& transform() const { return transform_; }
  int64_t num_labels() const { return labels_.size(0); }
  /// What save() was given with the model that load() has read.
  const std::string& notes() const { return notes_; }
  int64_t depth() const { return int64_t(parts_.size()); }
  /// Copies of the parts of a layer: first_child, chunk, feature, more, child, value.
  std::vector<at::Tensor> layer(int64_t depth) const;
  at::Tensor labels() const { return labels_.clone(); }
  int64_t num_weights() const;

 private:
  /// Of each layer the nodes above some label of `only`.
  std::vector<std::vector<bool>> allowed_nodes(const at::Tensor& only) const;

  int64_t features_;
  double bias_;
  std::string transform_, notes_;
  at::Tensor labels_;
  std::vector<int64_t> leaf_; // of each label, its node on the last layer
  std::vector<std::vector<at::Tensor>> parts_; // of each layer
  std::vector<BeamLayer> layers_;
};

/// Examples as sparse rows, and the labels of each.
struct Examples {
  at::Tensor offsets, features, values; ///< int64 [n + 1], int32, float32
  at::Tensor label_offsets, labels;     ///< int64 [n + 1], int32
  int64_t num_features, num_labels;
};

/// Of a text file in the format of the extreme classification repository: a header "examples features labels", then a line for each example,
/// its labels joined by commas, a space and feature:value pairs; all ids from 0, features rising; values of 0 are left out. Throws ValueError with file, line
/// and text; also for a pipe or a device.
Examples read_examples(const std::string& path);

} // namespace xsoftmax
