#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// reset_rows_(table!, rows, values) -> (): rows int64 [R] of a table [N, ...] that stand for something else from now on. They become `values` [R, ...], and
/// what row optimizers keep for them (optim/row_states.h) is as before their first gradient: they owe nothing of the steps before, and what the other rows owe
/// stays. Errors, before anything changes: TypeError, ValueError, on the CPU IndexError.
void reset_rows_(at::Tensor& table, const at::Tensor& rows, const at::Tensor& values);

} // namespace xsoftmax
