#pragma once

#include "core/dtypes.h"
#include "core/optional.h"
#include "core/row_groups.h"
#include "optim/row_updates.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <vector>

// CPU building blocks of the row-wise optimizer ops.

namespace xsoftmax {

/// A tensor whose row r is `width` elements on end from data + r * stride. A [N] tensor is one of rows of width 1.
template <typename T>
struct RowView {
  T* data = nullptr;
  int64_t stride = 0;
  int64_t width = 0;

  T* operator[](int64_t row) const { return data + row * stride; }
  // Rows lie anywhere in a table that no cache holds, and will be written.
  void prefetch(int64_t row) const {
    const char* bytes = reinterpret_cast<const char*>((*this)[row]);
    for (int64_t b = 0; b < width * int64_t(sizeof(T)); b += 64) {
      __builtin_prefetch(bytes + b, 1);
    }
  }
};

template <typename T>
RowView<T> row_view(const at::Tensor& tensor) {
  return {data<T>(tensor), tensor.stride(0), tensor.dim() == 2 ? tensor.size(1) : 1};
}
template <typename T>
RowView<T> row_view(const std::optional<at::Tensor>& tensor) {
  return given(tensor) ? row_view<T>(*tensor) : RowView<T>{};
}

/// Whether a RowView fits the tensor: rows may be apart (a slice of columns), their elements not.
inline bool has_row_view(const at::Tensor& tensor) {
  return tensor.dim() == 1 || tensor.stride(1) == 1 || tensor.size(1) <= 1;
}
inline bool has_row_view(const std::optional<at::Tensor>& tensor) {
  return !given(tensor) || has_row_view(*tensor);
}

inline int64_t rows_per_task(int64_t width) {
  constexpr int64_t kElementsPerTask = 16384;
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, width));
}

/// Calls update(row, sum) for each distinct row whose summed gradient is not all zero; `sum` [width] may be overwritten. Each task of the
/// parallel loop makes an `update` of its own by make_update().
/// prefetch(row) is called for each row some updates earlier. `values` [R, ...] contiguous.
template <typename T, typename Prefetch, typename MakeUpdate>
void update_rows(const at::Tensor& rows, const at::Tensor& values, const Prefetch& prefetch, const MakeUpdate& make_update) {
  // Enough rows under way to hide memory latency; few enough that they are still in the second-level cache when their turn comes.
  constexpr int64_t kAhead = 4;
  const int64_t* id = rows.const_data_ptr<int64_t>();
  const int64_t width = values.dim() == 2 ? values.size(1) : 1;
  if (width == 0) {
    return;
  }
  const RowGroups groups = group_rows(id, rows.numel());
  const auto row_of = [&](int64_t group) { return id[groups.order[groups.starts[group]]]; };
  const auto& kernels = row_updates().of(T{});
  at::parallel_for(0, groups.size(), rows_per_task(width), [&](int64_t first, int64_t last) {
    auto update = make_update();
    std::vector<opmath<T>> sum(width);
    for (int64_t g = first; g < std::min(first + kAhead, last); ++g) {
      prefetch(row_of(g));
    }
    for (int64_t g = first; g < last; ++g) {
      if (g + kAhead < last) {
        prefetch(row_of(g + kAhead));
      }
      const auto members = groups[g];
      if (kernels.sum_rows(sum.data(), const_data<T>(values), members.data(), int64_t(members.size()), width)) {
        update(row_of(g), sum.data());
      }
    }
  });
}

/// exp(decay - mark), and the mark brought up to date. A row without marks owes none: 1.
inline double take_row_decay(const RowView<double>& last_decay, int64_t row, double decay) {
  if (last_decay.data == nullptr) {
    return 1;
  }
  const double owed = decay - *last_decay[row];
  *last_decay[row] = decay;
  return owed == 0 ? 1 : std::exp(owed);
}

} // namespace xsoftmax
