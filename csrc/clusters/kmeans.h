#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace xsoftmax {

// kmeans(seed, rows, clusters, iterations, init) -> (centroids, inertia): Lloyd's algorithm from K-means++ seeds (Arthur and
// Vassilvitskii, 2007), or from `init` [K, D].
//
// seed: 0-dim int64, the Philox key. rows [n, D]: floating, finite; n = 0 gives centroids of zeros. centroids [K, D] and inertia
// [iterations + 1], the mean squared distance of the rows from the centroids before each iteration and after the last one: float32 and
// float64. A cluster that loses its last row starts again at the row that is farthest from its centroid. K may exceed n: further
// centroids then repeat. Seeds are chosen among at most 8 K rows. The same for any number of threads.
std::tuple<at::Tensor, at::Tensor> kmeans(const at::Tensor& seed, const at::Tensor& rows, int64_t clusters, int64_t iterations,
                                          const std::optional<at::Tensor>& init);

} // namespace xsoftmax
