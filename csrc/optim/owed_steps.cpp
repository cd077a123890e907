#include "optim/owed_steps.h"

#include "core/checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

// r^0 ... r^n at least; the last r's are kept.
const std::vector<double>& powers_of(double ratio, int64_t n) {
  static thread_local std::vector<double> powers;
  static thread_local double base = -1;
  if (base != ratio) {
    base = ratio;
    powers.assign(1, 1.0);
  }
  while (int64_t(powers.size()) <= n) {
    powers.push_back(powers.back() * ratio);
  }
  return powers;
}

} // namespace

Tensor OwedSteps::make(int64_t num_rows, c10::Device device) {
  const int64_t capacity = std::clamp<int64_t>(num_rows / 4, 1024, 262144);
  return at::zeros({OwedTable::kHeader + 2 * (capacity + 1) + 1}, at::TensorOptions(device).dtype(at::kDouble));
}

void OwedSteps::check(const char* op, const Tensor& owed, const Tensor& param) {
  check::dim(op, "owed", owed, 1);
  check::dtype(op, "owed", owed, at::kDouble);
  check::same_device(op, "owed", owed, "param", param);
  const bool fits = owed.is_meta() || (owed.is_contiguous() && owed.numel() >= OwedTable::kHeader + 4);
  TORCH_CHECK_VALUE(fits, op, ": expected owed as the contiguous tensor that the optimizer's state was made with, got shape ", owed.sym_sizes());
}

OwedSteps::Coefficients OwedSteps::coefficients(const Tensor& owed) {
  const double* header = owed.const_data_ptr<double>();
  return {header[1], header[2], header[3]};
}

bool OwedSteps::rounds(const Tensor& owed) {
  const double* const rounding = owed_rounding(owed.mutable_data_ptr<double>(), owed.numel());
  return rounding != nullptr && *rounding != 0;
}

void OwedSteps::set_rounds(const Tensor& owed, bool rounds) {
  if (double* const rounding = owed_rounding(owed.mutable_data_ptr<double>(), owed.numel()); rounding != nullptr) {
    *rounding = double(rounds);
  }
}

bool OwedSteps::full(const Tensor& owed, int64_t step) { return step - settled(owed) >= owed_capacity(owed.numel()); }

OwedSteps::OwedSteps(const Tensor& owed, int64_t step, double ratio)
    : OwedTable(owed_table(owed.mutable_data_ptr<double>(), owed_capacity(owed.numel()), step, ratio)), header_(owed.mutable_data_ptr<double>()) {
  TORCH_CHECK_VALUE(OwedTable::settled >= 0 && count >= 0 && count <= capacity, "expected an optimizer's state with ", capacity,
                    " steps owed at most, got step ", step, " and rows made up to step ", OwedTable::settled);
}

std::pair<Tensor, Tensor> OwedSteps::operator()(const Tensor& s) const {
  const Tensor steps = s.to(at::kCPU, at::kLong).contiguous();
  const Tensor moved = at::empty(s.sizes(), at::kDouble), decay = at::empty(s.sizes(), at::kDouble);
  for (int64_t i = 0; i < s.numel(); ++i) {
    const OwedDebt debt = (*this)(steps.const_data_ptr<int64_t>()[i]);
    moved.mutable_data_ptr<double>()[i] = debt.movement;
    decay.mutable_data_ptr<double>()[i] = debt.decay;
  }
  return {moved.to(s.device()), decay.to(s.device())};
}

void OwedSteps::add(double rate, double log_decay_of_step) {
  const double decay = std::exp(log_decay_of_step);
  const int64_t first = first_moved(), t = ++count;
  const double* powers = powers_of(ratio, t - first).data();
  for (int64_t i = first; i < t; ++i) {
    move(i, decay, rate, powers[t - i]);
  }
  movement[t] = 0;
  log_decay[t] = log_decay[t - 1] + log_decay_of_step;
}

void OwedSteps::settle(const Tensor& owed, const Tensor& step) {
  owed.select(0, 0).copy_(step);
  owed.select(0, OwedTable::kHeader).zero_(); // movement[0]
  owed.select(0, OwedTable::kHeader + owed_capacity(owed.numel()) + 1).zero_(); // log_decay[0]
}

void OwedSteps::settle(int64_t step, const Coefficients& coefficients) {
  header_[0] = double(step);
  std::copy(coefficients.begin(), coefficients.end(), header_ + 1);
  movement[0] = log_decay[0] = 0;
  OwedTable::settled = step;
  count = 0;
}

} // namespace xsoftmax
