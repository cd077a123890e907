#include "optim/row_sgd.h"
#include "optim/row_update_cpu.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

template <typename T, typename S>
class SgdRows {
 public:
  using M = opmath<T>;

  explicit SgdRows(const RowSGDUpdate& update)
      : update_(update), random_(step_rounding(update.step, update.stochastic_rounding)),
        param_(row_view<T>(update.param)),
        buffer_(is_defined(update.momentum_buffer) ? row_view<S>(*update.momentum_buffer)
                                                   : RowView<S>{}),
        last_step_(is_defined(update.last_step) ? row_view<int32_t>(*update.last_step)
                                                : RowView<int32_t>{}) {}

  int64_t width() const { return param_.width; }

  void prefetch(int64_t row) const {
    param_.prefetch(row);
    buffer_.prefetch(row);
    last_step_.prefetch(row);
  }

  /// Returns the coefficients for rows whose last gradient was in step s. A flush keeps their
  /// buffer.
  MomentumStep<M> coefficients(int64_t s) const {
    const auto pending = update_.pending(s);
    const bool keeps = s == 0 || (update_.step == update_.pending.step() && !update_.rebase);
    const double count = keeps ? 0 : double(update_.step - s);
    const RowSGDNumbers numbers{
        update_.lr,       update_.momentum,           0, 0, update_.nesterov,
        update_.maximize, update_.stochastic_rounding};
    return row_sgd_coefficients<M>(numbers, pending, update_.decay, update_.gradient_factor,
                                   std::pow(update_.momentum, count));
  }

  // Data that a task reuses from row to row.
  struct Task {
    StepCache<MomentumStep<M>> step_cache;
    std::vector<M> negated;
  };

  void update(int64_t row, const M* g, Task& buffers, int64_t ahead) const {
    last_step_.prefetch(ahead);
    const RowsAhead<T, S> rows{param_.ahead(ahead), {buffer_.ahead(ahead)}};
    const auto& kernels = row_updates().of(T{}, S{});
    const RowRounding random = rounding_of<T, S>(random_, row);
    const M lr = M(update_.maximize ? -update_.lr : update_.lr);
    if (last_step_.data == nullptr) {
      kernels.sgd(param_[row], g, M(1), lr, random, param_.width, rows);
      return;
    }
    const auto& step =
        buffers.step_cache.of(*last_step_[row], [this](int64_t s) { return coefficients(s); });
    *last_step_[row] = int32_t(update_.step);
    if (buffer_.data == nullptr) {
      kernels.sgd(param_[row], g, step.decay, lr, random, param_.width, rows);
      return;
    }
    if (update_.maximize) {
      buffers.negated.resize(param_.width);
      std::transform(g, g + param_.width, buffers.negated.begin(), std::negate<M>());
      g = buffers.negated.data();
    }
    kernels.momentum(param_[row], buffer_[row], g, step, random, param_.width, rows);
  }

  void flush(int64_t row, StepCache<MomentumStep<M>>& step_cache) const {
    const int32_t s = *last_step_[row];
    if (s >= update_.step) {
      return;
    }
    const auto& step = step_cache.of(s, [this](int64_t from) { return coefficients(from); });
    if (update_.rebase && s != 0) {
      *last_step_[row] = int32_t(update_.step);
    }
    const auto& kernels = row_updates().of(T{}, S{});
    const RowRounding random = rounding_of<T, S>(random_, row);
    if (s != 0 && buffer_.data != nullptr) {
      kernels.drift(param_[row], buffer_[row], step.decay, step.drift, step.buffer_factor, random,
                    param_.width);
    } else if (step.decay != 1) {
      kernels.decay(param_[row], step.decay, random, param_.width);
    }
  }

 private:
  const RowSGDUpdate& update_;
  StepRounding random_;
  RowView<T> param_;
  RowView<S> buffer_;
  RowView<int32_t> last_step_;
};

// Returns the tensor that decides the type of the state; without a buffer, any type works.
const Tensor& state_of(const RowSGDUpdate& update) {
  return is_defined(update.momentum_buffer) ? *update.momentum_buffer : update.param;
}

} // namespace

void row_sgd_rows_cpu(const RowSGDUpdate& update, const Tensor& rows, const Tensor& values) {
  dispatch_rows(update.param, state_of(update), [&](auto zero, auto zero_state) {
    using T = decltype(zero);
    using Rows = SgdRows<T, decltype(zero_state)>;
    const Rows task(update);
    update_rows<T>(
        update.param, rows.contiguous(), values.contiguous(),
        [&](int64_t row) { task.prefetch(row); },
        [&] {
          return [&, buffers = typename Rows::Task()](int64_t row, const opmath<T>* g,
                                                      int64_t ahead) mutable {
            task.update(row, g, buffers, ahead);
          };
        });
  });
}

void row_sgd_flush_cpu(const RowSGDUpdate& update) {
  dispatch_rows(update.param, state_of(update), [&](auto zero, auto zero_state) {
    using T = decltype(zero);
    const SgdRows<T, decltype(zero_state)> task(update);
    update_all_rows(update.param, task.width(), [&] {
      return [&, step_cache = StepCache<MomentumStep<opmath<T>>>()](int64_t row) mutable {
        task.flush(row, step_cache);
      };
    });
  });
}

} // namespace xsoftmax
