#pragma once

#include "core/philox.h"

#include <cmath>

// The arithmetic of a softmax over the children of a node, for host and device.

namespace xsoftmax {

/// Of a score among siblings: their normalizer is the log of the sum of exponentials, `largest` + log(sum of e^(score - largest)).
template <typename A>
XS_HOST_DEVICE inline A sibling_normalizer(A largest, A sum) {
  return largest + std::log(sum);
}

/// What minus the log-probability of a sibling has as gradient for the score of one of the siblings, of this log-probability.
template <typename A>
XS_HOST_DEVICE inline A sibling_gradient(A log_prob, bool is_target) {
  return std::exp(log_prob) - (is_target ? A(1) : A(0));
}

} // namespace xsoftmax
