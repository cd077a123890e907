#pragma once

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <tuple>

namespace xsoftmax {

// perturbed_argmax(input [Q, D], weight [N, D], bias [N] or none, index, noise float32 [Q, N]) ->
// (ids int64 [Q], cells_read int64 [Q], certified bool [Q]): finds the class with the largest z.w +
// b + noise, with an index that search_index built from the same table. With Gumbel noise that
// class is a sample of the softmax. Infinite noise forces or forbids a class; NaN is
// refused on the CPU, and not looked for elsewhere.
//
// Searches as search_topk does with k = 1. A cell is skipped if its bound plus the largest noise of
// its classes is too small. Sums are in float64; of equal sums the lower id wins. Not
// differentiable.
//
// The composite, which CUDA runs, scores all classes.

using PerturbedArgmax = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

void check_perturbed_argmax(const at::Tensor& input, const at::Tensor& weight,
                            const OptionalTensor& bias, const at::Tensor& noise);
PerturbedArgmax perturbed_argmax_reference(const at::Tensor& input, const at::Tensor& weight,
                                           const OptionalTensor& bias, at::TensorList index,
                                           const at::Tensor& noise);

} // namespace xsoftmax
