#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

// row_norm: returns the p-norm of a row-sparse gradient, after summing equal rows.
//
//     grad = torch.sparse_coo_tensor(rows[None], values, [N, ...]).to_dense()
//     torch.linalg.vector_norm(grad, norm_type)
//
// rows [R] int64, in any order, repeats allowed; values [R, D] or [R], floating-point. norm_type >
// 0, or infinity. Returns a scalar tensor in opmath dtype: 0 if R = 0, NaN if any sum is NaN.
// Nothing of the size of values is copied or sorted. The result does not depend on the number of
// threads.

void check_row_norm(const at::Tensor& rows, const at::Tensor& values, double norm_type);
at::Tensor row_norm_reference(const at::Tensor& rows, const at::Tensor& values, double norm_type);

} // namespace xsoftmax
