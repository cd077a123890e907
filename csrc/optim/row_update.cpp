#include "optim/row_update.h"

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "optim/random_rounding.h"
#include "table/row_gradient.h"

namespace xsoftmax {

using at::Tensor;

void check_row_param(const char* op, const Tensor& param, bool rows) {
  TORCH_CHECK_VALUE(param.layout() == at::kStrided, op,
                    ": expected a dense param, got one of layout ", param.layout());
  check::floating(op, "param", param);
  TORCH_CHECK_VALUE(!rows || param.dim() == 1 || param.dim() == 2, op,
                    ": expected param with 1 or 2 dimensions, got shape ", param.sym_sizes());
}

void check_row_gradient(const char* op, const Tensor& param, const Tensor& rows,
                        const Tensor& values) {
  check_row_param(op, param, true);
  check::dim(op, "rows", rows, 1);
  check::int64(op, "rows", rows);
  check::same_device(op, "rows", rows, "param", param);
  check::dim(op, "values", values, param.dim());
  check::same_dtype(op, "values", values, "param", param);
  check::same_device(op, "values", values, "param", param);
  check::size(op, "values", values, 0, rows.sym_size(0), "the length of rows");
  if (param.dim() == 2) {
    check::size(op, "values", values, 1, param.sym_size(1), "the width of param");
  }
  if (rows.is_cpu()) {
    check::class_ids(op, "rows", rows, param.size(0));
  }
}

void check_row_state(const char* op, const char* arg, const Tensor& state, const Tensor& param,
                     bool elements, at::ScalarType dtype) {
  check::dim(op, arg, state, elements ? param.dim() : 1);
  check::size(op, arg, state, 0, param.sym_size(0), "the rows of param");
  if (elements && param.dim() == 2) {
    check::size(op, arg, state, 1, param.sym_size(1), "the width of param");
  }
  check::dtype(op, arg, state, dtype);
  check::same_device(op, arg, state, "param", param);
}

void check_element_state(const char* op, const char* arg, const Tensor& state,
                         const Tensor& param) {
  const auto wide = opmath_dtype(param.scalar_type());
  check_row_state(
      op, arg, state, param, true,
      wide == at::kFloat && state.scalar_type() == at::kBFloat16 ? at::kBFloat16 : wide);
}

at::ScalarType element_state_dtype(const char* op, const Tensor& param,
                                   std::optional<at::ScalarType> option) {
  const auto wide = opmath_dtype(param.scalar_type());
  TORCH_CHECK_VALUE(!option.has_value() || wide == at::kFloat, op,
                    ": expected no state_dtype for a table of ", param.scalar_type(), ", got ",
                    *option);
  return option.value_or(wide);
}

LearningRate learning_rate(double value, const OptionalTensor& lr, const Tensor& param,
                           Tensor& lr_storage) {
  if (!is_defined(lr) || lr->device() != param.device()) {
    return {value};
  }
  lr_storage = lr->scalar_type() == at::kFloat || lr->scalar_type() == at::kDouble
      ? *lr
      : lr->to(at::kDouble);
  const bool single = lr_storage.scalar_type() == at::kFloat;
  return {value, single ? lr_storage.const_data_ptr<float>() : nullptr,
          single ? nullptr : lr_storage.const_data_ptr<double>()};
}

std::tuple<Tensor, Tensor> touched_rows(const Tensor& rows, const Tensor& values) {
  auto [sorted, sums] = sum_equal_rows(rows, values.to(opmath_dtype(values.scalar_type())));
  const Tensor differs = sums.ne(0);
  const Tensor nonzero = (sums.dim() == 2 ? differs.any(1) : differs).nonzero().squeeze(1);
  return {sorted.index_select(0, nonzero), sums.index_select(0, nonzero)};
}

Tensor rounded_rows(const Tensor& rows, const Tensor& ids, int64_t step, at::ScalarType dtype,
                    RoundingTarget rounding_target) {
  if (opmath_dtype(dtype) == dtype) {
    return rows;
  }
  const Tensor result = rows.to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true)
                            .contiguous(),
               host_ids = ids.to(at::kCPU).contiguous();
  const int64_t width = rows.dim() == 2 ? rows.size(1) : 1;
  const auto bits = rounding_target == RoundingTarget::Table ? table_bits
      : rounding_target == RoundingTarget::State             ? state_bits
                                                             : second_state_bits;
  float* const x = result.mutable_data_ptr<float>();
  const StepRounding step_random = step_rounding(step, true);
  for (int64_t i = 0; i < host_ids.numel(); ++i) {
    const RowRounding random = row_rounding(step_random, host_ids.const_data_ptr<int64_t>()[i]);
    for (int64_t d = 0; d < width; ++d) {
      float& element = x[i * width + d];
      element =
          round_at_random(element, bits(random, uint32_t(d) * kElement), dtype == at::kBFloat16);
    }
  }
  return result.to(rows.device());
}

Tensor per_row(const Tensor& numbers, const Tensor& like) {
  const Tensor cast = numbers.to(like.scalar_type());
  return like.dim() == 2 ? cast.unsqueeze(1) : cast;
}

} // namespace xsoftmax
