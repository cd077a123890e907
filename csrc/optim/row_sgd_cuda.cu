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

enum State { kCount, kBuffer, kLastStep, kPending };

// S: the type of the buffer.
template <typename T, typename S>
struct SgdRows {
  using Scalar = T;
  using M = at::opmath_type<T>;
  static constexpr bool kOneSum = false;

  DeviceRows<T> param;
  DeviceRows<S> buffer; // no data without momentum
  DeviceRows<int32_t> last_step;
  Deferred deferred;
  RowSGDNumbers numbers; // of the current step
  LearningRate lr;
  StepDecay decay;
  bool fresh; // whether the buffer was just allocated
  bool always; // whether the step adds pending updates even if there were none before
  bool wide;

  struct Row {
    MomentumStep<M> step;
    int32_t number;
    RowRounding random;
  };

  __device__ bool has_pending() const {
    return always || (!deferred.catches_up() && *deferred.step > int64_t(deferred.pending[0]));
  }

  __device__ int32_t read(int64_t row) const { return has_pending() ? *last_step[row] : 0; }

  template <bool kAlone>
  __device__ Row begin(int64_t row, int32_t s) const {
    const int64_t t = *deferred.step + 1;
    const double take = t == 1 || fresh ? 1 : 1 - numbers.dampening;
    const PendingEntry pending =
        has_pending() ? deferred.entry_of(s, numbers.momentum) : PendingEntry{0, 1};
    const double kept =
        s == 0 || buffer.data == nullptr ? 1 : integer_power(numbers.momentum, t - s);
    RowSGDNumbers of_step = numbers;
    of_step.lr = lr();
    return {row_sgd_coefficients<M>(of_step, pending, decay(), take, kept), int32_t(t),
            rounding_of<T, S>(t, row, numbers.stochastic_rounding)};
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
  __device__ void update(const Row& of_row, Elements<N> old, int64_t row, int64_t d,
                         const M (&g)[N]) const {
    const MomentumStep<M>& s = of_row.step;
    const M sign = numbers.maximize ? M(-1) : M(1);
    M next[N], of_buffer[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const M w = M(old.param.values[i]);
      of_buffer[i] = M(old.buffer.values[i]);
      next[i] = buffer.data == nullptr
          ? s.decay * w - s.lr * (sign * g[i])
          : momentum_element(w, of_buffer[i], sign * g[i], s, s.nesterov);
    }
    if (buffer.data != nullptr) {
      round_pack<S>(of_buffer, of_row.random, d, StateBits());
      store_pack(buffer[row] + d, of_buffer);
    }
    if (of_row.random.table) {
      round_pack<T>(next, of_row.random, d, TableBits());
    }
    store_pack(param[row] + d, next);
  }

  __device__ void finish(const Row& of_row, int64_t row) const {
    if (has_pending()) {
      *last_step[row] = of_row.number;
    }
  }

  template <int N, bool kAlone>
  __device__ void catch_up(Due due, int64_t row, int64_t width, int thread) const {
    const int64_t s = *last_step[row], t = *deferred.step;
    if (s >= t) {
      return;
    }
    const bool rebase = due == Due::Rebase && s != 0;
    const double momentum = deferred.pending[1];
    const PendingEntry pending = pending_table(deferred.pending, deferred.capacity, t, momentum)(s);
    if constexpr (!kAlone) {
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
            kept = M(rebase ? integer_power(momentum, t - s) : 1.0);
    const RowRounding random = rounding_of<T, S>(t, row, deferred.rounded());
    constexpr int kTeam = kAlone ? 1 : kWarp;
    for (int64_t d = int64_t(thread) * N; d < width; d += kTeam * N) {
      const auto old = load_pack<N>(param[row] + d);
      M next[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        next[i] = pending_decay * M(old.values[i]);
      }
      if (moves) {
        const auto old_buffer = load_pack<N>(buffer[row] + d);
        M of_buffer[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          next[i] -= drift * M(old_buffer.values[i]);
          of_buffer[i] = kept * M(old_buffer.values[i]);
        }
        if (kept != 1) {
          round_pack<S>(of_buffer, random, d, StateBits());
          store_pack(buffer[row] + d, of_buffer);
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
SgdRows<T, S> sgd_rows(const Tensor& param, TensorList state, const Deferred& deferred,
                       const RowSGDNumbers& numbers, const LearningRate& lr) {
  // The buffer is [0] until a step needs it.
  const bool has_buffer = state[kBuffer].sizes() == param.sizes();
  SgdRows<T, S> rows{device_rows<T>(param),
                     has_buffer ? device_rows<S>(state[kBuffer]) : DeviceRows<S>{},
                     device_rows<int32_t>(state[kLastStep]),
                     deferred,
                     numbers,
                     lr,
                     StepDecay(lr, numbers.weight_decay),
                     false,
                     numbers.momentum != 0 || numbers.weight_decay != 0,
                     false};
  constexpr int64_t kPack = 16 / sizeof(T);
  rows.wide = rows.param.packs(kPack) && rows.buffer.packs(kPack) &&
      (param.dim() < 2 || param.size(1) % kPack == 0);
  return rows;
}

bool fits(const Tensor& param, TensorList state) {
  return !use_reference() && has_row_view(param) && has_row_view(state[kBuffer]);
}

template <typename T, typename S>
void step_rows_of(const Tensor& param, TensorList state, const GradientOfRows& gradient,
                  const RowSGDNumbers& numbers, const LearningRate& lr) {
  const Deferred steps = deferred(state[kCount], state[kPending], numbers.momentum,
                                  double(numbers.nesterov), 0, numbers.stochastic_rounding);
  catch_up(sgd_rows<T, S>(param, state, steps, numbers, lr), param);
  const bool fresh = numbers.momentum != 0 && make_row_sgd_buffer(param, state);
  SgdRows<T, S> rule = sgd_rows<T, S>(param, state, steps, numbers, lr);
  rule.fresh = fresh;
  if (numbers.momentum == 0) {
    rule.buffer = {};
  }
  update_rows(rule, gradient, param.size(0));
  advance(steps, SgdRate{lr, numbers.nesterov ? numbers.momentum : 1}, numbers.momentum, rule.decay,
          rule.always);
}

void step_rows(const Tensor& param, TensorList state, const GradientOfRows& gradient,
               const RowSGDNumbers& numbers, const OptionalTensor& lr) {
  Tensor kept;
  const LearningRate rate = learning_rate(numbers.lr, lr, param, kept);
  dispatch_rows(param, state[kBuffer], [&](auto zero, auto zero_state) {
    step_rows_of<decltype(zero), decltype(zero_state)>(param, state, gradient, numbers, rate);
  });
}

void row_sgd_rows_cuda(const Tensor& param, TensorList state, const Tensor& rows,
                       const Tensor& values, std::string_view options, const OptionalTensor& lr) {
  const RowSGDNumbers numbers = check_row_sgd_rows(param, state, rows, values, options, lr);
  const c10::cuda::CUDAGuard guard(param.device());
  if (fits(param, state)) {
    step_rows(param, state, {rows, values}, numbers, lr);
  } else {
    row_sgd_rows_composite(param, state, rows, values, options, lr);
  }
}

void row_sgd_flush_cuda(const Tensor& param, TensorList state) {
  const WriteToTables write(param);
  if (!check_row_sgd_flush(param, state)) {
    return;
  }
  const c10::cuda::CUDAGuard guard(param.device());
  if (!fits(param, state)) {
    row_sgd_flush_composite(param, state);
    return;
  }
  dispatch_rows(param, state[kBuffer], [&](auto zero, auto zero_state) {
    const Deferred steps = deferred(state[kCount], state[kPending]);
    catch_up(sgd_rows<decltype(zero), decltype(zero_state)>(param, state, steps, {}, {}), param);
    clear_pending(steps);
  });
  caught_up(param, state);
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("row_sgd_rows_", row_sgd_rows_cuda);
  m.impl("row_sgd_terms_", step_by_terms<row_sgd_terms, fits, step_rows, row_sgd_rows_cuda>);
  m.impl("row_sgd_flush_", row_sgd_flush_cuda);
}

} // namespace xsoftmax
