#include "tree/label_layers.h"

#include "op/checks.h"
#include "op/operators.h"
#include "matcher/node_rows.h"
#include "table/sparse_rows.h"
#include "tree/label_tree.h"
#include "tree/tree_scores.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <sstream>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kTrain = "XRLinear.train"; // the caller, in errors of its arguments

} // namespace

int64_t LabelLayers::nodes(size_t layer) const { return first_child[layer][-1].item<int64_t>(); }

LabelLayers label_layers(at::TensorList tree, at::IntArrayRef layer_sizes) {
  constexpr const char* op = "label_layers";
  const TreeTables tables(op, tree);
  const auto& [first_child, parent, node_class, class_node] = tables;
  for (const auto& [name, table] :
       {std::pair<const char*, const Tensor&>{"first_child", first_child},
        {"parent", parent},
        {"node_class", node_class},
        {"class_node", class_node}}) {
    check::numbers(op, name, table, at::kLong);
  }
  check_layer_sizes(op, layer_sizes, node_class.size(0) - 1);
  check::size(op, "first_child", first_child, 0, node_class.size(0) + 1, "one more than the nodes");
  check::size(op, "parent", parent, 0, node_class.size(0), "the nodes");
  if (layer_sizes.empty()) {
    return {{at::tensor({0, 1}, at::kLong)}, {at::zeros({1}, at::kInt)}, at::zeros({1}, at::kLong)};
  }
  std::vector<int64_t> ends{0, 1}; // of the root's layer and of those below
  for (const int64_t size : layer_sizes) {
    ends.push_back(ends.back() + size);
  }
  const size_t layers = layer_sizes.size();
  const Tensor inner = node_class.narrow(0, 0, ends[layers]),
               inner_labels = inner.masked_select(inner.ge(0));
  TORCH_CHECK_VALUE(inner_labels.numel() == 0, kTrain,
                    ": expected a tree with all labels on its last layer, as "
                    "LabelTree.from_vectors makes with max_leaf_size, got label ",
                    inner_labels.numel() > 0 ? inner_labels[0].item<int64_t>() : -1, " above it");
  check::size(op, "class_node", class_node, 0, layer_sizes.back(), "the nodes of the last layer");
  LabelLayers result;
  for (size_t depth = 0; depth < layers; ++depth) {
    const int64_t begin = ends[depth], end = ends[depth + 1];
    result.first_child.push_back(first_child.narrow(0, begin, end - begin + 1) - end);
  }
  result.labels = node_class.narrow(0, ends[layers], layer_sizes.back()).clone();
  Tensor node = class_node;
  for (size_t depth = layers; depth-- > 0; node = parent.index_select(0, node)) {
    result.label_nodes.push_back((node - ends[depth + 1]).to(at::kInt));
  }
  std::reverse(result.label_nodes.begin(), result.label_nodes.end());
  return result;
}

std::vector<int64_t> layer_negatives(const std::vector<std::string>& negatives, int64_t layers,
                                     bool has_user_negatives) {
  TORCH_CHECK_VALUE(int64_t(negatives.size()) == layers, kTrain, ": expected negatives for ",
                    layers, " layers, as the tree has, got ", negatives.size());
  std::vector<int64_t> result;
  int64_t all = 0;
  for (const std::string& text : negatives) {
    std::istringstream parts(text + "+");
    int64_t rules = 0;
    for (std::string part; std::getline(parts, part, '+');) {
      int64_t rule = 0;
      if (part == "tfn") {
        rule = kTeacherForcing;
      } else if (part == "man") {
        rule = kMatcherAware;
      } else if (part == "user") {
        rule = kUserNegatives;
      }
      TORCH_CHECK_VALUE(rule != 0, kTrain,
                        ": expected negatives as \"tfn\", \"man\", \"user\" or several joined by "
                        "+, got \"",
                        text, "\"");
      rules |= rule;
    }
    all |= rules;
    result.push_back(result.empty() ? int64_t(kAllRows) : rules);
  }
  const bool uses_user_negatives = (all & kUserNegatives) != 0;
  TORCH_CHECK_VALUE(
      has_user_negatives || !uses_user_negatives, kTrain,
      ": expected user_negatives together with negatives that contain \"user\", got none");
  TORCH_CHECK_VALUE(
      uses_user_negatives || !has_user_negatives, kTrain,
      ": expected negatives that contain \"user\" together with user_negatives, got others");
  return result;
}

std::tuple<Tensor, Tensor> parent_rows(int64_t negatives, at::TensorList pairs,
                                       at::TensorList user_negatives, at::TensorList reached,
                                       const Tensor& label_nodes, int64_t num_nodes) {
  constexpr const char* op = "parent_rows";
  TORCH_CHECK_VALUE(pairs.size() == 2, op, ": expected pairs as offsets and labels, got ",
                    pairs.size(), " tensors");
  if (negatives == kAllRows) {
    const int64_t count = pairs[0].size(0) - 1;
    return {at::tensor({int64_t(0), count}, at::kLong), at::arange(count, at::kInt)};
  }
  check_num_nodes(op, num_nodes);
  std::vector<Tensor> offsets, columns, nodes;
  const auto add = [&](int64_t rule, const char* name, at::TensorList matrix,
                       const Tensor& column_nodes) {
    if ((negatives & rule) != 0) {
      TORCH_CHECK_VALUE(matrix.size() == 2, op, ": expected ", name,
                        " as offsets and columns, got ", matrix.size(), " tensors");
      offsets.push_back(matrix[0]);
      columns.push_back(matrix[1]);
      nodes.push_back(column_nodes);
    }
  };
  add(kMatcherAware, "reached", reached, at::arange(num_nodes, at::kInt));
  add(kTeacherForcing, "pairs", pairs, label_nodes);
  add(kUserNegatives, "user_negatives", user_negatives, label_nodes);
  const auto [ends, rows, costs] = node_rows(offsets, columns, nodes, num_nodes);
  return {ends, rows};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "label_layers(Tensor[] tree, int[] layer_sizes) -> (Tensor[] first_child, Tensor[] "
      "label_nodes, Tensor labels)");
  m.def("layer_negatives(str[] negatives, int layers, bool has_user_negatives) -> int[]",
        [](const c10::List<std::string>& negatives, int64_t layers, bool has_user_negatives) {
          return layer_negatives(negatives.vec(), layers, has_user_negatives);
        });
  m.def(
      "parent_rows(int negatives, Tensor[] pairs, Tensor[] user_negatives, Tensor[] reached, "
      "Tensor label_nodes, int num_nodes) -> (Tensor offsets, Tensor rows)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("label_layers", [](at::TensorList tree, at::IntArrayRef layer_sizes) {
    auto [first_child, label_nodes, labels] = label_layers(tree, layer_sizes);
    return std::tuple(std::move(first_child), std::move(label_nodes), std::move(labels));
  });
  m.impl("parent_rows", parent_rows);
}

} // namespace xsoftmax
