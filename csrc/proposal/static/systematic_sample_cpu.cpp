#include "op/checks.h"
#include "cpu/memory.h"
#include "proposal/static/alias_sample.h"
#include "proposal/static/systematic_draws.h"

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kSystematicSampleCpu = "systematic_sample";

std::tuple<Tensor, Tensor> systematic_table_cpu(const Tensor& weights) {
  check_weights("systematic_table", weights);
  const Tensor flat = weights.contiguous();
  check_weight_values("systematic_table", flat);
  const int64_t n = flat.numel();
  const double* weight = flat.const_data_ptr<double>();
  std::vector<int64_t> sorted(n);
  std::iota(sorted.begin(), sorted.end(), int64_t(0));
  std::stable_sort(sorted.begin(), sorted.end(),
                   [weight](int64_t a, int64_t b) { return weight[a] > weight[b]; });

  const Tensor order = table_empty({n}, flat.options().dtype(at::kLong)),
               cumulative = table_empty({n}, flat.options());
  int64_t* class_at = order.mutable_data_ptr<int64_t>();
  double* sum_at = cumulative.mutable_data_ptr<double>();
  const SystematicTables tables{weight, class_at, sum_at, n, systematic_buckets(n), {}};
  for (int64_t b = 0; b < tables.buckets; ++b) {
    const int64_t begin = tables.begin(b), end = begin + tables.slots_within(b, n);
    double sum = 0;
    for (int64_t slot = end - 1; slot >= begin; --slot) {
      class_at[slot] = sorted[(slot - begin) * tables.buckets + b];
      sum += weight[class_at[slot]];
      sum_at[slot] = sum;
    }
  }
  return {order, cumulative};
}

// The tables may come from an untrusted state dict.
struct TableChecks {
  void id(int64_t id, int64_t classes) const {
    TORCH_CHECK_INDEX(uint64_t(id) < uint64_t(classes), kSystematicSampleCpu,
                      ": expected order in [0, ", classes, "), got ", id);
  }
  void samples(int64_t num_samples, int64_t support) const {
    TORCH_CHECK_VALUE(
        num_samples <= support, kSystematicSampleCpu, ": expected num_samples of at most ", support,
        " (the classes with a weight above zero, of which each is drawn once), got ", num_samples);
  }
};

void draw_set(int64_t* ids, const SystematicTables& tables, const SystematicPlan& plan,
              uint64_t seed, uint64_t query) {
  for (int64_t p = 0; p < plan.certain; ++p) {
    ids[p] = tables.order[tables.slot(p)];
  }
  SystematicLayout layout(tables, plan);
  layout.lay_out(seed, query);
  layout.pick(ids + plan.certain);
}

std::tuple<Tensor, Tensor> systematic_sample_cpu(const Tensor& seed, const Tensor& probability,
                                                 const Tensor& order, const Tensor& cumulative,
                                                 std::optional<int64_t> num_queries,
                                                 int64_t num_samples, at::TensorList tail_tables) {
  check_systematic_sample(seed, probability, order, cumulative, num_queries, num_samples);
  const Tensor weights = probability.contiguous(), slots = order.contiguous(),
               sums = cumulative.contiguous();
  const int64_t n = weights.numel();
  const StaticTail tail = static_tail(kSystematicSampleCpu, tail_tables, n);
  const SystematicTables tables{weights.const_data_ptr<double>(), slots.const_data_ptr<int64_t>(),
                                sums.const_data_ptr<double>(),    tail.first,
                                systematic_buckets(tail.first),   tail};
  const SystematicPlan plan = make_systematic_plan(tables, num_samples, TableChecks{});
  const Tensor out = empty_samples(seed, num_queries, num_samples);
  int64_t* ids = out.mutable_data_ptr<int64_t>();
  const DrawSeed from(seed);
  at::parallel_for(0, num_samples == 0 ? 0 : num_queries.value_or(1),
                   query_grain(tables.buckets + 4 * num_samples), [&](int64_t first, int64_t last) {
                     for (int64_t q = first; q < last; ++q) {
                       draw_set(ids + q * num_samples, tables, plan, from.key(), from.query(q));
                     }
                   });
  check::class_ids(kSystematicSampleCpu, "the classes in order", out, n);
  if (!num_queries.has_value()) {
    std::sort(ids, ids + num_samples);
  }
  const double log_scale = std::log(double(num_samples - plan.certain) / plan.tail);
  return {out, at::scalar_tensor(log_scale, weights.options())};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("systematic_table", systematic_table_cpu);
  m.impl("systematic_sample", systematic_sample_cpu);
}

} // namespace xsoftmax
