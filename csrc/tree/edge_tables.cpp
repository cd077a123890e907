#include "tree/edge_tables.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "tree/tree_scores.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace xsoftmax {

using at::Tensor;

namespace {

// Checks that the parent of each node is in the layer above.
void check_parents(const char* op, const Tensor& parent, at::IntArrayRef layer_sizes) {
  const Tensor flat = check::readable(parent);
  const int64_t* above = flat.const_data_ptr<int64_t>();
  int64_t before = 0, begin = 1;
  for (const int64_t size : layer_sizes) {
    for (int64_t node = begin; node < begin + size; ++node) {
      TORCH_CHECK_VALUE(above[node] >= before && above[node] < begin, op,
                        ": expected the parent of node ", node, " in the layer above, [", before,
                        ", ", begin, "), got ", above[node]);
    }
    before = begin;
    begin += size;
  }
}

void check_edge_values(const char* op, const Tensor& edges, const Tensor& parent,
                       const Tensor& class_node, at::IntArrayRef layer_sizes, int64_t dim) {
  check::floating(op, "edges", edges);
  TORCH_CHECK_VALUE(dim >= 0 && dim < edges.dim(), op, ": expected edges with more than ", dim,
                    " dimensions, got shape ", edges.sym_sizes());
  for (const auto& [name, tensor] :
       {std::pair<const char*, const Tensor&>{"parent", parent}, {"class_node", class_node}}) {
    check::dim(op, name, tensor, 1);
    check::int64(op, name, tensor);
    check::same_device(op, name, tensor, "edges", edges);
  }
  check::size(op, "parent", parent, 0, edges.sym_size(dim) + 1, "one more than the edges");
  check_layer_sizes(op, layer_sizes, edges.sym_size(dim));
  if (check::can_read(check::readable(parent))) {
    check_parents(op, parent, layer_sizes);
    check::class_ids(op, "class_node", class_node, parent.size(0));
  }
}

} // namespace

Tensor tree_class_scores(const Tensor& edges, const Tensor& parent, const Tensor& class_node,
                         at::IntArrayRef layer_sizes, int64_t dim) {
  check_edge_values("tree_class_scores", edges, parent, class_node, layer_sizes, dim);
  auto shape = edges.sym_sizes().vec();
  shape[dim] = 1;
  Tensor above = edges.new_zeros_symint(shape);
  std::vector<Tensor> nodes{above};
  int64_t before = 0, begin = 1; // first nodes of the layer above and of this layer
  for (const int64_t size : layer_sizes) {
    above = above.index_select(dim, parent.narrow(0, begin, size) - before) +
        edges.narrow(dim, begin - 1, size);
    nodes.push_back(above);
    before = begin;
    begin += size;
  }
  return at::cat(nodes, dim).index_select(dim, class_node);
}

Tensor hierarchical_log_prob(const Tensor& edges, const Tensor& parent, const Tensor& class_node,
                             at::IntArrayRef layer_sizes) {
  check::dim("hierarchical_log_prob", "edges", edges, 2);
  check_edge_values("hierarchical_log_prob", edges, parent, class_node, layer_sizes, 1);
  Tensor above = edges.new_zeros_symint({edges.sym_size(0), c10::SymInt(1)});
  std::vector<Tensor> nodes{above};
  int64_t before = 0, begin = 1;
  for (const int64_t size : layer_sizes) {
    const Tensor scores = edges.narrow(1, begin - 1, size),
                 group = parent.narrow(0, begin, size) - before;
    const Tensor index = group.expand_as(scores);
    const Tensor lowest = at::full_like(above, -std::numeric_limits<double>::infinity()).detach();
    const Tensor largest = lowest.scatter_reduce(1, index, scores.detach(), "amax");
    const Tensor shifted = scores - largest.index_select(1, group);
    const Tensor total = at::zeros_like(above).scatter_add(1, index, shifted.exp());
    above = above.index_select(1, group) + shifted - total.index_select(1, group).log();
    nodes.push_back(above);
    before = begin;
    begin += size;
  }
  return at::cat(nodes, 1).index_select(1, class_node);
}

void tree_balance_(const Tensor& table, const Tensor& first_child, at::IntArrayRef layer_sizes) {
  static const auto op = find_op<decltype(tree_balance_reference)>("xsoftmax::tree_balance_");
  op.call(table, first_child, layer_sizes);
}

void check_tree_balance(const Tensor& table, const Tensor& first_child,
                        at::IntArrayRef layer_sizes) {
  constexpr const char* op = "tree_balance_";
  check::floating(op, "table", table);
  TORCH_CHECK_VALUE(table.dim() == 1 || table.dim() == 2, op,
                    ": expected table of shape [E] or [E, D], got ", table.sym_sizes());
  check::dim(op, "first_child", first_child, 1);
  check::int64(op, "first_child", first_child);
  check::same_device(op, "first_child", first_child, "table", table);
  check::size(op, "first_child", first_child, 0, table.sym_size(0) + 2,
              "two more than the edges, the rows of table");
  check_layer_sizes(op, layer_sizes, table.sym_size(0));
}

void check_children(const Tensor& first_child, at::IntArrayRef layer_sizes) {
  const int64_t* first = first_child.const_data_ptr<int64_t>();
  int64_t begin = 1, end = 1; // first node of the layer above, and of its children
  for (size_t layer = 1; layer < layer_sizes.size(); ++layer) {
    end += layer_sizes[layer - 1];
    const int64_t last = end + layer_sizes[layer];
    for (int64_t v = begin; v < end; ++v) {
      const bool rises = first[v] <= first[v + 1], starts = v > begin || first[v] == end,
                 ends = v + 1 < end || first[v + 1] == last;
      TORCH_CHECK_VALUE(rises && starts && ends, "tree_balance_: expected the children of node ", v,
                        " side by side in the layer [", end, ", ", last, "), got [", first[v], ", ",
                        first[v + 1], ")");
    }
    begin = end;
  }
}

void tree_balance_reference(const Tensor& table, const Tensor& first_child,
                            at::IntArrayRef layer_sizes) {
  check_tree_balance(table, first_child, layer_sizes);
  check_children(first_child.to(at::kCPU).contiguous(), layer_sizes);
  const at::NoGradGuard no_grad;
  int64_t begin = table.size(0) + 1;
  for (int64_t layer = int64_t(layer_sizes.size()) - 1; layer > 0; --layer) {
    const int64_t size = layer_sizes[layer], above_size = layer_sizes[layer - 1];
    begin -= size;
    const int64_t above_begin = begin - above_size;
    const Tensor count = first_child.narrow(0, above_begin, above_size + 1).diff();
    const Tensor group = at::repeat_interleave(at::arange(above_size, count.options()), count),
                 children = table.narrow(0, begin - 1, size);
    Tensor above = table.narrow(0, above_begin - 1, above_size);
    std::vector<int64_t> column(table.dim(), 1);
    column[0] = above_size;
    const Tensor mean = at::zeros_like(above)
                            .index_add_(0, group, children)
                            .div_(count.clamp_min(1).to(table.scalar_type()).view(column));
    children.sub_(mean.index_select(0, group));
    above.add_(mean);
  }
}

Tensor tree_routed_candidates(const Tensor& seed, const Tensor& scores, const Tensor& first_child,
                              const Tensor& node_class, int64_t count) {
  static const auto op =
      find_op<decltype(tree_routed_candidates)>("xsoftmax::tree_routed_candidates");
  return op.call(seed, scores, first_child, node_class, count);
}

void check_routed(const Tensor& seed, const Tensor& scores, const Tensor& first_child,
                  const Tensor& node_class, int64_t count) {
  constexpr const char* op = "tree_routed_candidates";
  check::dim(op, "seed", seed, 0);
  check::int64(op, "seed", seed);
  check::same_device(op, "seed", seed, "scores", scores);
  check::dim(op, "scores", scores, 2);
  check::floating(op, "scores", scores);
  for (const auto& [name, tensor] :
       {std::pair<const char*, const Tensor&>{"first_child", first_child},
        {"node_class", node_class}}) {
    check::dim(op, name, tensor, 1);
    check::int64(op, name, tensor);
    check::same_device(op, name, tensor, "scores", scores);
  }
  TORCH_CHECK_VALUE(
      scores.sym_size(1) >= 1 && first_child.sym_size(0) >= scores.sym_size(1) + 2, op,
      ": expected scores of 1 to as many subsets as the tree has nodes below its root, got ",
      scores.sym_size(1));
  check::size(op, "node_class", node_class, 0, first_child.sym_size(0) - 1, "the nodes");
  TORCH_CHECK_VALUE(count >= 0, op, ": expected count of at least 0, got ", count);
}

Tensor routed_candidates_reference(const Tensor& seed, const Tensor& scores,
                                   const Tensor& first_child, const Tensor& node_class,
                                   int64_t count) {
  check_routed(seed, scores, first_child, node_class, count);
  const auto cpu = [](const Tensor& tensor) { return tensor.cpu(); };
  return tree_routed_candidates(cpu(seed), cpu(scores), cpu(first_child), cpu(node_class), count)
      .to(scores.device());
}

namespace {

Tensor routed_candidates_meta(const Tensor& seed, const Tensor& scores, const Tensor& first_child,
                              const Tensor& node_class, int64_t count) {
  check_routed(seed, scores, first_child, node_class, count);
  return at::empty_symint({scores.sym_size(0), c10::SymInt(count)},
                          scores.options().dtype(at::kLong).requires_grad(false));
}

} // namespace

XSOFTMAX_OPERATORS(m) {
  m.def(
      "tree_class_scores(Tensor edges, Tensor parent, Tensor class_node, int[] layer_sizes, int "
      "dim=1) -> Tensor",
      tree_class_scores);
  m.def(
      "hierarchical_log_prob(Tensor edges, Tensor parent, Tensor class_node, int[] layer_sizes) -> "
      "Tensor",
      hierarchical_log_prob);
  m.def("tree_balance_(Tensor(a!) table, Tensor first_child, int[] layer_sizes) -> ()");
  m.def(
      "tree_routed_candidates(Tensor seed, Tensor scores, Tensor first_child, Tensor node_class, "
      "int count) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("tree_balance_", tree_balance_reference);
  m.impl("tree_routed_candidates", routed_candidates_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("tree_balance_", check_tree_balance);
  m.impl("tree_routed_candidates", routed_candidates_meta);
}

} // namespace xsoftmax
