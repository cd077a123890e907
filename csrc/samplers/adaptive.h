#pragma once

#include "core/optional.h"

#include <ATen/core/Tensor.h>

// What the samplers that know the class table share.

namespace xsoftmax {

/// Whether an index is rebuilt before a step: at step 0, at multiples of `every` (0: never again), and before that at every / 32, / 16, ...
/// / 2, since the table changes fastest at the start.
bool refresh_is_due(int64_t step, int64_t every);

/// refresh_every of at least 0; `step` none, or int64 and 0-dim.
void check_schedule(const char* op, const OptionalTensor& step, int64_t refresh_every);
/// Whether an index is rebuilt now: always without a `step`, which is counted.
bool take_step(const OptionalTensor& step, int64_t refresh_every);

/// weight [N, D] and bias [N] or none, with a row for each of `num_classes`.
void check_class_table(const char* op, const at::Tensor& weight, const OptionalTensor& bias, const c10::SymInt& num_classes);

/// Refuses a table that holds a NaN, an infinity, or a row too long for the square of its norm in float32, and names the row. Reads it all.
void check_finite_rows(const char* op, const at::Tensor& weight);
/// Refuses a bias that holds a NaN or an infinity, and names its place.
void check_finite_bias(const char* op, const OptionalTensor& bias);

/// `ids` int64 [S], the same for all queries, or [Q, P].
void check_query_ids(const char* op, const at::Tensor& input, const at::Tensor& ids);

/// seed, num_samples and target of an op that draws by its input; target [Q], or, beside a set for all queries, of any length.
/// target_dim: of target.
void check_draws(const char* op, const at::Tensor& seed, const at::Tensor& input, const c10::SymInt& num_samples, bool shared,
                 const at::Tensor& target, int64_t target_dim = 1);

/// ids int64 [Q, M], log_count float32 [Q, M], target_log_count float32 of target's shape, empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor> empty_private_draws(const at::Tensor& input, const c10::SymInt& num_samples,
                                                                   const at::Tensor& target);

/// Rows in float32 as `width` asks: as they are, or with one more column, the bias or 1 where none is given.
at::Tensor with_bias_column(const at::Tensor& rows, const OptionalTensor& bias, int64_t width);

} // namespace xsoftmax
