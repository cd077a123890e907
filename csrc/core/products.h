#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace xsoftmax {

/// MKL orders a longer sum by the number of threads (seen from 300 terms on), also inside a parallel region, where each product has one.
constexpr int64_t kTermsOfProduct = 256;

/// sum (+)= left @ right, in the dtype of sum where that is another.
inline void add_product(at::Tensor sum, const at::Tensor& left, const at::Tensor& right, bool first) {
  if (sum.scalar_type() != left.scalar_type()) {
    first ? sum.copy_(at::mm(left, right)) : sum.add_(at::mm(left, right));
  } else if (first) {
    at::mm_out(sum, left, right);
  } else {
    at::addmm_out(sum, sum, left, right);
  }
}

/// The same in parts of `step` terms.
inline void add_product_in_parts(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right, bool first, int64_t step = kTermsOfProduct) {
  const int64_t size = left.size(1);
  for (int64_t begin = 0; begin < size || (begin == 0 && first); begin += step) { // first: also of no term, which is zero
    const int64_t terms = std::min(step, size - begin);
    add_product(sum, left.narrow(1, begin, terms), right.narrow(0, begin, terms), first && begin == 0);
  }
}

} // namespace xsoftmax
