#include "optim/row_norm.h"

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "table/row_gradient.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace xsoftmax {

using at::Tensor;

void check_row_norm(const Tensor& rows, const Tensor& values, double norm_type) {
  constexpr const char* op = "row_norm";
  check::dim(op, "rows", rows, 1);
  check::int64(op, "rows", rows);
  check::floating(op, "values", values);
  TORCH_CHECK_VALUE(values.dim() == 1 || values.dim() == 2, op,
                    ": expected values with 1 or 2 dimensions, got shape ", values.sym_sizes());
  check::same_device(op, "rows", rows, "values", values);
  check::size(op, "values", values, 0, rows.sym_size(0), "the length of rows");
  TORCH_CHECK_VALUE(norm_type > 0, op, ": expected norm_type above 0, got ", norm_type);
}

Tensor row_norm_reference(const Tensor& rows, const Tensor& values, double norm_type) {
  check_row_norm(rows, values, norm_type);
  const auto dtype = opmath_dtype(values.scalar_type());
  if (values.numel() == 0) {
    return at::zeros({}, values.options().dtype(dtype));
  }
  return at::linalg_vector_norm(std::get<1>(sum_equal_rows(rows, values.to(dtype))), norm_type);
}

static Tensor row_norm_meta(const Tensor& rows, const Tensor& values, double norm_type) {
  check_row_norm(rows, values, norm_type);
  return at::empty({}, values.options().dtype(opmath_dtype(values.scalar_type())));
}

XSOFTMAX_OPERATORS(m) {
  m.def("row_norm(Tensor rows, Tensor values, float norm_type=2.) -> Tensor");
}
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("row_norm", row_norm_reference);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("row_norm", row_norm_meta); }

} // namespace xsoftmax
