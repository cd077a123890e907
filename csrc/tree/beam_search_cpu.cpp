#include "tree/beam_search.h"

#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "cpu/products.h"
#include "table/gather_dot.h"
#include "table/row_kernels.h"
#include "table/transform_names.h"
#include "tree/edge_rows.h"
#include "tree/tree_scores.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kBeamSearchCpu = "beam_search";
constexpr int64_t kBlock = 64;        // queries per matrix product
constexpr int64_t kDenseEdges = 8192; // most edges per product: their scores stay in cache

template <typename A>
struct Node {
  A score;
  int64_t id;

  // NaN first, as in torch.topk.
  bool operator<(const Node& other) const {
    const bool nan = std::isnan(score), other_nan = std::isnan(other.score);
    if (nan || other_nan) {
      return nan != other_nan ? nan : id < other.id;
    }
    return score != other.score ? score > other.score : id < other.id;
  }
};

struct SearchedTree {
  const int64_t* first_child;
  int64_t nodes;

  // Returns the number of edges, in whole layers from the top, that are cheaper to score for all
  // queries in one matrix product than per query. A row in a matrix product costs about 1 /
  // `cheaper` of a row that is read for a single query.
  int64_t dense_edges(int64_t width, int64_t queries) const {
    const int64_t cheaper = std::clamp<int64_t>(queries / 4, 1, 16);
    int64_t begin = 0, end = 1;
    while (end < nodes) {
      const int64_t next = first_child[end];
      if (next <= end || next > nodes) {
        break; // reported when the search gets there
      }
      int64_t max_children = 1; // children of a node of this layer
      for (int64_t v = begin; v < end; ++v) {
        max_children = std::max(max_children, first_child[v + 1] - first_child[v]);
      }
      // The most edges that a beam can score in this layer.
      const int64_t widest = std::min(width, end - begin) * max_children;
      if (next - 1 > kDenseEdges || next - end > cheaper * widest) {
        break;
      }
      begin = end;
      end = next;
    }
    return end - 1;
  }
};

// Searches for one query at a time and reuses its buffers.
template <typename T>
class Search {
 public:
  using A = opmath<T>;

  Search(const SearchedTree& tree, const EdgeRows<T>& table, int64_t width, int64_t dense,
         NamedTransform transform)
      : tree_(tree), table_(table), width_(width), dense_(dense), transform_(transform) {}

  /// Returns the leaves found, best first. dense_scores: scores of the edges below dense_.
  const std::vector<Node<A>>& run(const T* input, const A* dense_scores) {
    beam_.assign(1, {A(0), 0});
    while (expand(input, dense_scores)) {
      if (int64_t(beam_.size()) > width_) {
        std::nth_element(beam_.begin(), beam_.begin() + width_, beam_.end());
        beam_.resize(width_);
      }
    }
    std::sort(beam_.begin(), beam_.end());
    return beam_;
  }

 private:
  // Replaces the inner nodes of the beam by their children; returns whether there were any.
  bool expand(const T* input, const A* dense_scores) {
    next_.clear();
    edges_.clear();
    bool any = false;
    for (const Node<A>& node : beam_) {
      const auto [begin, end] =
          children_of(kBeamSearchCpu, tree_.first_child, node.id, tree_.nodes);
      if (begin == end) {
        next_.push_back(node);
        continue;
      }
      any = true;
      for (int64_t child = begin; child < end; ++child) {
        if (child <= dense_) {
          next_.push_back({node.score + transform_(dense_scores[child - 1]), child});
        } else {
          edges_.push_back(child - 1);
          parent_score_.push_back(node.score);
        }
      }
    }
    table_.score(scores_, input, edges_);
    for (size_t i = 0; i < edges_.size(); ++i) {
      next_.push_back({parent_score_[i] + transform_(scores_[i]), edges_[i] + 1});
    }
    parent_score_.clear();
    std::swap(beam_, next_);
    return any;
  }

  const SearchedTree& tree_;
  const EdgeRows<T> table_;
  const int64_t width_, dense_;
  const NamedTransform transform_;
  std::vector<Node<A>> beam_, next_;
  std::vector<int64_t> edges_;
  std::vector<A> parent_score_, scores_;
};

BeamSearchResult beam_search_cpu(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, const Tensor& first_child,
                                 const Tensor& node_class, c10::SymInt width,
                                 std::string_view transform) {
  check_beam_search(input, weight, bias, first_child, node_class, width, transform);
  if (use_reference()) {
    return beam_search_reference(input, weight, bias, first_child, node_class, width, transform);
  }
  const NamedTransform named = additive_transform_named(kBeamSearchCpu, transform);
  const auto dtype = opmath_dtype(input.scalar_type());
  const int64_t queries = input.size(0), features = input.size(1), beam = width.expect_int();
  const Tensor x = input.contiguous(), table = with_unit_column_stride(weight),
               offsets = first_child.contiguous();
  const Tensor classes_of = node_class.contiguous(),
               bias_row = is_defined(bias) ? bias->contiguous() : Tensor();
  const SearchedTree tree{offsets.const_data_ptr<int64_t>(), node_class.size(0)};
  const int64_t dense = tree.dense_edges(beam, queries);
  const Tensor top = table.narrow(0, 0, dense).to(dtype),
               top_bias = bias_row.defined() ? bias_row.narrow(0, 0, dense).to(dtype) : Tensor();
  const Tensor scores = at::full({queries, beam}, -std::numeric_limits<double>::infinity(),
                                 input.options().dtype(dtype));
  const Tensor classes = at::full({queries, beam}, -1, node_class.options());
  const int64_t* class_of = classes_of.const_data_ptr<int64_t>();
  dispatch_floating(input.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    using A = opmath<T>;
    at::parallel_for(0, (queries + kBlock - 1) / kBlock, 1, [&](int64_t first, int64_t last) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      Search<T> search(tree, EdgeRows<T>(table, bias_row), beam, dense, named);
      for (int64_t b = first; b < last; ++b) {
        const int64_t begin = b * kBlock, end = std::min(queries, begin + kBlock);
        Tensor known = product_in_parts(x.narrow(0, begin, end - begin).to(dtype), top.t());
        if (top_bias.defined()) {
          known = known + top_bias;
        }
        for (int64_t q = begin; q < end; ++q) {
          const auto& found = search.run(const_data<T>(x) + q * features,
                                         const_data<A>(known) + (q - begin) * dense);
          for (size_t i = 0; i < found.size(); ++i) {
            data<A>(scores)[q * beam + i] = found[i].score;
            classes.mutable_data_ptr<int64_t>()[q * beam + i] = class_of[found[i].id];
          }
        }
      }
    });
  });
  return {scores, classes};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("beam_search", beam_search_cpu); }

} // namespace xsoftmax
