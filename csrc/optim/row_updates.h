#pragma once

#include "core/cpu_dispatch.h"
#include "core/simd.h"
#include "optim/random_rounding.h"

#include <cstdint>

namespace xsoftmax {

// Coefficients of one row's update, worked out in float64 for each row. M is opmath<T>.

template <typename M>
struct MomentumStep {
  M decay;    ///< of the parameter, owed steps and this one
  M drift;    ///< movement owed, in units of the old buffer
  M keep;     ///< of the buffer, owed steps and this one
  M take;     ///< 1 - dampening
  M momentum; ///< of the look-ahead; read where nesterov is set
  M lr;
  bool nesterov;
};

template <typename M>
struct AdagradStep {
  M lr;
  M weight_decay;
  M eps;
};

template <typename M>
struct AdamStep {
  M decay;     ///< of the parameter, owed steps and this one
  M step_size; ///< lr / (1 - beta1^t)
  M scale;     ///< 1 / sqrt(1 - beta2^t)
  M keep1;     ///< of the first moment, owed steps and this one
  M take1;     ///< 1 - beta1
  M keep2;     ///< of the second
  M take2;     ///< 1 - beta2
  M eps;
  M owed;      ///< movement of the steps owed, in units of old m / (sqrt(old v) + owed_eps)
  M owed_eps;
};

/// Rows of the parameter and of its state that are updated soon. A loop asks for their memory between its elements: a request for all of it at once would
/// hold up what follows.
template <typename T, typename S>
struct RowsAhead {
  const T* param = nullptr; ///< nullptr: none
  const S* state[2] = {nullptr, nullptr};
};

/// The loops over one row of `width` elements that the row-wise optimizers are made of. Each reads a row of the parameter and of
/// its state once and writes it once. S is the type of state with an element for each of the parameter's: M, or Bf16, which rounds by chance.
template <typename T, typename S = opmath<T>>
struct RowUpdates {
  using M = opmath<T>;
  using Ahead = RowsAhead<T, S>;
  /// sum_j values[position[j] * width + d], j < n, for all d: in `sum`, or where it stands if it is one row of type M. Null where all sums are 0, which a
  /// NaN is not.
  const M* (*sum_rows)(M* sum, const T* values, const int64_t* position, int64_t n, int64_t width);
  /// w = decay w - lr g
  void (*sgd)(T* w, const M* g, M decay, M lr, const RowRounding& random, int64_t width, const Ahead& ahead);
  /// buffer' = keep buffer + take g;  w = decay w - drift buffer - lr (nesterov ? g + momentum buffer' : buffer')
  void (*momentum)(T* w, S* buffer, const M* g, const MomentumStep<M>& step, const RowRounding& random, int64_t width, const Ahead& ahead);
  /// g' = g + weight_decay w;  sum += g'^2;  w -= lr g' / (sqrt(sum) + eps)
  void (*adagrad)(T* w, S* sum, const M* g, const AdagradStep<M>& step, const RowRounding& random, int64_t width, const Ahead& ahead);
  /// The same with one sum a row, of the mean of g'^2.
  void (*adagrad_row)(T* w, M* sum, const M* g, const AdagradStep<M>& step, const RowRounding& random, int64_t width, const Ahead& ahead);
  /// w = decay w - owed m / (sqrt(v) + owed_eps);  m = keep1 m + take1 g;  v = keep2 v + take2 g^2;
  /// w -= step_size m / (scale sqrt(v) + eps). 0 / 0 is 0. Without g, nothing behind keep2 v.
  void (*adam)(T* w, S* m, S* v, const M* g, const AdamStep<M>& step, const RowRounding& random, int64_t width, const Ahead& ahead);
  /// The same with one v a row, of the mean of g^2.
  void (*adam_row)(T* w, S* m, M* v, const M* g, const AdamStep<M>& step, const RowRounding& random, int64_t width, const Ahead& ahead);
  /// w = decay w - drift buffer;  buffer *= keep
  void (*drift)(T* w, S* buffer, M decay, M drift, M keep, const RowRounding& random, int64_t width);
  /// w *= decay
  void (*decay)(T* w, M decay, const RowRounding& random, int64_t width);
  /// sum |x|^p over the row, or max |x| for p = infinity; a NaN stays one
  M (*power_sum)(const M* x, double p, int64_t width);
};

struct RowUpdateTable {
  RowUpdates<float> f32;
  RowUpdates<double> f64;
  RowUpdates<Bf16> bf16;
  RowUpdates<F16> f16;
  RowUpdates<float, Bf16> f32_low;
  RowUpdates<Bf16, Bf16> bf16_low;
  RowUpdates<F16, Bf16> f16_low;

  /// By the types of parameter and state.
  const RowUpdates<float>& of(float, float = {}) const { return f32; }
  const RowUpdates<double>& of(double, double = {}) const { return f64; }
  const RowUpdates<Bf16>& of(Bf16, float = {}) const { return bf16; }
  const RowUpdates<F16>& of(F16, float = {}) const { return f16; }
  const RowUpdates<float, Bf16>& of(float, Bf16) const { return f32_low; }
  const RowUpdates<Bf16, Bf16>& of(Bf16, Bf16) const { return bf16_low; }
  const RowUpdates<F16, Bf16>& of(F16, Bf16) const { return f16_low; }
};

XS_DECLARE_ISA_TABLE(RowUpdateTable, row_updates)

} // namespace xsoftmax
