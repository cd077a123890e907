#pragma once

#include "core/optional.h"

#include <xsoftmax/loss_options.h>

namespace xsoftmax {

/// Refuses options out of range, in the name of `op`.
void check_logits(const char* op, const LogitOptions& options);
void check_z_loss(const char* op, double z_loss);

/// Whether logits differ from scores.
inline bool transforms(const LogitOptions& options) { return options.logit_scale != 1 || options.softcap != 0; }

/// The logits of scores of any shape and floating dtype, in that dtype, computed in opmath; `scores` itself where nothing
/// is to do. With autograd.
at::Tensor transform_logits(const at::Tensor& scores, const LogitOptions& options);

/// Turns products [Q, N] of float32 or float64 into logits, in place and without autograd: adds bias [N] and transforms.
void transform_products(at::Tensor products, const OptionalTensor& bias, const LogitOptions& options);

/// The derivative of logits for their scores, from the logits of float32 or float64.
at::Tensor transform_derivative(const at::Tensor& logits, const LogitOptions& options);

} // namespace xsoftmax
