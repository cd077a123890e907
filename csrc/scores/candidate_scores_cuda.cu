#include "core/cuda_launch.cuh"
#include "core/dtypes.h"
#include "core/impl.h"
#include "core/optional.h"
#include "scores/candidate_scores.h"
#include "scores/gather_dot.h"
#include "scores/gather_dot_cuda.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

struct Ids {
  CudaPairs pairs;
  Tensor shared; // contiguous, perhaps empty
};

Ids contiguous_ids(const Tensor& input, const OptionalTensor& private_ids, const OptionalTensor& shared_ids) {
  const auto options = input.options().dtype(at::kLong);
  return {{given(private_ids) ? private_ids->contiguous() : at::empty({input.size(0), 0}, options), Tensor(), input.size(0)},
          given(shared_ids) ? shared_ids->contiguous() : at::empty({0}, options)};
}

// out = a @ b in out's dtype, float32 for the 16-bit types: their products are exact in float32, so tensor cores lose nothing.
void product_out(Tensor out, const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == out.scalar_type()) {
    at::mm_out(out, a, b);
  } else {
    at::mm_out(out, a, b, out.scalar_type());
  }
}

// coefficients (float32 or float64) @ table, in coefficients' dtype. bfloat16 has the range of float32, so a coefficient rounds to it
// as the result does, and the product runs on tensor cores; float16 could flush small coefficients to zero.
Tensor weighted_sum(const Tensor& coefficients, const Tensor& table) {
  return table.scalar_type() == at::kBFloat16 ? at::mm(coefficients.to(at::kBFloat16), table, coefficients.scalar_type())
                                              : at::mm(coefficients, table.to(coefficients.scalar_type()));
}

Tensor candidate_scores_cuda(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& private_ids,
                             const OptionalTensor& shared_ids, bool sparse_grad) {
  check_candidate_scores(input, weight, bias, private_ids, shared_ids);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return candidate_scores_reference(input, weight, bias, private_ids, shared_ids, sparse_grad);
  }
  const Ids ids = contiguous_ids(input, private_ids, shared_ids);
  const int64_t width = ids.pairs.ids.size(1), shared = ids.shared.size(0);
  const Tensor query = input.contiguous(), table = with_unit_column_stride(weight);
  const Tensor scores = at::empty({input.size(0), width + shared}, input.options().dtype(opmath_dtype(input.scalar_type())));
  if (scores.numel() == 0) {
    return scores;
  }
  pair_scores_cuda(scores, width + shared, query, table, bias, ids.pairs);
  if (shared > 0) {
    Tensor out = scores.narrow(1, width, shared);
    product_out(out, query, table.index_select(0, ids.shared).t());
    if (given(bias)) {
      out.add_(bias->index_select(0, ids.shared));
    }
  }
  return scores;
}

RowGradients candidate_scores_backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                            const OptionalTensor& private_ids, const OptionalTensor& shared_ids,
                                            std::array<bool, 3> output_mask, const OptionalTensor& scale) {
  check_candidate_scores_backward(grad, input, weight, private_ids, shared_ids, scale);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return candidate_scores_backward_reference(grad, input, weight, private_ids, shared_ids, output_mask, scale);
  }
  const Ids ids = contiguous_ids(input, private_ids, shared_ids);
  const auto [want_input, want_weight, want_bias] = output_mask;
  // Of an ignored query, 0 times what is not finite would not be 0.
  const Tensor ignored = given(scale) ? scale->eq(0).unsqueeze(1) : Tensor();
  const Tensor scores_grad = given(scale) ? (grad * scale->unsqueeze(1)).masked_fill_(ignored, 0) : grad.contiguous();
  const Tensor query = input.contiguous(), table = with_unit_column_stride(weight);
  const int64_t stride = grad.size(1);
  const Tensor shared_grad = scores_grad.narrow(1, ids.pairs.ids.size(1), ids.shared.size(0));

  Tensor grad_input = input.new_empty({0, input.size(1)});
  if (want_input) {
    grad_input = ids.shared.size(0) > 0 ? weighted_sum(shared_grad, table.index_select(0, ids.shared))
                                        : at::zeros({input.size(0), input.size(1)}, scores_grad.options());
    add_pair_input_grad_cuda(grad_input, scores_grad, stride, table, ids.pairs);
    grad_input = grad_input.to(input.scalar_type());
  }
  if (!want_weight && !want_bias) {
    return {grad_input, ids.shared.new_empty({0}), input.new_empty({0, input.size(1)}), input.new_empty({0})};
  }
  Tensor shared_values;
  if (want_weight && ids.shared.size(0) > 0) {
    shared_values = weighted_sum(shared_grad.t(), given(scale) ? query.masked_fill(ignored, 0) : query);
  }
  const Tensor shared_bias = want_bias ? shared_grad.sum(0) : Tensor();
  auto [rows, values, bias_values] =
      row_gradient_cuda(scores_grad, stride, query, ids.pairs, ids.shared, shared_values, shared_bias, want_weight, want_bias);
  return {grad_input, rows, values, bias_values};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("candidate_scores", candidate_scores_cuda);
  m.impl("candidate_scores_backward", candidate_scores_backward_cuda);
}

} // namespace xsoftmax
