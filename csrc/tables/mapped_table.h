#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace xsoftmax {

// Class tables whose memory is a file (core/mapped_file.h). Each raises RuntimeError for what the system refuses, and ValueError for a file that does not fit.
//
// mapped_table_create(str path, int[] sizes, ScalarType dtype) -> Tensor: a new file of zeros, whose space is reserved. It is whole after the first flush. To
//     open one whose process ended before that is an error, which says that its creation was not finished.
// mapped_table_remove_unfinished(str path) -> bool: removes a file whose creation was not finished, unless its process is still at work. Whether it did.
// mapped_table_open(str path, bool writable=True, bool recover=False) -> Tensor: that of a file that is whole. With `recover` also that of a file which was
//     written to when its process ended. What this process has open already is the same memory.
// mapped_table_fill_(Tensor(a!) table, int first, Tensor rows) -> (): table[first:first + len(rows)] = rows. It takes no page fault for each 4 KB, and what it
//     writes is on its way to the disk at once.
// mapped_table_flush_(Tensor(a!) table) -> (): makes up what row optimizers owe, waits until table and state are on the disk, and marks them as whole.
// mapped_table_changes(Tensor table) -> (): takes the mark away, before something is written by other means than our operators.
// mapped_table_prefetch(Tensor table, Tensor rows) -> (): starts to read rows, and what row optimizers keep for them, without waiting. For a table in memory
//     it does nothing.
// mapped_table_path(Tensor table) -> str: "" where it is in memory.

at::Tensor mapped_table_create(const std::string& path, at::IntArrayRef sizes, at::ScalarType dtype);
bool mapped_table_remove_unfinished(const std::string& path);
at::Tensor mapped_table_open(const std::string& path, bool writable, bool recover);
void mapped_table_fill_(const at::Tensor& table, int64_t first, const at::Tensor& rows);
void mapped_table_flush_(const at::Tensor& table);
void mapped_table_changes(const at::Tensor& table);
void mapped_table_prefetch(const at::Tensor& table, const at::Tensor& rows);
std::string mapped_table_path(const at::Tensor& table);

} // namespace xsoftmax
