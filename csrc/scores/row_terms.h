#pragma once

#include "core/optional.h"

#include <ATen/core/Tensor.h>

#include <tuple>

namespace xsoftmax {

/// A row-sparse gradient of a table [N, D] that is not written out: row rows[i] of the table gains
/// coefficients[i] * input[sources[i]]. Where a coefficient is 0, input may hold anything.
struct RowTerms {
  at::Tensor rows;         ///< int64 [R], sorted
  at::Tensor sources;      ///< int32 [R]
  at::Tensor coefficients; ///< [R], of the dtype in which input is calculated
  at::Tensor input;        ///< [Q, D]
};

// row_terms(Tensor grad, Tensor ids, Tensor? scale, int num_classes) -> (rows, sources, coefficients)
//
// The terms of the gradients grad [Q, P] of the scores of classes ids int64 [Q, P], times scale, [] or [Q], where given; R is Q P.
//
//     rows, order = ids.flatten().sort(stable=True)
//     sources, coefficients = order // P, (grad * scale).flatten()[order]
//
// grad is float32 or float64, sources int32. An id outside [0, num_classes) is an IndexError on the CPU. Ops that take the terms read them on the device.
void check_row_terms(const at::Tensor& grad, const at::Tensor& ids, const OptionalTensor& scale, int64_t num_classes);
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_terms_composite(const at::Tensor& grad, const at::Tensor& ids, const OptionalTensor& scale,
                                                                   int64_t num_classes);
RowTerms row_terms(const at::Tensor& grad, const at::Tensor& ids, const OptionalTensor& scale, const at::Tensor& input, int64_t num_classes);

/// Returns a tensor of the shape and dtype of the values that the terms stand for, which holds none of them.
at::Tensor shape_of_values(const RowTerms& terms);

/// Returns the terms as values [R, D] for rows, in input's dtype.
at::Tensor values_of(const RowTerms& terms);

// A backward pass leaves the terms of a table whose optimizer takes them, in the place of a gradient. So the rows of the gradient are never written, unless
// somebody reads `grad` first: write_row_terms then makes it.
//
//     accept_row_terms(Tensor table) -> ()          the table's optimizer takes terms
//     pending_row_terms(Tensor table) -> Tensor[]   rows, sources, coefficients and input, or nothing
//     drop_row_terms(Tensor table) -> ()
//     write_row_terms(Tensor table) -> ()           adds them to table.grad, and drops them

/// Whether a backward pass may leave terms for `table`: a leaf on a device whose optimizer takes them, whose gradient no hook waits for, in a pass that
/// accumulates gradients into all leaves and needs no second derivative. Not where there is a gradient already: terms of an earlier pass are written to it.
bool may_leave_row_terms(const at::Tensor& table);

/// Stores terms as the pending gradient of `table`, for which may_leave_row_terms was true.
void leave_row_terms(const at::Tensor& table, const RowTerms& terms);

void drop_row_terms(const at::Tensor& table);

} // namespace xsoftmax
