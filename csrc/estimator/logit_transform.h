#pragma once

#include "op/optional.h"

#include <xsoftmax/options.h>

namespace xsoftmax {

/// Throw a ValueError of `op` for options out of range.
void check_logits(const char* op, const LogitOptions& options);
void check_z_loss(const char* op, double z_loss);

/// Whether logits differ from scores.
inline bool transforms(const LogitOptions& options) {
  return options.logit_scale != 1 || options.softcap != 0;
}

/// Returns the logits of scores of any shape and floating dtype. Computes in opmath_type and
/// returns the dtype of scores, with autograd; returns `scores` itself if no option applies.
at::Tensor transform_logits(const at::Tensor& scores, const LogitOptions& options);

/// Turns products [Q, N], float32 or float64, into logits in place and without autograd: adds bias
/// [N] and transforms.
void transform_products(at::Tensor products, const OptionalTensor& bias,
                        const LogitOptions& options);

/// Returns the derivative of the logits with respect to the scores, given the logits in float32 or
/// float64.
at::Tensor transform_derivative(const at::Tensor& logits, const LogitOptions& options);

} // namespace xsoftmax
