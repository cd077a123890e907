#include "op/cuda_launch.cuh"
#include "cpu/impl.h"
#include "tree/edge_tables.h"
#include "tree/routed_draws.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

// Two adjacent layers: nodes begin .. end - 1, and their children end .. last - 1.
struct LayerPair { int64_t begin, end, last; };

// Balances the nodes of a layer, one thread per node and column: subtracts the mean of the
// children's rows from each of them and adds it to the node's row.
template <typename T>
__global__ void balance_kernel(T* table, int64_t row_stride, int64_t column_stride, int64_t width,
                               const int64_t* first_child, LayerPair layer) {
  using opmath = at::opmath_type<T>;
  const int64_t total = (layer.end - layer.begin) * width;
  for (int64_t i = global_thread(); i < total; i += grid_threads()) {
    const int64_t node = layer.begin + i / width, begin = first_child[node],
                  end = first_child[node + 1];
    CUDA_KERNEL_ASSERT(layer.end <= begin && begin <= end && end <= layer.last);
    CUDA_KERNEL_ASSERT((node > layer.begin || begin == layer.end) &&
                       (node + 1 < layer.end || end == layer.last));
    if (begin == end) {
      continue;
    }
    T* column =
        table + i % width * column_stride; // row v - 1, the edge above node v, is the row of node v
    opmath sum = 0;
#pragma unroll 4
    for (int64_t child = begin; child < end; ++child) {
      sum += opmath(column[(child - 1) * row_stride]);
    }
    const opmath mean = sum / opmath(end - begin);
    T& child_value = column[(node - 1) * row_stride];
    child_value = T(opmath(child_value) + mean);
#pragma unroll 4
    for (int64_t child = begin; child < end; ++child) {
      T& row = column[(child - 1) * row_stride];
      row = T(opmath(row) - mean);
    }
  }
}

void tree_balance_cuda(const Tensor& table, const Tensor& first_child,
                       at::IntArrayRef layer_sizes) {
  check_tree_balance(table, first_child, layer_sizes);
  const c10::cuda::CUDAGuard guard(table.device());
  if (use_reference()) {
    tree_balance_reference(table, first_child, layer_sizes);
    return;
  }
  const Tensor offsets = first_child.contiguous();
  const bool matrix = table.dim() == 2;
  const int64_t width = matrix ? table.size(1) : 1;
  if (width == 0) {
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, table.scalar_type(), "tree_balance_cuda", [&] {
        int64_t end = table.size(0) + 1;
        for (int64_t layer = int64_t(layer_sizes.size()) - 1; layer > 0; --layer) {
          const int64_t last = end;
          end -= layer_sizes[layer];
          const LayerPair nodes{end - layer_sizes[layer - 1], end, last};
          balance_kernel<scalar_t><<<grid_size(layer_sizes[layer - 1] * width, kThreads), kThreads,
                                     0, c10::cuda::getCurrentCUDAStream()>>>(
              table.mutable_data_ptr<scalar_t>(), table.stride(0), matrix ? table.stride(1) : 1,
              width, offsets.const_data_ptr<int64_t>(), nodes);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        }
      });
}

// One warp per query.
__global__ void routed_kernel(int64_t* found, const int64_t* seed, const int64_t* subset,
                              const int64_t* first_child, const int64_t* node_class, int64_t nodes,
                              int64_t queries, int64_t count) {
  for (int64_t query = global_thread() / kWarp; query < queries; query += grid_threads() / kWarp) {
    const int64_t begin = first_child[subset[query] + 1], end = first_child[subset[query] + 2];
    CUDA_KERNEL_ASSERT(begin >= 0 && begin <= end && end <= nodes);
    const RoutedSample draws(uint64_t(*seed), uint64_t(query), begin, end, count);
    for (int64_t k = lane(); k < count; k += kWarp) {
      found[query * count + k] = k < draws.size() ? node_class[draws[k]] : -1;
    }
  }
}

Tensor routed_candidates_cuda(const Tensor& seed, const Tensor& scores, const Tensor& first_child,
                              const Tensor& node_class, int64_t count) {
  check_routed(seed, scores, first_child, node_class, count);
  const c10::cuda::CUDAGuard guard(scores.device());
  const int64_t queries = scores.size(0);
  const Tensor found = at::empty({queries, count}, first_child.options());
  if (found.numel() == 0) {
    return found;
  }
  const Tensor best = scores.argmax(1), offsets = first_child.contiguous(),
               classes = node_class.contiguous();
  routed_kernel<<<grid_size(queries, kThreads / kWarp), kThreads, 0,
                  c10::cuda::getCurrentCUDAStream()>>>(
      found.mutable_data_ptr<int64_t>(), seed.const_data_ptr<int64_t>(),
      best.const_data_ptr<int64_t>(), offsets.const_data_ptr<int64_t>(),
      classes.const_data_ptr<int64_t>(), classes.size(0), queries, count);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return found;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("tree_balance_", tree_balance_cuda);
  m.impl("tree_routed_candidates", routed_candidates_cuda);
}

} // namespace xsoftmax
