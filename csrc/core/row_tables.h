#pragma once

#include "core/optional.h"

#include <ATen/core/Tensor.h>

namespace xsoftmax {

// is_row_table(table) -> bool: whether an operator that may give `table` a row-sparse gradient, one with sparse_grad other than False, was called while
// gradients are recorded. Optimizers keep the state of rows for such a table, whatever the form of its first gradient. A compiled graph calls no such
// operator; there the first gradient decides.
//
// has_row_gradient(table) -> bool: whether the last backward pass of such an operator gave `table` a row-sparse gradient. Where the gradient of the table is
// dense all the same, something else that uses the table has made it so.
//
// fix_row_gradient(table, row_sparse) -> (): the form that operators with sparse_grad=None give the gradient of `table` from now on, since its optimizer
// takes no other; none: the one that costs less. It holds for all losses over the table, scripted ones as well. A compiled graph keeps the form that it was
// traced with.

/// Registers weight and bias as such tables, where gradients are recorded and they are leaves that take them.
void register_row_tables(std::optional<bool> sparse_grad, const at::Tensor& weight, const OptionalTensor& bias);

/// Says what has_row_gradient tells of a registered table.
void set_row_gradient(const at::Tensor& table, bool row_sparse);

bool is_row_table(const at::Tensor& table);
bool has_row_gradient(const at::Tensor& table);
std::optional<bool> fixed_row_gradient(const at::Tensor& table);

} // namespace xsoftmax
