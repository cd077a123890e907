#include "cpu/impl.h"
#include "optim/row_norm.h"
#include "optim/row_update_cpu.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

// Combines the sums of powers (for p = infinity, the maxima) of the groups, in their order, into
// the norm.
double combine(const std::vector<double>& powers, double p) {
  double total = 0;
  for (const double power : powers) {
    total = !std::isinf(p) ? total + power : (power > total || std::isnan(power) ? power : total);
    if (std::isnan(total)) {
      break;
    }
  }
  return std::isinf(p) || p == 1 ? total : (p == 2 ? std::sqrt(total) : std::pow(total, 1 / p));
}

template <typename T>
double norm_of_groups(const Tensor& rows, const Tensor& values, double p) {
  const int64_t width = values.dim() == 2 ? values.size(1) : 1;
  const auto& kernels = row_updates().of(T{});
  const RowGroups groups = group_rows(rows.const_data_ptr<int64_t>(), rows.numel());
  std::vector<double> powers(groups.size());
  at::parallel_for(0, groups.size(), rows_per_task(width), [&](int64_t first, int64_t last) {
    std::vector<opmath<T>> sum(width);
    for (int64_t g = first; g < last; ++g) {
      const auto members = groups[g];
      const opmath<T>* row_sum = kernels.sum_rows(sum.data(), const_data<T>(values), members.data(),
                                                  int64_t(members.size()), width);
      if (row_sum == nullptr) { // power_sum(0) is computed like any other
        std::fill(sum.begin(), sum.end(), opmath<T>(0));
      }
      powers[g] = double(kernels.power_sum(row_sum == nullptr ? sum.data() : row_sum, p, width));
    }
  });
  return combine(powers, p);
}

Tensor row_norm_cpu(const Tensor& rows, const Tensor& values, double norm_type) {
  check_row_norm(rows, values, norm_type);
  if (use_reference()) {
    return row_norm_reference(rows, values, norm_type);
  }
  const double norm = dispatch_floating(values.scalar_type(), [&](auto zero) {
    return norm_of_groups<decltype(zero)>(rows.contiguous(), values.contiguous(), norm_type);
  });
  // A float32 norm beyond its range is infinite; scalar_tensor would refuse it.
  return at::scalar_tensor(norm, values.options().dtype(at::kDouble))
      .to(opmath_dtype(values.scalar_type()));
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("row_norm", row_norm_cpu); }

} // namespace xsoftmax
