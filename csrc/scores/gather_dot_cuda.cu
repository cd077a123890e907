#include "core/cuda_rows.cuh"
#include "core/optional.h"
#include "scores/gather_dot_cuda.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

namespace xsoftmax {
namespace {

using namespace cuda;

// ---------------------------------------------------------------------------------------------------------------- device helpers

// The device's view of CudaPairs.
struct Pairs {
  const int64_t* ids;
  const int64_t* offsets; // nullptr: `width` pairs a query
  int64_t width;
  int64_t queries;
  int64_t total;

  __device__ int64_t begin(int64_t query) const { return offsets ? offsets[query] : query * width; }
  __device__ int64_t end(int64_t query) const { return offsets ? offsets[query + 1] : (query + 1) * width; }

  // The query that a position belongs to: the last one that begins at or before it (queries without pairs begin where the next does).
  __device__ int64_t query_of(int64_t position) const {
    if (offsets == nullptr) {
      return position / width;
    }
    int64_t low = 0, high = queries; // offsets[low] <= position < offsets[high]
    CUDA_KERNEL_ASSERT(offsets[0] == 0 && offsets[queries] == total);
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (offsets[middle] <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Where the score of a pair lies in a tensor addressed by `stride` (gather_dot_cuda.h).
  __device__ int64_t address(int64_t query, int64_t position, int64_t stride) const {
    return stride < 0 ? position : query * stride + (position - begin(query));
  }
};

// ----------------------------------------------------------------------------------------------------------------------- kernels

// A warp a pair.
template <typename T, int N>
__global__ void pair_scores_kernel(at::opmath_type<T>* out, int64_t out_stride, const T* input, const T* weight, int64_t weight_stride,
                                   const T* bias, Pairs pairs, int64_t width, int64_t num_classes) {
  using opmath = at::opmath_type<T>;
  for (int64_t position = global_thread() / kWarp; position < pairs.total; position += grid_threads() / kWarp) {
    const int64_t query = pairs.query_of(position), id = pairs.ids[position];
    CUDA_KERNEL_ASSERT(id >= 0 && id < num_classes);
    const opmath score = dot_row<T, N>(input + query * width, weight + id * weight_stride, width);
    if (lane() == 0) {
      out[pairs.address(query, position, out_stride)] = score + (bias == nullptr ? opmath(0) : opmath(bias[id]));
    }
  }
}

// A block a query; a thread N columns, over all pairs of the query in order.
template <typename T, int N>
__global__ void add_input_grad_kernel(at::opmath_type<T>* grad_input, const at::opmath_type<T>* grad, int64_t grad_stride,
                                      const T* weight, int64_t weight_stride, Pairs pairs, int64_t width, int64_t num_classes) {
  using opmath = at::opmath_type<T>;
  for (int64_t query = blockIdx.x; query < pairs.queries; query += gridDim.x) {
    const int64_t begin = pairs.begin(query), end = pairs.end(query);
    CUDA_KERNEL_ASSERT(0 <= begin && begin <= end && end <= pairs.total);
    const opmath* coefficient = grad + pairs.address(query, begin, grad_stride);
    for (int64_t d = int64_t(threadIdx.x) * N; d < width; d += int64_t(blockDim.x) * N) {
      opmath sum[N] = {};
#pragma unroll 4
      for (int64_t j = 0; j < end - begin; ++j) {
        const int64_t id = pairs.ids[begin + j];
        CUDA_KERNEL_ASSERT(id >= 0 && id < num_classes);
        const opmath c = coefficient[j];
        if (c != opmath(0)) { // as on the CPU: a row that counts for nothing is not read
          add_scaled(sum, c, weight + id * weight_stride + d);
        }
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        grad_input[query * width + d + i] += sum[i];
      }
    }
  }
}

// What a position adds to the row of its class: `coefficient` times row `row` of input, or row `row - queries` of the shared values.
template <typename opmath>
struct Term {
  int64_t row;
  opmath coefficient;
};

template <typename opmath>
__device__ inline Term<opmath> term_of(const Pairs& pairs, const opmath* grad, int64_t grad_stride, int64_t position) {
  if (position >= pairs.total) {
    return {pairs.queries + (position - pairs.total), opmath(1)};
  }
  const int64_t query = pairs.query_of(position);
  return {query, grad[pairs.address(query, position, grad_stride)]};
}

// A warp sums 32 N columns (blockIdx.y picks them) of one class. Rows are sorted and `order` names their positions, so the class that
// begins at row `first` owns the rows behind it up to the next class. Lanes look up 32 terms at a time, then all add them in order.
template <typename T, int N>
__device__ inline void sum_class(T* values, const int64_t* rows, const int64_t* order, int64_t row_count, int64_t first,
                                 const Pairs& pairs, const at::opmath_type<T>* grad, int64_t grad_stride, const T* input,
                                 const at::opmath_type<T>* shared_values, int64_t width) {
  using opmath = at::opmath_type<T>;
  const int64_t d = (int64_t(blockIdx.y) * kWarp + lane()) * N;
  opmath sum[N] = {};
  for (int64_t base = first;; base += kWarp) {
    const int64_t mine = base + lane();
    const bool member = mine < row_count && rows[mine] == rows[first];
    const int members = __popc(__ballot_sync(kAllLanes, member)); // the first `members` lanes: rows are sorted
    const Term<opmath> term = member ? term_of(pairs, grad, grad_stride, order[mine]) : Term<opmath>{0, opmath(0)};
#pragma unroll 4
    for (int m = 0; m < members; ++m) {
      const int64_t row = __shfl_sync(kAllLanes, term.row, m);
      const opmath coefficient = __shfl_sync(kAllLanes, term.coefficient, m);
      if (d < width && coefficient != opmath(0)) {
        if (row < pairs.queries) {
          add_scaled(sum, coefficient, input + row * width + d);
        } else {
          add_scaled(sum, coefficient, shared_values + (row - pairs.queries) * width + d);
        }
      }
    }
    if (members < kWarp) {
      break;
    }
  }
  if (d < width) {
    store_pack(values + first * width + d, sum);
  }
}

template <typename T, int N>
__global__ void row_gradient_kernel(T* values, const int64_t* rows, const int64_t* order, int64_t row_count, Pairs pairs,
                                    const at::opmath_type<T>* grad, int64_t grad_stride, const T* input,
                                    const at::opmath_type<T>* shared_values, int64_t width) {
  using opmath = at::opmath_type<T>;
  for (int64_t row = global_thread() / kWarp; row < row_count; row += grid_threads() / kWarp) {
    if (row == 0 || rows[row] != rows[row - 1]) {
      sum_class<T, N>(values, rows, order, row_count, row, pairs, grad, grad_stride, input, shared_values, width);
      continue;
    }
    const int64_t d = (int64_t(blockIdx.y) * kWarp + lane()) * N;
    if (d < width) {
      const opmath zero[N] = {};
      store_pack(values + row * width + d, zero);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------------- hosts

Pairs device_pairs(const CudaPairs& pairs) {
  const bool ragged = pairs.offsets.defined();
  return {pairs.ids.const_data_ptr<int64_t>(), ragged ? pairs.offsets.const_data_ptr<int64_t>() : nullptr,
          ragged ? 0 : pairs.ids.size(1), pairs.queries, pairs.total()};
}

template <typename T>
void launch_row_gradient(const at::Tensor& values, const at::Tensor& rows, const at::Tensor& order, const CudaPairs& pairs,
                         const at::Tensor& grad, int64_t grad_stride, const at::Tensor& input, const at::Tensor& shared_values) {
  using opmath = at::opmath_type<T>;
  const int64_t row_count = rows.numel(), width = input.size(1);
  const T* in = input.const_data_ptr<T>();
  const opmath* shared = shared_values.defined() ? shared_values.const_data_ptr<opmath>() : nullptr;
  T* out = values.mutable_data_ptr<T>();
  // A load of shared values takes as many elements as one of T, of a wider type: up to 32 bytes.
  const bool wide = aligned(in, width, sizeof(T)) && aligned(out, width, sizeof(T)) &&
      reinterpret_cast<uintptr_t>(shared) % (sizeof(opmath) * (16 / sizeof(T))) == 0;
  dispatch_pack<T>(wide, [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    const dim3 grid(grid_size(row_count, kThreads / kWarp), unsigned((width + kWarp * N - 1) / (kWarp * N)));
    row_gradient_kernel<T, N><<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        out, rows.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>(), row_count, device_pairs(pairs),
        grad.const_data_ptr<opmath>(), grad_stride, in, shared, width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void sum_rows(const at::Tensor& values, const at::Tensor& rows, const at::Tensor& order, const CudaPairs& pairs, const at::Tensor& grad,
              int64_t grad_stride, const at::Tensor& input, const at::Tensor& shared_values) {
  if (values.numel() == 0) {
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "row_gradient_cuda", [&] {
    launch_row_gradient<scalar_t>(values, rows, order, pairs, grad, grad_stride, input, shared_values);
  });
}

} // namespace

void pair_scores_cuda(const at::Tensor& out, int64_t out_stride, const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const CudaPairs& pairs) {
  if (pairs.total() == 0) {
    return;
  }
  const at::Tensor bias_row = given(bias) ? bias->contiguous() : at::Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "pair_scores_cuda", [&] {
    using opmath = at::opmath_type<scalar_t>;
    const scalar_t *in = input.const_data_ptr<scalar_t>(), *table = weight.const_data_ptr<scalar_t>();
    const int64_t width = input.size(1), stride = weight.stride(0);
    const bool wide = aligned(in, width, sizeof(scalar_t)) && aligned(table, stride, sizeof(scalar_t));
    dispatch_pack<scalar_t>(wide, [&](auto pack) {
      constexpr int N = decltype(pack)::value;
      const unsigned grid = grid_size(pairs.total(), kThreads / kWarp);
      pair_scores_kernel<scalar_t, N><<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          out.mutable_data_ptr<opmath>(), out_stride, in, table, stride,
          bias_row.defined() ? bias_row.const_data_ptr<scalar_t>() : nullptr, device_pairs(pairs), width, weight.size(0));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

void add_pair_input_grad_cuda(const at::Tensor& grad_input, const at::Tensor& grad, int64_t grad_stride, const at::Tensor& weight,
                              const CudaPairs& pairs) {
  if (pairs.total() == 0 || grad_input.numel() == 0) {
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, weight.scalar_type(), "add_pair_input_grad_cuda", [&] {
    using opmath = at::opmath_type<scalar_t>;
    const scalar_t* table = weight.const_data_ptr<scalar_t>();
    const int64_t width = weight.size(1), stride = weight.stride(0);
    // A row of the table must end on a boundary too: the last load of a row takes all its N columns.
    const bool wide = aligned(table, stride, sizeof(scalar_t)) && aligned(nullptr, width, sizeof(scalar_t));
    dispatch_pack<scalar_t>(wide, [&](auto pack) {
      constexpr int N = decltype(pack)::value;
      const int64_t warps = std::clamp<int64_t>((width + kWarp * N - 1) / (kWarp * N), 1, kThreads / kWarp);
      add_input_grad_kernel<scalar_t, N><<<grid_size(pairs.queries, 1), unsigned(warps * kWarp), 0, c10::cuda::getCurrentCUDAStream()>>>(
          grad_input.mutable_data_ptr<opmath>(), grad.const_data_ptr<opmath>(), grad_stride, table, stride, device_pairs(pairs), width,
          weight.size(0));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> row_gradient_cuda(const at::Tensor& grad, int64_t grad_stride, const at::Tensor& input,
                                                                 const CudaPairs& pairs, const at::Tensor& shared_ids,
                                                                 const at::Tensor& shared_values, const at::Tensor& shared_bias,
                                                                 bool want_values, bool want_bias) {
  const auto [rows, order] = at::cat({pairs.ids.flatten(), shared_ids}).sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const int64_t row_count = rows.numel();
  const at::Tensor values = at::empty({want_values ? row_count : 0, input.size(1)}, input.options());
  const at::Tensor bias = at::empty({want_bias ? row_count : 0}, input.options());
  if (want_values) {
    sum_rows(values, rows, order, pairs, grad, grad_stride, input, shared_values);
  }
  if (want_bias) { // a bias is a column of weight that meets ones
    const at::Tensor ones = at::ones({input.size(0), 1}, input.options());
    sum_rows(bias, rows, order, pairs, grad, grad_stride, ones, shared_bias);
  }
  return {rows, values, bias};
}

} // namespace xsoftmax
