#pragma once

#include <c10/core/DispatchKey.h>
#include <torch/library.h>

#include <span>
#include <string_view>
#include <utility>

// Defines operators and their guards. A file defines its operators in one block,
//
//     XSOFTMAX_OPERATORS(m) {
//       m.def("linear_topk(Tensor input, ...) -> (Tensor, Tensor)");
//     }
//
// instead of TORCH_LIBRARY_FRAGMENT(xsoftmax, m). The block also registers the guards of every
// operator, in whatever order the files are loaded:
//
// - Tensors that are not dense (sparse, quantized, nested, MKL-DNN) raise an error that names the
//   argument. Without this guard they would reach composite kernels.
// - An operator that writes to an argument rejects a negative or conjugate view, a tensor whose
//   elements share memory, and a tensor that shares memory with another argument. It runs without
//   recording gradients, and increments the version counters of the tensors it writes to.
//
// The guards are kernels for dispatch keys that ordinary calls do not reach, except the guard that
// increments version counters.

namespace xsoftmax {

/// An operator and a dispatch key for which the operator registers its own kernel instead of the
/// guard.
using OwnKernel = std::pair<std::string_view, c10::DispatchKey>;

/// Runs `define` and registers guards for the operators that it defines, except those in
/// `own_kernels`.
void define_guarded(torch::Library& m, void (*define)(torch::Library&),
                    std::span<const OwnKernel> own_kernels);

} // namespace xsoftmax

/// Opens a block that defines operators in `m`. The optional argument is an array of OwnKernel.
#define XSOFTMAX_OPERATORS(m, ...) \
  XSOFTMAX_OPERATORS_(C10_CONCATENATE(define_operators_, C10_UID), m, __VA_ARGS__)
#define XSOFTMAX_OPERATORS_(define, m, ...)                                                       \
  static void define(torch::Library& m);                                                          \
  TORCH_LIBRARY_FRAGMENT(xsoftmax, library) {                                                     \
    xsoftmax::define_guarded(library, define, std::span<const xsoftmax::OwnKernel>{__VA_ARGS__}); \
  }                                                                                               \
  void define(torch::Library& m)
