#pragma once

#include "cpu/dtypes.h"
#include "table/row_kernels.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace xsoftmax {

/// The table of edges as the CPU kernels read it. `weight` has unit column stride; `bias` is
/// contiguous or undefined.
template <typename T>
struct EdgeRows {
  const T* weight;
  int64_t stride, features;
  const T* bias; // null: no bias

  EdgeRows(const at::Tensor& table, const at::Tensor& bias_row)
      : weight(const_data<T>(table)), stride(table.stride(0)), features(table.size(1)),
        bias(bias_row.defined() ? const_data<T>(bias_row) : nullptr) {}

  /// Computes scores[i] = <input, weight[edges[i]]> + bias[edges[i]].
  void score(std::vector<opmath<T>>& scores, const T* input,
             const std::vector<int64_t>& edges) const {
    const int64_t n = int64_t(edges.size());
    const auto& kernels = row_kernels().of(input);
    scores.resize(n);
    kernels.dot_rows(scores.data(), input, weight, stride, edges.data(), n, n, features);
    for (int64_t e = 0; bias != nullptr && e < n; ++e) {
      opmath<T> value;
      kernels.widen_row(&value, bias + edges[e], 1);
      scores[e] += value;
    }
  }
};

} // namespace xsoftmax
