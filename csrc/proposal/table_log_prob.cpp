#include "op/checks.h"
#include "cpu/impl.h"
#include "op/operators.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

namespace xsoftmax {
namespace {

// table_log_prob(probability float64 [N], ids int64, any shape) -> float64 of that shape: returns
// log probability[id]; -inf if that probability is 0 or the id is -1.

using at::Tensor;

constexpr const char* kTableLogProb = "table_log_prob";
constexpr int64_t kAhead = 16;

void check_table_log_prob(const Tensor& probability, const Tensor& ids) {
  check::dim(kTableLogProb, "probability", probability, 1);
  check::dtype(kTableLogProb, "probability", probability, at::kDouble);
  check::int64(kTableLogProb, "ids", ids);
  check::same_device(kTableLogProb, "ids", ids, "probability", probability);
}

Tensor table_log_prob_meta(const Tensor& probability, const Tensor& ids) {
  check_table_log_prob(probability, ids);
  return at::empty_symint(ids.sym_sizes(), probability.options());
}

Tensor table_log_prob_composite(const Tensor& probability, const Tensor& ids) {
  check_table_log_prob(probability, ids);
  const Tensor found =
      probability.index_select(0, ids.clamp_min(0).reshape({-1})).view_symint(ids.sym_sizes());
  return found.log().masked_fill(ids.lt(0), -std::numeric_limits<double>::infinity());
}

Tensor table_log_prob_cpu(const Tensor& probability, const Tensor& ids) {
  check_table_log_prob(probability, ids);
  check::class_ids(kTableLogProb, "ids", ids, probability.size(0), -1);
  if (use_reference()) {
    return table_log_prob_composite(probability, ids);
  }
  const Tensor table = probability.contiguous(), flat = ids.contiguous(),
               out = at::empty(ids.sizes(), probability.options());
  const double* value = table.const_data_ptr<double>();
  const int64_t* id = flat.const_data_ptr<int64_t>();
  double* found = out.mutable_data_ptr<double>();
  at::parallel_for(0, flat.numel(), 2048, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      __builtin_prefetch(value + id[std::min(i + kAhead, last - 1)]);
      found[i] = id[i] < 0 ? 0.0 : value[id[i]];
    }
  });
  return out.log_();
}

} // namespace

XSOFTMAX_OPERATORS(m) { m.def("table_log_prob(Tensor probability, Tensor ids) -> Tensor"); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("table_log_prob", table_log_prob_composite);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("table_log_prob", table_log_prob_meta); }
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("table_log_prob", table_log_prob_cpu); }

} // namespace xsoftmax
