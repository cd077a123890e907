#pragma once

// Training of hierarchical linear models, and vectors of labels for their trees.
//
//     const auto examples = xsoftmax::read_examples("train.txt");
//     const auto model = xsoftmax::XRLinear::train(examples, xsoftmax::XRLinearTrainOptions().negatives({"tfn+man"}));
//     model->save("model");

#include <xsoftmax/matcher.h>
#include <xsoftmax/trees.h>

#include <ATen/core/Generator.h>
#include <torch/arg.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace xsoftmax {

/// Options of XRLinear::train, set by calls, with the names and defaults of xsoftmax.XRLinear.train.
struct XRLinearTrainOptions {
  /// Over the labels, all on its last layer. Null: LabelTree::from_vectors of label_vectors::pifa(examples), with arity and max_leaf_size.
  TORCH_ARG(LabelTree, tree) = nullptr;
  TORCH_ARG(int64_t, arity) = 16;
  TORCH_ARG(int64_t, max_leaf_size) = 100;
  /// The rows that a node is trained on: "tfn", "man", "user" or several joined by +; one for all layers, or one for each.
  TORCH_ARG(std::vector<std::string>, negatives) = { "tfn" };
  using Pairs = std::tuple<at::Tensor, at::Tensor>;
  /// Of "user": offsets int64 [n + 1] and labels int32, for each example the labels that it is a negative of.
  TORCH_ARG(std::optional<Pairs>, user_negatives) = std::nullopt;
  /// Of the search for "man".
  TORCH_ARG(int64_t, beam) = 10;
  /// "squared_hinge", "hinge" or "logistic".
  TORCH_ARG(std::string, loss) = "squared_hinge";
  TORCH_ARG(double, positive_cost) = 1.0;
  TORCH_ARG(double, negative_cost) = 1.0;
  /// float32, a number for each of examples.labels, at least 0: multiplies positive_cost.
  TORCH_ARG(std::optional<at::Tensor>, relevance) = std::nullopt;
  TORCH_ARG(double, tolerance) = 0.1;
  TORCH_ARG(int64_t, sweeps) = 100;
  /// The value of one more feature, which every row has; 0: no such feature.
  TORCH_ARG(double, bias) = 1.0;
  /// Weights nearer to 0 are dropped.
  TORCH_ARG(double, threshold) = 0.1;
  TORCH_ARG(std::optional<int64_t>, max_weights) = std::nullopt;
  /// A model of the same tree and features, from which training begins.
  TORCH_ARG(c10::intrusive_ptr<XRLinear>, initial) = {};
  /// float16 or float32; none: float16, unless a weight is too small or too large for it.
  TORCH_ARG(std::optional<at::ScalarType>, dtype) = std::nullopt;
};

/// Vectors of labels as sparse rows [L, width]: (offsets int64, columns int32, values float32), columns rising. The same as
/// xsoftmax.label_vectors in Python; pass them to tree_from_vectors.
namespace label_vectors {

using Rows = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// normalize(Y.T): each label by the examples that have it, of width n.
Rows pii(const Examples& examples);
/// normalize(Y.T @ X): by the sum of their features. Rows of X should be of length 1.
Rows pifa(const Examples& examples);
/// Each row divided by its length; rows of zeros stay. width: columns are below it.
Rows unit_rows(const Rows& rows, int64_t width);

} // namespace label_vectors

/// LabelTree::from_vectors of sparse rows [L, width]; options.max_leaf_size is at least 1. ValueError and IndexError for rows that contradict themselves.
LabelTree tree_from_vectors(const label_vectors::Rows& rows, int64_t width, const TreeFromVectors& options,
                            std::optional<at::Generator> generator = std::nullopt);

} // namespace xsoftmax
