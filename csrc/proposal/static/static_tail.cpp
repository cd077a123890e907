#include "proposal/static/static_tail.h"

#include "op/checks.h"

#include <ATen/ops/scalar_tensor.h>

#include <cmath>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kNames[] = {"laid_out", "late_weight", "late_log_uniform"};
constexpr at::ScalarType kDtypes[] = {at::kLong, at::kDouble, at::kBool};

template <typename T>
T value_of(const Tensor& scalar) {
  const bool plain = scalar.is_cpu() && !scalar.is_neg() && !scalar._is_zerotensor();
  return plain ? *scalar.const_data_ptr<T>() : scalar.item<T>();
}

} // namespace

std::vector<Tensor> tail_tables(const StaticTail& tail) {
  return {at::scalar_tensor(tail.first, at::kLong), at::scalar_tensor(tail.weight, at::kDouble),
          at::scalar_tensor(tail.log_uniform, at::kBool)};
}

void check_tail(const char* op, at::TensorList tail) {
  TORCH_CHECK_VALUE(tail.empty() || tail.size() == std::size(kNames), op, ": expected tail as ",
                    std::size(kNames), " scalars, or none, got ", tail.size());
  for (size_t i = 0; i < tail.size(); ++i) {
    check::dim(op, kNames[i], tail[i], 0);
    check::dtype(op, kNames[i], tail[i], kDtypes[i]);
    check::same_device(op, kNames[i], tail[i], kNames[0], tail[0]);
  }
}

StaticTail static_tail(const char* op, at::TensorList tables, int64_t num_classes) {
  check_tail(op, tables);
  StaticTail tail{.first = num_classes, .end = num_classes};
  if (tables.empty() || tables[0].is_meta()) {
    return tail;
  }
  tail.first = value_of<int64_t>(tables[0]);
  TORCH_CHECK_VALUE(tail.first >= 1 && tail.first <= num_classes, op, ": expected laid_out in [1, ",
                    num_classes, "], the classes of the tables, got ", tail.first);
  tail.weight = value_of<double>(tables[1]);
  tail.log_uniform = value_of<bool>(tables[2]);
  if (tail.count() > 0) {
    TORCH_CHECK_VALUE(tail.weight > 0 && std::isfinite(tail.weight), op,
                      ": expected late_weight as a finite weight above 0, got ", tail.weight);
    tail.start = std::log1p(double(tail.first));
    tail.span = std::log(double(tail.end + 1) / double(tail.first + 1));
    tail.mass = tail.weight * (tail.log_uniform ? tail.span : double(tail.count()));
  }
  return tail;
}

} // namespace xsoftmax
