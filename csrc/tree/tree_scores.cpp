#include "tree/tree_scores.h"

#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/optional.h"
#include "table/row_tables.h"
#include "op/shape_checks.h"
#include "op/wanted_gradients.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kTreeScores = "tree_scores";

RowGradients call_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                           const Tensor& parent, const Tensor& nodes, at::IntArrayRef layer_sizes,
                           bool differences_only, std::array<bool, 3> output_mask) {
  static const auto op =
      find_op<decltype(tree_scores_backward_reference)>("xsoftmax::tree_scores_backward");
  return op.call(grad, input, weight, parent, nodes, layer_sizes, differences_only, output_mask);
}

Tensor tree_scores_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Tensor& parent, const Tensor& nodes, at::IntArrayRef layer_sizes,
                        bool, std::optional<bool>) {
  check_tree_scores(kTreeScores, input, weight, bias, parent, nodes, layer_sizes);
  return at::empty_symint(nodes.sym_sizes(),
                          input.options().dtype(opmath_dtype(input.scalar_type())));
}

RowGradients tree_scores_backward_meta(const Tensor& grad, const Tensor& input,
                                       const Tensor& weight, const Tensor& parent,
                                       const Tensor& nodes, at::IntArrayRef layer_sizes, bool,
                                       std::array<bool, 3> output_mask) {
  check_tree_scores_backward(grad, input, weight, parent, nodes, layer_sizes);
  return row_gradients_meta(input, edge_rows(nodes.sym_numel(), layer_sizes), output_mask);
}

class TreeScores : public torch::autograd::Function<TreeScores> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias, const Tensor& parent,
                        const Tensor& nodes, at::IntArrayRef layer_sizes, bool differences_only,
                        std::optional<bool> sparse_grad) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({input, weight, parent, nodes});
    ctx->saved_data["layer_sizes"] = layer_sizes.vec();
    ctx->saved_data["differences_only"] = differences_only;
    ctx->saved_data["sparse_grad"] = sparse_grad;
    ctx->saved_data["has_bias"] = is_defined(bias);
    return tree_scores(input, weight, bias, parent, nodes, layer_sizes, differences_only,
                       sparse_grad);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto wanted = wanted_gradients(*ctx, ctx->saved_data["has_bias"].toBool());
    const auto gradients = call_backward(grads[0], saved[0], saved[1], saved[2], saved[3],
                                         ctx->saved_data["layer_sizes"].toIntVector(),
                                         ctx->saved_data["differences_only"].toBool(), wanted);
    auto result = row_gradients_as_grads(gradients, saved[1], wanted,
                                         ctx->saved_data["sparse_grad"].toOptional<bool>());
    result.resize(8);
    return result;
  }
};

Tensor tree_scores_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const Tensor& parent, const Tensor& nodes, at::IntArrayRef layer_sizes,
                            bool differences_only, std::optional<bool> sparse_grad) {
  check::strided_tensors(
      kTreeScores,
      {{"input", &input}, {"weight", &weight}, {"parent", &parent}, {"nodes", &nodes}});
  register_row_tables(sparse_grad, weight, bias);
  return TreeScores::apply(input, weight, bias, parent, nodes, layer_sizes, differences_only,
                           sparse_grad);
}

Tensor tree_scores_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const Tensor& parent, const Tensor& nodes, at::IntArrayRef layer_sizes,
                            bool differences_only, std::optional<bool> sparse_grad) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const OptionalTensor same =
      is_defined(bias) ? OptionalTensor(bias->to(weight.scalar_type())) : bias;
  return tree_scores(input.to(weight.scalar_type()), weight, same, parent, nodes, layer_sizes,
                     differences_only, sparse_grad);
}

// Makes the checks of the CPU kernel, which checks the nodes it visits.
void check_paths(const char* op, const Tensor& parent, const Tensor& nodes) {
  if (!parent.is_cpu()) {
    return;
  }
  check::class_ids(op, "nodes", nodes, parent.size(0));
  const Tensor flat = parent.contiguous();
  for (int64_t node = 1; node < flat.size(0); ++node) {
    parent_of(op, flat.const_data_ptr<int64_t>(), node);
  }
}

// Returns the edges of each path, [Q, P, layers]; -1 where a path is shorter or an edge is left
// out.
Tensor edges_of_paths(const Tensor& parent, const Tensor& nodes, int64_t layers,
                      bool differences_only) {
  std::vector<Tensor> up{nodes};
  for (int64_t layer = 1; layer < layers; ++layer) {
    up.push_back(parent.index_select(0, up.back().flatten()).view_as(nodes).clamp_min(0));
  }
  const Tensor path =
      layers > 0 ? at::stack(up, -1) : nodes.new_empty({nodes.size(0), nodes.size(1), 0});
  Tensor counts = path.gt(0);
  if (differences_only) {
    // [Q, P, layers, P, layers]. Leave out edges that are on all paths of a query.
    const Tensor same = path.unsqueeze(-1).unsqueeze(-1).eq(path.unsqueeze(1).unsqueeze(1));
    counts = counts.logical_and(same.any(-1).all(-1).logical_not());
  }
  return at::where(counts, path - 1, -1);
}

} // namespace

Tensor tree_scores(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   const Tensor& parent, const Tensor& nodes, at::IntArrayRef layer_sizes,
                   bool differences_only, std::optional<bool> sparse_grad) {
  static const auto op = find_op<decltype(tree_scores_reference)>("xsoftmax::tree_scores");
  return op.call(input, weight, bias, parent, nodes, layer_sizes, differences_only, sparse_grad);
}

void check_nodes(const char* op, const char* name, const Tensor& tensor, const Tensor& input,
                 const c10::SymInt& size) {
  check::dim(op, name, tensor, 1);
  check::int64(op, name, tensor);
  check::same_device(op, name, tensor, "input", input);
  check::size(op, name, tensor, 0, size, "from the edges, the rows of weight");
}

void check_all_children(const char* op, const Tensor& first_child) {
  const Tensor offsets = first_child.cpu().contiguous();
  const int64_t nodes = offsets.size(0) - 1;
  for (int64_t node = 0; node < nodes; ++node) {
    children_of(op, offsets.const_data_ptr<int64_t>(), node, nodes);
  }
}

Tensor parents_of(const Tensor& first_child) {
  const int64_t nodes = first_child.size(0) - 1;
  const Tensor behind = at::searchsorted(first_child, at::arange(nodes, first_child.options()),
                                         /*out_int32=*/false, /*right=*/true);
  return (behind - 1).clamp_(0, nodes - 1);
}

void check_layer_sizes(const char* op, at::IntArrayRef layer_sizes, const c10::SymInt& edges) {
  c10::SymInt left = edges; // subtract, because the sum of sizes could overflow
  for (const int64_t size : layer_sizes) {
    TORCH_CHECK_VALUE(size >= 1, op, ": expected layer_sizes of at least 1, got ", size);
    TORCH_CHECK_VALUE(left >= size, op, ": expected layer_sizes with a sum of ", edges,
                      ", the edges, got more: ", layer_sizes);
    left = left - size;
  }
  TORCH_CHECK_VALUE(left == 0, op, ": expected layer_sizes with a sum of ", edges,
                    ", the edges, got ", left, " fewer: ", layer_sizes);
}

void check_tree_scores(const char* op, const Tensor& input, const Tensor& weight,
                       const OptionalTensor& bias, const Tensor& parent, const Tensor& nodes,
                       at::IntArrayRef layer_sizes) {
  check::linear(op, input, weight, bias);
  check_nodes(op, "parent", parent, input, weight.sym_size(0) + 1);
  check::dim(op, "nodes", nodes, 2);
  check::int64(op, "nodes", nodes);
  check::same_device(op, "nodes", nodes, "input", input);
  check::size(op, "nodes", nodes, 0, input.sym_size(0), "the rows of input");
  check_layer_sizes(op, layer_sizes, weight.sym_size(0));
}

void check_tree_scores_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                const Tensor& parent, const Tensor& nodes,
                                at::IntArrayRef layer_sizes) {
  constexpr const char* op = "tree_scores_backward";
  check_tree_scores(op, input, weight, std::nullopt, parent, nodes, layer_sizes);
  check::dim(op, "grad", grad, 2);
  check::size(op, "grad", grad, 0, nodes.sym_size(0), "the rows of nodes");
  check::size(op, "grad", grad, 1, nodes.sym_size(1), "the columns of nodes");
  check::dtype(op, "grad", grad, opmath_dtype(input.scalar_type()));
}

c10::SymInt edge_rows(const c10::SymInt& paths, at::IntArrayRef layer_sizes) {
  c10::SymInt rows = 0;
  for (const int64_t size : layer_sizes) {
    rows += paths.min(c10::SymInt(size));
  }
  return rows;
}

Tensor all_edge_scores(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const auto dtype = opmath_dtype(input.scalar_type());
  const Tensor scores = at::mm(input.to(dtype), weight.to(dtype).t());
  return is_defined(bias) ? scores + bias->to(dtype) : scores;
}

Tensor tree_scores_reference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const Tensor& parent, const Tensor& nodes, at::IntArrayRef layer_sizes,
                             bool differences_only, std::optional<bool>) {
  check_tree_scores(kTreeScores, input, weight, bias, parent, nodes, layer_sizes);
  check_paths(kTreeScores, parent, nodes);
  const Tensor edges = edges_of_paths(parent, nodes, int64_t(layer_sizes.size()), differences_only);
  const Tensor scores = all_edge_scores(input, weight, bias);
  const Tensor none = at::zeros({input.size(0), 1}, scores.options());
  return at::cat({none, scores}, 1).gather(1, (edges + 1).flatten(1)).view(edges.sizes()).sum(-1);
}

RowGradients tree_scores_backward_reference(const Tensor& grad, const Tensor& input,
                                            const Tensor& weight, const Tensor& parent,
                                            const Tensor& nodes, at::IntArrayRef layer_sizes,
                                            bool differences_only,
                                            std::array<bool, 3> output_mask) {
  check_tree_scores_backward(grad, input, weight, parent, nodes, layer_sizes);
  check_paths("tree_scores_backward", parent, nodes);
  const int64_t row_count = edge_rows(nodes.numel(), layer_sizes).expect_int();
  const Tensor edges = edges_of_paths(parent, nodes, int64_t(layer_sizes.size()), differences_only)
                           .flatten(1); // [Q, P layers]
  const Tensor coefficient =
      at::where(edges.ge(0),
                grad.unsqueeze(-1).expand({-1, -1, int64_t(layer_sizes.size())}).flatten(1), 0.0);
  return compact_edge_gradient(edges, coefficient, input, weight, row_count, output_mask);
}

RowGradients compact_edge_gradient(const Tensor& edges, const Tensor& coefficient,
                                   const Tensor& input, const Tensor& weight, int64_t row_count,
                                   std::array<bool, 3> output_mask) {
  const auto [want_input, want_weight, want_bias] = output_mask;
  const auto dtype = coefficient.scalar_type();
  // [Q, E + 1]: column 0 collects the entries with edge -1.
  const Tensor by_edge = at::zeros({input.size(0), weight.size(0) + 1}, coefficient.options())
                             .scatter_add_(1, edges + 1, coefficient);
  const Tensor edge_grad = by_edge.narrow(1, 1, weight.size(0));
  Tensor grad_input = input.new_empty({0, input.size(1)}), rows = edges.new_empty({0}),
         values = input.new_empty({0, input.size(1)}), bias_values = input.new_empty({0});
  if (want_input) {
    grad_input = at::mm(edge_grad, weight.to(dtype)).to(input.scalar_type());
  }
  if (want_weight || want_bias) {
    const Tensor touched =
        at::zeros({weight.size(0) + 1}, edges.options()).index_fill_(0, (edges + 1).flatten(), 1);
    const Tensor found = touched.narrow(0, 1, weight.size(0)).nonzero().squeeze(1);
    rows = at::zeros({row_count}, edges.options());
    if (found.size(0) > 0) {
      rows.fill_(found[-1]);
    }
    rows.narrow(0, 0, found.size(0)).copy_(found);
    if (want_weight) {
      values = at::zeros({row_count, input.size(1)}, input.options());
      // Zero out ignored queries: 0 times a non-finite input would not be 0.
      const Tensor no_query = coefficient.eq(0).all(1, true);
      const Tensor queries = input.to(dtype).masked_fill(no_query, 0);
      values.narrow(0, 0, found.size(0))
          .copy_(at::mm(edge_grad.index_select(1, found).t(), queries));
    }
    if (want_bias) {
      bias_values = at::zeros({row_count}, input.options());
      bias_values.narrow(0, 0, found.size(0)).copy_(edge_grad.index_select(1, found).sum(0));
    }
  }
  return {grad_input, rows, values, bias_values};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "tree_scores(Tensor input, Tensor weight, Tensor? bias, Tensor parent, Tensor nodes, int[] "
      "layer_sizes, "
      "bool differences_only=False, bool? sparse_grad=None) -> Tensor");
  m.def(
      "tree_scores_backward(Tensor grad, Tensor input, Tensor weight, Tensor parent, Tensor nodes, "
      "int[] layer_sizes, "
      "bool differences_only, bool[3] output_mask) -> (Tensor grad_input, Tensor rows, Tensor "
      "values, Tensor bias_values)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("tree_scores", tree_scores_reference);
  m.impl("tree_scores_backward", tree_scores_backward_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("tree_scores", tree_scores_meta);
  m.impl("tree_scores_backward", tree_scores_backward_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("tree_scores", tree_scores_autograd);
  m.impl("tree_scores_backward", torch::autograd::autogradNotImplementedFallback());
}

XSOFTMAX_AUTOCAST(m) {
  m.impl("tree_scores", tree_scores_autocast);
  disable_autocast(m, {"tree_scores_backward"});
}

} // namespace xsoftmax
