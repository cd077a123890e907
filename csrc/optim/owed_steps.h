#pragma once

#include "optim/owed_table.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace xsoftmax {

// What a row owes that had its last gradient in step s, and none in the steps s + 1 ... t. A dense optimizer would have decayed the row by a_i in each of them,
// and then moved it by rate_i r^(i-s) times a direction that its state after step s decides (momentum / sqrt(second moment), or the momentum buffer). So all
// rows with the same s owe the same numbers:
//
//     decay(s) = prod_{i=s+1..t} a_i                 movement(s) = sum_{i=s+1..t} rate_i r^(i-s) prod_{j=i+1..t} a_j
//
// Each is a look-up in a table over s, which a step brings up to date: movement(s) = a_t movement(s) + rate_t r^(t-s) for the s so near
// that r^(t-s) still counts in float64; an older movement only goes on decaying, and is multiplied by the quotient of cumulative decays when
// it is read. No sum is taken as a difference of prefix sums, so no digits are lost. A step costs min(t, 40 / log(1/r)) additions
// (380 for r = .9), a row a look-up.
//
// The table is a float64 tensor on the parameter's device, part of the optimizer's state: "owed". It starts at the step up to which the whole table was last
// made up (`settled`) and has room for N / 4 steps (1,024 to 262,144). A step that finds it full makes up all N rows first: 4 rows a step on
// average. Making up moves and decays the parameter's rows and leaves their state as it was after s, the step of their last gradient: so it
// changes nothing but rounding whether and when it is done. A row with s < settled owes what one with s = settled does, times r^(settled-s).
// The last number says whether rows of a 16-bit table are made up with stochastic rounding, as its last step was.

/// `owed` on the CPU.
class OwedSteps : private OwedTable {
 public:
  /// The numbers that rows owe by beside the rates: all steps in the table were taken under these. A step that changes them first brings the
  /// table and the state of all rows up to date.
  using Coefficients = std::array<double, 3>;

  /// State for a table of N rows, of which none owes a step.
  static at::Tensor make(int64_t num_rows, c10::Device device);
  static void check(const char* op, const at::Tensor& owed, const at::Tensor& param);

  /// View of the state `owed` after `step` steps; `ratio` is r.
  OwedSteps(const at::Tensor& owed, int64_t step, double ratio);
  static Coefficients coefficients(const at::Tensor& owed);
  /// Whether there is no room for another step: all rows must be made up first.
  static bool full(const at::Tensor& owed, int64_t step);
  /// Whether what is owed is made up with stochastic rounding.
  static bool rounds(const at::Tensor& owed);
  static void set_rounds(const at::Tensor& owed, bool rounds);
  static int64_t settled(const at::Tensor& owed) { return int64_t(owed.const_data_ptr<double>()[0]); }

  using OwedTable::step;
  bool empty() const { return count == 0; }
  using OwedTable::operator();
  /// The same for a tensor of steps, float64 on its device.
  std::pair<at::Tensor, at::Tensor> operator()(const at::Tensor& s) const;

  /// Adds step t = step() + 1, in which rows decay by exp(log_decay_of_step) and then move by `rate`.
  void add(double rate, double log_decay_of_step);
  /// All rows are made up to `step`.
  void settle(int64_t step, const Coefficients& coefficients);
  /// The same under the coefficients as they are, for `owed` and int64 [] `step` on any device.
  static void settle(const at::Tensor& owed, const at::Tensor& step);

 private:
  double* header_;
};

} // namespace xsoftmax
