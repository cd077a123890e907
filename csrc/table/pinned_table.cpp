#include "table/pinned_table.h"

#include "cpu/memory.h"
#include "op/find_op.h"
#include "op/operators.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/safe_numerics.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>

namespace xsoftmax {

size_t check_pinned_table(const at::Tensor& like, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0; }),
                    "pinned_table: expected sizes of at least 0, got ", sizes);
  uint64_t bytes = 0;
  const bool overflows = c10::safe_multiplies_u64(sizes, &bytes) ||
      c10::mul_overflows(bytes, uint64_t(like.itemsize()), &bytes) || bytes >> 63 != 0;
  TORCH_CHECK_VALUE(!overflows, "pinned_table: expected fewer than 2^63 bytes, got sizes ", sizes);
  return bytes;
}

static at::Tensor without_kernel(const at::Tensor& like, at::IntArrayRef sizes) {
  check_pinned_table(like, sizes);
  TORCH_CHECK(like.is_cpu() || like.is_meta(), "pinned_table: expected a build of the library for ",
              like.device(), ", got one without kernels for it");
  return table_zeros(sizes, like.options());
}

at::Tensor pinned_table(const at::Tensor& like, at::IntArrayRef sizes) {
  static const auto op = find_op<decltype(without_kernel)>("xsoftmax::pinned_table");
  return op.call(like, sizes);
}

XSOFTMAX_OPERATORS(m) { m.def("pinned_table(Tensor like, int[] sizes) -> Tensor"); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("pinned_table", without_kernel);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("pinned_table", without_kernel); }

} // namespace xsoftmax
