#include "table/updates/reset_rows.h"

#include "op/checks.h"
#include "op/host_state.h"
#include "op/operators.h"
#include "table/files/mapped_file.h"
#include "table/updates/row_states.h"
#include "table/updates/pending_updates.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>
#include <xsoftmax/optim.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kResetRows = "reset_rows_";

void check_reset(const Tensor& table, const Tensor& rows, const Tensor& values) {
  TORCH_CHECK_VALUE(table.dim() >= 1, kResetRows, ": expected a table with rows, got no dimension");
  check::in_memory(kResetRows, "table", table);
  check::dim(kResetRows, "rows", rows, 1);
  check::int64(kResetRows, "rows", rows);
  check::same_device(kResetRows, "rows", rows, "table", table);
  check::dim(kResetRows, "values", values, table.dim());
  check::same_dtype(kResetRows, "values", values, "table", table);
  check::same_device(kResetRows, "values", values, "table", table);
  check::size(kResetRows, "values", values, 0, rows.sym_size(0), "rows");
  for (int64_t axis = 1; axis < table.dim(); ++axis) {
    check::size(kResetRows, "values", values, axis, table.sym_size(axis), "the table");
  }
}

void reset_rows_meta(Tensor& table, const Tensor& rows, const Tensor& values) {
  check_reset(table, rows, values);
}

} // namespace

void reset_rows_(Tensor& table, const Tensor& rows, const Tensor& values) {
  check_reset(table, rows, values);
  if (rows.is_cpu()) {
    check::class_ids(kResetRows, "rows", rows, table.size(0));
  }
  const TableWriteGuard write(table);
  const at::NoGradGuard no_grad;
  table_changes(table);
  table.index_copy_(0, rows, values);
  for (const RowState& state : row_states_of(table)) {
    for (Tensor& tensor : state.row_tensors(table)) {
      tensor.scalar_type() == at::kInt ? tensor.index_fill_(0, rows, state.tensors[0].to(at::kInt))
                                       : tensor.index_fill_(0, rows, state.initial);
    }
  }
}

void reset_rows(const Tensor& table, const Tensor& rows, const Tensor& values) {
  static const auto op = find_op<decltype(reset_rows_)>("xsoftmax::reset_rows_");
  const at::NoGradGuard no_grad;
  Tensor written = table;
  op.call(written, rows, values);
}

XSOFTMAX_OPERATORS(m) {
  m.def("reset_rows_(Tensor(a!) table, Tensor rows, Tensor values) -> ()", kUsesHostState);
}
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("reset_rows_", reset_rows_); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("reset_rows_", reset_rows_meta); }

} // namespace xsoftmax
