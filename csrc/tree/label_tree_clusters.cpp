#include "tree/label_tree_clusters.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/options.h"
#include "table/sparse_rows.h"
#include "tree/cluster_cuts.h"
#include "tree/distance_cuts.h"

#include <xsoftmax/trees.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

// label_tree_cuts lets each process finish alone if no process has more than kMaxImbalance times
// the mean work, or if there are at least kSegmentsOfPart segments per process.
constexpr double kMaxImbalance = 1.1;
constexpr int64_t kSegmentsOfPart = 4;

/// Returns the tree with classes in the given order.
LabelTreeNodes tree_of(const std::vector<ClusterNode>& nodes, std::span<const int32_t> order) {
  const int64_t inner = int64_t(nodes.size()), all = inner + int64_t(order.size());
  const Tensor parents = at::empty({all}, at::kLong), classes = at::empty({all}, at::kLong);
  int64_t *parent = parents.mutable_data_ptr<int64_t>(),
          *class_ids = classes.mutable_data_ptr<int64_t>();
  for (int64_t v = 0; v < inner; ++v) {
    parent[v] = nodes[v].parent;
    class_ids[v] = -1;
    // Only clusters have leaves.
    for (int64_t i = nodes[v].begin; i < nodes[v].end && nodes[v].first == nodes[v].last; ++i) {
      parent[inner + i] = v;
      class_ids[inner + i] = order[i];
    }
  }
  return {parents, classes};
}

/// The segments of one process: the most expensive segment first goes to the process with the least
/// work so far.
struct WorkShare {
  std::vector<SiblingSegment> mine;
  bool balanced; // whether all processes have about the same work
};

WorkShare share_work(std::span<const SiblingSegment> segments,
                     const std::vector<ClusterNode>& nodes, const SparseRowsView& vectors,
                     const int32_t* order, int64_t part, int64_t parts) {
  std::vector<std::pair<int64_t, const SiblingSegment*>> tasks;
  int64_t total = 0;
  for (const SiblingSegment& segment : segments) {
    int64_t work = 0;
    for (int64_t i = nodes[segment.low].begin; i < nodes[segment.high - 1].end; ++i) {
      work += vectors.offset[order[i] + 1] - vectors.offset[order[i]] + 1;
    }
    tasks.push_back({work, &segment});
    total += work;
  }
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const auto& one, const auto& other) { return one.first > other.first; });
  using Load = std::pair<int64_t, int64_t>; // (work, process)
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int64_t p = 0; p < std::min(parts, int64_t(segments.size())); ++p) {
    loads.push({0, p});
  }
  WorkShare work_share;
  int64_t largest = 0;
  for (const auto& [work, segment] : tasks) {
    const auto [load, process] = loads.top();
    loads.pop();
    loads.push({load + work, process});
    largest = std::max(largest, load + work);
    if (process == part) {
      work_share.mine.push_back(*segment);
    }
  }
  work_share.balanced = double(largest) * double(parts) <= kMaxImbalance * double(total);
  return work_share;
}

ClusterOptions checked_cluster_options(const char* op, const Tensor& seed, int64_t iterations,
                                       bool spherical) {
  check::dim(op, "seed", seed, 0);
  check::int64(op, "seed", seed);
  TORCH_CHECK_VALUE(iterations >= 1, op, ": expected iterations of at least 1, got ", iterations);
  return {uint64_t(seed.item<int64_t>()), iterations, spherical};
}

std::vector<ClusterNode> checked_shape(const char* op, const char* arg, int64_t classes,
                                       int64_t arity, int64_t max_leaf_size) {
  TORCH_CHECK_VALUE(arity >= 2, op, ": expected arity of at least 2, got ", arity);
  TORCH_CHECK_VALUE(max_leaf_size >= 1, op, ": expected max_leaf_size of at least 1, got ",
                    max_leaf_size);
  TORCH_CHECK_VALUE(classes >= 1 && classes < std::numeric_limits<int32_t>::max(), op,
                    ": expected ", arg, " of 1 to 2^31 - 2 classes, got ", classes);
  return cluster_nodes(classes, arity, max_leaf_size);
}

/// Checks that order is int32 and holds ids below its size.
void check_order(const char* op, const Tensor& order) {
  check::numbers(op, "order", order, at::kInt);
  const Tensor ids = order.contiguous();
  for (const int32_t id : span_of<int32_t>(ids)) {
    TORCH_CHECK_INDEX(id >= 0 && id < ids.numel(), op, ": expected order as class ids in [0, ",
                      ids.numel(), "), got ", id);
  }
}

void check_features(const char* op, int64_t features) {
  TORCH_CHECK_VALUE(features >= 0 && features <= std::numeric_limits<int32_t>::max(), op,
                    ": expected features in [0, 2^31), got ", features);
}

/// Returns a view of sparse rows after checking offsets and lengths. Columns and values are checked
/// later, for the rows that are used.
SparseRowsView checked_lists(const char* op, const Tensor& offset, const Tensor& column,
                             const Tensor& value, int64_t features) {
  check_features(op, features);
  check::numbers(op, "offsets", offset, at::kLong);
  check::numbers(op, "columns", column, at::kInt);
  check::numbers(op, "values", value, at::kFloat);
  TORCH_CHECK_VALUE(offset.size(0) >= 1, op,
                    ": expected offsets with a number for each list and one, got none");
  check::offsets(op, "offsets", offset, column.size(0));
  check::size(op, "values", value, 0, column.size(0), "one for each number of its lists");
  return {offset.size(0) - 1, features, offset.const_data_ptr<int64_t>(),
          column.const_data_ptr<int32_t>(), value.const_data_ptr<float>()};
}

void check_rows(const char* op, const SparseRowsView& vectors, std::span<const int32_t> rows) {
  for (const int32_t row : rows) {
    for (int64_t t = vectors.offset[row]; t < vectors.offset[row + 1]; ++t) {
      TORCH_CHECK_INDEX(vectors.column[t] >= 0 && vectors.column[t] < vectors.features, op,
                        ": expected columns in [0, ", vectors.features, "), got ",
                        vectors.column[t], " at [", t, "]");
      TORCH_CHECK_VALUE(std::isfinite(vectors.value[t]), op,
                        ": expected values that are finite, got ", vectors.value[t], " at [", t,
                        "]");
    }
  }
}

} // namespace

LabelTreeNodes label_tree_clusters(const Tensor& seed, const Tensor& offsets, const Tensor& columns,
                                   const Tensor& values, int64_t features,
                                   const TreeFromVectors& options) {
  constexpr const char* op = "label_tree_clusters";
  const ClusterOptions cluster_options =
      checked_cluster_options(op, seed, options.iterations, options.spherical);
  const Tensor offset = offsets.contiguous(), column = columns.contiguous(),
               value = values.contiguous();
  check_features(op, features);
  const SparseRowsView vectors =
      check::sparse_rows(op, offset, column, value, features, /*rising=*/false);
  const std::vector<ClusterNode> nodes =
      checked_shape(op, "vectors", vectors.count, options.arity, options.max_leaf_size);
  std::vector<int32_t> order(vectors.count);
  std::iota(order.begin(), order.end(), int32_t(0));
  if (!options.balanced) {
    return tree_of(cut_by_distance(op, vectors, cluster_options, options.arity,
                                   options.max_leaf_size, order.data()),
                   order);
  }
  cut_segments(op, vectors, nodes, cluster_options, segments_after(0, nodes), kAllCuts,
               order.data());
  return tree_of(nodes, order);
}

std::tuple<Tensor, Tensor> label_tree_cuts(const Tensor& seed, at::TensorList vectors,
                                           int64_t features, const Tensor& order, int64_t cuts,
                                           int64_t part, int64_t parts, std::string_view options) {
  constexpr const char* op = "label_tree_cuts";
  const auto [arity, iterations, max_leaf_size, spherical, balanced] =
      parse_options<TreeFromVectors>(op, options);
  TORCH_CHECK_VALUE(balanced, op, ": expected options of a balanced tree, got balanced=false");
  const ClusterOptions cluster_options = checked_cluster_options(op, seed, iterations, spherical);
  TORCH_CHECK_VALUE(vectors.size() == 3, op,
                    ": expected vectors as 3 tensors, offsets, columns and values, got ",
                    vectors.size());
  const Tensor offset = vectors[0].contiguous(), column = vectors[1].contiguous(),
               value = vectors[2].contiguous();
  const SparseRowsView rows = checked_lists(op, offset, column, value, features);
  const std::vector<ClusterNode> nodes =
      checked_shape(op, "vectors", rows.count, arity, max_leaf_size);
  check_order(op, order);
  check::size(op, "order", order, 0, rows.count, "one for each vector");
  TORCH_CHECK_VALUE(parts >= 1 && 0 <= part && part < parts, op,
                    ": expected 0 <= part < parts, got ", part, " and ", parts);
  TORCH_CHECK_VALUE(cuts >= 0, op, ": expected cuts of at least 0, got ", cuts);

  const std::vector<SiblingSegment> segments = segments_after(cuts, nodes);
  const Tensor new_order = order.contiguous().clone();
  int32_t* ids = new_order.mutable_data_ptr<int32_t>();
  const WorkShare work_share = share_work(segments, nodes, rows, ids, part, parts);
  for (const SiblingSegment& segment : work_share.mine) {
    check_rows(op, rows, {ids + nodes[segment.low].begin, ids + nodes[segment.high - 1].end});
  }
  const bool cuts_all = work_share.balanced || int64_t(segments.size()) / kSegmentsOfPart >= parts;
  cut_segments(op, rows, nodes, cluster_options, work_share.mine, cuts_all ? kAllCuts : cuts + 1,
               ids);
  // Part 0 also returns the classes that need no more cuts.
  const Tensor share = part == 0 ? new_order.clone() : at::zeros_like(new_order);
  const auto slice_of = [&](const Tensor& tensor, const SiblingSegment& segment) {
    return tensor.slice(0, nodes[segment.low].begin, nodes[segment.high - 1].end);
  };
  if (part == 0) {
    for (const SiblingSegment& segment : segments) {
      slice_of(share, segment).zero_();
    }
  }
  for (const SiblingSegment& segment : work_share.mine) {
    slice_of(share, segment).copy_(slice_of(new_order, segment));
  }
  return {share, at::scalar_tensor(cuts_all ? -1 : cuts + 1, at::kLong)};
}

LabelTreeNodes label_tree_of_clusters(const Tensor& order, int64_t arity, int64_t max_leaf_size) {
  constexpr const char* op = "label_tree_of_clusters";
  check_order(op, order);
  const Tensor ids = order.contiguous();
  return tree_of(checked_shape(op, "order", ids.numel(), arity, max_leaf_size),
                 span_of<int32_t>(ids));
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "label_tree_clusters(Tensor seed, Tensor offsets, Tensor columns, Tensor values, int "
      "features, str options) -> (Tensor parents, Tensor classes)");
  m.def(
      "label_tree_cuts(Tensor seed, Tensor[] vectors, int features, Tensor order, int cuts, int "
      "part, int parts, str options=\"\") -> "
      "(Tensor order, Tensor cuts)");
  m.def(
      "label_tree_of_clusters(Tensor order, int arity, int max_leaf_size) -> (Tensor parents, "
      "Tensor classes)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("label_tree_clusters",
         [](const Tensor& seed, const Tensor& offsets, const Tensor& columns, const Tensor& values,
            int64_t features, std::string_view options) {
           return label_tree_clusters(
               seed, offsets, columns, values, features,
               parse_options<TreeFromVectors>("label_tree_clusters", options));
         });
  m.impl("label_tree_cuts", label_tree_cuts);
  m.impl("label_tree_of_clusters", label_tree_of_clusters);
}

} // namespace xsoftmax
