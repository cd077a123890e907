#include "cpu/memory.h"

#include "op/operators.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace xsoftmax {
namespace {

constexpr size_t kSmallestBlock = size_t(256) << 10;
constexpr size_t kMaxCachedBytes = size_t(64) << 20;
// malloc allocates blocks of this size with their own mmap, so the advice ends with the block.
constexpr size_t kSmallestTable = (size_t(32) << 20) + 1;

struct Block {
  void* data;
  size_t bytes;
};

// A cache of freed blocks, oldest first. A thread that finds the lock taken bypasses the cache, so
// nobody waits, and a process forked while another thread held the lock does not deadlock.
class BlockCache {
 public:
  // Returns a cached block of at least `bytes` and at most 1.25 * `bytes`, or a new block.
  Block take(size_t bytes) {
    {
      const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
      for (auto block = blocks_.rbegin(); lock.owns_lock() && block != blocks_.rend(); ++block) {
        if (block->bytes >= bytes && block->bytes - bytes <= bytes / 4) {
          const Block found = *block;
          kept_ -= found.bytes;
          blocks_.erase(std::next(block).base());
          return found;
        }
      }
    }
    return {c10::alloc_cpu(bytes), bytes};
  }

  void release(Block block) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      return c10::free_cpu(block.data);
    }
    blocks_.push_back(block);
    kept_ += block.bytes;
    size_t dropped = 0;
    for (; kept_ > kMaxCachedBytes; ++dropped) {
      kept_ -= blocks_[dropped].bytes;
      c10::free_cpu(blocks_[dropped].data);
    }
    blocks_.erase(blocks_.begin(), blocks_.begin() + int64_t(dropped));
  }

 private:
  std::mutex mutex_;
  std::vector<Block> blocks_;
  size_t kept_ = 0;
};

// Never destroyed: tensors may outlive the static objects of this library.
BlockCache& block_cache() {
  static BlockCache& cache = *new BlockCache;
  return cache;
}

} // namespace

at::Tensor recycled_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = size_t(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  if (!options.device().is_cpu() || bytes < kSmallestBlock || bytes > kMaxCachedBytes) {
    return at::empty(sizes, options);
  }
  const Block block = block_cache().take(bytes);
  return at::from_blob(
      block.data, sizes, [block](void*) { block_cache().release(block); },
      options.device(at::kCPU));
}

void advise_huge_pages(const at::Tensor& tensor) {
#ifdef MADV_HUGEPAGE
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.nbytes() < kSmallestTable ||
      !tensor.is_contiguous()) {
    return;
  }
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage,
                  last = (begin + tensor.nbytes()) / kPage * kPage;
  // Errors are ignored: small pages also work.
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

at::Tensor table_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::Tensor table = at::empty(sizes, options);
  advise_huge_pages(table);
  return table;
}

at::Tensor table_zeros(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return table_empty(sizes, options).zero_();
}

XSOFTMAX_OPERATORS(m) { m.def("advise_huge_pages(Tensor tensor) -> ()"); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("advise_huge_pages", advise_huge_pages);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("advise_huge_pages", [](const at::Tensor&) {});
}

at::Tensor strided_view(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides,
                        int64_t first) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset() + first);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

at::Tensor transposed(const at::Tensor& matrix) {
  return strided_view(matrix, {matrix.size(1), matrix.size(0)},
                      {matrix.stride(1), matrix.stride(0)});
}

} // namespace xsoftmax
