#include "core/checks.h"
#include "core/impl.h"
#include "core/optional.h"
#include "optim/row_adam.h"
#include "optim/row_update_cpu.h"

#include <torch/library.h>

#include <array>
#include <cmath>

namespace xsoftmax {
namespace {

using at::Tensor;

struct AdamOptions {
  int64_t step;
  double lr, beta1, beta2, eps, decay;
};

// What depends on the step alone up to which a row is made up. Most rows of a batch share a few, and a power costs as much as a row.
class OwedCoefficients {
 public:
  struct Entry {
    int64_t s = -1;
    double movement = 0, keep1 = 0, keep2 = 0, eps = 0;
  };

  OwedCoefficients(const AdamMovementOwed& owed, const AdamOptions& options) : owed_(owed), options_(options) {}

  const Entry& of(int64_t s) {
    Entry& entry = entries_[uint64_t(s) % entries_.size()];
    if (entry.s != s) {
      const double count = double(options_.step - s);
      entry = {s, options_.lr * owed_(s), std::pow(options_.beta1, count), std::pow(options_.beta2, count),
               options_.eps * std::sqrt(1 - std::pow(options_.beta2, double(s)))};
    }
    return entry;
  }

 private:
  const AdamMovementOwed& owed_;
  const AdamOptions& options_;
  std::array<Entry, 256> entries_;
};

template <typename T>
struct AdamRows {
  using M = opmath<T>;
  RowView<T> param;
  RowView<M> exp_avg, exp_avg_sq;
  RowView<int32_t> last_step;
  RowView<double> last_decay;
  AdamOptions options;
  double step_size, scale;

  void prefetch(int64_t row) const {
    last_step.prefetch(row);
    if (last_decay.data != nullptr) {
      last_decay.prefetch(row);
    }
    param.prefetch(row);
    exp_avg.prefetch(row);
    exp_avg_sq.prefetch(row);
  }

  // g: none in a flush.
  void update(int64_t row, const M* g, OwedCoefficients& coefficients) const {
    const double factor = take_row_decay(last_decay, row, options.decay);
    const int32_t s = *last_step[row];
    if (g == nullptr && (s == 0 || s >= options.step) && factor == 1) {
      return;
    }
    const auto& owed = coefficients.of(s);
    *last_step[row] = g == nullptr && s == 0 ? 0 : int32_t(options.step);
    const AdamStep<M> step{M(factor),
                           M(step_size),
                           M(scale),
                           M(owed.keep1),
                           M(1 - options.beta1),
                           M(owed.keep2),
                           M(1 - options.beta2),
                           M(options.eps),
                           M(owed.movement),
                           M(owed.eps)};
    row_updates().of(T{}).adam(param[row], exp_avg[row], exp_avg_sq[row], g, step, param.width);
  }
};

template <typename T>
AdamRows<T> adam_rows(const Tensor& param, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& last_step,
                      const OptionalTensor& last_decay, const AdamOptions& options) {
  return {row_view<T>(param),           row_view<opmath<T>>(exp_avg), row_view<opmath<T>>(exp_avg_sq),
          row_view<int32_t>(last_step), row_view<double>(last_decay), options,
          options.lr / (1 - std::pow(options.beta1, double(options.step))),
          1 / std::sqrt(1 - std::pow(options.beta2, double(options.step)))};
}

void row_adam_cpu(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                  const Tensor& last_step, const OptionalTensor& last_decay, int64_t step, double lr, double beta1, double beta2,
                  double eps, double decay) {
  check_row_adam(param, rows, values, exp_avg, exp_avg_sq, last_step, last_decay, beta1, beta2);
  check::class_ids("row_adam_", "rows", rows, param.size(0));
  if (use_reference() || !has_row_view(param) || !has_row_view(exp_avg) || !has_row_view(exp_avg_sq)) {
    return row_adam_reference(param, rows, values, exp_avg, exp_avg_sq, last_step, last_decay, step, lr, beta1, beta2, eps, decay);
  }
  const AdamOptions options{step, lr, beta1, beta2, eps, decay};
  const AdamMovementOwed owed(step - 1, beta1, beta2);
  dispatch_floating(param.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const auto task = adam_rows<T>(param, exp_avg, exp_avg_sq, last_step, last_decay, options);
    update_rows<T>(
        rows.contiguous(), values.contiguous(), [&](int64_t row) { task.prefetch(row); },
        [&] {
          return [&, coefficients = OwedCoefficients(owed, options)](int64_t row, const opmath<T>* g) mutable {
            task.update(row, g, coefficients);
          };
        });
  });
}

void row_adam_flush_cpu(const Tensor& param, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& last_step,
                        const OptionalTensor& last_decay, int64_t step, double lr, double beta1, double beta2, double eps,
                        double decay) {
  check_row_adam_flush(param, exp_avg, exp_avg_sq, last_step, last_decay, beta1, beta2);
  if (use_reference() || !has_row_view(param) || !has_row_view(exp_avg) || !has_row_view(exp_avg_sq)) {
    return row_adam_flush_reference(param, exp_avg, exp_avg_sq, last_step, last_decay, step, lr, beta1, beta2, eps, decay);
  }
  const AdamOptions options{step, lr, beta1, beta2, eps, decay};
  const AdamMovementOwed owed(step, beta1, beta2);
  dispatch_floating(param.scalar_type(), [&](auto zero) {
    const auto task = adam_rows<decltype(zero)>(param, exp_avg, exp_avg_sq, last_step, last_decay, options);
    at::parallel_for(0, param.size(0), rows_per_task(task.param.width), [&](int64_t first, int64_t last) {
      OwedCoefficients coefficients(owed, options);
      for (int64_t row = first; row < last; ++row) {
        task.update(row, nullptr, coefficients);
      }
    });
  });
}

void row_decay_cpu(const Tensor& param, const Tensor& last_decay, double decay) {
  check_row_decay(param, last_decay);
  if (use_reference() || !has_row_view(param)) {
    return row_decay_reference(param, last_decay, decay);
  }
  dispatch_floating(param.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const RowView<T> table = row_view<T>(param);
    const RowView<double> marks = row_view<double>(last_decay);
    at::parallel_for(0, param.size(0), rows_per_task(table.width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const double factor = take_row_decay(marks, row, decay);
        if (factor != 1) {
          row_updates().of(T{}).decay(table[row], opmath<T>(factor), table.width);
        }
      }
    });
  });
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("row_adam_", row_adam_cpu);
  m.impl("row_adam_flush_", row_adam_flush_cpu);
  m.impl("row_decay_", row_decay_cpu);
}

} // namespace xsoftmax
