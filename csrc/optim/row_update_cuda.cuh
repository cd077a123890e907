#pragma once

#include "table/updates/pending_table.h"
#include "optim/random_rounding.h"
#include "optim/row_arithmetic.h"
#include "optim/row_update.h"
#include "optim/row_updates.h"
#include "optim/sorted_gradient_cuda.cuh"

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <tuple>
#include <type_traits>

// Shared by the CUDA kernels of the row-wise optimizers: row-sparse gradients, whose equal rows are
// summed where the row is updated, and pending updates. Nothing is read on the host: the step
// counter, everything derived from it, and the decision to catch up all rows first stay on the
// device.
//
// An optimizer is a rule, a struct that kernels take by value:
//
//     Scalar                           the parameter's type
//     wide                             whether its rows can be read 16 bytes at a time (rows of
//                                      float32 state of a 16-bit parameter: 32)
//     Old read(row)                    reads the values that finish() overwrites
//     Row begin<kOneThread>(row, old)      computes the coefficients; called by single threads
//     (kOneThread)
//                                      or by whole warps
//     Elements<N> fetch<N>(row, d)     loads N elements of the row and its state from d on, before
//                                      their coefficients are known
//     kOneSum; squares, set_mean_square   set in rules that need the mean of squares before the
//     update
//                                      (row-wise Adagrad and Adam)
//     update(Row, Elements, row, d, g) updates those elements, by their summed gradient
//     finish(Row, row)                 called by one thread
//     catch_up<N, kOneThread>(action, row, width, thread)
//                                      applies a row's pending updates
//
// A step must read and write at least: the R rows of values and, for the unique rows, param and
// state, each read and written once. row_update_kernel transfers exactly that, plus 16 bytes per
// row for its position, as long as registers can hold a row (kPacksPerThread): up to 4,096 columns,
// or 2,048 for float64 or for rows that are not 16-byte aligned. For rows that occur more than 32
// times, the sums of chunks add 1/32 of their values, written and read. Gradients of the losses
// arrive sorted (table/sorted_ids.h), others are sorted first.

namespace xsoftmax::cuda {

using namespace on_device;

/// Action required on all rows before a step.
enum class PendingAction { Nothing, Flush, Rebase };

/// Calls function(T{}, S{}) with the types of a parameter and of its state; S is bfloat16 or the
/// opmath type of T.
template <typename Function>
void dispatch_rows(const at::Tensor& param, const at::Tensor& state, const Function& function) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, param.scalar_type(),
                                  "row_optimizer_cuda", [&] {
                                    if constexpr (!std::is_same_v<scalar_t, double>) {
                                      if (state.scalar_type() == at::kBFloat16) {
                                        function(scalar_t{}, at::BFloat16{});
                                        return;
                                      }
                                    }
                                    function(scalar_t{}, at::opmath_type<scalar_t>{});
                                  });
}

/// r of pending_table(), with its window. The host computes the window once, because it takes a
/// logarithm and a division in double precision, which all lanes would repeat for each row.
struct PendingRatio {
  double value;
  int64_t window;

  explicit PendingRatio(double ratio) : value(ratio), window(pending_window(ratio)) {}
};

/// The pending steps of the rows, and the coefficients of the following steps.
struct DevicePendingSteps {
  int64_t* step;
  double* pending;
  int64_t capacity;
  double next[3]; ///< coefficients of the following steps
  bool flush; ///< true: no step is taken, pending updates are applied
  /// Whether pending updates use stochastic rounding (table/updates/pending_table.h); nullptr: they
  /// do not.
  double* rounding;
  bool rounds; ///< whether the following steps use stochastic rounding

#ifdef __CUDACC__
  __device__ bool rounded() const { return rounding != nullptr && *rounding != 0; }
  __device__ bool changed() const {
    return pending[1] != next[0] || pending[2] != next[1] || pending[3] != next[2];
  }

  __device__ PendingAction action() const {
    const int64_t step_count = *step, caught_up = int64_t(pending[0]);
    CUDA_KERNEL_ASSERT(step_count >= 0 && step_count < INT32_MAX && caught_up >= 0 &&
                       caught_up <= step_count && step_count - caught_up <= capacity);
    if (!flush && changed()) {
      return step_count > 0 ? PendingAction::Rebase : PendingAction::Nothing;
    }
    return step_count - caught_up >= (flush ? 1 : capacity) ? PendingAction::Flush
                                                            : PendingAction::Nothing;
  }

  /// Returns whether this step starts without pending updates, because catch_up_kernel applies them
  /// first or no step was taken under these coefficients.
  __device__ bool must_catch_up() const { return changed() || action() != PendingAction::Nothing; }

  /// Returns the pending updates of a row before the step, whose last gradient was in step s.
  __device__ PendingEntry entry_of(int64_t s, const PendingRatio& ratio) const {
    return must_catch_up() ? PendingEntry{0, 1}
                           : pending_table(pending, capacity, *step, ratio.value, ratio.window)(s);
  }
#endif
};

inline DevicePendingSteps device_pending(const at::Tensor& step, const at::Tensor& pending) {
  return {step.mutable_data_ptr<int64_t>(),
          pending.mutable_data_ptr<double>(),
          pending_capacity(pending.numel()),
          {0, 0, 0},
          true,
          pending_rounding(pending.mutable_data_ptr<double>(), pending.numel()),
          false};
}
inline DevicePendingSteps device_pending(const at::Tensor& step, const at::Tensor& pending,
                                         double a, double b, double c, bool rounds) {
  return {step.mutable_data_ptr<int64_t>(),
          pending.mutable_data_ptr<double>(),
          pending_capacity(pending.numel()),
          {a, b, c},
          false,
          pending_rounding(pending.mutable_data_ptr<double>(), pending.numel()),
          rounds};
}

#ifdef __CUDACC__
/// Threads of a block that updates one row.
constexpr int kMaxThreads = 512;

/// Packs of N columns of a row that a thread holds in registers.
template <int N>
constexpr int kPacksPerThread = N == 1 ? 4 : (N == 8 ? 1 : 2);

/// Rounds N elements from d on to type T by stochastic rounding; no-op if T is not a 16-bit type.
/// `bits`: TableBits, StateBits or SecondStateBits.
template <typename T, int N, typename opmath, typename Bits>
__device__ inline void round_pack(opmath (&x)[N], const RowRounding& random, int64_t d,
                                  const Bits& bits) {
  if constexpr (!std::is_same_v<T, opmath>) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = round_at_random(x[i], bits(random, uint32_t(d + i) * kElement),
                             std::is_same_v<T, at::BFloat16>);
    }
  }
}
struct TableBits {
  __device__ uint32_t operator()(const RowRounding& random, uint32_t element) const {
    return table_bits(random, element);
  }
};
struct StateBits {
  __device__ uint32_t operator()(const RowRounding& random, uint32_t element) const {
    return state_bits(random, element);
  }
};
struct SecondStateBits {
  __device__ uint32_t operator()(const RowRounding& random, uint32_t element) const {
    return second_state_bits(random, element);
  }
};

/// Returns the random numbers of a row, or zeros if neither type needs stochastic rounding.
template <typename T, typename S>
__device__ inline RowRounding rounding_of(int64_t step, int64_t row, bool table) {
  constexpr bool low_state = !std::is_same_v<S, at::opmath_type<T>>,
                 low_table = !std::is_same_v<T, at::opmath_type<T>>;
  return low_state || (low_table && table) ? row_rounding(step_rounding(step, table), row)
                                           : RowRounding{};
}

/// Computes base(i)^exponent(i) for i < P. If not kOneThread, the lanes of a warp share the work.
template <bool kOneThread, int P, typename Base, typename Exponent>
__device__ inline void powers(double (&result)[P], const Base& base, const Exponent& exponent) {
  if constexpr (kOneThread) {
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

/// Returns whether `mine` is true in any thread of the team, the warp or block that updates a row.
__device__ inline bool team_any(bool mine) {
  return blockDim.x == kWarp ? __any_sync(kAllLanes, mine) != 0 : __syncthreads_or(mine) != 0;
}

template <typename T>
__device__ inline T team_sum(T mine) {
  __shared__ alignas(8) unsigned char storage[kWarp * sizeof(T)];
  return blockDim.x == kWarp ? warp_sum(mine) : block_sum(mine, reinterpret_cast<T*>(storage));
}

/// Updates rows: one warp per row (selected by threadIdx.y), or one block for wide rows. The first
/// of equal rows sums them; a sum of zeros changes nothing. kPieces: for rows too wide for a block
/// to hold, which are read once to test for zeros and then again.
template <typename Rule, int N, bool kPieces>
__global__ void __launch_bounds__(kMaxThreads, 1)
    row_update_kernel(Rule rule, SortedGradient<typename Rule::Scalar> g) {
  using M = at::opmath_type<typename Rule::Scalar>;
  constexpr int K = kPieces ? 1 : kPacksPerThread<N>;
  const int64_t d = int64_t(threadIdx.x) * N, stride = int64_t(blockDim.x) * N, piece = stride * K;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; i < g.count;
       i += int64_t(gridDim.x) * blockDim.y) {
    if (!begins(g, i)) {
      continue;
    }
    const int64_t row = g.rows[i];
    const auto old = rule.read(row); // before the barrier, after which a thread overwrites it
    M sum[K][N];
    typename Rule::template Elements<N> elements[K];
    const auto fetch = [&](int64_t from) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (from + k * stride < g.width) {
          elements[k] = rule.template fetch<N>(row, from + k * stride);
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
    // Calls visit(k, column) for the packs of the row that this thread holds.
    const auto for_packs = [&](const auto& visit) {
      for (int64_t from = 0; from == 0 || (kPieces && from < g.width); from += piece) {
        if constexpr (kPieces) {
          gather(from);
          fetch(from + d);
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (from + d + k * stride < g.width) {
            visit(k, from + d + k * stride);
          }
        }
      }
    };
    auto row_update = rule.template begin<false>(row, old);
    if constexpr (Rule::kOneSum) {
      M squares = 0;
      for_packs([&](int k, int64_t) { squares += rule.squares(elements[k], sum[k]); });
      rule.set_mean_square(row_update, team_sum(squares) / M(g.width));
    }
    for_packs(
        [&](int k, int64_t column) { rule.update(row_update, elements[k], row, column, sum[k]); });
    if (threadIdx.x == 0) {
      rule.finish(row_update, row);
    }
  }
}

/// Updates rows of width 1, one thread per row.
template <typename Rule>
__global__ void __launch_bounds__(kThreads, 2)
    number_update_kernel(Rule rule, SortedGradient<typename Rule::Scalar> g) {
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
    auto row_update = rule.template begin<true>(row, rule.read(row));
    const auto elements = rule.template fetch<1>(row, 0);
    if constexpr (Rule::kOneSum) {
      rule.set_mean_square(row_update, rule.squares(elements, sum));
    }
    rule.update(row_update, elements, row, 0, sum);
    rule.finish(row_update, row);
  }
}

/// Catches up all rows if due; otherwise all threads return immediately. One warp per row, or one
/// thread per row of width 1. Reads and writes param and reads the state that decides the movement,
/// for rows with pending updates; if options have changed, also writes that state.
template <typename Rule, int N, bool kOneThread>
__global__ void __launch_bounds__(kThreads, 2)
    catch_up_kernel(Rule rule, int64_t rows, int64_t width) {
  const PendingAction action = rule.device_pending.action();
  if (action == PendingAction::Nothing) {
    return;
  }
  constexpr int kTeam = kOneThread ? 1 : kWarp;
  for (int64_t row = global_thread() / kTeam; row < rows; row += grid_threads() / kTeam) {
    rule.template catch_up<N, kOneThread>(action, row, width, kOneThread ? 0 : lane());
  }
}

constexpr int kAdvanceThreads = 256;

/// Finishes a step in one block: increments the step counter and records the pending updates of
/// this step. `rate`(t) is the movement per unit of direction in step t, `step_decay` its decay.
/// always_pending: record the step even if the table of steps was empty before.
template <typename Rate>
__global__ void __launch_bounds__(kAdvanceThreads)
    advance_kernel(DevicePendingSteps device_pending, Rate rate, PendingRatio ratio,
                   StepDecay step_decay, bool always_pending) {
  const int64_t step_count = *device_pending.step, caught_up = int64_t(device_pending.pending[0]);
  const bool must_catch_up = device_pending.must_catch_up();
  const bool pending = always_pending || (!must_catch_up && step_count > caught_up);
  __syncthreads(); // before any thread writes
  double* const header = device_pending.pending;
  if (threadIdx.x == 0) {
    *device_pending.step = step_count + 1;
    if (device_pending.rounding != nullptr) {
      *device_pending.rounding = double(device_pending.rounds);
    }
    if (must_catch_up || !pending) {
      header[0] = double(pending ? step_count : step_count + 1);
      header[1] = device_pending.next[0];
      header[2] = device_pending.next[1];
      header[3] = device_pending.next[2];
      header[PendingTable::kHeader] = header[PendingTable::kHeader + device_pending.capacity + 1] =
          0;
    }
  }
  __syncthreads();
  if (!pending) {
    return;
  }
  const PendingTable table = pending_table(device_pending.pending, device_pending.capacity,
                                           step_count, ratio.value, ratio.window);
  const double log_decay = step_decay.log(), decay = std::exp(log_decay),
               moved = rate(step_count + 1);
  for (int64_t i = table.first_moved() + threadIdx.x; i <= table.count; i += blockDim.x) {
    table.move(i, decay, moved, integer_power(ratio.value, table.count + 1 - i));
  }
  if (threadIdx.x == 0) {
    table.movement[table.count + 1] = 0;
    table.log_decay[table.count + 1] = table.log_decay[table.count] + log_decay;
  }
}

/// Marks all rows as caught up; one thread.
static __global__ void clear_pending_kernel(DevicePendingSteps device_pending) {
  device_pending.pending[0] = double(*device_pending.step);
  device_pending.pending[PendingTable::kHeader] =
      device_pending.pending[PendingTable::kHeader + device_pending.capacity + 1] = 0;
}

// ---- Host functions ----

template <typename Rule>
void update_rows(const Rule& rule, const GradientOfRows& row_gradient, int64_t num_rows) {
  using T = typename Rule::Scalar;
  if (row_gradient.rows.numel() == 0 || row_gradient.values.numel() == 0) {
    return;
  }
  const GradientOnDevice<T> gradient(row_gradient, num_rows);
  const SortedGradient<T>& view = gradient.view;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (view.width == 1) {
    gradient.template sum_chunks<1>();
    number_update_kernel<Rule>
        <<<grid_size(view.count, kThreads), kThreads, 0, stream>>>(rule, view);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  dispatch_pack<T>(rule.wide && gradient.wide(), [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    gradient.template sum_chunks<N>();
    const int64_t columns_per_warp = kWarp * N * kPacksPerThread<N>,
                  warps = (view.width + columns_per_warp - 1) / columns_per_warp;
    const dim3 block(unsigned(kWarp * std::min<int64_t>(warps, kMaxThreads / kWarp)),
                     warps == 1 ? kThreads / kWarp : 1);
    const unsigned grid = grid_size(view.count, block.y);
    if (warps <= kMaxThreads / kWarp) {
      row_update_kernel<Rule, N, false><<<grid, block, 0, stream>>>(rule, view);
    } else { // rare, and therefore without a variant for 16-byte loads
      row_update_kernel<Rule, 1, true><<<grid, block, 0, stream>>>(rule, view);
    }
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

/// Launches the kernel that catches up all rows if due. The device decides.
template <typename Rule>
void catch_up(const Rule& rule, const at::Tensor& param) {
  const int64_t rows = param.size(0), width = param.dim() == 2 ? param.size(1) : 1;
  if (rows == 0 || width == 0) {
    return;
  }
  constexpr int64_t kBlocks = 2048; // fills any device, and is cheap if nothing is due
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (width == 1) {
    catch_up_kernel<Rule, 1, true>
        <<<unsigned(std::min<int64_t>(grid_size(rows, kThreads), kBlocks)), kThreads, 0, stream>>>(
            rule, rows, width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  dispatch_pack<typename Rule::Scalar>(rule.wide, [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    catch_up_kernel<Rule, N, false>
        <<<unsigned(std::min<int64_t>(grid_size(rows, kThreads / kWarp), kBlocks)), kThreads, 0,
           stream>>>(rule, rows, width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

/// Launches advance_kernel after the rows have been updated.
template <typename Rate>
void advance(const DevicePendingSteps& device_pending, const Rate& rate, const PendingRatio& ratio,
             const StepDecay& decay, bool always_pending) {
  advance_kernel<Rate><<<1, kAdvanceThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      device_pending, rate, ratio, decay, always_pending);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

inline void clear_pending(const DevicePendingSteps& device_pending) {
  clear_pending_kernel<<<1, 1, 0, c10::cuda::getCurrentCUDAStream()>>>(device_pending);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
#endif

/// Takes a step by terms (table/row_terms.h), for the CUDA kernels of "row_*_terms_". `take_step`
/// checks the call and passes the options to the function that it is given; `rows_cuda` steps by a
/// gradient that is written out, for tables that the kernels do not fit.
template <auto take_step, auto supports_kernel, auto step_rows, auto rows_cuda>
void step_by_terms(const at::Tensor& param, at::TensorList state, const at::Tensor& rows,
                   const at::Tensor& sources, const at::Tensor& coefficients,
                   const at::Tensor& input, std::string_view options, const OptionalTensor& lr) {
  const RowTerms terms{rows, sources, coefficients, input};
  const c10::cuda::CUDAGuard guard(param.device());
  take_step(param, state, terms, options, lr, [&](const auto& numbers) {
    if (supports_kernel(param, state) && supports_terms(terms, param.size(0))) {
      step_rows(param, state, GradientOfRows(terms), numbers, lr);
    } else {
      rows_cuda(param, state, rows, values_of(terms), options, lr);
    }
  });
}

} // namespace xsoftmax::cuda
