#pragma once

#include "core/optional.h"

#include <ATen/core/Tensor.h>

namespace xsoftmax {

// is_row_table(table) -> bool: whether an operator that may give `table` a row-sparse gradient, one with sparse_grad other than False, has
// recorded one. Optimizers keep the state of rows for such a table, whatever the form of its first gradient.

/// Notes weight and bias as such tables, where they are leaves that take gradients.
void note_row_tables(std::optional<bool> sparse_grad, const at::Tensor& weight, const OptionalTensor& bias);

bool is_row_table(const at::Tensor& table);

} // namespace xsoftmax
