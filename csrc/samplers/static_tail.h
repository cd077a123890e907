#pragma once

// Classes that have come since the tables of a static law were laid out, as inline functions for host and CUDA code.

#include "core/optional.h"
#include "samplers/draws.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace xsoftmax {

/// The classes first .. end - 1 behind those of a table, whose weights sum to 1: each of them weighs `weight`, or with `log_uniform`
/// weight ln((i + 2) / (i + 1)).
struct StaticTail {
  int64_t first = 0, end = 0;
  double weight = 0;
  bool log_uniform = false;
  double mass = 0;          ///< of all of them
  double start = 0, span = 0; ///< of log-uniform draws

  XS_HOST_DEVICE int64_t count() const { return end - first; }
  XS_HOST_DEVICE double total() const { return 1 + mass; }

  /// Whether an independent draw goes to the tail, and its class there; else -1. These are bits of a block that no draw from a table takes.
  XS_HOST_DEVICE int64_t draw(uint64_t seed, uint64_t query, uint64_t draw) const {
    constexpr uint64_t kOtherBlocks = uint64_t(1) << 63;
    const PhiloxBlock block = philox(seed, query, kOtherBlocks | draw);
    if (!(unit_double(block.low()) * total() < mass)) {
      return -1;
    }
    if (!log_uniform) {
      return first + int64_t(multiply_shift(block.high(), uint64_t(count())));
    }
    const int64_t id = int64_t(portable_exp(std::fma(unit_double(block.high()), span, start))) - 1;
    return id < first ? first : (id >= end ? end - 1 : id);
  }

  /// The weight of the classes from `id` on, where all weigh the same. (fma, as its rounding must not be another one beside what follows.)
  XS_HOST_DEVICE double even_from(int64_t id) const { return std::fma(double(end - id), weight, 0.0); }

  /// The last class of [low, high) with which all behind it weigh `target` or more, or low.
  XS_HOST_DEVICE int64_t last_with(double target, int64_t low, int64_t high) const {
    const double ratio = target / weight;
    // ln((end + 1) / (id + 1)) >= ratio
    const int64_t id = log_uniform ? int64_t(double(end + 1) / portable_exp(ratio < 0 ? 0.0 : ratio)) - 1 : end - int64_t(std::ceil(ratio));
    return id < low ? low : (id >= high ? high - 1 : id);
  }
};

// A tail as tables of a sampler: three scalars (0-dim) that modules keep on the CPU, where every draw reads
// them, wherever the other tables are. laid_out int64: how many classes the tables are laid out for, 0 of a law
// without tables. late_weight float64 and late_log_uniform bool: `weight` and `log_uniform` of the others.

/// Returns [laid_out, late_weight, late_log_uniform].
std::vector<at::Tensor> tail_tables(const StaticTail& tail);
/// Checks number, shapes and dtypes of such tables; none at all pass.
void check_tail(const char* op, at::TensorList tail);
/// Reads such tables. No tables, or those of traced shapes: no class is behind them. On a device it waits.
StaticTail static_tail(const char* op, at::TensorList tail, int64_t num_classes);

} // namespace xsoftmax
