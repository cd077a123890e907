#include "core/impl.h"
#include "optim/row_adam.h"
#include "optim/row_update_cuda.cuh"
#include "optim/settle.h"

#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;
using at::TensorList;
using namespace cuda;

enum State { kCount, kExpAvg, kExpAvgSq, kLastStep, kOwed };

template <typename T>
struct AdamRows {
  using Scalar = T;
  using M = at::opmath_type<T>;
  static constexpr bool kOneSum = false;

  DeviceRows<T> param;
  DeviceRows<M> exp_avg, exp_avg_sq;
  DeviceRows<int32_t> last_step;
  Owing owing;
  RowAdamNumbers numbers; // of a step
  double decay, ratio;
  bool wide;

  struct Row {
    AdamStep<M> step;
    int32_t number;
  };

  __device__ int32_t read(int64_t row) const { return *last_step[row]; }

  template <bool kAlone>
  __device__ Row begin(int64_t, int32_t s) const {
    const int64_t t = *owing.step + 1;
    const RowAdamNumbers& n = numbers;
    double power[5];
    powers<kAlone>(power, [&](int i) { return i == 0 || i == 3 ? n.beta1 : n.beta2; },
                   [&](int i) { return i < 2 ? t - s : (i == 2 ? int64_t(s) : t); });
    const double step_size = row_adam_step_size(n.lr, power[3]), scale = row_adam_scale(power[4]);
    return {row_adam_coefficients<M>(n, owing.debt(s, ratio), decay, step_size, scale, power[0], power[1], power[2]), int32_t(t)};
  }

  template <int N>
  struct Elements {
    Pack<T, N> param;
    Pack<M, N> first, second;
  };

  template <int N>
  __device__ Elements<N> fetch(int64_t row, int64_t d) const {
    return {load_pack<N>(param[row] + d), load_pack<N>(exp_avg[row] + d), load_pack<N>(exp_avg_sq[row] + d)};
  }

  template <int N>
  __device__ void update(const Row& of_row, Elements<N> old, int64_t row, int64_t d, const M (&g)[N]) const {
    const AdamStep<M>& s = of_row.step;
    M next[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      M w = M(old.param.values[i]), decay_left = s.decay;
      if (s.owed != 0) {
        w = adam_owed_element(w, old.first.values[i], old.second.values[i], s);
        decay_left = 1;
      }
      next[i] = adam_element(w, old.first.values[i], old.second.values[i], g[i], s, decay_left, s.keep1, s.keep2);
    }
    store_pack(exp_avg[row] + d, old.first.values);
    store_pack(exp_avg_sq[row] + d, old.second.values);
    store_pack(param[row] + d, next);
  }

  __device__ void finish(const Row& of_row, int64_t row) const { *last_step[row] = of_row.number; }

  template <int N, bool kAlone>
  __device__ void make_up(Due due, int64_t row, int64_t width, int thread) const {
    const int64_t s = *last_step[row], t = *owing.step;
    if (s >= t) {
      return;
    }
    const bool rebase = due == Due::Rebase;
    const RowAdamNumbers past{0, owing.owed[1], owing.owed[2], owing.owed[3], 0};
    const OwedDebt debt = owed_table(owing.owed, owing.capacity, t, row_adam_ratio(past.beta1, past.beta2))(s);
    if (s == 0 && debt.decay == 1) {
      return;
    }
    const int64_t since = rebase ? t - s : 0;
    double power[3];
    powers<kAlone>(power, [&](int i) { return i == 0 ? past.beta1 : past.beta2; }, [&](int i) { return i < 2 ? since : s; });
    const auto step = row_adam_coefficients<M>(past, debt, 1, 0, 0, power[0], power[1], power[2]);
    if (rebase && s != 0 && thread == 0) { // all have read it: powers and the return above wait for them
      *last_step[row] = int32_t(t);
    }
    constexpr int kTeam = kAlone ? 1 : kWarp;
    for (int64_t d = int64_t(thread) * N; d < width; d += kTeam * N) {
      auto old = fetch<N>(row, d);
      M next[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        next[i] = adam_owed_element(M(old.param.values[i]), old.first.values[i], old.second.values[i], step);
        old.first.values[i] *= step.keep1;
        old.second.values[i] *= step.keep2;
      }
      store_pack(param[row] + d, next);
      if (rebase) {
        store_pack(exp_avg[row] + d, old.first.values);
        store_pack(exp_avg_sq[row] + d, old.second.values);
      }
    }
  }
};

// What rows that owe step t move by.
struct AdamRate {
  double lr, beta1, beta2;
  __device__ double operator()(int64_t t) const { return row_adam_owed_rate(lr, integer_power(beta1, t), integer_power(beta2, t)); }
};

template <typename T>
AdamRows<T> adam_rows(const Tensor& param, TensorList state, const Owing& owing, const RowAdamNumbers& numbers) {
  AdamRows<T> rows{device_rows<T>(param), device_rows<at::opmath_type<T>>(state[kExpAvg]), device_rows<at::opmath_type<T>>(state[kExpAvgSq]),
                   device_rows<int32_t>(state[kLastStep]), owing, numbers, 1 - numbers.lr * numbers.weight_decay,
                   row_adam_ratio(numbers.beta1, numbers.beta2), false};
  constexpr int64_t kPack = 16 / sizeof(T);
  rows.wide = rows.param.packs(kPack) && rows.exp_avg.packs(kPack) && rows.exp_avg_sq.packs(kPack) && (param.dim() < 2 || param.size(1) % kPack == 0);
  return rows;
}

bool fits(const Tensor& param, TensorList state) {
  return !use_reference() && has_row_view(param) && has_row_view(state[kExpAvg]) && has_row_view(state[kExpAvgSq]);
}

void row_adam_rows_cuda(const Tensor& param, TensorList state, const Tensor& rows, const Tensor& values, std::string_view options) {
  const RowAdamNumbers numbers = check_row_adam_rows(param, state, rows, values, options);
  const c10::cuda::CUDAGuard guard(param.device());
  if (!fits(param, state)) {
    row_adam_rows_composite(param, state, rows, values, options);
    return;
  }
  const Owing steps = owing(state[kCount], state[kOwed], numbers.beta1, numbers.beta2, numbers.eps);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, param.scalar_type(), "row_adam_rows_cuda", [&] {
    const auto rule = adam_rows<scalar_t>(param, state, steps, numbers);
    make_up(rule, param);
    update_rows(rule, rows, values, param.size(0));
    advance(steps, AdamRate{numbers.lr, numbers.beta1, numbers.beta2}, rule.ratio, std::log1p(-numbers.lr * numbers.weight_decay),
            /*always=*/true);
  });
}

void row_adam_flush_cuda(const Tensor& param, TensorList state) {
  const WriteToTables write(param);
  if (!check_row_adam_flush(param, state)) {
    return;
  }
  const c10::cuda::CUDAGuard guard(param.device());
  if (!fits(param, state)) {
    row_adam_flush_composite(param, state);
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, param.scalar_type(), "row_adam_flush_cuda", [&] {
    const Owing steps = owing(state[kCount], state[kOwed]);
    make_up(adam_rows<scalar_t>(param, state, steps, {}), param);
    settle_owed(steps);
  });
  made_up(param, state);
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("row_adam_rows_", row_adam_rows_cuda);
  m.impl("row_adam_flush_", row_adam_flush_cuda);
}

} // namespace xsoftmax
