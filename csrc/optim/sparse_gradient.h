#pragma once

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>

#include <utility>

namespace xsoftmax {

/// Returns (rows [R], values [R, ...]) of a sparse COO gradient, coalesced or not. Throws if any
/// dimension other than 0 is sparse. Makes no ATen call if the indices are plain memory.
inline std::pair<at::Tensor, at::Tensor> sparse_gradient(const char* op, const at::Tensor& grad) {
  constexpr const char* kExpected =
      ": expected a gradient that is dense, or sparse COO in dimension 0 alone, got ";
  TORCH_CHECK(grad.layout() == at::kSparse, op, kExpected, "layout ", grad.layout());
  const auto* const sparse = static_cast<const at::SparseTensorImpl*>(grad.unsafeGetTensorImpl());
  TORCH_CHECK(sparse->sparse_dim() == 1, op, kExpected, sparse->sparse_dim(), " sparse dimensions");
  const at::Tensor indices = sparse->indices();
  const c10::TensorImpl* const impl = indices.unsafeGetTensorImpl();
  if (!indices.has_storage() || impl->is_python_dispatch() || impl->has_symbolic_sizes_strides()) {
    return {indices.select(0, 0), sparse->values()};
  }
  at::Tensor rows = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(indices.storage()), indices.key_set(), indices.dtype());
  rows.unsafeGetTensorImpl()->set_storage_offset(indices.storage_offset());
  rows.unsafeGetTensorImpl()->set_sizes_and_strides(indices.sizes().slice(1, 1),
                                                    indices.strides().slice(1, 1));
  return {std::move(rows), sparse->values()};
}

} // namespace xsoftmax
