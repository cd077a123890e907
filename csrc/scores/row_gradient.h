#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace xsoftmax {

/// (rows, values) as the gradient of a table with `num_rows` rows: sparse COO, or dense. `values` [R, D] or [R].
at::Tensor row_gradient_tensor(const at::Tensor& rows, const at::Tensor& values, const c10::SymInt& num_rows, bool sparse);

/// Sorts rows and sums the values of equal ones into the first, in ATen calls: (sorted rows [R], values [R, ...] with zero rows
/// behind the first of each).
std::tuple<at::Tensor, at::Tensor> sum_equal_rows(const at::Tensor& rows, const at::Tensor& values);
/// Where the values of each position go: (sorted rows [R], order [R], first [R]): position order[i] adds to row first[i].
std::tuple<at::Tensor, at::Tensor, at::Tensor> sort_rows(const at::Tensor& rows);

} // namespace xsoftmax
