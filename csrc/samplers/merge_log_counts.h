#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// merge_log_counts(log_counts) -> float32, of the shape that they broadcast to: the log of the sum of expected counts, what all parts of a
/// union propose of a class together (the balance heuristic of multiple importance sampling; Veach and Guibas, 1995). The equivalent PyTorch
/// expression is torch.logsumexp(torch.stack(torch.broadcast_tensors(*log_counts)), 0), with +inf where one is +inf. At least one, floating.
at::Tensor merge_log_counts(at::TensorList log_counts);

} // namespace xsoftmax
