#pragma once

#include "random/philox.h"

#include <cmath>

// Arithmetic of a softmax over the children of a node, for host and device.

namespace xsoftmax {

/// Returns the log of the sum of exponentials of the siblings' scores. largest: their maximum; sum:
/// the sum of e^(score - largest).
template <typename A>
XS_HOST_DEVICE inline A sibling_normalizer(A largest, A sum) {
  return largest + std::log(sum);
}

/// Returns the gradient of minus the log-probability of the target with respect to the score of a
/// sibling whose log-probability is `log_prob`.
template <typename A>
XS_HOST_DEVICE inline A sibling_gradient(A log_prob, bool is_target) {
  return std::exp(log_prob) - (is_target ? A(1) : A(0));
}

} // namespace xsoftmax
