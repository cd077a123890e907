#include "op/checks.h"
#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "table/gather_dot.h"
#include "table/ragged_scores.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kPacked = -1; // scores are at the position of their pair

struct RaggedIds {
  Tensor ids, offsets; // contiguous
  PairLayout pairs;
};

RaggedIds checked_ids(const char* op, const Tensor& weight, const Tensor& ids,
                      const Tensor& offsets) {
  check::class_ids(op, "ids", ids, weight.size(0));
  check::offsets(op, "offsets", offsets, ids.size(0));
  RaggedIds result{ids.contiguous(), offsets.contiguous(), {}};
  result.pairs = {result.ids.const_data_ptr<int64_t>(), result.offsets.const_data_ptr<int64_t>(), 0,
                  offsets.size(0) - 1};
  return result;
}

Tensor ragged_scores_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         const Tensor& ids, const Tensor& offsets,
                         std::optional<bool> sparse_grad) {
  check_ragged_scores(input, weight, bias, ids, offsets);
  const RaggedIds checked = checked_ids("ragged_scores", weight, ids, offsets);
  if (use_reference()) {
    return ragged_scores_reference(input, weight, bias, ids, offsets, sparse_grad);
  }
  const Tensor scores =
      at::empty({ids.size(0)}, input.options().dtype(opmath_dtype(input.scalar_type())));
  pair_scores_cpu(scores, kPacked, input.contiguous(), weight, bias, checked.pairs);
  return scores;
}

RowGradients ragged_scores_backward_cpu(const Tensor& grad, const Tensor& input,
                                        const Tensor& weight, const Tensor& ids,
                                        const Tensor& offsets, std::array<bool, 3> output_mask) {
  check_ragged_scores_backward(grad, input, weight, ids, offsets);
  const RaggedIds checked = checked_ids("ragged_scores_backward", weight, ids, offsets);
  if (use_reference()) {
    return ragged_scores_backward_reference(grad, input, weight, ids, offsets, output_mask);
  }
  const auto [want_input, want_weight, want_bias] = output_mask;
  const Tensor scores_grad = grad.contiguous();
  Tensor grad_input = input.new_empty({0, input.size(1)});
  if (want_input) {
    grad_input = at::zeros({input.size(0), input.size(1)}, grad.options());
    add_pair_input_grad_cpu(grad_input, scores_grad, kPacked, weight, checked.pairs);
    grad_input = grad_input.to(input.scalar_type());
  }
  if (!want_weight && !want_bias) {
    return {grad_input, ids.new_empty({0}), input.new_empty({0, input.size(1)}),
            input.new_empty({0})};
  }
  const bool fewer = weight.size(0) < ids.size(0); // some ids occur more than once
  auto [rows, values, bias_values] = fewer
      ? compact_row_gradient_cpu(scores_grad, kPacked, Tensor(), input.contiguous(), checked.pairs,
                                 weight.size(0), want_weight, want_bias)
      : row_gradient_cpu(scores_grad, kPacked, Tensor(), input.contiguous(), checked.pairs,
                         ids.new_empty({0}), Tensor(), Tensor(), want_weight, want_bias);
  return {grad_input, rows, values, bias_values};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("ragged_scores", ragged_scores_cpu);
  m.impl("ragged_scores_backward", ragged_scores_backward_cpu);
}

} // namespace xsoftmax
