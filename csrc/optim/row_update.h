#pragma once

#include "op/optional.h"
#include "random/philox.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>
#include <tuple>

// Shared by the row-wise optimizers. A step takes a table and its row-sparse gradient:
//
//     param [N, D] or [N]    float32, float64, bfloat16 or float16; updated in place
//     rows [R]               int64 in [0, N), in any order, repeats allowed
//     values [R, D] or [R]   of param's dtype
//
// Values of equal rows are summed first (in float32 for the 16-bit types), then each row is updated
// once. A row whose summed gradient is exactly zero is not touched. Our gradients put the sum of a
// class into its first row and zeros into its other rows, so these zero rows cost nothing. A NaN is
// not zero.
//
// State per element has param's shape, in opmath dtype (float32 for 16-bit parameters) or in
// bfloat16 with stochastic rounding (optim/random_rounding.h). State per row is [N] in opmath
// dtype; step counters are int32 [N]. Time and memory of a step depend on R, never on N. Results do
// not depend on the number of threads.

namespace xsoftmax {

/// Checks a row-sparse gradient, for every kernel of every row op. Row ids are range-checked if
/// they are on the CPU.
void check_row_gradient(const char* op, const at::Tensor& param, const at::Tensor& rows,
                        const at::Tensor& values);
/// Checks that the dtype is float32, float64, bfloat16 or float16 and, if `rows`, that param is
/// strided with 1 or 2 dimensions.
void check_row_param(const char* op, const at::Tensor& param, bool rows);
/// Checks state with one value per element of param (`elements`), otherwise one per row.
void check_row_state(const char* op, const char* arg, const at::Tensor& state,
                     const at::Tensor& param, bool elements, at::ScalarType dtype);
/// Checks state with one value per element of param, in opmath dtype or bfloat16.
void check_element_state(const char* op, const char* arg, const at::Tensor& state,
                         const at::Tensor& param);
/// Returns the dtype of per-element state under the option "state_dtype".
at::ScalarType element_state_dtype(const char* op, const at::Tensor& param,
                                   std::optional<at::ScalarType> option);

/// Returns whether each row is contiguous. Rows may be apart (a slice of columns), their elements
/// may not.
inline bool has_row_view(const at::Tensor& tensor) {
  return tensor.dim() == 1 || tensor.stride(1) == 1 || tensor.size(1) <= 1;
}

/// The learning rate of a step: a number, or a pointer to one on the device that kernels read.
struct LearningRate {
  double value = 0;
  const float* single = nullptr;
  const double* wide = nullptr;

  XS_HOST_DEVICE bool on_device() const { return single != nullptr || wide != nullptr; }
  XS_HOST_DEVICE double operator()() const {
    return single != nullptr ? double(*single) : wide != nullptr ? *wide : value;
  }
};
/// Returns `value` or, if given, `lr` on param's device. `lr_storage` keeps that tensor alive, in a
/// dtype that kernels read.
LearningRate learning_rate(double value, const OptionalTensor& lr, const at::Tensor& param,
                           at::Tensor& lr_storage);

/// Computes the factor of decoupled weight decay in a step and its logarithm. If the learning rate
/// is on the device, both are computed there.
struct StepDecay {
  LearningRate lr;
  double weight_decay = 0, factor = 1, log_factor = 0;

  StepDecay() = default;
  StepDecay(const LearningRate& lr, double weight_decay)
      : lr(lr), weight_decay(weight_decay), factor(1 - lr.value * weight_decay),
        log_factor(std::log1p(-lr.value * weight_decay)) {}
  XS_HOST_DEVICE double operator()() const {
    return lr.on_device() ? 1 - lr() * weight_decay : factor;
  }
  XS_HOST_DEVICE double log() const {
    return lr.on_device() ? ::log1p(-lr() * weight_decay) : log_factor;
  }
};

// Helpers for the composites.

/// Returns the unique rows with a gradient in ascending order, and their summed values in opmath
/// dtype.
std::tuple<at::Tensor, at::Tensor> touched_rows(const at::Tensor& rows, const at::Tensor& values);
/// Selects which of an element's three groups of 16 random bits to use.
enum class RoundingTarget { Table, State, SecondState };
/// Rounds `rows`, the rows `ids` of a tensor of type `dtype`, to values that `dtype` can hold, by
/// stochastic rounding, and returns them in opmath dtype. Returns them unchanged if `dtype` is not
/// 16-bit.
at::Tensor rounded_rows(const at::Tensor& rows, const at::Tensor& ids, int64_t step,
                        at::ScalarType dtype, RoundingTarget rounding_target);
/// Reshapes one number per row so that it broadcasts over rows of `like`.
at::Tensor per_row(const at::Tensor& numbers, const at::Tensor& like);

} // namespace xsoftmax
