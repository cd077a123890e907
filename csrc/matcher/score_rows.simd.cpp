#include "matcher/score_rows.h"

#include "core/simd.h"

namespace xsoftmax::XS_ISA {
namespace {

static inline float combined(float parent, float z, ScoreCombiner combiner) {
  return combiner == ScoreCombiner::Multiply ? parent * z : combiner == ScoreCombiner::Add ? parent + z : z;
}

static inline float hinge(float z, int power) {
  float gap = 1.0f - z;
  gap = gap < 0.0f ? 0.0f : gap;
  float raised = gap;
  for (int i = 1; i < power; ++i) {
    raised *= gap;
  }
  return raised;
}

template <ScoreTransform kTransform>
void combine_as(float* z, int64_t n, float parent, int power, ScoreCombiner combiner) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float value = z[i];
    if constexpr (kTransform == ScoreTransform::Sigmoid) {
      value = 1.0f / (1.0f + exponential(-value));
    } else if constexpr (kTransform == ScoreTransform::Hinge) {
      value = exponential(-hinge(value, power));
    } else if constexpr (kTransform == ScoreTransform::LogHinge) {
      value = -hinge(value, power);
    }
    z[i] = combined(parent, value, combiner);
  }
}

void combine(float* z, int64_t n, float parent, ScoreTransform transform, int power, ScoreCombiner combiner) {
  switch (transform) {
    case ScoreTransform::Identity: return combine_as<ScoreTransform::Identity>(z, n, parent, power, combiner);
    case ScoreTransform::Sigmoid: return combine_as<ScoreTransform::Sigmoid>(z, n, parent, power, combiner);
    case ScoreTransform::Hinge:
      return power == 3 ? combine_as<ScoreTransform::Hinge>(z, n, parent, 3, combiner) // the usual one, unrolled
                        : combine_as<ScoreTransform::Hinge>(z, n, parent, power, combiner);
    case ScoreTransform::LogSigmoid:
      for (int64_t i = 0; i < n; ++i) { // -log(1 + e^-z)
        const float value = z[i] < 0.0f ? z[i] - __builtin_log1pf(exponential(z[i])) : -__builtin_log1pf(exponential(-z[i]));
        z[i] = combined(parent, value, combiner);
      }
      return;
    case ScoreTransform::LogHinge: return combine_as<ScoreTransform::LogHinge>(z, n, parent, power, combiner);
  }
}

} // namespace

extern const ScoreRowTable score_rows{combine};

} // namespace xsoftmax::XS_ISA
