#pragma once

#include "core/cuda_rows.cuh"
#include "core/cuda_sorted_ids.cuh"
#include "core/dtypes.h"
#include "core/sorted_ids.h"
#include "optim/owed_table.h"
#include "optim/random_rounding.h"
#include "optim/row_arithmetic.h"
#include "optim/row_update.h"
#include "optim/row_updates.h"
#include "scores/row_terms.h"

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <tuple>
#include <type_traits>

// What the CUDA kernels of the row-wise optimizers share: a row-sparse gradient whose equal rows are summed where a row is updated, and what rows
// owe. Nothing is read on the host: the number of steps, what follows from it, and whether all rows must be made up first are the device's.
//
// An optimizer is a rule, a struct that kernels take by value:
//     Scalar                              of the parameter
//     wide                                whether its rows may be read 16 bytes at a time (those of float32 state beside a 16-bit parameter: 32)
//     Old read(row)                       what finish() overwrites
//     Row begin<kAlone>(row, old)         the coefficients; kAlone: called by a thread, else by whole warps
//     Elements<N> fetch<N>(row, d)        N elements of the row from d on, and of its state: asked for before their coefficients are worked out
//     kOneSum; squares, with_squares      of one that needs the mean of squares before it updates (row-wise Adagrad and Adam)
//     update(Row, Elements, row, d, g)    those elements, by their summed gradient
//     finish(Row, row)                    by one thread
//     make_up<N, kAlone>(due, row, width, thread)   what a row owes
//
// Bytes that a step reads and writes at least: R rows of values and, of D distinct rows, param and state, each once in and once out. That is what
// row_update_kernel moves, and 16 bytes a row for its place, as long as a row is held in registers (kHeld): up to 4,096 columns, 2,048 of float64 or
// of rows that do not begin on 16 bytes. The sums of chunks, of rows that stand more than 32 times, are a 32nd of their values, out and in. Gradients
// of the losses come sorted (core/sorted_ids.h), others are sorted first.

namespace xsoftmax::cuda {

using namespace on_device;

/// A tensor whose row r begins at data + r * stride.
template <typename T>
struct DeviceRows {
  T* data = nullptr;
  int64_t stride = 0;

#ifdef __CUDACC__
  __device__ T* operator[](int64_t row) const { return data + row * stride; }
#endif
  /// Whether N elements of each row, from a multiple of N on, are one load.
  bool packs(int64_t n) const { return reinterpret_cast<uintptr_t>(data) % (sizeof(T) * n) == 0 && stride % n == 0; }
};

template <typename T>
DeviceRows<T> device_rows(const at::Tensor& tensor) {
  return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.stride(0)};
}

/// What all rows need before a step.
enum class Due { Nothing, Flush, Rebase };

/// Calls function(T{}, S{}) with the types of a parameter and of its state, which is bfloat16 or what the parameter is calculated in.
template <typename Function>
void dispatch_rows(const at::Tensor& param, const at::Tensor& state, const Function& function) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, param.scalar_type(), "row_optimizer_cuda", [&] {
    if constexpr (!std::is_same_v<scalar_t, double>) {
      if (state.scalar_type() == at::kBFloat16) {
        function(scalar_t{}, at::BFloat16{});
        return;
      }
    }
    function(scalar_t{}, at::opmath_type<scalar_t>{});
  });
}

/// The steps that rows owe, and those to come.
struct Owing {
  int64_t* step;
  double* owed;
  int64_t capacity;
  double next[3];  ///< the coefficients of the steps to come
  bool flush;      ///< no step is taken: what is owed is made up
  double* rounding; ///< whether what is owed is made up with stochastic rounding; none: it is not (optim/owed_table.h)
  bool rounds;      ///< the same of the steps to come

#ifdef __CUDACC__
  __device__ bool rounded() const { return rounding != nullptr && *rounding != 0; }
  __device__ bool changed() const { return owed[1] != next[0] || owed[2] != next[1] || owed[3] != next[2]; }

  __device__ Due due() const {
    const int64_t taken = *step, settled = int64_t(owed[0]);
    CUDA_KERNEL_ASSERT(taken >= 0 && taken < INT32_MAX && settled >= 0 && settled <= taken && taken - settled <= capacity);
    if (!flush && changed()) {
      return taken > 0 ? Due::Rebase : Due::Nothing;
    }
    return taken - settled >= (flush ? 1 : capacity) ? Due::Flush : Due::Nothing;
  }

  /// Whether the step finds nothing owed: make_up_kernel has seen to it, or no step was taken under these coefficients.
  __device__ bool settles() const { return changed() || due() != Due::Nothing; }

  /// Of a row before the step.
  __device__ OwedDebt debt(int64_t s, double ratio) const { return settles() ? OwedDebt{0, 1} : owed_table(owed, capacity, *step, ratio)(s); }
#endif
};

inline Owing owing(const at::Tensor& step, const at::Tensor& owed) {
  return {step.mutable_data_ptr<int64_t>(),
          owed.mutable_data_ptr<double>(),
          owed_capacity(owed.numel()),
          {0, 0, 0},
          true,
          owed_rounding(owed.mutable_data_ptr<double>(), owed.numel()),
          false};
}
inline Owing owing(const at::Tensor& step, const at::Tensor& owed, double a, double b, double c, bool rounds) {
  return {step.mutable_data_ptr<int64_t>(),
          owed.mutable_data_ptr<double>(),
          owed_capacity(owed.numel()),
          {a, b, c},
          false,
          owed_rounding(owed.mutable_data_ptr<double>(), owed.numel()),
          rounds};
}

/// A row-sparse gradient, sorted by row: the i-th of its rows stands at order[i], or at i where there is no order, and counts coefficients[i] times, or once.
template <typename T>
struct SortedGradient {
  const T* values;
  const int64_t* rows;
  IntegersView order;
  const at::opmath_type<T>* coefficients;
  at::opmath_type<T>* chunks; ///< [count / 32, width]: the sums of chunk_sums_kernel
  int64_t count, width;
  int64_t sources; ///< rows of values

#ifdef __CUDACC__
  __device__ int64_t place(int64_t i) const {
    const int64_t at = order.empty() ? i : order[i];
    CUDA_KERNEL_ASSERT(coefficients == nullptr || (at >= 0 && at < sources));
    return at;
  }
  __device__ at::opmath_type<T> coefficient(int64_t i) const { return coefficients == nullptr ? at::opmath_type<T>(1) : coefficients[i]; }
#endif
};

#ifdef __CUDACC__
/// Of a block that works on a row.
constexpr int kMostThreads = 512;

/// Packs of N columns that a thread holds of a row.
template <int N>
constexpr int kHeld = N == 1 ? 4 : (N == 8 ? 1 : 2);

/// N elements from d on as T holds them, rounded by chance; in a type that is no 16-bit one they stay. `bits`: table_bits or one of its kind.
template <typename T, int N, typename opmath, typename Bits>
__device__ inline void round_pack(opmath (&x)[N], const RowRounding& random, int64_t d, const Bits& bits) {
  if constexpr (!std::is_same_v<T, opmath>) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = round_at_random(x[i], bits(random, uint32_t(d + i) * kElement), std::is_same_v<T, at::BFloat16>);
    }
  }
}
struct TableBits {
  __device__ uint32_t operator()(const RowRounding& random, uint32_t element) const { return table_bits(random, element); }
};
struct StateBits {
  __device__ uint32_t operator()(const RowRounding& random, uint32_t element) const { return state_bits(random, element); }
};
struct SecondStateBits {
  __device__ uint32_t operator()(const RowRounding& random, uint32_t element) const { return second_state_bits(random, element); }
};

/// The random numbers of a row, where its types ask for any.
template <typename T, typename S>
__device__ inline RowRounding rounding_of(int64_t step, int64_t row, bool table) {
  constexpr bool low_state = !std::is_same_v<S, at::opmath_type<T>>, low_table = !std::is_same_v<T, at::opmath_type<T>>;
  return low_state || (low_table && table) ? row_rounding(step_rounding(step, table), row) : RowRounding{};
}

/// base(i)^exponent(i): the lanes of a warp share the work.
template <bool kAlone, int P, typename Base, typename Exponent>
__device__ inline void powers(double (&result)[P], const Base& base, const Exponent& exponent) {
  if constexpr (kAlone) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      result[i] = integer_power(base(i), exponent(i));
    }
  } else {
    const double mine = integer_power(base(lane()), exponent(lane()));
#pragma unroll
    for (int i = 0; i < P; ++i) {
      result[i] = __shfl_sync(kAllLanes, mine, i);
    }
  }
}

template <typename T>
__device__ inline bool begins(const SortedGradient<T>& g, int64_t i) {
  CUDA_KERNEL_ASSERT(i == 0 || g.rows[i - 1] <= g.rows[i]);
  return i == 0 || g.rows[i] != g.rows[i - 1];
}

/// Whether a chunk of 32 sorted rows is of one that has begun before it: these are summed beforehand, so that no row is the work of one warp.
template <typename T>
__device__ inline bool whole_chunk(const SortedGradient<T>& g, int64_t chunk) {
  const int64_t begin = chunk * kWarp, end = begin + kWarp;
  return chunk > 0 && end <= g.count && g.rows[begin - 1] == g.rows[end - 1];
}

/// A coefficient of 0 adds nothing, whatever the row holds.
template <int K, int N, typename opmath, typename T>
__device__ inline void add_row(opmath (&sum)[K][N], opmath coefficient, const T* row, int64_t width, int64_t d, int64_t stride) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (d + k * stride < width && coefficient != opmath(0)) {
      add_scaled(sum[k], coefficient, row + d + k * stride);
    }
  }
}

/// K packs of N columns, `stride` apart from d on, of the sum of the row that begins at `first`. By whole warps, in a fixed order.
template <int K, int N, typename T>
__device__ inline void sum_row(at::opmath_type<T> (&sum)[K][N], const SortedGradient<T>& g, int64_t first, int64_t d, int64_t stride) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      sum[k][n] = 0;
    }
  }
  const int64_t row = g.rows[first];
  if (first + 1 == g.count || g.rows[first + 1] != row) {
    add_row(sum, g.coefficient(first), g.values + g.place(first) * g.width, g.width, d, stride);
    return;
  }
  for (int64_t begin = first; begin < g.count;) {
    int64_t chunk = begin / kWarp;
    if (begin % kWarp == 0 && begin > first) {
      const int64_t mine = chunk + lane();
      const unsigned whole = __ballot_sync(kAllLanes, mine < g.count / kWarp && g.rows[mine * kWarp + kWarp - 1] == row);
      const int chunks = __popc(whole); // the first of the lanes: rows are sorted
#pragma unroll 2
      for (int c = 0; c < chunks; ++c) {
        add_row(sum, at::opmath_type<T>(1), g.chunks + (chunk + c) * g.width, g.width, d, stride);
      }
      chunk += chunks;
      begin = chunk * kWarp;
      if (chunks == kWarp) {
        continue;
      }
    }
    const int64_t mine = begin + lane(), end = (chunk + 1) * kWarp;
    const bool member = mine < end && mine < g.count && g.rows[mine] == row;
    const int members = __popc(__ballot_sync(kAllLanes, member)); // the first of the lanes
    const int64_t place = member ? g.place(mine) : 0;
    const at::opmath_type<T> coefficient = member ? g.coefficient(mine) : at::opmath_type<T>(0);
#pragma unroll 2
    for (int m = 0; m < members; ++m) {
      const at::opmath_type<T> of_member = __shfl_sync(kAllLanes, coefficient, m);
      add_row(sum, of_member, g.values + __shfl_sync(kAllLanes, place, m) * g.width, g.width, d, stride);
    }
    if (begin + members < end) {
      return;
    }
    begin = end;
  }
}

/// The same by one thread, of rows that are a number each.
template <typename T>
__device__ inline at::opmath_type<T> sum_numbers(const SortedGradient<T>& g, int64_t first) {
  const int64_t row = g.rows[first];
  at::opmath_type<T> sum = 0;
  for (int64_t i = first; i < g.count && g.rows[i] == row;) {
    if (i % kWarp == 0 && whole_chunk(g, i / kWarp)) {
      sum += g.chunks[i / kWarp];
      i += kWarp;
    } else {
      const auto coefficient = g.coefficient(i);
      sum += coefficient == at::opmath_type<T>(0) ? coefficient : coefficient * at::opmath_type<T>(g.values[g.place(i)]);
      ++i;
    }
  }
  return sum;
}

/// A warp a chunk that whole_chunk names, and 32 N of its columns (blockIdx.y picks them).
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, 2) chunk_sums_kernel(SortedGradient<T> g) {
  for (int64_t chunk = global_thread() / kWarp; chunk < g.count / kWarp; chunk += grid_threads() / kWarp) {
    if (!whole_chunk(g, chunk)) {
      continue;
    }
    const int64_t place = g.place(chunk * kWarp + lane()), d = (int64_t(blockIdx.y) * kWarp + lane()) * N;
    const at::opmath_type<T> coefficient = g.coefficient(chunk * kWarp + lane());
    at::opmath_type<T> sum[1][N] = {};
#pragma unroll 4
    for (int m = 0; m < kWarp; ++m) {
      const at::opmath_type<T> of_member = __shfl_sync(kAllLanes, coefficient, m);
      add_row(sum, of_member, g.values + __shfl_sync(kAllLanes, place, m) * g.width, g.width, d, 0);
    }
    if (d < g.width) {
      store_pack(g.chunks + chunk * g.width + d, sum[0]);
    }
  }
}

/// Whether any thread of those who work on a row says so: a warp, or a block of several.
__device__ inline bool team_any(bool mine) { return blockDim.x == kWarp ? __any_sync(kAllLanes, mine) != 0 : __syncthreads_or(mine) != 0; }

template <typename T>
__device__ inline T team_sum(T mine) {
  __shared__ alignas(8) unsigned char storage[kWarp * sizeof(T)];
  return blockDim.x == kWarp ? warp_sum(mine) : block_sum(mine, reinterpret_cast<T*>(storage));
}

/// A warp a row (threadIdx.y picks it), or a block for long ones. The first of equal rows sums them; a sum of zeros touches nothing. kPieces: of
/// rows that a block does not hold, which it reads once to find that they are not zero, and once more.
template <typename Rule, int N, bool kPieces>
__global__ void __launch_bounds__(kMostThreads, 1) row_update_kernel(Rule rule, SortedGradient<typename Rule::Scalar> g) {
  using M = at::opmath_type<typename Rule::Scalar>;
  constexpr int K = kPieces ? 1 : kHeld<N>;
  const int64_t d = int64_t(threadIdx.x) * N, stride = int64_t(blockDim.x) * N, piece = stride * K;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; i < g.count; i += int64_t(gridDim.x) * blockDim.y) {
    if (!begins(g, i)) {
      continue;
    }
    const int64_t row = g.rows[i];
    const auto old = rule.read(row); // before the barrier behind which a thread overwrites it
    M sum[K][N];
    typename Rule::template Elements<N> held[K];
    const auto fetch = [&](int64_t from) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (from + k * stride < g.width) {
          held[k] = rule.template fetch<N>(row, from + k * stride);
        }
      }
    };
    if constexpr (!kPieces) {
      fetch(d);
    }
    bool any = false;
    const auto gather = [&](int64_t from) {
      sum_row(sum, g, i, from + d, stride);
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          any |= sum[k][n] != 0;
        }
      }
    };
    for (int64_t from = 0; from == 0 || (kPieces && from < g.width); from += piece) {
      gather(from);
    }
    if (!team_any(any)) {
      continue;
    }
    auto of_row = rule.template begin<false>(row, old);
    if constexpr (Rule::kOneSum) {
      M squares = 0;
      for (int64_t from = 0; from == 0 || (kPieces && from < g.width); from += piece) {
        if constexpr (kPieces) {
          gather(from);
          fetch(from + d);
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (from + d + k * stride < g.width) {
            squares += rule.squares(held[k], sum[k]);
          }
        }
      }
      rule.with_squares(of_row, team_sum(squares) / M(g.width));
    }
    for (int64_t from = 0; from == 0 || (kPieces && from < g.width); from += piece) {
      if constexpr (kPieces) {
        gather(from);
        fetch(from + d);
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (from + d + k * stride < g.width) {
          rule.update(of_row, held[k], row, from + d + k * stride, sum[k]);
        }
      }
    }
    if (threadIdx.x == 0) {
      rule.finish(of_row, row);
    }
  }
}

/// A thread a row, of one number.
template <typename Rule>
__global__ void __launch_bounds__(kThreads, 2) number_update_kernel(Rule rule, SortedGradient<typename Rule::Scalar> g) {
  using M = at::opmath_type<typename Rule::Scalar>;
  for (int64_t i = global_thread(); i < g.count; i += grid_threads()) {
    if (!begins(g, i)) {
      continue;
    }
    const int64_t row = g.rows[i];
    const M sum[1] = {sum_numbers(g, i)};
    if (sum[0] == 0) {
      continue;
    }
    auto of_row = rule.template begin<true>(row, rule.read(row));
    const auto held = rule.template fetch<1>(row, 0);
    if constexpr (Rule::kOneSum) {
      rule.with_squares(of_row, rule.squares(held, sum));
    }
    rule.update(of_row, held, row, 0, sum);
    rule.finish(of_row, row);
  }
}

/// Brings all rows up to date, where that is due; else all threads leave at once. A warp a row, or a thread where rows are a number each. Bytes at
/// least: param in and out and the state that decides its movement in, of rows that owe; where options have changed, that state out as well.
template <typename Rule, int N, bool kAlone>
__global__ void __launch_bounds__(kThreads, 2) make_up_kernel(Rule rule, int64_t rows, int64_t width) {
  const Due due = rule.owing.due();
  if (due == Due::Nothing) {
    return;
  }
  constexpr int kTeam = kAlone ? 1 : kWarp;
  for (int64_t row = global_thread() / kTeam; row < rows; row += grid_threads() / kTeam) {
    rule.template make_up<N, kAlone>(due, row, width, kAlone ? 0 : lane());
  }
}

constexpr int kAdvanceThreads = 256;

/// One block: the step is taken, and all that rows owe by it is in the table. `rate`: of step t, what rows that owe it move by; `of_step`: its decay.
/// always: the step is owed also where nothing was before.
template <typename Rate>
__global__ void __launch_bounds__(kAdvanceThreads) advance_kernel(Owing owing, Rate rate, double ratio, StepDecay of_step, bool always) {
  const int64_t taken = *owing.step, settled = int64_t(owing.owed[0]);
  const bool settles = owing.settles();
  const bool owes = always || (!settles && taken > settled);
  __syncthreads(); // before any thread writes
  double* const header = owing.owed;
  if (threadIdx.x == 0) {
    *owing.step = taken + 1;
    if (owing.rounding != nullptr) {
      *owing.rounding = double(owing.rounds);
    }
    if (settles || !owes) {
      header[0] = double(owes ? taken : taken + 1);
      header[1] = owing.next[0];
      header[2] = owing.next[1];
      header[3] = owing.next[2];
      header[OwedTable::kHeader] = header[OwedTable::kHeader + owing.capacity + 1] = 0;
    }
  }
  __syncthreads();
  if (!owes) {
    return;
  }
  const OwedTable table = owed_table(owing.owed, owing.capacity, taken, ratio);
  const double log_decay = of_step.log(), decay = std::exp(log_decay), moved = rate(taken + 1);
  for (int64_t i = table.first_moved() + threadIdx.x; i <= table.count; i += blockDim.x) {
    table.move(i, decay, moved, integer_power(ratio, table.count + 1 - i));
  }
  if (threadIdx.x == 0) {
    table.movement[table.count + 1] = 0;
    table.log_decay[table.count + 1] = table.log_decay[table.count] + log_decay;
  }
}

/// One thread: all rows are made up.
static __global__ void settle_kernel(Owing owing) {
  owing.owed[0] = double(*owing.step);
  owing.owed[OwedTable::kHeader] = owing.owed[OwedTable::kHeader + owing.capacity + 1] = 0;
}

// ------------------------------------------------------------------------------------------------------------------------- hosts

/// A row-sparse gradient: values [R, D] or [R] for rows [R]; or its terms (scores/row_terms.h), whose rows never fall.
struct GradientOfRows {
  at::Tensor rows, values;
  at::Tensor sources = {}, coefficients = {}; ///< of terms, whose input are the values

  GradientOfRows(const at::Tensor& rows, const at::Tensor& values) : rows(rows), values(values) {}
  explicit GradientOfRows(const RowTerms& terms) : rows(terms.rows), values(terms.input), sources(terms.sources), coefficients(terms.coefficients) {}

  /// The gradient that a descent follows under "maximize".
  GradientOfRows negated() const {
    GradientOfRows result = *this;
    (coefficients.defined() ? result.coefficients : result.values) = (coefficients.defined() ? coefficients : values).neg();
    return result;
  }
};

/// Whether kernels may take terms as they are.
inline bool takes_terms(const RowTerms& terms, int64_t num_rows) {
  return are_sorted_ids(terms.rows, num_rows) && terms.sources.is_contiguous() && terms.coefficients.is_contiguous();
}

/// The gradient, sorted, with what it points to.
template <typename T>
struct GradientOnDevice {
  at::Tensor values, rows, order, coefficients, chunks;
  SortedGradient<T> view;

  GradientOnDevice(const GradientOfRows& gradient, int64_t num_rows) : values(gradient.values.contiguous()), coefficients(gradient.coefficients) {
    const at::Tensor& ids = gradient.rows;
    if (gradient.sources.defined()) {
      rows = ids;
      order = gradient.sources;
    } else if (are_sorted_ids(ids, num_rows)) {
      rows = ids;
    } else {
      const SortedIds sorted(ids, num_rows - 1);
      rows = sorted.ids();
      order = sorted.order;
    }
    const int64_t count = rows.numel(), width = values.dim() == 2 ? values.size(1) : 1;
    chunks = at::empty({count / kWarp, width}, values.options().dtype(opmath_dtype(values.scalar_type())));
    view = {values.const_data_ptr<T>(),
            rows.const_data_ptr<int64_t>(),
            IntegersView(order),
            coefficients.defined() ? coefficients.const_data_ptr<at::opmath_type<T>>() : nullptr,
            chunks.mutable_data_ptr<at::opmath_type<T>>(),
            count,
            width,
            values.size(0)};
  }
  bool wide() const {
    constexpr int64_t kPack = 16 / sizeof(T);
    return DeviceRows<const T>{view.values, view.width}.packs(kPack) && DeviceRows<const at::opmath_type<T>>{view.chunks, view.width}.packs(kPack);
  }
  template <int N>
  void sum_chunks() const {
    if (view.count / kWarp > 1) {
      const dim3 grid(grid_size(view.count / kWarp, kThreads / kWarp), unsigned((view.width + kWarp * N - 1) / (kWarp * N)));
      chunk_sums_kernel<T, N><<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(view);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }
};

template <typename Rule>
void update_rows(const Rule& rule, const GradientOfRows& given_gradient, int64_t num_rows) {
  using T = typename Rule::Scalar;
  if (given_gradient.rows.numel() == 0 || given_gradient.values.numel() == 0) {
    return;
  }
  const GradientOnDevice<T> gradient(given_gradient, num_rows);
  const SortedGradient<T>& view = gradient.view;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (view.width == 1) {
    gradient.template sum_chunks<1>();
    number_update_kernel<Rule><<<grid_size(view.count, kThreads), kThreads, 0, stream>>>(rule, view);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  dispatch_pack<T>(rule.wide && gradient.wide(), [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    gradient.template sum_chunks<N>();
    const int64_t held = kWarp * N * kHeld<N>, warps = (view.width + held - 1) / held;
    const dim3 block(unsigned(kWarp * std::min<int64_t>(warps, kMostThreads / kWarp)), warps == 1 ? kThreads / kWarp : 1);
    const unsigned grid = grid_size(view.count, block.y);
    if (warps <= kMostThreads / kWarp) {
      row_update_kernel<Rule, N, false><<<grid, block, 0, stream>>>(rule, view);
    } else { // rare, and so without a variant for 16 bytes a load
      row_update_kernel<Rule, 1, true><<<grid, block, 0, stream>>>(rule, view);
    }
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

/// Launches what makes up all rows where that is due, which the device finds out.
template <typename Rule>
void make_up(const Rule& rule, const at::Tensor& param) {
  const int64_t rows = param.size(0), width = param.dim() == 2 ? param.size(1) : 1;
  if (rows == 0 || width == 0) {
    return;
  }
  constexpr int64_t kBlocks = 2048; // fills any device, and is no work where nothing is due
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (width == 1) {
    make_up_kernel<Rule, 1, true><<<unsigned(std::min<int64_t>(grid_size(rows, kThreads), kBlocks)), kThreads, 0, stream>>>(rule, rows, width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  dispatch_pack<typename Rule::Scalar>(rule.wide, [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    make_up_kernel<Rule, N, false><<<unsigned(std::min<int64_t>(grid_size(rows, kThreads / kWarp), kBlocks)), kThreads, 0, stream>>>(rule, rows, width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

/// The step of rows is taken: so many are.
template <typename Rate>
void advance(const Owing& owing, const Rate& rate, double ratio, const StepDecay& decay, bool always) {
  advance_kernel<Rate><<<1, kAdvanceThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(owing, rate, ratio, decay, always);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

inline void settle_owed(const Owing& owing) {
  settle_kernel<<<1, 1, 0, c10::cuda::getCurrentCUDAStream()>>>(owing);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
#endif

} // namespace xsoftmax::cuda
