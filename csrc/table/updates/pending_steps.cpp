#include "table/updates/pending_steps.h"

#include "op/checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

// Returns r^0 ... r^n or more, cached for the last r of this thread.
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

Tensor PendingSteps::make(int64_t num_rows, c10::Device device) {
  const int64_t capacity = std::clamp<int64_t>(num_rows / 4, 1024, 262144);
  return at::zeros({PendingTable::kHeader + 2 * (capacity + 1) + 1},
                   at::TensorOptions(device).dtype(at::kDouble));
}

void PendingSteps::check(const char* op, const Tensor& pending, const Tensor& param) {
  check::dim(op, "pending", pending, 1);
  check::dtype(op, "pending", pending, at::kDouble);
  check::same_device(op, "pending", pending, "param", param);
  const bool fits = pending.is_meta() ||
      (pending.is_contiguous() && pending.numel() >= PendingTable::kHeader + 4);
  TORCH_CHECK_VALUE(fits, op,
                    ": expected pending as the contiguous tensor that the optimizer's state was "
                    "made with, got shape ",
                    pending.sym_sizes());
}

PendingSteps::Coefficients PendingSteps::coefficients(const Tensor& pending) {
  const double* header = pending.const_data_ptr<double>();
  return {header[1], header[2], header[3]};
}

bool PendingSteps::rounds(const Tensor& pending) {
  const double* const rounding =
      pending_rounding(pending.mutable_data_ptr<double>(), pending.numel());
  return rounding != nullptr && *rounding != 0;
}

void PendingSteps::set_rounds(const Tensor& pending, bool rounds) {
  if (double* const rounding =
          pending_rounding(pending.mutable_data_ptr<double>(), pending.numel());
      rounding != nullptr) {
    *rounding = double(rounds);
  }
}

bool PendingSteps::is_full(const Tensor& pending, int64_t step) {
  return step - caught_up(pending) >= pending_capacity(pending.numel());
}

PendingSteps::PendingSteps(const Tensor& pending, int64_t step, double ratio)
    : PendingTable(pending_table(pending.mutable_data_ptr<double>(),
                                 pending_capacity(pending.numel()), step, ratio)),
      header_(pending.mutable_data_ptr<double>()) {
  TORCH_CHECK_VALUE(PendingTable::caught_up >= 0 && count >= 0 && count <= capacity,
                    "expected an optimizer's state with at most ", capacity,
                    " pending steps, got step ", step, " and rows caught up to step ",
                    PendingTable::caught_up);
}

std::pair<Tensor, Tensor> PendingSteps::operator()(const Tensor& s) const {
  const Tensor steps = s.to(at::kCPU, at::kLong).contiguous();
  const Tensor moved = at::empty(s.sizes(), at::kDouble), decay = at::empty(s.sizes(), at::kDouble);
  for (int64_t i = 0; i < s.numel(); ++i) {
    const PendingEntry pending = (*this)(steps.const_data_ptr<int64_t>()[i]);
    moved.mutable_data_ptr<double>()[i] = pending.movement;
    decay.mutable_data_ptr<double>()[i] = pending.decay;
  }
  return {moved.to(s.device()), decay.to(s.device())};
}

void PendingSteps::add(double rate, double log_decay_of_step) {
  const double decay = std::exp(log_decay_of_step);
  const int64_t first = first_moved(), t = ++count;
  const double* powers = powers_of(ratio, t - first).data();
  for (int64_t i = first; i < t; ++i) {
    move(i, decay, rate, powers[t - i]);
  }
  movement[t] = 0;
  log_decay[t] = log_decay[t - 1] + log_decay_of_step;
}

void PendingSteps::clear(const Tensor& pending, const Tensor& step) {
  pending.select(0, 0).copy_(step);
  pending.select(0, PendingTable::kHeader).zero_(); // movement[0]
  pending.select(0, PendingTable::kHeader + pending_capacity(pending.numel()) + 1)
      .zero_(); // log_decay[0]
}

void PendingSteps::clear(int64_t step, const Coefficients& coefficients) {
  header_[0] = double(step);
  std::copy(coefficients.begin(), coefficients.end(), header_ + 1);
  movement[0] = log_decay[0] = 0;
  PendingTable::caught_up = step;
  count = 0;
}

} // namespace xsoftmax
