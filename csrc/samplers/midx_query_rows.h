#pragma once

#include "core/cpu_dispatch.h"

#include <cstdint>

namespace xsoftmax {

/// The loops over the codewords of one query. T: of its products with them.
template <typename T>
struct MidxPotentials {
  /// From products [2, k]: score, not lower than the best of a codebook less `range`, and exp = e^score over that of the best, both
  /// [2, k]. Returns the sum of the two best scores. A product that is no number makes all of it none.
  double (*function)(double* score, double* exp, const T* product, int64_t k, double range);
};

struct MidxQueryTable {
  MidxPotentials<float> f32;
  MidxPotentials<double> f64;

  /// probability[k] = exp[k] * weight[k] / z; weight and probability may be one. Returns z, their sum.
  double (*normalize)(double* probability, const double* weight, const double* exp, int64_t k);
  /// product[k] = mass[k] * exp[k]; returns the sum.
  double (*weigh)(double* product, const double* mass, const double* exp, int64_t k);
};

XS_DECLARE_ISA_TABLE(MidxQueryTable, midx_query_rows)

} // namespace xsoftmax
