#include "table/updates/resize_tables.h"

#include "op/checks.h"
#include "op/operators.h"
#include "table/files/mapped_file.h"
#include "cpu/memory.h"
#include "table/updates/pending_steps.h"
#include "table/updates/row_states.h"
#include "table/updates/pending_updates.h"
#include "table/row_terms.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kResizeTables = "resize_tables_";
constexpr int64_t kMaxRows = int64_t(1) << 40;

/// Allocation behind a resized table. The table's storage, which ends with the last row, has it as
/// its context.
struct SpareCapacity {
  at::DataPtr memory;
  size_t bytes;
};
void free_capacity(void* spare) { delete static_cast<SpareCapacity*>(spare); }

/// Returns the number of bytes that a table can grow to; 0 if this file did not allocate its
/// memory, or the table does not fill its storage.
size_t capacity_bytes(const Tensor& table) {
  const at::DataPtr& data = table.storage().data_ptr();
  const bool fills = table.is_contiguous() && table.storage_offset() == 0 &&
      size_t(table.numel()) * table.itemsize() == table.storage().nbytes();
  return fills && data.get_deleter() == &free_capacity
      ? static_cast<const SpareCapacity*>(data.get_context())->bytes
      : 0;
}

/// Returns a storage with capacity for `sizes`, of which `used` bytes are visible.
c10::Storage storage_with_capacity(at::IntArrayRef sizes, size_t used,
                                   const at::TensorOptions& options) {
  const Tensor memory = table_empty(sizes, options);
  c10::StorageImpl* const allocation = memory.storage().unsafeGetStorageImpl();
  auto* const spare = new SpareCapacity{
      allocation->set_data_ptr(at::DataPtr(nullptr, options.device())), allocation->nbytes()};
  at::DataPtr data(spare->memory.mutable_get(), spare, &free_capacity, options.device());
  return {c10::Storage::use_byte_size_t(), used, std::move(data), allocation->allocator(),
          /*resizable=*/true};
}

/// A table that is being resized. The constructor does all that can fail; commit() cannot fail.
class Resized {
 public:
  /// Returns whether resizing needs other memory.
  static bool needs_new_memory(const Tensor& table, int64_t size) {
    const size_t bytes = bytes_of(table, size), spare = capacity_bytes(table);
    const size_t now = bytes_of(table, table.size(0));
    return size != table.size(0) &&
        (spare == 0 ? std::max(bytes, now) > 0 : bytes > spare || bytes < spare / 2);
  }

  Resized(const Tensor& table, int64_t size)
      : table_(table), sizes_(table.sizes().vec()), bytes_(bytes_of(table, size)) {
    const int64_t before = sizes_[0];
    sizes_[0] = size;
    if (!needs_new_memory(table, size)) {
      return;
    }
    std::vector<int64_t> whole = sizes_;
    whole[0] = size > before ? std::max(size, before + before / 4) : size;
    memory_ = storage_with_capacity(whole, bytes_, table.options());
    const int64_t kept = std::min(before, size);
    Tensor rows = at::empty({0}, table.options());
    whole[0] = kept;
    rows.set_(*memory_, 0, whole);
    rows.copy_(table.narrow(0, 0, kept));
  }

  bool moved() const { return memory_.has_value(); }

  void commit() const {
    if (sizes_[0] == table_.size(0)) {
      return;
    }
    c10::TensorImpl* const impl = table_.unsafeGetTensorImpl();
    const bool allowed = impl->allow_tensor_metadata_change();
    impl->set_allow_tensor_metadata_change(true);
    if (moved()) {
      impl->set_storage_keep_dtype(*memory_);
      impl->set_storage_offset(0);
    } else {
      table_.storage().unsafeGetStorageImpl()->set_nbytes(bytes_);
    }
    impl->set_sizes_contiguous(sizes_);
    impl->set_allow_tensor_metadata_change(allowed);
  }

 private:
  static size_t bytes_of(const Tensor& table, int64_t size) {
    return size_t(size * c10::multiply_integers(table.sizes().slice(1))) * table.itemsize();
  }

  Tensor table_;
  std::vector<int64_t> sizes_;
  size_t bytes_;
  std::optional<c10::Storage> memory_;
};

/// State of one optimizer for a table, resized and committed like the table.
struct ResizedState {
  ResizedState(const Tensor& table, RowState row_state, int64_t size)
      : state(std::move(row_state)), num_rows(table.size(0)), pending(state.pending()) {
    for (const Tensor& tensor : state.row_tensors(table)) {
      rows.emplace_back(tensor, Resized(tensor, size));
    }
    if (Resized::needs_new_memory(table, size)) {
      enlarge_pending(size);
    }
  }

  void commit(int64_t size) const {
    for (const auto& [tensor, resized] : rows) {
      resized.commit();
      if (size > num_rows) {
        Tensor added = tensor.narrow(0, num_rows, size - num_rows);
        tensor.scalar_type() == at::kInt ? added.copy_(state.tensors[0])
                                         : added.fill_(state.initial);
      }
    }
    if (larger.defined()) {
      Tensor(pending).set_(larger);
    }
  }

  RowState state;
  int64_t num_rows;
  Tensor pending; // undefined: rows have no pending updates
  Tensor larger;  // replacement of `pending`; undefined: `pending` stays
  std::vector<std::pair<Tensor, Resized>> rows;

 private:
  /// Makes room for more pending steps between flushes, in proportion to the rows. Only if no
  /// updates are pending.
  void enlarge_pending(int64_t size) {
    if (pending.defined() && !pending.is_meta() &&
        pending[0].item<double>() == state.tensors[0].item<double>()) {
      const Tensor larger_pending = PendingSteps::make(size, pending.device());
      if (larger_pending.numel() > pending.numel()) {
        larger_pending.narrow(0, 0, PendingTable::kHeader)
            .copy_(pending.narrow(0, 0, PendingTable::kHeader));
        larger = larger_pending;
      }
    }
  }
};

void check_resize(at::TensorList tables, at::TensorList rows, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(tables.size() == rows.size(), kResizeTables, ": expected rows for each of ",
                    tables.size(), " tables, got ", rows.size());
  TORCH_CHECK_VALUE(tables.size() == sizes.size(), kResizeTables, ": expected a size of each of ",
                    tables.size(), " tables, got ", sizes.size());
  for (size_t i = 0; i < tables.size(); ++i) {
    const Tensor &table = tables[i], &added = rows[i];
    const int64_t size = sizes[i];
    TORCH_CHECK_VALUE(size >= 0 && size <= kMaxRows, kResizeTables,
                      ": expected sizes in [0, 2^40], got ", size);
    TORCH_CHECK_VALUE(table.dim() >= 1, kResizeTables,
                      ": expected tables with rows, got one of no dimension");
    TORCH_CHECK_VALUE(!table.unsafeGetTensorImpl()->has_symbolic_sizes_strides(), kResizeTables,
                      ": expected tables whose sizes are known");
    check::in_memory(kResizeTables, "tables", table);
    TORCH_CHECK(MappedFile::of(table) == nullptr, kResizeTables,
                ": expected tables in memory, got one that lies in the file ",
                MappedFile::of(table)->path(),
                ", whose size is fixed: make another file, and copy the rows that stay");
    check::dim(kResizeTables, "rows", added, table.dim());
    check::same_dtype(kResizeTables, "rows", added, "the table", table);
    check::same_device(kResizeTables, "rows", added, "the table", table);
    check::size(kResizeTables, "rows", added, 0, std::max<int64_t>(0, size - table.size(0)),
                "the rows that the table gains");
    for (int64_t axis = 1; axis < table.dim(); ++axis) {
      check::size(kResizeTables, "rows", added, axis, table.size(axis), "the table");
      TORCH_CHECK_VALUE(table.size(axis) <= kMaxRows, kResizeTables,
                        ": expected rows of at most 2^40 elements, got ", table.size(axis));
    }
    for (size_t j = 0; j < i; ++j) {
      TORCH_CHECK_VALUE(!tables[j].is_same(table), kResizeTables,
                        ": expected different tables, got one of them twice");
    }
  }
}

/// Discards what earlier graphs hold of the old size of a parameter: its gradient and its
/// AccumulateGrad node.
void drop_gradient(const Tensor& table) {
  drop_row_terms(table);
  table.mutable_grad().reset();
  if (auto* const meta = torch::autograd::impl::get_autograd_meta(table); meta != nullptr) {
    const std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
}

} // namespace

void resize_tables_(at::TensorList tables, at::TensorList rows, at::IntArrayRef sizes) {
  check_resize(tables, rows, sizes);
  const TableWriteGuard write(tables);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<Resized> resized;
  std::vector<std::vector<ResizedState>> states;
  for (size_t i = 0; i < tables.size(); ++i) {
    const Tensor& table = tables[i];
    if (Resized::needs_new_memory(table, sizes[i])) { // costs O(N) anyway
      catch_up(table, /*raised=*/true);
    }
    resized.emplace_back(table, sizes[i]);
    states.emplace_back();
    for (RowState& state : row_states_of(table)) {
      states.back().emplace_back(table, std::move(state), sizes[i]);
    }
  }
  for (size_t i = 0; i < tables.size(); ++i) { // all memory is allocated: nothing fails from here
    const int64_t before = tables[i].size(0), size = sizes[i];
    resized[i].commit();
    if (size > before) {
      tables[i].narrow(0, before, size - before).copy_(rows[i]);
    }
    for (const ResizedState& state : states[i]) {
      state.commit(size);
      if (resized[i].moved()) {
        // The registry is keyed by the table's storage; the next step registers the new one.
        forget_pending(state.state.tensors);
      }
    }
    if (size != before) {
      drop_gradient(tables[i]);
    }
  }
}

XSOFTMAX_OPERATORS(m) {
  m.def("resize_tables_(Tensor(a!)[] tables, Tensor[] rows, int[] sizes) -> ()");
}
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("resize_tables_", resize_tables_);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("resize_tables_", resize_tables_); }

} // namespace xsoftmax
