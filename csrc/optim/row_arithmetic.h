#pragma once

// Arithmetic of the row-wise optimizers, per element and per row: inline functions for host and
// CUDA code, in the namespace XS_ISA of the including file (cpu/cpu_dispatch.h explains why each
// instruction set has a copy). M is the type of the computation.

#include "cpu/simd.h"
#include "optim/row_updates.h"

#ifndef XS_ISA
#error "row_arithmetic.h: expected XS_ISA, the namespace of an instruction set"
#endif

namespace xsoftmax::XS_ISA {
namespace {

#if defined(__CUDA_ARCH__)
static __device__ inline float square_root(float x) { return ::sqrtf(x); }
static __device__ inline double square_root(double x) { return ::sqrt(x); }
#else
static inline float square_root(float x) { return __builtin_sqrtf(x); }
static inline double square_root(double x) { return __builtin_sqrt(x); }
#endif

/// Returns the updated element; `buffer` is updated in place.
template <typename M>
XS_HOST_DEVICE inline M momentum_element(M w, M& buffer, M g, const MomentumStep<M>& s,
                                         bool nesterov) {
  const M old = buffer, next = s.buffer_factor * old + s.gradient_factor * g;
  buffer = next;
  return s.decay * w - s.drift * old - s.lr * (nesterov ? g + s.momentum * next : next);
}

/// Returns the updated element; `sum` is updated in place.
template <typename M>
XS_HOST_DEVICE inline M adagrad_element(M w, M& sum, M g, const AdagradStep<M>& s) {
  const M gradient = g + s.weight_decay * w, next = sum + gradient * gradient;
  sum = next;
  return w - s.lr * (gradient / (square_root(next) + s.eps));
}

/// Returns the step size of g for a row with the updated sum `sum`.
template <typename M>
XS_HOST_DEVICE inline M adagrad_row_rate(M sum, const AdagradStep<M>& s) {
  return s.lr / (square_root(sum) + s.eps);
}

/// Returns the element after its pending steps.
template <typename M>
XS_HOST_DEVICE inline M adam_pending_element(M w, M m, M v, const AdamStep<M>& s) {
  const M root = square_root(v) + s.pending_eps;
  return s.decay * w - s.pending * (m / (root == 0 ? M(1) : root));
}

/// Returns the updated element; `m` and `v` are updated in place.
template <typename M>
XS_HOST_DEVICE inline M adam_element(M w, M& m, M& v, M g, const AdamStep<M>& s, M decay,
                                     M first_factor, M second_factor) {
  const M first = first_factor * m + s.one_minus_beta1 * g,
          second = second_factor * v + s.one_minus_beta2 * g * g;
  m = first;
  v = second;
  const M root = s.scale * square_root(second) + s.eps;
  return decay * w - s.step_size * (first / (root == 0 ? M(1) : root));
}

/// Returns the step size of the first moment, for a row with the updated single second moment
/// `second`.
template <typename M>
XS_HOST_DEVICE inline M adam_row_rate(M second, const AdamStep<M>& s) {
  const M root = s.scale * square_root(second) + s.eps;
  return s.step_size / (root == 0 ? M(1) : root);
}

/// Returns the movement of the pending steps per unit of the first moment, for a row whose single
/// second moment was `second`.
template <typename M>
XS_HOST_DEVICE inline M adam_row_pending(M second, const AdamStep<M>& s) {
  const M root = square_root(second) + s.pending_eps;
  return s.pending / (root == 0 ? M(1) : root);
}

/// Returns the element after its pending steps and this one; `pending` and `rate` come from the two
/// functions above. `m` is updated in place.
template <typename M>
XS_HOST_DEVICE inline M adam_row_element(M w, M& m, M g, const AdamStep<M>& s, M pending, M rate) {
  const M first = s.first_factor * m + s.one_minus_beta1 * g, moved = s.decay * w - pending * m;
  m = first;
  return moved - rate * first;
}

} // namespace
} // namespace xsoftmax::XS_ISA
