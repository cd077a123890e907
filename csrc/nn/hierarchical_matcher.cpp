#include "nn/hierarchical_matcher.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/options.h"
#include "loss/exclude_topk.h"
#include "loss/reduction.h"
#include "matcher/shortlist.h"
#include "tree/beam_search.h"
#include "tree/tree_scores.h"

#include <xsoftmax/ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <numeric>

namespace xsoftmax {
namespace matcher {

using at::Tensor;

namespace {

constexpr const char *kSquaredHinge = "squared_hinge", *kTeacherForcing = "tfn",
                     *kMatcherAware = "man";

const char* transform_of(const std::string& loss) {
  return loss == kSquaredHinge ? "log-l3-hinge" : "log-sigmoid";
}

// Returns the nodes of the layer above that the beam reaches: [Q, beam], padded with -1.
Tensor beam_nodes(const Tensor& queries, const Edges& edges, int64_t begin,
                  const HierarchicalMatcherOptions& options) {
  const TreeTables& tree = edges.tree;
  if (begin == 1) {
    return at::zeros_symint({queries.sym_size(0), 1}, tree.parent.options());
  }
  const auto above = [&](const Tensor& rows) { return rows.detach().narrow(0, 0, begin - 1); };
  // The layers above are also a tree.
  const Tensor children = tree.first_child.narrow(0, 0, begin + 1).clamp_max(begin);
  return std::get<1>(beam_search(
      queries.detach(), above(edges.weight),
      is_defined(edges.bias) ? OptionalTensor(above(*edges.bias)) : std::nullopt, children,
      at::arange(begin, children.options()), options.beam, transform_of(options.loss)));
}

} // namespace

Layer::Layer(const char* op, at::IntArrayRef layer_sizes, int64_t layer) {
  const auto layers = int64_t(layer_sizes.size());
  TORCH_CHECK_VALUE(layer >= 1 && layer <= layers, op, ": expected layer in [1, ", layers,
                    "], got ", layer);
  begin = std::accumulate(layer_sizes.begin(), layer_sizes.begin() + layer - 1, int64_t(1));
  end = begin + layer_sizes[layer - 1];
}

void check_options(const char* op, const HierarchicalMatcherOptions& options) {
  TORCH_CHECK_VALUE(options.loss == kSquaredHinge || options.loss == "logistic", op,
                    ": expected loss as one of ['logistic', 'squared_hinge'], got '", options.loss,
                    "'");
  TORCH_CHECK_VALUE(options.beam >= 1, op, ": expected beam of at least 1, got ", options.beam);
  TORCH_CHECK_VALUE(options.negatives == kTeacherForcing || options.negatives == kMatcherAware ||
                        options.negatives == "tfn+man",
                    op, ": expected negatives as one of ['man', 'tfn', 'tfn+man'], got '",
                    options.negatives, "'");
  reduction_code(op, options.reduction);
}

Tensor check_step(const char* op, const Tensor& input, const Tensor& target, const Edges& edges) {
  check::strided(op, "input", input);
  check::strided(op, "target", target);
  TORCH_CHECK_VALUE(input.dim() >= 1, op,
                    ": expected input of shape [*, D], got a tensor without dimensions");
  const auto queries = input.sym_sizes().slice(0, input.dim() - 1);
  const bool fits =
      target.dim() == input.dim() && target.sym_sizes().slice(0, queries.size()) == queries;
  TORCH_CHECK_VALUE(fits, op, ": expected target of shape ", queries,
                    " with one more dimension, for several labels, got ", target.sym_sizes());
  check::int64(op, "target", target);
  check::same_device(op, "target", target, "input", input);
  check::dim(op, "weight", edges.weight, 2);
  const Tensor rows = input.unsqueeze(0).flatten(0, -2);
  const bool casts = !input.is_meta() && at::autocast::is_autocast_enabled(input.device().type());
  if (!casts) {
    check::linear(op, rows, edges.weight, edges.bias);
  }
  const TreeTables& tree = edges.tree;
  const c10::SymInt nodes = edges.weight.sym_size(0) + 1;
  check_nodes(op, "first_child", tree.first_child, input, nodes + 1);
  check_nodes(op, "parent", tree.parent, input, nodes);
  check_nodes(op, "node_class", tree.node_class, input, nodes);
  check_nodes(op, "class_node", tree.class_node, input, tree.class_node.sym_numel());
  check_layer_sizes(op, edges.layer_sizes, edges.weight.sym_size(0));
  const c10::SymInt labels = tree.class_node.sym_size(0), target_width = target.sym_size(-1);
  TORCH_CHECK_VALUE(target_width != labels || target_width <= 1, op,
                    ": expected ids of labels, [*, T] with T below their number, got shape ",
                    target.sym_sizes(), ", a number for each label as multi-hot targets have");
  return rows;
}

Tensor true_nodes(const char* op, const Tensor& target, const Edges& edges, int64_t layer) {
  const Layer current_layer(op, edges.layer_sizes, layer);
  const Tensor labels = target.reshape({-1});
  Tensor node = label_tree_nodes(edges.tree.class_node, labels, -1);
  for (auto below = int64_t(edges.layer_sizes.size()); below > layer; --below) {
    node = at::where(node.ge(current_layer.end),
                     edges.tree.parent.index_select(0, node.clamp_min(0)), node);
  }
  return at::where(labels.ge(0).logical_and(node.ge(current_layer.begin)), node, -1)
      .reshape_symint(target.sym_sizes());
}

Shortlist step_shortlist(const Tensor& queries, const Tensor& targets, const Edges& edges,
                         const Layer& layer, const HierarchicalMatcherOptions& options,
                         std::optional<int64_t> most) {
  const TreeTables& tree = edges.tree;
  if (options.negatives == kTeacherForcing) {
    const Tensor no_parents = at::full_symint({queries.sym_size(0), 1}, -1, tree.parent.options());
    return shortlist(no_parents, targets, tree.first_child, tree.parent, most);
  }
  const Tensor parents = beam_nodes(queries, edges, layer.begin, options);
  if (options.negatives != kMatcherAware) {
    return shortlist(parents, targets, tree.first_child, tree.parent, most);
  }
  const Tensor above = tree.parent.index_select(0, targets.clamp_min(0).reshape({-1}))
                           .reshape_symint(targets.sym_sizes());
  const Tensor is_reached = above.unsqueeze(2).eq(parents.unsqueeze(1)).any(2);
  return shortlist(parents, at::where(is_reached, targets, -1), tree.first_child, tree.parent,
                   most);
}

Tensor node_losses(const Tensor& scores, const Tensor& right, const std::string& loss) {
  const Tensor margin = (right * 2 - 1) * scores;
  return loss == kSquaredHinge ? (1 - margin).clamp_min(0).square() : at::softplus(-margin);
}

} // namespace matcher

namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> topk_op(const Tensor& input, const Tensor& weight,
                                   const OptionalTensor& bias, at::TensorList tree, c10::SymInt k,
                                   std::optional<c10::SymInt> beam, const OptionalTensor& exclude,
                                   std::string_view options) {
  constexpr const char* op = "matcher_topk";
  return matcher_topk(input, weight, bias, {op, tree}, std::move(k), std::move(beam), exclude,
                      parse_options<HierarchicalMatcherOptions>(op, options));
}

Tensor loss_op(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
               const Tensor& target, at::TensorList tree, at::IntArrayRef layer_sizes,
               at::IntArrayRef group_sizes, int64_t layer, std::string_view options) {
  constexpr const char* op = "matcher_loss";
  return matcher_loss(input, weight, bias, target, {op, tree}, layer_sizes, group_sizes, layer,
                      parse_options<HierarchicalMatcherOptions>(op, options));
}

} // namespace

Tensor matcher_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    const Tensor& target, const TreeTables& tree, at::IntArrayRef layer_sizes,
                    at::IntArrayRef group_sizes, int64_t layer,
                    const HierarchicalMatcherOptions& options) {
  constexpr const char* op = "matcher_loss";
  const matcher::Edges edges{weight, bias, tree, layer_sizes};
  matcher::check_options(op, options);
  const Tensor queries = matcher::check_step(op, input, target, edges);
  const matcher::Layer current_layer(op, layer_sizes, layer);
  TORCH_CHECK_VALUE(group_sizes.size() == layer_sizes.size(), op, ": expected group_sizes of ",
                    layer_sizes.size(), " layers, got ", group_sizes.size());
  const Tensor correct = matcher::true_nodes(
      op, target.reshape_symint({queries.sym_size(0), target.sym_size(-1)}), edges, layer);
  const auto [nodes, offsets, right] = matcher::step_shortlist(
      queries, correct, edges, current_layer, options, group_sizes[layer - 1]);
  // Padding: kernels on a device pad the shortlists instead of waiting for their sizes.
  const Tensor is_padding = right.lt(0);
  const Tensor scores =
      ragged_scores(queries, weight, bias, nodes - 1, offsets, options.sparse_grad);
  const Tensor each = matcher::node_losses(scores.masked_fill(is_padding, 0.0), right, options.loss)
                          .masked_fill(is_padding, 0.0);
  switch (reduction_code(op, options.reduction)) {
    case at::Reduction::Sum: return each.sum();
    case at::Reduction::Mean: return each.sum() / at::Scalar(queries.sym_size(0));
    default:
      return at::segment_reduce(each, "sum", /*lengths=*/std::nullopt, /*indices=*/std::nullopt,
                                offsets, /*axis=*/0, /*unsafe=*/true,
                                /*initial=*/0.0)
          .reshape_symint(input.sym_sizes().slice(0, input.dim() - 1));
  }
}

std::tuple<Tensor, Tensor> matcher_topk(const Tensor& input, const Tensor& weight,
                                        const OptionalTensor& bias, const TreeTables& tree,
                                        c10::SymInt k, std::optional<c10::SymInt> beam,
                                        const OptionalTensor& exclude,
                                        const HierarchicalMatcherOptions& options) {
  constexpr const char* op = "matcher_topk";
  matcher::check_options(op, options);
  check::strided(op, "input", input);
  const Tensor excluded = exclude.value_or(Tensor());
  if (excluded.defined()) {
    check::strided(op, "exclude", excluded);
  }
  check::dim(op, "class_node", tree.class_node, 1);
  const c10::SymInt labels_count = tree.class_node.sym_size(0);
  TORCH_CHECK_VALUE(input.dim() >= 1, op,
                    ": expected input of shape [*, D], got a tensor without dimensions");
  TORCH_CHECK_VALUE(k >= 0 && k <= labels_count, op, ": expected k in [0, ", labels_count,
                    "], got ", k);
  const c10::SymInt width = beam.has_value() ? *beam : k.max(options.beam);
  TORCH_CHECK_VALUE(width >= k, op, ": expected a beam of at least k=", k, ", got ", width);
  const auto found =
      beam_search(input.unsqueeze(0).flatten(0, -2), weight, bias, tree.first_child,
                  tree.node_class, width.max(1).max(with_excluded(k, excluded, labels_count)),
                  matcher::transform_of(options.loss));
  const auto [logs, labels] = without_excluded(op, input, found, excluded, labels_count, k);
  // The smallest normal float32. Keeps the score of a label that was found apart from padding.
  constexpr double kMin = 0x1p-126;
  return {logs.exp().clamp_min(kMin).masked_fill(labels.lt(0), 0.0), labels};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "matcher_loss(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor[] tree, int[] "
      "layer_sizes, int[] group_sizes, "
      "int layer, str options=\"\") -> Tensor",
      loss_op);
  m.def(
      "matcher_topk(Tensor input, Tensor weight, Tensor? bias, Tensor[] tree, SymInt k, SymInt? "
      "beam=None, Tensor? exclude=None, "
      "str options=\"\") -> (Tensor scores, Tensor labels)",
      topk_op);
}

} // namespace xsoftmax
