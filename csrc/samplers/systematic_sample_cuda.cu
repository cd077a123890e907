#include "samplers/sampling_cuda.cuh"
#include "samplers/systematic_draws.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <new>

namespace xsoftmax {
namespace {

using at::Tensor;

// The tables come from a state dict, which may be anybody's.
struct TableAsserts {
  __device__ void id(int64_t id, int64_t classes) const { CUDA_KERNEL_ASSERT(id >= 0 && id < classes); }
  __device__ void samples(int64_t num_samples, int64_t support) const { CUDA_KERNEL_ASSERT(num_samples <= support); }
};

// One thread: what follows from the number of samples. It stays on the device, where the draws read it.
__global__ void plan_kernel(SystematicPlan* plan, double* log_scale, SystematicTables tables, int64_t num_samples) {
  *plan = make_systematic_plan(tables, num_samples, TableAsserts{});
  *log_scale = log(double(num_samples - plan->certain) / plan->tail);
}

// A block a set. Points are looked up side by side, and only the rare steps between them (settle) are one thread's.
__global__ void systematic_kernel(int64_t* ids, const int64_t* seed, SystematicTables tables, const SystematicPlan* plan,
                                  int64_t num_sets) {
  __shared__ alignas(SystematicLayout) unsigned char storage[sizeof(SystematicLayout)];
  const SystematicLayout& layout = *reinterpret_cast<const SystematicLayout*>(storage);
  for (int64_t query = blockIdx.x; query < num_sets; query += gridDim.x) {
    if (threadIdx.x == 0) {
      new (storage) SystematicLayout(tables, *plan, uint64_t(*seed), uint64_t(query));
    }
    __syncthreads();
    int64_t* set = ids + query * plan->samples;
    for (int64_t p = threadIdx.x; p < plan->certain; p += blockDim.x) {
      set[p] = tables.order[tables.slot(p)];
      TableAsserts{}.id(set[p], tables.classes);
    }
    int64_t* picked = set + plan->certain;
    for (int64_t k = threadIdx.x; k < layout.points(); k += blockDim.x) {
      layout.rank(picked, k, k + 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      layout.settle(picked);
    }
    __syncthreads();
    for (int64_t k = threadIdx.x; k < layout.points(); k += blockDim.x) {
      layout.name(picked, k, k + 1);
      TableAsserts{}.id(picked[k], tables.classes);
    }
    __syncthreads(); // the next set's layout takes this one's place
  }
}

std::tuple<Tensor, Tensor> systematic_sample_cuda(const Tensor& seed, const Tensor& probability, const Tensor& order,
                                                  const Tensor& cumulative, std::optional<int64_t> num_queries, int64_t num_samples) {
  check_systematic_sample(seed, probability, order, cumulative, num_queries, num_samples);
  const c10::cuda::CUDAGuard guard(seed.device());
  const Tensor weights = probability.contiguous(), slots = order.contiguous(), sums = cumulative.contiguous();
  const int64_t n = weights.numel(), num_sets = num_queries.value_or(1);
  const SystematicTables tables{weights.const_data_ptr<double>(), slots.const_data_ptr<int64_t>(), sums.const_data_ptr<double>(), n,
                                systematic_buckets(n)};
  const Tensor ids = empty_samples(seed, num_queries, num_samples), log_scale = at::empty({}, weights.options());
  const Tensor storage = at::empty({int64_t(sizeof(SystematicPlan))}, seed.options().dtype(at::kByte));
  auto* plan = reinterpret_cast<SystematicPlan*>(storage.mutable_data_ptr<uint8_t>());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  plan_kernel<<<1, 1, 0, stream>>>(plan, log_scale.mutable_data_ptr<double>(), tables, num_samples);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  if (ids.numel() > 0) {
    systematic_kernel<<<cuda::grid_size(num_sets, 1), cuda::kThreads, 0, stream>>>(
        ids.mutable_data_ptr<int64_t>(), seed.const_data_ptr<int64_t>(), tables, plan, num_sets);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {num_queries.has_value() ? ids : std::get<0>(ids.sort()), log_scale};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("systematic_sample", systematic_sample_cuda); }

} // namespace xsoftmax
