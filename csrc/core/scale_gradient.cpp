#include "core/scale_gradient.h"

#include "core/checks.h"
#include "core/shape_checks.h"

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

at::Tensor scale_gradient(const at::Tensor& gradient, const at::Tensor& factor, const at::Tensor& source) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::scale_gradient", "").typed<decltype(product)>();
  return op.call(gradient, factor, source);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) { m.def("scale_gradient(Tensor gradient, Tensor factor, Tensor source) -> Tensor"); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("scale_gradient", product); }
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) { m.impl("scale_gradient", torch::autograd::autogradNotImplementedFallback()); }

} // namespace xsoftmax
