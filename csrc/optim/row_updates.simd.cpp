#include "optim/row_arithmetic.h"
#include "optim/row_updates.h"

namespace xsoftmax::XS_ISA {
namespace {

template <typename T>
bool sum_rows(opmath<T>* __restrict sum, const T* values, const int64_t* position, int64_t n, int64_t width) {
  const T* __restrict first = values + position[0] * width;
  for (int64_t d = 0; d < width; ++d) {
    sum[d] = load(first[d]);
  }
  for (int64_t j = 1; j < n; ++j) {
    const T* __restrict row = values + position[j] * width;
    for (int64_t d = 0; d < width; ++d) {
      sum[d] += load(row[d]);
    }
  }
  bool any = false;
  for (int64_t d = 0; d < width; ++d) {
    any |= sum[d] != 0;
  }
  return any;
}

template <typename T>
void sgd(T* __restrict w, const opmath<T>* __restrict g, opmath<T> decay, opmath<T> lr, int64_t width) {
  for (int64_t d = 0; d < width; ++d) {
    store(w + d, decay * load(w[d]) - lr * g[d]);
  }
}

template <typename T>
void momentum(T* __restrict w, opmath<T>* __restrict buffer, const opmath<T>* __restrict g, const MomentumStep<opmath<T>>& step,
              int64_t width) {
  const MomentumStep<opmath<T>> s = step; // a copy: stores to the row cannot change it
  if (s.nesterov) {
    for (int64_t d = 0; d < width; ++d) {
      store(w + d, momentum_element(load(w[d]), buffer[d], g[d], s, true));
    }
    return;
  }
  for (int64_t d = 0; d < width; ++d) {
    store(w + d, momentum_element(load(w[d]), buffer[d], g[d], s, false));
  }
}

template <typename T>
void adagrad(T* __restrict w, opmath<T>* __restrict sum, const opmath<T>* __restrict g, const AdagradStep<opmath<T>>& step,
             int64_t width) {
  const AdagradStep<opmath<T>> s = step;
  for (int64_t d = 0; d < width; ++d) {
    store(w + d, adagrad_element(load(w[d]), sum[d], g[d], s));
  }
}

template <typename T>
void adagrad_row(T* __restrict w, opmath<T>* __restrict sum, opmath<T>* __restrict g, const AdagradStep<opmath<T>>& step,
                 int64_t width) {
  const AdagradStep<opmath<T>> s = step;
  opmath<T> squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t d = 0; d < width; ++d) {
    const opmath<T> gradient = g[d] + s.weight_decay * load(w[d]);
    g[d] = gradient;
    squares += gradient * gradient;
  }
  *sum += squares / opmath<T>(width);
  const opmath<T> rate = adagrad_row_rate(*sum, s);
  for (int64_t d = 0; d < width; ++d) {
    store(w + d, load(w[d]) - rate * g[d]);
  }
}

template <typename T>
void adam(T* __restrict w, opmath<T>* __restrict m, opmath<T>* __restrict v, const opmath<T>* __restrict g,
          const AdamStep<opmath<T>>& step, int64_t width) {
  using M = opmath<T>;
  const AdamStep<M> s = step;
  if (g == nullptr && s.keep1 == 1 && s.keep2 == 1) {
    for (int64_t d = 0; d < width; ++d) {
      store(w + d, adam_owed_element(load(w[d]), m[d], v[d], s));
    }
    return;
  }
  if (s.owed != 0 || g == nullptr) {
    for (int64_t d = 0; d < width; ++d) {
      store(w + d, adam_owed_element(load(w[d]), m[d], v[d], s));
      m[d] *= s.keep1;
      v[d] *= s.keep2;
    }
    if (g == nullptr) {
      return;
    }
  }
  const M decay = s.owed != 0 ? M(1) : s.decay, keep1 = s.owed != 0 ? M(1) : s.keep1, keep2 = s.owed != 0 ? M(1) : s.keep2;
  for (int64_t d = 0; d < width; ++d) {
    store(w + d, adam_element(load(w[d]), m[d], v[d], g[d], s, decay, keep1, keep2));
  }
}

template <typename T>
void drift(T* __restrict w, opmath<T>* __restrict buffer, opmath<T> decay, opmath<T> drift, opmath<T> keep, int64_t width) {
  for (int64_t d = 0; d < width; ++d) {
    store(w + d, decay * load(w[d]) - drift * buffer[d]);
  }
  if (keep != 1) {
    for (int64_t d = 0; d < width; ++d) {
      buffer[d] *= keep;
    }
  }
}

template <typename T>
void decay(T* __restrict w, opmath<T> decay, int64_t width) {
  for (int64_t d = 0; d < width; ++d) {
    store(w + d, decay * load(w[d]));
  }
}

template <typename M>
M power_sum(const M* __restrict x, double p, int64_t width) {
  M sum = 0;
  if (p == 2) {
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < width; ++d) {
      sum += x[d] * x[d];
    }
  } else if (p == 1) {
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < width; ++d) {
      sum += x[d] < 0 ? -x[d] : x[d];
    }
  } else if (p == __builtin_inf()) {
    bool nan = false;
#pragma omp simd reduction(max : sum) reduction(| : nan)
    for (int64_t d = 0; d < width; ++d) {
      const M size = x[d] < 0 ? -x[d] : x[d];
      sum = size > sum ? size : sum;
      nan |= size != size;
    }
    sum = nan ? M(__builtin_nan("")) : sum;
  } else {
    for (int64_t d = 0; d < width; ++d) {
      sum += M(__builtin_pow(double(x[d] < 0 ? -x[d] : x[d]), p));
    }
  }
  return sum;
}

template <typename T>
constexpr RowUpdates<T> updates() {
  return {sum_rows<T>, sgd<T>, momentum<T>, adagrad<T>, adagrad_row<T>, adam<T>, drift<T>, decay<T>, power_sum<opmath<T>>};
}

} // namespace

extern const RowUpdateTable row_updates{updates<float>(), updates<double>(), updates<Bf16>(), updates<F16>()};

} // namespace xsoftmax::XS_ISA
