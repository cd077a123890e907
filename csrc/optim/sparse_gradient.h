#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace xsoftmax {

/// (rows [R], values [R, ...]) of a sparse COO gradient, uncoalesced or not. Throws if it is sparse in another way than in its
/// rows.
inline std::pair<at::Tensor, at::Tensor> sparse_gradient(const char* op, const at::Tensor& grad) {
  TORCH_CHECK(grad.layout() == at::kSparse, op, ": expected a gradient that is dense or sparse COO, got layout ", grad.layout());
  TORCH_CHECK(grad.sparse_dim() == 1, op, ": expected a gradient that is sparse in dimension 0 alone, got ", grad.sparse_dim(), " sparse dimensions");
  return {grad._indices().select(0, 0), grad._values()};
}

} // namespace xsoftmax
