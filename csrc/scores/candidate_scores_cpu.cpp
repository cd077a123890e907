#include "core/checks.h"
#include "core/dtypes.h"
#include "core/impl.h"
#include "core/optional.h"
#include "scores/candidate_scores.h"
#include "scores/gather_dot.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

struct Ids {
  Tensor pair_ids, shared; // contiguous, perhaps empty
  PairLayout pairs;
};

Ids checked_ids(const char* op, const Tensor& input, const Tensor& weight, const OptionalTensor& private_ids,
                const OptionalTensor& shared_ids) {
  const auto options = input.options().dtype(at::kLong);
  Ids ids;
  ids.pair_ids = given(private_ids) ? private_ids->contiguous() : at::empty({input.size(0), 0}, options);
  ids.shared = given(shared_ids) ? shared_ids->contiguous() : at::empty({0}, options);
  check::class_ids(op, "private_ids", ids.pair_ids, weight.size(0));
  check::class_ids(op, "shared_ids", ids.shared, weight.size(0));
  ids.pairs = {ids.pair_ids.const_data_ptr<int64_t>(), nullptr, ids.pair_ids.size(1), input.size(0)};
  return ids;
}

Tensor candidate_scores_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& private_ids,
                            const OptionalTensor& shared_ids, bool sparse_grad) {
  check_candidate_scores(input, weight, bias, private_ids, shared_ids);
  const Ids ids = checked_ids("candidate_scores", input, weight, private_ids, shared_ids);
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
    Tensor out = scores.narrow(1, width, shared);
    const Tensor rows = gather_rows_cpu(weight, ids.shared);
    if (given(bias)) {
      at::addmm_out(out, bias->index_select(0, ids.shared).to(dtype), query.to(dtype), rows.t());
    } else {
      at::mm_out(out, query.to(dtype), rows.t());
    }
  }
  return scores;
}

RowGradients candidate_scores_backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                           const OptionalTensor& private_ids, const OptionalTensor& shared_ids,
                                           std::array<bool, 3> output_mask, const OptionalTensor& scale) {
  check_candidate_scores_backward(grad, input, weight, private_ids, shared_ids, scale);
  const Ids ids = checked_ids("candidate_scores_backward", input, weight, private_ids, shared_ids);
  if (use_reference()) {
    return candidate_scores_backward_reference(grad, input, weight, private_ids, shared_ids, output_mask, scale);
  }
  const auto [want_input, want_weight, want_bias] = output_mask;
  const Tensor scores_grad = grad.contiguous(), query = input.contiguous();
  const Tensor factor = given(scale) ? scale->contiguous() : Tensor();
  const int64_t stride = grad.size(1);
  const Tensor shared_grad = scores_grad.narrow(1, ids.pairs.width, ids.shared.size(0));

  Tensor grad_input = input.new_empty({0, input.size(1)});
  if (want_input) {
    grad_input = ids.shared.size(0) > 0
        ? at::mm(shared_grad, gather_rows_cpu(weight, ids.shared))
        : at::zeros({input.size(0), input.size(1)}, scores_grad.options());
    add_pair_input_grad_cpu(grad_input, scores_grad, stride, weight, ids.pairs);
    grad_input = (factor.defined() ? grad_input.mul_(factor.unsqueeze(1)) : grad_input).to(input.scalar_type());
  }
  if (!want_weight && !want_bias) {
    return {grad_input, ids.pair_ids.new_empty({0}), input.new_empty({0, input.size(1)}), input.new_empty({0})};
  }
  // The scale goes to the smaller side of each product.
  Tensor shared_values, shared_bias;
  if (want_weight && ids.shared.size(0) > 0) {
    const Tensor wide = query.to(grad.scalar_type());
    // Of an ignored query, 0 times what is not finite would not be 0.
    const Tensor scaled = factor.defined() ? at::where(factor.eq(0).unsqueeze(1), 0.0, wide * factor.unsqueeze(1)) : wide;
    shared_values = at::mm(shared_grad.t(), scaled);
  }
  if (want_bias) {
    shared_bias = factor.defined() ? at::mv(shared_grad.t(), factor) : shared_grad.sum(0);
  }
  auto [rows, values, bias_values] =
      row_gradient_cpu(scores_grad, stride, factor, query, ids.pairs, ids.shared, shared_values, shared_bias, want_weight, want_bias);
  return {grad_input, rows, values, bias_values};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("candidate_scores", candidate_scores_cpu);
  m.impl("candidate_scores_backward", candidate_scores_backward_cpu);
}

} // namespace xsoftmax
