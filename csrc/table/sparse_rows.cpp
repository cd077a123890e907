#include "table/sparse_rows.h"

#include "op/checks.h"

#include <ATen/Parallel.h>

#include <cmath>

namespace xsoftmax::check {

using at::Tensor;

void numbers(const char* op, const char* arg, const Tensor& tensor, at::ScalarType type) {
  strided(op, arg, tensor);
  dim(op, arg, tensor, 1);
  dtype(op, arg, tensor, type);
  TORCH_CHECK_TYPE(tensor.is_cpu(), op, ": expected ", arg, " on the CPU, got ", tensor.device());
}

void lists(const char* op, const char* offsets_arg, const Tensor& list_offsets, const char* arg,
           const Tensor& members, int64_t limit, bool rising) {
  numbers(op, offsets_arg, list_offsets, at::kLong);
  numbers(op, arg, members, at::kInt);
  TORCH_CHECK_VALUE(list_offsets.size(0) >= 1, op, ": expected ", offsets_arg,
                    " with a number for each list and one, got none");
  offsets(op, offsets_arg, list_offsets, members.size(0));
  const int64_t* offset = list_offsets.const_data_ptr<int64_t>();
  const int32_t* number = members.const_data_ptr<int32_t>();
  at::parallel_for(0, list_offsets.size(0) - 1, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t t = offset[i]; t < offset[i + 1]; ++t) {
        TORCH_CHECK_INDEX(number[t] >= 0 && number[t] < limit, op, ": expected ", arg, " in [0, ",
                          limit, "), got ", number[t], " at [", t, "]");
        TORCH_CHECK_VALUE(!rising || t == offset[i] || number[t] > number[t - 1], op, ": expected ",
                          arg, " that rise in each list, got ", number[t], " after ", number[t - 1],
                          " at [", t, "]");
      }
    }
  });
}

void finite_values(const char* op, const char* arg, const Tensor& values, int64_t count) {
  numbers(op, arg, values, at::kFloat);
  size(op, arg, values, 0, count, "one for each number of its lists");
  const float* value = values.const_data_ptr<float>();
  for (int64_t t = 0; t < count; ++t) {
    TORCH_CHECK_VALUE(std::isfinite(value[t]), op, ": expected ", arg, " that are finite, got ",
                      value[t], " at [", t, "]");
  }
}

SparseRowsView sparse_rows(const char* op, const Tensor& row_offsets, const Tensor& columns,
                           const Tensor& values, int64_t features, bool rising) {
  lists(op, "offsets", row_offsets, "columns", columns, features, rising);
  finite_values(op, "values", values, columns.size(0));
  return {row_offsets.size(0) - 1, features, row_offsets.const_data_ptr<int64_t>(),
          columns.const_data_ptr<int32_t>(), values.const_data_ptr<float>()};
}

} // namespace xsoftmax::check
