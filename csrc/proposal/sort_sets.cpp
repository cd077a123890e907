#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "proposal/complement_sample.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <algorithm>

namespace xsoftmax {
namespace {

using at::Tensor;

void check_sets(const Tensor& sets, int64_t num_classes) {
  constexpr const char* op = "sort_sets";
  check::dim(op, "sets", sets, 2);
  check::int64(op, "sets", sets);
  TORCH_CHECK_VALUE(num_classes >= 1, op, ": expected num_classes of at least 1, got ",
                    num_classes);
}

Tensor sort_sets_any(const Tensor& sets, int64_t num_classes) {
  check_sets(sets, num_classes);
  return std::get<0>(
      at::where(sets.ge(0), sets,
                at::arange(at::Scalar(sets.sym_size(1)), sets.options()) + num_classes)
          .sort(1));
}

Tensor sort_sets_cpu(const Tensor& sets, int64_t num_classes) {
  constexpr const char* op = "sort_sets";
  check_sets(sets, num_classes);
  const Tensor sets_in_order = sets.contiguous(), out = at::empty(sets.sizes(), sets.options());
  const int64_t *id = sets_in_order.const_data_ptr<int64_t>(), size = sets.size(1);
  int64_t* const sorted = out.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < sets.numel(); ++i) {
    TORCH_CHECK_INDEX(id[i] >= -1 && id[i] < num_classes, op, ": expected classes in [0, ",
                      num_classes, "), or -1 for none, got ", id[i], " at [", i / size, ", ",
                      i % size, "]");
    sorted[i] = id[i] >= 0 ? id[i] : num_classes + i % size;
  }
  for (int64_t q = 0; q < sets.size(0); ++q) {
    int64_t *const first = sorted + q * size, *const last = first + size;
    std::sort(first, last);
    const int64_t* const repeat = std::adjacent_find(first, last);
    TORCH_CHECK_VALUE(repeat == last, op, ": expected sets without repeats, got ", *repeat,
                      " twice in that of query ", q);
  }
  return out;
}

Tensor sort_sets_meta(const Tensor& sets, int64_t num_classes) {
  check_sets(sets, num_classes);
  return at::empty_like(sets, at::MemoryFormat::Contiguous);
}

} // namespace

Tensor sort_sets(const Tensor& sets, int64_t num_classes) {
  static const auto op = find_op<decltype(sort_sets)>("xsoftmax::sort_sets");
  return op.call(sets, num_classes);
}

XSOFTMAX_OPERATORS(m) { m.def("sort_sets(Tensor sets, int num_classes) -> Tensor"); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("sort_sets", sort_sets_any); }
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("sort_sets", sort_sets_cpu); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("sort_sets", sort_sets_meta); }

} // namespace xsoftmax
