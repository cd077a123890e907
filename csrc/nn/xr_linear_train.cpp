#include <xsoftmax/matcher.h>

#include "op/checks.h"
#include "op/optional.h"
#include "op/options.h"
#include "matcher/canonical_rows.h"
#include "tree/label_layers.h"
#include "matcher/linear_layer.h"
#include "matcher/node_rows.h"
#include "matcher/sparse_row_sums.h"
#include "tree/label_tree_clusters.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/repeat_interleave.h>

#include <limits>
#include <tuple>

namespace xsoftmax {
namespace {

using at::Tensor;
using Options = XRLinearTrainOptions;

constexpr const char* kXrLinearTrain = "XRLinear.train";

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

/// Returns the offsets and rows of each column of a matrix.
std::tuple<Tensor, Tensor> rows_of_columns(const SparseRowTensors& pairs, int64_t width) {
  const auto [offsets, rows, costs] =
      node_rows({pairs.offsets}, {pairs.columns}, {at::arange(width, at::kInt)}, width);
  return {offsets, rows};
}

/// Returns the weights of a layer in the dtype of the file: without a dtype, float16 if they fit.
Tensor narrow_values(const Tensor& values, std::optional<at::ScalarType> dtype) {
  using Limits = std::numeric_limits<c10::Half>;
  if (dtype.has_value()) {
    return values;
  }
  const Tensor sizes = values.abs();
  const bool fits = values.numel() == 0 ||
      (sizes.min().item<float>() >= float(Limits::min()) &&
       sizes.max().item<float>() <= float(Limits::max()));
  return fits ? values.to(at::kHalf) : values;
}

void check_options(const Options& options, const Examples& examples) {
  const auto at_least = [](const char* name, int64_t value, int64_t least) {
    TORCH_CHECK_VALUE(value >= least, kXrLinearTrain, ": expected ", name, " of at least ", least,
                      ", got ", value);
  };
  const std::string& loss = options.loss();
  TORCH_CHECK_VALUE(
      loss == "hinge" || loss == "logistic" || loss == "squared_hinge", kXrLinearTrain,
      ": expected loss as \"hinge\", \"logistic\" or \"squared_hinge\", got \"", loss, "\"");
  TORCH_CHECK_VALUE(
      !options.dtype().has_value() || options.dtype() == at::kHalf || options.dtype() == at::kFloat,
      kXrLinearTrain, ": expected dtype float16 or float32, got ",
      options.dtype().value_or(at::kFloat));
  at_least("num_labels", examples.num_labels, 1);
  at_least("arity", options.arity(), 2);
  at_least("max_leaf_size", options.max_leaf_size(), 1);
  at_least("beam", options.beam(), 1);
  at_least("sweeps", options.sweeps(), 1);
  at_least("max_weights", options.max_weights().value_or(1), 1);
  TORCH_CHECK_VALUE(examples.offsets.size(0) == examples.label_offsets.size(0), kXrLinearTrain,
                    ": expected features and labels of as many examples, got ",
                    examples.offsets.size(0) - 1, " and ", examples.label_offsets.size(0) - 1);
  TORCH_CHECK_VALUE(
      options.tree().is_empty() || options.tree()->num_classes() == examples.num_labels,
      kXrLinearTrain, ": expected a tree of ", examples.num_labels, " labels, got one of ",
      options.tree().is_empty() ? 0 : options.tree()->num_classes());
}

Tensor checked_relevance(const Options& options, const Examples& examples,
                         const SparseRowTensors& labels) {
  if (!is_defined(options.relevance())) {
    return {};
  }
  const Tensor& relevance = *options.relevance();
  check::dtype(kXrLinearTrain, "relevance", relevance, at::kFloat);
  TORCH_CHECK_VALUE(relevance.dim() == 1 && relevance.size(0) == examples.labels.size(0),
                    kXrLinearTrain, ": expected relevance for each of ", examples.labels.size(0),
                    " labels of examples, got shape ", relevance.sizes());
  TORCH_CHECK_VALUE(labels.columns.equal(examples.labels.to(at::kInt)) &&
                        labels.offsets.equal(examples.label_offsets),
                    kXrLinearTrain,
                    ": expected increasing labels in each example if relevance is set, got others");
  TORCH_CHECK_VALUE(relevance.ge(0).logical_and(relevance.isfinite()).all().item<bool>(),
                    kXrLinearTrain, ": expected relevance of at least 0, got less");
  return relevance;
}

LabelLayers layers_of(const LabelTree& tree) {
  return label_layers(
      {tree->first_child.cpu(), tree->parent.cpu(), tree->node_class.cpu(), tree->class_node.cpu()},
      tree->layer_sizes);
}

std::vector<std::vector<Tensor>> initial_parts(const Options& options, const LabelLayers& layers,
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
  TORCH_CHECK_VALUE(same, kXrLinearTrain,
                    ": expected initial with the features of the examples and the same tree, got a "
                    "different model");
  return parts;
}

/// Returns the offsets and nodes of each row: those of the last trained layer that its beam
/// reaches.
std::vector<Tensor> reached_nodes(const std::vector<std::vector<Tensor>>& parts,
                                  const SparseRowTensors& rows, int64_t features,
                                  const std::string& transform, const Options& options) {
  const int64_t nodes = parts.back()[0][-1].item<int64_t>();
  const XRLinear model(features, options.bias(), transform, at::arange(nodes, at::kLong), parts);
  const auto search = XRLinearPredictOptions().topk(options.beam()).beam(options.beam());
  const auto [offsets, found, scores] =
      model.predict(rows.offsets, rows.columns, rows.values, search);
  return {offsets, found.to(at::kInt)};
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
  const auto [offsets, rows] = rows_of_columns(labels, examples.num_labels);
  const Tensor counts = offsets.diff();
  return {offsets, rows,
          at::repeat_interleave(counts.to(at::kDouble).rsqrt(), counts).to(at::kFloat)};
}

Rows pifa(const Examples& examples) {
  const auto rows = features_of("pifa", examples);
  const auto labels =
      pairs_of("pifa", examples.label_offsets, examples.labels, examples.num_labels);
  TORCH_CHECK_VALUE(rows.offsets.size(0) == labels.offsets.size(0),
                    "pifa: expected features and labels of as many examples, got ",
                    rows.offsets.size(0) - 1, " and ", labels.offsets.size(0) - 1);
  const auto [list_offsets, list_rows] = rows_of_columns(labels, examples.num_labels);
  return sparse_row_sums(rows.offsets, rows.columns, rows.values, examples.num_features,
                         list_offsets, list_rows);
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
  const auto rows = features_of(kXrLinearTrain, examples);
  const auto labels =
      pairs_of(kXrLinearTrain, examples.label_offsets, examples.labels, examples.num_labels);
  const Tensor relevance = checked_relevance(options, examples, labels);
  const int64_t features = examples.num_features;
  std::vector<Tensor> user;
  if (options.user_negatives().has_value()) {
    const auto& [offsets, user_labels] = *options.user_negatives();
    const auto user_pairs = pairs_of(kXrLinearTrain, offsets, user_labels, examples.num_labels);
    user = {user_pairs.offsets, user_pairs.columns};
    check::size(kXrLinearTrain, "user_negatives", user[0], 0, rows.offsets.size(0),
                "the examples and one");
  }
  LabelTree tree = options.tree();
  if (tree.is_empty()) {
    const TreeFromVectors shape{.arity = options.arity(), .max_leaf_size = options.max_leaf_size()};
    tree = tree_from_vectors(label_vectors::pifa(examples), features, shape, generator);
  }
  const LabelLayers layers = layers_of(tree);
  std::vector<std::string> rules = options.negatives();
  if (rules.size() == 1) {
    rules.resize(layers.depth(), rules[0]);
  }
  const std::vector<int64_t> negatives =
      layer_negatives(rules, layers.depth(), options.user_negatives().has_value());
  const auto initial = initial_parts(options, layers, features);
  const std::string transform = options.loss() == "logistic" ? "sigmoid" : "l3-hinge";
  const std::string text = layer_options(options, draw_seed(generator).item<int64_t>());

  std::vector<std::vector<Tensor>> parts;
  // Trains all layers up to the next one with matcher-aware negatives in one call.
  for (size_t first = 0, last = 0; first < negatives.size(); first = last) {
    std::vector<Tensor> first_child, parents, label_lists, costs, initial_of_layers, reached;
    if ((negatives[first] & kMatcherAware) != 0) {
      reached = reached_nodes(parts, rows, features, transform, options);
    }
    do {
      const auto [parent_offsets, parent_list] = parent_rows(
          negatives[last], {labels.offsets, labels.columns}, user, reached,
          layers.label_nodes[last == 0 ? 0 : last - 1], last == 0 ? 1 : layers.nodes(last - 1));
      const auto [label_offsets, label_rows, label_costs] =
          node_rows({labels.offsets}, {labels.columns}, {layers.label_nodes[last]},
                    layers.nodes(last), optional(relevance));
      first_child.push_back(layers.first_child[last]);
      parents.insert(parents.end(), {parent_offsets, parent_list});
      label_lists.insert(label_lists.end(), {label_offsets, label_rows});
      if (relevance.defined()) {
        costs.push_back(label_costs);
      }
      initial_of_layers.insert(initial_of_layers.end(), initial[last].begin(), initial[last].end());
      ++last;
    } while (last < negatives.size() && (negatives[last] & kMatcherAware) == 0);
    const std::vector<Tensor> trained = linear_layers_train(
        {rows.offsets, rows.columns, rows.values}, features, first_child, parents, label_lists,
        costs, initial_of_layers, std::vector<std::string>(last - first, text));
    for (size_t depth = first; depth < last; ++depth) {
      const Tensor* layer = trained.data() + (depth - first) * kLinearLayerParts;
      parts.push_back({layers.first_child[depth], layer[0], layer[1], layer[2], layer[3],
                       narrow_values(layer[4], options.dtype())});
    }
  }
  return c10::make_intrusive<XRLinear>(features, options.bias(), transform, layers.labels,
                                       std::move(parts));
}

} // namespace xsoftmax
