#include "matcher/canonical_rows.h"

#include "op/checks.h"
#include "op/operators.h"
#include "table/sparse_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kCanonicalRows = "canonical_rows";
/// Larger float64 numbers become infinite in float32.
constexpr double kLargestFloat = 0x1.fffffefffffffp127;
constexpr double kTinyFloat = 0x1p-150; ///< float64 numbers up to this become 0 in float32

template <typename Column, typename Value>
class Rows {
 public:
  Rows(const char* op, const Tensor& offsets, const Tensor& columns, const Tensor& values,
       int64_t width, RowKind kind)
      : op_(op), count_(offsets.size(0) - 1), width_(width), kind_(kind),
        offset_(offsets.const_data_ptr<int64_t>()), column_(columns.const_data_ptr<Column>()),
        value_(values.const_data_ptr<Value>()) {
    constexpr auto kLastColumn = int64_t(std::numeric_limits<Column>::max());
    last_column_ = Column(std::min(width - 1, kLastColumn));
    largest_ = kind == RowKind::Scores ? std::numeric_limits<double>::infinity() : kLargestFloat;
    tiny_ = kind == RowKind::Features ? kTinyFloat : 0.0;
  }

  /// Returns whether all rows are canonical. Raises if a column or a value is invalid.
  bool check() const {
    std::atomic<bool> canonical = true;
    at::parallel_for(0, count_, grain(), [&](int64_t begin, int64_t end) {
      if (is_plain(begin, end)) {
        return;
      }
      bool all = true;
      std::vector<Column> sorted;
      // Names the invalid row, or accepts unsorted scores.
      for (int64_t row = begin; row < end; ++row) {
        all &= check_row(row, sorted);
      }
      if (!all) {
        canonical.store(false, std::memory_order_relaxed);
      }
    });
    return canonical;
  }

  SparseRowTensors make(const Tensor& columns, const Tensor& values) const {
    const bool keeps_dtype = kind_ == RowKind::Scores;
    const Tensor column = at::empty({columns.size(0)}, columns.options());
    const Tensor value = at::empty(
        {columns.size(0)}, keeps_dtype ? values.options() : values.options().dtype(at::kFloat));
    const Tensor ends = at::empty({count_ + 1}, at::kLong);
    int64_t* end_of = ends.mutable_data_ptr<int64_t>();
    Column* out_column = column.mutable_data_ptr<Column>();
    end_of[0] = 0;
    const auto fill = [&](auto* out_value) {
      at::parallel_for(0, count_, grain(), [&](int64_t begin, int64_t end) {
        std::vector<Entry> entries;
        for (int64_t row = begin; row < end; ++row) {
          end_of[row + 1] = make_row(row, entries, out_column, out_value); // only its size for now
        }
      });
      for (int64_t row = 0; row < count_; ++row) { // close the gaps
        const int64_t from = offset_[row], size = end_of[row + 1], to = end_of[row];
        if (to != from) {
          std::copy_n(out_column + from, size, out_column + to);
          std::copy_n(out_value + from, size, out_value + to);
        }
        end_of[row + 1] = to + size;
      }
    };
    if (keeps_dtype) {
      fill(value.mutable_data_ptr<Value>());
    } else {
      fill(value.mutable_data_ptr<float>());
    }
    return {ends, column.narrow(0, 0, end_of[count_]), value.narrow(0, 0, end_of[count_])};
  }

 private:
  struct Entry {
    Column column;
    double value;
  };

  int64_t grain() const {
    return std::max<int64_t>(1, 32768 * count_ / std::max<int64_t>(offset_[count_], 1));
  }

  bool drops_zeros() const { return kind_ == RowKind::Features || kind_ == RowKind::Labels; }

  // Comparisons only, so the loop over a row has no branches. False for NaN.
  template <typename Number>
  bool allowed(Number value) const {
    return std::abs(value) <= Number(largest_);
  }

  template <typename Number>
  bool is_zero(Number value) const {
    return std::abs(value) <= Number(tiny_);
  }

  /// Returns whether rows are canonical, by loops over all their entries that the compiler can
  /// vectorise. For scores, false means that `check_row` must decide.
  bool is_plain(int64_t begin, int64_t end) const {
    using Flag = std::conditional_t<sizeof(Value) == 8, int64_t, int32_t>;
    constexpr int64_t kChunk = 4096; // entries; they stay in the cache
    const int64_t first = offset_[begin], last = offset_[end];
    const Column last_column = last_column_;
    const auto largest = Value(largest_);
    const auto tiny = drops_zeros() ? Value(tiny_) : Value(-1);
    int64_t decreases = 0;
    for (int64_t chunk = first; chunk < last; chunk += kChunk) {
      const int64_t chunk_end = std::min(chunk + kChunk, last);
      Column outside = 0, not_rising = 0;
      for (int64_t t = chunk; t < chunk_end; ++t) {
        outside |= Column(column_[t] < 0) | Column(column_[t] > last_column);
      }
      for (int64_t t = std::max(chunk, first + 1); t < chunk_end; ++t) {
        not_rising += Column(column_[t] <= column_[t - 1]);
      }
      Flag bad = 0;
      for (int64_t t = chunk; t < chunk_end; ++t) {
        const Value size = std::abs(value_[t]);
        bad |= Flag(!(size <= largest)) | Flag(size <= tiny);
      }
      if (outside != 0 || bad != 0) {
        return false;
      }
      decreases += not_rising;
    }
    // A row may begin below the end of the row before.
    for (int64_t row = begin; row < end && decreases > 0; ++row) {
      const int64_t t = offset_[row];
      decreases -= int64_t(t > first && t < offset_[row + 1] && column_[t] <= column_[t - 1]);
    }
    return decreases == 0;
  }

  bool check_row(int64_t row, std::vector<Column>& sorted) const {
    const int64_t begin = offset_[row], end = offset_[row + 1];
    bool outside = false, bad = false, zero = false, decreases = false;
    for (int64_t t = begin; t < end; ++t) {
      outside |= (column_[t] < 0) | (column_[t] > last_column_);
      bad |= !allowed(value_[t]);
      zero |= is_zero(value_[t]);
    }
    for (int64_t t = begin + 1; t < end; ++t) {
      decreases |= column_[t] <= column_[t - 1];
    }
    if (outside || bad) {
      name_problem(row);
    }
    if (kind_ == RowKind::Scores && decreases) {
      sorted.assign(column_ + begin, column_ + end);
      std::sort(sorted.begin(), sorted.end());
      decreases = std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
    }
    return !decreases && !(zero && drops_zeros());
  }

  void name_problem(int64_t row) const {
    for (int64_t t = offset_[row]; t < offset_[row + 1]; ++t) {
      TORCH_CHECK_INDEX(column_[t] >= 0 && column_[t] < width_, op_, ": expected columns in [0, ",
                        width_, "), got ", column_[t], " at [", t, "]");
      TORCH_CHECK_VALUE(allowed(value_[t]), op_, ": expected values with finite numbers",
                        std::isfinite(value_[t]) ? " in float32" : "", ", got ", value_[t],
                        " in row ", row, ", column ", column_[t]);
    }
  }

  /// Writes the canonical row at the row's original offset and returns its number of entries.
  template <typename Result>
  int64_t make_row(int64_t row, std::vector<Entry>& entries, Column* out_column,
                   Result* out_value) const {
    const int64_t begin = offset_[row], end = offset_[row + 1];
    entries.clear();
    for (int64_t t = begin; t < end; ++t) {
      entries.push_back({column_[t], double(value_[t])});
    }
    const auto before = [](const Entry& a, const Entry& b) { return a.column < b.column; };
    std::vector<Column> unused;
    if (kind_ != RowKind::Scores || !check_row(row, unused)) {
      std::stable_sort(entries.begin(), entries.end(), before);
    }
    int64_t to = begin;
    for (size_t i = 0; i < entries.size();) {
      const Column column = entries[i].column;
      const size_t first = i;
      double sum = 0, largest = 0;
      for (; i < entries.size() && entries[i].column == column; ++i) {
        sum += entries[i].value;
        largest = std::max(largest, std::abs(entries[i].value));
      }
      TORCH_CHECK_VALUE(allowed(sum), op_, ": expected values whose sums are finite",
                        std::isfinite(sum) ? " in float32" : "", ", got ", sum, " in row ", row,
                        ", column ", column);
      const bool cancelled = i > first + 1 && sum == 0 && largest > 0;
      if (cancelled || (drops_zeros() && is_zero(sum))) {
        continue;
      }
      out_column[to] = column;
      out_value[to++] = kind_ == RowKind::Labels ? Result(1) : Result(sum);
    }
    return to - begin;
  }

  const char* op_;
  const int64_t count_, width_;
  Column last_column_;
  const RowKind kind_;
  double largest_, tiny_;
  const int64_t* offset_;
  const Column* column_;
  const Value* value_;
};

RowKind kind_named(const std::string& name) {
  if (name == "features") {
    return RowKind::Features;
  }
  if (name == "labels") {
    return RowKind::Labels;
  }
  if (name == "weights") {
    return RowKind::Weights;
  }
  TORCH_CHECK_VALUE(name == "scores", kCanonicalRows,
                    ": expected kind as features, labels, weights or scores, got ", name);
  return RowKind::Scores;
}

} // namespace

std::optional<SparseRowTensors> canonical_rows(const char* op, const Tensor& offsets,
                                               const Tensor& columns, const Tensor& values,
                                               int64_t width, RowKind kind) {
  const bool wide = columns.scalar_type() == at::kLong;
  const bool doubles = values.scalar_type() == at::kDouble;
  check::numbers(op, "offsets", offsets, at::kLong);
  check::numbers(op, "columns", columns, wide ? at::kLong : at::kInt);
  check::numbers(op, "values", values, doubles ? at::kDouble : at::kFloat);
  TORCH_CHECK_VALUE(width >= 0, op, ": expected width of at least 0, got ", width);
  check::size(op, "values", values, 0, columns.size(0), "the size of columns");
  TORCH_CHECK_VALUE(offsets.size(0) >= 1, op,
                    ": expected offsets with a number for each row and one, got none");
  const Tensor offset = offsets.contiguous(), column = columns.contiguous();
  const Tensor value = values.contiguous();
  check::offsets(op, "offsets", offset, columns.size(0));
  const auto run = [&](auto rows) -> std::optional<SparseRowTensors> {
    if (rows.check()) {
      return std::nullopt;
    }
    return rows.make(column, value);
  };
  if (wide) {
    return doubles ? run(Rows<int64_t, double>(op, offset, column, value, width, kind))
                   : run(Rows<int64_t, float>(op, offset, column, value, width, kind));
  }
  return doubles ? run(Rows<int32_t, double>(op, offset, column, value, width, kind))
                 : run(Rows<int32_t, float>(op, offset, column, value, width, kind));
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "canonical_rows(Tensor offsets, Tensor columns, Tensor values, int width, str kind) -> "
      "Tensor[]");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("canonical_rows",
         [](const Tensor& offsets, const Tensor& columns, const Tensor& values, int64_t width,
            const std::string& kind) -> std::vector<Tensor> {
           const auto rows =
               canonical_rows(kCanonicalRows, offsets, columns, values, width, kind_named(kind));
           if (!rows) {
             return {};
           }
           return {rows->offsets, rows->columns, rows->values};
         });
}

} // namespace xsoftmax
