#pragma once

#include "op/optional.h"

#include <ATen/core/Tensor.h>

namespace xsoftmax {

// is_row_table(table) -> bool: whether `table` was passed, with gradients enabled, to an operator
// that can give it a row-sparse gradient (sparse_grad other than False). Optimizers keep per-row
// state for such a table, whatever the form of its first gradient. A compiled graph does not call
// these operators; then the first gradient decides.
//
// has_row_gradient(table) -> bool: whether the last backward pass of such an operator gave `table`
// a row-sparse gradient. If the gradient of the table is dense nevertheless, another use of the
// table made it dense.
//
// fix_row_gradient(table, row_sparse) -> (): fixes the form of the gradient of `table` for
// operators with sparse_grad=None, for an optimizer that takes only one form. None: the cheaper
// form. It applies to all losses over the table, including scripted ones. A compiled graph keeps
// the form that it was traced with.

/// Registers weight and bias as row tables if gradients are enabled, sparse_grad is not false, and
/// they are leaves that require gradients.
void register_row_tables(std::optional<bool> sparse_grad, const at::Tensor& weight,
                         const OptionalTensor& bias);

/// Records what has_row_gradient returns for a registered table.
void set_row_gradient(const at::Tensor& table, bool row_sparse);

bool is_row_table(const at::Tensor& table);
bool has_row_gradient(const at::Tensor& table);
std::optional<bool> fixed_row_gradient(const at::Tensor& table);

} // namespace xsoftmax
