#pragma once

#include "cpu/cpu_dispatch.h"
#include "cpu/simd.h"
#include "optim/random_rounding.h"

#include <cstdint>

namespace xsoftmax {

// Coefficients of one row's update, computed in float64 per row. M is opmath<T>.

template <typename M>
struct MomentumStep {
  M decay; ///< factor of the parameter, over the pending steps and this one
  M drift; ///< movement of the pending steps, in units of the old buffer
  M buffer_factor; ///< factor of the buffer, over the pending steps and this one
  M gradient_factor;     ///< 1 - dampening
  M momentum; ///< of the look-ahead; read if nesterov is set
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
  M decay; ///< factor of the parameter, over the pending steps and this one
  M step_size; ///< lr / (1 - beta1^t)
  M scale;     ///< 1 / sqrt(1 - beta2^t)
  M first_factor; ///< factor of the first moment, over the pending steps and this one
  M one_minus_beta1;     ///< 1 - beta1
  M second_factor; ///< factor of the second moment, likewise
  M one_minus_beta2;     ///< 1 - beta2
  M eps;
  M pending; ///< movement of the pending steps, in units of old m / (sqrt(old v) + pending_eps)
  M pending_eps;
};

/// Rows of the parameter and its state that will be updated soon. The update loops prefetch them
/// between elements, because prefetching a whole row at once would stall the loop.
template <typename T, typename S>
struct RowsAhead {
  const T* param = nullptr; ///< nullptr: no row
  const S* state[2] = {nullptr, nullptr};
};

/// The loops over one row of `width` elements, from which the row-wise optimizers are built. Each
/// loop reads and writes a row of the parameter and its state once. S is the type of per-element
/// state: M, or Bf16 with stochastic rounding.
template <typename T, typename S = opmath<T>>
struct RowUpdates {
  using M = opmath<T>;
  using Ahead = RowsAhead<T, S>;
  /// Sums values[position[j] * width + d] over j < n for all d. Returns `sum`, or the row itself if
  /// n = 1 and its type is M; nullptr if all sums are 0 (a NaN is not).
  const M* (*sum_rows)(M* sum, const T* values, const int64_t* position, int64_t n, int64_t width);
  /// w = decay w - lr g
  void (*sgd)(T* w, const M* g, M decay, M lr, const RowRounding& random, int64_t width,
              const Ahead& ahead);
  ///   buffer' = buffer_factor buffer + gradient_factor g
  ///   w = decay w - drift buffer - lr (nesterov ? g + momentum buffer' : buffer')
  void (*momentum)(T* w, S* buffer, const M* g, const MomentumStep<M>& step,
                   const RowRounding& random, int64_t width, const Ahead& ahead);
  /// g' = g + weight_decay w;  sum += g'^2;  w -= lr g' / (sqrt(sum) + eps)
  void (*adagrad)(T* w, S* sum, const M* g, const AdagradStep<M>& step, const RowRounding& random,
                  int64_t width, const Ahead& ahead);
  /// The same with one sum per row, of the mean of g'^2.
  void (*adagrad_row)(T* w, M* sum, const M* g, const AdagradStep<M>& step,
                      const RowRounding& random, int64_t width, const Ahead& ahead);
  ///   w = decay w - pending m / (sqrt(v) + pending_eps)
  ///   m = first_factor m + one_minus_beta1 g;  v = second_factor v + one_minus_beta2 g^2
  ///   w -= step_size m / (scale sqrt(v) + eps)
  ///
  /// 0 / 0 is 0. If g is nullptr, only decays and pending movement are applied: m = first_factor m,
  /// v = second_factor v, and the last line is skipped.
  void (*adam)(T* w, S* m, S* v, const M* g, const AdamStep<M>& step, const RowRounding& random,
               int64_t width, const Ahead& ahead);
  /// The same with one v per row, of the mean of g^2.
  void (*adam_row)(T* w, S* m, M* v, const M* g, const AdamStep<M>& step, const RowRounding& random,
                   int64_t width, const Ahead& ahead);
  /// w = decay w - drift buffer;  buffer *= buffer_factor
  void (*drift)(T* w, S* buffer, M decay, M drift, M buffer_factor, const RowRounding& random,
                int64_t width);
  /// w *= decay
  void (*decay)(T* w, M decay, const RowRounding& random, int64_t width);
  /// Returns the sum of |x|^p over the row, or max |x| for p = infinity. NaN propagates.
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

  /// Returns the loops for the types of parameter and state.
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
