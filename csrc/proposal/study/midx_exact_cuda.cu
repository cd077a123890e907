#include "op/optional.h"
#include "proposal/midx/midx_sample_cuda.cuh"
#include "proposal/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>

#include <limits>

// Exact MIDX (method: midx_exact.cpp) on CUDA, O(N D) per query: for study, not for speed.

namespace xsoftmax {
namespace {

using at::Tensor;
using namespace cuda;

constexpr int64_t kScores = int64_t(1) << 24; // scores computed at once: bounds the memory

// Computes prefix [Q, A], the running sums of e^(score - best score) within each cell, and cell_sum
// [Q, K^2], the sum of each cell; one block per query, one warp per cell.
__global__ void fill_kernel(double* prefix, double* cell_sum, double* best_of, const double* score,
                            MidxCellTables tables, int64_t queries, int64_t num_classes) {
  __shared__ double storage[kWarp];
  const int64_t warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  for (int64_t query = blockIdx.x; query < queries; query += gridDim.x) {
    const double* query_ids = score + query * num_classes;
    double best = -std::numeric_limits<double>::infinity();
    for (int64_t slot = threadIdx.x; slot < tables.classes; slot += blockDim.x) {
      const int64_t id = tables.order[slot];
      CUDA_KERNEL_ASSERT(id >= 0 && id < num_classes);
      best = query_ids[id] > best ? query_ids[id] : best;
    }
    best = block_max(best, -std::numeric_limits<double>::infinity(), storage);
    for (int64_t cell = warp; cell < tables.cells; cell += warps) {
      const int64_t first = tables.start[cell], last = tables.start[cell + 1];
      CUDA_KERNEL_ASSERT(first >= 0 && first <= last && last <= tables.classes);
      double sum = 0;
      for (int64_t begin = first; begin < last; begin += kWarp) {
        const int64_t slot = begin + lane();
        const double end =
            sum + warp_inclusive_sum(slot < last ? exp(query_ids[tables.order[slot]] - best) : 0.0);
        if (slot < last) {
          prefix[query * tables.classes + slot] = end;
        }
        sum = __shfl_sync(kAllLanes, end, kWarp - 1);
      }
      if (lane() == 0) {
        cell_sum[query * tables.cells + cell] = sum;
      }
    }
    if (threadIdx.x == 0) {
      best_of[query] = best;
    }
  }
}

// Draws with one block per query and 32 draws at a time per warp. All lanes find the second
// codewords together, one draw after the other.
__global__ void midx_exact_kernel(int64_t* ids, DrawSeed seed, const double* prefix,
                                  const double* cell_sum, const double* row_sum,
                                  MidxCellTables tables, int64_t first_query, int64_t queries,
                                  int64_t samples) {
  extern __shared__ double sums[];
  __shared__ double storage[kWarp];
  const int64_t k = tables.codewords;
  for (int64_t query = blockIdx.x; query < queries; query += gridDim.x) {
    const uint64_t number = seed.query(first_query + query), key = seed.key();
    __syncthreads(); // all threads have used the last query's sums
    const double total =
        running_sums(sums, k, storage, [&](int64_t i) { return row_sum[query * k + i]; });
    const double* cell_sums = cell_sum + query * tables.cells;
    for (int64_t begin = int64_t(threadIdx.x) / kWarp * kWarp; begin < samples;
         begin += blockDim.x) {
      const int64_t j = begin + lane();
      const PhiloxBlock one = philox(key, number, 2 * uint64_t(j)),
                        two = philox(key, number, 2 * uint64_t(j) + 1);
      int64_t k1 = first_above(sums, k, unit_double(one.low()) * total);
      // Rounding may put a point past the end.
      while (k1 > 0 && !(row_sum[query * k + k1] > 0)) {
        --k1;
      }
      const int draws = int(samples - begin < kWarp ? samples - begin : kWarp);
      const int64_t k2 =
          search_rows(draws, k, k1, unit_double(one.high()) * row_sum[query * k + k1], 0.0,
                      [&](int64_t row, int64_t i) { return cell_sums[row * k + i]; });
      if (j < samples) {
        const int64_t cell = k1 * k + k2, first = tables.start[cell], size = tables.size(cell);
        // Any class will do for a query that is not finite, because its loss is not finite either.
        const int64_t slot = size > 0 ? first +
                first_above(prefix + query * tables.classes + first, size,
                            unit_double(two.low()) * cell_sums[cell])
                                      : j % tables.classes;
        ids[query * samples + j] = tables.order[slot];
      }
    }
  }
}

// Calls task(first query, scores [n, N], log Z [n], prefix, cell_sum, row_sum) block by block.
template <typename Task>
void for_exact_blocks(const Tensor& queries, const MidxIndex& index, const MidxDeviceTables& tables,
                      const Task& task) {
  const MidxCellTables& cells = tables.view.tables;
  const int64_t num_classes = index.table->size(0),
                block = std::max<int64_t>(1, kScores / std::max(num_classes, cells.cells));
  const Tensor x = queries.to(at::kFloat);
  for (int64_t begin = 0; begin < x.size(0); begin += block) {
    const int64_t n = std::min(block, x.size(0) - begin);
    Tensor score = at::mm(x.narrow(0, begin, n), index.table->t()).to(at::kDouble);
    score = (is_defined(index.table_bias) ? score + index.table_bias->to(at::kDouble) : score)
                .contiguous();
    const Tensor prefix = at::empty({n, cells.classes}, score.options()),
                 cell_sum = at::empty({n, cells.cells}, score.options());
    const Tensor best = at::empty({n}, score.options());
    fill_kernel<<<grid_size(n, 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        prefix.mutable_data_ptr<double>(), cell_sum.mutable_data_ptr<double>(),
        best.mutable_data_ptr<double>(), score.const_data_ptr<double>(), cells, n, num_classes);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    const Tensor row_sum = cell_sum.view({n, cells.codewords, cells.codewords}).sum(2);
    task(begin, score, row_sum.sum(1).log_().add_(best), prefix, cell_sum, row_sum);
  }
}

// Returns log(M q) of ids [n, P]; -inf for the id -1.
Tensor exact_log_counts(const Tensor& score, const Tensor& log_z, const Tensor& ids,
                        const MidxIndex& index, double log_samples) {
  const Tensor at = ids.clamp_min(0),
               drawn = index.cell.index_select(0, at.reshape({-1}))
                           .view(ids.sizes())
                           .ge(0)
                           .logical_and(ids.ge(0));
  const Tensor count = log_samples + (score.gather(1, at) - log_z.unsqueeze(1));
  return at::where(drawn, count, -std::numeric_limits<double>::infinity()).to(at::kFloat);
}

} // namespace

namespace cuda {

PrivateDraws midx_exact_sample_cuda(const Tensor& seed, const Tensor& queries,
                                    const OptionalTensor& target, const MidxIndex& index,
                                    int64_t samples) {
  const auto draws = empty_private_draws(seed, queries, target, samples);
  const auto& [ids, log_count, target_log_count] = draws;
  const MidxDeviceTables tables(index);
  const int64_t k = tables.view.tables.codewords;
  const double log_samples = std::log(double(samples));
  for_exact_blocks(queries, index, tables,
                   [&](int64_t begin, const Tensor& score, const Tensor& log_z,
                       const Tensor& prefix, const Tensor& cell_sum, const Tensor& row_sum) {
                     const int64_t n = score.size(0);
                     const Tensor block_ids = ids.narrow(0, begin, n);
                     if (samples > 0) {
                       const int64_t warps =
                           std::clamp<int64_t>((samples + kWarp - 1) / kWarp, 1, kThreads / kWarp);
                       midx_exact_kernel<<<grid_size(n, 1), unsigned(warps * kWarp),
                                           k * sizeof(double), c10::cuda::getCurrentCUDAStream()>>>(
                           block_ids.mutable_data_ptr<int64_t>(), DrawSeed(seed),
                           prefix.const_data_ptr<double>(), cell_sum.const_data_ptr<double>(),
                           row_sum.const_data_ptr<double>(), tables.view.tables, begin, n, samples);
                       C10_CUDA_KERNEL_LAUNCH_CHECK();
                     }
                     log_count.narrow(0, begin, n)
                         .copy_(exact_log_counts(score, log_z, block_ids, index, log_samples));
                     if (is_defined(target)) {
                       const Tensor query_targets = target->narrow(0, begin, n),
                                    classes = query_targets.dim() == 1 ? query_targets.unsqueeze(1)
                                                                       : query_targets;
                       target_log_count.narrow(0, begin, n)
                           .copy_(exact_log_counts(score, log_z, classes, index, log_samples)
                                      .view(query_targets.sizes()));
                     }
                   });
  return draws;
}

Tensor midx_exact_log_count_cuda(const Tensor& queries, const Tensor& ids, const MidxIndex& index,
                                 int64_t samples) {
  const Tensor classes = ids_of_queries(queries, ids);
  const MidxDeviceTables tables(index);
  const Tensor log_count =
      at::empty({queries.size(0), ids.size(-1)}, ids.options().dtype(at::kFloat));
  for_exact_blocks(queries, index, tables,
                   [&](int64_t begin, const Tensor& score, const Tensor& log_z, const Tensor&,
                       const Tensor&, const Tensor&) {
                     const int64_t n = score.size(0);
                     log_count.narrow(0, begin, n)
                         .copy_(exact_log_counts(score, log_z, classes.narrow(0, begin, n), index,
                                                 std::log(double(samples))));
                   });
  return log_count;
}

} // namespace cuda
} // namespace xsoftmax
