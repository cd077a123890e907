#pragma once

// Single draws as inline functions for host and CUDA code. Where doubles are rounded, fma is
// explicit: compilers may contract a * b + c, and draws would then differ between devices.

#include "random/permutation.h"
#include "random/philox.h"

#include <cmath>

namespace xsoftmax {

/// Returns e^x for 0 <= x < 44, to about 1 ulp and with the same bits on every platform, which math
/// libraries do not guarantee.
XS_HOST_DEVICE inline double portable_exp(double x) {
  const int64_t n = int64_t(std::fma(x, 0x1.71547652b82fep+0, 0.5));
  const double k = double(n);
  const double r = std::fma(k, -0x1.abc9e3b39803fp-56, std::fma(k, -0x1.62e42fefa39efp-1, x));
  // 1 / i!; omitted terms are below 4e-18.
  constexpr double coefficient[] = {1.0,
                                    1.0,
                                    1.0 / 2,
                                    1.0 / 6,
                                    1.0 / 24,
                                    1.0 / 120,
                                    1.0 / 720,
                                    1.0 / 5040,
                                    1.0 / 40320,
                                    1.0 / 362880,
                                    1.0 / 3628800,
                                    1.0 / 39916800,
                                    1.0 / 479001600,
                                    1.0 / 6227020800};
  double p = coefficient[13];
  for (int i = 12; i >= 0; --i) {
    p = std::fma(p, r, coefficient[i]);
  }
  return p * double(uint64_t(1) << n);
}

/// Returns a log-uniform class in [low, high), with start = ln(low + 1) and span = ln(high + 1) -
/// start.
XS_HOST_DEVICE inline int64_t log_uniform_draw(uint64_t seed, uint64_t query, uint64_t draw,
                                               int64_t low, int64_t high, double start,
                                               double span) {
  const double u = unit_double(philox(seed, query, draw).low());
  const int64_t id = int64_t(portable_exp(std::fma(u, span, start))) - 1;
  return id < low ? low : (id >= high ? high - 1 : id);
}

/// Returns the log expected count of a class under log-uniform draws from [low, high). Computed in
/// double, because ln c and ln q nearly cancel.
XS_HOST_DEVICE inline float log_uniform_count(int64_t id, int64_t low, int64_t high,
                                              double log_scale) {
  return id < low || id >= high ? float(-INFINITY)
                                : float(std::log(std::log1p(1 / (double(id) + 1))) + log_scale);
}

/// A row of an alias table (alias_sample.h), loaded at once.
struct AliasBin { int64_t threshold, alias; };

/// Draws from an alias table of n classes: the low half of the block selects the bin, the high half
/// the class in it.
XS_HOST_DEVICE inline int64_t alias_draw(uint64_t seed, uint64_t query, uint64_t draw,
                                         const AliasBin* bins, int64_t n) {
  const PhiloxBlock block = philox(seed, query, draw);
  const int64_t bin = int64_t(multiply_shift(block.low(), uint64_t(n)));
  const AliasBin found = bins[bin];
  return int64_t(block.high() >> 11) < found.threshold ? bin : found.alias;
}

} // namespace xsoftmax
