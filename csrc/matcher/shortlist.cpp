#include "matcher/shortlist.h"

#include "op/checks.h"
#include "cpu/impl.h"
#include "op/find_op.h"
#include "op/operators.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kShortlist = "shortlist";

struct Tree {
  int64_t nodes;
  const int64_t *first_child, *parent;

  std::pair<int64_t, int64_t> children(int64_t node) const {
    const int64_t begin = first_child[node], end = first_child[node + 1];
    TORCH_CHECK_VALUE(begin > node && begin <= end && end <= nodes, kShortlist,
                      ": expected first_child to rise from above node ", node, " to at most ",
                      nodes, ", got ", begin, " and ", end);
    return {begin, end};
  }

  int64_t parent_of(int64_t node) const {
    TORCH_CHECK_VALUE(parent[node] >= 0 && parent[node] < node, kShortlist,
                      ": expected parent of node ", node, " in [0, ", node, "), got ",
                      parent[node]);
    return parent[node];
  }
};

void add_ids(std::vector<int64_t>& to, const char* name, const int64_t* ids, int64_t count,
             int64_t least, int64_t nodes) {
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(ids[i] == -1 || (ids[i] >= least && ids[i] < nodes), kShortlist,
                      ": expected ", name, " in [", least, ", ", nodes, ") or -1, got ", ids[i]);
    if (ids[i] >= 0) {
      to.push_back(ids[i]);
    }
  }
}

// The shortlists of consecutive queries; add() appends that of one query.
struct List {
  std::vector<int64_t> nodes;
  std::vector<float> right;
  std::vector<int64_t> parents, targets; // scratch

  void add(const Tree& tree, const int64_t* beam_parents, int64_t width, const int64_t* wanted,
           int64_t count) {
    parents.clear();
    targets.clear();
    add_ids(parents, "parents", beam_parents, width, 0, tree.nodes);
    add_ids(targets, "targets", wanted, count, 1, tree.nodes);
    std::sort(targets.begin(), targets.end());
    for (const int64_t target : targets) {
      parents.push_back(tree.parent_of(target));
    }
    std::sort(parents.begin(), parents.end());
    parents.erase(std::unique(parents.begin(), parents.end()), parents.end());
    auto target = targets.begin();
    for (const int64_t node : parents) {
      const auto [begin, end] = tree.children(node);
      for (int64_t child = begin; child < end; ++child) {
        for (; target != targets.end() && *target < child; ++target) {
        }
        nodes.push_back(child);
        right.push_back(target != targets.end() && *target == child ? 1.0f : 0.0f);
      }
    }
  }
};

Shortlist shortlist_cpu(const Tensor& parents, const Tensor& targets, const Tensor& first_child,
                        const Tensor& parent, std::optional<int64_t> most) {
  check_shortlist(parents, targets, first_child, parent, most);
  if (use_reference()) {
    return shortlist_reference(parents, targets, first_child, parent, most);
  }
  const Tensor beam_parents = parents.contiguous(), wanted = targets.contiguous(),
               children = first_child.contiguous(), contiguous_parent = parent.contiguous();
  const Tree tree{parent.size(0), children.const_data_ptr<int64_t>(),
                  contiguous_parent.const_data_ptr<int64_t>()};
  const int64_t queries = parents.size(0), width = parents.size(1), count = targets.size(1);
  const Tensor offsets = at::empty({queries + 1}, parents.options());
  int64_t* end = offsets.mutable_data_ptr<int64_t>();
  end[0] = 0;
  constexpr int64_t kBlock = 64;
  std::vector<List> lists((queries + kBlock - 1) / kBlock);
  at::parallel_for(0, int64_t(lists.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      for (int64_t q = b * kBlock; q < std::min(queries, (b + 1) * kBlock); ++q) {
        const size_t before = lists[b].nodes.size();
        lists[b].add(tree, beam_parents.const_data_ptr<int64_t>() + q * width, width,
                     wanted.const_data_ptr<int64_t>() + q * count, count);
        end[q + 1] = int64_t(lists[b].nodes.size() - before);
      }
    }
  });
  std::partial_sum(end, end + queries + 1, end);
  const Tensor nodes = at::empty({end[queries]}, parents.options()),
               right = at::empty({end[queries]}, parents.options().dtype(at::kFloat));
  for (size_t b = 0; b < lists.size(); ++b) {
    const int64_t begin = end[int64_t(b) * kBlock];
    std::copy(lists[b].nodes.begin(), lists[b].nodes.end(),
              nodes.mutable_data_ptr<int64_t>() + begin);
    std::copy(lists[b].right.begin(), lists[b].right.end(),
              right.mutable_data_ptr<float>() + begin);
  }
  return {nodes, offsets, right};
}

} // namespace

namespace {

// Checks the nodes whose children are listed, as the kernel does.
void check_found(const Tensor& node, const Tensor& first_child, const Tensor& parent) {
  check::class_ids(kShortlist, "parents", node, parent.size(0));
  const Tensor found = node.contiguous(), children = first_child.contiguous(),
               contiguous_parent = parent.contiguous();
  const Tree tree{parent.size(0), children.const_data_ptr<int64_t>(),
                  contiguous_parent.const_data_ptr<int64_t>()};
  for (int64_t i = 0; i < found.numel(); ++i) {
    tree.children(found.const_data_ptr<int64_t>()[i]);
  }
}

} // namespace

void check_shortlist(const Tensor& parents, const Tensor& targets, const Tensor& first_child,
                     const Tensor& parent, std::optional<int64_t> most) {
  for (const auto& [name, tensor, dim] : {std::tuple{"parents", &parents, 2},
                                          {"targets", &targets, 2},
                                          {"first_child", &first_child, 1},
                                          {"parent", &parent, 1}}) {
    check::dim(kShortlist, name, *tensor, dim);
    check::int64(kShortlist, name, *tensor);
    check::same_device(kShortlist, name, *tensor, "parents", parents);
  }
  check::size(kShortlist, "targets", targets, 0, parents.sym_size(0), "the rows of parents");
  check::size(kShortlist, "first_child", first_child, 0, parent.sym_size(0) + 1,
              "the nodes of the tree, and one");
  TORCH_CHECK_VALUE(most.value_or(1) >= 1, kShortlist, ": expected most of at least 1, got ",
                    most.value_or(1));
}

Shortlist shortlist(const Tensor& parents, const Tensor& targets, const Tensor& first_child,
                    const Tensor& parent, std::optional<int64_t> most) {
  static const auto op = find_op<decltype(shortlist_reference)>("xsoftmax::shortlist");
  return op.call(parents, targets, first_child, parent, most);
}

Shortlist shortlist_reference(const Tensor& parents, const Tensor& targets,
                              const Tensor& first_child, const Tensor& parent,
                              std::optional<int64_t> most) {
  check_shortlist(parents, targets, first_child, parent, most);
  const int64_t nodes = parent.size(0), queries = parents.size(0);
  const Tensor target_parents = at::where(
      targets.ge(0), parent.index_select(0, targets.clamp_min(0).flatten()).view_as(targets), -1);
  const Tensor sorted = std::get<0>(at::cat({parents, target_parents}, 1).sort(1));
  const Tensor before = at::cat({at::full({queries, 1}, -1, sorted.options()),
                                 sorted.narrow(1, 0, std::max<int64_t>(sorted.size(1) - 1, 0))},
                                1);
  // The first of equal nodes.
  const Tensor first = sorted.ne(before.narrow(1, 0, sorted.size(1))).logical_and(sorted.ge(0));
  const Tensor
      query =
          at::arange(queries, sorted.options()).unsqueeze(1).expand_as(sorted).masked_select(first),
      node = sorted.masked_select(first);
  if (node.is_cpu()) {
    check_found(node, first_child, parent);
  }
  const Tensor begin = first_child.index_select(0, node),
               count = first_child.index_select(0, node + 1) - begin;
  const Tensor start = count.cumsum(0) - count,
               total = at::arange(count.sum().item<int64_t>(), sorted.options());
  const Tensor children = total + at::repeat_interleave(begin - start, count),
               query_of_child = at::repeat_interleave(query, count);
  const Tensor offsets =
      at::cat({at::zeros({1}, sorted.options()),
               at::zeros({queries}, sorted.options()).index_add(0, query, count).cumsum(0)});
  const Tensor wanted = (at::arange(queries, sorted.options()).unsqueeze(1) * nodes + targets)
                            .masked_select(targets.ge(0));
  return {children, offsets, at::isin(query_of_child * nodes + children, wanted).to(at::kFloat)};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "shortlist(Tensor parents, Tensor targets, Tensor first_child, Tensor parent, int? "
      "most=None) -> "
      "(Tensor nodes, Tensor offsets, Tensor right)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("shortlist", shortlist_reference);
}
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("shortlist", shortlist_cpu); }

} // namespace xsoftmax
