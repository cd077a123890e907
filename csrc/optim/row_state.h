#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace xsoftmax {

// Rows of a table that stand for something else from now on, or that come and go, with the state that a row optimizer keeps for them.
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

/// resize_row_state_(state!, fresh, num_rows, size) -> (): from num_rows rows to `size`; new ones as of reset_row_state_.
void resize_row_state_(at::TensorList state, at::TensorList fresh, int64_t num_rows, int64_t size);

/// resize_rows_(table!, size) -> (): table [N, ...] to [size, ...] in place, the first rows as they were, new ones not set. Memory that grows is taken in steps
/// of a quarter, so a table that gains a row at a time is copied O(log N) times. The room behind a table is used where this operator made it alone: what views show
/// of a larger tensor stays as it is. No gradient is recorded, and memory moves: aliases of the table keep the old one.
void resize_rows_(at::Tensor& table, int64_t size);

} // namespace xsoftmax
