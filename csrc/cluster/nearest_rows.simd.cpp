#include "cluster/nearest_rows.h"

#include "cpu/simd.h"

namespace xsoftmax::XS_ISA {
namespace {

int64_t best(const float* __restrict product, const float* __restrict penalty, int64_t n,
             float* value) {
  int32_t top = ordered(-__builtin_inff());
  for (int64_t k = 0; k < n; ++k) {
    const int32_t key = ordered(product[k] - penalty[k]);
    top = key > top ? key : top;
  }
  *value = from_ordered(top);
  int32_t first = int32_t(n) - 1;
  for (int32_t k = 0; k < int32_t(n); ++k) {
    const int32_t found = ordered(product[k] - penalty[k]) == top ? k : int32_t(n) - 1;
    first = found < first ? found : first;
  }
  return first;
}

float square_sum(const float* x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < n; ++d) {
    sum += x[d] * x[d];
  }
  return sum;
}

} // namespace

extern const NearestRowTable nearest_rows{best, square_sum};

} // namespace xsoftmax::XS_ISA
