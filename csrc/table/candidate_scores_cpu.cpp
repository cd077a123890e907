#include "op/checks.h"
#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "cpu/memory.h"
#include "op/optional.h"
#include "cpu/products.h"
#include "table/candidate_scores.h"
#include "table/gather_dot.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mv.h>
#include <torch/library.h>

#include <algorithm>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kElementsPerTask = 32768;

struct CandidateIds {
  Tensor pair_ids, shared; // contiguous, possibly empty
  PairLayout pairs;
};

CandidateIds checked_ids(const char* op, const Tensor& input, const Tensor& weight,
                         const OptionalTensor& private_ids, const OptionalTensor& shared_ids) {
  const auto options = input.options().dtype(at::kLong);
  CandidateIds ids;
  ids.pair_ids =
      is_defined(private_ids) ? private_ids->contiguous() : at::empty({input.size(0), 0}, options);
  ids.shared = is_defined(shared_ids) ? shared_ids->contiguous() : at::empty({0}, options);
  check::class_ids(op, "private_ids", ids.pair_ids, weight.size(0));
  check::class_ids(op, "shared_ids", ids.shared, weight.size(0));
  ids.pairs = {ids.pair_ids.const_data_ptr<int64_t>(), nullptr, ids.pair_ids.size(1),
               input.size(0)};
  return ids;
}

// Returns factor[q] * query[q], 0 where the factor is 0 even if the query is not finite.
Tensor scaled_queries(const Tensor& query, const Tensor& factor) {
  const Tensor scaled = recycled_empty(query.sizes(), query.options());
  const int64_t width = query.size(1);
  dispatch_floating(query.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_floating_point_v<T>) { // queries are in opmath dtype
      const T* const from = const_data<T>(query);
      const T* const factors = const_data<T>(factor);
      T* const to = data<T>(scaled);
      at::parallel_for(0, query.size(0),
                       std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, width)),
                       [&](int64_t first, int64_t last) {
                         for (int64_t q = first; q < last; ++q) {
                           const T* const row = from + q * width;
                           if (factors[q] == 0) {
                             std::fill_n(to + q * width, width, T(0));
                           } else {
                             std::transform(row, row + width, to + q * width,
                                            [by = factors[q]](T x) { return x * by; });
                           }
                         }
                       });
    }
  });
  return scaled;
}

Tensor candidate_scores_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& private_ids, const OptionalTensor& shared_ids,
                            std::optional<bool> sparse_grad) {
  check_candidate_scores(input, weight, bias, private_ids, shared_ids);
  const CandidateIds ids = checked_ids("candidate_scores", input, weight, private_ids, shared_ids);
  if (use_reference()) {
    return candidate_scores_reference(input, weight, bias, private_ids, shared_ids, sparse_grad);
  }
  const auto dtype = opmath_dtype(input.scalar_type());
  const int64_t width = ids.pairs.width, shared = ids.shared.size(0);
  const Tensor query = input.contiguous();
  const Tensor scores = at::empty({input.size(0), width + shared}, input.options().dtype(dtype));
  if (width > 0) {
    pair_scores_cpu(scores, width + shared, query, weight, bias, ids.pairs);
  }
  if (shared > 0) {
    const Tensor out = strided_view(scores, {scores.size(0), shared}, {scores.size(1), 1}, width);
    const bool low = uses_bfloat16_operands(weight);
    const Tensor rows = gather_rows_cpu(weight, ids.shared, low);
    if (is_defined(bias)) {
      out.copy_(bias->index_select(0, ids.shared));
    }
    multiply(out, low ? query : query.to(dtype), transposed(rows),
             {.add = is_defined(bias), .bfloat16 = low});
  }
  return scores;
}

RowGradients candidate_scores_backward_cpu(const Tensor& grad, const Tensor& input,
                                           const Tensor& weight, const OptionalTensor& private_ids,
                                           const OptionalTensor& shared_ids,
                                           std::array<bool, 3> output_mask,
                                           const OptionalTensor& scale, bool dense) {
  check_candidate_scores_backward(grad, input, weight, private_ids, shared_ids, scale);
  const CandidateIds ids =
      checked_ids("candidate_scores_backward", input, weight, private_ids, shared_ids);
  if (use_reference()) {
    return candidate_scores_backward_reference(grad, input, weight, private_ids, shared_ids,
                                               output_mask, scale, dense);
  }
  if (is_defined(scale) && scale->dim() == 0) { // masked, because 0 * inf is NaN
    const Tensor scaled = (grad * *scale).masked_fill(grad.eq(0).logical_or(scale->eq(0)), 0);
    return candidate_scores_backward_cpu(
        scaled, input, weight, private_ids, shared_ids, output_mask,
        expand_to_queries(scale->ne(0).to(grad.scalar_type()), grad.size(0)), dense);
  }
  const auto [want_input, want_weight, want_bias] = output_mask;
  const Tensor scores_grad = grad.contiguous(), query = input.contiguous();
  const Tensor factor = is_defined(scale) ? scale->contiguous() : Tensor();
  const int64_t stride = grad.size(1);
  const Tensor shared_grad = strided_view(scores_grad, {scores_grad.size(0), ids.shared.size(0)},
                                          {stride, 1}, ids.pairs.width);
  const bool low = uses_bfloat16_operands(weight);

  Tensor grad_input = want_input ? at::empty({input.size(0), input.size(1)}, scores_grad.options())
                                 : at::empty({0, input.size(1)}, input.options());
  if (want_input) {
    multiply(grad_input, shared_grad, gather_rows_cpu(weight, ids.shared, low), {.bfloat16 = low});
    add_pair_input_grad_cpu(grad_input, scores_grad, stride, weight, ids.pairs);
    grad_input = (factor.defined() ? grad_input.mul_(factor.unsqueeze(1)) : grad_input)
                     .to(input.scalar_type());
  }
  if (!want_weight && !want_bias) {
    return {grad_input, ids.pair_ids.new_empty({0}), input.new_empty({0, input.size(1)}),
            input.new_empty({0})};
  }
  // The scale multiplies the smaller operand of each product.
  Tensor shared_values, shared_bias;
  if (want_weight && ids.shared.size(0) > 0) {
    const bool keeps_dtype =
        query.scalar_type() == grad.scalar_type() || (low && !factor.defined());
    const Tensor wide = keeps_dtype ? query : query.to(grad.scalar_type());
    shared_values = recycled_empty({ids.shared.size(0), input.size(1)}, scores_grad.options());
    multiply(shared_values, transposed(shared_grad),
             factor.defined() ? scaled_queries(wide, factor) : wide, {.bfloat16 = low});
  }
  if (want_bias) {
    shared_bias = factor.defined() ? at::mv(transposed(shared_grad), factor) : shared_grad.sum(0);
  }
  if (dense) {
    auto [values, bias_values] =
        table_gradient_cpu(scores_grad, stride, factor, query, ids.pairs, ids.shared, shared_values,
                           shared_bias, weight.size(0), want_weight, want_bias);
    return {grad_input, ids.pair_ids.new_empty({0}), values, bias_values};
  }
  auto [rows, values, bias_values] =
      row_gradient_cpu(scores_grad, stride, factor, query, ids.pairs, ids.shared, shared_values,
                       shared_bias, want_weight, want_bias);
  return {grad_input, rows, values, bias_values};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("candidate_scores", candidate_scores_cpu);
  m.impl("candidate_scores_backward", candidate_scores_backward_cpu);
}

} // namespace xsoftmax
