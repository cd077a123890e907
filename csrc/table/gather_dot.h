#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

// CPU building blocks of candidate_scores and ragged_scores. Both score (query, class) pairs that
// are stored query by query.

namespace xsoftmax {

/// Layout of the pairs. Those of query q are at positions begin(q) .. end(q) - 1 of `ids`. Every
/// query has `width` pairs, unless `offsets` [Q + 1] is set.
struct PairLayout {
  const int64_t* ids = nullptr;
  const int64_t* offsets = nullptr;
  int64_t width = 0;
  int64_t queries = 0;

  int64_t begin(int64_t query) const { return offsets ? offsets[query] : query * width; }
  int64_t end(int64_t query) const { return offsets ? offsets[query + 1] : (query + 1) * width; }
  int64_t total() const { return begin(queries); }
  /// Returns the grain size of a parallel loop over queries with about `pairs` pairs per task.
  int64_t grain(int64_t pairs) const {
    return queries == 0 ? 1 : std::max<int64_t>(1, pairs * queries / std::max<int64_t>(1, total()));
  }
};

/// Returns the table, or a contiguous copy if the elements of its rows are not adjacent. Rows may
/// have any stride (a slice of columns).
at::Tensor with_unit_column_stride(const at::Tensor& table);

/// Gathers table[ids] as [S, D]: in opmath dtype, or with `as_bfloat16` rounded to bfloat16
/// (float32 and bfloat16 tables only). `ids` [S] must be contiguous.
at::Tensor gather_rows_cpu(const at::Tensor& table, const at::Tensor& ids,
                           bool as_bfloat16 = false);

/// Writes out[q * out_stride + j] = <input[q], weight[id]> + bias[id] for the j-th pair of q; if
/// out_stride < 0, to the position of the pair. `input` [Q, D] must be contiguous, `out` in opmath
/// dtype.
void pair_scores_cpu(const at::Tensor& out, int64_t out_stride, const at::Tensor& input,
                     const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                     const PairLayout& pairs);

/// Adds sum_j grad(q, j) * weight[id] to grad_input[q]. `grad` is addressed like `out` above.
/// `grad_input` [Q, D] must be contiguous and in opmath dtype.
void add_pair_input_grad_cpu(const at::Tensor& grad_input, const at::Tensor& grad,
                             int64_t grad_stride, const at::Tensor& weight,
                             const PairLayout& pairs);

/// Returns the row-sparse gradient over R = pairs + shared ids: (rows [R], values [R, D], bias
/// values [R]) in the dtype of `input`.
///
/// Rows are sorted. The gradient of a class is summed into its first row; its other rows are zero.
/// `shared_values` [S, D] (opmath dtype) and `shared_bias` [S] are the gradients of the shared
/// rows. `scale` [Q], if defined, multiplies the gradients of the pairs of each query. Without
/// `want_values` the values are [0, D]; without `want_bias` the bias values are [0].
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_gradient_cpu(
    const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
    const PairLayout& pairs, const at::Tensor& shared_ids, const at::Tensor& shared_values,
    const at::Tensor& shared_bias, bool want_values, bool want_bias);

/// Returns the same gradient as a dense one over the N = table_rows rows of the table: (values [N,
/// D], bias values [N]).
std::tuple<at::Tensor, at::Tensor> table_gradient_cpu(
    const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
    const PairLayout& pairs, const at::Tensor& shared_ids, const at::Tensor& shared_values,
    const at::Tensor& shared_bias, int64_t table_rows, bool want_values, bool want_bias);

/// Returns the same gradient without shared ids, over R = `rows` rows: one row per distinct id.
/// There must be at most R distinct ids; unused rows repeat the last id with zero values.
std::tuple<at::Tensor, at::Tensor, at::Tensor> compact_row_gradient_cpu(
    const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
    const PairLayout& pairs, int64_t rows, bool want_values, bool want_bias);

} // namespace xsoftmax
