#include "optim/row_norm.h"
#include "optim/sparse_gradient.h"
#include "op/find_op.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <torch/torch.h>
#include <xsoftmax/optim.h>

#include <algorithm>
#include <cmath>

namespace xsoftmax {
namespace {

using at::Tensor;

Tensor grad_norm(const Tensor& grad, double norm_type) {
  static const auto row_norm = find_op<decltype(row_norm_reference)>("xsoftmax::row_norm");
  if (grad.layout() == at::kStrided) {
    return at::linalg_vector_norm(grad, norm_type);
  }
  const auto [rows, values] = sparse_gradient("clip_grad_norm_", grad);
  return row_norm.call(rows, values, norm_type);
}

// Returns whether elements share memory, as those of an expanded tensor do.
bool shares_memory(const Tensor& tensor) {
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    if (tensor.stride(axis) == 0 && tensor.size(axis) > 1) {
      return true;
    }
  }
  return false;
}

void scale_grad(Tensor& grad, const Tensor& coefficient) {
  Tensor values = grad.layout() == at::kStrided ? grad : grad._values();
  const Tensor factor = coefficient.to(values.device(), values.scalar_type());
  if (grad.layout() != at::kStrided && shares_memory(values)) {
    grad = at::_sparse_coo_tensor_unsafe(grad._indices(), values.mul(factor), grad.sizes());
  } else {
    values.mul_(factor);
  }
}

} // namespace

double clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  TORCH_CHECK_VALUE(norm_type > 0, "clip_grad_norm_: expected norm_type above 0, got ", norm_type);
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> norms;
  for (const Tensor& param : parameters) {
    if (param.grad().defined()) {
      norms.push_back(grad_norm(param.grad(), norm_type)
                          .to(norms.empty() ? param.device() : norms[0].device()));
    }
  }
  if (norms.empty()) {
    return 0;
  }
  const Tensor total =
      norms.size() == 1 ? norms[0] : at::linalg_vector_norm(torch::stack(norms), norm_type);
  const double norm = total.item<double>();
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm),
              "clip_grad_norm_: expected gradients with a finite norm, got a norm of ", norm,
              " (norm_type ", norm_type, ")");
  const Tensor coefficient = torch::clamp(max_norm / (total + 1e-6), std::nullopt, 1.0);
  if (coefficient.is_cpu() && coefficient.item<double>() == 1) { // no gradient changes
    return norm;
  }
  for (const Tensor& param : parameters) {
    if (param.grad().defined()) {
      scale_grad(param.mutable_grad(), coefficient);
    }
  }
  return norm;
}

} // namespace xsoftmax
