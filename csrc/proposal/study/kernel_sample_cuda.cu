#include "op/cuda_launch.cuh"
#include "op/optional.h"
#include "proposal/study/kernel_sample.h"
#include "proposal/study/kernel_tree.h"
#include "proposal/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using namespace cuda;

constexpr int64_t kFeatures = int64_t(1) << 24; // features of queries computed at once

/// A block of queries: x [Q, width], their features [Q, F], and the products of the features with
/// the sums of the first `known` nodes.
struct QueryRows {
  const float *x, *features, *known_sums;
  int64_t known;
};

/// Descends the tree for one query, by a warp. All lanes hold the same values.
struct Descent {
  const KernelTree& tree;
  const float *x, *features, *known_sums;
  int64_t known;

  __device__ Descent(const KernelTree& tree, const QueryRows& rows, int64_t query)
      : tree(tree), x(rows.x + query * tree.width), features(rows.features + query * tree.features),
        known_sums(rows.known_sums + query * rows.known), known(rows.known) {}

  __device__ static float dot(const float* one, const float* other, int64_t n) {
    float sum = 0;
#pragma unroll 4
    for (int64_t d = lane(); d < n; d += kWarp) {
      sum += one[d] * other[d];
    }
    return warp_sum(sum);
  }

  __device__ float sum_of(int64_t node) const {
    return node < known ? known_sums[node]
                        : dot(features, tree.sums + node * tree.features, tree.features);
  }
  __device__ double value_of(int64_t row) const {
    return tree.value(double(dot(x, tree.rows + row * tree.width, tree.width)));
  }

  /// Descends from the root to a leaf; writes the probability of the leaf to *share_of_leaf.
  /// left(middle leaf, probability of the left child) returns whether to go left.
  template <typename Left>
  __device__ int64_t descend(double* share_of_leaf, const Left& left) const {
    double q = 1;
    int64_t node = 1, low = 0, high = tree.leaves;
    while (node < tree.leaves) {
      const int64_t middle = (low + high) / 2, begin = tree.leaf_begin(middle);
      const double first = tree.mass(sum_of(2 * node), begin - tree.leaf_begin(low));
      const double second = tree.mass(sum_of(2 * node + 1), tree.leaf_begin(high) - begin);
      const double share = first / (first + second);
      const bool goes_left = left(middle, share);
      q *= goes_left ? share : 1 - share;
      node = 2 * node + (goes_left ? 0 : 1);
      low = goes_left ? low : middle;
      high = goes_left ? middle : high;
    }
    *share_of_leaf = q;
    return node - tree.leaves;
  }

  __device__ double total_of(int64_t leaf) const {
    double total = 0;
    for (int64_t row = tree.leaf_begin(leaf); row < tree.leaf_begin(leaf + 1); ++row) {
      total += value_of(row);
    }
    return total;
  }

  /// Returns the drawn row and writes *log_q.
  __device__ int64_t draw(const PhiloxBlock& block, double* log_q) const {
    double u = unit_double(block.low()), share_of_leaf;
    const int64_t leaf = descend(&share_of_leaf, [&](int64_t, double share) {
      const bool left = u < share;
      u = left ? u / share : (u - share) / (1 - share);
      return left;
    });
    const double total = total_of(leaf), point = unit_double(block.high()) * total;
    const int64_t last = tree.leaf_begin(leaf + 1) - 1;
    int64_t row = tree.leaf_begin(leaf);
    double value = value_of(row);
    for (double sum = value; row < last && sum <= point; sum += value) {
      value = value_of(++row);
    }
    *log_q = log(share_of_leaf * (value / total));
    return row;
  }

  __device__ double log_q(int64_t row) const {
    const int64_t leaf = tree.leaf_of(row);
    double share_of_leaf;
    descend(&share_of_leaf, [&](int64_t middle, double) { return leaf < middle; });
    return log(share_of_leaf * (value_of(row) / total_of(leaf)));
  }
};

// One warp per draw.
__global__ void kernel_draw_kernel(int64_t* ids, float* log_count, DrawSeed seed, KernelTree tree,
                                   QueryRows rows, const int64_t* order, int64_t num_classes,
                                   int64_t first_query, int64_t total, int64_t samples,
                                   double log_samples) {
  for (int64_t i = global_thread() / kWarp; i < total; i += grid_threads() / kWarp) {
    const int64_t query = i / samples;
    double log_q;
    const int64_t row =
        Descent(tree, rows, query)
            .draw(philox(seed.key(), seed.query(first_query + query), uint64_t(i % samples)),
                  &log_q);
    const int64_t id = order[row];
    CUDA_KERNEL_ASSERT(id >= 0 && id < num_classes);
    if (lane() == 0) {
      ids[i] = id;
      log_count[i] = float(log_samples + log_q);
    }
  }
}

// One warp per pair. ids: one per pair, or shared by all queries (`same`); -1 means no class.
__global__ void kernel_count_kernel(float* log_count, const int64_t* ids, bool same,
                                    KernelTree tree, QueryRows rows, const int64_t* place,
                                    int64_t num_classes, int64_t total, int64_t width,
                                    double log_samples) {
  for (int64_t i = global_thread() / kWarp; i < total; i += grid_threads() / kWarp) {
    const int64_t id = ids[same ? i % width : i];
    CUDA_KERNEL_ASSERT(id >= -1 && id < num_classes);
    const int64_t row = id < 0 ? -1 : place[id];
    CUDA_KERNEL_ASSERT(row >= -1 && row < tree.classes);
    const double log_q = row < 0 ? -std::numeric_limits<double>::infinity()
                                 : Descent(tree, rows, i / width).log_q(row);
    if (lane() == 0) {
      log_count[i] = float(log_samples + log_q);
    }
  }
}

/// The contiguous tables of an index.
struct Tree {
  Tree(const KernelIndex& index, double scale)
      : index(index), rows(index.rows.contiguous()), sums(index.sums.contiguous()),
        order(index.order.contiguous()), place(index.place.contiguous()),
        view{index.sphere(),
             scale,
             index.classes(),
             index.leaves(),
             rows.size(1),
             sums.size(1),
             rows.const_data_ptr<float>(),
             sums.const_data_ptr<float>()} {}

  /// Calls task(first query, number of queries, rows) block by block. Each query takes about
  /// `paths` paths. The upper nodes are on many paths, so their products with all queries are one
  /// matrix product.
  template <typename Task>
  void for_blocks(const Tensor& queries, int64_t paths, const Task& task) const {
    constexpr int64_t kNodesPerPath = 16;
    int64_t known = 2;
    while (known < std::min(2 * view.leaves, kNodesPerPath * paths)) {
      known *= 2;
    }
    const Tensor x = kernel_rows(queries, std::nullopt, index).contiguous(),
                 top = sums.narrow(0, 0, known).t();
    const int64_t block = std::max<int64_t>(1, kFeatures / std::max(view.features, known));
    for (int64_t begin = 0; begin < x.size(0); begin += block) {
      const int64_t n = std::min(block, x.size(0) - begin);
      const Tensor block_ids = x.narrow(0, begin, n),
                   features = index.sphere() ? kernel_pairs(block_ids).contiguous() : block_ids;
      const Tensor known_sums = at::mm(features, top);
      task(begin, n,
           QueryRows{block_ids.const_data_ptr<float>(), features.const_data_ptr<float>(),
                     known_sums.const_data_ptr<float>(), known});
    }
  }

  /// Computes the counts of classes ids [n, width], or [width], which apply to all queries.
  void count(const Tensor& out, const Tensor& ids, const QueryRows& queries,
             double log_samples) const {
    if (out.numel() > 0) {
      kernel_count_kernel<<<grid_size(out.numel(), kThreads / kWarp), kThreads, 0,
                            c10::cuda::getCurrentCUDAStream()>>>(
          out.mutable_data_ptr<float>(), ids.const_data_ptr<int64_t>(), ids.numel() < out.numel(),
          view, queries, place.const_data_ptr<int64_t>(), place.size(0), out.numel(), out.size(-1),
          log_samples);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }

  const KernelIndex& index;
  Tensor rows, sums, order, place;
  KernelTree view;
};

} // namespace

PrivateDraws KernelFamily::sample_cuda(const Tensor& seed, const Tensor& queries,
                                       const OptionalTensor& target, const KernelIndex& index,
                                       const KernelOptions& options) {
  const c10::cuda::CUDAGuard guard(queries.device());
  const Tree tree(index, options.scale());
  const int64_t samples = options.num_samples,
                width = !is_defined(target) ? 0
      : target->dim() == 1                  ? 1
                                            : target->size(1);
  const auto draws = empty_private_draws(seed, queries, target, samples);
  const auto& [ids, log_count, target_log_count] = draws;
  const Tensor targets = is_defined(target) ? target->contiguous() : Tensor();
  const double log_samples = std::log(double(samples));
  tree.for_blocks(queries, samples + width, [&](int64_t begin, int64_t n, const QueryRows& rows) {
    const Tensor block_ids = ids.narrow(0, begin, n), counts = log_count.narrow(0, begin, n);
    if (samples > 0) {
      kernel_draw_kernel<<<grid_size(n * samples, kThreads / kWarp), kThreads, 0,
                           c10::cuda::getCurrentCUDAStream()>>>(
          block_ids.mutable_data_ptr<int64_t>(), counts.mutable_data_ptr<float>(), DrawSeed(seed),
          tree.view, rows, tree.order.const_data_ptr<int64_t>(), tree.place.size(0), begin,
          n * samples, samples, log_samples);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    if (width > 0) {
      tree.count(target_log_count.narrow(0, begin, n).view({n, width}), targets.narrow(0, begin, n),
                 rows, log_samples);
    }
  });
  return draws;
}

Tensor KernelFamily::log_count_cuda(const Tensor& queries, const Tensor& ids,
                                    const KernelIndex& index, const KernelOptions& options) {
  const c10::cuda::CUDAGuard guard(queries.device());
  const Tree tree(index, options.scale());
  const Tensor flat = ids.contiguous(),
               log_count =
                   at::empty({queries.size(0), ids.size(-1)}, flat.options().dtype(at::kFloat));
  tree.for_blocks(queries, ids.size(-1), [&](int64_t begin, int64_t n, const QueryRows& rows) {
    tree.count(log_count.narrow(0, begin, n), flat.dim() == 1 ? flat : flat.narrow(0, begin, n),
               rows, std::log(double(options.num_samples)));
  });
  return log_count;
}

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { AdaptiveFamily<KernelFamily>::on_cuda(m); }

} // namespace xsoftmax
