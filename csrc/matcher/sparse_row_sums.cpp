#include "matcher/sparse_row_sums.h"

#include "op/long_work.h"
#include "op/operators.h"
#include "table/sparse_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kSparseRowSums = "sparse_row_sums";
constexpr int64_t kListsAtOnce = 64;

/// The sums of consecutive lists, concatenated.
struct Sums {
  std::vector<int32_t> column;
  std::vector<float> value;
};

class Adder {
 public:
  explicit Adder(const SparseRowsView& rows)
      : rows_(rows), sum_(rows.features, 0.0), seen_((rows.features + 63) / 64, 0) {}

  void add(const int32_t* list, int64_t count, Sums& to) {
    touched_.clear();
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t t = rows_.offset[list[i]]; t < rows_.offset[list[i] + 1]; ++t) {
        const int32_t j = rows_.column[t];
        uint64_t& word = seen_[j / 64];
        if (const uint64_t bit = uint64_t(1) << (j % 64); !(word & bit)) {
          word |= bit;
          touched_.push_back(j);
        }
        sum_[j] += rows_.value[t];
      }
    }
    sort();
    double square = 0;
    for (const int32_t j : touched_) {
      square += sum_[j] * sum_[j];
    }
    const double scale = square > 0 ? 1.0 / std::sqrt(square) : 1.0;
    for (const int32_t j : touched_) {
      to.column.push_back(j);
      to.value.push_back(float(scale * sum_[j]));
      sum_[j] = 0;
      seen_[j / 64] = 0;
    }
  }

 private:
  void sort() {
    if (touched_.size() * 8 < seen_.size()) {
      std::sort(touched_.begin(), touched_.end());
      return;
    }
    touched_.clear(); // for many columns, read the bits in order
    for (size_t i = 0; i < seen_.size(); ++i) {
      for (uint64_t word = seen_[i]; word != 0; word &= word - 1) {
        touched_.push_back(int32_t(i * 64 + size_t(std::countr_zero(word))));
      }
    }
  }

  const SparseRowsView rows_;
  std::vector<double> sum_;
  std::vector<uint64_t> seen_;
  std::vector<int32_t> touched_;
};

} // namespace

SparseRows sparse_row_sums(const Tensor& offsets, const Tensor& columns, const Tensor& values,
                           int64_t features, const Tensor& list_offsets, const Tensor& list_rows) {
  TORCH_CHECK_VALUE(features >= 0 && features <= std::numeric_limits<int32_t>::max(),
                    kSparseRowSums, ": expected features in [0, 2^31), got ", features);
  const Tensor row_offsets = offsets.contiguous(), row_columns = columns.contiguous(),
               row_values = values.contiguous();
  const Tensor lists = list_offsets.contiguous(), rows = list_rows.contiguous();
  const SparseRowsView view = check::sparse_rows(kSparseRowSums, row_offsets, row_columns,
                                                 row_values, features, /*rising=*/false);
  check::lists(kSparseRowSums, "list_offsets", lists, "list_rows", rows, view.count,
               /*rising=*/false);

  const int64_t count = lists.size(0) - 1, blocks = (count + kListsAtOnce - 1) / kListsAtOnce;
  const int64_t* list = lists.const_data_ptr<int64_t>();
  const int32_t* row = rows.const_data_ptr<int32_t>();
  const Tensor ends = at::empty({count + 1}, at::kLong);
  int64_t* end = ends.mutable_data_ptr<int64_t>();
  end[0] = 0;
  std::vector<Sums> sums(blocks);
  LongWork work(kSparseRowSums, blocks);
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    Adder adder(view);
    for (int64_t b = next++; b < blocks && !work.stopped(); b = next++) {
      for (int64_t i = b * kListsAtOnce; i < std::min((b + 1) * kListsAtOnce, count); ++i) {
        adder.add(row + list[i], list[i + 1] - list[i], sums[b]);
        end[i + 1] = int64_t(sums[b].column.size()); // within the block for now
      }
      work.add(1);
    }
  });
  work.check();
  std::vector<int64_t> begin(blocks + 1, 0);
  for (int64_t b = 0; b < blocks; ++b) {
    begin[b + 1] = begin[b] + int64_t(sums[b].column.size());
    for (int64_t i = b * kListsAtOnce; i < std::min((b + 1) * kListsAtOnce, count); ++i) {
      end[i + 1] += begin[b];
    }
  }
  const Tensor column = at::empty({begin[blocks]}, at::kInt),
               value = at::empty({begin[blocks]}, at::kFloat);
  at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      std::copy(sums[b].column.begin(), sums[b].column.end(),
                column.mutable_data_ptr<int32_t>() + begin[b]);
      std::copy(sums[b].value.begin(), sums[b].value.end(),
                value.mutable_data_ptr<float>() + begin[b]);
      sums[b] = {};
    }
  });
  return {ends, column, value};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "sparse_row_sums(Tensor offsets, Tensor columns, Tensor values, int features, Tensor "
      "list_offsets, Tensor list_rows) -> "
      "(Tensor offsets, Tensor columns, Tensor values)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("sparse_row_sums", sparse_row_sums);
}

} // namespace xsoftmax
