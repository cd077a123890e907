#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// resize_tables_(tables!, rows, sizes) -> (): resizes tables [N, ...], which have one row per
/// class, to `sizes` rows in place. The first min(N, size) rows of a table stay; its new rows are
/// copied from `rows` [max(0, size - N), ...], of the table's dtype and device. All state that row
/// optimizers keep for a table (table/updates/row_states.h) is resized with it: the state of kept
/// rows stays, and that of new rows is as before their first step, without pending updates.
///
/// The tables stay the same tensors, parameters included. Capacity grows by a quarter at a time, so
/// a table that gains one row at a time is copied O(log N) times; that is also when pending updates
/// are flushed. Otherwise a call costs O(new rows). A table is copied if it was not resized before,
/// or shrinks below half its capacity. Spare capacity is not visible: the storage ends with the
/// last row, so only the rows are saved or copied. After a copy, aliases of a table (views,
/// detach(), numpy, a mapped file) keep the old memory. After shrinking in place, aliases keep
/// their size, and their storage is too short to be saved.
///
/// Versions are bumped: a pending backward pass is rejected. Gradients, which have the old size,
/// are dropped. Raises TypeError and ValueError before any table changes, and out-of-memory errors
/// too, because all memory is allocated before the first table is resized.
void resize_tables_(at::TensorList tables, at::TensorList rows, at::IntArrayRef sizes);

} // namespace xsoftmax
