#include "tree/hierarchical_softmax.h"

#include "op/anomalies.h"
#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/optional.h"
#include "table/scale_gradient.h"
#include "table/row_tables.h"
#include "op/shape_checks.h"
#include "tree/tree_scores.h"
#include "tree/sibling_paths.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <numeric>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kHierarchicalSoftmax =
    "hierarchical_softmax_loss"; // the operator that users call
constexpr const char* kTopk = "hierarchical_topk";

HierarchicalState call_forward(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& first_child,
                               const Tensor& parent, const Tensor& nodes,
                               at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes,
                               std::array<bool, 2> output_mask) {
  static const auto op = find_op<decltype(hierarchical_softmax_forward_reference)>(
      "xsoftmax::hierarchical_softmax_forward");
  return op.call(input, weight, bias, first_child, parent, nodes, layer_sizes, group_sizes,
                 output_mask);
}

RowGradients call_backward(const Tensor& scale, const Tensor& grad_edges, const Tensor& input,
                           const Tensor& weight, const Tensor& first_child, const Tensor& parent,
                           const Tensor& nodes, at::IntArrayRef layer_sizes,
                           at::IntArrayRef group_sizes, std::array<bool, 3> output_mask) {
  static const auto op = find_op<decltype(hierarchical_softmax_backward_reference)>(
      "xsoftmax::hierarchical_softmax_backward");
  return op.call(scale, grad_edges, input, weight, first_child, parent, nodes, layer_sizes,
                 group_sizes, output_mask);
}

int64_t sum(at::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
}

HierarchicalState forward_meta(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& first_child,
                               const Tensor& parent, const Tensor& nodes,
                               at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes,
                               std::array<bool, 2> output_mask) {
  check_hierarchical(input, weight, bias, first_child, parent, nodes, layer_sizes, group_sizes);
  const auto options = input.options().dtype(opmath_dtype(input.scalar_type()));
  const auto queries = [&](bool wanted) { return wanted ? input.sym_size(0) : c10::SymInt(0); };
  return {at::empty_symint({input.sym_size(0)}, options),
          at::empty_symint({queries(output_mask[0]), input.sym_size(1)}, options),
          at::empty_symint({queries(output_mask[1]), c10::SymInt(sum(group_sizes))}, options)};
}

RowGradients backward_meta(const Tensor& scale, const Tensor& grad_edges, const Tensor& input,
                           const Tensor& weight, const Tensor& first_child, const Tensor& parent,
                           const Tensor& nodes, at::IntArrayRef layer_sizes,
                           at::IntArrayRef group_sizes, std::array<bool, 3> output_mask) {
  check_hierarchical_backward(scale, grad_edges, input, weight, first_child, parent, nodes,
                              layer_sizes, group_sizes);
  return row_gradients_meta(input, sibling_rows(input.sym_size(0), layer_sizes, group_sizes),
                            output_mask);
}

Tensor loss_only(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                 const Tensor& first_child, const Tensor& parent, const Tensor& nodes,
                 at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes, std::optional<bool>) {
  return std::get<0>(call_forward(input, weight, bias, first_child, parent, nodes, layer_sizes,
                                  group_sizes, {false, false}));
}

class HierarchicalSoftmax : public torch::autograd::Function<HierarchicalSoftmax> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias, const Tensor& first_child,
                        const Tensor& parent, const Tensor& nodes, at::IntArrayRef layer_sizes,
                        at::IntArrayRef group_sizes, std::optional<bool> sparse_grad) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const bool want_edges = weight.requires_grad() || (is_defined(bias) && bias->requires_grad());
    auto [loss, grad_input, grad_edges] =
        call_forward(input, weight, bias, first_child, parent, nodes, layer_sizes, group_sizes,
                     {input.requires_grad(), want_edges});
    ctx->save_for_backward({input, weight, first_child, parent, nodes, grad_input, grad_edges});
    ctx->saved_data["layer_sizes"] = layer_sizes.vec();
    ctx->saved_data["group_sizes"] = group_sizes.vec();
    ctx->saved_data["sparse_grad"] = sparse_grad;
    ctx->saved_data["has_bias"] = is_defined(bias);
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &nodes = saved[4];
    const bool want_bias = ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2);
    torch::autograd::variable_list result(3);
    // A mean over zero queries sends an infinite gradient.
    const Tensor grad = grads[0].masked_fill(nodes.eq(0), 0);
    if (ctx->needs_input_grad(1) || want_bias) {
      const std::array<bool, 3> wanted{false, ctx->needs_input_grad(1), want_bias};
      const auto gradients = call_backward(grad, saved[6], input, weight, saved[2], saved[3], nodes,
                                           ctx->saved_data["layer_sizes"].toIntVector(),
                                           ctx->saved_data["group_sizes"].toIntVector(), wanted);
      result = row_gradients_as_grads(gradients, weight, wanted,
                                      ctx->saved_data["sparse_grad"].toOptional<bool>());
    }
    if (ctx->needs_input_grad(0)) {
      result[0] = scale_gradient(saved[5], grad.unsqueeze(1), input).to(input.scalar_type());
    }
    result.resize(9);
    return result;
  }
};

Tensor loss_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     const Tensor& first_child, const Tensor& parent, const Tensor& nodes,
                     at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes,
                     std::optional<bool> sparse_grad) {
  if (!at::GradMode::is_enabled()) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return hierarchical_softmax(input, weight, bias, first_child, parent, nodes, layer_sizes,
                                group_sizes, sparse_grad);
  }
  check::strided_tensors(kHierarchicalSoftmax,
                         {{"input", &input},
                          {"weight", &weight},
                          {"first_child", &first_child},
                          {"parent", &parent},
                          {"nodes", &nodes}});
  register_row_tables(sparse_grad, weight, bias);
  return HierarchicalSoftmax::apply(input, weight, bias, first_child, parent, nodes, layer_sizes,
                                    group_sizes, sparse_grad);
}

Tensor loss_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     const Tensor& first_child, const Tensor& parent, const Tensor& nodes,
                     at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes,
                     std::optional<bool> sparse_grad) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const OptionalTensor same =
      is_defined(bias) ? OptionalTensor(bias->to(weight.scalar_type())) : bias;
  return hierarchical_softmax(input.to(weight.scalar_type()), weight, same, first_child, parent,
                              nodes, layer_sizes, group_sizes, sparse_grad);
}

HierarchicalTopk topk_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           const Tensor& first_child, const Tensor& node_class, c10::SymInt k) {
  check_hierarchical_topk(input, weight, bias, first_child, node_class, k);
  return {at::empty_symint({input.sym_size(0), k},
                           input.options().dtype(opmath_dtype(input.scalar_type()))),
          at::empty_symint({input.sym_size(0), k}, node_class.options())};
}

HierarchicalTopk topk_autograd(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& first_child,
                               const Tensor& node_class, c10::SymInt k) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return hierarchical_topk(input, weight, bias, first_child, node_class, k);
}

HierarchicalTopk topk_autocast(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& first_child,
                               const Tensor& node_class, c10::SymInt k) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const OptionalTensor same =
      is_defined(bias) ? OptionalTensor(bias->to(weight.scalar_type())) : bias;
  return hierarchical_topk(input.to(weight.scalar_type()), weight, same, first_child, node_class,
                           k);
}

// Makes the checks of the CPU kernels, which check the paths they visit. On CUDA, an id out of
// range is a device assertion.
void check_sibling_paths(const char* op, const Tensor& first_child, const Tensor& parent,
                         const Tensor& nodes, at::IntArrayRef layer_sizes,
                         at::IntArrayRef group_sizes) {
  if (nodes.is_cpu()) {
    const SiblingPaths paths(op, first_child, parent, nodes, layer_sizes, group_sizes);
    SiblingPath path;
    for (int64_t query = 0; query < nodes.size(0); ++query) {
      paths.find(query, path);
    }
  }
}

// One layer of the paths to `nodes`. Entries that do not exist are edge -1.
struct Layer {
  Tensor active;  ///< [Q], whether the path reaches this layer
  Tensor edge;    ///< [Q], the edge on the path
  Tensor edges;   ///< [Q, group], the edge and its siblings
};

// Returns the layers from the bottom up.
std::vector<Layer> layers_of(const Tensor& first_child, const Tensor& parent, const Tensor& nodes,
                             at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes) {
  std::vector<Layer> layers;
  Tensor node = nodes;
  int64_t begin = parent.size(0);
  for (int64_t l = int64_t(layer_sizes.size()) - 1; l >= 0; --l) {
    begin -= layer_sizes[l];
    const Tensor active = node.ge(begin),
                 parent_node = at::where(active, parent.index_select(0, node), 0);
    const Tensor first = first_child.index_select(0, parent_node),
                 last = first_child.index_select(0, parent_node + 1);
    const Tensor child = first.unsqueeze(1) + at::arange(group_sizes[l], nodes.options());
    const Tensor exists = child.lt(last.unsqueeze(1)).logical_and(active.unsqueeze(1));
    layers.push_back({active, at::where(active, node - 1, -1), at::where(exists, child - 1, -1)});
    node = at::where(active, parent_node, node);
  }
  return layers;
}

} // namespace

Tensor hierarchical_softmax(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const Tensor& first_child, const Tensor& parent, const Tensor& nodes,
                            at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes,
                            std::optional<bool> sparse_grad) {
  static const auto op = find_op<decltype(hierarchical_softmax)>("xsoftmax::hierarchical_softmax");
  return op.call(input, weight, bias, first_child, parent, nodes, layer_sizes, group_sizes,
                 sparse_grad);
}

HierarchicalTopk hierarchical_topk(const Tensor& input, const Tensor& weight,
                                   const OptionalTensor& bias, const Tensor& first_child,
                                   const Tensor& node_class, c10::SymInt k) {
  static const auto op = find_op<decltype(hierarchical_topk)>("xsoftmax::hierarchical_topk");
  return op.call(input, weight, bias, first_child, node_class, k);
}

void check_hierarchical(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Tensor& first_child, const Tensor& parent, const Tensor& nodes,
                        at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes) {
  check::dim(kHierarchicalSoftmax, "nodes", nodes, 1);
  check_tree_scores(kHierarchicalSoftmax, input, weight, bias, parent, nodes.unsqueeze(-1),
                    layer_sizes);
  check_nodes(kHierarchicalSoftmax, "first_child", first_child, input, weight.sym_size(0) + 2);
  TORCH_CHECK_VALUE(group_sizes.size() == layer_sizes.size(), kHierarchicalSoftmax,
                    ": expected group_sizes of ", layer_sizes.size(),
                    " layers, as many as layer_sizes, got ", group_sizes.size());
  for (size_t l = 0; l < group_sizes.size(); ++l) {
    TORCH_CHECK_VALUE(group_sizes[l] >= 1 && group_sizes[l] <= layer_sizes[l], kHierarchicalSoftmax,
                      ": expected group_sizes in [1, ", layer_sizes[l],
                      "], the size of the layer, got ", group_sizes[l]);
  }
}

void check_hierarchical_backward(const Tensor& scale, const Tensor& grad_edges, const Tensor& input,
                                 const Tensor& weight, const Tensor& first_child,
                                 const Tensor& parent, const Tensor& nodes,
                                 at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes) {
  check_hierarchical(input, weight, std::nullopt, first_child, parent, nodes, layer_sizes,
                     group_sizes);
  constexpr const char* op = "hierarchical_softmax_backward";
  check::floating(op, "scale", scale);
  check::dim(op, "scale", scale, 1);
  check::size(op, "scale", scale, 0, nodes.sym_size(0), "the number of nodes");
  check::dim(op, "grad_edges", grad_edges, 2);
  check::size(op, "grad_edges", grad_edges, 0, nodes.sym_size(0), "the number of nodes");
  check::size(op, "grad_edges", grad_edges, 1, sum(group_sizes), "the sum of group_sizes");
  check::dtype(op, "grad_edges", grad_edges, opmath_dtype(input.scalar_type()));
}

void check_hierarchical_topk(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const Tensor& first_child, const Tensor& node_class,
                             const c10::SymInt& k) {
  check::linear(kTopk, input, weight, bias);
  check::finite_queries(kTopk, "input", input);
  check_nodes(kTopk, "first_child", first_child, input, weight.sym_size(0) + 2);
  check_nodes(kTopk, "node_class", node_class, input, weight.sym_size(0) + 1);
  TORCH_CHECK_VALUE(k >= 0, kTopk, ": expected k of at least 0, got ", k);
}

c10::SymInt sibling_rows(const c10::SymInt& queries, at::IntArrayRef layer_sizes,
                         at::IntArrayRef group_sizes) {
  c10::SymInt rows = 0;
  for (size_t l = 0; l < layer_sizes.size(); ++l) {
    rows += (queries * group_sizes[l]).min(c10::SymInt(layer_sizes[l]));
  }
  return rows;
}

HierarchicalState hierarchical_softmax_forward_reference(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const Tensor& first_child, const Tensor& parent, const Tensor& nodes,
    at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes, std::array<bool, 2> output_mask) {
  check_hierarchical(input, weight, bias, first_child, parent, nodes, layer_sizes, group_sizes);
  check_sibling_paths(kHierarchicalSoftmax, first_child, parent, nodes, layer_sizes, group_sizes);
  const Tensor scores = all_edge_scores(input, weight, bias);
  Tensor loss = at::zeros({input.size(0)}, scores.options());
  // Column 0 collects the entries with edge -1.
  Tensor by_edge = at::zeros({input.size(0), weight.size(0) + 1}, scores.options());
  std::vector<Tensor> grad_edges;
  for (const Layer& layer : layers_of(first_child, parent, nodes, layer_sizes, group_sizes)) {
    const Tensor none = layer.edges.lt(0), edges = layer.edges.clamp_min(0);
    const Tensor target_score = scores.gather(1, layer.edge.clamp_min(0).unsqueeze(1)).squeeze(1);
    // If the path does not reach this layer, any finite scores will do.
    const Tensor group = scores.gather(1, edges)
                             .masked_fill(none, -kInfinite)
                             .masked_fill(layer.active.logical_not().unsqueeze(1), 0);
    loss = loss + at::where(layer.active, group.logsumexp(1) - target_score, 0.0);
    const Tensor gradient = at::where(
        none, 0.0,
        group.softmax(1) - layer.edges.eq(layer.edge.unsqueeze(1)).to(scores.scalar_type()));
    by_edge.scatter_add_(1, layer.edges + 1, gradient);
    grad_edges.insert(grad_edges.begin(), gradient);
  }
  const Tensor empty = scores.new_empty({0, input.size(1)});
  return {loss,
          output_mask[0]
              ? at::mm(by_edge.narrow(1, 1, weight.size(0)), weight.to(scores.scalar_type()))
              : empty,
          output_mask[1]
              ? (grad_edges.empty() ? scores.new_empty({input.size(0), 0}) : at::cat(grad_edges, 1))
              : scores.new_empty({0, sum(group_sizes)})};
}

RowGradients hierarchical_softmax_backward_reference(
    const Tensor& scale, const Tensor& grad_edges, const Tensor& input, const Tensor& weight,
    const Tensor& first_child, const Tensor& parent, const Tensor& nodes,
    at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes, std::array<bool, 3> output_mask) {
  check_hierarchical_backward(scale, grad_edges, input, weight, first_child, parent, nodes,
                              layer_sizes, group_sizes);
  check_sibling_paths("hierarchical_softmax_backward", first_child, parent, nodes, layer_sizes,
                      group_sizes);
  const auto layers = layers_of(first_child, parent, nodes, layer_sizes, group_sizes);
  std::vector<Tensor> edges;
  for (const Layer& layer : layers) {
    edges.insert(edges.begin(), layer.edges);
  }
  const Tensor all = edges.empty() ? nodes.new_empty({nodes.size(0), 0}) : at::cat(edges, 1);
  return compact_edge_gradient(all, grad_edges * scale.unsqueeze(1), input, weight,
                               sibling_rows(nodes.size(0), layer_sizes, group_sizes).expect_int(),
                               output_mask);
}

HierarchicalTopk hierarchical_topk_reference(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias, const Tensor& first_child,
                                             const Tensor& node_class, c10::SymInt k) {
  check_hierarchical_topk(input, weight, bias, first_child, node_class, k);
  if (first_child.is_cpu()) { // on a device this would synchronise
    check_all_children(kTopk, first_child);
  }
  const Tensor scores = all_edge_scores(input, weight, bias);
  const int64_t nodes = node_class.size(0), wanted = k.expect_int(),
                found = std::min(wanted, nodes);
  const auto none = scores.new_zeros({input.size(0), 1}); // score of the root
  const Tensor children = first_child.diff(), leaf = children.eq(0),
               parent = parents_of(first_child);
  // Offsets of the groups. segment_reduce uses them as indices unchecked, and on a device
  // first_child has not been checked, so make them ascending and in range.
  const Tensor offsets = std::get<0>(first_child.sub(1).clamp(0, nodes - 1).cummax(0));
  // A softmax over the children of each node. Values of a group are contiguous.
  const auto reduce_groups = [&](const Tensor& values, c10::string_view reduction, double initial) {
    const Tensor reduced = at::segment_reduce(values.t().contiguous(), reduction, {}, {}, offsets,
                                              0, /*unsafe=*/true, initial);
    return reduced.t().index_select(1, parent.narrow(0, 1, nodes - 1));
  };
  const Tensor shifted = scores - reduce_groups(scores, "max", -kInfinite);
  Tensor log_prob = at::cat({none, shifted - reduce_groups(shifted.exp(), "sum", 0).log()}, 1);
  // Sum along paths by pointer doubling.
  Tensor parent_node = parent;
  for (int64_t length = 1; length < nodes; length *= 2) {
    log_prob = log_prob + log_prob.index_select(1, parent_node);
    parent_node = parent_node.index_select(0, parent_node);
  }
  // Leaves first, by descending probability; the sorts are stable.
  const Tensor by_value =
      std::get<1>(log_prob.sort(/*stable=*/true, /*dim=*/1, /*descending=*/true));
  const Tensor inner =
      leaf.logical_not().to(at::kByte).index_select(0, by_value.flatten()).view_as(by_value);
  const Tensor place =
      by_value.gather(1,
                      std::get<1>(inner.sort(/*stable=*/true, /*dim=*/1, /*descending=*/false))
                          .narrow(1, 0, found));
  const Tensor is_leaf = leaf.index_select(0, place.flatten()).view_as(place);
  const Tensor best = at::full({input.size(0), wanted}, -kInfinite, scores.options());
  const Tensor classes = at::full({input.size(0), wanted}, -1, node_class.options());
  best.narrow(1, 0, found)
      .copy_(log_prob.gather(1, place).masked_fill(is_leaf.logical_not(), -kInfinite));
  classes.narrow(1, 0, found)
      .copy_(at::where(is_leaf, node_class.index_select(0, place.flatten()).view_as(place), -1));
  const Tensor bad = log_prob.isnan().any(1, true);
  return {best.masked_fill(bad, std::numeric_limits<double>::quiet_NaN()),
          at::where(bad, at::arange(wanted, node_class.options()), classes)};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "hierarchical_softmax(Tensor input, Tensor weight, Tensor? bias, Tensor first_child, Tensor "
      "parent, Tensor nodes, int[] layer_sizes, "
      "int[] group_sizes, bool? sparse_grad=None) -> Tensor");
  m.def(
      "hierarchical_softmax_forward(Tensor input, Tensor weight, Tensor? bias, Tensor first_child, "
      "Tensor parent, Tensor nodes, "
      "int[] layer_sizes, int[] group_sizes, bool[2] output_mask) -> (Tensor loss, Tensor "
      "grad_input, Tensor grad_edges)");
  m.def(
      "hierarchical_softmax_backward(Tensor scale, Tensor grad_edges, Tensor input, Tensor weight, "
      "Tensor first_child, Tensor parent, "
      "Tensor nodes, int[] layer_sizes, int[] group_sizes, bool[3] output_mask) "
      "-> (Tensor grad_input, Tensor rows, Tensor values, Tensor bias_values)");
  m.def(
      "hierarchical_topk(Tensor input, Tensor weight, Tensor? bias, Tensor first_child, Tensor "
      "node_class, SymInt k) "
      "-> (Tensor values, Tensor classes)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("hierarchical_softmax", loss_only);
  m.impl("hierarchical_softmax_forward", hierarchical_softmax_forward_reference);
  m.impl("hierarchical_softmax_backward", hierarchical_softmax_backward_reference);
  m.impl("hierarchical_topk", hierarchical_topk_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("hierarchical_softmax_forward", forward_meta);
  m.impl("hierarchical_softmax_backward", backward_meta);
  m.impl("hierarchical_topk", topk_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("hierarchical_softmax", loss_autograd);
  m.impl("hierarchical_softmax_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("hierarchical_softmax_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("hierarchical_topk", topk_autograd);
}

XSOFTMAX_AUTOCAST(m) {
  m.impl("hierarchical_softmax", loss_autocast);
  m.impl("hierarchical_topk", topk_autocast);
  disable_autocast(m, {"hierarchical_softmax_forward", "hierarchical_softmax_backward"});
}

} // namespace xsoftmax
