#include "cpu/dtypes.h"
#include "table/files/mapped_file.h"
#include "cpu/memory.h"
#include "op/optional.h"
#include "cpu/row_groups.h"
#include "table/gather_dot.h"
#include "table/row_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

namespace xsoftmax {
namespace {

constexpr int64_t kPairsPerTask = 256;
// Gradients of at least this size are written with non-temporal stores: no cache would hold them
// until they are read.
constexpr int64_t kStreamedBytes = 4 << 20;

// Returns the query of each pair of a ragged layout. For a fixed width, a division finds it.
std::vector<int64_t> queries_of_pairs(const PairLayout& pairs) {
  std::vector<int64_t> query_of;
  if (pairs.offsets) {
    query_of.resize(pairs.total());
    for (int64_t q = 0; q < pairs.queries; ++q) {
      std::fill(query_of.begin() + pairs.begin(q), query_of.begin() + pairs.end(q), q);
    }
  }
  return query_of;
}

template <typename T>
void pair_scores(opmath<T>* out, int64_t out_stride, const T* input, int64_t width, const T* weight,
                 int64_t stride, const T* bias, const PairLayout& pairs, int64_t first,
                 int64_t last) {
  const auto& kernels = row_kernels().of(input);
  for (int64_t q = first; q < last; ++q) {
    const int64_t begin = pairs.begin(q);
    const int64_t count = pairs.end(q) - begin;
    opmath<T>* row = out + (out_stride < 0 ? begin : q * out_stride);
    kernels.dot_rows(row, input + q * width, weight, stride, pairs.ids + begin, count,
                     pairs.total() - begin, width);
    if (bias != nullptr) {
      for (int64_t j = 0; j < count; ++j) {
        opmath<T> value;
        kernels.widen_row(&value, bias + pairs.ids[begin + j], 1);
        row[j] += value;
      }
    }
  }
}

template <typename T>
void add_input_grad(opmath<T>* grad_input, const opmath<T>* grad, int64_t grad_stride,
                    const T* weight, int64_t stride, int64_t width, const PairLayout& pairs,
                    int64_t first, int64_t last) {
  const auto& kernels = row_kernels().of(weight);
  for (int64_t q = first; q < last; ++q) {
    const int64_t begin = pairs.begin(q);
    kernels.add_rows(grad_input + q * width, weight, stride, pairs.ids + begin,
                     grad + (grad_stride < 0 ? begin : q * grad_stride), pairs.end(q) - begin,
                     width);
  }
}

// Where the gradient of a class is written. kPositions: R = positions; all of it to the first row
// of each group of equal ids. kGroups: one row per group, and zeros after the last. kTable: the row
// of the class in a dense gradient.
enum class RowOrder { kPositions, kGroups, kTable };

// Inputs and outputs of a task of row_gradient.
template <typename T>
struct RowGradient {
  // If T is its own opmath type, sums are accumulated in the gradient itself.
  static constexpr bool kInPlace = std::is_same_v<T, opmath<T>>;

  const opmath<T>* grad;
  int64_t grad_stride;
  const opmath<T>* scale; // nullptr: all ones
  const T* input;
  int64_t width;
  const PairLayout& pairs;
  const std::vector<int64_t>& query_of;
  const opmath<T>* shared_values;
  const opmath<T>* shared_bias;
  T* values;    // nullptr: not wanted
  T* bias;      // nullptr: not wanted
  bool streamed;
  const int64_t* ids; // [R], by position
  RowOrder order;
  int64_t row_count;

  // Returns (query, gradient of the score) of the pair at a position.
  std::pair<int64_t, opmath<T>> pair(int64_t position) const {
    const int64_t query = pairs.offsets ? query_of[position] : position / pairs.width;
    const int64_t at =
        grad_stride < 0 ? position : query * grad_stride + (position - pairs.begin(query));
    return {query, scale ? grad[at] * scale[query] : grad[at]};
  }

  // Returns the row of the sum of a group. Rows between the rows of two groups are zero, and so are
  // those before the first group's row.
  int64_t row_of(const RowGroups& groups, int64_t group) const {
    if (group == groups.size()) {
      return row_count;
    }
    return order == RowOrder::kGroups ? group
        : order == RowOrder::kTable   ? ids[groups[group][0]]
                                      : groups.starts[group];
  }

  void clear_rows(int64_t first, int64_t last) const {
    if (values) {
      std::memset(static_cast<void*>(values + first * width), 0,
                  (last - first) * width * sizeof(T));
    }
    if (bias) {
      std::memset(static_cast<void*>(bias + first), 0, (last - first) * sizeof(T));
    }
  }

  void sum_groups(const RowGroups& groups, int64_t first, int64_t last) const {
    const auto& kernels = row_kernels().of(input);
    const int64_t total = pairs.total();
    std::vector<opmath<T>> coefficient, wide_sum(values && !kInPlace ? width : 0);
    std::vector<int64_t> query;
    // Rows with a single pair, if they are streamed.
    std::vector<opmath<T>> single_coefficient;
    std::vector<int64_t> single_row, single_query;
    for (int64_t g = first; g < last; ++g) {
      const auto members = groups[g];
      const int64_t row = row_of(groups, g);
      clear_rows(row + 1, row_of(groups, g + 1));
      const auto [q, c] =
          members[0] < total ? pair(members[0]) : std::pair<int64_t, opmath<T>>(0, 0);
      // Not with a coefficient of 0: 0 * inf is NaN, and ignored queries may hold anything.
      if (values && streamed && members.size() == 1 && c != 0) {
        single_row.push_back(row);
        single_query.push_back(q);
        single_coefficient.push_back(c);
        if (bias) {
          kernels.round_row(bias + row, &c, 1);
        }
        continue;
      }
      query.clear();
      coefficient.clear();
      opmath<T> bias_sum = 0;
      size_t pair_count = 0; // members are sorted by position: pairs come before shared ids
      for (; pair_count < members.size() && members[pair_count] < total; ++pair_count) {
        const auto [query_of_pair, gradient] = pair(members[pair_count]);
        query.push_back(query_of_pair);
        coefficient.push_back(gradient);
        bias_sum += gradient;
      }
      if (values) {
        opmath<T>* sum = wide_sum.data();
        if constexpr (kInPlace) {
          sum = values + row * width;
        }
        size_t added = pair_count;
        if (pair_count > 0) {
          kernels.sum_rows(sum, input, width, query.data(), coefficient.data(), int64_t(pair_count),
                           width);
        } else {
          std::copy_n(shared_values + (members[added++] - total) * width, width, sum);
        }
        for (size_t i = added; i < members.size(); ++i) {
          const opmath<T>* shared_row = shared_values + (members[i] - total) * width;
          for (int64_t d = 0; d < width; ++d) {
            sum[d] += shared_row[d];
          }
        }
        if constexpr (!kInPlace) {
          kernels.round_row(values + row * width, sum, width);
        }
      }
      if (bias) {
        for (size_t i = pair_count; i < members.size(); ++i) {
          bias_sum += shared_bias[members[i] - total];
        }
        kernels.round_row(bias + row, &bias_sum, 1);
      }
    }
    if constexpr (kInPlace) {
      kernels.stream_rows(values, single_row.data(), input, single_query.data(),
                          single_coefficient.data(), int64_t(single_row.size()), width);
    }
  }
};

} // namespace

at::Tensor with_unit_column_stride(const at::Tensor& table) {
  return table.dim() == 2 && (table.stride(1) == 1 || table.size(1) <= 1) ? table
                                                                          : table.contiguous();
}

at::Tensor gather_rows_cpu(const at::Tensor& table, const at::Tensor& ids, bool as_bfloat16) {
  prefetch_rows(table, ids_of(ids));
  const at::Tensor source = with_unit_column_stride(table);
  const int64_t width = table.size(1);
  if (as_bfloat16) {
    const at::Tensor rows =
        recycled_empty({ids.size(0), width}, table.options().dtype(at::kBFloat16));
    const bool is_low = table.scalar_type() == at::kBFloat16;
    at::parallel_for(0, ids.size(0), kPairsPerTask, [&](int64_t first, int64_t last) {
      const int64_t* const id = ids.const_data_ptr<int64_t>();
      Bf16* const out = data<Bf16>(rows);
      if (is_low) {
        row_kernels().bf16.copy_rows(out + first * width, const_data<Bf16>(source),
                                     source.stride(0), id + first, last - first, width);
      } else {
        row_kernels().bf16.round_rows(out + first * width, const_data<float>(source),
                                      source.stride(0), id + first, last - first, width);
      }
    });
    return rows;
  }
  const at::Tensor rows = recycled_empty({ids.size(0), width},
                                         table.options().dtype(opmath_dtype(table.scalar_type())));
  dispatch_floating(table.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    at::parallel_for(0, ids.size(0), kPairsPerTask, [&](int64_t first, int64_t last) {
      row_kernels()
          .of(static_cast<const T*>(nullptr))
          .widen_rows(data<opmath<T>>(rows) + first * width, const_data<T>(source),
                      source.stride(0), ids.const_data_ptr<int64_t>() + first, last - first, width);
    });
  });
  return rows;
}

void pair_scores_cpu(const at::Tensor& out, int64_t out_stride, const at::Tensor& input,
                     const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                     const PairLayout& pairs) {
  prefetch_rows(weight, c10::IntArrayRef(pairs.ids, size_t(pairs.total())));
  const at::Tensor table = with_unit_column_stride(weight);
  const at::Tensor bias_row = is_defined(bias) ? bias->contiguous() : at::Tensor();
  dispatch_floating(input.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    at::parallel_for(
        0, pairs.queries, pairs.grain(kPairsPerTask), [&](int64_t first, int64_t last) {
          pair_scores(data<opmath<T>>(out), out_stride, const_data<T>(input), input.size(1),
                      const_data<T>(table), table.stride(0),
                      bias_row.defined() ? const_data<T>(bias_row) : nullptr, pairs, first, last);
        });
  });
}

void add_pair_input_grad_cpu(const at::Tensor& grad_input, const at::Tensor& grad,
                             int64_t grad_stride, const at::Tensor& weight,
                             const PairLayout& pairs) {
  const at::Tensor table = with_unit_column_stride(weight);
  dispatch_floating(weight.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    at::parallel_for(
        0, pairs.queries, pairs.grain(kPairsPerTask), [&](int64_t first, int64_t last) {
          add_input_grad(data<opmath<T>>(grad_input), const_data<opmath<T>>(grad), grad_stride,
                         const_data<T>(table), table.stride(0), table.size(1), pairs, first, last);
        });
  });
}

namespace {

// row_count: rows of the gradient; the number of positions for RowOrder::kPositions.
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_gradient(
    const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
    const PairLayout& pairs, const at::Tensor& shared_ids, const at::Tensor& shared_values,
    const at::Tensor& shared_bias, RowOrder order, int64_t row_count, bool want_values,
    bool want_bias) {
  const int64_t total = pairs.total(), shared = shared_ids.defined() ? shared_ids.numel() : 0;
  std::vector<int64_t> ids(total + shared);
  std::copy_n(pairs.ids, total, ids.begin());
  if (shared > 0) {
    std::copy_n(shared_ids.const_data_ptr<int64_t>(), shared, ids.begin() + total);
  }
  const RowGroups groups = group_rows(ids.data(), int64_t(ids.size()));
  TORCH_INTERNAL_ASSERT(groups.size() <= row_count);

  const at::Tensor rows =
      at::empty({order == RowOrder::kTable ? 0 : row_count}, input.options().dtype(at::kLong));
  int64_t* row = rows.mutable_data_ptr<int64_t>();
  if (order == RowOrder::kGroups) {
    for (int64_t g = 0; g < groups.size(); ++g) {
      row[g] = ids[groups[g][0]];
    }
    std::fill(row + groups.size(), row + row_count, groups.size() > 0 ? row[groups.size() - 1] : 0);
  } else if (order == RowOrder::kPositions) {
    std::transform(groups.order.begin(), groups.order.end(), row,
                   [&](int64_t position) { return ids[position]; });
  }

  const int64_t width = input.size(1);
  const at::Tensor values = recycled_empty({want_values ? row_count : 0, width}, input.options());
  const at::Tensor bias = at::empty({want_bias ? row_count : 0}, input.options());
  const std::vector<int64_t> query_of = queries_of_pairs(pairs);
  dispatch_floating(input.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const RowGradient<T> task{
        const_data<opmath<T>>(grad),
        grad_stride,
        scale.defined() ? const_data<opmath<T>>(scale) : nullptr,
        const_data<T>(input),
        width,
        pairs,
        query_of,
        want_values && shared_values.defined() ? const_data<opmath<T>>(shared_values) : nullptr,
        want_bias && shared_bias.defined() ? const_data<opmath<T>>(shared_bias) : nullptr,
        want_values ? data<T>(values) : nullptr,
        want_bias ? data<T>(bias) : nullptr,
        RowGradient<T>::kInPlace && row_count * width * int64_t(sizeof(T)) >= kStreamedBytes,
        ids.data(),
        order,
        row_count};
    task.clear_rows(0, task.row_of(groups, 0));
    at::parallel_for(0, groups.size(), kPairsPerTask,
                     [&](int64_t first, int64_t last) { task.sum_groups(groups, first, last); });
  });
  return {rows, values, bias};
}

} // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> row_gradient_cpu(
    const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
    const PairLayout& pairs, const at::Tensor& shared_ids, const at::Tensor& shared_values,
    const at::Tensor& shared_bias, bool want_values, bool want_bias) {
  return row_gradient(grad, grad_stride, scale, input, pairs, shared_ids, shared_values,
                      shared_bias, RowOrder::kPositions,
                      pairs.total() + (shared_ids.defined() ? shared_ids.numel() : 0), want_values,
                      want_bias);
}

std::tuple<at::Tensor, at::Tensor> table_gradient_cpu(
    const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
    const PairLayout& pairs, const at::Tensor& shared_ids, const at::Tensor& shared_values,
    const at::Tensor& shared_bias, int64_t table_rows, bool want_values, bool want_bias) {
  const auto [rows, values, bias] =
      row_gradient(grad, grad_stride, scale, input, pairs, shared_ids, shared_values, shared_bias,
                   RowOrder::kTable, table_rows, want_values, want_bias);
  return {values, bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> compact_row_gradient_cpu(
    const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
    const PairLayout& pairs, int64_t rows, bool want_values, bool want_bias) {
  return row_gradient(grad, grad_stride, scale, input, pairs, {}, {}, {}, RowOrder::kGroups, rows,
                      want_values, want_bias);
}

} // namespace xsoftmax
