#include "op/checks.h"
#include "cpu/memory.h"
#include "proposal/static/alias_sample.h"
#include "proposal/draws.h"
#include "proposal/static/static_tail.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

AliasBin alias_bin(double threshold, int64_t alias) {
  return {int64_t(std::ceil(std::ldexp(threshold, 53))), alias};
}

// Vose's method over `mass`, the weights scaled to mean 1, which is modified. Classes of zero
// weight get bins that refer to `heaviest`, in case rounding leaves them unpaired.
void fill_alias_table(AliasBin* bins, std::vector<double>& mass, int64_t heaviest) {
  const int64_t n = int64_t(mass.size());
  std::vector<int64_t> small, large;
  for (int64_t i = 0; i < n; ++i) {
    (mass[i] < 1.0 ? small : large).push_back(i);
    // A bin that remains unpaired is full, up to rounding; it must not be that of a class of zero
    // weight.
    bins[i] = mass[i] > 0 ? alias_bin(1, i) : alias_bin(0, heaviest);
  }
  while (!small.empty() && !large.empty()) {
    const int64_t light = small.back(), heavy = large.back();
    small.pop_back();
    bins[light] = alias_bin(mass[light], heavy);
    mass[heavy] = (mass[heavy] + mass[light]) - 1.0;
    if (mass[heavy] < 1.0) {
      large.pop_back();
      small.push_back(heavy);
    }
  }
}

Tensor alias_table_cpu(const Tensor& weights) {
  constexpr const char* op = "alias_table";
  check_weights(op, weights);
  const Tensor flat = weights.contiguous();
  const double largest = check_weight_values(op, flat);
  const int64_t n = flat.numel();
  const double* weight = flat.const_data_ptr<double>();
  // Dividing by the largest weight avoids overflow and underflow of sums and products.
  std::vector<double> mass(n);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    mass[i] = weight[i] / largest;
    sum += mass[i];
  }
  for (double& m : mass) {
    m *= double(n) / sum;
  }
  const Tensor bins = table_empty({n, 2}, flat.options().dtype(at::kLong));
  fill_alias_table(reinterpret_cast<AliasBin*>(bins.mutable_data_ptr<int64_t>()), mass,
                   std::max_element(weight, weight + n) - weight);
  return bins;
}

Tensor alias_sample_cpu(const Tensor& seed, const Tensor& bins, std::optional<int64_t> num_queries,
                        int64_t num_samples, at::TensorList tail_tables) {
  check_alias_sample(seed, bins, num_queries, num_samples);
  const StaticTail tail = static_tail("alias_sample", tail_tables, bins.size(0));
  const Tensor out = empty_samples(seed, num_queries, num_samples);
  const Tensor table = bins.contiguous();
  int64_t* ids = out.mutable_data_ptr<int64_t>();
  const auto* bin = reinterpret_cast<const AliasBin*>(table.const_data_ptr<int64_t>());
  const DrawSeed from(seed);
  const int64_t n = table.size(0);
  at::parallel_for(
      0, num_samples == 0 ? 0 : num_queries.value_or(1), query_grain(num_samples),
      [&](int64_t first, int64_t last) {
        for (int64_t q = first; q < last; ++q) {
          for (int64_t j = 0; j < num_samples; ++j) {
            const int64_t tail_id = tail.count() > 0 ? tail.draw(from.key(), from.query(q), j) : -1;
            ids[q * num_samples + j] =
                tail_id < 0 ? alias_draw(from.key(), from.query(q), j, bin, tail.first) : tail_id;
          }
        }
      });
  // Fails only if the table is corrupt.
  check::class_ids("alias_sample", "the classes in bins", out, n);
  return out;
}

} // namespace

double check_weight_values(const char* op, const Tensor& weights) {
  const Tensor flat = weights.contiguous();
  const double* weight = flat.const_data_ptr<double>();
  double largest = 0;
  for (int64_t i = 0; i < flat.numel(); ++i) {
    TORCH_CHECK_VALUE(weight[i] >= 0 && std::isfinite(weight[i]), op,
                      ": expected weights that are finite and not negative, got ", weight[i],
                      " at [", i, "]");
    largest = std::max(largest, weight[i]);
  }
  TORCH_CHECK_VALUE(largest > 0, op, ": expected a weight above zero, got none");
  return largest;
}

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("alias_table", alias_table_cpu);
  m.impl("alias_sample", alias_sample_cpu);
}

} // namespace xsoftmax
