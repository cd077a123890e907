#include "clusters/kmeans.h"

#include "clusters/nearest.h"
#include "core/autocast.h"
#include "core/checks.h"
#include "core/permutation.h"
#include "core/impl.h"
#include "core/optional.h"
#include "core/row_groups.h"
#include "scores/row_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kOp = "kmeans";
constexpr int64_t kSeedRows = 8; // a cluster

void check_kmeans(const Tensor& seed, const Tensor& rows, int64_t clusters, int64_t iterations, const OptionalTensor& init) {
  check::dim(kOp, "seed", seed, 0);
  check::int64(kOp, "seed", seed);
  check::dim(kOp, "rows", rows, 2);
  check::floating(kOp, "rows", rows);
  check::same_device(kOp, "seed", seed, "rows", rows);
  TORCH_CHECK_VALUE(clusters >= 1, kOp, ": expected clusters of at least 1, got ", clusters);
  TORCH_CHECK_VALUE(iterations >= 0, kOp, ": expected iterations of at least 0, got ", iterations);
  if (given(init)) {
    check::dim(kOp, "init", *init, 2);
    check::floating(kOp, "init", *init);
    check::size(kOp, "init", *init, 0, clusters, "the clusters");
    check::size(kOp, "init", *init, 1, rows.sym_size(1), "the columns of rows");
    check::same_device(kOp, "init", *init, "rows", rows);
  }
}

std::tuple<Tensor, Tensor> kmeans_meta(const Tensor& seed, const Tensor& rows, int64_t clusters, int64_t iterations,
                                       const OptionalTensor& init) {
  check_kmeans(seed, rows, clusters, iterations, init);
  const auto options = rows.options().requires_grad(false);
  return {at::empty_symint({clusters, rows.sym_size(1)}, options.dtype(at::kFloat)), at::empty({iterations + 1}, options.dtype(at::kDouble))};
}

// Each seed is a row, drawn in proportion to its squared distance from the seeds before it.
Tensor plus_plus_seeds(uint64_t seed, const Tensor& rows, int64_t clusters) {
  const int64_t n = std::min(rows.size(0), kSeedRows * clusters);
  const RandomPermutation place(seed, 0, uint64_t(rows.size(0)));
  std::vector<int64_t> chosen(n);
  for (int64_t i = 0; i < n; ++i) {
    chosen[i] = int64_t(place(uint64_t(i)));
  }
  const Tensor x = rows.index_select(0, at::tensor(chosen, at::kLong).to(rows.device())), norm = x.square().sum(1);
  const Tensor seeds = at::empty({clusters, rows.size(1)}, x.options());
  Tensor distance = at::full({n}, std::numeric_limits<float>::infinity(), x.options());
  for (int64_t k = 0; k < clusters; ++k) {
    const double u = unit_double(philox(seed, 1, k).low());
    const Tensor sum = distance.to(at::kDouble, false, true).cumsum(0);
    const double total = k == 0 ? 0.0 : sum[n - 1].item<double>();
    // The first seed, and, once all rows are seeds, any: all alike.
    const int64_t drawn = total > 0 ? sum.le(u * total).sum().item<int64_t>() : int64_t(u * double(n));
    const Tensor row = x.select(0, std::min(drawn, n - 1));
    seeds.select(0, k).copy_(row);
    distance = at::minimum(distance, (norm - 2 * at::mv(x, row) + row.square().sum()).clamp_min(0));
  }
  return seeds;
}

std::tuple<Tensor, Tensor> nearest(const Tensor& rows, const Tensor& centroids) {
  if (rows.is_cpu() && !use_reference()) {
    return nearest_codeword_cpu(rows, centroids);
  }
  const Tensor score = at::mm(rows, centroids.t()) - 0.5 * centroids.square().sum(1);
  const auto [best, index] = score.max(1);
  return {index, (rows.square().sum(1) - 2 * best).clamp_min(0)};
}

Tensor cluster_sums(const Tensor& rows, const Tensor& index, int64_t clusters) {
  const Tensor sums = at::zeros({clusters, rows.size(1)}, rows.options());
  if (!rows.is_cpu() || use_reference()) {
    return sums.index_add(0, index, rows);
  }
  const RowGroups groups = group_rows(index.const_data_ptr<int64_t>(), index.size(0));
  const std::vector<float> ones(index.size(0), 1.0f);
  const int64_t width = rows.size(1);
  at::parallel_for(0, groups.size(), 1, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const auto members = groups[g];
      const float* row = rows.const_data_ptr<float>();
      float* sum = sums.mutable_data_ptr<float>() + index.const_data_ptr<int64_t>()[members[0]] * width;
      row_kernels().of(row).sum_rows(sum, row, width, members.data(), ones.data(), int64_t(members.size()), width);
    }
  });
  return sums;
}

std::tuple<Tensor, Tensor> kmeans_composite(const Tensor& seed, const Tensor& rows, int64_t clusters, int64_t iterations,
                                            const OptionalTensor& init) {
  check_kmeans(seed, rows, clusters, iterations, init);
  const Tensor x = rows.to(at::kFloat).contiguous();
  const Tensor inertia = at::zeros({iterations + 1}, at::TensorOptions(at::kDouble));
  if (x.size(0) == 0) {
    return {given(init) ? init->to(at::kFloat, false, true) : at::zeros({clusters, x.size(1)}, x.options()), inertia.to(rows.device())};
  }
  TORCH_CHECK_VALUE(x.isfinite().all().item<bool>(), kOp, ": expected rows that are finite, got an infinity or NaN");
  Tensor centroids = given(init) ? init->to(at::kFloat, false, true).contiguous()
                                 : plus_plus_seeds(uint64_t(seed.item<int64_t>()), x, clusters);
  for (int64_t i = 0;; ++i) {
    const auto [index, distance] = nearest(x, centroids);
    inertia[i].fill_(distance.to(at::kDouble).mean());
    if (i == iterations) {
      return {centroids, inertia.to(rows.device())};
    }
    const Tensor count = index.bincount({}, clusters).unsqueeze(1);
    centroids = at::where(count.gt(0), cluster_sums(x, index, clusters) / count.clamp_min(1), centroids);
    const Tensor empty = count.squeeze(1).eq(0).nonzero().squeeze(1);
    const int64_t restarts = std::min(empty.size(0), x.size(0));
    if (restarts > 0) {
      const Tensor far = std::get<1>(distance.topk(restarts));
      centroids.index_copy_(0, empty.narrow(0, 0, restarts), x.index_select(0, far));
    }
  }
}

} // namespace

std::tuple<Tensor, Tensor> kmeans(const Tensor& seed, const Tensor& rows, int64_t clusters, int64_t iterations,
                                  const OptionalTensor& init) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::kmeans", "").typed<decltype(kmeans_composite)>();
  return op.call(seed, rows, clusters, iterations, init);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("kmeans(Tensor seed, Tensor rows, int clusters, int iterations, Tensor? init=None) -> (Tensor centroids, Tensor inertia)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("kmeans", kmeans_composite); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("kmeans", kmeans_meta); }

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) { below_autocast(m, {"kmeans"}); }
TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) { below_autocast(m, {"kmeans"}); }

} // namespace xsoftmax
