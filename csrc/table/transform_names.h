#pragma once

#include "random/philox.h"
#include "table/score_transform.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <string_view>

namespace xsoftmax {

struct NamedTransform {
  ScoreTransform transform;
  int power; ///< exponent of a hinge

  bool additive() const {
    return transform == ScoreTransform::Identity || transform == ScoreTransform::LogSigmoid ||
        transform == ScoreTransform::LogHinge;
  }

  /// Applies the transform to one score. Additive transforms only.
  template <typename T>
  XS_HOST_DEVICE T operator()(T z) const {
    if (transform == ScoreTransform::LogSigmoid) {
      return z < T(0) ? z - std::log1p(std::exp(z)) : -std::log1p(std::exp(-z));
    }
    if (transform == ScoreTransform::LogHinge) {
      const T gap = z > T(1) ? T(0) : T(1) - z; // NaN stays
      T power_of_gap = gap;
      for (int i = 1; i < power; ++i) {
        power_of_gap *= gap;
      }
      return -power_of_gap;
    }
    return z;
  }

  /// Applies the transform in ATen calls. Additive transforms only.
  at::Tensor operator()(const at::Tensor& z) const;
};

/// Returns the transform called "l1-hinge" .. "l6-hinge", "sigmoid", "log-" and one of these, or
/// "identity". Other names raise ValueError.
NamedTransform transform_named(const char* op, std::string_view name);

/// Returns the transform of that name if it is additive: its values are added along a path. Other
/// names raise ValueError.
NamedTransform additive_transform_named(const char* op, std::string_view name);

} // namespace xsoftmax
