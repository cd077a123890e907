#pragma once

#include "core/philox.h"
#include "scores/score_transform.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <string_view>

namespace xsoftmax {

struct NamedTransform {
  ScoreTransform transform;
  int power; ///< of a hinge

  bool additive() const { return transform == ScoreTransform::Identity || transform == ScoreTransform::LogSigmoid || transform == ScoreTransform::LogHinge; }

  /// Of one score; the additive ones only.
  template <typename T>
  XS_HOST_DEVICE T operator()(T z) const {
    if (transform == ScoreTransform::LogSigmoid) {
      return z < T(0) ? z - std::log1p(std::exp(z)) : -std::log1p(std::exp(-z));
    }
    if (transform == ScoreTransform::LogHinge) {
      const T gap = z > T(1) ? T(0) : T(1) - z; // NaN stays
      T raised = gap;
      for (int i = 1; i < power; ++i) {
        raised *= gap;
      }
      return -raised;
    }
    return z;
  }

  /// The same in ATen calls.
  at::Tensor operator()(const at::Tensor& z) const;
};

/// "l1-hinge" .. "l6-hinge", "sigmoid", "log-" and one of these, or "identity".
NamedTransform transform_named(const char* op, std::string_view name);

/// Those whose values along a path are to be added.
NamedTransform additive_transform_named(const char* op, std::string_view name);

} // namespace xsoftmax
