#include "cpu/impl.h"
#include "optim/row_adagrad.h"
#include "optim/row_update_cuda.cuh"

#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;
using at::TensorList;
using namespace cuda;

// kRowWise: one sum per row, of type S.
template <typename T, typename S, bool kRowWise>
struct AdagradRows {
  using Scalar = T;
  using M = at::opmath_type<T>;
  static constexpr bool kOneSum = kRowWise;

  DeviceRows<T> param;
  DeviceRows<S> sum;
  const int64_t* steps;
  RowAdagradNumbers numbers;
  LearningRate rate;
  bool wide;

  struct Row {
    AdagradStep<M> step;
    M sum; ///< used if kRowWise
    M rate;
    RowRounding random;
  };

  __device__ M read(int64_t row) const { return kRowWise ? M(*sum[row]) : M(0); }

  template <bool kOneThread>
  __device__ Row begin(int64_t row, M old) const {
    const M lr = M(row_adagrad_rate(rate(), numbers.lr_decay, *steps + 1));
    return {{lr, M(numbers.weight_decay), M(numbers.eps)},
            old,
            0,
            rounding_of<T, S>(*steps + 1, row, numbers.stochastic_rounding)};
  }

  template <int N>
  struct Elements {
    Pack<T, N> param;
    Pack<S, N> sums; ///< unused if kRowWise
  };

  template <int N>
  __device__ Elements<N> fetch(int64_t row, int64_t d) const {
    if constexpr (kRowWise) {
      return {load_pack<N>(param[row] + d), {}};
    } else {
      return {load_pack<N>(param[row] + d), load_pack<N>(sum[row] + d)};
    }
  }

  template <int N>
  __device__ M squares(const Elements<N>& old, const M (&g)[N]) const {
    M result = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const M gradient = g[i] + M(numbers.weight_decay) * M(old.param.values[i]);
      result += gradient * gradient;
    }
    return result;
  }

  __device__ void set_mean_square(Row& row_update, M mean) const {
    row_update.sum += mean;
    row_update.rate = adagrad_row_rate(row_update.sum, row_update.step);
  }

  template <int N>
  __device__ void update(const Row& row_update, Elements<N> old, int64_t row, int64_t d,
                         const M (&g)[N]) const {
    M next[N], sums[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const M w = M(old.param.values[i]);
      if constexpr (kRowWise) {
        next[i] = w - row_update.rate * (g[i] + row_update.step.weight_decay * w);
      } else {
        sums[i] = M(old.sums.values[i]);
        next[i] = adagrad_element(w, sums[i], g[i], row_update.step);
      }
    }
    if constexpr (!kRowWise) {
      round_pack<S>(sums, row_update.random, d, StateBits());
      store_pack(sum[row] + d, sums);
    }
    if (row_update.random.table) {
      round_pack<T>(next, row_update.random, d, TableBits());
    }
    store_pack(param[row] + d, next);
  }

  __device__ void finish(const Row& row_update, int64_t row) const {
    if constexpr (kRowWise) {
      *sum[row] = S(row_update.sum);
    }
  }
};

template <typename T, typename S, bool kRowWise>
void step_rows_of(const Tensor& param, TensorList state, const GradientOfRows& gradient,
                  const RowAdagradNumbers& numbers, const LearningRate& rate) {
  AdagradRows<T, S, kRowWise> rule{device_rows<T>(param),
                                   device_rows<S>(state[AdagradState::kSum]),
                                   state[AdagradState::kCount].const_data_ptr<int64_t>(),
                                   numbers,
                                   rate,
                                   false};
  constexpr int64_t kPack = 16 / sizeof(T);
  rule.wide = rule.param.packs(kPack) && (kRowWise || rule.sum.packs(kPack)) &&
      (param.dim() < 2 || param.size(1) % kPack == 0);
  update_rows(rule, numbers.maximize ? gradient.negated() : gradient, param.size(0));
}

void step_adagrad_rows(const Tensor& param, TensorList state, const GradientOfRows& gradient,
                       const RowAdagradNumbers& numbers, const OptionalTensor& lr) {
  Tensor lr_storage;
  const LearningRate rate = learning_rate(numbers.lr, lr, param, lr_storage);
  dispatch_rows(param, state[AdagradState::kSum], [&](auto zero, auto zero_state) {
    using T = decltype(zero);
    using S = decltype(zero_state);
    if constexpr (std::is_same_v<S, at::opmath_type<T>>) {
      if (state[AdagradState::kSum].dim() < param.dim()) {
        step_rows_of<T, S, true>(param, state, gradient, numbers, rate);
        return;
      }
    }
    step_rows_of<T, S, false>(param, state, gradient, numbers, rate);
  });
  state[AdagradState::kCount].add_(1);
}

bool supports_adagrad_kernel(const Tensor& param, TensorList state) {
  return !use_reference() && has_row_view(param) && has_row_view(state[AdagradState::kSum]);
}

void row_adagrad_rows_cuda(const Tensor& param, TensorList state, const Tensor& rows,
                           const Tensor& values, std::string_view options,
                           const OptionalTensor& lr) {
  const RowAdagradNumbers numbers = check_row_adagrad_rows(param, state, rows, values, options, lr);
  const c10::cuda::CUDAGuard guard(param.device());
  if (supports_adagrad_kernel(param, state)) {
    step_adagrad_rows(param, state, {rows, values}, numbers, lr);
  } else {
    row_adagrad_rows_composite(param, state, rows, values, options, lr);
  }
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("row_adagrad_rows_", row_adagrad_rows_cuda);
  m.impl("row_adagrad_terms_",
         step_by_terms<row_adagrad_terms, supports_adagrad_kernel, step_adagrad_rows,
                       row_adagrad_rows_cuda>);
}

} // namespace xsoftmax
