#include "matcher/score_rows.h"

#include "cpu/simd.h"

namespace xsoftmax::XS_ISA {
namespace {

static inline float combined(float parent, float z, ScoreCombiner combiner) {
  return combiner == ScoreCombiner::Multiply ? parent * z
      : combiner == ScoreCombiner::Add       ? parent + z
                                             : z;
}

/// Returns log(1 + x) for x in [0, 1] as 2 atanh(s) with s = x / (2 + x) in [0, 1/3], by its
/// series.
static inline float log1p_of_part(float x) {
  const float s = x / (2.0f + x), t = s * s;
  float p = 2.0f / 15.0f;
  p = p * t + 2.0f / 13.0f;
  p = p * t + 2.0f / 11.0f;
  p = p * t + 2.0f / 9.0f;
  p = p * t + 2.0f / 7.0f;
  p = p * t + 2.0f / 5.0f;
  p = p * t + 2.0f / 3.0f;
  p = p * t + 2.0f;
  return s * p;
}

/// Returns log(e^a + e^b); one of them may be -inf.
static inline float log_sum(float a, float b) {
  const float larger = a > b ? a : b, smaller = a > b ? b : a;
  return larger + log1p_of_part(exponential(smaller - larger));
}

static inline float hinge(float z, int power) {
  float gap = 1.0f - z;
  gap = gap < 0.0f ? 0.0f : gap;
  float power_of_gap = gap;
  for (int i = 1; i < power; ++i) {
    power_of_gap *= gap;
  }
  return power_of_gap;
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
    } else if constexpr (kTransform == ScoreTransform::LogSigmoid) {
      const float bound = value < 0.0f ? value : 0.0f;
      value = bound - log1p_of_part(exponential(2.0f * bound - value)); // e^-|z|
    }
    z[i] = combined(parent, value, combiner);
  }
}

template <ScoreTransform kTransform>
void combine_all(float* z, int64_t n, float parent, int power, ScoreCombiner combiner) {
  if (combiner != ScoreCombiner::LogAdd) {
    return combine_as<kTransform>(z, n, parent, power, combiner);
  }
  combine_as<kTransform>(z, n, parent, power, ScoreCombiner::Last);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    z[i] = log_sum(parent, z[i]);
  }
}

void combine(float* z, int64_t n, float parent, ScoreTransform transform, int power,
             ScoreCombiner combiner) {
  switch (transform) {
    case ScoreTransform::Identity:
      return combine_all<ScoreTransform::Identity>(z, n, parent, power, combiner);
    case ScoreTransform::Sigmoid:
      return combine_all<ScoreTransform::Sigmoid>(z, n, parent, power, combiner);
    case ScoreTransform::Hinge:
      return combine_all<ScoreTransform::Hinge>(z, n, parent, power, combiner);
    case ScoreTransform::LogSigmoid:
      return combine_all<ScoreTransform::LogSigmoid>(z, n, parent, power, combiner);
    case ScoreTransform::LogHinge:
      // The usual power, unrolled.
      return power == 3 ? combine_all<ScoreTransform::LogHinge>(z, n, parent, 3, combiner)
                        : combine_all<ScoreTransform::LogHinge>(z, n, parent, power, combiner);
  }
}

} // namespace

extern const ScoreRowTable score_rows{combine};

} // namespace xsoftmax::XS_ISA
