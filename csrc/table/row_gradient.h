#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

// Row-sparse gradients, shared by the backward passes of candidate_scores and ragged_scores.

namespace xsoftmax {

/// grad_input [Q, D], rows [R], values [R, D], bias values [R]. Parts that are not wanted have size
/// 0.
using RowGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Returns empty tensors of these shapes for R = `rows`. `wanted`: input, weight, bias.
/// `table_rows`: N of a dense gradient, whose values are [N, D] and rows [0].
RowGradients row_gradients_meta(const at::Tensor& input, const c10::SymInt& rows,
                                std::array<bool, 3> wanted,
                                const std::optional<c10::SymInt>& table_rows = std::nullopt);

/// Returns whether a gradient with R = `rows` rows of a table [N, D] is row-sparse: `sparse_grad`
/// if set, else the form fixed for the table (fix_row_gradient), else R <= N.
///
/// With more rows a row-sparse gradient costs more than a dense one: each row is written, read by
/// gradient clipping, and read again by the optimizer, together with its index. Measured on a CPU,
/// the backward pass, clipping and optimizer together break even for R between 0.75 N and N. The
/// answer is recorded for has_row_gradient (table/row_tables.h).
bool is_row_sparse(std::optional<bool> sparse_grad, const c10::SymInt& rows,
                   const at::Tensor& table);

/// Returns the gradients of input, weight and bias as autograd takes them; undefined if not wanted.
/// sparse_grad: as in is_row_sparse.
std::vector<at::Tensor> row_gradients_as_grads(const RowGradients& gradients,
                                               const at::Tensor& table, std::array<bool, 3> wanted,
                                               std::optional<bool> sparse_grad);
/// Returns the same for dense gradients, whose values have one row per row of the table.
std::vector<at::Tensor> table_gradients_as_grads(const RowGradients& gradients,
                                                 std::array<bool, 3> wanted);

/// Returns (rows, values) as the gradient of a table with `num_rows` rows, sparse COO or dense.
/// Rows must be sorted; `values` [R, D] or [R] hold the sum of a row at its first position and
/// zeros at later positions.
at::Tensor row_gradient_tensor(const at::Tensor& rows, const at::Tensor& values,
                               const c10::SymInt& num_rows, bool sparse);

/// Sorts rows and sums the values of equal rows into the first, in ATen calls. Returns (sorted rows
/// [R], values [R, ...]), with zeros in all but the first of equal rows.
std::tuple<at::Tensor, at::Tensor> sum_equal_rows(const at::Tensor& rows, const at::Tensor& values);
/// Returns (sorted rows [R], order [R], first [R]): position order[i] is added to row first[i].
std::tuple<at::Tensor, at::Tensor, at::Tensor> sort_rows(const at::Tensor& rows);

/// Returns the same gradient in dense form, in ATen calls: rows [0], values [N, D] and bias values
/// [N], N = `num_rows`.
RowGradients to_dense_rows(const RowGradients& gradients, int64_t num_rows,
                           std::array<bool, 3> wanted);
/// Returns the same gradient with at most N = `num_rows` rows, in ATen calls: if R > N, one row per
/// row of the table.
RowGradients limit_rows(const RowGradients& gradients, int64_t num_rows);

} // namespace xsoftmax
