#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace xsoftmax {

// Class tables backed by a file (table/files/mapped_file.h). All raise RuntimeError for errors of
// the system and ValueError for a file that does not fit.
//
// mapped_table_create(str path, int[] sizes, ScalarType dtype) -> Tensor: creates a file of zeros
// and reserves its space. It is "whole" after the first flush. Opening a file whose process ended
// before that is an error, which says that its creation was not finished.
//
// mapped_table_remove_unfinished(str path) -> bool: removes a file whose creation was not finished,
// unless its process is still at work. Returns whether it was removed.
//
// mapped_table_open(str path, bool writable=True, bool recover=False) -> Tensor: opens the table of
// a file that is whole; with `recover`, also of a file that was being written to when its process
// ended. A file that this process already has open is mapped to the same memory.
//
// mapped_table_fill_(Tensor(a!) table, int first, Tensor rows) -> (): table[first:first +
// len(rows)] = rows, without a page fault per 4 KB, and with write-back starting at once.
//
// mapped_table_flush_(Tensor(a!) table) -> (): applies the pending updates of row optimizers, waits
// until the table and its state are on disk, and marks them as whole.
//
// mapped_table_changes(Tensor table) -> (): removes the mark, before something other than the
// library's operators writes to the table.
//
// mapped_table_prefetch(Tensor table, Tensor rows) -> (): starts to read rows without waiting: from
// the disk, with their optimizer state, or their beginnings from memory into the cache, if the
// table is contiguous.
//
// mapped_table_path(Tensor table) -> str: the path of the file; "" for a table in memory.

at::Tensor mapped_table_create(const std::string& path, at::IntArrayRef sizes,
                               at::ScalarType dtype);
bool mapped_table_remove_unfinished(const std::string& path);
at::Tensor mapped_table_open(const std::string& path, bool writable, bool recover);
void mapped_table_fill_(const at::Tensor& table, int64_t first, const at::Tensor& rows);
void mapped_table_flush_(const at::Tensor& table);
void mapped_table_changes(const at::Tensor& table);
void mapped_table_prefetch(const at::Tensor& table, const at::Tensor& rows);
std::string mapped_table_path(const at::Tensor& table);

} // namespace xsoftmax
