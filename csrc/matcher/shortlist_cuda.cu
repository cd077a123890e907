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

// Computes the shortlist of one query per block, in `room` places. Each block has three rows of
// `storage` [blocks, 3, width + count]: the nodes whose children it takes; the same nodes, with -1
// for duplicates; and the place where the children of each node begin.
__global__ void shortlist_kernel(int64_t* nodes, float* right, int64_t* storage,
                                 const int64_t* parents, const int64_t* targets,
                                 const int64_t* first_child, const int64_t* parent,
                                 int64_t num_nodes, int64_t queries, int64_t width, int64_t count,
                                 int64_t room) {
  __shared__ int64_t sums[kWarp];
  const int64_t size = width + count;
  int64_t *above = storage + blockIdx.x * 3 * size, *taken = above + size, *place = taken + size;
  for (int64_t query = blockIdx.x; query < queries; query += gridDim.x) {
    const int64_t* wanted = targets + query * count;
    int64_t* list = nodes + query * room;
    float* marks = right + query * room;
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
      const int64_t id = i < width ? parents[query * width + i] : wanted[i - width];
      CUDA_KERNEL_ASSERT(id == -1 || (id >= (i < width ? 0 : 1) && id < num_nodes));
      above[i] = i < width || id < 0 ? id : parent[id];
      CUDA_KERNEL_ASSERT(above[i] >= -1 && above[i] < num_nodes);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
      bool first = true;
      for (int64_t j = 0; j < i; ++j) {
        first = first && above[j] != above[i];
      }
      taken[i] = first ? above[i] : -1;
    }
    __syncthreads();
    int64_t mine = 0;
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
      if (taken[i] < 0) {
        continue;
      }
      int64_t begin = 0;
      for (int64_t j = 0; j < size; ++j) { // nodes in increasing order
        begin += taken[j] >= 0 && taken[j] < taken[i]
            ? first_child[taken[j] + 1] - first_child[taken[j]]
            : 0;
      }
      const int64_t child = first_child[taken[i]], end = first_child[taken[i] + 1];
      CUDA_KERNEL_ASSERT(child > taken[i] && child <= end && end <= num_nodes && begin >= 0 &&
                         begin + (end - child) <= room);
      place[i] = begin;
      mine += end - child;
    }
    const int64_t used = block_sum(mine, sums);
    __syncthreads();
    for (int64_t i = threadIdx.x / kWarp; i < size; i += blockDim.x / kWarp) { // one warp per node
      const int64_t begin = taken[i] < 0 ? 0 : first_child[taken[i]],
                    end = taken[i] < 0 ? 0 : first_child[taken[i] + 1];
      for (int64_t child = begin + lane(); child < end; child += kWarp) {
        bool is_right = false;
        for (int64_t t = 0; t < count; ++t) {
          is_right = is_right || wanted[t] == child;
        }
        list[place[i] + (child - begin)] = child;
        marks[place[i] + (child - begin)] = is_right ? 1.0f : 0.0f;
      }
    }
    __syncthreads();
    const int64_t last = used > 0 ? list[used - 1] : 1;
    for (int64_t i = used + threadIdx.x; i < room; i += blockDim.x) {
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
                room = (width + count) * *most;
  const Tensor nodes = at::empty({queries * room}, parents.options()),
               right = at::empty({queries * room}, parents.options().dtype(at::kFloat));
  const Tensor offsets = at::arange(queries + 1, parents.options()).mul_(room);
  if (nodes.numel() == 0) {
    return {nodes, offsets, right};
  }
  const Tensor reached = parents.contiguous(), wanted = targets.contiguous(),
               children = first_child.contiguous(), up = parent.contiguous();
  constexpr int64_t kMostBlocks = 16384;
  constexpr unsigned kShortlistThreads = 128;
  const unsigned blocks = unsigned(std::min<int64_t>(queries, kMostBlocks));
  const Tensor storage = at::empty({int64_t(blocks), 3, width + count}, parents.options());
  shortlist_kernel<<<blocks, kShortlistThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      nodes.mutable_data_ptr<int64_t>(), right.mutable_data_ptr<float>(),
      storage.mutable_data_ptr<int64_t>(), reached.const_data_ptr<int64_t>(),
      wanted.const_data_ptr<int64_t>(), children.const_data_ptr<int64_t>(),
      up.const_data_ptr<int64_t>(), parent.size(0), queries, width, count, room);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {nodes, offsets, right};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("shortlist", shortlist_cuda); }

} // namespace xsoftmax
