#include "core/cuda_rows.cuh"
#include "core/optional.h"
#include "scores/gather_dot_cuda.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

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

// What the row-sparse gradient is made of, and where it goes. Positions are sorted by class: rows[i] is the class of position order[i].
template <typename T>
struct RowGradient {
  using opmath = at::opmath_type<T>;

  const int64_t* rows;
  const int64_t* order;
  int64_t row_count;
  Pairs pairs;
  const opmath* grad;
  int64_t grad_stride;
  const opmath* scale; // [Q], nullptr: ones
  const T* input;
  const opmath* shared_values;
  const opmath* shared_bias;
  int64_t width; // of the values; 0: not wanted
  T* values;
  T* bias; // nullptr: not wanted
  // The sums of runs of a class that go beyond a chunk: of chunk c in row 2 c where the class began before it, else in row 2 c + 1.
  opmath* part_values;
  opmath* part_bias;

  __device__ Term<opmath> term(int64_t position) const {
    if (position >= pairs.total) {
      return {pairs.queries + (position - pairs.total), opmath(1)};
    }
    const int64_t query = pairs.query_of(position);
    const opmath factor = scale == nullptr ? opmath(1) : scale[query];
    // Of an ignored query, 0 times what is not finite would not be 0.
    return {query, factor == opmath(0) ? opmath(0) : grad[pairs.address(query, position, grad_stride)] * factor};
  }
  __device__ bool joins(int64_t row) const { return row > 0 && row < row_count && rows[row] == rows[row - 1]; }
};

// A warp sums 32 N columns (blockIdx.y picks them) of a chunk of 32 positions, class by class in order: into the first row of each class, zeros into
// its other rows. Lanes look up what the positions add side by side; the loads of kAhead rows are under way at once.
template <typename T, int N>
__global__ void row_gradient_kernel(const __grid_constant__ RowGradient<T> g) {
  using opmath = at::opmath_type<T>;
  constexpr int kAhead = 4;
  const int64_t d = (int64_t(blockIdx.y) * kWarp + lane()) * N, chunks = (g.row_count + kWarp - 1) / kWarp;
  const bool mine = d < g.width, of_bias = g.bias != nullptr && blockIdx.y == 0 && lane() == 0;
  for (int64_t chunk = global_thread() / kWarp; chunk < chunks; chunk += grid_threads() / kWarp) {
    const int64_t begin = chunk * kWarp, at = begin + lane();
    const int members = g.row_count - begin < kWarp ? int(g.row_count - begin) : kWarp;
    const Term<opmath> term = lane() < members ? g.term(g.order[at]) : Term<opmath>{0, opmath(0)};
    const unsigned firsts = __ballot_sync(kAllLanes, lane() < members && !g.joins(at)); // which positions begin a class
    const bool goes_on = g.joins(begin + kWarp);
    int head = -1; // where the class began whose sum it is; before the chunk
    opmath sum[N] = {}, bias_sum = 0;
    const auto finish = [&](bool cut) { // cut: the class goes beyond the chunk
      if (head >= 0 && !cut) {
        if (mine) {
          store_pack(g.values + (begin + head) * g.width + d, sum);
        }
        if (of_bias) {
          g.bias[begin + head] = T(bias_sum);
        }
        return;
      }
      const int64_t part = 2 * chunk + (head >= 0 ? 1 : 0);
#pragma unroll
      for (int i = 0; mine && i < N; ++i) {
        g.part_values[part * g.width + d + i] = sum[i];
      }
      if (of_bias) {
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
        } else {
          const opmath zero[N] = {};
          if (mine) {
            store_pack(g.values + (begin + m) * g.width + d, zero);
          }
          if (of_bias) {
            g.bias[begin + m] = T(0);
          }
        }
        const bool shared = row[k] >= g.pairs.queries;
        if (of_bias) {
          bias_sum += shared ? g.shared_bias[row[k] - g.pairs.queries] : coefficient[k];
        }
        if (mine && shared) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sum[i] += g.shared_values[(row[k] - g.pairs.queries) * g.width + d + i];
          }
        } else if (mine && coefficient[k] != opmath(0)) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sum[i] += coefficient[k] * opmath(packs[k].values[i]);
          }
        }
      }
    }
    finish(goes_on);
  }
}

// A block a chunk at whose end a class goes on that began in it: what the chunks behind it have summed of the class is added, a warp a share of
// them, and the shares in order. blockIdx.y picks 32 columns; column `width` is that of the bias.
template <typename T>
__global__ void join_chunks_kernel(const __grid_constant__ RowGradient<T> g) {
  using opmath = at::opmath_type<T>;
  constexpr int kWarps = kThreads / kWarp;
  __shared__ opmath sums[kWarps][kWarp];
  const int64_t chunks = (g.row_count + kWarp - 1) / kWarp, d = int64_t(blockIdx.y) * kWarp + lane();
  const int warp = int(threadIdx.x) / kWarp;
  const bool of_values = d < g.width, of_bias = g.bias != nullptr && d == g.width;
  for (int64_t chunk = blockIdx.x; chunk + 1 < chunks; chunk += gridDim.x) {
    const int64_t begin = chunk * kWarp, last = begin + kWarp - 1;
    const int64_t id = g.rows[last];
    if (g.rows[last + 1] != id || (begin > 0 && g.rows[begin - 1] == id)) { // ends here, or began before
      continue;
    }
    int64_t low = chunk + 1, high = chunks; // the class is where chunk `low` begins, and not where `high` does
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (g.rows[middle * kWarp] == id ? low : high) = middle;
    }
    const int64_t count = high - chunk, first = chunk + count * warp / kWarps, end = chunk + count * (warp + 1) / kWarps;
    opmath sum = 0;
#pragma unroll 4
    for (int64_t c = first; c < end; ++c) {
      const int64_t part = 2 * c + (c == chunk ? 1 : 0);
      sum += of_values ? g.part_values[part * g.width + d] : of_bias ? g.part_bias[part] : opmath(0);
    }
    __syncthreads(); // the last sums may still be read
    sums[warp][lane()] = sum;
    __syncthreads();
    if (warp == 0) {
      opmath whole = 0;
      for (int w = 0; w < kWarps; ++w) {
        whole += sums[w][lane()];
      }
      const unsigned same = __ballot_sync(kAllLanes, g.rows[begin + lane()] == id);
      const int64_t head = begin + __ffs(int(same)) - 1;
      if (of_values) {
        g.values[head * g.width + d] = T(whole);
      }
      if (of_bias) {
        g.bias[head] = T(whole);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------------- hosts

Pairs device_pairs(const CudaPairs& pairs) {
  const bool ragged = pairs.offsets.defined();
  return {pairs.ids.const_data_ptr<int64_t>(), ragged ? pairs.offsets.const_data_ptr<int64_t>() : nullptr,
          ragged ? 0 : pairs.ids.size(1), pairs.queries, pairs.total()};
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

void product_out_cuda(at::Tensor out, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == out.scalar_type()) {
    at::mm_out(out, a, b);
  } else {
    at::mm_out(out, a, b, out.scalar_type());
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> row_gradient_cuda(const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale,
                                                                 const at::Tensor& input, const CudaPairs& pairs, const at::Tensor& shared_ids,
                                                                 const at::Tensor& shared_values, const at::Tensor& shared_bias,
                                                                 bool want_values, bool want_bias) {
  const auto [rows, order] = at::cat({pairs.ids.flatten(), shared_ids}).sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const int64_t row_count = rows.numel(), width = want_values ? input.size(1) : 0, chunks = (row_count + kWarp - 1) / kWarp;
  const at::Tensor values = at::empty({want_values ? row_count : 0, input.size(1)}, input.options());
  const at::Tensor bias = at::empty({want_bias ? row_count : 0}, input.options());
  if (values.numel() == 0 && bias.numel() == 0) {
    return {rows, values, bias};
  }
  const at::Tensor part_values = at::empty({2 * chunks, width}, grad.options()), part_bias = at::empty({2 * chunks}, grad.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "row_gradient_cuda", [&] {
    using opmath = at::opmath_type<scalar_t>;
    const auto pointer = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<opmath>() : nullptr; };
    const RowGradient<scalar_t> gradient{rows.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>(), row_count, device_pairs(pairs),
                                         grad.const_data_ptr<opmath>(), grad_stride, pointer(scale), input.const_data_ptr<scalar_t>(),
                                         pointer(shared_values), pointer(shared_bias), width, values.mutable_data_ptr<scalar_t>(),
                                         want_bias ? bias.mutable_data_ptr<scalar_t>() : nullptr, part_values.mutable_data_ptr<opmath>(),
                                         part_bias.mutable_data_ptr<opmath>()};
    const bool wide = aligned(gradient.input, width, sizeof(scalar_t)) && aligned(gradient.values, width, sizeof(scalar_t));
    const auto stream = c10::cuda::getCurrentCUDAStream();
    dispatch_pack<scalar_t>(wide, [&](auto pack) {
      constexpr int N = decltype(pack)::value;
      const dim3 grid(grid_size(chunks, kThreads / kWarp), unsigned(std::max<int64_t>(1, (width + kWarp * N - 1) / (kWarp * N))));
      row_gradient_kernel<scalar_t, N><<<grid, kThreads, 0, stream>>>(gradient);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
    if (chunks > 1) {
      const dim3 grid(grid_size(chunks - 1, 1), unsigned((width + (want_bias ? 1 : 0) + kWarp - 1) / kWarp));
      join_chunks_kernel<scalar_t><<<grid, kThreads, 0, stream>>>(gradient);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  });
  return {rows, values, bias};
}

} // namespace xsoftmax
