#include "op/cuda_launch.cuh"
#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "table/gather_dot.h"
#include "table/gather_dot_cuda.h"
#include "table/ragged_scores.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kPacked = -1; // scores are at the position of their pair

Tensor ragged_scores_cuda(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const Tensor& ids, const Tensor& offsets,
                          std::optional<bool> sparse_grad) {
  check_ragged_scores(input, weight, bias, ids, offsets);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return ragged_scores_reference(input, weight, bias, ids, offsets, sparse_grad);
  }
  const CudaPairs pairs{ids.contiguous(), offsets.contiguous(), input.size(0), weight.size(0)};
  const Tensor scores =
      at::empty({ids.size(0)}, input.options().dtype(opmath_dtype(input.scalar_type())));
  pair_scores_cuda(scores, kPacked, input.contiguous(), with_unit_column_stride(weight), bias,
                   pairs);
  return scores;
}

RowGradients ragged_scores_backward_cuda(const Tensor& grad, const Tensor& input,
                                         const Tensor& weight, const Tensor& ids,
                                         const Tensor& offsets, std::array<bool, 3> output_mask) {
  check_ragged_scores_backward(grad, input, weight, ids, offsets);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return ragged_scores_backward_reference(grad, input, weight, ids, offsets, output_mask);
  }
  const CudaPairs pairs{ids.contiguous(), offsets.contiguous(), input.size(0), weight.size(0)};
  const auto [want_input, want_weight, want_bias] = output_mask;
  const Tensor scores_grad = grad.contiguous();
  Tensor grad_input = input.new_empty({0, input.size(1)});
  if (want_input) {
    grad_input = pair_input_grad_cuda(scores_grad, kPacked, with_unit_column_stride(weight), pairs)
                     .to(input.scalar_type());
  }
  if (!want_weight && !want_bias) {
    return {grad_input, ids.new_empty({0}), input.new_empty({0, input.size(1)}),
            input.new_empty({0})};
  }
  const bool fewer = weight.size(0) < ids.size(0); // some ids occur more than once
  const std::array<bool, 2> wanted = {want_weight, want_bias};
  auto [rows, values, bias_values] = fewer
      ? compact_row_gradient_cuda(scores_grad, kPacked, input.contiguous(), pairs, weight.size(0),
                                  wanted)
      : row_gradient_cuda(scores_grad, kPacked, Tensor(), input.contiguous(), pairs,
                          ids.new_empty({0}), Tensor(), Tensor(), wanted);
  return {grad_input, rows, values, bias_values};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("ragged_scores", ragged_scores_cuda);
  m.impl("ragged_scores_backward", ragged_scores_backward_cuda);
}

} // namespace xsoftmax
