#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

// row_norm: the p-norm of a row-sparse gradient, of what its equal rows sum to.
//
//     torch.linalg.vector_norm(torch.sparse_coo_tensor(rows[None], values, [N, ...]).to_dense(), norm_type)
//
// rows [R] int64, any order, repeats allowed; values [R, D] or [R], floating. norm_type > 0, infinity included. Returns a number in
// opmath dtype; 0 for R = 0; NaN if a sum is NaN. Nothing of the size of values is copied or sorted; the result does not depend on
// the number of threads.

void check_row_norm(const at::Tensor& rows, const at::Tensor& values, double norm_type);
at::Tensor row_norm_reference(const at::Tensor& rows, const at::Tensor& values, double norm_type);

} // namespace xsoftmax
