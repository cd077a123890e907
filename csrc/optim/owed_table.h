#pragma once

#include "core/philox.h"

#include <cmath>
#include <cstdint>

// The table of optim/owed_steps.h as one row reads it: inline functions for host and CUDA code.

namespace xsoftmax {

/// What a row owes: it is multiplied by `decay`, and moves by `movement` in units of its direction.
struct OwedDebt { double movement, decay; };

/// base^n to n ulp at most, n >= 0: a multiplication for each bit of n. On a GPU std::pow takes ten times as long.
XS_HOST_DEVICE inline double integer_power(double base, int64_t n) {
  double power = 1;
  for (; n > 0; n >>= 1) {
    power = (n & 1) != 0 ? power * base : power;
    base *= base;
  }
  return power;
}

struct OwedTable {
  static constexpr int64_t kHeader = 4; ///< numbers before the table: `settled`, and the coefficients

  double *movement, *log_decay; ///< by step - settled
  int64_t settled, count, capacity, window;
  double ratio;

  /// The last step of the table.
  XS_HOST_DEVICE int64_t step() const { return settled + count; }

  /// Of a row whose last gradient was in step s (0: it had none).
  XS_HOST_DEVICE OwedDebt operator()(int64_t s) const {
    const int64_t after = s > settled ? s - settled : 0, i = after < count ? after : count, last = i + window;
    const double decay = log_decay[count] - log_decay[i];
    const double late = last < count ? log_decay[count] - log_decay[last] : 0;
    double moved = s == 0 ? 0 : movement[i];
    if (late != 0) {
      moved *= std::exp(late);
    }
    if (s < settled && moved != 0) {
      moved *= integer_power(ratio, settled - s);
    }
    return {moved, decay == 0 ? 1 : std::exp(decay)};
  }

  /// The first entry that step t = count + 1 still adds to.
  XS_HOST_DEVICE int64_t first_moved() const { return count + 1 > window ? count + 1 - window : 0; }
  /// Step t moves entry i by rate r^(t - i), after it has decayed.
  XS_HOST_DEVICE void move(int64_t i, double decay, double rate, double power) const { movement[i] = movement[i] * decay + rate * power; }
};

/// Past this many steps r^k is below 4e-18 of the first.
XS_HOST_DEVICE inline int64_t owed_window(double ratio) {
  if (ratio == 0) {
    return 0;
  }
  return ratio < 1 ? int64_t(std::ceil(-40 / std::log(ratio))) : int64_t(INT32_MAX);
}

/// Of a tensor of `numel` numbers.
XS_HOST_DEVICE inline int64_t owed_capacity(int64_t numel) { return (numel - OwedTable::kHeader) / 2 - 1; }

/// Where it says whether rows are made up with stochastic rounding; none in state from before there was such a thing.
XS_HOST_DEVICE inline double* owed_rounding(double* owed, int64_t numel) { return numel % 2 == 0 ? nullptr : owed + numel - 1; }

/// `owed` after `step` steps, r = `ratio`.
XS_HOST_DEVICE inline OwedTable owed_table(double* owed, int64_t capacity, int64_t step, double ratio) {
  double* const movement = owed + OwedTable::kHeader;
  const int64_t settled = int64_t(owed[0]);
  return {movement, movement + capacity + 1, settled, step - settled, capacity, owed_window(ratio), ratio};
}

} // namespace xsoftmax
