#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "table/gather_dot.h"
#include "table/gather_dot_cuda.h"
#include "tree/edge_rows_cuda.cuh"
#include "tree/tree_scores.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

// With more paths per query than this, edges that several paths share are not merged.
constexpr int64_t kComparedPaths = 256;

// Paths through a tree whose nodes are numbered breadth-first: parents come before their children.
struct Paths {
  const int64_t* parent;
  const int64_t* nodes; // [queries, paths]
  int64_t num_nodes, queries, paths, layers;

  __device__ int64_t node(int64_t query, int64_t path) const {
    const int64_t found = nodes[query * paths + path];
    CUDA_KERNEL_ASSERT(found >= 0 && found < num_nodes);
    return found;
  }

  // Returns the lowest common ancestor of two nodes, which may be one of them. -1 is no node.
  __device__ int64_t common_ancestor(int64_t a, int64_t b) const {
    if (a < 0 || b < 0) {
      return a < 0 ? b : a;
    }
    while (a != b) {
      (a > b ? a : b) = node_above(parent, a > b ? a : b);
    }
    return a;
  }

  // Returns, in every thread of the block, the lowest node on all paths of a query. The edges down
  // to it are those that all paths share.
  __device__ int64_t ancestor_of_all(int64_t query, int64_t* storage) const {
    int64_t mine = -1;
    for (int64_t p = threadIdx.x; p < paths; p += blockDim.x) {
      mine = common_ancestor(mine, node(query, p));
    }
    return block_reduce(mine, int64_t(-1), storage, [&](int64_t value) {
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        value = common_ancestor(value, __shfl_xor_sync(kAllLanes, value, distance));
      }
      return value;
    });
  }
};

// One block per query, one warp per path, four edges at a time. Paths of a query share their upper
// edges, which stay in the cache.
template <typename T, int N>
__global__ void tree_scores_kernel(at::opmath_type<T>* scores, const T* input, EdgeTable<T> table,
                                   Paths paths, bool differences_only) {
  using opmath = at::opmath_type<T>;
  __shared__ int64_t storage[kWarp];
  for (int64_t query = blockIdx.x; query < paths.queries; query += gridDim.x) {
    const int64_t top = differences_only ? paths.ancestor_of_all(query, storage) : 0;
    for (int64_t p = threadIdx.x / kWarp; p < paths.paths; p += blockDim.x / kWarp) {
      opmath sum = 0; // over the rows of this lane
      int64_t length = 0;
      for (int64_t node = paths.node(query, p); node != top;) {
        int64_t edges[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          edges[r] = -1;
          if (node != top) {
            edges[r] = node - 1;
            node = node_above(paths.parent, node);
            ++length;
          }
        }
        CUDA_KERNEL_ASSERT(length <= paths.layers);
        sum += score_edges<T, N>(table, input + query * table.features, edges);
      }
#pragma unroll
      for (int distance = kWarp / 2; distance >= kRowLanes; distance /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
      }
      if (lane() == 0) {
        scores[query * paths.paths + p] = sum;
      }
    }
  }
}

// One block per query. Writes the edges of its paths, [layers, paths] from the top down, `no_edge`
// where there is none. The gradient of an edge is at the first path that holds it; other paths have
// 0.
template <typename opmath>
__global__ void path_edges_kernel(int64_t* edges, opmath* coefficient, const opmath* grad,
                                  Paths paths, bool differences_only, int64_t no_edge) {
  __shared__ int64_t storage[kWarp];
  const int64_t count = paths.paths, all = count * paths.layers;
  for (int64_t query = blockIdx.x; query < paths.queries; query += gridDim.x) {
    const int64_t top = differences_only ? paths.ancestor_of_all(query, storage) : 0;
    int64_t* query_edges = edges + query * all;
    for (int64_t p = threadIdx.x; p < count; p += blockDim.x) {
      int64_t length = 0;
      for (int64_t node = paths.node(query, p); node != top;
           node = node_above(paths.parent, node)) {
        ++length;
      }
      CUDA_KERNEL_ASSERT(length <= paths.layers);
      for (int64_t layer = paths.layers - 1; layer >= length; --layer) {
        query_edges[layer * count + p] = no_edge;
      }
      int64_t node = paths.node(query, p);
      for (int64_t layer = length - 1; layer >= 0; --layer) {
        query_edges[layer * count + p] = node - 1;
        node = node_above(paths.parent, node);
      }
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < all; i += blockDim.x) {
      const int64_t edge = query_edges[i], begin = i / count * count, p = i - begin;
      opmath sum = edge == no_edge ? opmath(0) : grad[query * count + p];
      if (edge != no_edge && count <= kComparedPaths) {
        sum = 0;
        bool before = false;
        for (int64_t other = 0; other < count; ++other) {
          const bool same = query_edges[begin + other] == edge;
          before = before || (same && other < p);
          sum += same ? grad[query * count + other] : opmath(0);
        }
        sum = before ? opmath(0) : sum;
      }
      coefficient[query * all + i] = sum;
    }
  }
}

Paths paths_of(const Tensor& parent, const Tensor& nodes, at::IntArrayRef layer_sizes) {
  return {parent.const_data_ptr<int64_t>(),
          nodes.const_data_ptr<int64_t>(),
          parent.size(0),
          nodes.size(0),
          nodes.size(1),
          int64_t(layer_sizes.size())};
}

Tensor tree_scores_cuda(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Tensor& parent, const Tensor& nodes, at::IntArrayRef layer_sizes,
                        bool differences_only, std::optional<bool> sparse_grad) {
  check_tree_scores("tree_scores", input, weight, bias, parent, nodes, layer_sizes);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return tree_scores_reference(input, weight, bias, parent, nodes, layer_sizes, differences_only,
                                 sparse_grad);
  }
  const Tensor scores =
      at::empty(nodes.sizes(), input.options().dtype(opmath_dtype(input.scalar_type())));
  if (scores.numel() == 0) {
    return scores;
  }
  const Tensor x = input.contiguous(), table = with_unit_column_stride(weight),
               bias_row = is_defined(bias) ? bias->contiguous() : Tensor();
  const Tensor contiguous_parent = parent.contiguous(), leaves = nodes.contiguous();
  const Paths paths = paths_of(contiguous_parent, leaves, layer_sizes);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "tree_scores_cuda", [&] {
        const EdgeTable<scalar_t> edges(table, bias_row);
        const scalar_t* in = x.const_data_ptr<scalar_t>();
        dispatch_pack<scalar_t>(edges.wide(in), [&](auto pack) {
          constexpr int N = decltype(pack)::value;
          const unsigned threads =
              unsigned(std::clamp<int64_t>(paths.paths, 1, kThreads / kWarp) * kWarp);
          tree_scores_kernel<scalar_t, N>
              <<<grid_size(paths.queries, 1), threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                  scores.mutable_data_ptr<at::opmath_type<scalar_t>>(), in, edges, paths,
                  differences_only);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        });
      });
  return scores;
}

RowGradients tree_scores_backward_cuda(const Tensor& grad, const Tensor& input,
                                       const Tensor& weight, const Tensor& parent,
                                       const Tensor& nodes, at::IntArrayRef layer_sizes,
                                       bool differences_only, std::array<bool, 3> output_mask) {
  check_tree_scores_backward(grad, input, weight, parent, nodes, layer_sizes);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return tree_scores_backward_reference(grad, input, weight, parent, nodes, layer_sizes,
                                          differences_only, output_mask);
  }
  const auto [want_input, want_weight, want_bias] = output_mask;
  const Tensor contiguous_parent = parent.contiguous(), leaves = nodes.contiguous(),
               scores_grad = grad.contiguous();
  const Paths paths = paths_of(contiguous_parent, leaves, layer_sizes);
  const int64_t no_edge = weight.size(0);
  const Tensor edges = at::empty({paths.queries, paths.layers * paths.paths}, nodes.options()),
               coefficient = at::empty(edges.sizes(), grad.options());
  if (edges.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES(grad.scalar_type(), "tree_scores_backward_cuda", [&] {
      path_edges_kernel<scalar_t>
          <<<grid_size(paths.queries, 1), kThreads / 2, 0, c10::cuda::getCurrentCUDAStream()>>>(
              edges.mutable_data_ptr<int64_t>(), coefficient.mutable_data_ptr<scalar_t>(),
              scores_grad.const_data_ptr<scalar_t>(), paths, differences_only, no_edge);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  const CudaPairs pairs{edges, Tensor(), paths.queries, no_edge};
  Tensor grad_input = input.new_empty({0, input.size(1)});
  if (want_input) {
    grad_input =
        pair_input_grad_cuda(coefficient, edges.size(1), with_unit_column_stride(weight), pairs)
            .to(input.scalar_type());
  }
  if (!want_weight && !want_bias) {
    return {grad_input, nodes.new_empty({0}), input.new_empty({0, input.size(1)}),
            input.new_empty({0})};
  }
  auto [rows, values, bias_values] = compact_row_gradient_cuda(
      coefficient, edges.size(1), input.contiguous(), pairs,
      edge_rows(nodes.numel(), layer_sizes).expect_int(), {want_weight, want_bias});
  return {grad_input, rows, values, bias_values};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("tree_scores", tree_scores_cuda);
  m.impl("tree_scores_backward", tree_scores_backward_cuda);
}

} // namespace xsoftmax
