#include "table/files/mapped_file.h"
#include "table/files/mapped_header.h"

#include <algorithm>

#include <sys/mman.h>

// Starts to read rows of a mapped file before they are used.

namespace xsoftmax {

using at::Tensor;

// Pages per madvise call; systems truncate longer ranges.
static constexpr uint64_t kPagesAhead = 32;

MappedFile::Rows MappedFile::rows_of(const Tensor& table) const {
  int64_t elements = 1;
  for (int64_t axis = 1; axis < table.dim(); ++axis) {
    elements += (table.size(axis) - 1) * table.stride(axis);
  }
  return {static_cast<const char*>(table.const_data_ptr()),
          table.stride(0) * int64_t(table.itemsize()), elements * int64_t(table.itemsize())};
}

std::vector<MappedFile::Rows> MappedFile::rows_of(int64_t count) const {
  std::vector<Rows> found;
  const char* begin = begin_ + kPage;
  for (const MappedTensor& tensor : header_.tensors) {
    if (!tensor.sizes.empty() && tensor.sizes[0] == count) {
      found.push_back({begin, int64_t(tensor.bytes()) / count, int64_t(tensor.bytes()) / count});
    }
    begin += tensor.bytes();
  }
  return found;
}

void MappedFile::read_ahead(c10::ArrayRef<Rows> tensors, c10::ArrayRef<c10::IntArrayRef> ids) {
  std::vector<uint64_t> pages;
  for (const Rows& rows : tensors) {
    const uint64_t offset = uint64_t(rows.begin - begin_);
    for (const c10::IntArrayRef list : ids) {
      for (const int64_t id : list) {
        const uint64_t first = offset + uint64_t(id * rows.stride),
                       last = first + uint64_t(rows.bytes) - 1;
        for (uint64_t page = first / kPage; page <= last / kPage; ++page) {
          std::atomic<uint32_t>& place =
              recent_[(page * 0x9E3779B97F4A7C15u) >> (64 - kRecentBits)];
          if (place.exchange(uint32_t(page), std::memory_order_relaxed) != uint32_t(page)) {
            pages.push_back(page);
          }
        }
      }
    }
  }
  std::sort(pages.begin(), pages.end());
  for (size_t i = 0; i < pages.size();) {
    size_t end = i + 1;
    while (end < pages.size() && pages[end] - pages[end - 1] <= 1) {
      ++end;
    }
    // If the call fails, the pages are read when they are used.
    (void)madvise(begin_ + pages[i] * kPage, (pages[end - 1] + 1 - pages[i]) * kPage,
                  MADV_WILLNEED);
    i = end;
  }
}

void MappedFile::read_range(const Rows& rows, int64_t first, int64_t count) const {
  const uint64_t offset = uint64_t(rows.begin - begin_);
  const uint64_t last =
      (offset + uint64_t((first + count - 1) * rows.stride + rows.bytes) - 1) / kPage;
  for (uint64_t page = (offset + uint64_t(first * rows.stride)) / kPage; page <= last;
       page += kPagesAhead) {
    (void)madvise(begin_ + page * kPage, std::min(kPagesAhead, last + 1 - page) * kPage,
                  MADV_WILLNEED);
  }
}

void MappedFile::prefetch(const Tensor& table, c10::ArrayRef<c10::IntArrayRef> ids) {
  if (table.dim() == 0 || table.numel() == 0) {
    return;
  }
  read_ahead(rows_of(table), ids);
  for (const auto& other : companions()) {
    other->read_ahead(other->rows_of(table.size(0)), ids);
  }
}

void MappedFile::prefetch_range(const Tensor& table, int64_t first, int64_t count) {
  count = table.dim() == 0 || table.numel() == 0 ? 0 : std::min(count, table.size(0) - first);
  if (count <= 0) {
    return;
  }
  read_range(rows_of(table), first, count);
  for (const auto& other : companions()) {
    for (const Rows& rows : other->rows_of(table.size(0))) {
      other->read_range(rows, first, count);
    }
  }
}

} // namespace xsoftmax
