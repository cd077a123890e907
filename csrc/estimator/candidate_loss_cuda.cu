#include "estimator/estimator_lanes.cuh"

#include "cpu/impl.h"
#include "estimator/candidate_loss.h"
#include "estimator/loss_operands.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

// One warp per row.
template <typename T>
__global__ void warp_rows_kernel(const __grid_constant__ LossRows<T> rows, RowLoss loss,
                                 int64_t queries, int64_t buffer_size) {
  extern __shared__ double shared[];
  const int64_t warps = blockDim.x / kWarp;
  T* buffer = reinterpret_cast<T*>(shared) + threadIdx.x / kWarp * buffer_size;
  const WarpLanes lanes;
  for (int64_t q = blockIdx.x * warps + threadIdx.x / kWarp; q < queries; q += gridDim.x * warps) {
    lanes.sync(); // other lanes may still read the buffer of the previous row
    run_query(lanes, loss, rows, q, buffer);
  }
}

// One block per row.
template <typename T>
__global__ void block_rows_kernel(const __grid_constant__ LossRows<T> rows, RowLoss loss,
                                  int64_t queries, int64_t buffer_size, T* scratch) {
  extern __shared__ double shared[];
  __shared__ double sums[kWarp];
  T* buffer =
      scratch == nullptr ? reinterpret_cast<T*>(shared) : scratch + blockIdx.x * buffer_size;
  const BlockLanes lanes{sums};
  for (int64_t q = blockIdx.x; q < queries; q += gridDim.x) {
    lanes.sync();
    run_query(lanes, loss, rows, q, buffer);
  }
}

template <typename T>
void launch(const EstimatorArguments& arguments, const LossRows<T>& rows, int64_t queries) {
  const RowLoss loss = *arguments.estimator.row_loss;
  constexpr int64_t kUnit = 16 / sizeof(T);
  const int64_t buffer_size = (rows.buffer_size(loss) + kUnit - 1) / kUnit * kUnit;
  const RowPlan plan(queries, rows.candidates(), buffer_size * int64_t(sizeof(T)), 0,
                     arguments.scores);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (plan.block) {
    block_rows_kernel<T><<<plan.grid, plan.threads(), plan.shared_bytes(), stream>>>(
        rows, loss, queries, buffer_size, plan.scratch_pointer<T>());
  } else {
    warp_rows_kernel<T><<<plan.grid, plan.threads(), plan.shared_bytes(), stream>>>(
        rows, loss, queries, buffer_size);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename T>
Tensor loss_cuda(const EstimatorArguments& arguments) {
  const LossOperands operands(arguments);
  const Tensor loss = at::empty({arguments.scores.size(0)}, arguments.scores.options());
  if (loss.numel() > 0) {
    auto rows = operands.rows<T>(arguments);
    rows.loss = loss.mutable_data_ptr<T>();
    launch(arguments, rows, loss.size(0));
  }
  return loss;
}

template <typename T>
Tensor loss_backward_cuda(const Tensor& grad, const EstimatorArguments& arguments) {
  const LossOperands operands(arguments);
  const Tensor grad_loss = grad.to(arguments.scores.scalar_type()).contiguous();
  const Tensor grad_scores = at::empty_like(operands.scores);
  if (grad_scores.numel() > 0) {
    auto rows = operands.rows<T>(arguments);
    rows.grad_loss = grad_loss.const_data_ptr<T>();
    rows.grad_scores = grad_scores.mutable_data_ptr<T>();
    launch(arguments, rows, grad_scores.size(0));
  }
  return grad_scores;
}

Tensor estimator_loss_cuda(const Tensor& scores, const Tensor& target,
                           const OptionalTensors& candidates, at::IntArrayRef distinct,
                           std::string_view options) {
  const EstimatorArguments arguments("candidate_loss", scores, target, candidates, distinct,
                                     options);
  const c10::cuda::CUDAGuard guard(scores.device());
  if (use_reference() || !arguments.estimator.has_kernels()) {
    return estimator_loss_reference(arguments);
  }
  return scores.scalar_type() == at::kDouble ? loss_cuda<double>(arguments)
                                             : loss_cuda<float>(arguments);
}

Tensor estimator_loss_backward_cuda(const Tensor& grad, const Tensor& scores, const Tensor& target,
                                    const OptionalTensors& candidates, at::IntArrayRef distinct,
                                    std::string_view options) {
  const EstimatorArguments arguments("candidate_loss", scores, target, candidates, distinct,
                                     options);
  check_estimator_loss_backward(grad, scores);
  const c10::cuda::CUDAGuard guard(scores.device());
  if (use_reference() || !arguments.estimator.has_kernels()) {
    return estimator_loss_backward_reference(grad, arguments);
  }
  return scores.scalar_type() == at::kDouble ? loss_backward_cuda<double>(grad, arguments)
                                             : loss_backward_cuda<float>(grad, arguments);
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("estimator_loss", estimator_loss_cuda);
  m.impl("estimator_loss_backward", estimator_loss_backward_cuda);
}

} // namespace xsoftmax
