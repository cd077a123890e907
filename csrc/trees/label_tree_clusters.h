#pragma once

#include "trees/label_tree.h"

namespace xsoftmax {

// label_tree_clusters(seed, offsets [N + 1], columns, values, features, arity, max_leaf_size, iterations, spherical) -> (parents, classes), which
// label_tree takes: classes with near vectors near each other, in clusters of at most max_leaf_size, below as few layers of at most `arity`
// children as those take (Yu et al., 2022, section 2.1). All classes are on the last layer.
//
// The vectors are sparse rows: offsets int64, columns int32 below `features`, values float32. A node is cut into parts whose sizes differ as
// little as the counts allow, by halves, each by 2-means whose halves have their sizes: rows are ordered by how much nearer they are to the
// first centre (spherical: by the cosine) and cut where the first half is full. At most `iterations` of each; fewer where nothing moves.
//
// The same for any number of threads: the first cuts are parallel inside, and when there are parts enough, each is a task of its own.
LabelTreeNodes label_tree_clusters(const at::Tensor& seed, const at::Tensor& offsets, const at::Tensor& columns, const at::Tensor& values, int64_t features,
                                   int64_t arity, int64_t max_leaf_size, int64_t iterations, bool spherical);

// The same, shared by processes, in rounds. label_tree_cuts(seed, vectors, features, order int32 [N], cuts, part, parts, options) ->
// (order int32 [N], cuts int64 []): `order` has the classes as all cuts that have fewer than `cuts` cuts above them have laid them,
// [0, .., N - 1] before the first. The first result has them after the next cuts where those were this part's, else 0: the sum over part
// 0 .. parts - 1 is the order of the next round, and the second result its `cuts`, -1 when nothing is left. While segments of classes are too few
// or too uneven for the parts, a round makes one cut of each; then each part goes on alone to the end. Of the vectors those are checked that the
// part cuts. options: TreeFromVectors as text.
//
// label_tree_of_clusters(order int32 [N], arity, max_leaf_size): what label_tree_clusters makes of the last order.
std::tuple<at::Tensor, at::Tensor> label_tree_cuts(const at::Tensor& seed, at::TensorList vectors, int64_t features, const at::Tensor& order, int64_t cuts,
                                                   int64_t part, int64_t parts, std::string_view options);
LabelTreeNodes label_tree_of_clusters(const at::Tensor& order, int64_t arity, int64_t max_leaf_size);

} // namespace xsoftmax
