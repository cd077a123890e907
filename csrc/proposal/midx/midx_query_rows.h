#pragma once

#include "cpu/cpu_dispatch.h"

#include <cstdint>

namespace xsoftmax {

/// Loops over the codewords for one query. T: the dtype of its products with them.
template <typename T>
struct MidxPotentials {
  /// Computes, from products [2, k], score (clamped to at least the best score of its codebook
  /// minus `range`) and exp = e^(score - best), both [2, k]. Returns the sum of the two best
  /// scores. If a product is NaN, all results are NaN.
  double (*function)(double* score, double* exp, const T* product, int64_t k, double range);
};

struct MidxQueryTable {
  MidxPotentials<float> f32;
  MidxPotentials<double> f64;

  /// Computes probability[k] = exp[k] * weight[k] / z and returns z, the sum of exp * weight.
  /// weight and probability may be the same array.
  double (*normalize)(double* probability, const double* weight, const double* exp, int64_t k);
  /// Computes product[k] = mass[k] * exp[k] and returns the sum.
  double (*weigh)(double* product, const double* mass, const double* exp, int64_t k);
};

XS_DECLARE_ISA_TABLE(MidxQueryTable, midx_query_rows)

} // namespace xsoftmax
