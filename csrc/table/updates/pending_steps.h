#pragma once

#include "table/updates/pending_table.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace xsoftmax {

// The pending updates of a row: its last gradient was in step s, and it had none in steps s + 1 ...
// t. A dense optimizer would, in each step i of these, have multiplied the row by a_i and then
// moved it by rate_i r^(i-s) times a direction. The direction depends only on the optimizer's state
// after step s (momentum / sqrt(second moment), or the momentum buffer). So all rows with the same
// s need the same two numbers:
//
//     decay(s)    = prod_{i=s+1..t} a_i
//     movement(s) = sum_{i=s+1..t} rate_i r^(i-s) prod_{j=i+1..t} a_j
//
// Both are looked up in a table over s, which each step updates: movement(s) = a_t movement(s) +
// rate_t r^(t-s) for every s so recent that r^(t-s) still matters in float64. An older movement
// only decays, so it is multiplied by a quotient of cumulative decays when it is read. No sum is
// computed as a difference of prefix sums, so no digits are lost. A step costs min(t, 40 /
// log(1/r)) additions (380 for r = .9); a row costs one look-up.
//
// The table is a float64 tensor on the parameter's device, and the last tensor of the optimizer's
// state ("pending"). It starts at the step of the last flush of the whole table (`caught_up`) and
// has room for N / 4 steps, but at least 1,024 and at most 262,144. A step that finds it full
// flushes all N rows first: 4 rows per step on average.
//
// A flush moves and decays the rows of the parameter but leaves their optimizer state as it was
// after s, the step of their last gradient. So whether and when it happens changes nothing but
// rounding. A row with s < caught_up has the pending updates of s = caught_up, with the movement
// multiplied by r^(caught_up-s). The last element of the tensor is nonzero if pending updates of a
// 16-bit table are applied with stochastic rounding, like its last step.

/// Host view of a state tensor "pending" on the CPU.
class PendingSteps : private PendingTable {
 public:
  /// The coefficients, other than the rates, on which pending updates depend. They are the same for
  /// all steps in the table: a step that changes them first flushes all rows and rebases their
  /// state.
  using Coefficients = std::array<double, 3>;

  /// Returns the state for a table of N rows without pending updates.
  static at::Tensor make(int64_t num_rows, c10::Device device);
  static void check(const char* op, const at::Tensor& pending, const at::Tensor& param);

  /// View of the state tensor after `step` steps; `ratio` is r.
  PendingSteps(const at::Tensor& pending, int64_t step, double ratio);
  static Coefficients coefficients(const at::Tensor& pending);
  /// Returns whether there is no room for another step, so that all rows must be flushed first.
  static bool is_full(const at::Tensor& pending, int64_t step);
  /// Returns whether pending updates are applied with stochastic rounding.
  static bool rounds(const at::Tensor& pending);
  static void set_rounds(const at::Tensor& pending, bool rounds);
  static int64_t caught_up(const at::Tensor& pending) {
    return int64_t(pending.const_data_ptr<double>()[0]);
  }

  using PendingTable::step;
  bool empty() const { return count == 0; }
  using PendingTable::operator();
  /// Returns (movement, decay) for a tensor of steps, as float64 on its device.
  std::pair<at::Tensor, at::Tensor> operator()(const at::Tensor& s) const;

  /// Adds step t = step() + 1, in which rows are multiplied by exp(log_decay_of_step) and then move
  /// by `rate`.
  void add(double rate, double log_decay_of_step);
  /// Marks all rows as caught up to `step`.
  void clear(int64_t step, const Coefficients& coefficients);
  /// Does the same without changing the coefficients, for a state tensor and int64 [] `step` on any
  /// device.
  static void clear(const at::Tensor& pending, const at::Tensor& step);

 private:
  double* header_;
};

} // namespace xsoftmax
