#include "tree/hierarchical_softmax.h"

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "table/gather_dot.h"
#include "table/row_kernels.h"
#include "tree/edge_rows.h"
#include "tree/tree_scores.h"
#include "tree/sibling_softmax.h"
#include "tree/sibling_paths.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kQueriesPerTask = 8;

// Replaces scores by scores - logsumexp(scores); returns whether the result is not NaN.
template <typename A>
bool log_softmax(A* scores, int64_t n) {
  const A largest = *std::max_element(scores, scores + n);
  A sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += std::exp(scores[i] - largest);
  }
  const A normalizer = sibling_normalizer(largest, sum);
  for (int64_t i = 0; i < n; ++i) {
    scores[i] -= normalizer;
  }
  return std::isfinite(normalizer);
}

HierarchicalState forward_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                              const Tensor& first_child, const Tensor& parent, const Tensor& nodes,
                              at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes,
                              std::array<bool, 2> output_mask) {
  check_hierarchical(input, weight, bias, first_child, parent, nodes, layer_sizes, group_sizes);
  const SiblingPaths paths("hierarchical_softmax_loss", first_child, parent, nodes, layer_sizes,
                           group_sizes);
  if (use_reference()) {
    return hierarchical_softmax_forward_reference(input, weight, bias, first_child, parent, nodes,
                                                  layer_sizes, group_sizes, output_mask);
  }
  const auto [want_input, want_edges] = output_mask;
  const int64_t queries = input.size(0), features = input.size(1), width = paths.width();
  const auto options = input.options().dtype(opmath_dtype(input.scalar_type()));
  const Tensor query = input.contiguous(), table = with_unit_column_stride(weight),
               bias_row = is_defined(bias) ? bias->contiguous() : Tensor();
  const Tensor loss = at::empty({queries}, options),
               grad_input = at::zeros({want_input ? queries : 0, features}, options);
  const Tensor grad_edges = at::zeros({want_edges ? queries : 0, width}, options);
  dispatch_floating(input.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    using A = opmath<T>;
    const EdgeRows<T> edges(table, bias_row);
    at::parallel_for(0, queries, kQueriesPerTask, [&](int64_t first, int64_t last) {
      SiblingPath path;
      std::vector<A> scores;
      for (int64_t q = first; q < last; ++q) {
        paths.find(q, path);
        edges.score(scores, const_data<T>(query) + q * features, path.edges);
        A sum = 0;
        for (size_t g = 0; g < path.targets.size(); ++g) {
          A* group = scores.data() + path.starts[g];
          const int64_t n = path.starts[g + 1] - path.starts[g];
          log_softmax(group, n);
          sum -= group[path.targets[g]];
          for (int64_t i = 0; (want_input || want_edges) && i < n; ++i) {
            group[i] = sibling_gradient(group[i], i == path.targets[g]);
          }
        }
        data<A>(loss)[q] = sum;
        if (want_input) {
          row_kernels()
              .of(static_cast<const T*>(nullptr))
              .add_rows(data<A>(grad_input) + q * features, edges.weight, edges.stride,
                        path.edges.data(), scores.data(), int64_t(scores.size()), features);
        }
        for (size_t e = 0; want_edges && e < scores.size(); ++e) {
          data<A>(grad_edges)[q * width + path.columns[e]] = scores[e];
        }
      }
    });
  });
  return {loss, grad_input, grad_edges};
}

RowGradients backward_cpu(const Tensor& scale, const Tensor& grad_edges, const Tensor& input,
                          const Tensor& weight, const Tensor& first_child, const Tensor& parent,
                          const Tensor& nodes, at::IntArrayRef layer_sizes,
                          at::IntArrayRef group_sizes, std::array<bool, 3> output_mask) {
  check_hierarchical_backward(scale, grad_edges, input, weight, first_child, parent, nodes,
                              layer_sizes, group_sizes);
  const SiblingPaths paths("hierarchical_softmax_backward", first_child, parent, nodes, layer_sizes,
                           group_sizes);
  if (use_reference()) {
    return hierarchical_softmax_backward_reference(scale, grad_edges, input, weight, first_child,
                                                   parent, nodes, layer_sizes, group_sizes,
                                                   output_mask);
  }
  const int64_t queries = input.size(0), width = paths.width();
  const Tensor gradient = grad_edges.contiguous();
  std::vector<int64_t> ids, offsets(1, 0);
  ids.reserve(queries * width);
  const Tensor packed = at::empty({queries * width}, grad_edges.options());
  dispatch_floating(grad_edges.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    SiblingPath path;
    for (int64_t q = 0; q < queries; ++q) {
      paths.find(q, path);
      for (size_t e = 0; e < path.edges.size(); ++e) {
        data<A>(packed)[int64_t(ids.size()) + int64_t(e)] =
            const_data<A>(gradient)[q * width + path.columns[e]];
      }
      ids.insert(ids.end(), path.edges.begin(), path.edges.end());
      offsets.push_back(int64_t(ids.size()));
    }
  });
  constexpr int64_t kPacked = -1; // gradients are stored at the position of their pair
  const PairLayout pairs{ids.data(), offsets.data(), 0, queries};
  auto [rows, values, bias_values] = compact_row_gradient_cpu(
      packed, kPacked, scale.to(grad_edges.scalar_type()).contiguous(), input.contiguous(), pairs,
      sibling_rows(queries, layer_sizes, group_sizes).expect_int(), output_mask[1], output_mask[2]);
  return {input.new_empty({0, input.size(1)}), rows, values, bias_values};
}

// A node and its log-probability. Order: highest log-probability first, then inner nodes, then
// lower nodes. So leaves come out in order.
template <typename A>
struct Open {
  A log_prob;
  bool leaf;
  int64_t node;

  bool operator<(const Open& other) const { // for a max-heap
    return log_prob != other.log_prob ? log_prob < other.log_prob
        : leaf != other.leaf          ? leaf
                                      : node > other.node;
  }
};

template <typename T>
class BestFirst {
 public:
  using A = opmath<T>;

  BestFirst(const EdgeRows<T>& edges, const int64_t* first_child, const int64_t* node_class,
            int64_t nodes)
      : edges_(edges), first_child_(first_child), node_class_(node_class), nodes_(nodes) {}

  void run(const T* input, int64_t k, A* values, int64_t* classes) {
    open_.clear();
    const bool is_only_child = first_child_[0] == first_child_[1];
    push({A(0), is_only_child, 0});
    int64_t found = 0;
    while (found < k && !open_.empty()) {
      std::pop_heap(open_.begin(), open_.end());
      const Open<A> best = open_.back();
      open_.pop_back();
      if (best.leaf) {
        values[found] = best.log_prob;
        classes[found++] = node_class_[best.node];
      } else if (!expand(input, best)) {
        std::fill_n(values, k, std::numeric_limits<A>::quiet_NaN());
        std::iota(classes, classes + k, int64_t(0));
        return;
      }
    }
    std::fill(values + found, values + k, -std::numeric_limits<A>::infinity());
    std::fill(classes + found, classes + k, int64_t(-1));
  }

 private:
  void push(const Open<A>& node) {
    open_.push_back(node);
    std::push_heap(open_.begin(), open_.end());
  }

  // Pushes the children of a node; returns false if their scores are not numbers.
  bool expand(const T* input, const Open<A>& above) {
    const auto [begin, end] = children_of("hierarchical_topk", first_child_, above.node, nodes_);
    ids_.resize(end - begin);
    std::iota(ids_.begin(), ids_.end(), begin - 1);
    edges_.score(scores_, input, ids_);
    if (!log_softmax(scores_.data(), end - begin)) {
      return false;
    }
    for (int64_t child = begin; child < end; ++child) {
      push({above.log_prob + scores_[child - begin], first_child_[child] == first_child_[child + 1],
            child});
    }
    return true;
  }

  const EdgeRows<T>& edges_;
  const int64_t *first_child_, *node_class_;
  const int64_t nodes_;
  std::vector<Open<A>> open_; // a heap
  std::vector<int64_t> ids_;
  std::vector<A> scores_;
};

HierarchicalTopk topk_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const Tensor& first_child, const Tensor& node_class, c10::SymInt k) {
  check_hierarchical_topk(input, weight, bias, first_child, node_class, k);
  if (use_reference()) {
    return hierarchical_topk_reference(input, weight, bias, first_child, node_class, k);
  }
  const int64_t queries = input.size(0), features = input.size(1), wanted = k.expect_int();
  const Tensor query = input.contiguous(), table = with_unit_column_stride(weight),
               bias_row = is_defined(bias) ? bias->contiguous() : Tensor();
  const Tensor offsets = first_child.contiguous(), classes_of = node_class.contiguous();
  const Tensor values =
      at::empty({queries, wanted}, input.options().dtype(opmath_dtype(input.scalar_type())));
  const Tensor classes = at::empty({queries, wanted}, node_class.options());
  dispatch_floating(input.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const EdgeRows<T> edges(table, bias_row);
    at::parallel_for(0, queries, 1, [&](int64_t first, int64_t last) {
      BestFirst<T> search(edges, offsets.const_data_ptr<int64_t>(),
                          classes_of.const_data_ptr<int64_t>(), node_class.size(0));
      for (int64_t q = first; q < last; ++q) {
        search.run(const_data<T>(query) + q * features, wanted,
                   data<opmath<T>>(values) + q * wanted,
                   classes.mutable_data_ptr<int64_t>() + q * wanted);
      }
    });
  });
  return {values, classes};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("hierarchical_softmax_forward", forward_cpu);
  m.impl("hierarchical_softmax_backward", backward_cpu);
  m.impl("hierarchical_topk", topk_cpu);
}

} // namespace xsoftmax
