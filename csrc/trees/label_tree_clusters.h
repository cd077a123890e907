#pragma once

#include "trees/label_tree.h"

namespace xsoftmax {

// label_tree_clusters(seed, offsets [N + 1], columns, values, features, arity, max_leaf_size, iterations, spherical) -> (parents, classes), which
// label_tree takes: classes with near vectors near each other, in clusters of at most max_leaf_size, below as few layers of at most `arity`
// children as those take (PECOS paper, section 2.1). All classes are on the last layer.
//
// The vectors are sparse rows: offsets int64, columns int32 below `features`, values float32. A node is cut into parts whose sizes differ as
// little as the counts allow, by halves, each by 2-means whose halves have their sizes: rows are ordered by how much nearer they are to the
// first centre (spherical: by the cosine) and cut where the first half is full. At most `iterations` of each; fewer where nothing moves.
//
// The same for any number of threads: the first cuts are parallel inside, and when there are parts enough, each is a task of its own.
LabelTreeNodes label_tree_clusters(const at::Tensor& seed, const at::Tensor& offsets, const at::Tensor& columns, const at::Tensor& values,
                                   int64_t features, int64_t arity, int64_t max_leaf_size, int64_t iterations, bool spherical);

} // namespace xsoftmax
