#include "op/cuda_launch.cuh"
#include "proposal/study/lsh_sample.h"
#include "proposal/study/lsh_tables.h"
#include "proposal/sampling.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using namespace cuda;

/// Asserts that the query's buckets are valid, because the tables come from a state dict.
__device__ inline void check_buckets(const LshTables& tables, const int64_t* hash) {
  for (int64_t t = 0; t < tables.tables; ++t) {
    const int64_t begin = tables.begin(t, hash[t]), end = tables.begin(t, hash[t] + 1);
    CUDA_KERNEL_ASSERT(0 <= begin && begin <= end && end <= tables.classes);
  }
}

// One thread per draw.
__global__ void lsh_draw_kernel(int64_t* ids, float* log_count, DrawSeed seed, LshTables tables,
                                const int64_t* hashes, int64_t total, int64_t samples,
                                double log_samples) {
  for (int64_t i = global_thread(); i < total; i += grid_threads()) {
    const int64_t query = i / samples, *hash = hashes + query * tables.tables;
    check_buckets(tables, hash);
    const PhiloxBlock block = philox(seed.key(), seed.query(query), uint64_t(i % samples));
    const int64_t turn = tables.table_of(block, tables.count_full(hash));
    int64_t table = -1;
    for (int64_t left = turn; left >= 0;) { // skip tables with an empty bucket
      ++table;
      left -= tables.size(table, hash[table]) > 0;
    }
    const int64_t id = tables.order[tables.place(hash, table, block)];
    CUDA_KERNEL_ASSERT(id >= 0 && id < tables.num_classes);
    ids[i] = id;
    log_count[i] = float(log_samples + tables.log_q(hash, tables.code + id * tables.tables));
  }
}

// One thread per pair. ids: one per pair, or shared by all queries (`same`); -1 means no class.
__global__ void lsh_count_kernel(float* log_count, const int64_t* ids, bool same, LshTables tables,
                                 const int64_t* hashes, int64_t total, int64_t width,
                                 double log_samples) {
  for (int64_t i = global_thread(); i < total; i += grid_threads()) {
    const int64_t id = ids[same ? i % width : i], *hash = hashes + i / width * tables.tables;
    CUDA_KERNEL_ASSERT(id >= -1 && id < tables.num_classes);
    check_buckets(tables, hash);
    log_count[i] = id < 0
        ? -std::numeric_limits<float>::infinity()
        : float(log_samples + tables.log_q(hash, tables.code + id * tables.tables));
  }
}

/// The index, and the codes of queries.
struct Hashed {
  Hashed(const char* op, const Tensor& queries, const LshIndex& index, const LshOptions& options)
      : code(index.code.contiguous()), order(index.order.contiguous()),
        start(index.start.contiguous()),
        hashes(lsh_codes(queries, std::nullopt, index.planes, options.tables).contiguous()),
        log_samples(std::log(double(options.num_samples))), tables{options.tables,
                                                                   order.size(0),
                                                                   code.size(0),
                                                                   start.size(1) - 1,
                                                                   code.const_data_ptr<int32_t>(),
                                                                   order.const_data_ptr<int64_t>(),
                                                                   start.const_data_ptr<int64_t>(),
                                                                   options.uniform} {
    TORCH_CHECK_VALUE(tables.classes > 0, op, ": expected order with a class to draw, got none");
  }

  /// Computes the counts of ids [Q, P], or [P], which apply to all queries.
  void count(const Tensor& out, const Tensor& ids, int64_t width) const {
    if (out.numel() > 0) {
      lsh_count_kernel<<<grid_size(out.numel(), kThreads), kThreads, 0,
                         c10::cuda::getCurrentCUDAStream()>>>(
          out.mutable_data_ptr<float>(), ids.const_data_ptr<int64_t>(), ids.numel() < out.numel(),
          tables, hashes.const_data_ptr<int64_t>(), out.numel(), width, log_samples);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }

  Tensor code, order, start, hashes;
  double log_samples;
  LshTables tables;
};

} // namespace

PrivateDraws LshFamily::sample_cuda(const Tensor& seed, const Tensor& queries,
                                    const OptionalTensor& target, const LshIndex& index,
                                    const LshOptions& options) {
  const c10::cuda::CUDAGuard guard(queries.device());
  const Hashed hashed("lsh_sample", queries, index, options);
  const auto draws = empty_private_draws(seed, queries, target, options.num_samples);
  const auto& [ids, log_count, target_log_count] = draws;
  if (ids.numel() > 0) {
    lsh_draw_kernel<<<grid_size(ids.numel(), kThreads), kThreads, 0,
                      c10::cuda::getCurrentCUDAStream()>>>(
        ids.mutable_data_ptr<int64_t>(), log_count.mutable_data_ptr<float>(), DrawSeed(seed),
        hashed.tables, hashed.hashes.const_data_ptr<int64_t>(), ids.numel(), options.num_samples,
        hashed.log_samples);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  if (is_defined(target)) {
    hashed.count(target_log_count, target->contiguous(), target->dim() == 1 ? 1 : target->size(1));
  }
  return draws;
}

Tensor LshFamily::log_count_cuda(const Tensor& queries, const Tensor& ids, const LshIndex& index,
                                 const LshOptions& options) {
  const c10::cuda::CUDAGuard guard(queries.device());
  const Tensor log_count =
      at::empty({queries.size(0), ids.size(-1)}, ids.options().dtype(at::kFloat));
  Hashed("lsh_log_count", queries, index, options).count(log_count, ids.contiguous(), ids.size(-1));
  return log_count;
}

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { AdaptiveFamily<LshFamily>::on_cuda(m); }

} // namespace xsoftmax
