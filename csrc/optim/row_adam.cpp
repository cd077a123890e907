#include "optim/row_adam.h"

#include "core/bump_versions.h"
#include "core/checks.h"
#include "core/dtypes.h"
#include "core/optional.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kOp = "row_adam_";
constexpr const char* kFlush = "row_adam_flush_";

void row_adam_meta(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                   const Tensor& last_step, const OptionalTensor& last_decay, int64_t, double, double beta1, double beta2, double,
                   double) {
  check_row_adam(param, rows, values, exp_avg, exp_avg_sq, last_step, last_decay, beta1, beta2);
}

void row_adam_flush_meta(const Tensor& param, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& last_step,
                         const OptionalTensor& last_decay, int64_t, double, double beta1, double beta2, double, double) {
  check_row_adam_flush(param, exp_avg, exp_avg_sq, last_step, last_decay, beta1, beta2);
}

void check_moments(const char* op, const Tensor& param, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& last_step,
                   const OptionalTensor& last_decay, double beta1, double beta2) {
  check_row_state(op, "exp_avg", exp_avg, param, true, opmath_dtype(param.scalar_type()));
  check_row_state(op, "exp_avg_sq", exp_avg_sq, param, true, opmath_dtype(param.scalar_type()));
  check_row_state(op, "last_step", last_step, param, false, at::kInt);
  check_last_decay(op, last_decay, param);
  TORCH_CHECK_VALUE(beta1 >= 0 && beta2 >= 0 && beta2 < 1 && (beta1 == 0 || beta1 * beta1 < beta2), op,
                    ": expected betas in [0, 1) with beta1^2 < beta2, got ", beta1, " and ", beta2);
}

// m / (sqrt(v) + eps), 0 where a row has no moments.
Tensor over_root(const Tensor& first, const Tensor& root) { return at::where(root.eq(0), 0.0, first / root); }

void row_decay_meta(const Tensor& param, const Tensor& last_decay, double) { check_row_decay(param, last_decay); }

} // namespace

void check_row_adam(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                    const Tensor& last_step, const OptionalTensor& last_decay, double beta1, double beta2) {
  check_row_gradient(kOp, param, rows, values);
  check_moments(kOp, param, exp_avg, exp_avg_sq, last_step, last_decay, beta1, beta2);
}

void check_row_adam_flush(const Tensor& param, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& last_step,
                          const OptionalTensor& last_decay, double beta1, double beta2) {
  check::floating(kFlush, "param", param);
  TORCH_CHECK_VALUE(param.dim() == 1 || param.dim() == 2, kFlush, ": expected param with 1 or 2 dimensions, got shape ",
                    param.sym_sizes());
  check_moments(kFlush, param, exp_avg, exp_avg_sq, last_step, last_decay, beta1, beta2);
}

void check_row_decay(const Tensor& param, const Tensor& last_decay) {
  constexpr const char* op = "row_decay_";
  check::floating(op, "param", param);
  TORCH_CHECK_VALUE(param.dim() == 1 || param.dim() == 2, op, ": expected param with 1 or 2 dimensions, got shape ",
                    param.sym_sizes());
  check_last_decay(op, last_decay, param);
}

AdamMovementOwed::AdamMovementOwed(int64_t now, double beta1, double beta2)
    : now_(now), beta1_(beta1), beta2_(beta2), r_(beta1 == 0 ? 0.0 : beta1 / std::sqrt(beta2)) {
  if (r_ == 0) {
    return;
  }
  // owed(s) = r (correction(s + 1) + owed(s + 1)), from where it is 0 or too long ago to matter.
  const int64_t early = int64_t(20 / (1 - r_)), first = std::clamp<int64_t>(now, 0, early + int64_t(40 / (1 - r_)));
  early_.resize(std::min(early, first) + 1);
  std::vector<double> corrections(first); // of steps 1 ... first, by running products: powers would cost more than the rows
  double power1 = 1, power2 = 1;
  for (double& value : corrections) {
    power1 *= beta1_;
    power2 *= beta2_;
    value = std::sqrt(1 - power2) / (1 - power1);
  }
  double owed = 0;
  for (int64_t s = first - 1; s >= 0; --s) {
    owed = r_ * (corrections[s] + owed);
    if (s < int64_t(early_.size())) {
      early_[s] = owed;
    }
  }
}

double AdamMovementOwed::correction(double step) const { return std::sqrt(1 - std::pow(beta2_, step)) / (1 - std::pow(beta1_, step)); }

double AdamMovementOwed::operator()(int64_t s) const {
  const double n = double(now_ - s);
  if (r_ == 0 || s <= 0 || n <= 0) {
    return 0;
  }
  if (s < int64_t(early_.size())) {
    return early_[s];
  }
  const double last = std::pow(r_, n), sum = r_ * (1 - last) / (1 - r_);
  const double mean = r_ * (1 - (n + 1) * last + n * last * r_) / ((1 - r_) * (1 - r_)) / sum; // of i under the weights r^i
  return sum * correction(double(s) + mean);
}

Tensor AdamMovementOwed::operator()(const Tensor& s) const {
  if (r_ == 0) {
    return at::zeros(s.sizes(), s.options().dtype(at::kDouble));
  }
  const Tensor at = s.to(at::kDouble), n = at.neg().add(double(now_)).clamp_min(1), last = at::pow(at::Scalar(r_), n);
  const Tensor sum = (1 - last) * (r_ / (1 - r_));
  const Tensor mean = (1 - (n + 1) * last + n * last * r_) * (r_ / ((1 - r_) * (1 - r_))) / sum;
  const auto power = [&](double beta) { return 1 - at::pow(at::Scalar(beta), at + mean); };
  const Tensor late = sum * power(beta2_).sqrt() / power(beta1_);
  const Tensor table = at::tensor(early_, at::TensorOptions(at::kDouble)).to(s.device());
  const Tensor early = table.index_select(0, s.to(at::kLong).clamp(0, table.size(0) - 1));
  const Tensor owed = at::where(s.lt(table.size(0)), early, late);
  return at::where(s.le(0).logical_or(s.ge(now_)), 0.0, owed);
}

// What rows owe for the steps after s = last_step up to `now`; their moments are left as they were after step s.
static Tensor movement_owed(const Tensor& s, const Tensor& first, const Tensor& second, int64_t now, double lr, double beta1, double beta2,
                            double eps) {
  const Tensor scale = (1 - at::pow(at::Scalar(beta2), s.to(at::kDouble))).sqrt() * eps;
  return over_root(first, second.sqrt() + per_row(scale, first)) * per_row(AdamMovementOwed(now, beta1, beta2)(s) * lr, first);
}

void row_adam_reference(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& exp_avg,
                        const Tensor& exp_avg_sq, const Tensor& last_step, const OptionalTensor& last_decay, int64_t step, double lr,
                        double beta1, double beta2, double eps, double decay) {
  check_row_adam(param, rows, values, exp_avg, exp_avg_sq, last_step, last_decay, beta1, beta2);
  const auto [ids, g] = touched_rows(rows, values);
  const Tensor s = last_step.index_select(0, ids), count = s.neg().add(step).to(at::kDouble);
  last_step.index_fill_(0, ids, step);
  const Tensor old_first = exp_avg.index_select(0, ids), old_second = exp_avg_sq.index_select(0, ids);
  const Tensor owed = movement_owed(s, old_first, old_second, step - 1, lr, beta1, beta2, eps);
  const auto kept = [&, g = g](const Tensor& moment, double beta) { return moment * per_row(at::pow(at::Scalar(beta), count), g); };
  const Tensor first = kept(old_first, beta1) + g.mul(1 - beta1);
  const Tensor second = kept(old_second, beta2) + g.square().mul(1 - beta2);
  exp_avg.index_copy_(0, ids, first);
  exp_avg_sq.index_copy_(0, ids, second);
  const double scale = std::sqrt(1 - std::pow(beta2, double(step)));
  const Tensor movement = over_root(first, second.sqrt() / scale + eps) * (lr / (1 - std::pow(beta1, double(step))));
  const Tensor old = param.index_select(0, ids).to(g.scalar_type()).mul(per_row(take_decay(ids, last_decay, decay), g));
  param.index_copy_(0, ids, (old - owed - movement).to(param.scalar_type()));
}

void row_adam_flush_reference(const Tensor& param, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& last_step,
                              const OptionalTensor& last_decay, int64_t step, double lr, double beta1, double beta2, double eps,
                              double decay) {
  check_row_adam_flush(param, exp_avg, exp_avg_sq, last_step, last_decay, beta1, beta2);
  const Tensor ids = at::arange(param.size(0), last_step.options().dtype(at::kLong));
  const Tensor owed = movement_owed(last_step, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps);
  param.copy_(param.to(exp_avg.scalar_type()).mul(per_row(take_decay(ids, last_decay, decay), exp_avg)) - owed);
  const Tensor count = last_step.neg().add(step).to(at::kDouble);
  exp_avg.mul_(per_row(at::pow(at::Scalar(beta1), count), exp_avg));
  exp_avg_sq.mul_(per_row(at::pow(at::Scalar(beta2), count), exp_avg_sq));
  last_step.copy_(at::where(last_step.eq(0), last_step, step));
}

void row_decay_reference(const Tensor& param, const Tensor& last_decay, double decay) {
  check_row_decay(param, last_decay);
  const auto dtype = opmath_dtype(param.scalar_type());
  const Tensor factor = last_decay.neg().add(decay).exp().to(dtype);
  param.copy_(param.to(dtype).mul(param.dim() == 2 ? factor.unsqueeze(1) : factor));
  last_decay.fill_(decay);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("row_adam_(Tensor(a!) param, Tensor rows, Tensor values, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) last_step, "
        "Tensor(e!)? last_decay=None, *, int step, float lr, float beta1=0.9, float beta2=0.999, float eps=1e-8, float decay=0.) -> ()");
  m.def("row_adam_flush_(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) last_step, Tensor(e!)? last_decay=None, "
        "*, int step, float lr, float beta1=0.9, float beta2=0.999, float eps=1e-8, float decay=0.) -> ()");
  m.def("row_decay_(Tensor(a!) param, Tensor(b!) last_decay, float decay) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("row_adam_", row_adam_reference);
  m.impl("row_adam_flush_", row_adam_flush_reference);
  m.impl("row_decay_", row_decay_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("row_adam_", row_adam_meta);
  m.impl("row_adam_flush_", row_adam_flush_meta);
  m.impl("row_decay_", row_decay_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, ADInplaceOrView, m) {
  m.impl("row_adam_", torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
  m.impl("row_adam_flush_", torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
  m.impl("row_decay_", torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
}

} // namespace xsoftmax
