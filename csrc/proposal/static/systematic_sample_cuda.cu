#include "proposal/sampling_cuda.cuh"
#include "proposal/sorted_set_cuda.h"
#include "proposal/static/systematic_draws.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <new>

namespace xsoftmax {
namespace {

using at::Tensor;

// The tables may come from an untrusted state dict.
struct TableAsserts {
  __device__ void id(int64_t id, int64_t classes) const {
    CUDA_KERNEL_ASSERT(id >= 0 && id < classes);
  }
  __device__ void samples(int64_t num_samples, int64_t support) const {
    CUDA_KERNEL_ASSERT(num_samples <= support);
  }
};

/// Returns the first position in [0, end) for which `predicate` is true, or end, in every thread of
/// the block. Each thread probes one position per round.
template <typename Predicate>
__device__ int64_t block_first_where(int64_t end, const Predicate& predicate) {
  int64_t low = 0, high = end; // the first position is in [low, high]
  while (low < high) {
    const int64_t step = (high - low + blockDim.x - 1) / blockDim.x,
                  probe = low + (int64_t(threadIdx.x) + 1) * step - 1;
    const int64_t before = __syncthreads_count(!(probe >= high || predicate(probe)));
    const int64_t first = low + before * step, last = first + step - 1;
    low = first < high ? first : high;
    high = last < high ? last : high;
  }
  return low;
}

/// Makes the plan for a number of samples, by one block. The caller must synchronise the block
/// before it reads `plan`.
__device__ void make_plan(SystematicPlan* plan, double* log_scale, const SystematicTables& tables,
                          int64_t num_samples) {
  const TableAsserts asserts;
  const SystematicSearches<TableAsserts> searches{tables, num_samples, asserts};
  const auto has_no_weight = [&](int64_t position) { return searches.has_no_weight(position); };
  // Usually even the lightest class has a weight, and one look-up saves the search.
  const bool all = tables.classes > 0 && !has_no_weight(tables.classes - 1);
  const int64_t support = all ? tables.classes : block_first_where(tables.classes, has_no_weight);
  asserts.samples(num_samples, support);
  const int64_t certain = block_first_where(most_certain(num_samples, support),
                                            [&](int64_t t) { return searches.is_enough(t); });
  for (int64_t b = threadIdx.x; b < tables.parts(); b += blockDim.x) {
    plan_bucket(*plan, tables, b, certain, support);
  }
  if (threadIdx.x == 0) {
    plan->samples = num_samples;
    plan->certain = certain;
    plan->support = support;
    plan->tail = systematic_tail(tables, certain);
    *log_scale = log(double(num_samples - certain) / plan->tail);
  }
}

/// Makes the plan on the device, for draws of private sets.
__global__ void systematic_plan_kernel(SystematicPlan* plan, double* log_scale,
                                       SystematicTables tables, int64_t num_samples) {
  make_plan(plan, log_scale, tables, num_samples);
}

/// The threads that draw one set: a block if there is a single set, else a warp.
template <bool kBlock>
struct Team {
  __device__ static int64_t first_set() {
    return kBlock ? int64_t(blockIdx.x) : cuda::global_thread() / cuda::kWarp;
  }
  __device__ static int64_t teams() {
    return kBlock ? int64_t(gridDim.x) : cuda::grid_threads() / cuda::kWarp;
  }
  __device__ static int64_t member() {
    return kBlock ? int64_t(threadIdx.x) : int64_t(cuda::lane());
  }
  __device__ static int64_t members() {
    return kBlock ? int64_t(blockDim.x) : int64_t(cuda::kWarp);
  }
  __device__ static void sync() {
    if constexpr (kBlock) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }
  __device__ static bool any(bool condition) {
    if constexpr (kBlock) {
      return __syncthreads_or(condition);
    } else {
      return __any_sync(cuda::kAllLanes, condition);
    }
  }
};

/// Draws one set per team. Points are looked up in parallel; only the rare corrections between them
/// (make_increasing) are done by one thread.
template <bool kBlock>
__device__ void draw_sets(int64_t* ids, DrawSeed seed, const SystematicTables& tables,
                          const SystematicPlan* plan, int64_t num_sets) {
  using Team = Team<kBlock>;
  __shared__ alignas(SystematicLayout) unsigned char
      storage[(kBlock ? 1 : cuda::kThreads / cuda::kWarp) * sizeof(SystematicLayout)];
  unsigned char* const mine =
      storage + (kBlock ? 0 : threadIdx.x / cuda::kWarp) * sizeof(SystematicLayout);
  SystematicLayout& layout = *reinterpret_cast<SystematicLayout*>(mine);
  if (Team::member() == 0) {
    new (mine) SystematicLayout(tables, *plan);
  }
  for (int64_t query = Team::first_set(); query < num_sets; query += Team::teams()) {
    Team::sync(); // the layout is constructed, and the previous set is finished
    for (int64_t b = Team::member(); b < tables.parts(); b += Team::members()) {
      layout.shuffle(seed.key(), seed.query(query), b);
    }
    Team::sync();
    if (Team::member() == 0) {
      layout.arrange(seed.key(), seed.query(query));
    }
    Team::sync();
    int64_t* set = ids + query * plan->samples;
    for (int64_t p = Team::member(); p < plan->certain; p += Team::members()) {
      set[p] = tables.order[tables.slot(p)];
      TableAsserts{}.id(set[p], tables.classes);
    }
    int64_t* picked = set + plan->certain;
    for (int64_t k = Team::member(); k < layout.points(); k += Team::members()) {
      layout.template rank<1>(picked, k, k + 1);
    }
    Team::sync();
    bool not_increasing = false;
    for (int64_t k = Team::member(); k < layout.points(); k += Team::members()) {
      not_increasing = not_increasing || !layout.is_increasing(picked, k);
    }
    if (Team::any(not_increasing)) {
      if (Team::member() == 0) {
        layout.make_increasing(picked);
      }
      Team::sync();
    }
    for (int64_t k = Team::member(); k < layout.points(); k += Team::members()) {
      layout.name(picked, k, k + 1);
      TableAsserts{}.id(picked[k], tables.tail.end);
    }
  }
}

/// One warp per set.
__global__ void private_sets_kernel(int64_t* ids, DrawSeed seed, SystematicTables tables,
                                    const SystematicPlan* plan, int64_t num_sets) {
  draw_sets<false>(ids, seed, tables, plan, num_sets);
}

/// One block makes the plan and then draws the shared set. A plan takes two short searches, less
/// than another launch. The sampler does not keep it, because its tables change in place: in
/// static_follow_, in static_grow_ and when a state is loaded. Replays of a CUDA graph change them
/// too, which no version counter on the host shows.
__global__ void shared_set_kernel(int64_t* ids, double* log_scale, DrawSeed seed,
                                  SystematicTables tables, int64_t num_samples) {
  __shared__ SystematicPlan plan;
  make_plan(&plan, log_scale, tables, num_samples);
  __syncthreads();
  draw_sets<true>(ids, seed, tables, &plan, 1);
}

std::tuple<Tensor, Tensor> systematic_sample_cuda(const Tensor& seed, const Tensor& probability,
                                                  const Tensor& order, const Tensor& cumulative,
                                                  std::optional<int64_t> num_queries,
                                                  int64_t num_samples, at::TensorList tail_tables) {
  check_systematic_sample(seed, probability, order, cumulative, num_queries, num_samples);
  const c10::cuda::CUDAGuard guard(seed.device());
  const Tensor weights = probability.contiguous(), slots = order.contiguous(),
               sums = cumulative.contiguous();
  const int64_t n = weights.numel(), num_sets = num_queries.value_or(1);
  const StaticTail tail = static_tail("systematic_sample", tail_tables, n);
  const SystematicTables tables{weights.const_data_ptr<double>(), slots.const_data_ptr<int64_t>(),
                                sums.const_data_ptr<double>(),    tail.first,
                                systematic_buckets(tail.first),   tail};
  const Tensor ids = empty_samples(seed, num_queries, num_samples),
               log_scale = at::empty({}, weights.options());
  double* const scale = log_scale.mutable_data_ptr<double>();
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (!num_queries.has_value()) {
    const auto threads = unsigned(std::clamp<int64_t>((num_samples + 31) / 32 * 32, 64, 512));
    shared_set_kernel<<<1, threads, 0, stream>>>(ids.mutable_data_ptr<int64_t>(), scale,
                                                 DrawSeed(seed), tables, num_samples);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return {sorted_set_cuda(ids), log_scale};
  }
  const Tensor storage =
      at::empty({int64_t(sizeof(SystematicPlan))}, seed.options().dtype(at::kByte));
  auto* plan = reinterpret_cast<SystematicPlan*>(storage.mutable_data_ptr<uint8_t>());
  systematic_plan_kernel<<<1, cuda::kThreads, 0, stream>>>(plan, scale, tables, num_samples);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  if (ids.numel() > 0) {
    private_sets_kernel<<<cuda::grid_size(num_sets, cuda::kThreads / cuda::kWarp), cuda::kThreads,
                          0, stream>>>(ids.mutable_data_ptr<int64_t>(), DrawSeed(seed), tables,
                                       plan, num_sets);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {ids, log_scale};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("systematic_sample", systematic_sample_cuda); }

} // namespace xsoftmax
