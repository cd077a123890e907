#pragma once

#include "tree/label_tree.h"

#include <xsoftmax/trees.h>

namespace xsoftmax {

// label_tree_clusters(seed, offsets [N + 1], columns, values, features, options) -> (parents,
// classes): clusters classes with similar vectors and returns the arguments of label_tree. options:
// TreeFromVectors (xsoftmax/trees.h) with max_leaf_size. Each cluster has at most max_leaf_size
// classes; above the clusters are as few layers as nodes of at most `arity` children allow (Yu et
// al., 2022, section 2.1). All classes are on the last layer.
//
// The vectors are sparse rows: offsets int64, columns int32 below `features`, values float32. A
// node is split into parts whose sizes differ as little as the counts allow, by repeated bisection.
// Each bisection is a 2-means with fixed sizes: rows are sorted by how much closer they are to the
// first centre (spherical: by cosine similarity) and split where the first half is full. It runs
// for at most `iterations` iterations and stops early if nothing moves.
//
// If the tree is not balanced, a node of more than max_leaf_size classes gets children by bisecting
// its largest part until it has `arity` parts, or none is larger than max_leaf_size. Each row of a
// bisection goes to the closer centre (bisection.h). Clusters that are finished early are
// extended by single-child nodes down to the last layer.
//
// The result does not depend on the number of threads: the first bisections run in parallel
// internally; once there are enough parts, each part is a task.
LabelTreeNodes label_tree_clusters(const at::Tensor& seed, const at::Tensor& offsets,
                                   const at::Tensor& columns, const at::Tensor& values,
                                   int64_t features, const TreeFromVectors& options);

// The same tree, built by several processes in rounds.
//
// label_tree_cuts(seed, vectors, features, order int32 [N], cuts, part, parts, options) ->
// (order int32 [N], cuts int64 []): makes the next cuts that belong to process `part` of `parts`.
// `order` lists the classes as arranged by all cuts that have fewer than `cuts` cuts above them;
// the first round starts from [0, .., N - 1]. The first result holds this process's share of the
// new order (for part 0, also the classes that need no more cuts) and 0 elsewhere: the sum over
// parts 0 .. parts - 1 is the order of the next round. The second result is the next round's
// `cuts`, or -1 when nothing is left to cut. While there are too few segments of classes, or they
// are too uneven to divide among the processes, a round makes one cut per segment; after that, each
// process finishes its segments alone. Only the vectors that this process cuts are checked.
// options: TreeFromVectors as text; only balanced trees.
//
// label_tree_of_clusters(order int32 [N], arity, max_leaf_size): returns the result of
// label_tree_clusters for the final order.
std::tuple<at::Tensor, at::Tensor> label_tree_cuts(const at::Tensor& seed, at::TensorList vectors,
                                                   int64_t features, const at::Tensor& order,
                                                   int64_t cuts, int64_t part, int64_t parts,
                                                   std::string_view options);
LabelTreeNodes label_tree_of_clusters(const at::Tensor& order, int64_t arity,
                                      int64_t max_leaf_size);

} // namespace xsoftmax
