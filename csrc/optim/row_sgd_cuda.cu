#include "cpu/impl.h"
#include "optim/row_sgd.h"
#include "optim/row_update_cuda.cuh"
#include "table/updates/pending_updates.h"

#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;
using at::TensorList;
using namespace cuda;

// S: the type of the buffer.
template <typename T, typename S>
struct SgdRows {
  using Scalar = T;
  using M = at::opmath_type<T>;
  static constexpr bool kOneSum = false;

  DeviceRows<T> param;
  DeviceRows<S> buffer; // no data without momentum
  DeviceRows<int32_t> last_step;
  DevicePendingSteps device_pending;
  RowSGDNumbers numbers; // of the current step
  LearningRate lr;
  StepDecay decay;
  PendingRatio ratio; // the momentum
  bool buffer_is_new; // whether the buffer was just allocated
  bool always_pending; // whether the step adds pending updates even if there were none before
  bool wide;

  struct Row {
    MomentumStep<M> step;
    int32_t number;
    RowRounding random;
  };

  __device__ bool has_pending() const {
    return always_pending ||
        (!device_pending.must_catch_up() &&
         *device_pending.step > int64_t(device_pending.pending[0]));
  }

  __device__ int32_t read(int64_t row) const { return has_pending() ? *last_step[row] : 0; }

  template <bool kOneThread>
  __device__ Row begin(int64_t row, int32_t s) const {
    const int64_t t = *device_pending.step + 1;
    const double gradient_factor = t == 1 || buffer_is_new ? 1 : 1 - numbers.dampening;
    const PendingEntry pending =
        has_pending() ? device_pending.entry_of(s, ratio) : PendingEntry{0, 1};
    const double buffer_factor =
        s == 0 || buffer.data == nullptr ? 1 : integer_power(numbers.momentum, t - s);
    RowSGDNumbers step_numbers = numbers;
    step_numbers.lr = lr();
    return {row_sgd_coefficients<M>(step_numbers, pending, decay(), gradient_factor, buffer_factor),
            int32_t(t), rounding_of<T, S>(t, row, numbers.stochastic_rounding)};
  }

  template <int N>
  struct Elements {
    Pack<T, N> param;
    Pack<S, N> buffer; ///< unused without momentum
  };

  template <int N>
  __device__ Elements<N> fetch(int64_t row, int64_t d) const {
    return {load_pack<N>(param[row] + d),
            buffer.data == nullptr ? Pack<S, N>{} : load_pack<N>(buffer[row] + d)};
  }

  template <int N>
  __device__ void update(const Row& row_update, Elements<N> old, int64_t row, int64_t d,
                         const M (&g)[N]) const {
    const MomentumStep<M>& s = row_update.step;
    const M sign = numbers.maximize ? M(-1) : M(1);
    M next[N], next_buffer[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const M w = M(old.param.values[i]);
      next_buffer[i] = M(old.buffer.values[i]);
      next[i] = buffer.data == nullptr
          ? s.decay * w - s.lr * (sign * g[i])
          : momentum_element(w, next_buffer[i], sign * g[i], s, s.nesterov);
    }
    if (buffer.data != nullptr) {
      round_pack<S>(next_buffer, row_update.random, d, StateBits());
      store_pack(buffer[row] + d, next_buffer);
    }
    if (row_update.random.table) {
      round_pack<T>(next, row_update.random, d, TableBits());
    }
    store_pack(param[row] + d, next);
  }

  __device__ void finish(const Row& row_update, int64_t row) const {
    if (has_pending()) {
      *last_step[row] = row_update.number;
    }
  }

  template <int N, bool kOneThread>
  __device__ void catch_up(PendingAction action, int64_t row, int64_t width, int thread) const {
    const int64_t s = *last_step[row], t = *device_pending.step;
    if (s >= t) {
      return;
    }
    const bool rebase = action == PendingAction::Rebase && s != 0;
    const double momentum = device_pending.pending[1];
    const PendingEntry pending =
        pending_table(device_pending.pending, device_pending.capacity, t, momentum)(s);
    if constexpr (!kOneThread) {
      __syncwarp(); // all lanes have read last_step
    }
    if (rebase && thread == 0) {
      *last_step[row] = int32_t(t);
    }
    // Steps without momentum leave the buffer unchanged.
    const bool moves = s != 0 && momentum != 0 && buffer.data != nullptr;
    if (!moves && pending.decay == 1) {
      return;
    }
    const M pending_decay = M(pending.decay), drift = M(pending.movement),
            buffer_factor = M(rebase ? integer_power(momentum, t - s) : 1.0);
    const RowRounding random = rounding_of<T, S>(t, row, device_pending.rounded());
    constexpr int kTeam = kOneThread ? 1 : kWarp;
    for (int64_t d = int64_t(thread) * N; d < width; d += kTeam * N) {
      const auto old = load_pack<N>(param[row] + d);
      M next[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        next[i] = pending_decay * M(old.values[i]);
      }
      if (moves) {
        const auto old_buffer = load_pack<N>(buffer[row] + d);
        M next_buffer[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          next[i] -= drift * M(old_buffer.values[i]);
          next_buffer[i] = buffer_factor * M(old_buffer.values[i]);
        }
        if (buffer_factor != 1) {
          round_pack<S>(next_buffer, random, d, StateBits());
          store_pack(buffer[row] + d, next_buffer);
        }
      }
      if (random.table) {
        round_pack<T>(next, random, d, TableBits());
      }
      store_pack(param[row] + d, next);
    }
  }
};

// Returns the movement of rows for which a step is pending, in units of their buffer.
struct SgdRate {
  LearningRate lr;
  double factor;
  __device__ double operator()(int64_t) const { return lr() * factor; }
};

template <typename T, typename S>
SgdRows<T, S> sgd_rows(const Tensor& param, TensorList state,
                       const DevicePendingSteps& device_pending, const RowSGDNumbers& numbers,
                       const LearningRate& lr) {
  // The buffer is [0] until a step needs it.
  const bool has_buffer = state[SgdState::kBuffer].sizes() == param.sizes();
  SgdRows<T, S> rows{device_rows<T>(param),
                     has_buffer ? device_rows<S>(state[SgdState::kBuffer]) : DeviceRows<S>{},
                     device_rows<int32_t>(state[SgdState::kLastStep]),
                     device_pending,
                     numbers,
                     lr,
                     StepDecay(lr, numbers.weight_decay),
                     PendingRatio(numbers.momentum),
                     false,
                     numbers.momentum != 0 || numbers.weight_decay != 0,
                     false};
  constexpr int64_t kPack = 16 / sizeof(T);
  rows.wide = rows.param.packs(kPack) && rows.buffer.packs(kPack) &&
      (param.dim() < 2 || param.size(1) % kPack == 0);
  return rows;
}

bool supports_sgd_kernel(const Tensor& param, TensorList state) {
  return !use_reference() && has_row_view(param) && has_row_view(state[SgdState::kBuffer]);
}

template <typename T, typename S>
void step_rows_of(const Tensor& param, TensorList state, const GradientOfRows& gradient,
                  const RowSGDNumbers& numbers, const LearningRate& lr) {
  const DevicePendingSteps steps =
      device_pending(state[SgdState::kCount], state[SgdState::kPending], numbers.momentum,
                     double(numbers.nesterov), 0, numbers.stochastic_rounding);
  catch_up(sgd_rows<T, S>(param, state, steps, numbers, lr), param);
  const bool buffer_is_new = numbers.momentum != 0 && make_row_sgd_buffer(param, state);
  SgdRows<T, S> rule = sgd_rows<T, S>(param, state, steps, numbers, lr);
  rule.buffer_is_new = buffer_is_new;
  if (numbers.momentum == 0) {
    rule.buffer = {};
  }
  update_rows(rule, gradient, param.size(0));
  advance(steps, SgdRate{lr, numbers.nesterov ? numbers.momentum : 1}, rule.ratio, rule.decay,
          rule.always_pending);
}

void step_sgd_rows(const Tensor& param, TensorList state, const GradientOfRows& gradient,
                   const RowSGDNumbers& numbers, const OptionalTensor& lr) {
  Tensor lr_storage;
  const LearningRate rate = learning_rate(numbers.lr, lr, param, lr_storage);
  dispatch_rows(param, state[SgdState::kBuffer], [&](auto zero, auto zero_state) {
    step_rows_of<decltype(zero), decltype(zero_state)>(param, state, gradient, numbers, rate);
  });
}

void row_sgd_rows_cuda(const Tensor& param, TensorList state, const Tensor& rows,
                       const Tensor& values, std::string_view options, const OptionalTensor& lr) {
  const RowSGDNumbers numbers = check_row_sgd_rows(param, state, rows, values, options, lr);
  const c10::cuda::CUDAGuard guard(param.device());
  if (supports_sgd_kernel(param, state)) {
    step_sgd_rows(param, state, {rows, values}, numbers, lr);
  } else {
    row_sgd_rows_composite(param, state, rows, values, options, lr);
  }
}

void row_sgd_flush_cuda(const Tensor& param, TensorList state) {
  const TableWriteGuard write(param);
  if (!check_row_sgd_flush(param, state)) {
    return;
  }
  const c10::cuda::CUDAGuard guard(param.device());
  if (!supports_sgd_kernel(param, state)) {
    row_sgd_flush_composite(param, state);
    return;
  }
  dispatch_rows(param, state[SgdState::kBuffer], [&](auto zero, auto zero_state) {
    const DevicePendingSteps steps =
        device_pending(state[SgdState::kCount], state[SgdState::kPending]);
    catch_up(sgd_rows<decltype(zero), decltype(zero_state)>(param, state, steps, {}, {}), param);
    clear_pending(steps);
  });
  caught_up(param, state);
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("row_sgd_rows_", row_sgd_rows_cuda);
  m.impl("row_sgd_terms_",
         step_by_terms<row_sgd_terms, supports_sgd_kernel, step_sgd_rows, row_sgd_rows_cuda>);
  m.impl("row_sgd_flush_", row_sgd_flush_cuda);
}

} // namespace xsoftmax
