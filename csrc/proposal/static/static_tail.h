#pragma once

// Classes added since the tables of a static distribution were built, as inline functions for host
// and CUDA code.

#include "op/optional.h"
#include "proposal/draws.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace xsoftmax {

/// The classes first .. end - 1, which follow those of a table whose weights sum to 1. Each has the
/// weight `weight` or, if `log_uniform`, weight ln((i + 2) / (i + 1)).
struct StaticTail {
  int64_t first = 0, end = 0;
  double weight = 0;
  bool log_uniform = false;
  double mass = 0; ///< sum of their weights
  double start = 0, span = 0; ///< bounds of log-uniform draws

  XS_HOST_DEVICE int64_t count() const { return end - first; }
  XS_HOST_DEVICE double total() const { return 1 + mass; }

  /// Returns a class if this draw with replacement falls into the tail, else -1. Uses a Philox
  /// block that no draw from a table uses.
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

  /// Returns the weight of the classes from `id` on, if all weigh the same. The fma prevents a
  /// contraction with the caller's arithmetic, which would round differently.
  XS_HOST_DEVICE double even_from(int64_t id) const {
    return std::fma(double(end - id), weight, 0.0);
  }

  /// Returns the last class of [low, high) such that it and all after it weigh at least `target`,
  /// or low.
  XS_HOST_DEVICE int64_t last_with(double target, int64_t low, int64_t high) const {
    const double ratio = target / weight;
    // ln((end + 1) / (id + 1)) >= ratio
    const int64_t id = log_uniform
        ? int64_t(double(end + 1) / portable_exp(ratio < 0 ? 0.0 : ratio)) - 1
        : end - int64_t(std::ceil(ratio));
    return id < low ? low : (id >= high ? high - 1 : id);
  }
};

// A tail as tables of a sampler: three 0-dim scalars, which modules keep on the CPU because every
// draw reads them, wherever the other tables are. laid_out int64: the number of classes the tables
// were built for, 0 for a distribution without tables. late_weight float64 and late_log_uniform
// bool: `weight` and `log_uniform` of the classes added since.

/// Returns [laid_out, late_weight, late_log_uniform].
std::vector<at::Tensor> tail_tables(const StaticTail& tail);
/// Checks number, shapes and dtypes of such tables. An empty list is accepted.
void check_tail(const char* op, at::TensorList tail);
/// Reads such tables. The tail is empty if there are no tables, or if they are traced. Waits for
/// the device if they are on one.
StaticTail static_tail(const char* op, at::TensorList tail, int64_t num_classes);

} // namespace xsoftmax
