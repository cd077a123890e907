#pragma once

#include "core/optional.h"
#include "core/philox.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>
#include <tuple>

// What the row-wise optimizers share. A step takes a table and a row-sparse gradient of it:
//
//     param [N, D] or [N]    float32, float64, bfloat16 or float16; changed in place
//     rows [R]               int64 in [0, N), in any order, repeats allowed
//     values [R, D] or [R]   of param's dtype
//
// Values of equal rows are summed first (in float32 for the 16-bit types); each row is then updated once. A row whose summed
// gradient is exactly zero is not touched, which is what makes the zero rows that stand behind a class's first row in our gradients
// free. A NaN is not zero. State lies beside the table: [N, D] or [N] in opmath dtype (float32 for 16-bit parameters), or
// with an element for each of the parameter's in bfloat16, rounded by chance (optim/random_rounding.h); counters int32 [N]. Time and memory of a step are those
// of R rows, never of N. Results do not depend on the number of threads.

namespace xsoftmax {

/// Shared by every kernel of every row op. Rows are range-checked where they lie on the CPU.
void check_row_gradient(const char* op, const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values);
/// float32, float64, bfloat16 or float16; for rows, strided with 1 or 2 dimensions.
void check_row_param(const char* op, const at::Tensor& param, bool rows);
/// State with an element for each of param's (`elements`), else for each of its rows.
void check_row_state(const char* op, const char* arg, const at::Tensor& state, const at::Tensor& param, bool elements, at::ScalarType dtype);
/// State with an element for each of param's, in opmath dtype or in bfloat16.
void check_element_state(const char* op, const char* arg, const at::Tensor& state, const at::Tensor& param);
/// The dtype of such state under the option "state_dtype".
at::ScalarType element_state_dtype(const char* op, const at::Tensor& param, std::optional<at::ScalarType> option);

/// Whether rows of the tensor are runs of memory: they may be apart (a slice of columns), their elements not.
inline bool has_row_view(const at::Tensor& tensor) { return tensor.dim() == 1 || tensor.stride(1) == 1 || tensor.size(1) <= 1; }

/// The learning rate of a step: a number, or one on the device that kernels read.
struct LearningRate {
  double value = 0;
  const float* single = nullptr;
  const double* wide = nullptr;

  XS_HOST_DEVICE bool on_device() const { return single != nullptr || wide != nullptr; }
  XS_HOST_DEVICE double operator()() const { return single != nullptr ? double(*single) : wide != nullptr ? *wide : value; }
};
/// `value`, or what lies on param's device as `lr`, which `kept` keeps alive in the dtype that kernels read.
LearningRate learning_rate(double value, const OptionalTensor& lr, const at::Tensor& param, at::Tensor& kept);

/// The factor of decoupled weight decay in a step, and its logarithm, in the place of numbers where the learning rate is on the device.
struct StepDecay {
  LearningRate lr;
  double weight_decay = 0, factor = 1, log_factor = 0;

  StepDecay() = default;
  StepDecay(const LearningRate& lr, double weight_decay)
      : lr(lr), weight_decay(weight_decay), factor(1 - lr.value * weight_decay), log_factor(std::log1p(-lr.value * weight_decay)) {}
  XS_HOST_DEVICE double operator()() const { return lr.on_device() ? 1 - lr() * weight_decay : factor; }
  XS_HOST_DEVICE double log() const { return lr.on_device() ? ::log1p(-lr() * weight_decay) : log_factor; }
};

// For the composites in ATen calls.

/// The distinct rows with a gradient, rising, and their summed values in opmath dtype.
std::tuple<at::Tensor, at::Tensor> touched_rows(const at::Tensor& rows, const at::Tensor& values);
/// Which 16 random bits of an element.
enum class RoundingOf { Table, State, SecondState };
/// Rows `ids` of what is stored as `dtype`, in opmath dtype and rounded by chance to what `dtype` holds; where it is no 16-bit dtype, as they are.
at::Tensor rounded_rows(const at::Tensor& rows, const at::Tensor& ids, int64_t step, at::ScalarType dtype, RoundingOf of);
/// One number a row, shaped to multiply rows of `like`.
at::Tensor per_row(const at::Tensor& numbers, const at::Tensor& like);

} // namespace xsoftmax
