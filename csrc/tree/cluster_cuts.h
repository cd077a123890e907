#pragma once

#include "table/sparse_rows.h"
#include "tree/bisection.h"

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

// The shape of a tree of clusters (label_tree_clusters.h), and the cuts that divide its classes
// among the clusters.

namespace xsoftmax {

/// An inner node. Its classes are order[begin .. end), in `leaves` clusters. Its children are the
/// nodes first .. last - 1; a cluster has none, and its children are the classes.
struct ClusterNode { int64_t parent, begin, end, leaves, first, last; };

/// Returns the nodes of the tree, whose shape depends only on the counts: all clusters are on one
/// layer, no node has more than `arity` children.
std::vector<ClusterNode> cluster_nodes(int64_t classes, int64_t arity, int64_t max_leaf_size);

/// A run of siblings, the nodes low .. high - 1, whose classes are still mixed after `cuts` cuts
/// above.
struct SiblingSegment { int64_t low, high, cuts; };

/// Returns the segments left after `cuts` cuts, from left to right.
std::vector<SiblingSegment> segments_after(int64_t cuts, const std::vector<ClusterNode>& nodes);

constexpr int64_t kAllCuts = std::numeric_limits<int64_t>::max();

/// Makes all cuts below the given segments that have fewer than `max_cuts` cuts above them. Each
/// segment is a contiguous range of `order`, which is rearranged in place. Throws if interrupted.
void cut_segments(const char* op, const SparseRowsView& vectors,
                  const std::vector<ClusterNode>& nodes, const ClusterOptions& cluster_options,
                  std::span<const SiblingSegment> segments, int64_t max_cuts, int32_t* order);

} // namespace xsoftmax
