#include "core/checks.h"
#include "core/impl.h"
#include "core/optional.h"
#include "optim/row_adam.h"
#include "optim/row_update_cpu.h"

#include <torch/library.h>

#include <array>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

struct AdamOptions {
  double lr, beta1, beta2, eps, decay;
};

// What depends on a row's number of steps alone. Most rows of a batch share a few numbers, and a power costs as much as a row.
class BiasCorrections {
 public:
  struct Entry {
    int32_t steps = std::numeric_limits<int32_t>::min(); // of no row
    double step_size = 0, scale = 0;
  };

  const Entry& of(int32_t steps, const AdamOptions& options) {
    Entry& entry = entries_[uint32_t(steps) % entries_.size()];
    if (entry.steps != steps) {
      entry = {steps, options.lr / (1 - std::pow(options.beta1, steps)), 1 / std::sqrt(1 - std::pow(options.beta2, steps))};
    }
    return entry;
  }

 private:
  std::array<Entry, 256> entries_;
};

template <typename T>
struct AdamRows {
  using M = opmath<T>;
  RowView<T> param;
  RowView<M> exp_avg, exp_avg_sq;
  RowView<int32_t> row_step;
  RowView<double> last_decay;
  AdamOptions options;

  void prefetch(int64_t row) const {
    row_step.prefetch(row);
    if (last_decay.data != nullptr) {
      last_decay.prefetch(row);
    }
    param.prefetch(row);
    exp_avg.prefetch(row);
    exp_avg_sq.prefetch(row);
  }

  void update(int64_t row, const M* g, BiasCorrections& corrections) const {
    const auto& [t, step_size, scale] = corrections.of(++*row_step[row], options);
    const AdamStep<M> step{M(take_row_decay(last_decay, row, options.decay)),
                           M(step_size),
                           M(scale),
                           M(1 - options.beta1),
                           M(options.beta2),
                           M(1 - options.beta2),
                           M(options.eps)};
    row_updates().of(T{}).adam(param[row], exp_avg[row], exp_avg_sq[row], g, step, param.width);
  }
};

void row_adam_cpu(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                  const Tensor& row_step, const OptionalTensor& last_decay, double lr, double beta1, double beta2, double eps,
                  double decay) {
  check_row_adam(param, rows, values, exp_avg, exp_avg_sq, row_step, last_decay);
  check::class_ids("row_adam_", "rows", rows, param.size(0));
  if (use_reference() || !has_row_view(param) || !has_row_view(exp_avg) || !has_row_view(exp_avg_sq)) {
    return row_adam_reference(param, rows, values, exp_avg, exp_avg_sq, row_step, last_decay, lr, beta1, beta2, eps, decay);
  }
  dispatch_floating(param.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AdamRows<T> task{row_view<T>(param),          row_view<opmath<T>>(exp_avg), row_view<opmath<T>>(exp_avg_sq),
                           row_view<int32_t>(row_step), row_view<double>(last_decay), {lr, beta1, beta2, eps, decay}};
    update_rows<T>(
        rows.contiguous(), values.contiguous(), [&](int64_t row) { task.prefetch(row); },
        [&] {
          return [&, corrections = BiasCorrections()](int64_t row, const opmath<T>* g) mutable { task.update(row, g, corrections); };
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
  m.impl("row_decay_", row_decay_cpu);
}

} // namespace xsoftmax
