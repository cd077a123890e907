#include "optim/row_adagrad.h"
#include "optim/row_update_cpu.h"

namespace xsoftmax {

using at::Tensor;

void row_adagrad_rows_cpu(const RowAdagradUpdate& update, const Tensor& rows, const Tensor& values) {
  dispatch_floating(update.param.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    using M = opmath<T>;
    const auto& kernels = row_updates().of(T{});
    const AdagradStep<M> step{M(update.lr), M(update.weight_decay), M(update.eps)};
    const RowView<T> table = row_view<T>(update.param);
    const RowView<M> sums = row_view<M>(update.sum);
    const auto kernel = [&, one_sum = update.sum.dim() < update.param.dim()](int64_t row, M* g) {
      if (one_sum) {
        kernels.adagrad_row(table[row], sums[row], g, step, table.width);
      } else {
        kernels.adagrad(table[row], sums[row], g, step, table.width);
      }
    };
    update_rows<T>(
        update.param, rows.contiguous(), values.contiguous(),
        [&](int64_t row) {
          table.prefetch(row);
          sums.prefetch(row);
        },
        [&] { return kernel; });
  });
}

} // namespace xsoftmax
