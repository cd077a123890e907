#include "table/cuda_rows.cuh"
#include "op/optional.h"
#include "table/pairs.cuh"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

namespace xsoftmax {
namespace {

using namespace cuda;

// One warp per pair.
template <typename T, int N>
__global__ void pair_scores_kernel(at::opmath_type<T>* out, int64_t out_stride, const T* input,
                                   const T* weight, int64_t weight_stride, const T* bias,
                                   Pairs pairs, int64_t width) {
  using opmath = at::opmath_type<T>;
  for (int64_t position = global_thread() / kWarp; position < pairs.total;
       position += grid_threads() / kWarp) {
    const int64_t query = pairs.query_of(position), id = pairs.id(position);
    const opmath score = dot_row<T, N>(input + query * width, weight + id * weight_stride, width);
    if (lane() == 0) {
      out[pairs.address(query, position, out_stride)] =
          score + (bias == nullptr ? opmath(0) : opmath(bias[id]));
    }
  }
}

// One block per query; each thread sums N columns over the query's pairs in order. The lanes of a
// warp load ids and coefficients in parallel and share them by shuffles; the loads of kAhead rows
// are in flight at once.
template <typename T, int N>
__global__ void pair_input_grad_kernel(at::opmath_type<T>* grad_input,
                                       const at::opmath_type<T>* grad, int64_t grad_stride,
                                       const T* weight, int64_t weight_stride, Pairs pairs,
                                       int64_t width) {
  using opmath = at::opmath_type<T>;
  constexpr int kAhead = 8;
  for (int64_t query = blockIdx.x; query < pairs.queries; query += gridDim.x) {
    const int64_t begin = pairs.begin(query), end = pairs.end(query);
    CUDA_KERNEL_ASSERT(0 <= begin && begin <= end && end <= pairs.total);
    const opmath* coefficient = grad + pairs.address(query, begin, grad_stride);
    for (int64_t warp_begin = (threadIdx.x - lane()) * N; warp_begin < width;
         warp_begin += int64_t(blockDim.x) * N) {
      const int64_t d = warp_begin + lane() * N;
      const bool mine = d < width;
      opmath sum[N] = {};
#pragma unroll 1
      for (int64_t base = begin; base < end; base += kWarp) {
        const int members = end - base < kWarp ? int(end - base) : kWarp;
        const opmath pair_coefficient =
            lane() < members ? coefficient[base - begin + lane()] : opmath(0);
        const int64_t id = pair_coefficient != opmath(0) ? pairs.id(base + lane()) : 0;
#pragma unroll 1
        // Lanes past the members have a coefficient of 0, and kWarp is a multiple of kAhead.
        for (int m = 0; m < members; m += kAhead) {
          Pack<T, N> rows[kAhead];
          opmath c[kAhead];
#pragma unroll
          for (int k = 0; k < kAhead; ++k) {
            c[k] = __shfl_sync(kAllLanes, pair_coefficient, m + k);
            const int64_t row = __shfl_sync(kAllLanes, id, m + k);
            // As on the CPU, rows with a coefficient of 0 are not read.
            if (mine && c[k] != opmath(0)) {
              rows[k] = load_pack<N>(weight + row * weight_stride + d);
            }
          }
#pragma unroll
          for (int k = 0; k < kAhead; ++k) {
            if (mine && c[k] != opmath(0)) {
#pragma unroll
              for (int i = 0; i < N; ++i) {
                sum[i] += c[k] * opmath(rows[k].values[i]);
              }
            }
          }
        }
      }
      if (mine) {
        store_pack(grad_input + query * width + d, sum);
      }
    }
  }
}

} // namespace

void pair_scores_cuda(const at::Tensor& out, int64_t out_stride, const at::Tensor& input,
                      const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      const CudaPairs& pairs) {
  if (pairs.total() == 0) {
    return;
  }
  const at::Tensor bias_row = is_defined(bias) ? bias->contiguous() : at::Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "pair_scores_cuda", [&] {
        using opmath = at::opmath_type<scalar_t>;
        const scalar_t *in = input.const_data_ptr<scalar_t>(),
                       *table = weight.const_data_ptr<scalar_t>();
        const int64_t width = input.size(1), stride = weight.stride(0);
        const bool wide =
            aligned(in, width, sizeof(scalar_t)) && aligned(table, stride, sizeof(scalar_t));
        dispatch_pack<scalar_t>(wide, [&](auto pack) {
          constexpr int N = decltype(pack)::value;
          const unsigned grid = grid_size(pairs.total(), kThreads / kWarp);
          pair_scores_kernel<scalar_t, N><<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
              out.mutable_data_ptr<opmath>(), out_stride, in, table, stride,
              bias_row.defined() ? bias_row.const_data_ptr<scalar_t>() : nullptr, Pairs(pairs),
              width);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        });
      });
}

at::Tensor pair_input_grad_cuda(const at::Tensor& grad, int64_t grad_stride,
                                const at::Tensor& weight, const CudaPairs& pairs) {
  const int64_t width = weight.size(1), stride = weight.stride(0);
  const at::Tensor grad_input = at::empty({pairs.queries, width}, grad.options());
  if (grad_input.numel() == 0) {
    return grad_input;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, weight.scalar_type(), "pair_input_grad_cuda", [&] {
        using opmath = at::opmath_type<scalar_t>;
        const scalar_t* table = weight.const_data_ptr<scalar_t>();
        // The width must be a multiple of N too: the last load of a row takes N columns.
        const bool wide =
            aligned(table, stride, sizeof(scalar_t)) && aligned(nullptr, width, sizeof(scalar_t));
        dispatch_pack<scalar_t>(wide, [&](auto pack) {
          constexpr int N = decltype(pack)::value;
          const int64_t warps =
              std::clamp<int64_t>((width + kWarp * N - 1) / (kWarp * N), 1, kThreads / kWarp);
          pair_input_grad_kernel<scalar_t, N>
              <<<grid_size(pairs.queries, 1), unsigned(warps * kWarp), 0,
                 c10::cuda::getCurrentCUDAStream()>>>(grad_input.mutable_data_ptr<opmath>(),
                                                      grad.const_data_ptr<opmath>(), grad_stride,
                                                      table, stride, Pairs(pairs), width);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        });
      });
  return grad_input;
}

void product_out_cuda(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add) {
  const at::ScalarType dtype = out.scalar_type();
  if (a.scalar_type() == b.scalar_type() && a.scalar_type() != dtype) {
    add ? at::addmm_out(out, out, a, b, dtype) : at::mm_out(out, a, b, dtype);
  } else {
    add ? at::addmm_out(out, out, a.to(dtype), b.to(dtype))
        : at::mm_out(out, a.to(dtype), b.to(dtype));
  }
}

} // namespace xsoftmax
