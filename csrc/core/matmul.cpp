#include "core/matmul.h"

#include "core/cpu_dispatch.h"
#include "core/dtypes.h"

#include <ATen/Context.h>

namespace xsoftmax {
namespace {

bool has_amx_bf16() {
#ifdef XS_X86
  __builtin_cpu_init();
  static const bool supported = __builtin_cpu_supports("amx-bf16");
  return supported;
#else
  return false;
#endif
}

} // namespace

at::ScalarType cpu_product_dtype(at::ScalarType dtype) {
  if (dtype == at::kBFloat16 && has_amx_bf16() && cpu_isa() == CpuIsa::Avx512 && at::globalContext().userEnabledMkldnn()) {
    return dtype;
  }
  return opmath_dtype(dtype);
}

} // namespace xsoftmax
