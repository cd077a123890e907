#include "estimator/loss_shares.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> scale_any(const Tensor& grad, const Tensor& target,
                                             int64_t ignore_index, const Tensor& grad_input,
                                             const Tensor& grad_scores, const Tensor& input) {
  check_scale_loss_gradients(grad, target, grad_input, grad_scores, input);
  const Tensor factor = at::where(target.eq(ignore_index), 0.0, grad).unsqueeze(1),
               is_zero = factor.eq(0);
  const auto scaled = [&](const Tensor& rows) {
    return rows.sym_size(0) == 0 ? rows.clone()
                                 : (rows * factor.to(rows.scalar_type())).masked_fill(is_zero, 0);
  };
  return {scaled(grad_input), scaled(grad_scores),
          input.sym_size(0) == 0 ? input.clone() : input.masked_fill(is_zero, 0)};
}

} // namespace

void check_mean_shares(const Tensor& target, at::ScalarType dtype) {
  constexpr const char* op = "mean_shares";
  check::dim(op, "target", target, 1);
  check::int64(op, "target", target);
  TORCH_CHECK_TYPE(at::isFloatingType(dtype), op, ": expected a floating dtype, got number ",
                   int(dtype));
}

Tensor mean_shares_reference(const Tensor& target, int64_t ignore_index, at::ScalarType dtype) {
  check_mean_shares(target, dtype);
  return target.ne(ignore_index)
      .sum()
      .to(dtype)
      .reciprocal()
      .expand_symint({target.sym_size(0)})
      .contiguous();
}

void check_scale_loss_gradients(const Tensor& grad, const Tensor& target, const Tensor& grad_input,
                                const Tensor& grad_scores, const Tensor& input) {
  constexpr const char* op = "scale_loss_gradients";
  check::floating(op, "grad", grad);
  check::dim(op, "target", target, 1);
  check::int64(op, "target", target);
  check::same_device(op, "target", target, "grad", grad);
  if (grad.dim() != 0) {
    check::dim(op, "grad", grad, 1);
    check::size(op, "grad", grad, 0, target.sym_size(0), "the targets");
  }
  const auto rows = [&](const char* name, const Tensor& tensor) {
    check::dim(op, name, tensor, 2);
    check::floating(op, name, tensor);
    check::same_device(op, name, tensor, "grad", grad);
    if (tensor.sym_size(0) != 0) {
      check::size(op, name, tensor, 0, target.sym_size(0), "the targets");
    }
  };
  rows("grad_input", grad_input);
  rows("grad_scores", grad_scores);
  rows("input", input);
  check::same_dtype(op, "grad_scores", grad_scores, "grad_input", grad_input);
}

Tensor mean_shares(const Tensor& target, int64_t ignore_index, at::ScalarType dtype) {
  static const auto op = find_op<decltype(mean_shares_reference)>("xsoftmax::mean_shares");
  return op.call(target, ignore_index, dtype);
}

std::tuple<Tensor, Tensor, Tensor> scale_loss_gradients(const Tensor& grad, const Tensor& target,
                                                        int64_t ignore_index,
                                                        const Tensor& grad_input,
                                                        const Tensor& grad_scores,
                                                        const Tensor& input) {
  static const auto op = find_op<decltype(scale_any)>("xsoftmax::scale_loss_gradients");
  return op.call(grad, target, ignore_index, grad_input, grad_scores, input);
}

XSOFTMAX_OPERATORS(m) {
  m.def("mean_shares(Tensor target, int ignore_index, ScalarType dtype) -> Tensor");
  m.def(
      "scale_loss_gradients(Tensor grad, Tensor target, int ignore_index, Tensor grad_input, "
      "Tensor grad_scores, Tensor input) -> "
      "(Tensor grad_input, Tensor grad_scores, Tensor input)");
}
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("mean_shares", mean_shares_reference);
  m.impl("scale_loss_gradients", scale_any);
}
// Raises on a second derivative, because autograd does not know that the gradients depend on the
// input (table/scale_gradient.h).
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("scale_loss_gradients", torch::autograd::autogradNotImplementedFallback());
}

} // namespace xsoftmax
