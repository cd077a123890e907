#include "optim/row_sgd.h"

#include "core/bump_versions.h"
#include "core/checks.h"
#include "core/dtypes.h"
#include "core/optional.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kOp = "row_sgd_";
constexpr const char* kFlush = "row_sgd_flush_";

void check_momentum(const char* op, const Tensor& param, const Tensor& momentum_buffer, const Tensor& last_step) {
  check_row_state(op, "momentum_buffer", momentum_buffer, param, true, opmath_dtype(param.scalar_type()));
  check_row_state(op, "last_step", last_step, param, false, at::kInt);
}

struct OwedRows {
  Tensor movement, keep; // float64 [rows], as OwedMomentum's
};

// The same sums as OwedMomentum's, a row an element.
OwedRows owed_rows(const Tensor& k, const Tensor& a, double momentum, bool nesterov) {
  if (momentum == 0) {
    return {at::zeros_like(a), k.eq(0).to(at::kDouble)};
  }
  const Tensor log_ratio = a.reciprocal().mul(momentum).log();
  const Tensor ratio_sum = at::where(log_ratio.eq(0), k, k.mul(log_ratio).expm1().div(log_ratio.expm1()));
  const Tensor movement = a.pow(k - 1).mul(ratio_sum).mul(nesterov ? momentum * momentum : momentum);
  return {movement, at::full_like(k, momentum).pow(k)};
}

void row_sgd_meta(const Tensor& param, const Tensor& rows, const Tensor& values, const OptionalTensor& momentum_buffer,
                  const OptionalTensor& last_step, const OptionalTensor& last_decay, int64_t, double, double, double, bool, bool,
                  double) {
  check_row_sgd(param, rows, values, momentum_buffer, last_step, last_decay);
}

void row_sgd_flush_meta(const Tensor& param, const Tensor& momentum_buffer, const Tensor& last_step,
                        const OptionalTensor& last_decay, int64_t, double, double, bool, double) {
  check_row_sgd_flush(param, momentum_buffer, last_step, last_decay);
}

} // namespace

void check_row_sgd(const Tensor& param, const Tensor& rows, const Tensor& values, const OptionalTensor& momentum_buffer,
                   const OptionalTensor& last_step, const OptionalTensor& last_decay) {
  check_row_gradient(kOp, param, rows, values);
  TORCH_CHECK_VALUE(given(momentum_buffer) == given(last_step), kOp, ": expected momentum_buffer and last_step or neither, got ",
                    given(last_step) ? "last_step" : "momentum_buffer", " only");
  if (given(momentum_buffer)) {
    check_momentum(kOp, param, *momentum_buffer, *last_step);
  }
  check_last_decay(kOp, last_decay, param);
}

void check_row_sgd_flush(const Tensor& param, const Tensor& momentum_buffer, const Tensor& last_step,
                         const OptionalTensor& last_decay) {
  check::floating(kFlush, "param", param);
  TORCH_CHECK_VALUE(param.dim() == 1 || param.dim() == 2, kFlush, ": expected param with 1 or 2 dimensions, got shape ",
                    param.sym_sizes());
  check_momentum(kFlush, param, momentum_buffer, last_step);
  check_last_decay(kFlush, last_decay, param);
}

void row_sgd_reference(const Tensor& param, const Tensor& rows, const Tensor& values, const OptionalTensor& momentum_buffer,
                       const OptionalTensor& last_step, const OptionalTensor& last_decay, int64_t step, double lr, double momentum,
                       double dampening, bool nesterov, bool maximize, double decay) {
  check_row_sgd(param, rows, values, momentum_buffer, last_step, last_decay);
  auto [ids, g] = touched_rows(rows, values);
  if (maximize) {
    g = g.neg();
  }
  const Tensor factor = take_decay(ids, last_decay, decay);
  Tensor next = param.index_select(0, ids).to(g.scalar_type()).mul(per_row(factor, g));
  if (given(momentum_buffer)) {
    const Tensor count = last_step->index_select(0, ids).neg().add(step).to(at::kDouble);
    const Tensor a = factor.log().div(count).exp();
    const OwedRows owed = owed_rows(count - 1, a, momentum, nesterov);
    Tensor buffer = momentum_buffer->index_select(0, ids);
    next = next - per_row(owed.movement.mul(a).mul(lr), g).mul(buffer);
    buffer = per_row(owed.keep.mul(momentum), g).mul(buffer) + g.mul(1 - dampening);
    momentum_buffer->index_copy_(0, ids, buffer);
    last_step->index_fill_(0, ids, step);
    g = nesterov ? g + buffer.mul(momentum) : buffer;
  }
  param.index_copy_(0, ids, (next - g.mul(lr)).to(param.scalar_type()));
}

void row_sgd_flush_reference(const Tensor& param, const Tensor& momentum_buffer, const Tensor& last_step,
                             const OptionalTensor& last_decay, int64_t step, double lr, double momentum, bool nesterov,
                             double decay) {
  check_row_sgd_flush(param, momentum_buffer, last_step, last_decay);
  const Tensor ids = at::arange(param.size(0), last_step.options().dtype(at::kLong));
  const Tensor factor = take_decay(ids, last_decay, decay);
  const Tensor count = last_step.neg().add(step).to(at::kDouble);
  const Tensor a = factor.log().div(count.clamp_min(1)).exp();
  const OwedRows owed = owed_rows(count, a, momentum, nesterov);
  const Tensor next = param.to(momentum_buffer.scalar_type()).mul(per_row(factor, momentum_buffer)) -
      per_row(owed.movement.mul(lr), momentum_buffer).mul(momentum_buffer);
  param.copy_(next);
  momentum_buffer.mul_(per_row(owed.keep, momentum_buffer));
  last_step.fill_(step);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("row_sgd_(Tensor(a!) param, Tensor rows, Tensor values, Tensor(b!)? momentum_buffer=None, Tensor(c!)? last_step=None, "
        "Tensor(d!)? last_decay=None, *, int step=1, float lr, float momentum=0., float dampening=0., bool nesterov=False, "
        "bool maximize=False, float decay=0.) -> ()");
  m.def("row_sgd_flush_(Tensor(a!) param, Tensor(b!) momentum_buffer, Tensor(c!) last_step, Tensor(d!)? last_decay=None, *, "
        "int step, float lr, float momentum, bool nesterov=False, float decay=0.) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("row_sgd_", row_sgd_reference);
  m.impl("row_sgd_flush_", row_sgd_flush_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("row_sgd_", row_sgd_meta);
  m.impl("row_sgd_flush_", row_sgd_flush_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, ADInplaceOrView, m) {
  m.impl("row_sgd_", torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
  m.impl("row_sgd_flush_", torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
}

} // namespace xsoftmax
