#include "op/cuda_launch.cuh"
#include "cpu/impl.h"
#include "matcher/shortlist.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

// Computes the shortlist of one query per block, in `capacity` places. Each block has three rows of
// `storage` [blocks, 3, width + count]: the nodes whose children it takes; the same nodes, with -1
// for duplicates; and the place where the children of each node begin.
__global__ void shortlist_kernel(int64_t* nodes, float* right, int64_t* storage,
                                 const int64_t* parents, const int64_t* targets,
                                 const int64_t* first_child, const int64_t* parent,
                                 int64_t num_nodes, int64_t queries, int64_t width, int64_t count,
                                 int64_t capacity) {
  __shared__ int64_t sums[kWarp];
  const int64_t size = width + count;
  int64_t *candidates = storage + blockIdx.x * 3 * size, *unique_parents = candidates + size,
          *list_begin = unique_parents + size;
  for (int64_t query = blockIdx.x; query < queries; query += gridDim.x) {
    const int64_t* query_targets = targets + query * count;
    int64_t* list = nodes + query * capacity;
    float* marks = right + query * capacity;
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
      const int64_t id = i < width ? parents[query * width + i] : query_targets[i - width];
      CUDA_KERNEL_ASSERT(id == -1 || (id >= (i < width ? 0 : 1) && id < num_nodes));
      candidates[i] = i < width || id < 0 ? id : parent[id];
      CUDA_KERNEL_ASSERT(candidates[i] >= -1 && candidates[i] < num_nodes);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
      bool first = true;
      for (int64_t j = 0; j < i; ++j) {
        first = first && candidates[j] != candidates[i];
      }
      unique_parents[i] = first ? candidates[i] : -1;
    }
    __syncthreads();
    int64_t mine = 0;
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
      if (unique_parents[i] < 0) {
        continue;
      }
      int64_t begin = 0;
      for (int64_t j = 0; j < size; ++j) { // nodes in increasing order
        begin += unique_parents[j] >= 0 && unique_parents[j] < unique_parents[i]
            ? first_child[unique_parents[j] + 1] - first_child[unique_parents[j]]
            : 0;
      }
      const int64_t child = first_child[unique_parents[i]],
                    end = first_child[unique_parents[i] + 1];
      CUDA_KERNEL_ASSERT(child > unique_parents[i] && child <= end && end <= num_nodes &&
                         begin >= 0 && begin + (end - child) <= capacity);
      list_begin[i] = begin;
      mine += end - child;
    }
    const int64_t list_size = block_sum(mine, sums);
    __syncthreads();
    for (int64_t i = threadIdx.x / kWarp; i < size; i += blockDim.x / kWarp) { // one warp per node
      const int64_t begin = unique_parents[i] < 0 ? 0 : first_child[unique_parents[i]],
                    end = unique_parents[i] < 0 ? 0 : first_child[unique_parents[i] + 1];
      for (int64_t child = begin + lane(); child < end; child += kWarp) {
        bool is_target = false;
        for (int64_t t = 0; t < count; ++t) {
          is_target = is_target || query_targets[t] == child;
        }
        list[list_begin[i] + (child - begin)] = child;
        marks[list_begin[i] + (child - begin)] = is_target ? 1.0f : 0.0f;
      }
    }
    __syncthreads();
    const int64_t last = list_size > 0 ? list[list_size - 1] : 1;
    for (int64_t i = list_size + threadIdx.x; i < capacity; i += blockDim.x) {
      list[i] = last;
      marks[i] = -1.0f;
    }
    __syncthreads(); // storage is reused for the next query
  }
}

Shortlist shortlist_cuda(const Tensor& parents, const Tensor& targets, const Tensor& first_child,
                         const Tensor& parent, std::optional<int64_t> most) {
  check_shortlist(parents, targets, first_child, parent, most);
  const c10::cuda::CUDAGuard guard(parents.device());
  if (use_reference() || !most.has_value()) {
    return shortlist_reference(parents, targets, first_child, parent, most);
  }
  const int64_t queries = parents.size(0), width = parents.size(1), count = targets.size(1),
                capacity = (width + count) * *most;
  const Tensor nodes = at::empty({queries * capacity}, parents.options()),
               right = at::empty({queries * capacity}, parents.options().dtype(at::kFloat));
  const Tensor offsets = at::arange(queries + 1, parents.options()).mul_(capacity);
  if (nodes.numel() == 0) {
    return {nodes, offsets, right};
  }
  const Tensor beam_parents = parents.contiguous(), wanted = targets.contiguous(),
               children = first_child.contiguous(), up = parent.contiguous();
  constexpr int64_t kMaxBlocks = 16384;
  constexpr unsigned kShortlistThreads = 128;
  const unsigned blocks = unsigned(std::min<int64_t>(queries, kMaxBlocks));
  const Tensor storage = at::empty({int64_t(blocks), 3, width + count}, parents.options());
  shortlist_kernel<<<blocks, kShortlistThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      nodes.mutable_data_ptr<int64_t>(), right.mutable_data_ptr<float>(),
      storage.mutable_data_ptr<int64_t>(), beam_parents.const_data_ptr<int64_t>(),
      wanted.const_data_ptr<int64_t>(), children.const_data_ptr<int64_t>(),
      up.const_data_ptr<int64_t>(), parent.size(0), queries, width, count, capacity);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {nodes, offsets, right};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("shortlist", shortlist_cuda); }

} // namespace xsoftmax
