#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace xsoftmax {

// Rows of a table that stand for something else from now on, with the state that a row optimizer keeps for them.
//
// `state`: the tensors of state of one parameter of `num_rows` rows, `fresh`: those of a parameter of one row before its first step (row_sgd_state and its like).
// A tensor of state has a row for each of the parameter's where it has num_rows and the one in `fresh` has one, or none for what the present options do without. A row
// begins with the number that `fresh` has throughout. int32 ones are `last_step`: a row that begins now owes nothing of the steps before, so it becomes the step of
// the parameter.

/// reset_rows_(table!, rows, values) -> (): table.index_copy_(0, rows, values) for rows int64 [R] and values [R, ...], as an optimizer writes: what the other rows
/// of the table owe stays (optim/settle.h). What these rows owe is forgotten by reset_row_state_. Errors: TypeError, ValueError, on the CPU IndexError, before
/// anything changes.
void reset_rows_(at::Tensor& table, const at::Tensor& rows, const at::Tensor& values);

/// reset_row_state_(state!, fresh, rows, num_rows) -> (): rows int64 [R] in [0, num_rows), state as before their first gradient. Errors: TypeError, ValueError, on
/// the CPU IndexError, before anything changes.
void reset_row_state_(at::TensorList state, at::TensorList fresh, const at::Tensor& rows, int64_t num_rows);

} // namespace xsoftmax
