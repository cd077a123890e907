#include "proposal/sorted_set_cuda.h"

#include "op/cuda_launch.cuh"

#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>

namespace xsoftmax {
namespace {

using namespace cuda;

constexpr int64_t kMaxRanked = 4096; // 32 KB of shared memory

// Each block loads all ids and ranks some of them: each thread counts the ids that sort before its
// own. Equal ids occur only if a table is corrupt; they keep their order.
__global__ void rank_ids_kernel(int64_t* out, const int64_t* ids, int64_t count) {
  extern __shared__ __align__(16) unsigned char shared[];
  int64_t* const all = reinterpret_cast<int64_t*>(shared);
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    all[i] = ids[i];
  }
  __syncthreads();
  for (int64_t mine = global_thread(); mine < count; mine += grid_threads()) {
    const int64_t id = all[mine];
    int64_t rank = 0;
    for (int64_t i = 0; i < count; ++i) {
      rank += all[i] < id || (all[i] == id && i < mine) ? 1 : 0;
    }
    out[rank] = id;
  }
}

} // namespace

at::Tensor sorted_set_cuda(const at::Tensor& ids) {
  const int64_t count = ids.numel();
  if (count > kMaxRanked) {
    return std::get<0>(ids.sort());
  }
  const at::Tensor sorted = at::empty(ids.sizes(), ids.options());
  if (count > 0) {
    rank_ids_kernel<<<grid_size(count, kThreads), kThreads, size_t(count) * sizeof(int64_t),
                      c10::cuda::getCurrentCUDAStream()>>>(sorted.mutable_data_ptr<int64_t>(),
                                                           ids.const_data_ptr<int64_t>(), count);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return sorted;
}

} // namespace xsoftmax
