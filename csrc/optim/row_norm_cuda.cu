#include "cpu/impl.h"
#include "optim/row_norm.h"
#include "optim/row_update_cuda.cuh"

#include <ATen/Dispatch.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using namespace cuda;

// The p-norm as a reduction: the sum of powers or, for p = infinity, the maximum. NaN propagates.
struct Norm {
  double p;
  bool largest; ///< p = infinity

  template <typename M>
  __device__ M power(M x) const {
    const M size = x < 0 ? -x : x;
    return p == 2 ? x * x : (p == 1 || largest ? size : M(std::pow(double(size), p)));
  }
  template <typename M>
  __device__ M join(M a, M b) const {
    return !largest ? a + b : (a != a || a > b ? a : b);
  }
  __device__ double root(double total) const {
    return largest || p == 1 ? total : (p == 2 ? std::sqrt(total) : std::pow(total, 1 / p));
  }
  /// Reduces over the block in a fixed order.
  __device__ double sum_over_block(double mine) const {
    __shared__ double storage[kWarp];
    return block_reduce(mine, 0.0, storage, [this](double x) {
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        const double other = __shfl_xor_sync(kAllLanes, x, distance);
        // All lanes agree, even on two NaN.
        x = lane() & distance ? join(other, x) : join(x, other);
      }
      return x;
    });
  }
};

// One warp per row; the first of equal rows sums them. The sum of a part depends only on `parts`,
// not on the grid. Reads values once, plus 16 bytes per row for its position.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, 2)
    norm_kernel(double* partial, int64_t parts, SortedGradient<T> g, Norm norm) {
  using M = at::opmath_type<T>;
  constexpr int K = kPacksPerThread<N>;
  constexpr int64_t kStride = kWarp * N, kWarps = kThreads / kWarp;
  for (int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
    double total = 0;
    for (int64_t i = part * kWarps + threadIdx.x / kWarp; i < g.count; i += parts * kWarps) {
      if (!begins(g, i)) {
        continue;
      }
      M row_power = 0;
      for (int64_t from = 0; from < g.width; from += kStride * K) {
        M sum[K][N];
        sum_row(sum, g, i, from + int64_t(lane()) * N, kStride);
#pragma unroll
        for (int k = 0; k < K; ++k) {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            row_power = norm.join(row_power, norm.power(sum[k][n])); // 0 past the last column
          }
        }
      }
      total = norm.join(total, double(row_power));
    }
    total = norm.sum_over_block(total);
    if (threadIdx.x == 0) {
      partial[part] = total;
    }
  }
}

// Combines the parts; one block.
template <typename M>
__global__ void __launch_bounds__(kThreads, 2)
    finish_norm_kernel(M* result, const double* partial, int64_t count, Norm norm) {
  double total = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    total = norm.join(total, partial[i]);
  }
  total = norm.sum_over_block(total);
  if (threadIdx.x == 0) {
    *result = M(norm.root(total));
  }
}

template <typename T>
void launch_norm(const Tensor& result, const Tensor& rows, const Tensor& values, double p) {
  const GradientOnDevice<T> gradient({rows, values},
                                     /*num_rows=*/std::numeric_limits<int64_t>::max());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  // At most what one block combines quickly, and enough to fill any device.
  constexpr int64_t kBlocks = 1024;
  const Norm norm{p, p == std::numeric_limits<double>::infinity()};
  const unsigned blocks =
      unsigned(std::min<int64_t>(grid_size(gradient.view.count, kThreads / kWarp), kBlocks));
  const Tensor partial = at::empty({int64_t(blocks)}, values.options().dtype(at::kDouble));
  dispatch_pack<T>(gradient.wide(), [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    gradient.template sum_chunks<N>();
    norm_kernel<T, N><<<blocks, kThreads, 0, stream>>>(partial.mutable_data_ptr<double>(),
                                                       int64_t(blocks), gradient.view, norm);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  using M = at::opmath_type<T>;
  finish_norm_kernel<M><<<1, kThreads, 0, stream>>>(
      result.mutable_data_ptr<M>(), partial.const_data_ptr<double>(), int64_t(blocks), norm);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor row_norm_cuda(const Tensor& rows, const Tensor& values, double norm_type) {
  check_row_norm(rows, values, norm_type);
  const c10::cuda::CUDAGuard guard(values.device());
  if (use_reference()) {
    return row_norm_reference(rows, values, norm_type);
  }
  const Tensor result = at::zeros({}, values.options().dtype(opmath_dtype(values.scalar_type())));
  if (values.numel() == 0) {
    return result;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, values.scalar_type(), "row_norm_cuda",
                                  [&] { launch_norm<scalar_t>(result, rows, values, norm_type); });
  return result;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("row_norm", row_norm_cuda); }

} // namespace xsoftmax
