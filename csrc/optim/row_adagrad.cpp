#include "optim/row_adagrad.h"

#include "core/bump_versions.h"
#include "core/checks.h"
#include "core/dtypes.h"

#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace xsoftmax {

using at::Tensor;

void check_row_adagrad(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& sum) {
  constexpr const char* op = "row_adagrad_";
  check_row_gradient(op, param, rows, values);
  TORCH_CHECK_VALUE(sum.dim() == 1 || sum.dim() == param.dim(), op, ": expected sum of param's shape or [N], got shape ",
                    sum.sym_sizes());
  check_row_state(op, "sum", sum, param, sum.dim() == param.dim(), opmath_dtype(param.scalar_type()));
}

void row_adagrad_reference(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& sum, double lr,
                           double weight_decay, double eps) {
  check_row_adagrad(param, rows, values, sum);
  auto [ids, g] = touched_rows(rows, values);
  const Tensor old = param.index_select(0, ids).to(g.scalar_type());
  if (weight_decay != 0) {
    g = g + old.mul(weight_decay);
  }
  const Tensor squares = g.square();
  const Tensor next = sum.index_select(0, ids) + (sum.dim() < param.dim() ? squares.mean(1) : squares);
  sum.index_copy_(0, ids, next);
  const Tensor root = next.sqrt().add(eps);
  param.index_copy_(0, ids, (old - g.div(root.dim() < g.dim() ? root.unsqueeze(1) : root).mul(lr)).to(param.scalar_type()));
}

static void row_adagrad_meta(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& sum, double, double,
                             double) {
  check_row_adagrad(param, rows, values, sum);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("row_adagrad_(Tensor(a!) param, Tensor rows, Tensor values, Tensor(b!) sum, *, float lr, float weight_decay=0., "
        "float eps=1e-10) -> ()");
}
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("row_adagrad_", row_adagrad_reference); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("row_adagrad_", row_adagrad_meta); }

TORCH_LIBRARY_IMPL(xsoftmax, ADInplaceOrView, m) {
  m.impl("row_adagrad_", torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
}

} // namespace xsoftmax
