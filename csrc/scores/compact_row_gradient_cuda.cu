#include "core/cuda_rows.cuh"
#include "scores/compact_row_gradient_cuda.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <type_traits>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

constexpr int64_t kChunk = 64; // sorted pairs that a warp sums

// Pairs by rising id. A run is all pairs of one id.
struct SortedPairs {
  const int64_t* id;    // [total]
  const int64_t* order; // [total] where each pair stood
  const int64_t* slot;  // [total] the row of its run in the result
  int64_t total, per_query, none;

  __device__ bool same(int64_t i, int64_t j) const { return id[i] == id[j]; }
};

__global__ void first_of_runs_kernel(int* first, const int64_t* id, int64_t total, int64_t none) {
  for (int64_t i = global_thread(); i < total; i += grid_threads()) {
    first[i] = id[i] != none && (i == 0 || id[i] != id[i - 1]);
  }
}

__global__ void rows_kernel(int64_t* rows, SortedPairs pairs, int64_t row_count) {
  for (int64_t i = global_thread(); i < pairs.total; i += grid_threads()) {
    const int64_t id = pairs.id[i];
    if (id != pairs.none && (i == 0 || id != pairs.id[i - 1])) {
      CUDA_KERNEL_ASSERT(id >= 0 && id < pairs.none && pairs.slot[i] < row_count);
      rows[pairs.slot[i]] = id;
    }
  }
}

// Behind the runs' rows: the last of them again, with zeros. A warp a row.
template <typename T>
__global__ void rest_kernel(int64_t* rows, T* values, T* bias, SortedPairs pairs, int64_t row_count, int64_t width) {
  const int64_t used = pairs.slot[pairs.total - 1] + 1, last = used == 0 ? 0 : rows[used - 1];
  for (int64_t row = used + global_thread() / kWarp; row < row_count; row += grid_threads() / kWarp) {
    for (int64_t d = lane(); d < width && values != nullptr; d += kWarp) {
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

// A warp 32 N columns (blockIdx.y) of a chunk of pairs. A run that lies in one chunk is done; of others each chunk leaves its part in `parts`
// [chunks, 2, width]: the first of a run that began in an earlier chunk, the second of one that goes on in the next.
template <typename T, int N>
__global__ void sum_chunks_kernel(T* values, at::opmath_type<T>* parts, SortedPairs pairs, const at::opmath_type<T>* coefficient, const T* input,
                                  int64_t width) {
  using opmath = at::opmath_type<T>;
  constexpr int kAhead = 4; // rows that a lane loads before it adds any
  const int64_t d = (int64_t(blockIdx.y) * kWarp + lane()) * N, chunks = (pairs.total + kChunk - 1) / kChunk;
  for (int64_t chunk = global_thread() / kWarp; chunk < chunks; chunk += grid_threads() / kWarp) {
    const int64_t begin = chunk * kChunk, end = begin + kChunk < pairs.total ? begin + kChunk : pairs.total;
    int64_t current = pairs.id[begin], slot = pairs.slot[begin];
    if (current == pairs.none) {
      return; // and so are all behind
    }
    bool inherited = begin > 0 && pairs.same(begin - 1, begin);
    opmath sum[N] = {};
    for (int64_t base = begin; base < end; base += kWarp) {
      const int64_t mine = base + lane();
      const int64_t id = mine < end ? pairs.id[mine] : pairs.none;
      const bool there = id != pairs.none;
      const int64_t from = there ? pairs.order[mine] : 0, own_slot = there ? pairs.slot[mine] : 0, query = from / pairs.per_query;
      const opmath own = there ? coefficient[from] : opmath(0);
      const int members = __popc(__ballot_sync(kAllLanes, there)); // the first lanes
      for (int m = 0; m < members; m += kAhead) {
        Pack<T, N> row[kAhead];
        opmath c[kAhead];
#pragma unroll
        for (int u = 0; u < kAhead; ++u) { // lanes behind the members have a coefficient of 0; kWarp is a multiple of kAhead
          c[u] = __shfl_sync(kAllLanes, own, m + u);
          const int64_t q = __shfl_sync(kAllLanes, query, m + u);
          row[u] = c[u] != opmath(0) && d < width ? load_pack<N>(input + q * width + d) : Pack<T, N>{};
        }
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const int64_t next = __shfl_sync(kAllLanes, id, m + u), next_slot = __shfl_sync(kAllLanes, own_slot, m + u);
          if (m + u < members && next != current) {
            if (d < width) {
              if (inherited) {
                store_pack(parts + 2 * chunk * width + d, sum);
              } else {
                store_pack(values + slot * width + d, sum);
              }
            }
            inherited = false;
            current = next;
            slot = next_slot;
#pragma unroll
            for (int i = 0; i < N; ++i) {
              sum[i] = opmath(0);
            }
          }
          if (c[u] != opmath(0)) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
              sum[i] += c[u] * opmath(row[u].values[i]);
            }
          }
        }
      }
    }
    if (d < width) {
      const bool goes_on = end < pairs.total && pairs.id[end] == current;
      if (inherited || goes_on) {
        store_pack(parts + (2 * chunk + (inherited ? 0 : 1)) * width + d, sum);
      } else {
        store_pack(values + slot * width + d, sum);
      }
    }
  }
}

// A warp 32 N columns of a run that began in a chunk and goes on in the next: its parts, in order.
template <typename T, int N>
__global__ void join_chunks_kernel(T* values, const at::opmath_type<T>* parts, SortedPairs pairs, int64_t width) {
  using opmath = at::opmath_type<T>;
  const int64_t d = (int64_t(blockIdx.y) * kWarp + lane()) * N, chunks = (pairs.total + kChunk - 1) / kChunk;
  for (int64_t chunk = global_thread() / kWarp; chunk + 1 < chunks; chunk += grid_threads() / kWarp) {
    const int64_t begin = chunk * kChunk, end = begin + kChunk;
    const int64_t id = pairs.id[end];
    const bool began_here = begin == 0 || pairs.id[begin - 1] != id;
    if (id == pairs.none || pairs.id[end - 1] != id || !began_here) {
      continue;
    }
    opmath sum[N] = {};
    if (d < width) {
      add_scaled(sum, opmath(1), parts + (2 * chunk + 1) * width + d);
    }
    for (int64_t first = chunk + 1;; first += kWarp) {
      const int64_t mine = first + lane();
      const int members = __popc(__ballot_sync(kAllLanes, mine < chunks && pairs.id[mine * kChunk] == id));
#pragma unroll 4
      for (int m = 0; m < members; ++m) {
        if (d < width) {
          add_scaled(sum, opmath(1), parts + 2 * (first + m) * width + d);
        }
      }
      if (members < kWarp) {
        break;
      }
    }
    if (d < width) {
      store_pack(values + pairs.slot[end - 1] * width + d, sum);
    }
  }
}

// A block a query; a thread N columns, over all pairs of the query in order.
template <typename T, int N>
__global__ void sum_rows_kernel(at::opmath_type<T>* out, const int64_t* ids, const at::opmath_type<T>* coefficient, const T* weight, int64_t stride,
                                int64_t rows, int64_t queries, int64_t per_query, int64_t width) {
  using opmath = at::opmath_type<T>;
  for (int64_t query = blockIdx.x; query < queries; query += gridDim.x) {
    for (int64_t d = int64_t(threadIdx.x) * N; d < width; d += int64_t(blockDim.x) * N) {
      opmath sum[N] = {};
#pragma unroll 4
      for (int64_t p = query * per_query; p < (query + 1) * per_query; ++p) {
        const opmath c = coefficient[p];
        if (c != opmath(0)) {
          const int64_t id = ids[p];
          CUDA_KERNEL_ASSERT(id >= 0 && id < rows);
          add_scaled(sum, c, weight + id * stride + d);
        }
      }
      store_pack(out + query * width + d, sum);
    }
  }
}

template <typename T>
void sum_runs(const Tensor& values, const SortedPairs& pairs, const Tensor& coefficient, const Tensor& input) {
  using opmath = at::opmath_type<T>;
  const int64_t width = input.size(1), chunks = (pairs.total + kChunk - 1) / kChunk;
  if (values.numel() == 0) {
    return;
  }
  const Tensor parts = at::empty({chunks, 2, width}, coefficient.options());
  const T* in = input.const_data_ptr<T>();
  T* out = values.mutable_data_ptr<T>();
  opmath* sums = parts.mutable_data_ptr<opmath>();
  dispatch_pack<T>(aligned(in, width, sizeof(T)) && aligned(out, width, sizeof(T)), [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    const dim3 grid(grid_size(chunks, kThreads / kWarp), unsigned((width + kWarp * N - 1) / (kWarp * N)));
    const auto stream = c10::cuda::getCurrentCUDAStream();
    sum_chunks_kernel<T, N><<<grid, kThreads, 0, stream>>>(out, sums, pairs, coefficient.const_data_ptr<opmath>(), in, width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    join_chunks_kernel<T, N><<<grid, kThreads, 0, stream>>>(out, sums, pairs, width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

} // namespace

std::tuple<Tensor, Tensor, Tensor> compact_row_gradient_cuda(const Tensor& ids, const Tensor& coefficient, int64_t none, const Tensor& input,
                                                             int64_t row_count, bool want_values, bool want_bias) {
  const int64_t total = ids.numel(), width = input.size(1);
  const Tensor rows = at::empty({row_count}, ids.options()), values = at::empty({want_values ? row_count : 0, width}, input.options());
  const Tensor bias = at::empty({want_bias ? row_count : 0}, input.options());
  if (row_count == 0) {
    return {rows, values, bias};
  }
  // A radix sort passes over the pairs once for each byte of an id.
  const at::ScalarType narrow = none <= std::numeric_limits<int32_t>::max() ? at::kInt : at::kLong;
  const auto [by_id, order] = ids.flatten().to(narrow).sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const Tensor sorted = by_id.to(at::kLong);
  const Tensor first = at::empty({total}, ids.options().dtype(at::kInt));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  first_of_runs_kernel<<<grid_size(total, kThreads), kThreads, 0, stream>>>(first.mutable_data_ptr<int>(), sorted.const_data_ptr<int64_t>(), total,
                                                                           none);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  const Tensor slot = first.cumsum(0).sub_(1);
  const SortedPairs pairs{sorted.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>(), slot.const_data_ptr<int64_t>(), total, ids.size(1), none};
  rows_kernel<<<grid_size(total, kThreads), kThreads, 0, stream>>>(rows.mutable_data_ptr<int64_t>(), pairs, row_count);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "compact_row_gradient_cuda", [&] {
    rest_kernel<scalar_t><<<grid_size(row_count, kThreads / kWarp), kThreads, 0, stream>>>(
        rows.mutable_data_ptr<int64_t>(), want_values ? values.mutable_data_ptr<scalar_t>() : nullptr,
        want_bias ? bias.mutable_data_ptr<scalar_t>() : nullptr, pairs, row_count, width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (want_values) {
      sum_runs<scalar_t>(values, pairs, coefficient, input);
    }
    if (want_bias) { // a bias is a column of weight that meets ones
      sum_runs<scalar_t>(bias, pairs, coefficient, at::ones({input.size(0), 1}, input.options()));
    }
  });
  return {rows, values, bias};
}

Tensor sum_rows_cuda(const Tensor& ids, const Tensor& coefficient, const Tensor& weight) {
  const int64_t queries = ids.size(0), width = weight.size(1), stride = weight.stride(0);
  const Tensor out = at::empty({queries, width}, coefficient.options());
  if (out.numel() == 0) {
    return out;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, weight.scalar_type(), "sum_rows_cuda", [&] {
    using opmath = at::opmath_type<scalar_t>;
    const scalar_t* table = weight.const_data_ptr<scalar_t>();
    // A row must end on a boundary too: the last load of a row takes all its N columns.
    dispatch_pack<scalar_t>(aligned(table, stride, sizeof(scalar_t)) && aligned(nullptr, width, sizeof(scalar_t)), [&](auto pack) {
      constexpr int N = decltype(pack)::value;
      const int64_t warps = std::clamp<int64_t>((width + kWarp * N - 1) / (kWarp * N), 1, kThreads / kWarp);
      sum_rows_kernel<scalar_t, N><<<grid_size(queries, 1), unsigned(warps * kWarp), 0, c10::cuda::getCurrentCUDAStream()>>>(
          out.mutable_data_ptr<opmath>(), ids.const_data_ptr<int64_t>(), coefficient.const_data_ptr<opmath>(), table, stride, weight.size(0), queries,
          ids.size(1), width);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  return out;
}

} // namespace xsoftmax
