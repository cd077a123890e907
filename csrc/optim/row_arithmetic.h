#pragma once

// The arithmetic of one element of a row, and of one row's coefficients, as the row-wise optimizers need it: inline functions for host and CUDA
// code, in the namespace XS_ISA of the file that includes them (core/cpu_dispatch.h says why each instruction set has its copies). M is the type
// that they calculate in.

#include "core/simd.h"
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

/// The element after the step; `buffer` becomes the next.
template <typename M>
XS_HOST_DEVICE inline M momentum_element(M w, M& buffer, M g, const MomentumStep<M>& s, bool nesterov) {
  const M old = buffer, next = s.keep * old + s.take * g;
  buffer = next;
  return s.decay * w - s.drift * old - s.lr * (nesterov ? g + s.momentum * next : next);
}

/// The step of the element; `sum` becomes the next.
template <typename M>
XS_HOST_DEVICE inline M adagrad_element(M w, M& sum, M g, const AdagradStep<M>& s) {
  const M gradient = g + s.weight_decay * w, next = sum + gradient * gradient;
  sum = next;
  return w - s.lr * (gradient / (square_root(next) + s.eps));
}

/// What a step takes of g for a row whose sum is now `sum`.
template <typename M>
XS_HOST_DEVICE inline M adagrad_row_rate(M sum, const AdagradStep<M>& s) {
  return s.lr / (square_root(sum) + s.eps);
}

/// The element after the steps that it owes.
template <typename M>
XS_HOST_DEVICE inline M adam_owed_element(M w, M m, M v, const AdamStep<M>& s) {
  const M root = square_root(v) + s.owed_eps;
  return s.decay * w - s.owed * (m / (root == 0 ? M(1) : root));
}

/// The element after the step; `m` and `v` become the next.
template <typename M>
XS_HOST_DEVICE inline M adam_element(M w, M& m, M& v, M g, const AdamStep<M>& s, M decay, M keep1, M keep2) {
  const M first = keep1 * m + s.take1 * g, second = keep2 * v + s.take2 * g * g;
  m = first;
  v = second;
  const M root = s.scale * square_root(second) + s.eps;
  return decay * w - s.step_size * (first / (root == 0 ? M(1) : root));
}

/// What a step takes of the first moment of a row whose only second moment is now `second`.
template <typename M>
XS_HOST_DEVICE inline M adam_row_rate(M second, const AdamStep<M>& s) {
  const M root = s.scale * square_root(second) + s.eps;
  return s.step_size / (root == 0 ? M(1) : root);
}

/// What the steps owed take of it, where the second moment was `second`.
template <typename M>
XS_HOST_DEVICE inline M adam_row_owed(M second, const AdamStep<M>& s) {
  const M root = square_root(second) + s.owed_eps;
  return s.owed / (root == 0 ? M(1) : root);
}

/// The element after the steps that it owes and this one, by those two; `m` becomes the next.
template <typename M>
XS_HOST_DEVICE inline M adam_row_element(M w, M& m, M g, const AdamStep<M>& s, M owed, M rate) {
  const M first = s.keep1 * m + s.take1 * g, moved = s.decay * w - owed * m;
  m = first;
  return moved - rate * first;
}

} // namespace
} // namespace xsoftmax::XS_ISA
