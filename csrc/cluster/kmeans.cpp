#include "cluster/kmeans.h"

#include "cluster/nearest.h"
#include "op/autocast.h"
#include "cpu/products.h"
#include "op/checks.h"
#include "cpu/impl.h"
#include "op/long_work.h"
#include "op/operators.h"
#include "op/optional.h"
#include "cpu/row_groups.h"
#include "random/uniform_draws.h"
#include "table/row_kernels.h"
#include "op/find_op.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kKmeans = "kmeans";
constexpr int64_t kSeedRows = 8; // per cluster
constexpr int64_t kMembers = int64_t(1) << 24; // rows times clusters per membership product

void check_kmeans(const Tensor& seed, const Tensor& rows, int64_t clusters, int64_t iterations,
                  const OptionalTensor& init) {
  check::dim(kKmeans, "seed", seed, 0);
  check::int64(kKmeans, "seed", seed);
  check::dim(kKmeans, "rows", rows, 2);
  check::floating(kKmeans, "rows", rows);
  check::same_device(kKmeans, "seed", seed, "rows", rows);
  TORCH_CHECK_VALUE(clusters >= 1, kKmeans, ": expected clusters of at least 1, got ", clusters);
  TORCH_CHECK_VALUE(iterations >= 0, kKmeans, ": expected iterations of at least 0, got ",
                    iterations);
  if (is_defined(init)) {
    check::dim(kKmeans, "init", *init, 2);
    check::floating(kKmeans, "init", *init);
    check::size(kKmeans, "init", *init, 0, clusters, "the clusters");
    check::size(kKmeans, "init", *init, 1, rows.sym_size(1), "the columns of rows");
    check::same_device(kKmeans, "init", *init, "rows", rows);
  }
}

std::tuple<Tensor, Tensor> kmeans_meta(const Tensor& seed, const Tensor& rows, int64_t clusters,
                                       int64_t iterations, const OptionalTensor& init) {
  check_kmeans(seed, rows, clusters, iterations, init);
  const auto options = rows.options().requires_grad(false);
  return {at::empty_symint({clusters, rows.sym_size(1)}, options.dtype(at::kFloat)),
          at::empty({iterations + 1}, options.dtype(at::kDouble))};
}

// Whether to use the CPU loops. Otherwise ATen calls are used, without reading values on the host.
bool on_host(const Tensor& rows) { return rows.is_cpu() && !use_reference(); }

// Returns the inclusive prefix sums of `values` [n]. A device's scan may add in any order, but a
// matrix product adds in a fixed one, so devices sum within blocks of 64, then over the blocks
// before each.
Tensor running_sums(const Tensor& values) {
  if (on_host(values)) {
    return values.cumsum(0);
  }
  constexpr int64_t kBlock = 64;
  const int64_t n = values.size(0), blocks = (n + kBlock - 1) / kBlock;
  const Tensor padded = at::zeros({blocks * kBlock}, values.options());
  padded.narrow(0, 0, n).copy_(values);
  const Tensor sums =
      at::mm(padded.view({blocks, kBlock}), at::ones({kBlock, kBlock}, values.options()).triu());
  const Tensor before =
      at::mv(at::ones({blocks, blocks}, values.options()).tril(-1), sums.select(1, kBlock - 1));
  return (sums + before.unsqueeze(1)).view({-1}).narrow(0, 0, n);
}

// Returns K-means++ seeds: each seed is a row drawn with a probability proportional to its squared
// distance from the nearest earlier seed.
Tensor plus_plus_seeds(const Tensor& seed, const Tensor& rows, int64_t clusters) {
  constexpr int64_t kResolution = int64_t(1) << 53;
  const int64_t n = std::min(rows.size(0), kSeedRows * clusters);
  const Tensor x = rows.index_select(0, uniform_draws(seed, 0, rows.size(0), n, true)),
               norm = x.square().sum(1);
  const Tensor numbers = uniform_draws(seed, 1, kResolution, clusters, false)
                             .to(at::kDouble)
                             .div_(double(kResolution));
  // Uniform rows: for the first seed, and for further seeds once every row is a seed.
  const Tensor any = (numbers * double(n)).to(at::kLong);
  const Tensor seeds = at::empty({clusters, rows.size(1)}, x.options());
  Tensor distance;
  for (int64_t k = 0; k < clusters; ++k) {
    long_work::check(LongWork::current());
    Tensor place = any[k];
    if (k > 0) {
      const Tensor sum = running_sums(distance.to(at::kDouble)), total = sum[n - 1];
      place = at::where(total.gt(0), sum.le(numbers[k] * total).sum(), place);
    }
    const Tensor row = x.index_select(0, place.clamp_max(n - 1).view({1})).squeeze(0);
    seeds.select(0, k).copy_(row);
    const Tensor from_row = (norm - 2 * (x * row).sum(1) + row.square().sum()).clamp_min(0);
    distance = k == 0 ? from_row : at::minimum(distance, from_row);
  }
  return seeds;
}

std::tuple<Tensor, Tensor> nearest(const Tensor& rows, const Tensor& centroids) {
  if (on_host(rows)) {
    return nearest_codeword_cpu(rows, centroids);
  }
  const Tensor score = at::mm(rows, centroids.t()) - 0.5 * centroids.square().sum(1);
  const auto [best, index] = score.max(1);
  return {index, (rows.square().sum(1) - 2 * best).clamp_min(0)};
}

// Returns the sum of each cluster's rows, by products with a 0/1 membership matrix, which add in a
// fixed order.
Tensor member_sums(const Tensor& rows, const Tensor& index, int64_t clusters) {
  const int64_t block = std::max<int64_t>(1, kMembers / clusters);
  const Tensor number = at::arange(clusters, index.options()),
               sums = at::zeros({clusters, rows.size(1)}, rows.options());
  for (int64_t begin = 0; begin < rows.size(0); begin += block) {
    const int64_t n = std::min(block, rows.size(0) - begin);
    const Tensor is_member =
        number.unsqueeze(1).eq(index.narrow(0, begin, n)).to(rows.scalar_type());
    multiply_in_parts(sums, is_member, rows.narrow(0, begin, n), {.add = true});
  }
  return sums;
}

// Returns the number of rows of each cluster, int64 [K].
Tensor cluster_sizes(const Tensor& index, int64_t clusters) {
  if (on_host(index)) {
    return index.bincount({}, clusters);
  }
  const Tensor sorted = std::get<0>(index.sort()),
               number = at::arange(clusters + 1, index.options());
  return at::searchsorted(sorted, number).diff();
}

// Replaces the centroids of empty clusters by the rows farthest from their centroids, a different
// row for each, as long as there are rows.
Tensor with_restarts(const Tensor& centroids, const Tensor& count, const Tensor& rows,
                     const Tensor& distance) {
  const Tensor is_empty = count.eq(0);
  if (on_host(rows)) {
    const Tensor empty = is_empty.nonzero().squeeze(1);
    const int64_t restarts = std::min(empty.size(0), rows.size(0));
    return restarts == 0
        ? centroids
        : centroids.index_copy(0, empty.narrow(0, 0, restarts),
                               rows.index_select(0, std::get<1>(distance.topk(restarts))));
  }
  const int64_t most = std::min(centroids.size(0), rows.size(0));
  const Tensor turn = is_empty.cumsum(0) - 1,
               farthest = rows.index_select(0, std::get<1>(distance.topk(most)));
  return at::where(is_empty.logical_and(turn.lt(most)).unsqueeze(1),
                   farthest.index_select(0, turn.clamp(0, most - 1)), centroids);
}

Tensor cluster_sums(const Tensor& rows, const Tensor& index, int64_t clusters) {
  if (!on_host(rows)) {
    return member_sums(rows, index, clusters);
  }
  const Tensor sums = at::zeros({clusters, rows.size(1)}, rows.options());
  const RowGroups groups = group_rows(index.const_data_ptr<int64_t>(), index.size(0));
  const std::vector<float> ones(index.size(0), 1.0f);
  const int64_t width = rows.size(1);
  at::parallel_for(0, groups.size(), 1, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const auto members = groups[g];
      const float* row = rows.const_data_ptr<float>();
      float* sum =
          sums.mutable_data_ptr<float>() + index.const_data_ptr<int64_t>()[members[0]] * width;
      row_kernels().of(row).sum_rows(sum, row, width, members.data(), ones.data(),
                                     int64_t(members.size()), width);
    }
  });
  return sums;
}

std::tuple<Tensor, Tensor> kmeans_composite(const Tensor& seed, const Tensor& rows,
                                            int64_t clusters, int64_t iterations,
                                            const OptionalTensor& init) {
  check_kmeans(seed, rows, clusters, iterations, init);
  LongWork work(kKmeans, iterations + 1);
  const Tensor x = rows.to(at::kFloat).contiguous();
  const Tensor inertia = at::zeros({iterations + 1}, x.options().dtype(at::kDouble));
  if (x.size(0) == 0) {
    return {is_defined(init) ? init->to(at::kFloat, false, true)
                             : at::zeros({clusters, x.size(1)}, x.options()),
            inertia};
  }
  if (x.is_cpu()) { // on a device this would synchronise; the centroids become NaN instead
    TORCH_CHECK_VALUE(x.isfinite().all().item<bool>(), kKmeans,
                      ": expected rows that are finite, got an infinity or NaN");
  }
  Tensor centroids = is_defined(init) ? init->to(at::kFloat, false, true).contiguous()
                                      : plus_plus_seeds(seed, x, clusters);
  for (int64_t i = 0;; ++i) {
    const auto [index, distance] = nearest(x, centroids);
    inertia[i].copy_(distance.to(at::kDouble).mean());
    work.add(1);
    work.check();
    if (i == iterations) {
      return {centroids, inertia};
    }
    const Tensor count = cluster_sizes(index, clusters), size = count.unsqueeze(1);
    centroids = with_restarts(
        at::where(size.gt(0), cluster_sums(x, index, clusters) / size.clamp_min(1), centroids),
        count, x, distance);
  }
}

} // namespace

std::tuple<Tensor, Tensor> kmeans(const Tensor& seed, const Tensor& rows, int64_t clusters,
                                  int64_t iterations, const OptionalTensor& init) {
  static const auto op = find_op<decltype(kmeans_composite)>("xsoftmax::kmeans");
  return op.call(seed, rows, clusters, iterations, init);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "kmeans(Tensor seed, Tensor rows, int clusters, int iterations, Tensor? init=None) -> "
      "(Tensor centroids, Tensor inertia)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("kmeans", kmeans_composite); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("kmeans", kmeans_meta); }

XSOFTMAX_AUTOCAST(m) { disable_autocast(m, {"kmeans"}); }

} // namespace xsoftmax
