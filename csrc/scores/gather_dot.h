#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

// CPU building blocks of candidate_scores and ragged_scores. Both score (query, class) pairs laid out query by query.

namespace xsoftmax {

/// Pairs of query q: positions begin(q) .. end(q) - 1 of `ids`. Either every query has `width` pairs, or `offsets` [Q + 1] says.
struct PairLayout {
  const int64_t* ids = nullptr;
  const int64_t* offsets = nullptr;
  int64_t width = 0;
  int64_t queries = 0;

  int64_t begin(int64_t query) const { return offsets ? offsets[query] : query * width; }
  int64_t end(int64_t query) const { return offsets ? offsets[query + 1] : (query + 1) * width; }
  int64_t total() const { return begin(queries); }
  /// Queries of a task of a parallel loop: as many as make about `pairs` pairs.
  int64_t grain(int64_t pairs) const { return queries == 0 ? 1 : std::max<int64_t>(1, pairs * queries / std::max<int64_t>(1, total())); }
};

/// The rows of a table may be apart (a slice of columns), their elements not.
at::Tensor with_unit_column_stride(const at::Tensor& table);

/// table[ids] in opmath dtype, or rounded to bfloat16 (of a float32 or bfloat16 table), [S, D]; ids [S] contiguous.
at::Tensor gather_rows_cpu(const at::Tensor& table, const at::Tensor& ids, bool as_bfloat16 = false);

/// out[q * out_stride + j] = <input[q], weight[id]> + bias[id] for the j-th pair of q; out_stride < 0: at the pair's position.
/// `input` [Q, D] contiguous, `out` in opmath dtype.
void pair_scores_cpu(const at::Tensor& out, int64_t out_stride, const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                     const PairLayout& pairs);

/// grad_input[q] += sum_j grad(q, j) * weight[id]; grad addressed as `out` above; grad_input [Q, D] contiguous, opmath dtype.
void add_pair_input_grad_cpu(const at::Tensor& grad_input, const at::Tensor& grad, int64_t grad_stride, const at::Tensor& weight, const PairLayout& pairs);

/// The row-sparse gradient over R = pairs + shared ids: (rows [R], values [R, D], bias values [R]). Rows stand sorted; all of a
/// class's gradient is in its first row, and its other rows are zero. `shared_values` [S, D] (opmath dtype) and `shared_bias` [S] are
/// the gradients of the shared rows. `scale` [Q], where defined, multiplies the gradients of a query's pairs. Values are in `input`'s
/// dtype. `want_values`, `want_bias`: else [0, D] and [0].
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_gradient_cpu(const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
                                                                const PairLayout& pairs, const at::Tensor& shared_ids, const at::Tensor& shared_values,
                                                                const at::Tensor& shared_bias, bool want_values, bool want_bias);

/// The same gradient for each row of a table, dense: (values [N, D], bias values [N]), N = table_rows.
std::tuple<at::Tensor, at::Tensor> table_gradient_cpu(const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
                                                      const PairLayout& pairs, const at::Tensor& shared_ids, const at::Tensor& shared_values,
                                                      const at::Tensor& shared_bias, int64_t table_rows, bool want_values, bool want_bias);

/// The same without shared ids, over R = `rows` whatever the pairs are: a row for each different id, of which there are no more than R;
/// behind them the last again, with zeros.
std::tuple<at::Tensor, at::Tensor, at::Tensor> compact_row_gradient_cpu(const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale,
                                                                        const at::Tensor& input, const PairLayout& pairs, int64_t rows, bool want_values,
                                                                        bool want_bias);

} // namespace xsoftmax
