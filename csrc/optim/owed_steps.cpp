#include "optim/owed_steps.h"

#include "core/checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kHeader = 4; // settled, and the coefficients

int64_t capacity_of(const Tensor& owed) { return (owed.numel() - kHeader) / 2 - 1; }

// Past this many steps r^k is below 4e-18 of the first.
int64_t window_of(double ratio) {
  if (ratio == 0) {
    return 0;
  }
  return ratio < 1 ? int64_t(std::ceil(-40 / std::log(ratio))) : std::numeric_limits<int32_t>::max();
}

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
  return at::zeros({kHeader + 2 * (capacity + 1)}, at::TensorOptions(device).dtype(at::kDouble));
}

void OwedSteps::check(const char* op, const Tensor& owed) {
  check::dim(op, "owed", owed, 1);
  check::dtype(op, "owed", owed, at::kDouble);
  const bool fits = owed.is_meta() || (owed.is_cpu() && owed.is_contiguous() && owed.numel() >= kHeader + 4 && owed.numel() % 2 == 0);
  TORCH_CHECK_VALUE(fits, op,
                    ": expected owed as the contiguous CPU tensor that the optimizer's state was made with, got shape ",
                    owed.sym_sizes(), " on ", owed.device());
}

OwedSteps::Coefficients OwedSteps::coefficients(const Tensor& owed) {
  const double* header = owed.const_data_ptr<double>();
  return {header[1], header[2], header[3]};
}

bool OwedSteps::full(const Tensor& owed, int64_t step) { return step - settled(owed) >= capacity_of(owed); }

OwedSteps::OwedSteps(const Tensor& owed, int64_t step, double ratio)
    : header_(owed.mutable_data_ptr<double>()),
      movement_(header_ + kHeader),
      settled_(settled(owed)),
      count_(step - settled_),
      capacity_(capacity_of(owed)),
      window_(window_of(ratio)),
      ratio_(ratio) {
  log_decay_ = movement_ + capacity_ + 1;
  TORCH_CHECK_VALUE(settled_ >= 0 && count_ >= 0 && count_ <= capacity_, "expected an optimizer's state with ", capacity_,
                    " steps owed at most, got step ", step, " and rows made up to step ", settled_);
}

std::pair<Tensor, Tensor> OwedSteps::operator()(const Tensor& s) const {
  const Tensor steps = s.to(at::kCPU, at::kLong).contiguous();
  Tensor movement = at::empty(s.sizes(), at::kDouble), decay = at::empty(s.sizes(), at::kDouble);
  for (int64_t i = 0; i < s.numel(); ++i) {
    const Debt debt = (*this)(steps.const_data_ptr<int64_t>()[i]);
    movement.mutable_data_ptr<double>()[i] = debt.movement;
    decay.mutable_data_ptr<double>()[i] = debt.decay;
  }
  return {movement.to(s.device()), decay.to(s.device())};
}

void OwedSteps::add(double rate, double log_decay) {
  const double decay = std::exp(log_decay);
  const int64_t t = ++count_, first = std::max<int64_t>(0, t - window_);
  const double* powers = powers_of(ratio_, t - first).data();
  for (int64_t i = first; i < t; ++i) {
    movement_[i] = movement_[i] * decay + rate * powers[t - i];
  }
  movement_[t] = 0;
  log_decay_[t] = log_decay_[t - 1] + log_decay;
}

void OwedSteps::settle(int64_t step, const Coefficients& coefficients) {
  header_[0] = double(step);
  std::copy(coefficients.begin(), coefficients.end(), header_ + 1);
  movement_[0] = log_decay_[0] = 0;
  settled_ = step;
  count_ = 0;
}

} // namespace xsoftmax
