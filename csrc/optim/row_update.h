#pragma once

#include "core/optional.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

// What the row-wise optimizer ops share. Each takes a table and a row-sparse gradient of it:
//
//     param [N, D] or [N]    float32, float64, bfloat16 or float16; changed in place
//     rows [R]               int64 in [0, N), in any order, repeats allowed
//     values [R, D] or [R]   of param's dtype
//
// Values of equal rows are summed first (in float32 for the 16-bit types); each row is then updated once. A row whose summed
// gradient is exactly zero is not touched, which is what makes the zero rows that stand behind a class's first row in our gradients
// free. A NaN is not zero. State lies beside the table: [N, D] or [N] in opmath dtype (float32 for 16-bit parameters), counters
// int32 [N], decay marks float64 [N]. Time and memory of a step are those of R rows, never of N. Results do not depend on the
// number of threads.
//
// Weight decay that a row owes. `decay` is the running sum of log(1 - lr weight_decay) over all steps of the parameter, this one
// included, and last_decay[row] the sum up to which the row has been decayed: a touched row is first multiplied by
// exp(decay - last_decay[row]). It is exact under any schedule of lr and weight_decay.

namespace xsoftmax {

/// Shared by every kernel of every row op.
void check_row_gradient(const char* op, const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values);
/// State with an element for each of param's (`elements`), else for each of its rows.
void check_row_state(const char* op, const char* arg, const at::Tensor& state, const at::Tensor& param, bool elements,
                     at::ScalarType dtype);
void check_last_decay(const char* op, const std::optional<at::Tensor>& last_decay, const at::Tensor& param);

// For the composites in ATen calls.

/// The distinct rows with a gradient, rising, and their summed values in opmath dtype.
std::tuple<at::Tensor, at::Tensor> touched_rows(const at::Tensor& rows, const at::Tensor& values);
/// One number a row, shaped to multiply rows of `like`.
at::Tensor per_row(const at::Tensor& numbers, const at::Tensor& like);
/// exp(decay - last_decay[rows]), float64 [rows]; ones without last_decay. Brings last_decay up to date.
at::Tensor take_decay(const at::Tensor& rows, const std::optional<at::Tensor>& last_decay, double decay);

} // namespace xsoftmax
