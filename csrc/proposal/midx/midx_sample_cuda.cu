#include "op/optional.h"
#include "proposal/midx/midx_sample_cuda.cuh"
#include "proposal/sampling.h"

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using namespace cuda;

// Potentials per codebook and block of queries: bounds the memory.
constexpr int64_t kPotentials = int64_t(1) << 22;

// -------------------------------------------------------------------------------------------------
// scores of queries with codewords

// Computes score and exp of both codebooks from their products, and the sum of the two best scores;
// one warp per query.
template <typename T>
__global__ void potentials_kernel(double* score, double* exp_of, double* max_sum, const T* product,
                                  int64_t queries, int64_t k) {
  for (int64_t query = global_thread() / kWarp; query < queries; query += grid_threads() / kWarp) {
    double sum = 0;
    for (int64_t at = query * 2 * k; at < (query + 1) * 2 * k; at += k) {
      T best = -std::numeric_limits<T>::infinity();
      bool none = false; // a NaN product makes all results NaN
      for (int64_t i = lane(); i < k; i += kWarp) {
        const T value = product[at + i];
        none = none || !(value == value);
        best = value > best ? value : best;
      }
      best = warp_max(best);
      const double top = __any_sync(kAllLanes, none) ? std::numeric_limits<double>::quiet_NaN()
                                                     : double(best),
                   lowest = top - kMidxRange;
      for (int64_t i = lane(); i < k; i += kWarp) {
        const double value = double(product[at + i]), clamped = value < lowest ? lowest : value;
        score[at + i] = clamped;
        exp_of[at + i] = exp(clamped - top);
      }
      sum += top;
    }
    if (lane() == 0) {
      max_sum[query] = sum;
    }
  }
}

// Computes P1, z and log Z from weight [Q, K] (the weight of the cells of each first codeword); one
// warp per query. log_z holds the sum of the best scores on entry.
__global__ void normalize_kernel(double* probability, double* z, double* log_z,
                                 const double* weight, const double* exp_of, int64_t queries,
                                 int64_t k) {
  for (int64_t query = global_thread() / kWarp; query < queries; query += grid_threads() / kWarp) {
    const double *row_weight = weight + query * k, *first_exp = exp_of + query * 2 * k;
    double sum = 0;
    for (int64_t i = lane(); i < k; i += kWarp) {
      sum += row_weight[i] * first_exp[i];
    }
    sum = warp_sum(sum);
    for (int64_t i = lane(); i < k; i += kWarp) {
      probability[query * k + i] = row_weight[i] * first_exp[i] / sum;
    }
    if (lane() == 0) {
      z[query] = sum;
      log_z[query] += log(sum);
    }
  }
}

/// MidxQueries, and weight [Q, K]: the sum of mass e^{second score} over the cells of each first
/// codeword.
struct DeviceQueries : MidxQueries { Tensor weight; };

DeviceQueries device_queries(const Tensor& input, const MidxCodewords& codewords,
                             const Tensor& mass) {
  const int64_t n = input.size(0), k = mass.size(0);
  const Tensor product = midx_products(input, codewords);
  const auto doubles = product.options().dtype(at::kDouble);
  DeviceQueries queries{
      {at::empty({n, 2, k}, doubles), at::empty({n, 2, k}, doubles), at::empty({n, k}, doubles),
       at::empty({n}, doubles), at::empty({n}, doubles)},
      {}};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const unsigned grid = grid_size(n, kThreads / kWarp);
  double *score = queries.score.mutable_data_ptr<double>(),
         *exp_of = queries.exp.mutable_data_ptr<double>();
  double* log_z = queries.log_z.mutable_data_ptr<double>();
  if (n > 0) {
    AT_DISPATCH_FLOATING_TYPES(product.scalar_type(), "midx_sample_cuda", [&] {
      potentials_kernel<scalar_t><<<grid, kThreads, 0, stream>>>(
          score, exp_of, log_z, product.const_data_ptr<scalar_t>(), n, k);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  queries.weight = at::mm(queries.exp.select(1, 1), mass.t());
  if (n > 0) {
    normalize_kernel<<<grid, kThreads, 0, stream>>>(
        queries.first_probability.mutable_data_ptr<double>(), queries.z.mutable_data_ptr<double>(),
        log_z, queries.weight.const_data_ptr<double>(), exp_of, n, k);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return queries;
}

// Calls task(first query, queries) block by block. The number of blocks depends on shapes only.
template <typename Task>
void for_blocks(const Tensor& input, const MidxIndex& index, const Tensor& mass, const Task& task) {
  const MidxCodewords codewords(input, index);
  const int64_t block = std::max<int64_t>(1, kPotentials / mass.size(0));
  for (int64_t begin = 0; begin < input.size(0); begin += block) {
    task(begin,
         device_queries(input.narrow(0, begin, std::min(block, input.size(0) - begin)), codewords,
                        mass));
  }
}

// -------------------------------------------------------------------------------------------------
// draws with replacement

/// A block of queries as kernels read it.
struct QueryRows {
  const double *score, *exp_of, *probability, *weight, *log_z;
  int64_t k;

  explicit QueryRows(const DeviceQueries& queries)
      : score(queries.score.const_data_ptr<double>()), exp_of(queries.exp.const_data_ptr<double>()),
        probability(queries.first_probability.const_data_ptr<double>()),
        weight(queries.weight.const_data_ptr<double>()),
        log_z(queries.log_z.const_data_ptr<double>()), k(queries.weight.size(1)) {}

  /// Returns log(q / weight) for the classes of a cell.
  __device__ double log_density(int64_t query, int64_t cell) const {
    const uint32_t c = uint32_t(cell), width = uint32_t(k); // 32-bit division: at most 2^20 cells
    const double* query_scores = score + query * 2 * k;
    return std::isfinite(log_z[query])
        ? query_scores[c / width] + query_scores[k + c % width] - log_z[query]
        : std::numeric_limits<double>::quiet_NaN();
  }
};

// Draws with replacement: one block per query, 32 draws at a time per warp. Each lane finds the
// first codeword of one draw in the running sums of the block; all lanes together find the second
// codewords, draw after draw; then each lane picks a class.
__global__ void midx_private_kernel(int64_t* ids, float* log_count, DrawSeed seed,
                                    MidxDeviceIndex index, QueryRows rows, int64_t first_query,
                                    int64_t queries, int64_t samples, double log_samples) {
  extern __shared__ double shared[];
  __shared__ double storage[kWarp];
  const int64_t k = rows.k;
  double *sums = shared, *second_exp = shared + k;
  const double* mass = index.tables.mass;
  for (int64_t query = blockIdx.x; query < queries; query += gridDim.x) {
    const uint64_t number = seed.query(first_query + query), key = seed.key();
    const double offset = log_samples - rows.log_z[query], *first = rows.score + query * 2 * k,
                 *second = first + k;
    const bool is_number = std::isfinite(rows.log_z[query]);
    __syncthreads(); // all threads have used the last query's sums
    for (int64_t i = threadIdx.x; i < k; i += blockDim.x) {
      second_exp[i] = rows.exp_of[(query * 2 + 1) * k + i];
    }
    const double total =
        running_sums(sums, k, storage, [&](int64_t i) { return rows.probability[query * k + i]; });
    for (int64_t begin = int64_t(threadIdx.x) / kWarp * kWarp; begin < samples;
         begin += blockDim.x) {
      const int64_t j = begin + lane();
      int64_t cell = 0;
      const MidxDrawBits bits(key, number, uint64_t(j));
      if (is_number) {
        const int64_t k1 = first_above(sums, k, bits.first() * total);
        const double target_sum = bits.second() * rows.weight[query * k + k1];
        const int draws = int(samples - begin < kWarp ? samples - begin : kWarp);
        const int64_t k2 = search_rows(draws, k, k1, target_sum, 0.0, [&](int64_t row, int64_t i) {
          return mass[row * k + i] * second_exp[i];
        });
        cell = k1 * k + k2;
      }
      if (j >= samples) {
        continue;
      }
      if (is_number) {
        index.check_cell(cell);
        const int64_t id = index.class_at(index.tables.draw(cell, bits.in_cell()));
        const float cell_log_q = float(offset + first[cell / k] + second[cell % k]);
        ids[query * samples + j] = id;
        log_count[query * samples + j] =
            index.log_weight == nullptr ? cell_log_q : cell_log_q + index.log_weight[id];
      } else {
        ids[query * samples + j] =
            index.class_at(arbitrary_slot(key, number, uint64_t(j), index.tables.classes));
        log_count[query * samples + j] = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
}

// The same from one distribution for the batch: share [K, K] and its row sums. Every block
// recomputes the running sums.
__global__ void midx_shared_kernel(int64_t* ids, DrawSeed seed, MidxDeviceIndex index,
                                   const double* share, const double* row_share, int64_t samples) {
  extern __shared__ double sums[];
  __shared__ double storage[kWarp];
  const int64_t k = index.tables.codewords;
  const double total = running_sums(sums, k, storage, [&](int64_t i) { return row_share[i]; });
  const bool is_number = std::isfinite(total);
  for (int64_t begin = global_thread() / kWarp * kWarp; begin < samples; begin += grid_threads()) {
    const int64_t j = begin + lane();
    const PhiloxBlock block = philox(seed.key(), 0, uint64_t(j));
    int64_t cell = 0;
    if (is_number) {
      const double target_sum = unit_double(block.low()) * total;
      int64_t k1 = first_above(sums, k, target_sum);
      while (k1 > 0 && !(row_share[k1] > 0)) { // rounding may put the last point past the end
        --k1;
      }
      const int draws = int(samples - begin < kWarp ? samples - begin : kWarp);
      cell = k1 * k +
          search_rows(draws, k, k1, target_sum, k1 > 0 ? sums[k1 - 1] : 0.0,
                      [&](int64_t row, int64_t i) { return share[row * k + i]; });
    }
    if (j < samples) {
      if (is_number) {
        index.check_cell(cell);
      }
      ids[j] = index.class_at(is_number ? index.tables.draw(cell, block.high() >> 20)
                                        : j % index.tables.classes);
    }
  }
}

// -------------------------------------------------------------------------------------------------
// counts

/// log(q / weight) for the classes of a cell, in the distribution of each query or of the batch.
struct PrivateDistribution {
  QueryRows rows;
  __device__ double operator()(int64_t query, int64_t cell) const {
    return rows.log_density(query, cell);
  }
};
struct SharedDistribution {
  const double *share, *mass;
  __device__ double operator()(int64_t, int64_t cell) const {
    return log(share[cell] / mass[cell]);
  }
};

// Computes the count of one pair per thread. ids: one per pair, or shared by all queries (`same`);
// -1 means no class. scale and certain_scale: the plan of a set without replacement, else nullptr.
// The tolerance of 1e-6 for certain classes allows for weights read from a float32 table.
template <typename Distribution>
__global__ void midx_count_kernel(float* log_count, const int64_t* ids, bool same, int64_t pairs,
                                  int64_t width, MidxDeviceIndex index, Distribution distribution,
                                  const double* scale, const double* certain_scale,
                                  double log_samples) {
  for (int64_t i = global_thread(); i < pairs; i += grid_threads()) {
    const int64_t query = i / width, id = ids[same ? i % width : i], cell = index.cell_of(id);
    if (cell < 0) {
      log_count[i] = -std::numeric_limits<float>::infinity();
      continue;
    }
    const double log_q = distribution(query, cell) + index.log_weight_of(id);
    if (scale == nullptr) {
      log_count[i] = float(log_samples + log_q);
    } else {
      const double count = log(scale[query]) + log_q;
      log_count[i] = float(log(certain_scale[query]) + log_q >= -1e-6 || count >= 0 ? 0.0 : count);
    }
  }
}

// Computes the counts of classes ids [queries, width] into `out` of the same shape; both are
// contiguous. ids [width] apply to all queries.
template <typename Distribution>
void count(const Tensor& out, const Tensor& ids, const MidxDeviceTables& tables,
           const Distribution& distribution, const Tensor& scales, double log_samples) {
  const int64_t pairs = out.numel();
  if (pairs == 0) {
    return;
  }
  midx_count_kernel<Distribution>
      <<<grid_size(pairs, kThreads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          out.mutable_data_ptr<float>(), ids.const_data_ptr<int64_t>(), ids.numel() < pairs, pairs,
          out.size(-1), tables.view, distribution,
          scales.defined() ? scales.const_data_ptr<double>() : nullptr,
          scales.defined() ? scales[1].const_data_ptr<double>() : nullptr, log_samples);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// -------------------------------------------------------------------------------------------------
// samples

PrivateDraws sample_private(const Tensor& seed, const Tensor& queries, const OptionalTensor& target,
                            const MidxIndex& index, const MidxOptions& options) {
  const auto draws = empty_private_draws(seed, queries, target, options.num_samples);
  const auto& [ids, log_count, target_log_count] = draws;
  const MidxDeviceTables tables(index);
  const int64_t samples = options.num_samples, k = tables.mass.size(0);
  const double log_samples = std::log(double(samples));
  const Tensor targets = is_defined(target) ? target->contiguous() : Tensor();
  for_blocks(queries, index, tables.mass, [&](int64_t begin, const DeviceQueries& block) {
    const int64_t n = block.z.size(0);
    const PrivateDistribution distribution{QueryRows(block)};
    const Tensor block_ids = ids.narrow(0, begin, n), counts = log_count.narrow(0, begin, n);
    Tensor scales;
    if (options.is_distinct()) {
      scales = midx_private_sets_cuda(block_ids, seed, begin, tables, block, samples);
      count(counts, block_ids, tables, distribution, scales, log_samples);
    } else if (samples > 0) {
      const int64_t warps = std::clamp<int64_t>((samples + kWarp - 1) / kWarp, 1, kThreads / kWarp);
      midx_private_kernel<<<grid_size(n, 1), unsigned(warps * kWarp), 2 * k * sizeof(double),
                            c10::cuda::getCurrentCUDAStream()>>>(
          block_ids.mutable_data_ptr<int64_t>(), counts.mutable_data_ptr<float>(), DrawSeed(seed),
          tables.view, distribution.rows, begin, n, samples, log_samples);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    if (targets.defined()) {
      const int64_t width = targets.dim() == 1 ? 1 : targets.size(1);
      count(target_log_count.narrow(0, begin, n).view({n, width}), targets.narrow(0, begin, n),
            tables, distribution, scales, log_samples);
    }
  });
  return draws;
}

// Returns bool [Q]: the queries that contribute to a mixture, which are neither ignored nor all
// zeros. If there are none, returns the queries that are not ignored.
Tensor mixed(const Tensor& queries, const OptionalTensor& target) {
  const Tensor nonzero = queries.ne(0).any(1);
  if (!is_defined(target) || (target->dim() == 2 && target->size(1) == 0)) {
    return at::where(nonzero.any(), nonzero, at::ones_like(nonzero));
  }
  const Tensor counts = (target->dim() == 2 ? target->select(1, 0) : *target).ge(0),
               both = counts.logical_and(nonzero);
  return at::where(both.any(), both, counts);
}

// Returns the share of each cell [K, K] in the mixture of those queries; without queries, cells are
// weighted by mass.
Tensor mixture_shares(const Tensor& queries, const Tensor& is_mixed, const MidxIndex& index,
                      const Tensor& mass, bool rms) {
  Tensor sums = at::zeros_like(mass);
  for_blocks(queries, index, mass, [&](int64_t begin, DeviceQueries block) {
    const Tensor excluded = is_mixed.narrow(0, begin, block.z.size(0)).logical_not();
    block.exp.masked_fill_(excluded.view({-1, 1, 1}), 0.0);
    block.z.masked_fill_(excluded, 1.0);
    sums = sums + midx_density_sums(block, rms);
  });
  return midx_mixture_shares(at::where(is_mixed.any(), sums, at::ones_like(sums)), mass, rms);
}

PrivateDraws sample_shared(const Tensor& seed, const Tensor& queries, const OptionalTensor& target,
                           const MidxIndex& index, const MidxOptions& options) {
  const MidxDeviceTables tables(index);
  const int64_t samples = options.num_samples, k = tables.mass.size(0);
  const double log_samples = std::log(double(samples));
  const Tensor shares =
      mixture_shares(queries, mixed(queries, target), index, tables.mass, options.mixture == "rms")
          .contiguous();
  Tensor ids = at::empty({samples}, seed.options()), scales;
  const Tensor log_count = at::empty({samples}, seed.options().dtype(at::kFloat)),
               target_log_count = empty_target_count(seed, target);
  if (options.is_distinct()) {
    scales = midx_shared_set_cuda(ids, seed, tables, shares, samples);
    ids = std::get<0>(ids.sort());
  } else if (samples > 0) {
    const Tensor row_share = shares.sum(1);
    midx_shared_kernel<<<grid_size(samples, kThreads), kThreads, k * sizeof(double),
                         c10::cuda::getCurrentCUDAStream()>>>(
        ids.mutable_data_ptr<int64_t>(), DrawSeed(seed), tables.view,
        shares.const_data_ptr<double>(), row_share.const_data_ptr<double>(), samples);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  const SharedDistribution distribution{shares.const_data_ptr<double>(), tables.view.tables.mass};
  count(log_count.view({1, samples}), ids, tables, distribution, scales, log_samples);
  if (is_defined(target)) {
    const Tensor targets = target->contiguous();
    count(target_log_count.view({1, targets.numel()}), targets, tables, distribution, scales,
          log_samples);
  }
  return {ids, log_count, target_log_count};
}

} // namespace

PrivateDraws MidxFamily::sample_cuda(const Tensor& seed, const Tensor& queries,
                                     const OptionalTensor& target, const MidxIndex& index,
                                     const MidxOptions& options) {
  const c10::cuda::CUDAGuard guard(queries.device());
  if (options.form == "exact") {
    return midx_exact_sample_cuda(seed, queries, target, index, options.num_samples);
  }
  return options.shared ? sample_shared(seed, queries, target, index, options)
                        : sample_private(seed, queries, target, index, options);
}

Tensor MidxFamily::log_count_cuda(const Tensor& queries, const Tensor& ids, const MidxIndex& index,
                                  const MidxOptions& options) {
  const c10::cuda::CUDAGuard guard(queries.device());
  if (options.form == "exact") {
    return midx_exact_log_count_cuda(queries, ids, index, options.num_samples);
  }
  const MidxDeviceTables tables(index);
  const Tensor flat = ids.contiguous();
  const double log_samples = std::log(double(options.num_samples));
  if (options.shared) {
    const Tensor shares = mixture_shares(queries, mixed(queries, std::nullopt), index, tables.mass,
                                         options.mixture == "rms")
                              .contiguous();
    const Tensor log_count = at::empty(ids.sizes(), flat.options().dtype(at::kFloat));
    const Tensor scales = options.is_distinct()
        ? midx_shared_set_cuda({}, {}, tables, shares, options.num_samples)
        : Tensor();
    count(log_count.view({1, flat.numel()}), flat, tables,
          SharedDistribution{shares.const_data_ptr<double>(), tables.view.tables.mass}, scales,
          log_samples);
    return log_count;
  }
  const int64_t width = ids.size(-1);
  const Tensor log_count = at::empty({queries.size(0), width}, flat.options().dtype(at::kFloat));
  for_blocks(queries, index, tables.mass, [&](int64_t begin, const DeviceQueries& block) {
    const int64_t n = block.z.size(0);
    count(log_count.narrow(0, begin, n), flat.dim() == 1 ? flat : flat.narrow(0, begin, n), tables,
          PrivateDistribution{QueryRows(block)}, {}, log_samples);
  });
  return log_count;
}

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { AdaptiveFamily<MidxFamily>::on_cuda(m); }

} // namespace xsoftmax
