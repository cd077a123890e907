#include "core/checks.h"
#include "core/impl.h"
#include "core/optional.h"
#include "optim/row_sgd.h"
#include "optim/row_update_cpu.h"

#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

// What one row needs to know of the step.
struct SgdStep {
  int64_t step;
  double lr, momentum, take;
  bool nesterov;
  double sign; // -1: maximize
  double decay;
};

template <typename T>
struct SgdRows {
  using M = opmath<T>;
  RowView<T> param;
  RowView<M> buffer;
  RowView<int32_t> last_step;
  RowView<double> last_decay;
  SgdStep step;

  void prefetch(int64_t row) const {
    param.prefetch(row);
    if (buffer.data != nullptr) {
      buffer.prefetch(row);
      last_step.prefetch(row);
    }
    if (last_decay.data != nullptr) {
      last_decay.prefetch(row);
    }
  }

  // k: the steps without a gradient that the row owes, out of `count` that its decay factor covers.
  OwedMomentum owed(int64_t k, int64_t count, double factor) const {
    const double a = factor == 1 || count <= 0 ? 1 : std::exp(std::log(factor) / double(count));
    OwedMomentum owed(k, a, step.momentum, step.nesterov);
    owed.movement *= count > k ? a : 1; // the decay of the step that ends the wait
    return owed;
  }

  void update(int64_t row, M* g) const {
    const auto& kernels = row_updates().of(T{});
    const double factor = take_row_decay(last_decay, row, step.decay);
    if (buffer.data == nullptr) {
      kernels.sgd(param[row], g, M(factor), M(step.sign * step.lr), param.width);
      return;
    }
    const int64_t count = step.step - *last_step[row];
    *last_step[row] = int32_t(step.step);
    const OwedMomentum due = owed(count - 1, count, factor);
    if (step.sign < 0) {
      for (int64_t d = 0; d < param.width; ++d) {
        g[d] = -g[d];
      }
    }
    const MomentumStep<M> coefficients{M(factor),        M(step.lr * due.movement), M(due.keep * step.momentum), M(step.take),
                                       M(step.momentum), M(step.lr),                step.nesterov};
    kernels.momentum(param[row], buffer[row], g, coefficients, param.width);
  }

  void flush(int64_t row) const {
    const double factor = take_row_decay(last_decay, row, step.decay);
    const int64_t count = step.step - *last_step[row];
    if (count <= 0 && factor == 1) {
      return;
    }
    *last_step[row] = int32_t(step.step);
    const OwedMomentum due = owed(count, count, factor);
    row_updates().of(T{}).drift(param[row], buffer[row], M(factor), M(step.lr * due.movement), M(due.keep), param.width);
  }
};

template <typename T>
SgdRows<T> sgd_rows(const Tensor& param, const OptionalTensor& buffer, const OptionalTensor& last_step,
                    const OptionalTensor& last_decay, const SgdStep& step) {
  return {row_view<T>(param), row_view<opmath<T>>(buffer), row_view<int32_t>(last_step), row_view<double>(last_decay), step};
}

void row_sgd_cpu(const Tensor& param, const Tensor& rows, const Tensor& values, const OptionalTensor& momentum_buffer,
                 const OptionalTensor& last_step, const OptionalTensor& last_decay, int64_t step, double lr, double momentum,
                 double dampening, bool nesterov, bool maximize, double decay) {
  check_row_sgd(param, rows, values, momentum_buffer, last_step, last_decay);
  check::class_ids("row_sgd_", "rows", rows, param.size(0));
  if (use_reference() || !has_row_view(param) || !has_row_view(momentum_buffer)) {
    return row_sgd_reference(param, rows, values, momentum_buffer, last_step, last_decay, step, lr, momentum, dampening, nesterov,
                             maximize, decay);
  }
  const SgdStep step_of{step, lr, momentum, 1 - dampening, nesterov, maximize ? -1. : 1., decay};
  dispatch_floating(param.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const auto task = sgd_rows<T>(param, momentum_buffer, last_step, last_decay, step_of);
    update_rows<T>(
        rows.contiguous(), values.contiguous(), [&](int64_t row) { task.prefetch(row); },
        [&] { return [&](int64_t row, opmath<T>* g) { task.update(row, g); }; });
  });
}

void row_sgd_flush_cpu(const Tensor& param, const Tensor& momentum_buffer, const Tensor& last_step,
                       const OptionalTensor& last_decay, int64_t step, double lr, double momentum, bool nesterov, double decay) {
  check_row_sgd_flush(param, momentum_buffer, last_step, last_decay);
  if (use_reference() || !has_row_view(param) || !has_row_view(momentum_buffer)) {
    return row_sgd_flush_reference(param, momentum_buffer, last_step, last_decay, step, lr, momentum, nesterov, decay);
  }
  const SgdStep step_of{step, lr, momentum, 1, nesterov, 1, decay};
  dispatch_floating(param.scalar_type(), [&](auto zero) {
    const auto task = sgd_rows<decltype(zero)>(param, momentum_buffer, last_step, last_decay, step_of);
    at::parallel_for(0, param.size(0), rows_per_task(task.param.width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        task.flush(row);
      }
    });
  });
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("row_sgd_", row_sgd_cpu);
  m.impl("row_sgd_flush_", row_sgd_flush_cpu);
}

} // namespace xsoftmax
