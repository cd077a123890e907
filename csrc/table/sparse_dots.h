#pragma once

#include "cpu/cpu_dispatch.h"

#include <cstdint>

namespace xsoftmax {

/// CPU kernels of products of sparse rows (sparse_rows.h) with dense vectors.
struct SparseDotTable {
  /// Computes out[i] = sum_t value[t] dense[column[t]] over the entries t of row rows[i], i < n.
  void (*dots)(const int64_t* offset, const int32_t* column, const float* value,
               const int32_t* rows, int64_t n, const float* dense, float* out);
};

XS_DECLARE_ISA_TABLE(SparseDotTable, sparse_dots)

} // namespace xsoftmax
