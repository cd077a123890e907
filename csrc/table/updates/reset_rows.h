#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// reset_rows_(table!, rows, values) -> (): reassigns rows int64 [R] of a table [N, ...] to
/// something new. They are set to `values` [R, ...], and their row optimizer state
/// (table/updates/row_states.h) to that before their first gradient, without pending updates.
/// Pending updates of other rows stay. Raises TypeError, ValueError and, on the CPU, IndexError
/// before anything changes.
void reset_rows_(at::Tensor& table, const at::Tensor& rows, const at::Tensor& values);

} // namespace xsoftmax
