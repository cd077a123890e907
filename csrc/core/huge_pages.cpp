#include "core/huge_pages.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>

namespace xsoftmax {

void advise_huge_pages(const at::Tensor& tensor) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 2 << 20;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  // Only whole huge pages, so that no neighbour of the tensor is touched.
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = (begin + tensor.nbytes()) / kHugePage * kHugePage;
  if (last >= first + 2 * kHugePage) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE); // advice: it may fail
  }
#endif
}

} // namespace xsoftmax
