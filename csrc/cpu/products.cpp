#include "cpu/products.h"

#include "cpu/cpu_dispatch.h"
#include "cpu/block_product.h"
#include "cpu/dtypes.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string_view>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kFewTerms = 4096; // multiply-adds up to which a loop is faster than an ATen call
constexpr int64_t kRowsOfBlocks = 16; // of left: with fewer, packing costs more than blocks save
// Multiply-adds up to which few rows are multiplied by dot products instead of padded to
// kRowsOfBlocks.
constexpr int64_t kDotTerms = 1 << 18;

// Returns whether to use `enabled_value` instead of `disabled_value`: as the environment variable
// `name` says or, if it is not set, if `enabled_value` is faster on this CPU (`faster_by_default`).
// supported: whether the CPU supports `enabled_value`; missing_feature: the feature that is missing
// if it does not.
bool choose(const char* name, std::string_view enabled_value, std::string_view disabled_value,
            bool supported, const char* missing_feature, bool faster_by_default) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') {
    return faster_by_default && supported;
  }
  TORCH_CHECK(value == enabled_value || value == disabled_value, name, ": expected ",
              disabled_value, " or ", enabled_value, ", got ", value);
  TORCH_CHECK(value == disabled_value || supported, name, ": expected ", disabled_value,
              ", since this CPU has no ", missing_feature, ", got ", enabled_value);
  return value == enabled_value;
}

// The CPUs on which bfloat16 products or float32 blocks are faster: the table in products.h.
struct ProductDefaults {
  bool bfloat16 = false, float32_blocks = false;

  ProductDefaults() {
#ifdef XS_X86
    __builtin_cpu_init();
    if (cpu_isa() == CpuIsa::Avx512) {
      const bool amd = __builtin_cpu_is("amd");
      bfloat16 =
          __builtin_cpu_supports("amx-bf16") || (amd && __builtin_cpu_supports("avx512bf16"));
      float32_blocks = amd && __builtin_cpu_supports("avx512vp2intersect"); // Zen 5
    }
#endif
  }
};

bool can_use_float32_blocks(const Tensor& left, const Tensor& right) {
  const auto is_float = [](const Tensor& tensor) {
    return tensor.is_cpu() && tensor.scalar_type() == at::kFloat;
  };
  return is_float(left) && is_float(right) && left.size(0) >= kRowsOfBlocks && use_float32_blocks();
}

bool can_use_float32_blocks(const Tensor& out, const Tensor& left, const Tensor& right) {
  return out.scalar_type() == at::kFloat && out.stride(1) == 1 &&
      can_use_float32_blocks(left, right);
}

bool is_small(const Tensor& out, const Tensor& left, const Tensor& right) {
  const auto dtype = out.scalar_type();
  return out.is_cpu() && (dtype == at::kFloat || dtype == at::kDouble) &&
      left.scalar_type() == dtype && right.scalar_type() == dtype &&
      out.numel() * left.size(1) <= kFewTerms;
}

template <typename T>
void small_product(const Tensor& out, const Tensor& left, const Tensor& right, bool add) {
  T* const to = data<T>(out);
  const T *const a = const_data<T>(left), *const b = const_data<T>(right);
  const int64_t terms = left.size(1), columns = right.size(1);
  for (int64_t i = 0; i < left.size(0); ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      T sum = 0;
      for (int64_t k = 0; k < terms; ++k) {
        sum += a[i * left.stride(0) + k * left.stride(1)] *
            b[k * right.stride(0) + j * right.stride(1)];
      }
      T& element = to[i * out.stride(0) + j * out.stride(1)];
      element = add ? element + sum : sum;
    }
  }
}

// Adds up lane by lane, so that the compiler uses vector registers without changing the order.
template <typename T>
T dot(const T* a, const T* b, int64_t terms) {
  constexpr int64_t kLanes = 16;
  T sums[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= terms; k += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += a[k + lane] * b[k + lane];
    }
  }
  T sum = 0;
  for (; k < terms; ++k) {
    sum += a[k] * b[k];
  }
  return std::accumulate(sums, sums + kLanes, sum);
}

template <typename T>
void product_by_dots(const Tensor& out, const Tensor& left, const Tensor& right, bool add) {
  T* const to = data<T>(out);
  const T *const a = const_data<T>(left), *const b = const_data<T>(right);
  for (int64_t i = 0; i < left.size(0); ++i) {
    for (int64_t j = 0; j < right.size(1); ++j) {
      const T sum = dot(a + i * left.stride(0), b + j * right.stride(1), left.size(1));
      T& element = to[i * out.stride(0) + j * out.stride(1)];
      element = add ? element + sum : sum;
    }
  }
}

// Computes a product with few rows of left, in an order that does not depend on the number of
// threads.
void few_rows_product(const Tensor& out, const Tensor& left, const Tensor& right, bool add) {
  const auto dtype = out.scalar_type();
  const int64_t count = left.size(0), terms = left.size(1);
  if (left.scalar_type() == dtype && right.scalar_type() == dtype && left.stride(1) == 1 &&
      right.stride(0) == 1 && out.numel() * terms <= kDotTerms &&
      (dtype == at::kFloat || dtype == at::kDouble)) {
    dtype == at::kFloat ? product_by_dots<float>(out, left, right, add)
                        : product_by_dots<double>(out, left, right, add);
    return;
  }
  const Tensor rows = at::zeros({kRowsOfBlocks, terms}, left.options()),
               result = at::empty({kRowsOfBlocks, right.size(1)}, out.options());
  rows.narrow(0, 0, count).copy_(left);
  multiply_in_parts(result, rows, right);
  const Tensor part = result.narrow(0, 0, count);
  add ? out.add_(part) : out.copy_(part);
}

} // namespace

bool use_float32_blocks() {
  static const bool enabled =
      choose("XSOFTMAX_FLOAT32_PRODUCTS", "blocks", "aten", has_float32_blocks(),
             "kernel for blocks", ProductDefaults().float32_blocks);
  return enabled && at::globalContext().userEnabledMkldnn();
}

bool use_bfloat16_products() {
  static const bool enabled =
      choose("XSOFTMAX_PRODUCTS", "bfloat16", "float32", has_bfloat16_blocks(),
             "bfloat16 dot products", ProductDefaults().bfloat16);
  return enabled && at::globalContext().userEnabledMkldnn();
}

bool uses_bfloat16_operands(const Tensor& table) {
  const auto dtype = table.scalar_type();
  const bool rounds = dtype == at::kBFloat16 ||
      (dtype == at::kFloat &&
       at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL) ==
           at::Float32Precision::BF16);
  return rounds && table.is_cpu() && use_bfloat16_products();
}

void multiply(const Tensor& out_tensor, const Tensor& left, const Tensor& right,
              ProductOptions options) {
  Tensor out = out_tensor;
  if (options.bfloat16) {
    bfloat16_block_product(out, left, right, options.add);
  } else if (is_small(out, left, right)) {
    out.scalar_type() == at::kFloat ? small_product<float>(out, left, right, options.add)
                                    : small_product<double>(out, left, right, options.add);
  } else if (can_use_float32_blocks(out, left, right)) {
    float32_block_product(out, left, right, options.add);
  } else if (out.scalar_type() != left.scalar_type() || out.scalar_type() != right.scalar_type()) {
    const Tensor result = wide_product(left, right, out.scalar_type());
    options.add ? out.add_(result) : out.copy_(result);
  } else if (options.add) {
    at::addmm_out(out, out, left, right);
  } else {
    at::mm_out(out, left, right);
  }
}

Tensor wide_product(const Tensor& left, const Tensor& right, at::ScalarType dtype) {
  if (left.is_cuda() && left.scalar_type() == right.scalar_type() && left.scalar_type() != dtype) {
    return at::mm(left, right, dtype); // tensor cores compute products of 16-bit numbers exactly
  }
  return product(left.to(dtype), right.to(dtype));
}

Tensor rounded_coefficients(const Tensor& coefficients, const Tensor& table) {
  return table.is_cuda() && table.scalar_type() == at::kBFloat16 ? coefficients.to(at::kBFloat16)
                                                                 : coefficients;
}

Tensor product(const Tensor& left, const Tensor& right) {
  if (!can_use_float32_blocks(left, right)) {
    return at::mm(left, right);
  }
  const Tensor out = at::empty({left.size(0), right.size(1)}, left.options());
  float32_block_product(out, left, right, false);
  return out;
}

void multiply_in_parts(const Tensor& out, const Tensor& left, const Tensor& right,
                       ProductOptions options) {
  const int64_t size = left.size(1), count = left.size(0),
                step = out.scalar_type() == at::kDouble ? kTermsOfProduct / 2 : kTermsOfProduct;
  // The sums of these products have a fixed order.
  const bool is_fixed = !out.is_cpu() || options.bfloat16 ||
      can_use_float32_blocks(out, left, right) || is_small(out, left, right);
  if (!is_fixed && count < kRowsOfBlocks && (count == 1 || right.stride(0) == 1)) {
    few_rows_product(out, left, right, options.add);
    return;
  }
  if (is_fixed || size <= step) {
    multiply(out, left, right, options);
    return;
  }
  for (int64_t begin = 0; begin < size; begin += step) {
    const int64_t terms = std::min(step, size - begin);
    multiply(out, left.narrow(1, begin, terms), right.narrow(0, begin, terms),
             {.add = options.add || begin > 0});
  }
}

Tensor product_in_parts(const Tensor& left, const Tensor& right) {
  const Tensor out = at::empty({left.size(0), right.size(1)}, left.options());
  multiply_in_parts(out, left, right);
  return out;
}

} // namespace xsoftmax
