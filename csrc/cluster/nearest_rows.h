#pragma once

#include "cpu/cpu_dispatch.h"

#include <cstdint>

namespace xsoftmax {

/// CPU kernels of K-means and of quantizing rows to codewords.
struct NearestRowTable {
  /// Returns the first k < n with the largest product[k] - penalty[k], and writes that difference
  /// to *value.
  int64_t (*best)(const float* product, const float* penalty, int64_t n, float* value);
  /// Returns the sum of x[d]^2 over d < n.
  float (*square_sum)(const float* x, int64_t n);
};

XS_DECLARE_ISA_TABLE(NearestRowTable, nearest_rows)

} // namespace xsoftmax
