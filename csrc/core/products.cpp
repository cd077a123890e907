#include "core/products.h"

#include "core/cpu_dispatch.h"
#include "core/bf16_product.h"
#include "core/dtypes.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <cstdlib>
#include <string_view>

namespace xsoftmax {
namespace {

using at::Tensor;

bool choose_bfloat16() {
  const char* wanted = std::getenv("XSOFTMAX_PRODUCTS");
  if (wanted != nullptr && *wanted != '\0') {
    const std::string_view name(wanted);
    TORCH_CHECK(name == "float32" || name == "bfloat16", "XSOFTMAX_PRODUCTS: expected float32 or bfloat16, got ", name);
    TORCH_CHECK(name == "float32" || has_bf16_product(), "XSOFTMAX_PRODUCTS: expected float32, since this CPU has no bfloat16 dot products, got bfloat16");
    return name == "bfloat16";
  }
#ifdef XS_X86
  __builtin_cpu_init();
  const bool pays = __builtin_cpu_supports("amx-bf16") || (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd"));
  return pays && cpu_isa() == CpuIsa::Avx512 && has_bf16_product();
#else
  return false;
#endif
}

} // namespace

bool bfloat16_products_pay() {
  static const bool pay = choose_bfloat16();
  return pay && at::globalContext().userEnabledMkldnn();
}

at::ScalarType cpu_product_dtype(at::ScalarType dtype) { return dtype == at::kBFloat16 && bfloat16_products_pay() ? dtype : opmath_dtype(dtype); }

bool multiplies_bfloat16(const Tensor& table) {
  const auto dtype = table.scalar_type();
  const bool rounds = dtype == at::kBFloat16 ||
      (dtype == at::kFloat && at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL) == at::Float32Precision::BF16);
  return rounds && table.is_cpu() && bfloat16_products_pay();
}

void multiply(const Tensor& given_out, const Tensor& left, const Tensor& right, ProductOptions options) {
  Tensor out = given_out;
  if (options.bfloat16) {
    bf16_product(out, left, right, options.add);
  } else if (out.scalar_type() != left.scalar_type()) {
    options.add ? out.add_(at::mm(left, right)) : out.copy_(at::mm(left, right));
  } else if (options.add) {
    at::addmm_out(out, out, left, right);
  } else {
    at::mm_out(out, left, right);
  }
}

} // namespace xsoftmax
