#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// resize_tables_(tables!, rows, sizes) -> (): tables [N, ...], each with a row for each class, get `sizes` rows in place. The first min(N, size) rows of a
/// table stay, those behind them are its `rows` [max(0, size - N), ...], of the table's dtype and on its device. Whatever row optimizers keep of a table
/// (optim/row_states.h) goes with it: state of the first rows stays, that of the new ones is as before their first step, and they owe nothing of the steps
/// before.
///
/// The tables stay the same tensors, parameters included. Their memory grows by quarters, so that a table which gains a row at a time is copied O(log N)
/// times, and what rows owe is made up then; else a call costs the new rows. A table that was not resized before, or that shrinks below half its memory, is
/// copied. The spare memory is in no one's view: storages end with the last row, so that what is saved or copied is the rows alone. What shared the memory of
/// a table that is copied (views, detach(), numpy, a mapped file) keeps the old one; what shares that of one which shrinks in place keeps its size, and has a
/// storage that is too short to be saved.
///
/// Versions rise: a graph that waits for its backward pass refuses it. Gradients, which are of the former size, are dropped.
/// Errors, before any table changes: TypeError, ValueError; and of memory, since that of all tables is there before the first is resized.
void resize_tables_(at::TensorList tables, at::TensorList rows, at::IntArrayRef sizes);

} // namespace xsoftmax
