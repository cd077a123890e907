#include "optim/row_adam.h"
#include "optim/row_update_cpu.h"

#include <cmath>

namespace xsoftmax {
namespace {

using at::Tensor;

// S: the type of the first moment, and of the second moment if it has one value per element.
template <typename T, typename S>
class AdamRows {
 public:
  using M = opmath<T>;

  explicit AdamRows(const RowAdamUpdate& update)
      : update_(update), random_(step_rounding(update.step, update.stochastic_rounding)),
        param_(row_view<T>(update.param)), exp_avg_(row_view<S>(update.exp_avg)),
        exp_avg_sq_(one_second_moment(update.param, update.exp_avg, update.exp_avg_sq)
                        ? RowView<S>{}
                        : row_view<S>(update.exp_avg_sq)),
        row_moment_(exp_avg_sq_.data == nullptr ? row_view<M>(update.exp_avg_sq) : RowView<M>{}),
        last_step_(row_view<int32_t>(update.last_step)),
        step_size_(row_adam_step_size(update.lr, std::pow(update.beta1, double(update.step)))),
        scale_(row_adam_scale(std::pow(update.beta2, double(update.step)))) {}

  int64_t width() const { return param_.width; }

  void prefetch(int64_t row) const {
    last_step_.prefetch(row);
    param_.prefetch(row);
    exp_avg_.prefetch(row);
    exp_avg_sq_.prefetch(row);
    row_moment_.prefetch(row);
  }

  /// Returns the coefficients for rows whose last gradient was in step s. A flush keeps their
  /// moments.
  AdamStep<M> coefficients(int64_t s) const {
    const auto pending = update_.pending(s);
    const bool keeps = update_.step == update_.pending.step() && !update_.rebase;
    const double count = keeps ? 0 : double(update_.step - s);
    return row_adam_coefficients<M>(
        {update_.lr, update_.beta1, update_.beta2, update_.eps, 0, false}, pending, update_.decay,
        step_size_, scale_, std::pow(update_.beta1, count), std::pow(update_.beta2, count),
        std::pow(update_.beta2, double(s)));
  }

  // g: nullptr in a flush. ahead: as in update_rows.
  void update(int64_t row, const M* g, StepCache<AdamStep<M>>& step_cache,
              int64_t ahead = -1) const {
    last_step_.prefetch(ahead);
    row_moment_.prefetch(ahead);
    const int32_t s = *last_step_[row];
    if (g == nullptr && s >= update_.step) {
      return;
    }
    const AdamStep<M>& step = step_cache.of(s, [this](int64_t from) { return coefficients(from); });
    if (g == nullptr && s == 0 && step.decay == 1) {
      return;
    }
    if (g != nullptr || (update_.rebase && s != 0)) {
      *last_step_[row] = int32_t(update_.step);
    }
    const auto& kernels = row_updates().of(T{}, S{});
    const RowRounding random = rounding_of<T, S>(random_, row);
    const RowsAhead<T, S> rows{param_.ahead(ahead),
                               {exp_avg_.ahead(ahead), exp_avg_sq_.ahead(ahead)}};
    if (exp_avg_sq_.data != nullptr) {
      kernels.adam(param_[row], exp_avg_[row], exp_avg_sq_[row], g, step, random, param_.width,
                   rows);
    } else {
      kernels.adam_row(param_[row], exp_avg_[row], row_moment_[row], g, step, random, param_.width,
                       rows);
    }
  }

 private:
  const RowAdamUpdate& update_;
  StepRounding random_;
  RowView<T> param_;
  RowView<S> exp_avg_, exp_avg_sq_;
  RowView<M> row_moment_; ///< one per row, used instead of exp_avg_sq_
  RowView<int32_t> last_step_;
  double step_size_, scale_;
};

} // namespace

void row_adam_rows_cpu(const RowAdamUpdate& update, const Tensor& rows, const Tensor& values) {
  dispatch_rows(update.param, update.exp_avg, [&](auto zero, auto zero_state) {
    using T = decltype(zero);
    const AdamRows<T, decltype(zero_state)> task(update);
    update_rows<T>(
        update.param, rows.contiguous(), values.contiguous(),
        [&](int64_t row) { task.prefetch(row); },
        [&] {
          return [&, step_cache = StepCache<AdamStep<opmath<T>>>()](int64_t row, const opmath<T>* g,
                                                                    int64_t ahead) mutable {
            task.update(row, g, step_cache, ahead);
          };
        });
  });
}

void row_adam_flush_cpu(const RowAdamUpdate& update) {
  dispatch_rows(update.param, update.exp_avg, [&](auto zero, auto zero_state) {
    using T = decltype(zero);
    const AdamRows<T, decltype(zero_state)> task(update);
    update_all_rows(update.param, task.width(), [&] {
      return [&, step_cache = StepCache<AdamStep<opmath<T>>>()](int64_t row) mutable {
        task.update(row, nullptr, step_cache);
      };
    });
  });
}

} // namespace xsoftmax
