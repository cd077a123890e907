#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

// What the backward of candidate_scores and of ragged_scores share.

namespace xsoftmax {

/// grad_input [Q, D], rows [R], values [R, D], bias values [R]. Parts that are not wanted have size 0.
using RowGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Empty tensors of those shapes, for R = `rows`. `wanted`: input, weight, bias. table_rows: N for a dense gradient, whose values are [N, D].
RowGradients row_gradients_meta(const at::Tensor& input, const c10::SymInt& rows, std::array<bool, 3> wanted,
                                const std::optional<c10::SymInt>& table_rows = std::nullopt);

/// Whether a gradient of R = `rows` rows of a table [N, D] is row-sparse: as `sparse_grad` has it; none: where R <= N. More of them cost more than a
/// dense one: each is written, read when gradients are clipped, and read again by the optimizer, with its index. Measured on a CPU, backward pass, clipping
/// and optimizer cost the same at R between 0.75 N and N. The answer is kept for has_row_gradient (core/row_tables.h).
bool is_row_sparse(std::optional<bool> sparse_grad, const c10::SymInt& rows, const at::Tensor& table);

/// The gradients of input, weight and bias that autograd takes; undefined where not wanted. sparse_grad: as is_row_sparse takes it.
std::vector<at::Tensor> row_gradients_as_grads(const RowGradients& gradients, const at::Tensor& table, std::array<bool, 3> wanted,
                                               std::optional<bool> sparse_grad);
/// The same where values stand for each row of the table.
std::vector<at::Tensor> table_gradients_as_grads(const RowGradients& gradients, std::array<bool, 3> wanted);

/// (rows, values) as the gradient of a table with `num_rows` rows: sparse COO, or dense. Rows never fall; `values` [R, D] or [R]: a row's
/// sum is at its first position, later positions are zero.
at::Tensor row_gradient_tensor(const at::Tensor& rows, const at::Tensor& values, const c10::SymInt& num_rows, bool sparse);

/// Sorts rows and sums the values of equal ones into the first, in ATen calls: (sorted rows [R], values [R, ...] with zero rows
/// behind the first of each).
std::tuple<at::Tensor, at::Tensor> sum_equal_rows(const at::Tensor& rows, const at::Tensor& values);
/// Where the values of each position go: (sorted rows [R], order [R], first [R]): position order[i] adds to row first[i].
std::tuple<at::Tensor, at::Tensor, at::Tensor> sort_rows(const at::Tensor& rows);

/// The same gradient with rows [0], values [N, D] and bias values [N], in ATen calls; N = `num_rows`.
RowGradients over_all_rows(const RowGradients& gradients, int64_t num_rows, std::array<bool, 3> wanted);
/// The same gradient over at most N = `num_rows` rows, in ATen calls: where R > N, a row for each of the table's.
RowGradients at_most_rows(const RowGradients& gradients, int64_t num_rows);

} // namespace xsoftmax
