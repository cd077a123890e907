#include "op/cuda_launch.cuh"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/shape_checks.h"
#include "estimator/loss_operands.h"
#include "estimator/loss_shares.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

// Counts the targets that are not ignored and writes 1 / count for every query. One block.
template <typename T>
__global__ void mean_shares_kernel(T* shares, const int64_t* target, int64_t queries,
                                   int64_t ignore_index) {
  __shared__ double sums[kWarp];
  double counted = 0;
  for (int64_t q = threadIdx.x; q < queries; q += blockDim.x) {
    counted += target[q] != ignore_index ? 1 : 0;
  }
  const T share = T(1 / block_sum(counted, sums));
  for (int64_t q = threadIdx.x; q < queries; q += blockDim.x) {
    shares[q] = share;
  }
}

Tensor mean_shares_cuda(const Tensor& target, int64_t ignore_index, at::ScalarType dtype) {
  constexpr int64_t kMax = 1 << 16; // above, one block takes too long
  check_mean_shares(target, dtype);
  const int64_t queries = target.size(0);
  const c10::cuda::CUDAGuard guard(target.device());
  if (queries == 0 || queries > kMax || use_reference() ||
      (dtype != at::kFloat && dtype != at::kDouble)) {
    return mean_shares_reference(target, ignore_index, dtype);
  }
  const Tensor ids = target.contiguous(),
               shares = at::empty({queries}, target.options().dtype(dtype));
  AT_DISPATCH_FLOATING_TYPES(dtype, "mean_shares_cuda", [&] {
    mean_shares_kernel<scalar_t><<<1, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        shares.mutable_data_ptr<scalar_t>(), ids.const_data_ptr<int64_t>(), queries, ignore_index);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return shares;
}

template <typename T>
struct Scaling {
  using A = at::opmath_type<T>;
  struct Rows { // pointers are null if absent
    const A* from;
    A* to;
    int64_t width;
  };
  const A* grad;
  int64_t grad_stride;
  const int64_t* target;
  int64_t queries, ignore_index, features;
  Rows rows[2];
  const T* input; // null if not needed
  T* query;
};

// One warp per query.
template <typename T>
__global__ void scale_loss_gradients_kernel(const __grid_constant__ Scaling<T> s) {
  using A = at::opmath_type<T>;
  for (int64_t q = global_thread() / kWarp; q < s.queries; q += grid_threads() / kWarp) {
    const A factor = s.target[q] == s.ignore_index ? A(0) : s.grad[q * s.grad_stride];
    const bool is_zero = factor == A(0);
    for (const auto& rows : s.rows) {
      for (int64_t d = q * rows.width + lane(); rows.from != nullptr && d < (q + 1) * rows.width;
           d += kWarp) {
        rows.to[d] = is_zero ? A(0) : factor * rows.from[d];
      }
    }
    for (int64_t d = q * s.features + lane(); s.input != nullptr && d < (q + 1) * s.features;
         d += kWarp) {
      s.query[d] = is_zero ? T(0) : s.input[d];
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> scale_loss_gradients_cuda(
    const Tensor& grad, const Tensor& target, int64_t ignore_index, const Tensor& grad_input,
    const Tensor& grad_scores, const Tensor& input) {
  check_scale_loss_gradients(grad, target, grad_input, grad_scores, input);
  const c10::cuda::CUDAGuard guard(grad.device());
  const auto dtype = opmath_dtype(input.scalar_type());
  TORCH_CHECK_VALUE(grad_scores.scalar_type() == dtype,
                    "scale_loss_gradients: expected gradients of dtype ", dtype, " for input of ",
                    input.scalar_type(), ", got ", grad_scores.scalar_type());
  const Tensor loss_grad = grad.dim() == 0 || grad.stride(0) == 1 || grad._is_zerotensor()
      ? LossOperands::plain(grad, dtype)
      : grad.to(dtype);
  const Tensor ids = target.contiguous(), query = input.contiguous();
  const Tensor from[] = {grad_input.contiguous(), grad_scores.contiguous()};
  const Tensor to[] = {at::empty(from[0].sizes(), from[0].options()),
                       at::empty(from[1].sizes(), from[1].options())};
  const Tensor cleaned = at::empty(query.sizes(), query.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "scale_loss_gradients_cuda", [&] {
        using A = at::opmath_type<scalar_t>;
        Scaling<scalar_t> scaling{};
        scaling.grad = loss_grad.const_data_ptr<A>();
        scaling.grad_stride = loss_grad.dim() == 0 ? 0 : loss_grad.stride(0);
        scaling.target = ids.const_data_ptr<int64_t>();
        scaling.queries = ids.size(0);
        scaling.ignore_index = ignore_index;
        for (int i = 0; i < 2; ++i) {
          if (from[i].size(0) > 0) {
            scaling.rows[i] = {from[i].const_data_ptr<A>(), to[i].mutable_data_ptr<A>(),
                               from[i].size(1)};
          }
        }
        scaling.features = query.size(1);
        if (query.size(0) > 0) {
          scaling.input = query.const_data_ptr<scalar_t>();
          scaling.query = cleaned.mutable_data_ptr<scalar_t>();
        }
        if (scaling.queries > 0) {
          scale_loss_gradients_kernel<scalar_t>
              <<<grid_size(scaling.queries, kThreads / kWarp), kThreads, 0,
                 c10::cuda::getCurrentCUDAStream()>>>(scaling);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        }
      });
  return {to[0], to[1], cleaned};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("mean_shares", mean_shares_cuda);
  m.impl("scale_loss_gradients", scale_loss_gradients_cuda);
}

} // namespace xsoftmax
