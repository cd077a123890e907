#include "optim/row_adagrad.h"
#include "optim/row_update_cpu.h"

namespace xsoftmax {

using at::Tensor;

void row_adagrad_rows_cpu(const RowAdagradUpdate& update, const Tensor& rows,
                          const Tensor& values) {
  dispatch_rows(update.param, update.sum, [&](auto zero, auto zero_state) {
    using T = decltype(zero);
    using S = decltype(zero_state);
    using M = opmath<T>;
    const bool one_sum = update.sum.dim() < update.param.dim();
    const auto& kernels = row_updates().of(T{}, S{});
    const AdagradStep<M> step{M(update.lr), M(update.weight_decay), M(update.eps)};
    const RowView<T> table = row_view<T>(update.param);
    const RowView<M> row_sums = one_sum ? row_view<M>(update.sum) : RowView<M>{};
    const RowView<S> sums = one_sum ? RowView<S>{} : row_view<S>(update.sum);
    const StepRounding rounding = step_rounding(update.step, update.stochastic_rounding);
    const auto kernel = [&](int64_t row, const M* g, int64_t ahead) {
      row_sums.prefetch(ahead);
      const RowsAhead<T, S> rows{table.ahead(ahead), {sums.ahead(ahead)}};
      const RowRounding random = rounding_of<T, S>(rounding, row);
      if (one_sum) {
        kernels.adagrad_row(table[row], row_sums[row], g, step, random, table.width, rows);
      } else {
        kernels.adagrad(table[row], sums[row], g, step, random, table.width, rows);
      }
    };
    update_rows<T>(
        update.param, rows.contiguous(), values.contiguous(),
        [&](int64_t row) {
          table.prefetch(row);
          sums.prefetch(row);
          row_sums.prefetch(row);
        },
        [&] { return kernel; });
  });
}

} // namespace xsoftmax
