#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "table/gather_dot.h"
#include "table/gather_dot_cuda.h"
#include "tree/edge_rows_cuda.cuh"
#include "tree/hierarchical_softmax.h"
#include "tree/sibling_softmax.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

constexpr int kPathThreads = 128;       // threads of a block that scores a path
constexpr int64_t kMaxBlocks = 16384; // each has a path and, if they are not kept, values

// A few host numbers as kernel arguments: a copy would synchronise with the device.
struct Numbers {
  static constexpr int kMax = 64;
  int64_t values[kMax];
};

__global__ void write_kernel(int64_t* to, Numbers numbers, int64_t count) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    to[i] = numbers.values[i];
  }
}

// Paths to nodes. For each layer, from the top, a path has the children of one node, one of which
// is on the path. In the columns of a query, those of a layer begin at column[layer].
struct SiblingPaths {
  const int64_t *first_child, *parent, *nodes;
  const int64_t* column; // [layers + 1]
  int64_t num_nodes, queries, layers;

  // Writes the nodes on the path, from the bottom up, to `path` [layers]; returns how many there
  // are.
  __device__ int64_t find(int64_t query, int64_t* path) const {
    const int64_t last = nodes[query];
    CUDA_KERNEL_ASSERT(last >= 0 && last < num_nodes);
    int64_t length = 0;
    for (int64_t node = last; node != 0; node = node_above(parent, node)) {
      CUDA_KERNEL_ASSERT(length < layers);
      path[length++] = node;
    }
    return length;
  }

  __device__ ChildRange siblings(int64_t node, int64_t layer) const {
    const ChildRange range = children_of(first_child, parent[node], num_nodes);
    CUDA_KERNEL_ASSERT(range.begin <= node && node < range.end &&
                       range.end - range.begin <= column[layer + 1] - column[layer]);
    return range;
  }

  __device__ int64_t layer_of(int64_t at) const { return last_at_or_before(column, layers, at); }

  // Returns the edge of a column, -1 if there is none.
  __device__ int64_t edge(int64_t at, const int64_t* path, int64_t length) const {
    if (at >= column[layers]) {
      return -1;
    }
    const int64_t layer = layer_of(at);
    if (layer >= length) {
      return -1;
    }
    const ChildRange range = siblings(path[length - 1 - layer], layer);
    const int64_t child = range.begin + (at - column[layer]);
    return child < range.end ? child - 1 : -1;
  }
};

// One block per query. Scores all siblings on the path, four per warp at a time; then one warp
// computes the softmax of a layer; then each thread sums N columns of the gradient of input.
// `values` holds the scores, then their gradients: one row per query, or per block if they are not
// kept.
template <typename T, int N>
__global__ void hierarchical_softmax_kernel(at::opmath_type<T>* loss,
                                            at::opmath_type<T>* grad_input,
                                            at::opmath_type<T>* values, bool keep_values,
                                            int64_t* path_storage, const T* input,
                                            EdgeTable<T> table, SiblingPaths paths) {
  using opmath = at::opmath_type<T>;
  __shared__ opmath storage[kWarp];
  __shared__ int64_t length;
  const int64_t warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp,
                width = paths.column[paths.layers];
  int64_t* path = path_storage + blockIdx.x * paths.layers;
  for (int64_t query = blockIdx.x; query < paths.queries; query += gridDim.x) {
    opmath* row = values + (keep_values ? query : int64_t(blockIdx.x)) * width;
    if (threadIdx.x == 0) {
      length = paths.find(query, path);
    }
    __syncthreads();
    for (int64_t base = warp * kRowsAtOnce; base < width; base += warps * kRowsAtOnce) {
      const int64_t mine = base + lane() / kRowLanes, edge = paths.edge(mine, path, length);
      int64_t edges[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        edges[r] = __shfl_sync(kAllLanes, edge, r * kRowLanes);
      }
      const bool any = edges[0] >= 0 || edges[1] >= 0 || edges[2] >= 0 || edges[3] >= 0;
      const opmath score =
          any ? score_edges<T, N>(table, input + query * table.features, edges) : opmath(0);
      if (lane() % kRowLanes == 0 && mine < width) {
        row[mine] = edge >= 0 ? score : opmath(0);
      }
    }
    __syncthreads();
    opmath sum = 0;
    for (int64_t layer = warp; layer < length; layer += warps) {
      const int64_t node = path[length - 1 - layer];
      const ChildRange range = paths.siblings(node, layer);
      const int64_t count = range.end - range.begin, target = node - range.begin;
      opmath* group = row + paths.column[layer];
      opmath largest = -std::numeric_limits<opmath>::infinity(), total = 0;
      for (int64_t i = lane(); i < count; i += kWarp) {
        largest = group[i] > largest ? group[i] : largest;
      }
      largest = warp_max(largest);
      for (int64_t i = lane(); i < count; i += kWarp) {
        total += std::exp(group[i] - largest);
      }
      const opmath normalizer = sibling_normalizer(largest, warp_sum(total));
      for (int64_t i = lane(); i < count; i += kWarp) {
        const opmath log_prob = group[i] - normalizer;
        sum -= i == target ? log_prob : opmath(0);
        group[i] = sibling_gradient(log_prob, i == target);
      }
    }
    sum = block_sum(sum, storage);
    if (threadIdx.x == 0) {
      loss[query] = sum;
    }
    __syncthreads();
    for (int64_t d = int64_t(threadIdx.x) * N; d < table.features && grad_input != nullptr;
         d += int64_t(blockDim.x) * N) {
      opmath gradient[N] = {};
      for (int64_t layer = 0; layer < length; ++layer) {
        const ChildRange range = paths.siblings(path[length - 1 - layer], layer);
        const opmath* group = row + paths.column[layer];
        const T* rows = table.weight + (range.begin - 1) * table.stride + d;
        const int64_t count = range.end - range.begin;
        for (int64_t i = 0; i < count; i += kRowsAtOnce) { // load several rows at the same time
          Pack<T, N> packs[kRowsAtOnce];
          opmath c[kRowsAtOnce];
#pragma unroll
          for (int k = 0; k < kRowsAtOnce; ++k) {
            c[k] = i + k < count ? group[i + k] : opmath(0);
            if (c[k] != opmath(0)) { // as on the CPU, rows with coefficient 0 are not read
              packs[k] = load_pack<N>(rows + (i + k) * table.stride);
            }
          }
#pragma unroll
          for (int k = 0; k < kRowsAtOnce; ++k) {
            if (c[k] != opmath(0)) {
#pragma unroll
              for (int n = 0; n < N; ++n) {
                gradient[n] += c[k] * opmath(packs[k].values[n]);
              }
            }
          }
        }
      }
      store_pack(grad_input + query * table.features + d, gradient);
    }
    __syncthreads(); // the next query reuses `path`
  }
}

// One block per query. Writes the edge of each of its columns (`no_edge` if there is none) and its
// gradient.
template <typename opmath>
__global__ void path_edge_kernel(int64_t* edges, opmath* coefficient, const opmath* grad_edges,
                                 const opmath* scale, int64_t* path_storage, SiblingPaths paths,
                                 int64_t no_edge) {
  __shared__ int64_t length;
  const int64_t width = paths.column[paths.layers];
  int64_t* path = path_storage + blockIdx.x * paths.layers;
  for (int64_t query = blockIdx.x; query < paths.queries; query += gridDim.x) {
    if (threadIdx.x == 0) {
      length = paths.find(query, path);
    }
    __syncthreads();
    for (int64_t at = threadIdx.x; at < width; at += blockDim.x) {
      const int64_t edge = paths.edge(at, path, length), place = query * width + at;
      edges[place] = edge >= 0 ? edge : no_edge;
      coefficient[place] = edge >= 0 ? grad_edges[place] * scale[query] : opmath(0);
    }
    __syncthreads();
  }
}

// A Ways together with the tensors it points to.
struct OwnedPaths {
  Tensor first_child, parent, nodes, column;
  SiblingPaths paths;
  int64_t width = 0;

  OwnedPaths(const Tensor& first_child_argument, const Tensor& parent_argument,
             const Tensor& nodes_argument, at::IntArrayRef group_sizes)
      : first_child(first_child_argument.contiguous()), parent(parent_argument.contiguous()),
        nodes(nodes_argument.contiguous()),
        column(at::empty({int64_t(group_sizes.size()) + 1}, nodes_argument.options())) {
    const int64_t layers = int64_t(group_sizes.size());
    int64_t* to = column.mutable_data_ptr<int64_t>();
    for (int64_t begin = 0; begin <= layers; begin += Numbers::kMax) {
      const int64_t count = std::min<int64_t>(Numbers::kMax, layers + 1 - begin);
      Numbers numbers{};
      for (int64_t i = 0; i < count; ++i) {
        numbers.values[i] = width;
        width += begin + i < layers ? group_sizes[begin + i] : 0;
      }
      write_kernel<<<1, Numbers::kMax, 0, c10::cuda::getCurrentCUDAStream()>>>(to + begin, numbers,
                                                                               count);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    paths = {first_child.const_data_ptr<int64_t>(),
             parent.const_data_ptr<int64_t>(),
             nodes.const_data_ptr<int64_t>(),
             to,
             parent.size(0),
             nodes.size(0),
             layers};
  }

  // Allocates a path for each block.
  Tensor storage(unsigned blocks) const {
    return at::empty({int64_t(blocks), paths.layers}, nodes.options());
  }
};

HierarchicalState forward_cuda(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& first_child,
                               const Tensor& parent, const Tensor& nodes,
                               at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes,
                               std::array<bool, 2> output_mask) {
  check_hierarchical(input, weight, bias, first_child, parent, nodes, layer_sizes, group_sizes);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return hierarchical_softmax_forward_reference(input, weight, bias, first_child, parent, nodes,
                                                  layer_sizes, group_sizes, output_mask);
  }
  const auto [want_input, want_edges] = output_mask;
  const int64_t queries = input.size(0), features = input.size(1);
  const auto options = input.options().dtype(opmath_dtype(input.scalar_type()));
  const Tensor x = input.contiguous(), table = with_unit_column_stride(weight),
               bias_row = is_defined(bias) ? bias->contiguous() : Tensor();
  const OwnedPaths owned_paths(first_child, parent, nodes, group_sizes);
  const Tensor loss = at::empty({queries}, options),
               grad_input = at::empty({want_input ? queries : 0, features}, options);
  const Tensor grad_edges = at::empty({want_edges ? queries : 0, owned_paths.width}, options);
  if (queries == 0) {
    return {loss, grad_input, grad_edges};
  }
  const unsigned blocks = unsigned(std::min<int64_t>(queries, kMaxBlocks));
  const Tensor path_buffer = owned_paths.storage(blocks),
               values = want_edges ? grad_edges
                                   : at::empty({int64_t(blocks), owned_paths.width}, options);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "hierarchical_softmax_cuda", [&] {
        using opmath = at::opmath_type<scalar_t>;
        const EdgeTable<scalar_t> edges(table, bias_row);
        const scalar_t* in = x.const_data_ptr<scalar_t>();
        dispatch_pack<scalar_t>(edges.wide(in), [&](auto pack) {
          constexpr int N = decltype(pack)::value;
          hierarchical_softmax_kernel<scalar_t, N>
              <<<blocks, kPathThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                  loss.mutable_data_ptr<opmath>(),
                  want_input ? grad_input.mutable_data_ptr<opmath>() : nullptr,
                  values.mutable_data_ptr<opmath>(), want_edges,
                  path_buffer.mutable_data_ptr<int64_t>(), in, edges, owned_paths.paths);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        });
      });
  return {loss, grad_input, grad_edges};
}

RowGradients backward_cuda(const Tensor& scale, const Tensor& grad_edges, const Tensor& input,
                           const Tensor& weight, const Tensor& first_child, const Tensor& parent,
                           const Tensor& nodes, at::IntArrayRef layer_sizes,
                           at::IntArrayRef group_sizes, std::array<bool, 3> output_mask) {
  check_hierarchical_backward(scale, grad_edges, input, weight, first_child, parent, nodes,
                              layer_sizes, group_sizes);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return hierarchical_softmax_backward_reference(scale, grad_edges, input, weight, first_child,
                                                   parent, nodes, layer_sizes, group_sizes,
                                                   output_mask);
  }
  const int64_t queries = input.size(0), no_edge = weight.size(0);
  const OwnedPaths owned_paths(first_child, parent, nodes, group_sizes);
  const Tensor gradient = grad_edges.contiguous(),
               factor = scale.to(grad_edges.scalar_type()).contiguous();
  const Tensor edges = at::empty({queries, owned_paths.width}, nodes.options()),
               coefficient = at::empty(edges.sizes(), grad_edges.options());
  if (edges.numel() > 0) {
    const unsigned blocks = unsigned(std::min<int64_t>(queries, kMaxBlocks));
    const Tensor path_buffer = owned_paths.storage(blocks);
    AT_DISPATCH_FLOATING_TYPES(grad_edges.scalar_type(), "hierarchical_softmax_backward_cuda", [&] {
      path_edge_kernel<scalar_t><<<blocks, kPathThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          edges.mutable_data_ptr<int64_t>(), coefficient.mutable_data_ptr<scalar_t>(),
          gradient.const_data_ptr<scalar_t>(), factor.const_data_ptr<scalar_t>(),
          path_buffer.mutable_data_ptr<int64_t>(), owned_paths.paths, no_edge);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  auto [rows, values, bias_values] = compact_row_gradient_cuda(
      coefficient, edges.size(1), input.contiguous(), CudaPairs{edges, Tensor(), queries, no_edge},
      sibling_rows(queries, layer_sizes, group_sizes).expect_int(),
      {output_mask[1], output_mask[2]});
  return {input.new_empty({0, input.size(1)}), rows, values, bias_values};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("hierarchical_softmax_forward", forward_cuda);
  m.impl("hierarchical_softmax_backward", backward_cuda);
}

} // namespace xsoftmax
