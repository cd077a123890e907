#pragma once

#include "random/philox.h"

#include <cmath>
#include <cstdint>

// The table of table/updates/pending_steps.h, as read for one row: inline functions for host and
// CUDA code.

namespace xsoftmax {

/// Pending update of a row: multiply it by `decay`, then move it by `movement` times its direction.
struct PendingEntry { double movement, decay; };

/// Returns base^n for n >= 0, within n ulp, by repeated squaring. On a GPU std::pow takes ten times
/// as long.
XS_HOST_DEVICE inline double integer_power(double base, int64_t n) {
  double power = 1;
  for (; n > 0; n >>= 1) {
    power = (n & 1) != 0 ? power * base : power;
    base *= base;
  }
  return power;
}

struct PendingTable {
  static constexpr int64_t kHeader = 4; ///< numbers before the table: caught_up and 3 coefficients

  double *movement, *log_decay; ///< indexed by step - caught_up
  int64_t caught_up, count, capacity, window;
  double ratio;

  /// Returns the last step in the table.
  XS_HOST_DEVICE int64_t step() const { return caught_up + count; }

  /// Returns the pending update of a row whose last gradient was in step s (0: it never had one).
  XS_HOST_DEVICE PendingEntry operator()(int64_t s) const {
    const int64_t after = s > caught_up ? s - caught_up : 0, i = after < count ? after : count,
                  last = i + window;
    const double decay = log_decay[count] - log_decay[i];
    const double decay_after = last < count ? log_decay[count] - log_decay[last] : 0;
    double moved = s == 0 ? 0 : movement[i];
    if (decay_after != 0) {
      moved *= std::exp(decay_after);
    }
    if (s < caught_up && moved != 0) {
      moved *= integer_power(ratio, caught_up - s);
    }
    return {moved, decay == 0 ? 1 : std::exp(decay)};
  }

  /// Returns the first entry to which step t = count + 1 still contributes.
  XS_HOST_DEVICE int64_t first_moved() const { return count + 1 > window ? count + 1 - window : 0; }
  /// Updates entry i for step t, with `power` = r^(t - i): decays its movement and adds rate r^(t -
  /// i).
  XS_HOST_DEVICE void move(int64_t i, double decay, double rate, double power) const {
    movement[i] = movement[i] * decay + rate * power;
  }
};

/// Returns the number of steps after which r^k is below 4e-18 and no longer matters.
XS_HOST_DEVICE inline int64_t pending_window(double ratio) {
  if (ratio == 0) {
    return 0;
  }
  return ratio < 1 ? int64_t(std::ceil(-40 / std::log(ratio))) : int64_t(INT32_MAX);
}

/// Returns the number of steps for which a state tensor of `numel` numbers has room.
XS_HOST_DEVICE inline int64_t pending_capacity(int64_t numel) {
  return (numel - PendingTable::kHeader) / 2 - 1;
}

/// Returns the element that says whether pending updates are applied with stochastic rounding;
/// nullptr in state saved by versions without that element.
XS_HOST_DEVICE inline double* pending_rounding(double* pending, int64_t numel) {
  return numel % 2 == 0 ? nullptr : pending + numel - 1;
}

/// Returns a view of the state tensor after `step` steps, r = `ratio`, window =
/// pending_window(ratio).
XS_HOST_DEVICE inline PendingTable pending_table(double* pending, int64_t capacity, int64_t step,
                                                 double ratio, int64_t window) {
  double* const movement = pending + PendingTable::kHeader;
  const int64_t caught_up = int64_t(pending[0]);
  return {movement, movement + capacity + 1, caught_up, step - caught_up, capacity, window, ratio};
}
XS_HOST_DEVICE inline PendingTable pending_table(double* pending, int64_t capacity, int64_t step,
                                                 double ratio) {
  return pending_table(pending, capacity, step, ratio, pending_window(ratio));
}

} // namespace xsoftmax
