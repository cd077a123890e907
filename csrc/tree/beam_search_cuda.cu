#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "table/gather_dot.h"
#include "table/transform_names.h"
#include "tree/beam_search.h"
#include "tree/edge_rows_cuda.cuh"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <type_traits>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

constexpr const char* kOp = "beam_search";
constexpr int64_t kBeamBytes = 40960; // largest beam in shared memory; wider ones use a workspace
constexpr int64_t kWorkspaceBytes = 256 << 20; // of all blocks, unless a single beam is larger
constexpr int64_t kNewNodes = 1024; // nodes that a block scores between two selections

// Maps a score to an unsigned integer of the same order. NaN is the largest, as in torch.topk;
// zeros are equal.
__device__ inline uint32_t rank_key(float score) {
  const uint32_t bits = __float_as_uint(score == 0 ? 0.0f : score);
  return score != score ? 0xFFFFFFFFu : bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFu : 0x80000000u);
}
__device__ inline uint64_t rank_key(double score) {
  const uint64_t bits = uint64_t(__double_as_longlong(score == 0 ? 0.0 : score));
  return score != score ? ~uint64_t(0)
                        : bits ^ (bits >> 63 != 0 ? ~uint64_t(0) : uint64_t(1) << 63);
}

// A block's beam and the nodes that may come next, in shared memory or in a workspace. Both are
// sorted by ascending node, because leaves of a beam are never deeper than its inner nodes. So
// among equal scores the first is the lower node.
template <typename A>
struct Beam {
  int64_t *node, *offset, *next_node; // [width], [width], [capacity]
  A *score, *next_score;
  int64_t width, capacity;

  static int64_t bytes(int64_t width, int64_t capacity) {
    const int64_t all =
        width * (2 * sizeof(int64_t) + sizeof(A)) + capacity * (sizeof(int64_t) + sizeof(A));
    return (all + 15) / 16 * 16;
  }

  __device__ Beam(unsigned char* storage, int64_t width, int64_t capacity)
      : node(reinterpret_cast<int64_t*>(storage)), offset(node + width), next_node(offset + width),
        score(reinterpret_cast<A*>(next_node + capacity)), next_score(score + width), width(width),
        capacity(capacity) {}

  // Returns, in every thread, how many of the first `count` next nodes have a key for which
  // `predicate`.
  template <typename Predicate>
  __device__ int64_t count_next(int64_t count, const Predicate& predicate) const {
    int64_t found = 0;
    for (int64_t base = 0; base < count; base += blockDim.x) {
      const int64_t i = base + threadIdx.x;
      found += __syncthreads_count(i < count && predicate(rank_key(next_score[i])));
    }
    return found;
  }

  // Moves the best `width` of the first `count` next nodes (more than `width`) to the front and
  // keeps their order.
  __device__ void select(int64_t count, int64_t* storage) {
    using Key = decltype(rank_key(A(0)));
    // Found bit by bit: the largest key that at least `width` keys reach, or any that exactly
    // `width` do.
    Key least = 0;
    int64_t ties = width; // how many nodes with exactly this key to keep
    bool exact = false;
    for (Key bit = Key(1) << (8 * sizeof(Key) - 1); bit != 0 && !exact; bit >>= 1) {
      const int64_t reach = count_next(count, [&](Key key) { return key >= (least | bit); });
      least = reach >= width ? least | bit : least;
      exact = reach == width;
    }
    if (!exact) {
      ties = width - count_next(count, [&](Key key) { return key > least; });
    }
    int64_t kept = 0, equal = 0;
    for (int64_t base = 0; base < count; base += blockDim.x) {
      const int64_t i = base + threadIdx.x;
      const bool in_range = i < count;
      const A mine = in_range ? next_score[i] : A(0);
      const int64_t id = in_range ? next_node[i] : 0;
      const Key key = rank_key(mine);
      int64_t more_equal, more_kept;
      const int64_t tie =
          equal + block_inclusive_sum(int64_t(in_range && key == least), &more_equal, storage);
      const bool keep = in_range && (key > least || (key == least && tie <= ties));
      const int64_t place = kept + block_inclusive_sum(int64_t(keep), &more_kept, storage) - 1;
      if (keep) { // safe: the sums are barriers, so all threads have read their nodes
        next_score[place] = mine;
        next_node[place] = id;
      }
      equal += more_equal;
      kept += more_kept;
    }
    __syncthreads();
  }
};

// One block per query. Layer by layer, replaces the inner nodes of the beam by their children,
// whose edges a warp scores four at a time, and keeps the best.
template <typename T, int N>
__global__ void beam_search_kernel(at::opmath_type<T>* scores, int64_t* classes, const T* input,
                                   EdgeTable<T> table, const int64_t* first_child,
                                   const int64_t* node_class, int64_t nodes, int64_t queries,
                                   int64_t columns, int64_t width, int64_t capacity,
                                   NamedTransform transform, unsigned char* workspace,
                                   int64_t workspace_bytes, bool sorted) {
  using opmath = at::opmath_type<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ int64_t storage[kWarp];
  Beam<opmath> beam(workspace == nullptr ? shared : workspace + blockIdx.x * workspace_bytes, width,
                    capacity);
  const int64_t warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  for (int64_t query = blockIdx.x; query < queries; query += gridDim.x) {
    const T* x = input + query * table.features;
    if (threadIdx.x == 0) {
      beam.node[0] = 0;
      beam.score[0] = 0;
    }
    int64_t count = 1;
    for (;;) {
      __syncthreads();
      int64_t leaves = 0, children = 0;
      for (int64_t base = 0; base < count; base += blockDim.x) {
        const int64_t i = base + threadIdx.x;
        const bool in_range = i < count;
        const int64_t node = in_range ? beam.node[i] : 0;
        const ChildRange range =
            in_range ? children_of(first_child, node, nodes) : ChildRange{0, 0};
        const int64_t num_children = range.end - range.begin;
        int64_t more_children, more_leaves;
        const int64_t children_end =
            children + block_inclusive_sum(num_children, &more_children, storage);
        const int64_t place = leaves +
            block_inclusive_sum(int64_t(in_range && num_children == 0), &more_leaves, storage) - 1;
        if (in_range) {
          beam.offset[i] = children_end - num_children;
        }
        if (in_range && num_children == 0) {
          beam.next_node[place] = node;
          beam.next_score[place] = beam.score[i];
        }
        children += more_children;
        leaves += more_leaves;
      }
      if (children == 0) {
        break;
      }
      __syncthreads();
      int64_t filled = leaves;
      for (int64_t next = 0; next < children;) {
        const int64_t batch =
            children - next < capacity - filled ? children - next : capacity - filled;
        for (int64_t i = threadIdx.x; i < batch; i += blockDim.x) {
          const int64_t beam_index = last_at_or_before(beam.offset, count, next + i);
          beam.next_node[filled + i] =
              first_child[beam.node[beam_index]] + (next + i - beam.offset[beam_index]);
          beam.next_score[filled + i] = beam.score[beam_index];
        }
        __syncthreads();
        for (int64_t i = warp * kRowsAtOnce; i < batch; i += warps * kRowsAtOnce) {
          int64_t edges[kRowsAtOnce];
#pragma unroll
          for (int r = 0; r < kRowsAtOnce; ++r) {
            edges[r] = i + r < batch ? beam.next_node[filled + i + r] - 1 : -1;
          }
          const opmath score = score_edges<T, N>(table, x, edges);
          const int64_t mine = i + lane() / kRowLanes;
          if (lane() % kRowLanes == 0 && mine < batch) {
            beam.next_score[filled + mine] += transform(score);
          }
        }
        __syncthreads();
        filled += batch;
        next += batch;
        if (filled > width && (filled == capacity || next == children)) {
          beam.select(filled, storage);
          filled = width;
        }
      }
      count = filled;
      for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
        beam.node[i] = beam.next_node[i];
        beam.score[i] = beam.next_score[i];
      }
    }
    for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
      int64_t place = i;
      if (sorted && i < count) {
        const auto key = rank_key(beam.score[i]);
        place = 0;
        for (int64_t j = 0; j < count; ++j) {
          const auto other = rank_key(beam.score[j]);
          place += other > key || (other == key && j < i) ? 1 : 0;
        }
      }
      scores[query * columns + place] =
          i < count ? beam.score[i] : -std::numeric_limits<opmath>::infinity();
      classes[query * columns + place] = i < count ? node_class[beam.node[i]] : -1;
    }
    __syncthreads(); // the next query reuses the beam
  }
}

template <typename T>
void launch(const Tensor& scores, const Tensor& classes, const Tensor& input,
            const EdgeTable<T>& table, const Tensor& first_child, const Tensor& node_class,
            int64_t width, int64_t capacity, const NamedTransform& transform, bool in_shared) {
  using opmath = at::opmath_type<T>;
  const int64_t queries = input.size(0), bytes = Beam<opmath>::bytes(width, capacity);
  const T* in = input.const_data_ptr<T>();
  unsigned blocks = grid_size(queries, 1);
  Tensor workspace;
  if (!in_shared) {
    blocks = unsigned(std::clamp<int64_t>(kWorkspaceBytes / bytes, 1, blocks));
    workspace = at::empty({blocks * bytes}, input.options().dtype(at::kByte));
  }
  dispatch_pack<T>(table.wide(in), [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    constexpr size_t kUnused = 16; // never read
    beam_search_kernel<T, N><<<blocks, kThreads, in_shared ? size_t(bytes) : kUnused,
                               c10::cuda::getCurrentCUDAStream()>>>(
        scores.mutable_data_ptr<opmath>(), classes.mutable_data_ptr<int64_t>(), in, table,
        first_child.const_data_ptr<int64_t>(), node_class.const_data_ptr<int64_t>(),
        node_class.size(0), queries, scores.size(1), width, capacity, transform,
        in_shared ? nullptr : workspace.mutable_data_ptr<uint8_t>(), bytes, in_shared);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

BeamSearchResult beam_search_cuda(const Tensor& input, const Tensor& weight,
                                  const OptionalTensor& bias, const Tensor& first_child,
                                  const Tensor& node_class, c10::SymInt width,
                                  std::string_view transform) {
  check_beam_search(input, weight, bias, first_child, node_class, width, transform);
  const c10::cuda::CUDAGuard guard(input.device());
  if (use_reference()) {
    return beam_search_reference(input, weight, bias, first_child, node_class, width, transform);
  }
  const NamedTransform named = additive_transform_named(kOp, transform);
  const int64_t columns = width.expect_int(), beam = std::min(columns, node_class.size(0));
  const Tensor scores =
      at::empty({input.size(0), columns}, input.options().dtype(opmath_dtype(input.scalar_type())));
  const Tensor classes = at::empty({input.size(0), columns}, node_class.options());
  if (input.size(0) == 0) {
    return {scores, classes};
  }
  const Tensor x = input.contiguous(), table = with_unit_column_stride(weight),
               bias_row = is_defined(bias) ? bias->contiguous() : Tensor();
  const Tensor offsets = first_child.contiguous(), classes_of = node_class.contiguous();
  const int64_t few = beam + kNewNodes,
                size = opmath_dtype(input.scalar_type()) == at::kDouble ? sizeof(double)
                                                                        : sizeof(float);
  const bool in_shared =
      (size == 8 ? Beam<double>::bytes(beam, few) : Beam<float>::bytes(beam, few)) <= kBeamBytes;
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "beam_search_cuda", [&] {
        launch<scalar_t>(scores, classes, x, EdgeTable<scalar_t>(table, bias_row), offsets,
                         classes_of, beam, in_shared ? few : beam + std::max(beam, kNewNodes),
                         named, in_shared);
      });
  if (in_shared) {
    return {scores, classes};
  }
  // A wide beam is sorted by ascending node; a stable sort keeps this order among equal scores.
  const auto [best, order] = scores.sort(/*stable=*/true, /*dim=*/1, /*descending=*/true);
  return {best, classes.gather(1, order)};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("beam_search", beam_search_cuda); }

} // namespace xsoftmax
