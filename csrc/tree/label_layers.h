#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>
#include <vector>

// The layers of a label tree, and the training rows of their nodes, for XRLinear.train in C++ and
// in Python.

namespace xsoftmax {

/// The layers of a tree with all labels on its last layer.
struct LabelLayers {
  std::vector<at::Tensor> first_child; ///< of each layer, as in linear_layer.h
  std::vector<at::Tensor> label_nodes; ///< int32 [L]: the node that is each label or above it
  at::Tensor labels; ///< int64 [L]: the label of each node of the last layer

  int64_t depth() const { return int64_t(first_child.size()); }
  /// Returns the number of nodes of a layer.
  int64_t nodes(size_t layer) const;
};

/// label_layers(tree, layer_sizes) -> (first_child, label_nodes, labels)
///
/// tree: the tables of a LabelTree, on the CPU. The label of a tree of one node becomes the child
/// of a root. Throws ValueError if a label is above the last layer.
LabelLayers label_layers(at::TensorList tree, at::IntArrayRef layer_sizes);

/// Rules that select the training rows of a node. Several may apply.
enum Negatives : int64_t {
  kAllRows = 0,        ///< of the first layer
  kTeacherForcing = 1, ///< rows with a label below the node
  kMatcherAware = 2,   ///< rows whose beam reaches the node
  kUserNegatives = 4,  ///< rows that the user pairs with a label below the node
};

/// layer_negatives(negatives, layers, has_user_negatives) -> int[]
///
/// Parses the rules of each layer, names joined by "+". Returns a sum of Negatives per layer;
/// kAllRows for the first. Throws ValueError for other names, for another number of texts, and if
/// "user" and user negatives are not used together.
std::vector<int64_t> layer_negatives(const std::vector<std::string>& negatives, int64_t layers,
                                     bool has_user_negatives);

/// parent_rows(negatives, pairs, user_negatives, reached, label_nodes, num_nodes) -> (offsets,
/// rows)
///
/// Returns the training rows of each node of a layer (node_rows.h). negatives: a sum of Negatives.
/// pairs, user_negatives: offsets and labels of each row; reached: offsets and nodes of each row,
/// those that its beam reaches. The last two are empty unless their rule applies. For kAllRows
/// there is one node, the root.
std::tuple<at::Tensor, at::Tensor> parent_rows(int64_t negatives, at::TensorList pairs,
                                               at::TensorList user_negatives,
                                               at::TensorList reached,
                                               const at::Tensor& label_nodes, int64_t num_nodes);

} // namespace xsoftmax
