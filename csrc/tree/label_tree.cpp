#include "tree/label_tree.h"

#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

// Returns ids as a contiguous CPU tensor, after checks.
Tensor ids_of(const char* op, const char* arg, const Tensor& ids) {
  check::dim(op, arg, ids, 1);
  check::int64(op, arg, ids);
  return ids.cpu().contiguous();
}

Tensor counts_of(const char* op, const Tensor& counts) {
  check::dim(op, "counts", counts, 1);
  TORCH_CHECK_TYPE(!counts.is_complex() && counts.scalar_type() != at::kBool, op,
                   ": expected counts that are numbers, got ", check::name(counts.scalar_type()));
  TORCH_CHECK_VALUE(counts.size(0) >= 1, op, ": expected counts of at least one class, got none");
  const Tensor cpu_counts = counts.detach().to(at::kCPU, at::kDouble).contiguous();
  const double* count = cpu_counts.const_data_ptr<double>();
  for (int64_t i = 0; i < cpu_counts.size(0); ++i) {
    TORCH_CHECK_VALUE(count[i] >= 0 && std::isfinite(count[i]), op,
                      ": expected counts that are finite and not below 0, got ", count[i],
                      " for class ", i);
  }
  return cpu_counts;
}

void check_arity(const char* op, int64_t arity) {
  TORCH_CHECK_VALUE(arity >= 2, op, ": expected arity of at least 2, got ", arity);
}

Tensor int64s(int64_t size, int64_t value) {
  return at::full({size}, value, at::TensorOptions(at::kLong));
}

// Builds a tree node by node, parents first.
class Nodes {
 public:
  explicit Nodes(int64_t expected) {
    parents_.reserve(expected);
    classes_.reserve(expected);
  }

  int64_t add(int64_t parent, int64_t class_id) {
    parents_.push_back(parent);
    classes_.push_back(class_id);
    return int64_t(parents_.size()) - 1;
  }

  LabelTreeNodes tensors() const { return {copy(parents_), copy(classes_)}; }

 private:
  static Tensor copy(const std::vector<int64_t>& values) {
    const Tensor tensor = at::empty({int64_t(values.size())}, at::TensorOptions(at::kLong));
    std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
    return tensor;
  }

  std::vector<int64_t> parents_, classes_;
};

std::vector<int64_t> by_falling_count(const double* count, int64_t n) {
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), int64_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return count[a] > count[b]; });
  return order;
}

// The children of each node, in order: those of node v are node[offset[v] .. offset[v + 1]).
struct Children {
  std::vector<int64_t> offset, node;

  Children(const int64_t* parent, int64_t n) : offset(n + 1), node(n) {
    for (int64_t v = 0; v < n; ++v) {
      if (parent[v] >= 0) {
        ++offset[parent[v] + 1];
      }
    }
    std::partial_sum(offset.begin(), offset.end(), offset.begin());
    std::vector<int64_t> next(offset.begin(), offset.end() - 1);
    for (int64_t v = 0; v < n; ++v) {
      if (parent[v] >= 0) {
        node[next[parent[v]]++] = v;
      }
    }
  }
};

// Numbers the leaves in the order of the nodes; inner nodes get -1. Ignores parents out of range.
Tensor classes_in_order(const Tensor& parents) {
  const int64_t n = parents.size(0);
  const int64_t* parent = parents.const_data_ptr<int64_t>();
  const Tensor classes = int64s(n, 0);
  int64_t* class_ids = classes.mutable_data_ptr<int64_t>();
  for (int64_t v = 0; v < n; ++v) {
    if (parent[v] >= 0 && parent[v] < n) {
      class_ids[parent[v]] = -1;
    }
  }
  int64_t next = 0;
  for (int64_t v = 0; v < n; ++v) {
    class_ids[v] = class_ids[v] < 0 ? -1 : next++;
  }
  return classes;
}

int64_t find_root(const char* op, const int64_t* parent, int64_t n) {
  int64_t root = -1;
  for (int64_t v = 0; v < n; ++v) {
    TORCH_CHECK_VALUE(parent[v] >= -1 && parent[v] < n, op, ": expected parents in [-1, ", n,
                      "), got ", parent[v], " for node ", v);
    TORCH_CHECK_VALUE(parent[v] != -1 || root < 0, op,
                      ": expected one root (a parent of -1), got nodes ", root, " and ", v);
    root = parent[v] == -1 ? v : root;
  }
  TORCH_CHECK_VALUE(root >= 0, op, ": expected one root (a parent of -1), got none");
  return root;
}

} // namespace

LabelTreeTensors label_tree(const Tensor& parents, const OptionalTensor& classes) {
  constexpr const char* op = "label_tree";
  const Tensor cpu_parents = ids_of(op, "parents", parents);
  const int64_t n = parents.size(0);
  TORCH_CHECK_VALUE(n >= 1, op, ": expected parents of at least one node, got none");
  const Tensor cpu_classes =
      is_defined(classes) ? ids_of(op, "classes", *classes) : classes_in_order(cpu_parents);
  check::size(op, "classes", cpu_classes, 0, n, "the nodes of parents");
  const int64_t *old_parent = cpu_parents.const_data_ptr<int64_t>(),
                *old_class = cpu_classes.const_data_ptr<int64_t>();
  const int64_t root = find_root(op, old_parent, n);
  const Children children(old_parent, n);

  const Tensor first_child = int64s(n + 1, n), parent = int64s(n, -1), node_class = int64s(n, -1);
  int64_t *first = first_child.mutable_data_ptr<int64_t>(),
          *up = parent.mutable_data_ptr<int64_t>();
  int64_t* leaf_class = node_class.mutable_data_ptr<int64_t>();
  std::vector<int64_t> queue{root}; // old node numbers, in the new order
  queue.reserve(n);
  int64_t leaves = 0;
  for (int64_t v = 0; v < int64_t(queue.size()); ++v) {
    const int64_t old = queue[v];
    first[v] = int64_t(queue.size());
    for (int64_t i = children.offset[old]; i < children.offset[old + 1]; ++i) {
      up[queue.size()] = v;
      queue.push_back(children.node[i]);
    }
    const bool leaf = children.offset[old] == children.offset[old + 1];
    TORCH_CHECK_VALUE(
        leaf == (old_class[old] >= 0), op,
        leaf ? ": expected a class for every leaf" : ": expected classes of leaves only", ", got ",
        old_class[old], " for node ", old,
        leaf ? ", which has no children" : ", which has children");
    leaf_class[v] = old_class[old];
    leaves += leaf;
  }
  if (int64_t(queue.size()) < n) {
    std::vector<bool> reached(n);
    for (const int64_t old : queue) {
      reached[old] = true;
    }
    const int64_t orphan = std::find(reached.begin(), reached.end(), false) - reached.begin();
    TORCH_CHECK_VALUE(false, op, ": expected every node below the root, got node ", orphan,
                      ", whose parents form a cycle");
  }

  const Tensor class_node = int64s(leaves, -1);
  int64_t* node = class_node.mutable_data_ptr<int64_t>();
  for (int64_t v = 0; v < n; ++v) {
    const int64_t c = leaf_class[v];
    if (c < 0) {
      continue;
    }
    TORCH_CHECK_VALUE(c < leaves, op, ": expected the classes 0 to ", leaves - 1,
                      ", one for each of ", leaves, " leaves, got class ", c);
    TORCH_CHECK_VALUE(node[c] == -1, op, ": expected each class once, got class ", c,
                      " twice, at nodes ", queue[node[c]], " and ", queue[v]);
    node[c] = v;
  }
  return {first_child, parent, node_class, class_node};
}

LabelTreeNodes label_tree_balanced(const Tensor& order, int64_t arity) {
  constexpr const char* op = "label_tree_balanced";
  const Tensor classes = ids_of(op, "order", order);
  check_arity(op, arity);
  const int64_t n = order.size(0);
  TORCH_CHECK_VALUE(n >= 1, op, ": expected order of at least one class, got none");
  const int64_t* class_at = classes.const_data_ptr<int64_t>();
  Nodes nodes(n + n / (arity - 1) + 1);
  struct Part { int64_t node, begin, end; };
  std::vector<Part> parts{{nodes.add(-1, n == 1 ? class_at[0] : -1), 0, n}};
  for (size_t p = 0; p < parts.size(); ++p) {
    const auto [node, begin, end] = parts[p];
    const int64_t size = end - begin, pieces = std::min(size, arity);
    for (int64_t i = 0; size > 1 && i < pieces; ++i) {
      const int64_t from = begin + size / pieces * i + std::min(i, size % pieces),
                    length = size / pieces + (i < size % pieces);
      const int64_t child = nodes.add(node, length == 1 ? class_at[from] : -1);
      if (length > 1) {
        parts.push_back({child, from, from + length});
      }
    }
  }
  return nodes.tensors();
}

LabelTreeNodes label_tree_huffman(const Tensor& counts, int64_t arity) {
  constexpr const char* op = "label_tree_huffman";
  const Tensor cpu_counts = counts_of(op, counts);
  check_arity(op, arity);
  const double* count = cpu_counts.const_data_ptr<double>();
  const int64_t n = cpu_counts.size(0);
  // Subtrees 0 .. N - 1 are the classes; higher numbers are merged subtrees.
  using Subtree = std::pair<double, int64_t>;
  std::priority_queue<Subtree, std::vector<Subtree>, std::greater<>> open;
  for (int64_t c = 0; c < n; ++c) {
    open.emplace(count[c], c);
  }
  std::vector<std::vector<int64_t>> merged;
  // The first merge takes fewer subtrees, so that all later nodes, including the root, are full.
  int64_t merge_count = n > 1 ? 2 + (n - 2) % (arity - 1) : 1;
  while (open.size() > 1) {
    double sum = 0;
    std::vector<int64_t> members;
    for (int64_t i = 0; i < merge_count; ++i) {
      sum += open.top().first;
      members.push_back(open.top().second);
      open.pop();
    }
    std::reverse(members.begin(), members.end()); // most frequent first
    open.emplace(sum, n + int64_t(merged.size()));
    merged.push_back(std::move(members));
    merge_count = arity;
  }
  Nodes nodes(n + int64_t(merged.size()));
  // (subtree, parent node)
  std::vector<std::pair<int64_t, int64_t>> subtrees{{open.top().second, -1}};
  for (size_t i = 0; i < subtrees.size(); ++i) {
    const auto [subtree, parent] = subtrees[i];
    const int64_t node = nodes.add(parent, subtree < n ? subtree : -1);
    if (subtree >= n) {
      for (const int64_t member : merged[subtree - n]) {
        subtrees.emplace_back(member, node);
      }
    }
  }
  return nodes.tensors();
}

LabelTreeNodes label_tree_equal_mass(const Tensor& counts, int64_t subsets) {
  constexpr const char* op = "label_tree_equal_mass";
  const Tensor cpu_counts = counts_of(op, counts);
  const double* count = cpu_counts.const_data_ptr<double>();
  const int64_t n = cpu_counts.size(0);
  TORCH_CHECK_VALUE(subsets >= 1 && subsets <= n, op, ": expected subsets in [1, ", n, "], got ",
                    subsets);
  const double total = std::accumulate(count, count + n, 0.0);
  const std::vector<int64_t> order = by_falling_count(count, n);
  Nodes nodes(1 + subsets + n);
  nodes.add(-1, -1);
  double sum = 0;
  int64_t next = 0;
  for (int64_t s = 0; s < subsets; ++s) {
    const int64_t subset = nodes.add(0, -1),
                  left = subsets - s - 1; // subsets that still need at least one class
    const double target_mass = total * double(s + 1) / double(subsets);
    do {
      sum += count[order[next]];
      nodes.add(subset, order[next++]);
      // A class that crosses the goal goes to the subset that holds the larger part of it.
    } while (n - next > left && (left == 0 || sum + 0.5 * count[order[next]] <= target_mass));
  }
  return nodes.tensors();
}

TreeTables::TreeTables(const char* op, at::TensorList tables) {
  TORCH_CHECK_VALUE(tables.size() == 4, op,
                    ": expected tree as the 4 tables of a LabelTree, first_child, parent, "
                    "node_class and class_node, got ",
                    tables.size());
  first_child = tables[0];
  parent = tables[1];
  node_class = tables[2];
  class_node = tables[3];
}

void check_label_tree(at::TensorList tables) {
  const TreeTables tree("check_label_tree", tables);
  const auto expected = label_tree(tree.parent, tree.node_class);
  const auto same = [](const Tensor& actual, const Tensor& right) {
    return actual.scalar_type() == right.scalar_type() && at::equal(actual.cpu(), right);
  };
  TORCH_CHECK_VALUE(same(tree.first_child, std::get<0>(expected)) &&
                        same(tree.parent, std::get<1>(expected)) &&
                        same(tree.node_class, std::get<2>(expected)) &&
                        same(tree.class_node, std::get<3>(expected)),
                    "check_label_tree: expected a tree, got tables that contradict each other");
}

Tensor label_tree_layers(const Tensor& first_child) {
  constexpr const char* op = "label_tree_layers";
  const Tensor cpu_first_child = ids_of(op, "first_child", first_child);
  const int64_t nodes = cpu_first_child.size(0) - 1;
  const int64_t* first = cpu_first_child.const_data_ptr<int64_t>();
  std::vector<int64_t> sizes, groups;
  // Nodes are numbered breadth-first: a layer ends where the children of the layer above end.
  for (int64_t begin = 0, end = 1; end < nodes;) {
    TORCH_CHECK_VALUE(first[end] > end && first[end] <= nodes, op,
                      ": expected first_child to rise from above node ", end - 1, " to ", nodes,
                      ", got ", first[end]);
    int64_t group = 0;
    for (int64_t v = begin; v < end; ++v) {
      group = std::max(group, first[v + 1] - first[v]);
    }
    begin = std::exchange(end, first[end]);
    sizes.push_back(end - begin);
    groups.push_back(group);
  }
  const int64_t layers = int64_t(sizes.size());
  sizes.insert(sizes.end(), groups.begin(), groups.end());
  const Tensor result = at::empty({2, layers}, at::TensorOptions(at::kLong));
  std::copy(sizes.begin(), sizes.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

Tensor label_tree_path(const Tensor& class_node, const Tensor& parent, const Tensor& ids,
                       int64_t depth) {
  TORCH_CHECK_VALUE(depth >= 0, "label_tree_path: expected depth of at least 0, got ", depth);
  check::dim("label_tree_path", "parent", parent, 1);
  check::int64("label_tree_path", "parent", parent);
  check::same_device("label_tree_path", "parent", parent, "class_node", class_node);
  TORCH_CHECK_VALUE(parent.sym_size(0) >= depth, "label_tree_path: expected depth of at most the ",
                    parent.sym_size(0), " nodes, got ", depth);
  Tensor node =
      label_tree_nodes(class_node, ids, std::numeric_limits<int64_t>::min()); // no id is ignored
  std::vector<Tensor> up{node};
  for (int64_t layer = 1; layer < depth; ++layer) {
    node = at::where(node.gt(0), parent.index_select(0, node.clamp_min(0).flatten()).view_as(node),
                     -1);
    up.push_back(node);
  }
  std::reverse(up.begin(), up.end());
  const Tensor path = at::stack(up, -1).narrow(-1, 0, depth), is_node = path.gt(0);
  // Paths of shallow leaves begin with -1: move these entries to the end.
  const Tensor order = is_node.logical_not().to(at::kChar).argsort(/*stable=*/true, /*dim=*/-1,
                                                                   /*descending=*/false);
  return at::where(is_node, path, -1).gather(-1, order);
}

Tensor label_tree_nodes(const Tensor& class_node, const Tensor& target, int64_t ignore_index) {
  static const auto op = find_op<decltype(label_tree_nodes)>("xsoftmax::label_tree_nodes");
  return op.call(class_node, target, ignore_index);
}

namespace {

void check_nodes_of(const Tensor& class_node, const Tensor& target) {
  constexpr const char* op = "label_tree_nodes";
  check::dim(op, "class_node", class_node, 1);
  check::int64(op, "class_node", class_node);
  check::int64(op, "target", target);
  check::same_device(op, "target", target, "class_node", class_node);
}

Tensor label_tree_nodes_any(const Tensor& class_node, const Tensor& target, int64_t ignore_index) {
  check_nodes_of(class_node, target);
  const Tensor ignored = target.eq(ignore_index);
  const Tensor nodes =
      class_node.index_select(0, target.masked_fill(ignored, 0).flatten()).view(target.sizes());
  return nodes.masked_fill(ignored, 0);
}

Tensor label_tree_nodes_cpu(const Tensor& class_node, const Tensor& target, int64_t ignore_index) {
  check_nodes_of(class_node, target);
  check::class_ids("label_tree_nodes", "target", target, class_node.numel(), ignore_index);
  return label_tree_nodes_any(class_node, target, ignore_index);
}

Tensor label_tree_nodes_meta(const Tensor& class_node, const Tensor& target, int64_t) {
  check_nodes_of(class_node, target);
  return at::empty_symint(target.sym_sizes(), target.options());
}

} // namespace

XSOFTMAX_OPERATORS(m) {
  m.def(
      "label_tree(Tensor parents, Tensor? classes=None) -> (Tensor first_child, Tensor parent, "
      "Tensor node_class, Tensor class_node)");
  m.def("check_label_tree(Tensor[] tree) -> ()");
  m.def("label_tree_layers(Tensor first_child) -> Tensor");
  m.def("label_tree_balanced(Tensor order, int arity) -> (Tensor parents, Tensor classes)");
  m.def("label_tree_huffman(Tensor counts, int arity) -> (Tensor parents, Tensor classes)");
  m.def("label_tree_equal_mass(Tensor counts, int subsets) -> (Tensor parents, Tensor classes)");
  m.def("label_tree_nodes(Tensor class_node, Tensor target, int ignore_index) -> Tensor");
  m.def("label_tree_path(Tensor class_node, Tensor parent, Tensor ids, int depth) -> Tensor",
        label_tree_path);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("label_tree", label_tree);
  m.impl("check_label_tree", check_label_tree);
  m.impl("label_tree_layers", label_tree_layers);
  m.impl("label_tree_balanced", label_tree_balanced);
  m.impl("label_tree_huffman", label_tree_huffman);
  m.impl("label_tree_equal_mass", label_tree_equal_mass);
  m.impl("label_tree_nodes", label_tree_nodes_any);
}
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("label_tree_nodes", label_tree_nodes_cpu); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("label_tree_nodes", label_tree_nodes_meta); }

} // namespace xsoftmax
