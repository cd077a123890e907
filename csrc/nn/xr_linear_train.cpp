#include <xsoftmax/matcher.h>

#include "op/checks.h"
#include "op/optional.h"
#include "op/options.h"
#include "matcher/canonical_rows.h"
#include "matcher/linear_layer.h"
#include "matcher/node_rows.h"
#include "matcher/sparse_row_sums.h"
#include "tree/label_tree_clusters.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <set>
#include <sstream>

namespace xsoftmax {
namespace {

using at::Tensor;
using Options = XRLinearTrainOptions;

constexpr const char* kName = "XRLinear.train";

Tensor draw_seed(const std::optional<at::Generator>& generator) {
  return at::randint(0, std::numeric_limits<int64_t>::max(), {}, generator, at::kLong);
}

SparseRowTensors canonical(const char* name, const Tensor& offsets, const Tensor& columns,
                           const Tensor& values, int64_t width, RowKind kind) {
  auto rows = canonical_rows(name, offsets, columns, values, width, kind);
  SparseRowTensors found = rows.has_value() ? *rows : SparseRowTensors{offsets, columns, values};
  found.columns = found.columns.to(at::kInt);
  return found;
}

SparseRowTensors features_of(const char* name, const Examples& examples) {
  return canonical(name, examples.offsets, examples.features, examples.values,
                   examples.num_features, RowKind::Features);
}

SparseRowTensors pairs_of(const char* name, const Tensor& offsets, const Tensor& labels,
                          int64_t num_labels) {
  return canonical(name, offsets, labels, at::ones({labels.numel()}, at::kFloat), num_labels,
                   RowKind::Labels);
}

/// The rows of each node of a layer (node_rows.h). costs: one per row, or empty.
struct Lists { Tensor offsets, rows, costs; };

/// Pairs of rows and nodes: each row has the nodes of its columns.
struct NodePairs { Tensor offsets, columns, nodes; };

Lists lists_of(const std::vector<NodePairs>& matrices, int64_t num_nodes,
               const Tensor& costs = {}) {
  std::vector<Tensor> offsets, columns, nodes;
  for (const NodePairs& each : matrices) {
    offsets.push_back(each.offsets);
    columns.push_back(each.columns);
    nodes.push_back(each.nodes);
  }
  const auto [ends, rows, row_costs] =
      node_rows(offsets, columns, nodes, num_nodes, optional(costs));
  return {ends, rows, row_costs};
}

/// Returns the rows of each column of a matrix.
Lists rows_of_columns(const SparseRowTensors& pairs, int64_t width) {
  return lists_of({{pairs.offsets, pairs.columns, at::arange(width, at::kInt)}}, width);
}

/// Layers of a tree. For each layer: first_child, where the children of each node in the layer
/// above begin, and label_parents, the node of the layer that is above each label.
struct TreeLayers {
  explicit TreeLayers(const LabelTree& tree) {
    if (tree->depth() == 0) { // a single label: treat it as the child of a root
      first_child = {at::tensor({0, 1}, at::kLong)};
      label_parents = {at::zeros({1}, at::kInt)};
      labels = at::zeros({1}, at::kLong);
      return;
    }
    std::vector<int64_t> ends{1};
    for (const int64_t size : tree->layer_sizes) {
      ends.push_back(ends.back() + size);
    }
    const Tensor first = tree->first_child.cpu(), parent = tree->parent.cpu(),
                 node_class = tree->node_class.cpu();
    const int64_t layers = tree->depth(), last = ends[layers - 1];
    const Tensor inner = node_class.narrow(0, 0, last),
                 inner_classes = inner.masked_select(inner.ge(0));
    TORCH_CHECK_VALUE(inner_classes.numel() == 0, kName,
                      ": expected a tree with all labels on its last layer, as from_vectors makes "
                      "with max_leaf_size, got label ",
                      inner_classes.numel() > 0 ? inner_classes[0].item<int64_t>() : -1,
                      " above it");
    for (int64_t depth = 0; depth < layers; ++depth) {
      const int64_t begin = depth > 0 ? ends[depth - 1] : 0, end = ends[depth];
      first_child.push_back(first.narrow(0, begin, end - begin + 1) - end);
    }
    labels = node_class.narrow(0, last, ends[layers] - last).clone();
    Tensor node = tree->class_node.cpu();
    for (int64_t depth = layers; depth-- > 0; node = parent.index_select(0, node)) {
      label_parents.insert(label_parents.begin(), (node - ends[depth]).to(at::kInt));
    }
  }

  int64_t nodes(size_t depth) const {
    return depth + 1 == first_child.size() ? labels.size(0) : first_child[depth + 1].size(0) - 1;
  }
  NodePairs pairs(size_t depth, const SparseRowTensors& pairs) const {
    return {pairs.offsets, pairs.columns, label_parents[depth]};
  }
  /// Returns, for each node of a layer, the rows that have a label below it.
  Lists lists(size_t depth, const SparseRowTensors& labels, const Tensor& costs = {}) const {
    return lists_of({pairs(depth, labels)}, nodes(depth), costs);
  }

  std::vector<Tensor> first_child, label_parents;
  Tensor labels; ///< label of each node of the last layer
};

std::vector<std::set<std::string>> schemes_of(const Options& options, size_t depth) {
  std::vector<std::string> each = options.negatives();
  if (each.size() == 1) {
    each.resize(depth, each[0]);
  }
  TORCH_CHECK_VALUE(each.size() == depth, kName, ": expected negatives for ", depth,
                    " layers, as the tree has, got ", each.size());
  std::vector<std::set<std::string>> schemes;
  bool user = false;
  for (const std::string& text : each) {
    std::istringstream parts(text + "+");
    schemes.emplace_back();
    for (std::string part; std::getline(parts, part, '+');) {
      TORCH_CHECK_VALUE(
          part == "tfn" || part == "man" || part == "user", kName,
          ": expected negatives as \"tfn\", \"man\", \"user\" or several joined by +, got \"", text,
          "\"");
      schemes.back().insert(part);
      user = user || part == "user";
    }
  }
  TORCH_CHECK_VALUE(user == options.user_negatives().has_value(), kName,
                    ": expected negatives with \"user\" and user_negatives together, got ",
                    user ? "no user_negatives" : "no such negatives");
  return schemes;
}

/// Returns the weights of a layer as they are stored: without a dtype, as float16 if they fit.
Tensor narrow_values(const Tensor& values, std::optional<at::ScalarType> dtype) {
  constexpr double kSmallest = 6.103515625e-05, kLargest = 65504; // range of normal float16
  if (dtype.has_value()) {
    return values; // as trained
  }
  const Tensor sizes = values.abs();
  const double smallest = sizes.numel() > 0 ? sizes.min().item<double>() : kLargest,
               largest = sizes.numel() > 0 ? sizes.max().item<double>() : kSmallest;
  return smallest >= kSmallest && largest <= kLargest ? values.to(at::kHalf) : values;
}

void check_options(const Options& options, const Examples& examples) {
  const auto at_least = [](const char* name, int64_t value, int64_t least) {
    TORCH_CHECK_VALUE(value >= least, kName, ": expected ", name, " of at least ", least, ", got ",
                      value);
  };
  const std::string& loss = options.loss();
  TORCH_CHECK_VALUE(loss == "hinge" || loss == "logistic" || loss == "squared_hinge", kName,
                    ": expected loss as \"hinge\", \"logistic\" or \"squared_hinge\", got \"", loss,
                    "\"");
  TORCH_CHECK_VALUE(
      !options.dtype().has_value() || options.dtype() == at::kHalf || options.dtype() == at::kFloat,
      kName, ": expected dtype float16 or float32, got ", options.dtype().value_or(at::kFloat));
  at_least("num_labels", examples.num_labels, 1);
  at_least("arity", options.arity(), 2);
  at_least("max_leaf_size", options.max_leaf_size(), 1);
  at_least("beam", options.beam(), 1);
  at_least("sweeps", options.sweeps(), 1);
  at_least("max_weights", options.max_weights().value_or(1), 1);
  TORCH_CHECK_VALUE(examples.offsets.size(0) == examples.label_offsets.size(0), kName,
                    ": expected features and labels of as many examples, got ",
                    examples.offsets.size(0) - 1, " and ", examples.label_offsets.size(0) - 1);
  TORCH_CHECK_VALUE(
      options.tree().is_empty() || options.tree()->num_classes() == examples.num_labels, kName,
      ": expected a tree of ", examples.num_labels, " labels, got one of ",
      options.tree().is_empty() ? 0 : options.tree()->num_classes());
}

Tensor checked_relevance(const Options& options, const Examples& examples,
                         const SparseRowTensors& labels) {
  if (!is_defined(options.relevance())) {
    return {};
  }
  const Tensor& relevance = *options.relevance();
  check::dtype(kName, "relevance", relevance, at::kFloat);
  TORCH_CHECK_VALUE(relevance.dim() == 1 && relevance.size(0) == examples.labels.size(0), kName,
                    ": expected relevance for each of ", examples.labels.size(0),
                    " labels of examples, got shape ", relevance.sizes());
  TORCH_CHECK_VALUE(labels.columns.equal(examples.labels.to(at::kInt)) &&
                        labels.offsets.equal(examples.label_offsets),
                    kName,
                    ": expected labels of an example that rise beside relevance, got others");
  TORCH_CHECK_VALUE(relevance.ge(0).logical_and(relevance.isfinite()).all().item<bool>(), kName,
                    ": expected relevance of at least 0, got less");
  return relevance;
}

std::vector<std::vector<Tensor>> initial_parts(const Options& options, const TreeLayers& layers,
                                               int64_t features) {
  std::vector<std::vector<Tensor>> parts(layers.first_child.size());
  if (options.initial() == nullptr) {
    return parts;
  }
  const XRLinear& model = *options.initial();
  bool same = model.depth() == int64_t(parts.size()) && model.features() == features &&
      model.labels().equal(layers.labels);
  for (size_t depth = 0; depth < parts.size() && same; ++depth) {
    parts[depth] = model.layer(int64_t(depth));
    same = parts[depth][0].equal(layers.first_child[depth]);
  }
  TORCH_CHECK_VALUE(same, kName,
                    ": expected initial with the features of the examples and the same tree, got a "
                    "model of others");
  return parts;
}

/// Returns the nodes of the last layer trained so far that the beam of each row reaches.
NodePairs mined(const std::vector<std::vector<Tensor>>& parts, const SparseRowTensors& rows,
                int64_t features, const std::string& transform, const Options& options) {
  const int64_t nodes = parts.back()[0][-1].item<int64_t>();
  const XRLinear model(features, options.bias(), transform, at::arange(nodes, at::kLong), parts);
  const auto search = XRLinearPredictOptions().topk(options.beam()).beam(options.beam());
  const auto [offsets, found, scores] =
      model.predict(rows.offsets, rows.columns, rows.values, search);
  return {offsets, found.to(at::kInt), at::arange(nodes, at::kInt)};
}

std::string layer_options(const Options& options, int64_t seed) {
  LinearLayerOptions result;
  result.loss = options.loss();
  result.bias = options.bias();
  result.positive_cost = options.positive_cost();
  result.negative_cost = options.negative_cost();
  result.tolerance = options.tolerance();
  result.sweeps = options.sweeps();
  result.threshold = options.threshold();
  result.max_weights = options.max_weights();
  result.half = options.dtype() == at::kHalf;
  result.seed = seed;
  return print_options(result);
}

} // namespace

namespace label_vectors {

Rows pii(const Examples& examples) {
  const auto labels = pairs_of("pii", examples.label_offsets, examples.labels, examples.num_labels);
  const Lists lists = rows_of_columns(labels, examples.num_labels);
  const Tensor counts = lists.offsets.diff();
  return {lists.offsets, lists.rows,
          at::repeat_interleave(counts.to(at::kDouble).rsqrt(), counts).to(at::kFloat)};
}

Rows pifa(const Examples& examples) {
  const auto rows = features_of("pifa", examples);
  const auto labels =
      pairs_of("pifa", examples.label_offsets, examples.labels, examples.num_labels);
  TORCH_CHECK_VALUE(rows.offsets.size(0) == labels.offsets.size(0),
                    "pifa: expected features and labels of as many examples, got ",
                    rows.offsets.size(0) - 1, " and ", labels.offsets.size(0) - 1);
  const Lists lists = rows_of_columns(labels, examples.num_labels);
  return sparse_row_sums(rows.offsets, rows.columns, rows.values, examples.num_features,
                         lists.offsets, lists.rows);
}

Rows unit_rows(const Rows& rows, int64_t width) {
  const auto [offsets, columns, values] =
      canonical("unit_rows", std::get<0>(rows), std::get<1>(rows), std::get<2>(rows), width,
                RowKind::Features);
  const int64_t count = offsets.size(0) - 1;
  return sparse_row_sums(offsets, columns, values, width, at::arange(count + 1, at::kLong),
                         at::arange(count, at::kInt));
}

} // namespace label_vectors

LabelTree tree_from_vectors(const label_vectors::Rows& rows, int64_t width,
                            const TreeFromVectors& options,
                            std::optional<at::Generator> generator) {
  TORCH_CHECK_VALUE(options.max_leaf_size >= 1,
                    "tree_from_vectors: expected max_leaf_size of at least 1, got ",
                    options.max_leaf_size);
  const auto [offsets, columns, values] =
      canonical("tree_from_vectors", std::get<0>(rows), std::get<1>(rows), std::get<2>(rows), width,
                RowKind::Features);
  const auto [parents, classes] =
      label_tree_clusters(draw_seed(generator), offsets, columns, values, width, options);
  return LabelTree(parents, classes);
}

c10::intrusive_ptr<XRLinear> XRLinear::train(const Examples& examples) {
  return train(examples, XRLinearTrainOptions());
}

c10::intrusive_ptr<XRLinear> XRLinear::train(const Examples& examples,
                                             const XRLinearTrainOptions& options,
                                             std::optional<at::Generator> generator) {
  check_options(options, examples);
  const auto rows = features_of(kName, examples);
  const auto labels = pairs_of(kName, examples.label_offsets, examples.labels, examples.num_labels);
  const Tensor relevance = checked_relevance(options, examples, labels);
  const int64_t features = examples.num_features, count = rows.offsets.size(0) - 1;
  SparseRowTensors user;
  if (options.user_negatives().has_value()) {
    const auto& [offsets, user_labels] = *options.user_negatives();
    user = pairs_of(kName, offsets, user_labels, examples.num_labels);
    check::size(kName, "user_negatives", user.offsets, 0, count + 1, "the examples and one");
  }
  LabelTree tree = options.tree();
  if (tree.is_empty()) {
    const TreeFromVectors shape{.arity = options.arity(), .max_leaf_size = options.max_leaf_size()};
    tree = tree_from_vectors(label_vectors::pifa(examples), features, shape, generator);
  }
  const TreeLayers layers(tree);
  const auto schemes = schemes_of(options, layers.first_child.size());
  const auto initial = initial_parts(options, layers, features);
  const std::string transform = options.loss() == "logistic" ? "sigmoid" : "l3-hinge";
  const std::string text = layer_options(options, draw_seed(generator).item<int64_t>());

  std::vector<std::vector<Tensor>> parts;
  Lists layer_labels;
  const auto parents_of = [&](size_t depth) -> Lists {
    if (depth == 0) {
      return {at::tensor({int64_t(0), count}, at::kLong), at::arange(count, at::kInt), {}};
    }
    if (schemes[depth] == std::set<std::string>{"tfn"}) {
      return layer_labels; // of the layer above
    }
    std::vector<NodePairs> found;
    if (schemes[depth].contains("man")) {
      found.push_back(mined(parts, rows, features, transform, options));
    }
    if (schemes[depth].contains("tfn")) {
      found.push_back(layers.pairs(depth - 1, labels));
    }
    if (schemes[depth].contains("user")) {
      found.push_back(layers.pairs(depth - 1, user));
    }
    return lists_of(found, layers.nodes(depth - 1));
  };
  // Layers up to the next one that needs beams are trained together.
  for (size_t first = 0, last = 0; first < schemes.size(); first = last) {
    std::vector<Tensor> first_child, parent_lists, label_lists, costs, begin;
    do {
      const Lists parents = parents_of(last);
      layer_labels = layers.lists(last, labels, relevance);
      first_child.push_back(layers.first_child[last]);
      parent_lists.insert(parent_lists.end(), {parents.offsets, parents.rows});
      label_lists.insert(label_lists.end(), {layer_labels.offsets, layer_labels.rows});
      if (relevance.defined()) {
        costs.push_back(layer_labels.costs);
      }
      begin.insert(begin.end(), initial[last].begin(), initial[last].end());
      ++last;
    } while (last < schemes.size() && !schemes[last].contains("man"));
    const std::vector<Tensor> trained = linear_layers_train(
        {rows.offsets, rows.columns, rows.values}, features, first_child, parent_lists, label_lists,
        costs, begin, std::vector<std::string>(last - first, text));
    for (size_t depth = first; depth < last; ++depth) {
      const Tensor* made = trained.data() + (depth - first) * kLinearLayerParts;
      parts.push_back({layers.first_child[depth], made[0], made[1], made[2], made[3],
                       narrow_values(made[4], options.dtype())});
    }
  }
  return c10::make_intrusive<XRLinear>(features, options.bias(), transform, layers.labels,
                                       std::move(parts));
}

} // namespace xsoftmax
