#include "op/checks.h"
#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "table/gather_dot.h"
#include "table/row_kernels.h"
#include "tree/edge_rows.h"
#include "tree/tree_scores.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kScoredPerTask = 8;

// The part of a tree covered by the paths of one query. Reuses its buffers.
class Paths {
 public:
  Paths(const char* op, const int64_t* parent, at::IntArrayRef layer_sizes, bool differences_only)
      : op_(op), parent_(parent), differences_only_(differences_only), ends_{1} {
    for (const int64_t size : layer_sizes) {
      ends_.push_back(ends_.back() + size);
    }
  }

  /// Collects the paths to `count` nodes.
  void collect(const int64_t* nodes, int64_t count) {
    nodes_.clear();
    for (int64_t p = 0; p < count; ++p) {
      // Each node must be one layer above the previous one. This bounds the edges of a query per
      // layer by the size of the layer.
      size_t layer = std::upper_bound(ends_.begin(), ends_.end(), nodes[p]) - ends_.begin();
      for (int64_t v = nodes[p]; v > 0; v = up(v), --layer) {
        TORCH_CHECK_VALUE(layer > 0 && v >= ends_[layer - 1] && v < ends_[layer], op_,
                          ": expected layer_sizes with node ", v,
                          " in the layer that its path to node ", nodes[p], " puts it in, got ",
                          at::IntArrayRef(ends_), " as the layers' ends");
        nodes_.push_back(v);
      }
      TORCH_CHECK_VALUE(layer == 0, op_, ": expected layer_sizes with as many layers above node ",
                        nodes[p], " as its path has, got ", at::IntArrayRef(ends_),
                        " as the layers' ends");
    }
    std::sort(nodes_.begin(), nodes_.end());
    // Nodes are numbered breadth-first, so parents come before their children.
    size_t kept = 0;
    counted_.clear();
    for (size_t i = 0; i < nodes_.size();) {
      const size_t begin = i;
      for (; i < nodes_.size() && nodes_[i] == nodes_[begin]; ++i) {
      }
      counted_.push_back(!(differences_only_ && int64_t(i - begin) == count));
      nodes_[kept++] = nodes_[begin];
    }
    nodes_.resize(kept);
    parent_index_.resize(kept);
    edges_.clear();
    for (size_t i = 0; i < kept; ++i) {
      parent_index_[i] = position(up(nodes_[i]));
      if (counted_[i]) {
        edges_.push_back(nodes_[i] - 1);
      }
    }
  }

  /// Returns the edges that are scored: all of them or, with differences_only, those not on all
  /// paths.
  const std::vector<int64_t>& edges() const { return edges_; }

  /// Sets scores[p] to the sum of the edges on the path to nodes[p]. edge_scores are in the order
  /// of edges().
  template <typename A>
  void add_up(A* scores, const int64_t* nodes, int64_t count, const A* edge_scores,
              std::vector<A>& sums) const {
    sums.resize(nodes_.size());
    for (size_t i = 0, e = 0; i < nodes_.size(); ++i) {
      sums[i] = (counted_[i] ? edge_scores[e++] : A(0)) +
          (parent_index_[i] < 0 ? A(0) : sums[parent_index_[i]]);
    }
    for (int64_t p = 0; p < count; ++p) {
      scores[p] = nodes[p] == 0 ? A(0) : sums[position(nodes[p])];
    }
  }

  /// Computes the gradients of edges() from the gradients of the scores.
  template <typename A>
  void spread(A* edge_grad, const int64_t* nodes, int64_t count, const A* grad,
              std::vector<A>& sums) const {
    sums.assign(nodes_.size(), A(0));
    for (int64_t p = 0; p < count; ++p) {
      if (nodes[p] != 0) {
        sums[position(nodes[p])] += grad[p];
      }
    }
    int64_t e = int64_t(edges_.size());
    for (int64_t i = int64_t(nodes_.size()) - 1; i >= 0; --i) {
      if (counted_[i]) {
        edge_grad[--e] = sums[i];
      }
      if (parent_index_[i] >= 0) {
        sums[parent_index_[i]] += sums[i];
      }
    }
  }

 private:
  int64_t up(int64_t node) const { return parent_of(op_, parent_, node); }

  // Returns the index of a node in nodes_; -1 for the root.
  int64_t position(int64_t node) const {
    return node == 0 ? -1 : std::lower_bound(nodes_.begin(), nodes_.end(), node) - nodes_.begin();
  }

  const char* op_;
  const int64_t* parent_;
  const bool differences_only_;
  std::vector<int64_t> ends_; // end of each layer, starting with the root's
  std::vector<int64_t> nodes_, parent_index_, edges_;
  std::vector<char> counted_;
};

struct ScoredTree {
  Tensor parent, nodes; // contiguous
  at::IntArrayRef layer_sizes;
  int64_t layers, paths;
  bool differences_only;

  ScoredTree(const char* op, const Tensor& weight, const Tensor& parent, const Tensor& nodes,
             at::IntArrayRef layer_sizes, bool differences_only)
      : parent(parent.contiguous()), nodes(nodes.contiguous()), layer_sizes(layer_sizes),
        layers(int64_t(layer_sizes.size())), paths(nodes.size(1)),
        differences_only(differences_only) {
    check::class_ids(op, "nodes", nodes, weight.size(0) + 1);
  }

  // Calls each(paths, first query, last query) for ranges of queries, in parallel.
  template <typename Function>
  void for_queries(const char* op, Function&& each) const {
    at::parallel_for(0, nodes.size(0), kScoredPerTask, [&](int64_t first, int64_t last) {
      Paths query_paths(op, parent.const_data_ptr<int64_t>(), layer_sizes, differences_only);
      each(query_paths, first, last);
    });
  }

  const int64_t* of(int64_t query) const { return nodes.const_data_ptr<int64_t>() + query * paths; }
};

Tensor tree_scores_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const Tensor& parent, const Tensor& nodes, at::IntArrayRef layer_sizes,
                       bool differences_only, std::optional<bool> sparse_grad) {
  constexpr const char* op = "tree_scores";
  check_tree_scores(op, input, weight, bias, parent, nodes, layer_sizes);
  const ScoredTree tree(op, weight, parent, nodes, layer_sizes, differences_only);
  if (use_reference()) {
    return tree_scores_reference(input, weight, bias, parent, nodes, layer_sizes, differences_only,
                                 sparse_grad);
  }
  const int64_t features = input.size(1);
  const Tensor query = input.contiguous(), table = with_unit_column_stride(weight),
               bias_row = is_defined(bias) ? bias->contiguous() : Tensor();
  const Tensor scores =
      at::empty(nodes.sizes(), input.options().dtype(opmath_dtype(input.scalar_type())));
  dispatch_floating(input.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    using A = opmath<T>;
    const EdgeRows<T> edges(table, bias_row);
    tree.for_queries(op, [&](Paths& paths, int64_t first, int64_t last) {
      std::vector<A> edge_scores, sums;
      for (int64_t q = first; q < last; ++q) {
        paths.collect(tree.of(q), tree.paths);
        edges.score(edge_scores, const_data<T>(query) + q * features, paths.edges());
        paths.add_up(data<A>(scores) + q * tree.paths, tree.of(q), tree.paths, edge_scores.data(),
                     sums);
      }
    });
  });
  return scores;
}

RowGradients tree_scores_backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                      const Tensor& parent, const Tensor& nodes,
                                      at::IntArrayRef layer_sizes, bool differences_only,
                                      std::array<bool, 3> output_mask) {
  constexpr const char* op = "tree_scores_backward";
  check_tree_scores_backward(grad, input, weight, parent, nodes, layer_sizes);
  const ScoredTree tree(op, weight, parent, nodes, layer_sizes, differences_only);
  if (use_reference()) {
    return tree_scores_backward_reference(grad, input, weight, parent, nodes, layer_sizes,
                                          differences_only, output_mask);
  }
  const auto [want_input, want_weight, want_bias] = output_mask;
  const int64_t queries = input.size(0), features = input.size(1),
                max_edges = tree.paths * tree.layers;
  const Tensor query = input.contiguous(), table = with_unit_column_stride(weight),
               scores_grad = grad.contiguous();

  // The edges of each query and their gradients, first with room for the largest possible number.
  std::vector<int64_t> ids(queries * max_edges), offsets(queries + 1, 0);
  const Tensor edge_grad = at::empty({queries * max_edges}, grad.options());
  Tensor grad_input = input.new_empty({0, features});
  if (want_input) {
    grad_input = at::zeros({queries, features}, grad.options());
  }
  dispatch_floating(input.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    using A = opmath<T>;
    tree.for_queries(op, [&](Paths& paths, int64_t first, int64_t last) {
      const auto& kernels = row_kernels().of(static_cast<const T*>(nullptr));
      std::vector<A> sums;
      for (int64_t q = first; q < last; ++q) {
        paths.collect(tree.of(q), tree.paths);
        A* query_edge_grad = data<A>(edge_grad) + q * max_edges;
        paths.spread(query_edge_grad, tree.of(q), tree.paths,
                     const_data<A>(scores_grad) + q * tree.paths, sums);
        const int64_t count = int64_t(paths.edges().size());
        std::copy(paths.edges().begin(), paths.edges().end(), ids.begin() + q * max_edges);
        offsets[q + 1] = count;
        if (want_input) {
          kernels.add_rows(data<A>(grad_input) + q * features, const_data<T>(table),
                           table.stride(0), ids.data() + q * max_edges, query_edge_grad, count,
                           features);
        }
      }
    });
    for (int64_t q = 0; q < queries; ++q) { // then packed
      std::copy_n(ids.begin() + q * max_edges, offsets[q + 1], ids.begin() + offsets[q]);
      std::copy_n(data<A>(edge_grad) + q * max_edges, offsets[q + 1],
                  data<A>(edge_grad) + offsets[q]);
      offsets[q + 1] += offsets[q];
    }
  });
  grad_input = grad_input.to(input.scalar_type());
  if (!want_weight && !want_bias) {
    return {grad_input, nodes.new_empty({0}), input.new_empty({0, features}), input.new_empty({0})};
  }
  constexpr int64_t kPacked = -1; // gradients are stored at the position of their pair
  const PairLayout pairs{ids.data(), offsets.data(), 0, queries};
  auto [rows, values, bias_values] = compact_row_gradient_cpu(
      edge_grad, kPacked, Tensor(), query, pairs,
      edge_rows(nodes.numel(), layer_sizes).expect_int(), want_weight, want_bias);
  return {grad_input, rows, values, bias_values};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("tree_scores", tree_scores_cpu);
  m.impl("tree_scores_backward", tree_scores_backward_cpu);
}

} // namespace xsoftmax
