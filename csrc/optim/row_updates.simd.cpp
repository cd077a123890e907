#include "cpu/prefetch.h"
#include "optim/row_arithmetic.h"
#include "optim/row_updates.h"

#include <type_traits>

namespace xsoftmax::XS_ISA {
namespace {

// Returns whether any element is not 0; usually the first one already is.
template <typename M>
bool any(const M* x, int64_t width) {
  int64_t d = 0;
  while (d < width && x[d] == 0) {
    ++d;
  }
  return d < width;
}

template <typename T>
const opmath<T>* sum_rows(opmath<T>* __restrict sum, const T* values, const int64_t* position,
                          int64_t n, int64_t width) {
  const T* __restrict first = values + position[0] * width;
  if constexpr (std::is_same_v<T, opmath<T>>) {
    if (n == 1) {
      return any(first, width) ? first : nullptr;
    }
  }
  for (int64_t d = 0; d < width; ++d) {
    sum[d] = load(first[d]);
  }
  for (int64_t j = 1; j < n; ++j) {
    const T* __restrict row = values + position[j] * width;
    for (int64_t d = 0; d < width; ++d) {
      sum[d] += load(row[d]);
    }
  }
  return any(sum, width) ? sum : nullptr;
}

/// Start of a loop with stochastic rounding: an element, and its summand to the row's key.
struct ElementPosition {
  int64_t d;
  uint32_t element;
};
constexpr ElementPosition element_position(int64_t d) { return {d, kElement * uint32_t(d)}; }
constexpr ElementPosition kBegin = element_position(0);

template <typename T>
inline void prefetch_part(const T* row, int64_t begin, int64_t end) {
  if (row != nullptr) {
    prefetch_bytes</*kWrite=*/true>(row + begin, (end - begin) * int64_t(sizeof(T)));
  }
}

/// Calls loop(begin, end) for the parts of a row, and prefetches the same part of the rows ahead
/// before each call. Parts have a constant size where possible, so that their loops need no
/// remainder.
template <typename T, typename S, typename Loop>
inline void for_parts(const RowsAhead<T, S>& ahead, int64_t width, const Loop& loop) {
  constexpr int64_t kPart = 64; // in elements: whole cache lines, and whole vectors of any type
  int64_t begin = 0;
  const auto prefetch = [&](int64_t end) {
    prefetch_part(ahead.param, begin, end);
    prefetch_part(ahead.state[0], begin, end);
    prefetch_part(ahead.state[1], begin, end);
  };
  for (; begin + kPart <= width; begin += kPart) {
    prefetch(begin + kPart);
    loop(begin, begin + kPart);
  }
  if (begin < width) {
    prefetch(width);
    loop(begin, width);
  }
}

/// Stores x in type T, by stochastic rounding with the 16 bits of `random` if kRandom, else to
/// nearest.
template <bool kRandom, typename T>
inline void store_rounded(T* to, opmath<T> x, uint32_t random) {
  if constexpr (!kRandom || std::is_same_v<T, opmath<T>>) {
    store(to, x);
  } else if constexpr (std::is_same_v<T, Bf16>) {
    const uint32_t bits = bit_cast<uint32_t>(x); // a NaN from arithmetic has a nonzero upper half
    to->bits = uint16_t((bits + ((bits & 0x7FFFFFFFu) < 0x7F800000u ? random : 0u)) >> 16);
  } else {
    store(to, round_at_random(x, random, false));
  }
}

/// Calls loop(std::bool_constant<whether the table uses stochastic rounding>).
template <typename T, typename Loop>
inline void dispatch_rounding(const RowRounding& random, const Loop& loop) {
  if constexpr (!std::is_same_v<T, opmath<T>>) {
    if (random.table) {
      loop(std::true_type());
      return;
    }
  }
  loop(std::false_type());
}

template <typename T, typename S>
void sgd(T* __restrict w, const opmath<T>* __restrict g, opmath<T> decay, opmath<T> lr,
         const RowRounding& random, int64_t width, const RowsAhead<T, S>& ahead) {
  dispatch_rounding<T>(random, [=, r = random, &ahead](auto stochastic) {
    for_parts(ahead, width, [=](int64_t begin, int64_t end) {
      for (auto [d, e] = element_position(begin); d < end; ++d, e += kElement) {
        store_rounded<stochastic>(w + d, decay * load(w[d]) - lr * g[d], table_bits(r, e));
      }
    });
  });
}

// The lambdas copy `step`, so that stores to the row cannot alias it.
template <typename T, typename S>
void momentum(T* __restrict w, S* __restrict buffer, const opmath<T>* __restrict g,
              const MomentumStep<opmath<T>>& step, const RowRounding& random, int64_t width,
              const RowsAhead<T, S>& ahead) {
  dispatch_rounding<T>(random, [=, s = step, r = random, &ahead](auto stochastic) {
    const auto loop = [&](auto nesterov) {
      for_parts(ahead, width, [=](int64_t begin, int64_t end) {
        for (auto [d, e] = element_position(begin); d < end; ++d, e += kElement) {
          opmath<T> next = load(buffer[d]);
          store_rounded<stochastic>(w + d, momentum_element(load(w[d]), next, g[d], s, nesterov),
                                    table_bits(r, e));
          store_rounded<true>(buffer + d, next, state_bits(r, e));
        }
      });
    };
    s.nesterov ? loop(std::true_type()) : loop(std::false_type());
  });
}

template <typename T, typename S>
void adagrad(T* __restrict w, S* __restrict sum, const opmath<T>* __restrict g,
             const AdagradStep<opmath<T>>& step, const RowRounding& random, int64_t width,
             const RowsAhead<T, S>& ahead) {
  dispatch_rounding<T>(random, [=, s = step, r = random, &ahead](auto stochastic) {
    for_parts(ahead, width, [=](int64_t begin, int64_t end) {
      for (auto [d, e] = element_position(begin); d < end; ++d, e += kElement) {
        opmath<T> next = load(sum[d]);
        store_rounded<stochastic>(w + d, adagrad_element(load(w[d]), next, g[d], s),
                                  table_bits(r, e));
        store_rounded<true>(sum + d, next, state_bits(r, e));
      }
    });
  });
}

template <typename T, typename S>
void adagrad_row(T* __restrict w, opmath<T>* __restrict sum, const opmath<T>* __restrict g,
                 const AdagradStep<opmath<T>>& step, const RowRounding& random, int64_t width,
                 const RowsAhead<T, S>& ahead) {
  using M = opmath<T>;
  const AdagradStep<M> s = step;
  M squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t d = 0; d < width; ++d) {
    const M gradient = g[d] + s.weight_decay * load(w[d]);
    squares += gradient * gradient;
  }
  *sum += squares / M(width);
  const M rate = adagrad_row_rate(*sum, s);
  dispatch_rounding<T>(random, [=, r = random, &ahead](auto stochastic) {
    for_parts(ahead, width, [=](int64_t begin, int64_t end) {
      for (auto [d, e] = element_position(begin); d < end; ++d, e += kElement) {
        const M old = load(w[d]), gradient = g[d] + s.weight_decay * old;
        store_rounded<stochastic>(w + d, old - rate * gradient, table_bits(r, e));
      }
    });
  });
}

template <typename T, typename S>
void drift(T* __restrict w, S* __restrict buffer, opmath<T> decay, opmath<T> drift,
           opmath<T> buffer_factor, const RowRounding& random, int64_t width) {
  dispatch_rounding<T>(random, [=, r = random](auto stochastic) {
    for (auto [d, e] = kBegin; d < width; ++d, e += kElement) {
      store_rounded<stochastic>(w + d, decay * load(w[d]) - drift * load(buffer[d]),
                                table_bits(r, e));
    }
    if (buffer_factor != 1) {
      for (auto [d, e] = kBegin; d < width; ++d, e += kElement) {
        store_rounded<true>(buffer + d, buffer_factor * load(buffer[d]), state_bits(r, e));
      }
    }
  });
}

template <typename T>
void decay(T* __restrict w, opmath<T> decay, const RowRounding& random, int64_t width) {
  dispatch_rounding<T>(random, [=, r = random](auto stochastic) {
    for (auto [d, e] = kBegin; d < width; ++d, e += kElement) {
      store_rounded<stochastic>(w + d, decay * load(w[d]), table_bits(r, e));
    }
  });
}

template <typename T, typename S>
void adam(T* __restrict w, S* __restrict m, S* __restrict v, const opmath<T>* __restrict g,
          const AdamStep<opmath<T>>& step, const RowRounding& random, int64_t width,
          const RowsAhead<T, S>& ahead) {
  using M = opmath<T>;
  dispatch_rounding<T>(random, [=, s = step, r = random, &ahead](auto stochastic) {
    if (g == nullptr) {
      for (auto [d, e] = kBegin; d < width; ++d, e += kElement) {
        store_rounded<stochastic>(w + d,
                                  adam_pending_element<M>(load(w[d]), load(m[d]), load(v[d]), s),
                                  table_bits(r, e));
      }
      if (s.first_factor != 1 || s.second_factor != 1) {
        for (auto [d, e] = kBegin; d < width; ++d, e += kElement) {
          store_rounded<true>(m + d, s.first_factor * load(m[d]), state_bits(r, e));
          store_rounded<true>(v + d, s.second_factor * load(v[d]), second_state_bits(r, e));
        }
      }
      return;
    }
    const auto loop = [&](auto pending) {
      for_parts(ahead, width, [=](int64_t begin, int64_t end) {
        for (auto [d, e] = element_position(begin); d < end; ++d, e += kElement) {
          M x = load(w[d]), first = load(m[d]), second = load(v[d]);
          if constexpr (pending) {
            x = adam_pending_element(x, first, second, s);
          }
          x = adam_element(x, first, second, g[d], s, pending ? M(1) : s.decay, s.first_factor,
                           s.second_factor);
          store_rounded<stochastic>(w + d, x, table_bits(r, e));
          store_rounded<true>(m + d, first, state_bits(r, e));
          store_rounded<true>(v + d, second, second_state_bits(r, e));
        }
      });
    };
    s.pending != 0 ? loop(std::true_type()) : loop(std::false_type());
  });
}

template <typename T, typename S>
void adam_row(T* __restrict w, S* __restrict m, opmath<T>* __restrict v,
              const opmath<T>* __restrict g, const AdamStep<opmath<T>>& step,
              const RowRounding& random, int64_t width, const RowsAhead<T, S>& ahead) {
  using M = opmath<T>;
  const M pending = adam_row_pending(*v, step), old = *v;
  if (g == nullptr) {
    drift(w, m, step.decay, pending, step.first_factor, random, width);
    *v = step.second_factor * old;
    return;
  }
  M squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t d = 0; d < width; ++d) {
    squares += g[d] * g[d];
  }
  *v = step.second_factor * old + step.one_minus_beta2 * (squares / M(width));
  const M rate = adam_row_rate(*v, step);
  dispatch_rounding<T>(random, [=, s = step, r = random, &ahead](auto stochastic) {
    for_parts(ahead, width, [=](int64_t begin, int64_t end) {
      for (auto [d, e] = element_position(begin); d < end; ++d, e += kElement) {
        M first = load(m[d]);
        store_rounded<stochastic>(w + d,
                                  adam_row_element<M>(load(w[d]), first, g[d], s, pending, rate),
                                  table_bits(r, e));
        store_rounded<true>(m + d, first, state_bits(r, e));
      }
    });
  });
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

template <typename T, typename S = opmath<T>>
constexpr RowUpdates<T, S> updates() {
  return {sum_rows<T>, sgd<T, S>,      momentum<T, S>, adagrad<T, S>, adagrad_row<T, S>,
          adam<T, S>,  adam_row<T, S>, drift<T, S>,    decay<T>,      power_sum<opmath<T>>};
}

} // namespace

extern const RowUpdateTable row_updates{
    updates<float>(),       updates<double>(),     updates<Bf16>(),     updates<F16>(),
    updates<float, Bf16>(), updates<Bf16, Bf16>(), updates<F16, Bf16>()};

} // namespace xsoftmax::XS_ISA
