#include "table/cuda_rows.cuh"
#include "table/cuda_sorted_ids.cuh"
#include "table/sorted_ids.h"
#include "table/pairs.cuh"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

// Contribution of a position to the row of its class: `coefficient` times row `row` of input, or
// row `row - queries` of the shared values.
template <typename opmath>
struct Term {
  int64_t row;
  opmath coefficient;
};

// Positions sorted by class. A run is a maximal range of places with one class.
struct Runs {
  SortedIdsView ids;   // sorted ids, and the position of each
  const int64_t* slot; // the gradient row of each place's run; nullptr: the run's first place
  int64_t count;
  int64_t no_pair; // the id that marks "no pair", above all others

  __device__ bool joins(int64_t place) const {
    return place > 0 && place < count && ids[place] == ids[place - 1];
  }
  __device__ bool begins(int64_t place) const { return ids[place] != no_pair && !joins(place); }
  __device__ int64_t row(int64_t place) const { return slot == nullptr ? place : slot[place]; }
};

// Inputs and outputs of the gradient kernels.
template <typename T>
struct RowGradient {
  using opmath = at::opmath_type<T>;

  Runs runs;
  Pairs pairs;
  const opmath* grad;
  int64_t grad_stride;
  // [Q]; or, with a stride of 0, one number that also multiplies the shared rows; nullptr: ones.
  const opmath* scale;
  int64_t scale_stride;
  const T* input;
  const opmath* shared_values;
  const opmath* shared_bias;
  int64_t width; // columns of the values; 0: not wanted
  int64_t* rows; // receives the sorted ids; nullptr: not wanted
  T* values;
  T* bias; // nullptr: not wanted
  // Partial sums of runs that cross a chunk boundary: row 2 c for a run that began before chunk c,
  // row 2 c + 1 for one that begins in it.
  opmath* part_values;
  opmath* part_bias;

  __device__ Term<opmath> term(int64_t position) const {
    if (position >= pairs.total) {
      return {pairs.queries + (position - pairs.total), opmath(1)};
    }
    const int64_t query = pairs.query_of(position);
    const opmath factor = scale == nullptr ? opmath(1) : scale[query * scale_stride];
    return {query, times(grad[pairs.address(query, position, grad_stride)], factor)};
  }

  // Not a plain product: 0 * inf is NaN, and ignored queries may hold anything.
  __device__ static opmath times(opmath gradient, opmath factor) {
    return gradient == opmath(0) || factor == opmath(0) ? opmath(0) : gradient * factor;
  }
  __device__ opmath scale_shared(opmath gradient) const {
    return scale == nullptr || scale_stride != 0 ? gradient : times(gradient, *scale);
  }
};

// One warp sums 32 N columns (picked by blockIdx.y) of a chunk of 32 places, run by run in order.
// The lanes load the terms of the places in parallel and share them by shuffles; the loads of
// kAhead rows are in flight at once.
template <typename T, int N>
__global__ void row_gradient_kernel(const __grid_constant__ RowGradient<T> g) {
  using opmath = at::opmath_type<T>;
  constexpr int kAhead = 4;
  const int64_t d = (int64_t(blockIdx.y) * kWarp + lane()) * N,
                chunks = (g.runs.count + kWarp - 1) / kWarp;
  const bool mine = d < g.width, is_bias = g.bias != nullptr && blockIdx.y == 0 && lane() == 0;
  for (int64_t chunk = global_thread() / kWarp; chunk < chunks; chunk += grid_threads() / kWarp) {
    const int64_t begin = chunk * kWarp, at = begin + lane();
    const bool in_range = at < g.runs.count && g.runs.ids[at] != g.runs.no_pair;
    if (g.rows != nullptr && blockIdx.y == 0 && at < g.runs.count) {
      g.rows[at] = g.runs.ids[at];
    }
    const int members = __popc(__ballot_sync(kAllLanes, in_range)); // the first lanes
    const Term<opmath> term = in_range ? g.term(g.runs.ids.order[at]) : Term<opmath>{0, opmath(0)};
    const int64_t run_row = in_range ? g.runs.row(at) : 0;
    const unsigned firsts = __ballot_sync(kAllLanes, in_range && g.runs.begins(at));
    const bool continues_in_next = members == kWarp && g.runs.joins(begin + kWarp);
    int head = -1; // lane where the current run begins; -1: before this chunk
    opmath sum[N] = {}, bias_sum = 0;
    const auto finish = [&](bool cut) { // cut: the run continues in the next chunk
      if (head >= 0 && !cut) {
        const int64_t row = __shfl_sync(kAllLanes, run_row, head);
        if (mine) {
          store_pack(g.values + row * g.width + d, sum);
        }
        if (is_bias) {
          g.bias[row] = T(bias_sum);
        }
        return;
      }
      const int64_t part = 2 * chunk + (head >= 0 ? 1 : 0);
#pragma unroll
      for (int i = 0; mine && i < N; ++i) {
        g.part_values[part * g.width + d + i] = sum[i];
      }
      if (is_bias) {
        g.part_bias[part] = bias_sum;
      }
    };
#pragma unroll 1
    for (int base = 0; base < members; base += kAhead) {
      Pack<T, N> packs[kAhead];
      int64_t row[kAhead];
      opmath coefficient[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        row[k] = __shfl_sync(kAllLanes, term.row, base + k);
        coefficient[k] = __shfl_sync(kAllLanes, term.coefficient, base + k);
        if (mine && coefficient[k] != opmath(0) && row[k] < g.pairs.queries) {
          packs[k] = load_pack<N>(g.input + row[k] * g.width + d);
        }
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int m = base + k;
        if (m >= members) {
          break;
        }
        if ((firsts >> m & 1) != 0) {
          if (m > 0) {
            finish(false);
          }
          head = m;
          bias_sum = 0;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sum[i] = 0;
          }
        } else if (g.runs.slot == nullptr) { // every place has a row; only the run's first is used
          const opmath zero[N] = {};
          if (mine) {
            store_pack(g.values + (begin + m) * g.width + d, zero);
          }
          if (is_bias) {
            g.bias[begin + m] = T(0);
          }
        }
        const bool shared = row[k] >= g.pairs.queries;
        if (is_bias) {
          bias_sum +=
              shared ? g.scale_shared(g.shared_bias[row[k] - g.pairs.queries]) : coefficient[k];
        }
        if (mine && shared) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sum[i] += g.scale_shared(g.shared_values[(row[k] - g.pairs.queries) * g.width + d + i]);
          }
        } else if (mine && coefficient[k] != opmath(0)) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sum[i] += coefficient[k] * opmath(packs[k].values[i]);
          }
        }
      }
    }
    if (members > 0) {
      finish(continues_in_next);
    }
  }
}

// Returns whether a run begins in a chunk and continues in the next.
__device__ inline bool starts_long_run(const Runs& runs, int64_t chunk, int64_t chunks) {
  if (chunk + 1 >= chunks) {
    return false;
  }
  const int64_t begin = chunk * kWarp, last = begin + kWarp - 1, id = runs.ids[last];
  return id != runs.no_pair && runs.ids[last + 1] == id &&
      (begin == 0 || runs.ids[begin - 1] != id);
}

// One block handles 32 chunks. For each long run that begins in one of them, it adds the partial
// sums of the chunks that the run covers: each warp adds a share of the chunks, and the shares are
// added in order. blockIdx.y picks 32 columns; column `width` is the bias.
template <typename T>
__global__ void join_chunks_kernel(const __grid_constant__ RowGradient<T> g) {
  using opmath = at::opmath_type<T>;
  constexpr int kWarps = kThreads / kWarp;
  __shared__ opmath sums[kWarps][kWarp];
  const SortedIdsView& ids = g.runs.ids;
  const int64_t chunks = (g.runs.count + kWarp - 1) / kWarp,
                d = int64_t(blockIdx.y) * kWarp + lane();
  const int warp = int(threadIdx.x) / kWarp;
  const bool is_value = d < g.width, is_bias = g.bias != nullptr && d == g.width;
  for (int64_t base = int64_t(blockIdx.x) * kWarp; base < chunks;
       base += int64_t(gridDim.x) * kWarp) {
    // The same in all warps.
    unsigned starts = __ballot_sync(kAllLanes, starts_long_run(g.runs, base + lane(), chunks));
    for (; starts != 0; starts &= starts - 1) {
      const int64_t chunk = base + __ffs(int(starts)) - 1, begin = chunk * kWarp,
                    id = ids[begin + kWarp - 1];
      // Binary search: chunk `low` begins with the class, chunk `high` does not.
      int64_t low = chunk + 1, high = chunks;
      while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        (ids[middle * kWarp] == id ? low : high) = middle;
      }
      const int64_t count = high - chunk, first = chunk + count * warp / kWarps,
                    end = chunk + count * (warp + 1) / kWarps;
      opmath sum = 0;
#pragma unroll 4
      for (int64_t c = first; c < end; ++c) {
        const int64_t part = 2 * c + (c == chunk ? 1 : 0);
        sum += is_value ? g.part_values[part * g.width + d]
            : is_bias   ? g.part_bias[part]
                        : opmath(0);
      }
      __syncthreads(); // the previous sums may still be in use
      sums[warp][lane()] = sum;
      __syncthreads();
      if (warp == 0) {
        opmath total = 0;
        for (int w = 0; w < kWarps; ++w) {
          total += sums[w][lane()];
        }
        const unsigned same = __ballot_sync(kAllLanes, ids[begin + lane()] == id);
        const int64_t row = g.runs.row(begin + __ffs(int(same)) - 1);
        if (is_value) {
          g.values[row * g.width + d] = T(total);
        }
        if (is_bias) {
          g.bias[row] = T(total);
        }
      }
    }
  }
}

__global__ void mark_runs_kernel(int* begins, Runs runs) {
  for (int64_t i = global_thread(); i < runs.count; i += grid_threads()) {
    begins[i] = runs.begins(i);
  }
}

__global__ void run_ids_kernel(int64_t* rows, Runs runs, int64_t row_count) {
  for (int64_t i = global_thread(); i < runs.count; i += grid_threads()) {
    if (runs.begins(i)) {
      CUDA_KERNEL_ASSERT(runs.slot[i] < row_count);
      rows[runs.slot[i]] = runs.ids[i];
    }
  }
}

// Fills unused rows: repeats the last id, with zero values. One warp per row.
template <typename T>
__global__ void pad_rows_kernel(int64_t* rows, T* values, T* bias, Runs runs, int64_t row_count,
                                int64_t width) {
  const int64_t used = runs.slot[runs.count - 1] + 1, last = used == 0 ? 0 : rows[used - 1];
  for (int64_t row = used + global_thread() / kWarp; row < row_count;
       row += grid_threads() / kWarp) {
    for (int64_t d = lane(); d < width; d += kWarp) {
      values[row * width + d] = T(0);
    }
    if (lane() == 0) {
      rows[row] = last;
      if (bias != nullptr) {
        bias[row] = T(0);
      }
    }
  }
}

Runs runs_of(const SortedIds& sorted, const CudaPairs& pairs, const Tensor& slot) {
  return {sorted.view(), slot.defined() ? slot.const_data_ptr<int64_t>() : nullptr, sorted.count(),
          pairs.num_classes};
}

struct Sources {
  const Tensor& grad;
  int64_t grad_stride;
  const Tensor& scale;
  const Tensor& input;
  const CudaPairs& pairs;
  const Tensor& shared_values;
  const Tensor& shared_bias;
};

// Writes `values` [rows, D] and `bias` [rows]; either may have 0 rows if it is not wanted. `rows`,
// if defined, receives the sorted ids.
void sum_runs(const Tensor& rows, const Tensor& values, const Tensor& bias, const Runs& runs,
              const Sources& from) {
  if (runs.count == 0 || (!rows.defined() && values.numel() == 0 && bias.numel() == 0)) {
    return;
  }
  const int64_t width = values.numel() > 0 ? from.input.size(1) : 0,
                chunks = (runs.count + kWarp - 1) / kWarp;
  const bool want_bias = bias.numel() > 0;
  const Tensor part_values = at::empty({2 * chunks, width}, from.grad.options()),
               part_bias = at::empty({2 * chunks}, from.grad.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, from.input.scalar_type(), "row_gradient_cuda", [&] {
        using opmath = at::opmath_type<scalar_t>;
        const auto pointer = [](const Tensor& tensor) {
          return tensor.defined() ? tensor.const_data_ptr<opmath>() : nullptr;
        };
        const RowGradient<scalar_t> gradient{
            runs,
            Pairs(from.pairs),
            from.grad.const_data_ptr<opmath>(),
            from.grad_stride,
            pointer(from.scale),
            from.scale.defined() && from.scale.dim() == 1 ? 1 : 0,
            from.input.const_data_ptr<scalar_t>(),
            pointer(from.shared_values),
            pointer(from.shared_bias),
            width,
            rows.defined() ? rows.mutable_data_ptr<int64_t>() : nullptr,
            values.mutable_data_ptr<scalar_t>(),
            want_bias ? bias.mutable_data_ptr<scalar_t>() : nullptr,
            part_values.mutable_data_ptr<opmath>(),
            part_bias.mutable_data_ptr<opmath>()};
        const bool wide = aligned(gradient.input, width, sizeof(scalar_t)) &&
            aligned(gradient.values, width, sizeof(scalar_t));
        const auto stream = c10::cuda::getCurrentCUDAStream();
        dispatch_pack<scalar_t>(wide, [&](auto pack) {
          constexpr int N = decltype(pack)::value;
          const dim3 grid(grid_size(chunks, kThreads / kWarp),
                          unsigned(std::max<int64_t>(1, (width + kWarp * N - 1) / (kWarp * N))));
          row_gradient_kernel<scalar_t, N><<<grid, kThreads, 0, stream>>>(gradient);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        });
        if (chunks > 1 && (width > 0 || want_bias)) {
          const dim3 grid(grid_size(chunks - 1, kWarp),
                          unsigned((width + (want_bias ? 1 : 0) + kWarp - 1) / kWarp));
          join_chunks_kernel<scalar_t><<<grid, kThreads, 0, stream>>>(gradient);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        }
      });
}

} // namespace

std::tuple<Tensor, Tensor, Tensor> row_gradient_cuda(
    const Tensor& grad, int64_t grad_stride, const Tensor& scale, const Tensor& input,
    const CudaPairs& pairs, const Tensor& shared_ids, const Tensor& shared_values,
    const Tensor& shared_bias, std::array<bool, 2> wanted) {
  const SortedIds sorted(pairs.ids, pairs.num_classes - 1, shared_ids);
  const int64_t count = sorted.count();
  const Tensor rows = at::empty({count}, pairs.ids.options());
  const Tensor values = at::empty({wanted[0] ? count : 0, input.size(1)}, input.options()),
               bias = at::empty({wanted[1] ? count : 0}, input.options());
  sum_runs(rows, values, bias, runs_of(sorted, pairs, Tensor()),
           {grad, grad_stride, scale, input, pairs, shared_values, shared_bias});
  note_sorted_ids(rows, pairs.num_classes);
  return {rows, values, bias};
}

std::tuple<Tensor, Tensor, Tensor> compact_row_gradient_cuda(
    const Tensor& grad, int64_t grad_stride, const Tensor& input, const CudaPairs& pairs,
    int64_t row_count, std::array<bool, 2> wanted) {
  const int64_t width = input.size(1), total = pairs.total();
  const Tensor rows = at::empty({row_count}, pairs.ids.options()),
               values = at::empty({wanted[0] ? row_count : 0, width}, input.options());
  const Tensor bias = at::empty({wanted[1] ? row_count : 0}, input.options());
  if (row_count == 0) {
    return {rows, values, bias};
  }
  const SortedIds sorted(pairs.ids, pairs.num_classes);
  const Tensor begins = at::empty({total}, rows.options().dtype(at::kInt));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const unsigned grid = grid_size(total, kThreads);
  mark_runs_kernel<<<grid, kThreads, 0, stream>>>(begins.mutable_data_ptr<int>(),
                                                  runs_of(sorted, pairs, Tensor()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  const Tensor slot = begins.cumsum(0).sub_(1);
  const Runs runs = runs_of(sorted, pairs, slot);
  run_ids_kernel<<<grid, kThreads, 0, stream>>>(rows.mutable_data_ptr<int64_t>(), runs, row_count);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "compact_row_gradient_cuda", [&] {
        pad_rows_kernel<scalar_t><<<grid_size(row_count, kThreads / kWarp), kThreads, 0, stream>>>(
            rows.mutable_data_ptr<int64_t>(), values.mutable_data_ptr<scalar_t>(),
            wanted[1] ? bias.mutable_data_ptr<scalar_t>() : nullptr, runs, row_count,
            wanted[0] ? width : 0);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      });
  sum_runs(Tensor(), values, bias, runs,
           {grad, grad_stride, Tensor(), input, pairs, Tensor(), Tensor()});
  note_sorted_ids(rows, pairs.num_classes);
  return {rows, values, bias};
}

} // namespace xsoftmax
