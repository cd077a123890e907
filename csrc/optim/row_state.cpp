#include "optim/row_state.h"

#include "core/checks.h"
#include "core/memory.h"
#include "optim/settle.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char *kResize = "resize_rows_", *kReset = "reset_rows_";

/// Memory that resize_rows_ made, with room behind the table.
class Rooms {
 public:
  bool has(const Tensor& table) {
    const std::lock_guard lock(mutex_);
    const auto found = made_.find(table.storage().unsafeGetStorageImpl());
    return found != made_.end() && !found->second.expired();
  }
  void add(const Tensor& table) {
    const std::lock_guard lock(mutex_);
    std::erase_if(made_, [](const auto& entry) { return entry.second.expired(); });
    made_.insert_or_assign(table.storage().unsafeGetStorageImpl(), table.storage().getWeakStorageImpl());
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> made_;
};

Rooms& rooms() {
  static Rooms* const all = new Rooms; // never destroyed: tables may outlive static objects
  return *all;
}

std::vector<int64_t> sizes_of(const Tensor& table, int64_t rows) {
  std::vector<int64_t> sizes = table.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

/// Whether it has a row for each of the parameter's. The debts of optim/owed_steps.h are longer for one row; a buffer that the present options do without is [0].
bool has_rows(const Tensor& state, const Tensor& fresh, int64_t num_rows) {
  return state.dim() > 0 && state.size(0) == num_rows && fresh.dim() > 0 && fresh.size(0) <= 1;
}

void check_state(const char* op, at::TensorList state, at::TensorList fresh, int64_t num_rows) {
  TORCH_CHECK_VALUE(state.size() == fresh.size() && !state.empty(), op, ": expected as many tensors of fresh state as of state, and one at least, got ",
                    fresh.size(), " and ", state.size());
  TORCH_CHECK_VALUE(num_rows >= 0, op, ": expected num_rows of at least 0, got ", num_rows);
  for (size_t i = 0; i < state.size(); ++i) {
    check::dtype(op, "fresh", fresh[i], state[i].scalar_type());
  }
}

/// What all elements of a row are before its first step, 0-dim.
Tensor start_of(const Tensor& state, const Tensor& fresh, const Tensor& step) {
  if (state.scalar_type() == at::kInt) { // last_step
    return step.to(state.options());
  }
  return fresh.numel() == 0 ? at::zeros({}, state.options()) : fresh.flatten()[0].to(state.device());
}

void check_resize(const char* op, const Tensor& table, int64_t size) {
  TORCH_CHECK_VALUE(table.dim() >= 1, op, ": expected a table with rows, got no dimension");
  TORCH_CHECK_VALUE(size >= 0 && size <= int64_t(1) << 40, op, ": expected size in [0, 2^40], got ", size);
}

void resize_rows_meta(Tensor& table, int64_t size) {
  check_resize(kResize, table, size);
  table.resize_(sizes_of(table, size));
}

void resize_row_state_meta(at::TensorList state, at::TensorList fresh, int64_t num_rows, int64_t) { check_state("resize_row_state_", state, fresh, num_rows); }

void check_reset(const char* op, const Tensor& table, const Tensor& rows, const Tensor& values) {
  TORCH_CHECK_VALUE(table.dim() >= 1, op, ": expected a table with rows, got no dimension");
  check::in_memory(op, "table", table);
  check::dim(op, "rows", rows, 1);
  check::int64(op, "rows", rows);
  check::same_device(op, "rows", rows, "table", table);
  check::dim(op, "values", values, table.dim());
  check::same_dtype(op, "values", values, "table", table);
  check::same_device(op, "values", values, "table", table);
  check::size(op, "values", values, 0, rows.sym_size(0), "rows");
  for (int64_t axis = 1; axis < table.dim(); ++axis) {
    check::size(op, "values", values, axis, table.sym_size(axis), "the table");
  }
}

void reset_rows_meta(Tensor& table, const Tensor& rows, const Tensor& values) { check_reset(kReset, table, rows, values); }

void reset_row_state_meta(at::TensorList state, at::TensorList fresh, const Tensor& rows, int64_t num_rows) {
  check_state("reset_row_state_", state, fresh, num_rows);
  check::int64("reset_row_state_", "rows", rows);
}

} // namespace

void resize_rows_(Tensor& table, int64_t size) {
  check_resize(kResize, table, size);
  check::in_memory(kResize, "table", table);
  const at::NoGradGuard no_grad;
  const int64_t before = table.size(0), row = before == 0 ? c10::multiply_integers(table.sizes().slice(1)) : table.numel() / before;
  const int64_t room = row == 0 ? size : (int64_t(table.storage().nbytes() / table.itemsize()) - table.storage_offset()) / row;
  if (size <= before ? table.is_contiguous() : table.is_contiguous() && size <= room && rooms().has(table)) {
    table.resize_(sizes_of(table, size)); // within its memory
    return;
  }
  const Tensor larger = table_empty(sizes_of(table, std::max(size, std::min(before + before / 4, int64_t(1) << 40))), table.options());
  larger.narrow(0, 0, std::min(before, size)).copy_(table.narrow(0, 0, std::min(before, size)));
  rooms().add(larger);
  table.set_(larger.storage(), 0, sizes_of(table, size));
}

void reset_rows_(Tensor& table, const Tensor& rows, const Tensor& values) {
  check_reset(kReset, table, rows, values);
  if (rows.is_cpu()) {
    check::class_ids(kReset, "rows", rows, table.size(0));
  }
  const WriteToTables write(table);
  const at::NoGradGuard no_grad;
  table.index_copy_(0, rows, values);
}

void reset_row_state_(at::TensorList state, at::TensorList fresh, const Tensor& rows, int64_t num_rows) {
  constexpr const char* op = "reset_row_state_";
  check_state(op, state, fresh, num_rows);
  check::dim(op, "rows", rows, 1);
  check::int64(op, "rows", rows);
  if (rows.is_cpu()) {
    check::class_ids(op, "rows", rows, num_rows);
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < state.size(); ++i) {
    if (has_rows(state[i], fresh[i], num_rows)) {
      state[i].index_fill_(0, rows.to(state[i].device()), start_of(state[i], fresh[i], state[0]));
    }
  }
}

void resize_row_state_(at::TensorList state, at::TensorList fresh, int64_t num_rows, int64_t size) {
  constexpr const char* op = "resize_row_state_";
  check_state(op, state, fresh, num_rows);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < state.size(); ++i) {
    if (has_rows(state[i], fresh[i], num_rows)) {
      Tensor resized = state[i];
      resize_rows_(resized, size);
      if (size > num_rows) {
        resized.narrow(0, num_rows, size - num_rows).copy_(start_of(state[i], fresh[i], state[0]));
      }
    }
  }
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("resize_rows_(Tensor(a!) table, int size) -> ()");
  m.def("reset_rows_(Tensor(a!) table, Tensor rows, Tensor values) -> ()");
  m.def("reset_row_state_(Tensor(a!)[] state, Tensor[] fresh, Tensor rows, int num_rows) -> ()");
  m.def("resize_row_state_(Tensor(a!)[] state, Tensor[] fresh, int num_rows, int size) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("resize_rows_", resize_rows_);
  m.impl("reset_rows_", reset_rows_);
  m.impl("reset_row_state_", reset_row_state_);
  m.impl("resize_row_state_", resize_row_state_);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("resize_rows_", resize_rows_meta);
  m.impl("reset_rows_", reset_rows_meta);
  m.impl("reset_row_state_", reset_row_state_meta);
  m.impl("resize_row_state_", resize_row_state_meta);
}

} // namespace xsoftmax
