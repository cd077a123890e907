#pragma once

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <tuple>

namespace xsoftmax {

/// A row-sparse gradient of a table [N, D] in factored form: row rows[i] of the table gains
/// coefficients[i] * input[sources[i]]. Where a coefficient is 0, the row of input may hold
/// anything, NaN included.
struct RowTerms {
  at::Tensor rows;         ///< int64 [R], sorted
  at::Tensor sources;      ///< int32 [R]
  at::Tensor coefficients; ///< [R], in the opmath dtype of input
  at::Tensor input;        ///< [Q, D]
};

// row_terms(Tensor grad, Tensor ids, Tensor? scale, int num_classes)
//     -> (rows, sources, coefficients)
//
// Returns the gradient of a table in factored form, from the gradients grad [Q, P] of the scores of
// the classes ids int64 [Q, P]. scale, [] or [Q], multiplies grad. R = Q P.
//
//     rows, order = ids.flatten().sort(stable=True)
//     sources, coefficients = order // P, (grad * scale).flatten()[order]
//
// grad is float32 or float64, sources int32. On the CPU an id outside [0, num_classes) raises
// IndexError. Operators that consume the terms read them on the device.
void check_row_terms(const at::Tensor& grad, const at::Tensor& ids, const OptionalTensor& scale,
                     int64_t num_classes);
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_terms_composite(const at::Tensor& grad,
                                                                   const at::Tensor& ids,
                                                                   const OptionalTensor& scale,
                                                                   int64_t num_classes);
RowTerms row_terms(const at::Tensor& grad, const at::Tensor& ids, const OptionalTensor& scale,
                   const at::Tensor& input, int64_t num_classes);

/// Returns a tensor with the shape and dtype of values_of(terms), expanded from one uninitialised
/// row: for its metadata only.
at::Tensor shape_of_values(const RowTerms& terms);

/// Returns the values [R, D] for terms.rows, in input's dtype.
at::Tensor values_of(const RowTerms& terms);

// Lazy gradients: if the optimizer of a table accepts terms, the backward pass stores the terms
// instead of a gradient. The rows of the gradient are then never written, unless `grad` is read
// first: write_row_terms materialises it.
//
//     accept_row_terms(Tensor table) -> ()          the optimizer of the table accepts terms
//     pending_row_terms(Tensor table) -> Tensor[]   rows, sources, coefficients, input; or empty
//     drop_row_terms(Tensor table) -> ()            discards the terms
//     write_row_terms(Tensor table) -> ()           adds them to table.grad and discards them

/// Returns whether a backward pass may store terms for `table`. The table must be a leaf on a
/// device (not the CPU), have an optimizer that accepts terms, and have neither gradient hooks nor
/// a gradient (pending terms of an earlier pass are written to the gradient first). The pass must
/// accumulate into all leaves and not create a graph.
bool can_store_row_terms(const at::Tensor& table);

/// Stores terms as the pending gradient of `table`. Requires can_store_row_terms(table).
void store_row_terms(const at::Tensor& table, const RowTerms& terms);

void drop_row_terms(const at::Tensor& table);

} // namespace xsoftmax
