#include "optim/row_adam.h"

#include "core/checks.h"
#include "core/dtypes.h"
#include "core/optional.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/pow.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

// 1 - beta^t, float64 [rows]
Tensor bias_correction(double beta, const Tensor& t) { return at::pow(at::Scalar(beta), t.to(at::kDouble)).neg().add(1); }

void row_adam_meta(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                   const Tensor& row_step, const OptionalTensor& last_decay, double, double, double, double, double) {
  check_row_adam(param, rows, values, exp_avg, exp_avg_sq, row_step, last_decay);
}

void row_decay_meta(const Tensor& param, const Tensor& last_decay, double) { check_row_decay(param, last_decay); }

} // namespace

void check_row_adam(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                    const Tensor& row_step, const OptionalTensor& last_decay) {
  constexpr const char* op = "row_adam_";
  check_row_gradient(op, param, rows, values);
  check_row_state(op, "exp_avg", exp_avg, param, true, opmath_dtype(param.scalar_type()));
  check_row_state(op, "exp_avg_sq", exp_avg_sq, param, true, opmath_dtype(param.scalar_type()));
  check_row_state(op, "row_step", row_step, param, false, at::kInt);
  check_last_decay(op, last_decay, param);
}

void check_row_decay(const Tensor& param, const Tensor& last_decay) {
  constexpr const char* op = "row_decay_";
  check::floating(op, "param", param);
  TORCH_CHECK_VALUE(param.dim() == 1 || param.dim() == 2, op, ": expected param with 1 or 2 dimensions, got shape ",
                    param.sym_sizes());
  check_last_decay(op, last_decay, param);
}

void row_adam_reference(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& exp_avg,
                        const Tensor& exp_avg_sq, const Tensor& row_step, const OptionalTensor& last_decay, double lr, double beta1,
                        double beta2, double eps, double decay) {
  check_row_adam(param, rows, values, exp_avg, exp_avg_sq, row_step, last_decay);
  const auto [ids, g] = touched_rows(rows, values);
  const Tensor t = row_step.index_select(0, ids).add(1);
  row_step.index_copy_(0, ids, t);
  const Tensor old_first = exp_avg.index_select(0, ids);
  const Tensor first = old_first + (g - old_first).mul(1 - beta1);
  const Tensor second = exp_avg_sq.index_select(0, ids).mul(beta2) + g.square().mul(1 - beta2);
  exp_avg.index_copy_(0, ids, first);
  exp_avg_sq.index_copy_(0, ids, second);
  const Tensor root = second.sqrt().div(per_row(bias_correction(beta2, t).sqrt(), g)).add(eps);
  const Tensor movement = first.div(root).mul(per_row(bias_correction(beta1, t).reciprocal().mul(lr), g));
  const Tensor old = param.index_select(0, ids).to(g.scalar_type()).mul(per_row(take_decay(ids, last_decay, decay), g));
  param.index_copy_(0, ids, (old - movement).to(param.scalar_type()));
}

void row_decay_reference(const Tensor& param, const Tensor& last_decay, double decay) {
  check_row_decay(param, last_decay);
  const auto dtype = opmath_dtype(param.scalar_type());
  const Tensor factor = last_decay.neg().add(decay).exp().to(dtype);
  param.copy_(param.to(dtype).mul(param.dim() == 2 ? factor.unsqueeze(1) : factor));
  last_decay.fill_(decay);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("row_adam_(Tensor(a!) param, Tensor rows, Tensor values, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) row_step, "
        "Tensor(e!)? last_decay=None, *, float lr, float beta1=0.9, float beta2=0.999, float eps=1e-8, float decay=0.) -> ()");
  m.def("row_decay_(Tensor(a!) param, Tensor(b!) last_decay, float decay) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("row_adam_", row_adam_reference);
  m.impl("row_decay_", row_decay_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("row_adam_", row_adam_meta);
  m.impl("row_decay_", row_decay_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, ADInplaceOrView, m) {
  m.impl("row_adam_", torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
  m.impl("row_decay_", torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
}

} // namespace xsoftmax
