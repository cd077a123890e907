#include "op/cuda_launch.cuh"
#include "table/cuda_rows.cuh"
#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "table/candidate_scores.h"
#include "table/gather_dot.h"
#include "table/gather_dot_cuda.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

struct Ids {
  CudaPairs pairs;
  Tensor shared; // contiguous, possibly empty
};

Ids contiguous_ids(const Tensor& input, int64_t num_classes, const OptionalTensor& private_ids,
                   const OptionalTensor& shared_ids) {
  const auto options = input.options().dtype(at::kLong);
  return {
      {is_defined(private_ids) ? private_ids->contiguous() : at::empty({input.size(0), 0}, options),
       Tensor(), input.size(0), num_classes},
      is_defined(shared_ids) ? shared_ids->contiguous() : at::empty({0}, options)};
}

// Fast matrix products read and write 16 bytes at a time, so the rows of their operands must be
// aligned to that.
bool has_aligned_rows(const Tensor& matrix) {
  return matrix.stride(1) == 1 &&
      cuda::aligned(matrix.const_data_ptr(), matrix.stride(0), matrix.element_size());
}

// Returns an uninitialised matrix with aligned rows.
Tensor aligned_matrix(int64_t rows, int64_t columns, const at::TensorOptions& options) {
  const int64_t pack = 16 / int64_t(options.dtype().itemsize());
  return at::empty({rows, (columns + pack - 1) / pack * pack}, options).narrow(1, 0, columns);
}

// Returns the matrix in a dtype, with aligned rows.
Tensor with_aligned_rows(const Tensor& matrix, at::ScalarType dtype) {
  return matrix.scalar_type() == dtype && has_aligned_rows(matrix)
      ? matrix
      : aligned_matrix(matrix.size(0), matrix.size(1), matrix.options().dtype(dtype)).copy_(matrix);
}

// Returns the gradients of shared scores (float32 or float64) as they are multiplied with rows of
// the table or with queries of `dtype`.
Tensor coefficients_of(const Tensor& gradients, at::ScalarType dtype) {
  return with_aligned_rows(gradients, rounds_coefficients(dtype) ? dtype : gradients.scalar_type());
}

Tensor candidate_scores_cuda(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& private_ids, const OptionalTensor& shared_ids,
                             std::optional<bool> sparse_grad) {
  check_candidate_scores(input, weight, bias, private_ids, shared_ids);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return candidate_scores_reference(input, weight, bias, private_ids, shared_ids, sparse_grad);
  }
  const Ids ids = contiguous_ids(input, weight.size(0), private_ids, shared_ids);
  const int64_t width = ids.pairs.ids.size(1), shared = ids.shared.size(0);
  const Tensor query = input.contiguous(), table = with_unit_column_stride(weight);
  const Tensor scores = at::empty({input.size(0), width + shared},
                                  input.options().dtype(opmath_dtype(input.scalar_type())));
  if (scores.numel() == 0) {
    return scores;
  }
  pair_scores_cuda(scores, width + shared, query, table, bias, ids.pairs);
  if (shared > 0) {
    Tensor out = scores.narrow(1, width, shared);
    const Tensor product =
        has_aligned_rows(out) ? out : aligned_matrix(input.size(0), shared, scores.options());
    product_out_cuda(product, query, table.index_select(0, ids.shared).t());
    if (is_defined(bias)) {
      at::add_out(out, product, bias->index_select(0, ids.shared));
    } else if (!product.is_same(out)) {
      out.copy_(product);
    }
  }
  return scores;
}

RowGradients candidate_scores_backward_cuda(const Tensor& grad, const Tensor& input,
                                            const Tensor& weight, const OptionalTensor& private_ids,
                                            const OptionalTensor& shared_ids,
                                            std::array<bool, 3> output_mask,
                                            const OptionalTensor& scale, bool dense) {
  check_candidate_scores_backward(grad, input, weight, private_ids, shared_ids, scale);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return candidate_scores_backward_reference(grad, input, weight, private_ids, shared_ids,
                                               output_mask, scale, dense);
  }
  const Ids ids = contiguous_ids(input, weight.size(0), private_ids, shared_ids);
  const auto [want_input, want_weight, want_bias] = output_mask;
  // A single factor multiplies the results, which are smaller than the gradients of the scores.
  const bool one_factor = is_defined(scale) && scale->dim() == 0;
  const Tensor scores_grad = with_unit_column_stride(grad),
               factor = is_defined(scale) ? scale->contiguous() : Tensor();
  const Tensor query = input.contiguous(), table = with_unit_column_stride(weight);
  const int64_t stride = scores_grad.stride(0);
  const Tensor shared_grad = scores_grad.narrow(1, ids.pairs.ids.size(1), ids.shared.size(0));

  Tensor grad_input = input.new_empty({0, input.size(1)});
  if (want_input) {
    const bool has_pairs = ids.pairs.total() > 0 || ids.shared.size(0) == 0;
    grad_input = has_pairs ? pair_input_grad_cuda(scores_grad, stride, table, ids.pairs)
                           : at::empty(input.sizes(), scores_grad.options());
    if (ids.shared.size(0) > 0) {
      product_out_cuda(grad_input, coefficients_of(shared_grad, table.scalar_type()),
                       table.index_select(0, ids.shared), /*add=*/has_pairs);
    }
    if (factor.defined()) {
      grad_input.mul_(one_factor ? factor : factor.unsqueeze(1));
    }
    grad_input = grad_input.to(input.scalar_type());
  }
  if (!want_weight && !want_bias) {
    return {grad_input, ids.shared.new_empty({0}), input.new_empty({0, input.size(1)}),
            input.new_empty({0})};
  }
  // Masked, because 0 * inf is NaN and ignored queries may hold anything.
  const bool by_query = factor.defined() && !one_factor;
  const auto of_counted = [&](const Tensor& rows) {
    return by_query ? rows.masked_fill(factor.eq(0).unsqueeze(1), 0) : rows;
  };
  Tensor shared_values, shared_bias;
  if (ids.shared.size(0) > 0) {
    const Tensor scaled = by_query ? of_counted(shared_grad * factor.unsqueeze(1)) : shared_grad;
    if (want_weight) {
      shared_values = at::empty({ids.shared.size(0), input.size(1)}, scores_grad.options());
      product_out_cuda(shared_values, coefficients_of(scaled, query.scalar_type()).t(),
                       of_counted(query));
    }
    shared_bias = want_bias ? scaled.sum(0) : shared_bias;
  }
  auto [rows, values, bias_values] =
      row_gradient_cuda(scores_grad, stride, factor, query, ids.pairs, ids.shared, shared_values,
                        shared_bias, {want_weight, want_bias});
  const RowGradients gradients{grad_input, rows, values, bias_values};
  return dense ? to_dense_rows(gradients, weight.size(0), output_mask) : gradients;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("candidate_scores", candidate_scores_cuda);
  m.impl("candidate_scores_backward", candidate_scores_backward_cuda);
}

} // namespace xsoftmax
