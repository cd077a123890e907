#include "table/scale_gradient.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

at::Tensor product(const at::Tensor& gradient, const at::Tensor& factor, const at::Tensor&) {
  check::floating("scale_gradient", "gradient", gradient);
  check::floating("scale_gradient", "factor", factor);
  check::same_device("scale_gradient", "factor", factor, "gradient", gradient);
  check::broadcasts("scale_gradient", "factor", factor, "gradient", gradient);
  return gradient * factor;
}

} // namespace

at::Tensor scale_gradient(const at::Tensor& gradient, const at::Tensor& factor,
                          const at::Tensor& source) {
  static const auto op = find_op<decltype(product)>("xsoftmax::scale_gradient");
  return op.call(gradient, factor, source);
}

XSOFTMAX_OPERATORS(m) {
  m.def("scale_gradient(Tensor gradient, Tensor factor, Tensor source) -> Tensor");
}
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("scale_gradient", product); }
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("scale_gradient", torch::autograd::autogradNotImplementedFallback());
}

} // namespace xsoftmax
