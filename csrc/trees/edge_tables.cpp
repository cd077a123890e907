#include "trees/edge_tables.h"

#include "core/checks.h"
#include "trees/tree_scores.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>
#include <vector>

namespace xsoftmax {

using at::Tensor;

Tensor tree_class_scores(const Tensor& edges, const Tensor& parent, const Tensor& class_node, at::IntArrayRef layer_sizes) {
  Tensor above = edges.new_zeros_symint({edges.sym_size(0), c10::SymInt(1)});
  std::vector<Tensor> nodes{above};
  int64_t before = 0, begin = 1; // of the layer above, and of this one
  for (const int64_t size : layer_sizes) {
    above = above.index_select(1, parent.narrow(0, begin, size) - before) + edges.narrow(1, begin - 1, size);
    nodes.push_back(above);
    before = begin;
    begin += size;
  }
  return at::cat(nodes, 1).index_select(1, class_node);
}

Tensor hierarchical_log_prob(const Tensor& edges, const Tensor& parent, const Tensor& class_node, at::IntArrayRef layer_sizes) {
  Tensor above = edges.new_zeros_symint({edges.sym_size(0), c10::SymInt(1)});
  std::vector<Tensor> nodes{above};
  int64_t before = 0, begin = 1;
  for (const int64_t size : layer_sizes) {
    const Tensor scores = edges.narrow(1, begin - 1, size), group = parent.narrow(0, begin, size) - before;
    const Tensor index = group.expand_as(scores);
    const Tensor most = at::full_like(above, -std::numeric_limits<double>::infinity()).detach().scatter_reduce(1, index, scores.detach(), "amax");
    const Tensor shifted = scores - most.index_select(1, group);
    const Tensor total = at::zeros_like(above).scatter_add(1, index, shifted.exp());
    above = above.index_select(1, group) + shifted - total.index_select(1, group).log();
    nodes.push_back(above);
    before = begin;
    begin += size;
  }
  return at::cat(nodes, 1).index_select(1, class_node);
}

void tree_balance_(const Tensor& table, const Tensor& first_child, at::IntArrayRef layer_sizes) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::tree_balance_", "").typed<decltype(tree_balance_reference)>();
  op.call(table, first_child, layer_sizes);
}

void check_tree_balance(const Tensor& table, const Tensor& first_child, at::IntArrayRef layer_sizes) {
  constexpr const char* op = "tree_balance_";
  check::floating(op, "table", table);
  TORCH_CHECK_VALUE(table.dim() == 1 || table.dim() == 2, op, ": expected table of shape [E] or [E, D], got ", table.sym_sizes());
  check::dim(op, "first_child", first_child, 1);
  check::int64(op, "first_child", first_child);
  check::same_device(op, "first_child", first_child, "table", table);
  check::size(op, "first_child", first_child, 0, table.sym_size(0) + 2, "two more than the edges, the rows of table");
  check_layer_sizes(op, layer_sizes, table.sym_size(0));
}

void tree_balance_reference(const Tensor& table, const Tensor& first_child, at::IntArrayRef layer_sizes) {
  check_tree_balance(table, first_child, layer_sizes);
  const at::NoGradGuard no_grad;
  int64_t begin = table.size(0) + 1;
  for (int64_t layer = int64_t(layer_sizes.size()) - 1; layer > 0; --layer) {
    const int64_t size = layer_sizes[layer], above_size = layer_sizes[layer - 1];
    begin -= size;
    const int64_t above_begin = begin - above_size;
    const Tensor count = first_child.narrow(0, above_begin, above_size + 1).diff();
    const Tensor group = at::repeat_interleave(at::arange(above_size, count.options()), count), own = table.narrow(0, begin - 1, size);
    Tensor above = table.narrow(0, above_begin - 1, above_size);
    std::vector<int64_t> column(table.dim(), 1);
    column[0] = above_size;
    const Tensor mean = at::zeros_like(above).index_add_(0, group, own).div_(count.clamp_min(1).to(table.scalar_type()).view(column));
    own.sub_(mean.index_select(0, group));
    above.add_(mean);
  }
}

Tensor tree_routed_candidates(const Tensor& scores, const Tensor& share, const Tensor& first_child, const Tensor& node_class,
                              int64_t count) {
  const Tensor node = scores.argmax(1) + 1;
  const Tensor begin = first_child.index_select(0, node).unsqueeze(1), size = first_child.index_select(0, node + 1).unsqueeze(1) - begin;
  const Tensor steps = at::arange(count, first_child.options());
  // Every (size / count)-th from a random start: different ones, each class alike.
  const Tensor place = at::where(size.le(count), steps, ((steps + share) * size / double(std::max<int64_t>(1, count))).to(at::kLong));
  const Tensor found = node_class.take((begin + place).clamp_max(node_class.sym_size(0).guard_int(__FILE__, __LINE__) - 1));
  return at::where(place.lt(size), found, -1);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("tree_class_scores(Tensor edges, Tensor parent, Tensor class_node, int[] layer_sizes) -> Tensor", tree_class_scores);
  m.def("hierarchical_log_prob(Tensor edges, Tensor parent, Tensor class_node, int[] layer_sizes) -> Tensor", hierarchical_log_prob);
  m.def("tree_balance_(Tensor(a!) table, Tensor first_child, int[] layer_sizes) -> ()");
  m.def("tree_routed_candidates(Tensor scores, Tensor share, Tensor first_child, Tensor node_class, int count) -> Tensor",
        tree_routed_candidates);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("tree_balance_", tree_balance_reference); }

} // namespace xsoftmax
