#include "optim/row_step.h"

#include "op/shape_checks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <numeric>

namespace xsoftmax {

using at::Tensor;

void check_row_step(const char* op, const Tensor& step, const Tensor& param) {
  check::dim(op, "step", step, 0);
  check::dtype(op, "step", step, at::kLong);
  check::same_device(op, "step", step, "param", param);
  if (step.is_cpu()) {
    const int64_t count = step.const_data_ptr<int64_t>()[0];
    TORCH_CHECK_VALUE(count >= 0 && count < std::numeric_limits<int32_t>::max(), op,
                      ": expected step in [0, 2^31 - 1), got ", count);
  }
}

void check_dense_step(const char* op, const Tensor& step) {
  check::dim(op, "step", step, 0);
  check::dtype(op, "step", step, at::kFloat);
}

void check_dense_gradient(const char* op, const Tensor& param, const Tensor& grad) {
  TORCH_CHECK_VALUE(grad.layout() == at::kStrided, op,
                    ": expected dense values, got some of layout ", grad.layout());
  check::same_dtype(op, "values", grad, "param", param);
  check::same_device(op, "values", grad, "param", param);
  TORCH_CHECK_VALUE(grad.sym_sizes() == param.sym_sizes(), op, ": expected a gradient of shape ",
                    param.sym_sizes(), ", got shape ", grad.sym_sizes());
}

void check_dense_state(const char* op, const char* arg, const Tensor& state, const Tensor& param) {
  TORCH_CHECK_VALUE(state.layout() == at::kStrided && state.sym_sizes() == param.sym_sizes(), op,
                    ": expected dense ", arg, " of shape ", param.sym_sizes(), ", got shape ",
                    state.sym_sizes());
  check::same_dtype(op, arg, state, "param", param);
  check::same_device(op, arg, state, "param", param);
}

bool can_fuse_dense(const Tensor& param, at::TensorList state) {
  const bool half = param.scalar_type() == at::kBFloat16 || param.scalar_type() == at::kHalf;
  if (!(param.is_cpu() && !half) && !param.is_cuda()) {
    return false;
  }
  return param.is_contiguous() &&
      std::all_of(state.begin(), state.end(), [&](const Tensor& tensor) {
           return tensor.is_contiguous() && tensor.device() == param.device();
         });
}

Tensor dense_gradient(const Tensor& param, const OptionalTensor& rows, const Tensor& values) {
  return is_defined(rows)
      ? at::zeros_like(param, at::MemoryFormat::Contiguous).index_add_(0, *rows, values)
      : values.contiguous();
}

Tensor new_step(const Tensor& param, bool rows) {
  return at::zeros({}, param.options().dtype(rows ? at::kLong : at::kFloat));
}

HostState::HostState(at::TensorList state, at::ArrayRef<size_t> which)
    : state_(state), which_(which), tensors_(state.vec()) {
  for (const size_t i : which_) {
    tensors_[i] = state_[i].cpu();
  }
}

void HostState::write_back() const {
  for (const size_t i : which_) {
    if (!tensors_[i].is_same(state_[i])) {
      state_[i].copy_(tensors_[i]);
    }
  }
}

Tensor all_rows(const Tensor& param) {
  return at::arange(param.size(0), param.options().dtype(at::kLong));
}

void check_learning_rate(const char* op, const Tensor& lr, const Tensor& param) {
  check::floating(op, "lr", lr);
  check::strided(op, "lr", lr);
  TORCH_CHECK_VALUE(lr.sym_numel() == 1, op, ": expected lr as a tensor of one element, got shape ",
                    lr.sym_sizes());
  TORCH_CHECK_TYPE(lr.is_cpu() || lr.device() == param.device(), op,
                   ": expected lr on the CPU or on param's device ", param.device(), ", got it on ",
                   lr.device());
}

double read_learning_rate(const Tensor& lr) {
  if (!check::can_read(lr)) {
    return lr.item().toDouble();
  }
  switch (lr.scalar_type()) {
    case at::kFloat: return *lr.const_data_ptr<float>();
    case at::kDouble: return *lr.const_data_ptr<double>();
    default: return lr.item().toDouble();
  }
}

void check_lengths(const char* op, size_t params, size_t rows, size_t values, size_t options,
                   at::IntArrayRef counts) {
  TORCH_CHECK_VALUE(rows == params && values == params, op,
                    ": expected rows and values for each of ", params, " params, got ", rows,
                    " and ", values);
  TORCH_CHECK_VALUE(
      options == counts.size() &&
          std::all_of(counts.begin(), counts.end(), [](int64_t count) { return count >= 0; }) &&
          std::accumulate(counts.begin(), counts.end(), int64_t(0)) == int64_t(params),
      op, ": expected a count for each of ", options, " options, ", params, " in all, got ",
      counts);
}

void report_wrong_state(const char* op, size_t param, size_t expected, size_t got) {
  TORCH_CHECK_VALUE(false, op, ": expected ", expected, " tensors of state for param ", param,
                    ", got ", got);
}

} // namespace xsoftmax
