#include "cpu/impl.h"
#include "optim/row_adam.h"
#include "optim/row_update_cuda.cuh"
#include "table/updates/pending_updates.h"

#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;
using at::TensorList;
using namespace cuda;

// kRowWise: one second moment per row, of type M; otherwise both moments have type S.
template <typename T, typename S, bool kRowWise>
struct AdamRows {
  using Scalar = T;
  using M = at::opmath_type<T>;
  using Second = std::conditional_t<kRowWise, M, S>;
  static constexpr bool kOneSum = kRowWise;

  DeviceRows<T> param;
  DeviceRows<S> exp_avg;
  DeviceRows<Second> exp_avg_sq;
  DeviceRows<int32_t> last_step;
  DevicePendingSteps device_pending;
  RowAdamNumbers numbers; // of the current step
  LearningRate lr;
  StepDecay decay;
  PendingRatio ratio;
  bool wide;

  struct Row {
    AdamStep<M> step;
    int32_t number;
    RowRounding random;
    M second, pending, rate; ///< used if kRowWise
  };

  struct Old {
    int32_t step;
    M second; ///< used if kRowWise
  };
  __device__ Old read(int64_t row) const {
    return {*last_step[row], kRowWise ? M(*exp_avg_sq[row]) : M(0)};
  }

  template <bool kOneThread>
  __device__ Row begin(int64_t row, Old old) const {
    const int64_t s = old.step, t = *device_pending.step + 1;
    const RowAdamNumbers& n = numbers;
    double power[5];
    powers<kOneThread>(
        power, [&](int i) { return i == 0 || i == 3 ? n.beta1 : n.beta2; },
        [&](int i) { return i < 2 ? t - s : (i == 2 ? s : t); });
    const double step_size = row_adam_step_size(lr(), power[3]), scale = row_adam_scale(power[4]);
    const auto step = row_adam_coefficients<M>(n, device_pending.entry_of(s, ratio), decay(),
                                               step_size, scale, power[0], power[1], power[2]);
    return {step,
            int32_t(t),
            rounding_of<T, S>(t, row, n.stochastic_rounding),
            old.second,
            kRowWise ? adam_row_pending(old.second, step) : M(0),
            M(0)};
  }

  template <int N>
  struct Elements {
    Pack<T, N> param;
    Pack<S, N> first;
    Pack<S, N> second; ///< unused if kRowWise
  };

  template <int N>
  __device__ Elements<N> fetch(int64_t row, int64_t d) const {
    if constexpr (kRowWise) {
      return {load_pack<N>(param[row] + d), load_pack<N>(exp_avg[row] + d), {}};
    } else {
      return {load_pack<N>(param[row] + d), load_pack<N>(exp_avg[row] + d),
              load_pack<N>(exp_avg_sq[row] + d)};
    }
  }

  template <int N>
  __device__ M squares(const Elements<N>&, const M (&g)[N]) const {
    M result = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      result += g[i] * g[i];
    }
    return result;
  }

  __device__ void set_mean_square(Row& row_update, M mean) const {
    row_update.second =
        row_update.step.second_factor * row_update.second + row_update.step.one_minus_beta2 * mean;
    row_update.rate = adam_row_rate(row_update.second, row_update.step);
  }

  template <int N>
  __device__ void update(const Row& row_update, Elements<N> old, int64_t row, int64_t d,
                         const M (&g)[N]) const {
    const AdamStep<M>& s = row_update.step;
    M next[N], first[N], second[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      M w = M(old.param.values[i]), decay_left = s.decay;
      first[i] = M(old.first.values[i]);
      if constexpr (kRowWise) {
        next[i] = adam_row_element(w, first[i], g[i], s, row_update.pending, row_update.rate);
      } else {
        second[i] = M(old.second.values[i]);
        if (s.pending != 0) {
          w = adam_pending_element(w, first[i], second[i], s);
          decay_left = 1;
        }
        next[i] = adam_element(w, first[i], second[i], g[i], s, decay_left, s.first_factor,
                               s.second_factor);
      }
    }
    store_rounded(row_update.random, row, d, next, first, second, true);
  }

  /// Stores param and, if `moments`, the moments, rounded to their stored types.
  template <int N>
  __device__ void store_rounded(const RowRounding& random, int64_t row, int64_t d, M (&next)[N],
                                M (&first)[N], M (&second)[N], bool moments) const {
    if (moments) {
      round_pack<S>(first, random, d, StateBits());
      store_pack(exp_avg[row] + d, first);
      if constexpr (!kRowWise) {
        round_pack<S>(second, random, d, SecondStateBits());
        store_pack(exp_avg_sq[row] + d, second);
      }
    }
    if (random.table) {
      round_pack<T>(next, random, d, TableBits());
    }
    store_pack(param[row] + d, next);
  }

  __device__ void finish(const Row& row_update, int64_t row) const {
    *last_step[row] = row_update.number;
    if constexpr (kRowWise) {
      *exp_avg_sq[row] = row_update.second;
    }
  }

  template <int N, bool kOneThread>
  __device__ void catch_up(PendingAction action, int64_t row, int64_t width, int thread) const {
    const int64_t s = *last_step[row], t = *device_pending.step;
    if (s >= t) {
      return;
    }
    const bool rebase = action == PendingAction::Rebase;
    const RowAdamNumbers pending_numbers{
        0,    device_pending.pending[1], device_pending.pending[2], device_pending.pending[3], 0,
        false};
    const PendingEntry pending =
        pending_table(device_pending.pending, device_pending.capacity, t,
                      row_adam_ratio(pending_numbers.beta1, pending_numbers.beta2))(s);
    if (s == 0 && pending.decay == 1) {
      return;
    }
    const int64_t since = rebase ? t - s : 0;
    double power[3];
    powers<kOneThread>(
        power, [&](int i) { return i == 0 ? pending_numbers.beta1 : pending_numbers.beta2; },
        [&](int i) { return i < 2 ? since : s; });
    const auto step =
        row_adam_coefficients<M>(pending_numbers, pending, 1, 0, 0, power[0], power[1], power[2]);
    const RowRounding random = rounding_of<T, S>(t, row, device_pending.rounded());
    M movement = 0;
    if constexpr (kRowWise) {
      const M old = *exp_avg_sq[row];
      movement = adam_row_pending(old, step);
      if constexpr (!kOneThread) {
        __syncwarp(); // all lanes have read it
      }
      if (rebase && thread == 0) {
        *exp_avg_sq[row] = step.second_factor * old;
      }
    }
    // All lanes have read last_step: powers() and the return above wait for them.
    if (rebase && s != 0 && thread == 0) {
      *last_step[row] = int32_t(t);
    }
    constexpr int kTeam = kOneThread ? 1 : kWarp;
    for (int64_t d = int64_t(thread) * N; d < width; d += kTeam * N) {
      const auto old = fetch<N>(row, d);
      M next[N], first[N], second[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const M w = M(old.param.values[i]), moment = M(old.first.values[i]);
        first[i] = step.first_factor * moment;
        if constexpr (kRowWise) {
          next[i] = step.decay * w - movement * moment;
        } else {
          next[i] = adam_pending_element(w, moment, M(old.second.values[i]), step);
          second[i] = step.second_factor * M(old.second.values[i]);
        }
      }
      store_rounded(random, row, d, next, first, second, rebase);
    }
  }
};

// Returns the movement per unit of direction of rows for which step t is a pending step.
struct AdamRate {
  LearningRate lr;
  double beta1, beta2;
  __device__ double operator()(int64_t t) const {
    return row_adam_pending_rate(lr(), integer_power(beta1, t), integer_power(beta2, t));
  }
};

template <typename T, typename S, bool kRowWise>
AdamRows<T, S, kRowWise> adam_rows(const Tensor& param, TensorList state,
                                   const DevicePendingSteps& device_pending,
                                   const RowAdamNumbers& numbers, const LearningRate& lr) {
  using Rows = AdamRows<T, S, kRowWise>;
  Rows rows{device_rows<T>(param),
            device_rows<S>(state[AdamState::kExpAvg]),
            device_rows<typename Rows::Second>(state[AdamState::kExpAvgSq]),
            device_rows<int32_t>(state[AdamState::kLastStep]),
            device_pending,
            numbers,
            lr,
            StepDecay(lr, numbers.weight_decay),
            PendingRatio(row_adam_ratio(numbers.beta1, numbers.beta2)),
            false};
  constexpr int64_t kPack = 16 / sizeof(T);
  rows.wide = rows.param.packs(kPack) && rows.exp_avg.packs(kPack) &&
      (kRowWise || rows.exp_avg_sq.packs(kPack)) && (param.dim() < 2 || param.size(1) % kPack == 0);
  return rows;
}

/// Calls function(rule) with the rule for the types of the parameter and its state.
template <typename Function>
void with_rule(const Tensor& param, TensorList state, const DevicePendingSteps& device_pending,
               const RowAdamNumbers& numbers, const LearningRate& lr, const Function& function) {
  dispatch_rows(param, state[AdamState::kExpAvg], [&](auto zero, auto zero_state) {
    using T = decltype(zero);
    using S = decltype(zero_state);
    if (one_second_moment(param, state[AdamState::kExpAvg], state[AdamState::kExpAvgSq])) {
      function(adam_rows<T, S, true>(param, state, device_pending, numbers, lr));
    } else {
      function(adam_rows<T, S, false>(param, state, device_pending, numbers, lr));
    }
  });
}

bool supports_adam_kernel(const Tensor& param, TensorList state) {
  return !use_reference() && has_row_view(param) && has_row_view(state[AdamState::kExpAvg]) &&
      has_row_view(state[AdamState::kExpAvgSq]);
}

void step_adam_rows(const Tensor& param, TensorList state, const GradientOfRows& gradient,
                    const RowAdamNumbers& numbers, const OptionalTensor& lr) {
  const DevicePendingSteps steps =
      device_pending(state[AdamState::kCount], state[AdamState::kPending], numbers.beta1,
                     numbers.beta2, numbers.eps, numbers.stochastic_rounding);
  Tensor lr_storage;
  const LearningRate rate = learning_rate(numbers.lr, lr, param, lr_storage);
  with_rule(param, state, steps, numbers, rate, [&](const auto& rule) {
    catch_up(rule, param);
    update_rows(rule, numbers.maximize ? gradient.negated() : gradient, param.size(0));
    advance(steps, AdamRate{rate, numbers.beta1, numbers.beta2}, rule.ratio, rule.decay,
            /*always_pending=*/true);
  });
}

void row_adam_rows_cuda(const Tensor& param, TensorList state, const Tensor& rows,
                        const Tensor& values, std::string_view options, const OptionalTensor& lr) {
  const RowAdamNumbers numbers = check_row_adam_rows(param, state, rows, values, options, lr);
  const c10::cuda::CUDAGuard guard(param.device());
  if (supports_adam_kernel(param, state)) {
    step_adam_rows(param, state, {rows, values}, numbers, lr);
  } else {
    row_adam_rows_composite(param, state, rows, values, options, lr);
  }
}

void row_adam_flush_cuda(const Tensor& param, TensorList state) {
  const TableWriteGuard write(param);
  if (!check_row_adam_flush(param, state)) {
    return;
  }
  const c10::cuda::CUDAGuard guard(param.device());
  if (!supports_adam_kernel(param, state)) {
    row_adam_flush_composite(param, state);
    return;
  }
  const DevicePendingSteps steps =
      device_pending(state[AdamState::kCount], state[AdamState::kPending]);
  with_rule(param, state, steps, {}, {}, [&](const auto& rule) { catch_up(rule, param); });
  clear_pending(steps);
  caught_up(param, state);
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("row_adam_rows_", row_adam_rows_cuda);
  m.impl("row_adam_terms_",
         step_by_terms<row_adam_terms, supports_adam_kernel, step_adam_rows, row_adam_rows_cuda>);
  m.impl("row_adam_flush_", row_adam_flush_cuda);
}

} // namespace xsoftmax
