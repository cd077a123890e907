#include "proposal/midx/midx_query_rows.h"

#include "cpu/simd.h"

namespace xsoftmax::XS_ISA {
namespace {

template <typename T>
double potentials(double* __restrict score, double* __restrict exp, const T* __restrict product,
                  int64_t k, double range) {
  double max_sum = 0;
  for (int64_t codebook = 0; codebook < 2; ++codebook, score += k, exp += k, product += k) {
    auto key = ordered(-T(__builtin_inf()));
    for (int64_t i = 0; i < k; ++i) {
      const auto other = ordered(product[i]);
      key = other > key ? other : key;
    }
    const double best = double(from_ordered(key)), lowest = best - range;
    for (int64_t i = 0; i < k; ++i) {
      const double value = double(product[i]), kept = value < lowest ? lowest : value;
      score[i] = kept;
      exp[i] = exponential(kept - best);
    }
    max_sum += best;
  }
  return max_sum;
}

double normalize(double* probability, const double* weight, const double* __restrict exp,
                 int64_t k) {
  double z = 0;
#pragma omp simd reduction(+ : z)
  for (int64_t i = 0; i < k; ++i) {
    const double value = weight[i] * exp[i];
    probability[i] = value;
    z += value;
  }
  for (int64_t i = 0; i < k; ++i) {
    probability[i] /= z;
  }
  return z;
}

double weigh(double* __restrict product, const double* __restrict mass,
             const double* __restrict exp, int64_t k) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < k; ++i) {
    product[i] = mass[i] * exp[i];
    sum += product[i];
  }
  return sum;
}

} // namespace

extern const MidxQueryTable midx_query_rows{
    {potentials<float>}, {potentials<double>}, normalize, weigh};

} // namespace xsoftmax::XS_ISA
