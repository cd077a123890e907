#pragma once

#include "cpu/dtypes.h"
#include "cpu/prefetch.h"
#include "table/files/mapped_file.h"
#include "cpu/row_groups.h"
#include "optim/row_update.h"
#include "optim/row_updates.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

// CPU building blocks of the row-wise optimizer ops.

namespace xsoftmax {

/// Calls function(T{}, S{}) with the types of a parameter and of its state; S is Bf16 or opmath<T>.
template <typename Function>
void dispatch_rows(const at::Tensor& param, const at::Tensor& state, const Function& function) {
  dispatch_floating(param.scalar_type(), [&](auto zero) {
    if constexpr (!std::is_same_v<decltype(zero), double>) {
      if (state.scalar_type() == at::kBFloat16) {
        function(zero, Bf16{});
        return;
      }
    }
    function(zero, opmath<decltype(zero)>{});
  });
}

/// Returns the random numbers of a row, or zeros if neither T nor S needs stochastic rounding.
template <typename T, typename S>
RowRounding rounding_of(const StepRounding& step, int64_t row) {
  const bool stochastic =
      !std::is_same_v<S, opmath<T>> || (step.table && !std::is_same_v<T, opmath<T>>);
  return stochastic ? row_rounding(step, row) : RowRounding{};
}

/// A tensor whose row r is the `width` contiguous elements at data + r * stride. A [N] tensor has
/// rows of width 1.
template <typename T>
struct RowView {
  T* data = nullptr;
  int64_t stride = 0;
  int64_t width = 0;

  T* operator[](int64_t row) const { return data + row * stride; }
  /// Returns the row for RowsAhead; nullptr if row < 0.
  const T* ahead(int64_t row) const { return data == nullptr || row < 0 ? nullptr : (*this)[row]; }
  // Prefetches for writing: rows are scattered over a table too large for the caches.
  void prefetch(int64_t row) const {
    if (data == nullptr || row < 0) {
      return;
    }
    prefetch_bytes</*kWrite=*/true>((*this)[row], width * int64_t(sizeof(T)));
  }
};

template <typename T>
RowView<T> row_view(const at::Tensor& tensor) {
  return {data<T>(tensor), tensor.stride(0), tensor.dim() == 2 ? tensor.size(1) : 1};
}

inline int64_t rows_per_task(int64_t width) {
  constexpr int64_t kElementsPerTask = 16384;
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, width));
}

/// Calls update(row, sum, ahead) for each unique row whose summed gradient [width] is not all zero.
/// `ahead` is a row that will be updated soon, to be prefetched by the update, or -1. Each task of
/// the parallel loop creates its own `update` by make_update(). prefetch(row) is called for rows
/// that were not passed to an update as `ahead`. `rows` and `values` [R, ...] are contiguous.
template <typename T, typename Prefetch, typename MakeUpdate>
void update_rows(const at::Tensor& param, const at::Tensor& rows, const at::Tensor& values,
                 const Prefetch& prefetch, const MakeUpdate& make_update) {
  const int64_t* id = rows.const_data_ptr<int64_t>();
  const int64_t width = values.dim() == 2 ? values.size(1) : 1;
  if (width == 0) {
    return;
  }
  // Enough rows in flight to hide memory latency, few enough to stay in the L2 cache until used.
  const int64_t count_ahead = std::clamp<int64_t>(1024 / width, 4, 16);
  prefetch_rows(param, ids_of(rows));
  const RowGroups groups = group_rows(id, rows.numel());
  const auto row_of = [&](int64_t group) { return id[groups.order[groups.starts[group]]]; };
  const auto& kernels = row_updates().of(T{});
  at::parallel_for(0, groups.size(), rows_per_task(width), [&](int64_t first, int64_t last) {
    auto update = make_update();
    std::vector<opmath<T>> sum(width);
    for (int64_t g = first; g < std::min(first + count_ahead, last); ++g) {
      prefetch(row_of(g));
    }
    for (int64_t g = first; g < last; ++g) {
      const int64_t ahead = g + count_ahead < last ? row_of(g + count_ahead) : -1;
      const auto members = groups[g];
      if (const opmath<T>* row_sum = kernels.sum_rows(
              sum.data(), const_data<T>(values), members.data(), int64_t(members.size()), width)) {
        update(row_of(g), row_sum, ahead);
      } else {
        prefetch(ahead);
      }
    }
  });
}

/// Calls update(row) for each row of a table; each task creates its own `update`, as above.
template <typename MakeUpdate>
void update_all_rows(const at::Tensor& param, int64_t width, const MakeUpdate& make_update) {
  constexpr int64_t kAhead = 4096;
  at::parallel_for(0, param.size(0), rows_per_task(width), [&](int64_t first, int64_t last) {
    auto update = make_update();
    for (int64_t row = first; row < last; ++row) {
      if ((row - first) % kAhead == 0) {
        prefetch_range(param, row == first ? row : row + kAhead,
                       row == first ? 2 * kAhead : kAhead);
      }
      update(row);
    }
  });
}

/// Caches values that depend only on the step of a row's last gradient. Most rows of a batch share
/// a few such steps, and a power costs as much as updating a row.
template <typename Value>
class StepCache {
 public:
  template <typename Make>
  const Value& of(int64_t s, const Make& make) {
    Entry& entry = entries_[uint64_t(s) % entries_.size()];
    if (entry.s != s) {
      entry = {s, make(s)};
    }
    return entry.value;
  }

 private:
  struct Entry {
    int64_t s = -1;
    Value value{};
  };
  std::array<Entry, 256> entries_;
};

} // namespace xsoftmax
