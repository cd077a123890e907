#include "core/checks.h"
#include "core/impl.h"
#include "optim/row_adagrad.h"
#include "optim/row_update_cpu.h"

#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

template <typename T>
void adagrad_rows(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& sum,
                  const AdagradStep<opmath<T>>& step) {
  using M = opmath<T>;
  const auto& kernels = row_updates().of(T{});
  const RowView<T> table = row_view<T>(param);
  const RowView<M> sums = row_view<M>(sum);
  const bool one_sum = sum.dim() < param.dim();
  update_rows<T>(
      rows, values,
      [&](int64_t row) {
        table.prefetch(row);
        sums.prefetch(row);
      },
      [&] {
        return [&](int64_t row, M* g) {
          if (one_sum) {
            kernels.adagrad_row(table[row], sums[row], g, step, table.width);
          } else {
            kernels.adagrad(table[row], sums[row], g, step, table.width);
          }
        };
      });
}

void row_adagrad_cpu(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& sum, double lr,
                     double weight_decay, double eps) {
  check_row_adagrad(param, rows, values, sum);
  check::class_ids("row_adagrad_", "rows", rows, param.size(0));
  if (use_reference() || !has_row_view(param) || !has_row_view(sum)) {
    return row_adagrad_reference(param, rows, values, sum, lr, weight_decay, eps);
  }
  dispatch_floating(param.scalar_type(), [&](auto zero) {
    using M = opmath<decltype(zero)>;
    adagrad_rows<decltype(zero)>(param, rows.contiguous(), values.contiguous(), sum, {M(lr), M(weight_decay), M(eps)});
  });
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("row_adagrad_", row_adagrad_cpu); }

} // namespace xsoftmax
