#pragma once

#include "tree/cluster_cuts.h"

#include <vector>

namespace xsoftmax {

/// Makes the cuts of an unbalanced tree (label_tree_clusters.h): rearranges order [N], the
/// classes, and returns the inner nodes. All clusters are on one layer. Throws if interrupted.
std::vector<ClusterNode> cut_by_distance(const char* op, const SparseRowsView& vectors,
                                         const ClusterOptions& cluster_options, int64_t arity,
                                         int64_t max_leaf_size, int32_t* order);

} // namespace xsoftmax
