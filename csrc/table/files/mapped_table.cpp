#include "table/files/mapped_table.h"

#include "cpu/prefetch.h"
#include "op/checks.h"
#include "op/operators.h"
#include "table/files/mapped_file.h"
#include "table/updates/pending_updates.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kKind = "table";

MappedFile& file_of(const char* op, const Tensor& table) {
  MappedFile* const file = MappedFile::of(table);
  TORCH_CHECK_VALUE(file != nullptr, op,
                    ": expected a table that lies in a file, got one in memory");
  return *file;
}

void check_prefetch(const Tensor& table, const Tensor& rows) {
  constexpr const char* op = "mapped_table_prefetch";
  TORCH_CHECK_VALUE(table.dim() >= 1, op, ": expected a table with rows, got no dimension");
  check::int64(op, "rows", rows);
  check::same_device(op, "rows", rows, "table", table);
}

// Requests the cache lines of rows in memory. They arrive while others are requested, where a
// gather without prefetching, such as that of nn.Embedding, waits for a row at a time.
void prefetch_into_cache(const Tensor& table, at::IntArrayRef ids) {
  constexpr int64_t grain_size = 1024;
  const auto* const rows = static_cast<const char*>(table.const_data_ptr());
  const int64_t stride = table.stride(0) * int64_t(table.itemsize()),
                bytes = std::min(stride, kRowBeginning);
  at::parallel_for(0, int64_t(ids.size()), grain_size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      prefetch_bytes</*kWrite=*/false, PrefetchInto::kFar>(rows + ids[i] * stride, bytes);
    }
  });
}

} // namespace

Tensor mapped_table_create(const std::string& path, at::IntArrayRef sizes, at::ScalarType dtype) {
  constexpr const char* op = "mapped_table_create";
  TORCH_CHECK_VALUE(sizes.size() == 1 || sizes.size() == 2, op,
                    ": expected sizes [N] or [N, D], got ", sizes);
  TORCH_CHECK_TYPE(at::isFloatingType(dtype), op, ": expected a floating dtype, got ",
                   check::name(dtype));
  return MappedFile::create(op, path,
                            {FileState::kBegun, kKind, "", {{"weight", dtype, sizes.vec()}}})
      ->tensors()[0];
}

bool mapped_table_remove_unfinished(const std::string& path) {
  return MappedFile::remove_unfinished(path);
}

Tensor mapped_table_open(const std::string& path, bool writable, bool recover) {
  constexpr const char* op = "mapped_table_open";
  const auto check = [&](const MappedFile& file) {
    TORCH_CHECK_VALUE(file.header().kind == kKind && file.header().tensors.size() == 1, op,
                      ": expected ", path, " as the file of a table, got one of kind \"",
                      file.header().kind, "\"");
  };
  return MappedFile::open(op, path, writable, recover, check)->tensors()[0];
}

void mapped_table_fill_(const Tensor& table, int64_t first, const Tensor& rows) {
  constexpr const char* op = "mapped_table_fill_";
  MappedFile& file = file_of(op, table);
  const MappedTensor& whole = file.header().tensors[0];
  TORCH_CHECK_VALUE(table.sizes() == at::IntArrayRef(whole.sizes) && table.is_contiguous(), op,
                    ": expected all of a table, got a part of shape ", table.sizes());
  TORCH_CHECK_VALUE(file.writable(), op, ": expected a table that is open for writing, got ",
                    file.path(), ", which is open for reading");
  check::dim(op, "rows", rows, table.dim());
  check::same_dtype(op, "rows", rows, "table", table);
  check::same_device(op, "rows", rows, "table", table);
  TORCH_CHECK_VALUE(first >= 0 && first <= table.size(0) && rows.size(0) <= table.size(0) - first,
                    op, ": expected rows in [0, ", table.size(0), "], got ", first, " + ",
                    rows.size(0));
  if (table.dim() == 2) {
    check::size(op, "rows", rows, 1, table.size(1), "the table");
  }
  const TableWriteGuard write(table);
  file.will_change();
  file.write(uint64_t(first * (table.dim() == 2 ? table.size(1) : 1)) * table.itemsize(),
             rows.contiguous());
}

void mapped_table_flush_(const Tensor& table) {
  MappedFile& file = file_of("mapped_table_flush_", table);
  catch_up(table, /*raised=*/true);
  file.flush();
}

void mapped_table_changes(const Tensor& table) { table_changes(table); }

void mapped_table_prefetch(const Tensor& table, const Tensor& rows) {
  check_prefetch(table, rows);
  if (!table.is_cpu()) {
    return;
  }
  const Tensor ids = rows.contiguous();
  check::class_ids("mapped_table_prefetch", "rows", ids, table.size(0));
  if (MappedFile::of(table) != nullptr) {
    prefetch_rows(table, ids_of(ids));
  } else if (table.is_contiguous()) {
    prefetch_into_cache(table, ids_of(ids));
  }
}

std::string mapped_table_path(const Tensor& table) {
  const MappedFile* const file = MappedFile::of(table);
  return file == nullptr ? "" : file->path();
}

XSOFTMAX_OPERATORS(m) {
  m.def("mapped_table_create(str path, int[] sizes, ScalarType dtype) -> Tensor");
  m.def("mapped_table_remove_unfinished(str path) -> bool");
  m.def("mapped_table_open(str path, bool writable=True, bool recover=False) -> Tensor");
  m.def("mapped_table_fill_(Tensor(a!) table, int first, Tensor rows) -> ()");
  m.def("mapped_table_flush_(Tensor(a!) table) -> ()");
  m.def("mapped_table_changes(Tensor table) -> ()");
  m.def("mapped_table_prefetch(Tensor table, Tensor rows) -> ()");
  m.def("mapped_table_path(Tensor table) -> str");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("mapped_table_create", mapped_table_create);
  m.impl("mapped_table_remove_unfinished", mapped_table_remove_unfinished);
  m.impl("mapped_table_open", mapped_table_open);
  m.impl("mapped_table_fill_", mapped_table_fill_);
  m.impl("mapped_table_flush_", mapped_table_flush_);
  m.impl("mapped_table_changes", mapped_table_changes);
  m.impl("mapped_table_prefetch", mapped_table_prefetch);
  m.impl("mapped_table_path", mapped_table_path);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { // meta tensors have no file
  m.impl("mapped_table_prefetch", check_prefetch);
  m.impl("mapped_table_fill_", [](const Tensor&, int64_t, const Tensor&) {});
  m.impl("mapped_table_flush_", [](const Tensor&) {});
  m.impl("mapped_table_changes", [](const Tensor&) {});
}

} // namespace xsoftmax
