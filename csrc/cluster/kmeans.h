#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace xsoftmax {

// Clusters rows with Lloyd's algorithm. Returns (centroids, inertia).
//
// seed: 0-dim int64, the Philox key.
// rows [n, D]: floating point, finite.
// clusters: K, at least 1. May exceed n; the additional centroids then repeat.
// init: initial centroids [K, D]. If absent, K-means++ (Arthur and Vassilvitskii, 2007) chooses
// them among at most 8 K rows.
//
// centroids [K, D], float32. If n = 0, they are `init`, or zeros if absent.
// inertia [iterations + 1], float64: the mean squared distance of the rows from their nearest
// centroids before each iteration and after the last one.
//
// An empty cluster restarts at one of the rows farthest from their centroids. Results do not depend
// on the number of threads.
std::tuple<at::Tensor, at::Tensor> kmeans(const at::Tensor& seed, const at::Tensor& rows,
                                          int64_t clusters, int64_t iterations,
                                          const std::optional<at::Tensor>& init);

} // namespace xsoftmax
