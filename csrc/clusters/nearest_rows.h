#pragma once

#include "core/cpu_dispatch.h"

#include <cstdint>

namespace xsoftmax {

/// The loops of K-means and of coding rows.
struct NearestRowTable {
  /// The first k < n with the largest product[k] - penalty[k], which goes to *value.
  int64_t (*best)(const float* product, const float* penalty, int64_t n, float* value);
  /// sum_d x[d]^2
  float (*square_sum)(const float* x, int64_t n);
};

XS_DECLARE_ISA_TABLE(NearestRowTable, nearest_rows)

} // namespace xsoftmax
