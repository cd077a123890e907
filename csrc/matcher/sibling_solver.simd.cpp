#include "matcher/sibling_solver.h"

#include "cpu/simd.h"

namespace xsoftmax::XS_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLogit = 18.0f; // a cost times e^-18 is below float32 resolution

constexpr int kRegister = kRegisterBytes / sizeof(float);

// Vectors of the compiler, at most as wide as a register.
template <int kWidth> struct Registers;
template <> struct Registers<4> {
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  typedef int64_t Pairs __attribute__((vector_size(16)));
};
template <> struct Registers<8> {
  typedef float Floats __attribute__((vector_size(32)));
  typedef int32_t Ints __attribute__((vector_size(32)));
  typedef int64_t Pairs __attribute__((vector_size(32)));
};
template <> struct Registers<16> {
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Ints __attribute__((vector_size(64)));
  typedef int64_t Pairs __attribute__((vector_size(64)));
};

constexpr int width_of(int lanes) { return lanes < kRegister ? lanes : kRegister; }

template <typename R, typename F>
static inline R for_parts(const F& part) {
  R result;
  for (int i = 0; i < R::kParts; ++i) {
    result.part[i] = part(i);
  }
  return result;
}

// A mask of labels: all bits of a lane are set, or none.
template <int kLanes>
struct Mask {
  static constexpr int kParts = kLanes / width_of(kLanes);
  typename Registers<width_of(kLanes)>::Ints part[kParts] = {};

  friend inline Mask operator&(const Mask& a, const Mask& b) {
    return for_parts<Mask>([&](int i) { return a.part[i] & b.part[i]; });
  }
  friend inline Mask operator|(const Mask& a, const Mask& b) {
    return for_parts<Mask>([&](int i) { return a.part[i] | b.part[i]; });
  }
  friend inline Mask operator~(const Mask& a) {
    return for_parts<Mask>([&](int i) { return ~a.part[i]; });
  }
};

// One number per label.
template <int kLanes>
struct Float {
  static constexpr int kParts = Mask<kLanes>::kParts;
  using Part = typename Registers<width_of(kLanes)>::Floats;
  Part part[kParts] = {};

  Float() = default;
  Float(float number) { // implicit, so that numbers can be used in vector expressions
    for (Part& each : part) {
      each = number - Part{};
    }
  }

  friend inline Float operator-(const Float& a) {
    return for_parts<Float>([&](int i) { return -a.part[i]; });
  }
  friend inline Float operator+(const Float& a, const Float& b) {
    return for_parts<Float>([&](int i) { return a.part[i] + b.part[i]; });
  }
  friend inline Float operator-(const Float& a, const Float& b) {
    return for_parts<Float>([&](int i) { return a.part[i] - b.part[i]; });
  }
  friend inline Float operator*(const Float& a, const Float& b) {
    return for_parts<Float>([&](int i) { return a.part[i] * b.part[i]; });
  }
  friend inline Float operator/(const Float& a, const Float& b) {
    return for_parts<Float>([&](int i) { return a.part[i] / b.part[i]; });
  }
  friend inline Mask<kLanes> operator<(const Float& a, const Float& b) {
    return for_parts<Mask<kLanes>>([&](int i) { return a.part[i] < b.part[i]; });
  }
  friend inline Mask<kLanes> operator<=(const Float& a, const Float& b) {
    return for_parts<Mask<kLanes>>([&](int i) { return a.part[i] <= b.part[i]; });
  }
  friend inline Mask<kLanes> operator>(const Float& a, const Float& b) { return b < a; }
  friend inline Mask<kLanes> operator>=(const Float& a, const Float& b) { return b <= a; }
  friend inline Mask<kLanes> operator!=(const Float& a, const Float& b) {
    return for_parts<Mask<kLanes>>([&](int i) { return a.part[i] != b.part[i]; });
  }
  friend inline Float choose(const Mask<kLanes>& mask, const Float& a, const Float& b) {
    return for_parts<Float>([&](int i) { return mask.part[i] ? a.part[i] : b.part[i]; });
  }
  friend inline Float smaller(const Float& a, const Float& b) { return choose(a < b, a, b); }
  friend inline Float larger(const Float& a, const Float& b) { return choose(a > b, a, b); }
};

// Copies one register at a time, because larger copies go through memory.
template <typename T>
static inline T read(const float* from) {
  return for_parts<T>([&](int i) {
    typename T::Part part;
    __builtin_memcpy(&part, from + i * (sizeof(part) / sizeof(float)), sizeof(part));
    return part;
  });
}

template <typename T>
static inline void write(float* to, const T& value) {
  for (int i = 0; i < T::kParts; ++i) {
    __builtin_memcpy(to + i * (sizeof(value.part[i]) / sizeof(float)), &value.part[i],
                     sizeof(value.part[i]));
  }
}

template <int kLanes>
static inline bool any(const Mask<kLanes>& mask) {
  using Pairs = typename Registers<width_of(kLanes)>::Pairs;
  Pairs all{};
  for (const auto& part : mask.part) {
    all |= (Pairs)part;
  }
  int64_t bits = 0;
  for (unsigned i = 0; i < sizeof(Pairs) / sizeof(int64_t); ++i) {
    bits |= all[i];
  }
  return bits != 0;
}

// Returns the mask in which lane c is set if bit c is.
template <int kLanes>
static inline Mask<kLanes> lanes_of(uint32_t bits) {
  constexpr int kWidth = width_of(kLanes);
  return for_parts<Mask<kLanes>>([&](int i) {
    typename Registers<kWidth>::Ints place;
    for (int c = 0; c < kWidth; ++c) {
      place[c] = int32_t(1) << (i * kWidth + c);
    }
    return (place & int32_t(bits)) != 0;
  });
}

// xorshift64 (Marsaglia, 2003): small, fast, and good enough to shuffle rows.
static inline uint64_t next(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static inline void exchange(int32_t* order, int64_t i, int64_t j) {
  const int32_t kept = order[i];
  order[i] = order[j];
  order[j] = kept;
}

void shuffle(int32_t* order, int64_t n, uint64_t& random) {
  for (int64_t i = 0; i < n; ++i) {
    exchange(order, i,
             i + int64_t((static_cast<unsigned __int128>(next(random)) * uint64_t(n - i)) >> 64));
  }
}

// Returns w.x for every label. Two sums, so that consecutive additions do not depend on each other.
template <int kLanes>
static inline Float<kLanes> products(const SiblingProblem& p, int64_t row, const float* weights) {
  using F = Float<kLanes>;
  F even{}, odd{};
  int64_t t = p.start[row];
  const int64_t end = p.start[row + 1];
  for (; t + 1 < end; t += 2) {
    even = even + p.value[t] * read<F>(weights + int64_t(p.column[t]) * kLanes);
    odd = odd + p.value[t + 1] * read<F>(weights + int64_t(p.column[t + 1]) * kLanes);
  }
  if (t < end) {
    even = even + p.value[t] * read<F>(weights + int64_t(p.column[t]) * kLanes);
  }
  return even + odd;
}

template <int kLanes>
static inline void add_row(const SiblingProblem& p, int64_t row, Float<kLanes> step,
                           float* weights) {
  for (int64_t t = p.start[row]; t < p.start[row + 1]; ++t) {
    float* w = weights + int64_t(p.column[t]) * kLanes;
    write(w, read<Float<kLanes>>(w) + p.value[t] * step);
  }
}

template <int kLanes>
static inline Float<kLanes> costs(const SiblingProblem& p, int64_t row, Mask<kLanes> positive) {
  using F = Float<kLanes>;
  return p.cost != nullptr ? read<F>(p.cost + row * kLanes)
                           : choose(positive, F(p.positive_cost), F(p.negative_cost));
}

template <int kLanes>
static inline Float<kLanes> logistic_weight(Float<kLanes> logit, Float<kLanes> cost) {
  alignas(64) float e[kLanes];
  write(e, -logit);
#pragma omp simd
  for (int c = 0; c < kLanes; ++c) {
    e[c] = exponential(e[c]);
  }
  return cost / (1.0f + read<Float<kLanes>>(e));
}

// Returns the logit u at which square (C s(u) - a) + margin + u = 0, where s is the sigmoid. Uses
// Newton steps, and bisection if a step leaves the bracket.
template <int kLanes>
static inline Float<kLanes> logistic_logit(Float<kLanes> logit, Float<kLanes> a,
                                           Float<kLanes> margin, float square, Float<kLanes> cost) {
  using F = Float<kLanes>;
  const auto clamped = [](F x) { return smaller(larger(x, -kLogit), kLogit); };
  F low = clamped(-margin - square * (cost - a)), high = clamped(-margin + square * a),
    u = smaller(larger(logit, low), high);
  for (int step = 0; step < 8; ++step) {
    const F z = logistic_weight<kLanes>(u, cost), value = square * (z - a) + margin + u;
    low = choose(value < 0.0f, u, low);
    high = choose(value < 0.0f, high, u);
    const F newton_logit = u - value / (1.0f + square * z * (1.0f - z / cost));
    u = choose((newton_logit >= low) & (newton_logit <= high), newton_logit, 0.5f * (low + high));
  }
  return u;
}

/// The effect of one row on the labels in training.
template <int kLanes>
struct DualUpdate {
  Float<kLanes> violation; ///< the projected gradient
  Float<kLanes> state;     ///< the new state
  Float<kLanes> change;    ///< of the dual variable
  Mask<kLanes> out;        ///< the labels for which the row can be left out
};

template <int kLanes, LinearLoss kLoss>
static inline DualUpdate<kLanes> visit(Float<kLanes> state, Float<kLanes> margin,
                                       Float<kLanes> cost, float square, Mask<kLanes> work,
                                       Float<kLanes> upper_bound, Float<kLanes> lower_bound) {
  using F = Float<kLanes>;
  const Mask<kLanes> has_cost = cost > 0.0f;
  if constexpr (kLoss == LinearLoss::Logistic) {
    const F before = logistic_weight<kLanes>(state, cost);
    const F after =
        choose(work & has_cost, logistic_logit<kLanes>(state, before, margin, square, cost), state);
    // At +-kLogit the dual variable is at its bound: only gradients that point inwards count.
    const F gradient = margin + state;
    const F violation = choose(state <= -kLogit, smaller(gradient, 0.0f),
                               choose(state >= kLogit, larger(gradient, 0.0f), gradient));
    return {choose(has_cost, violation, 0.0f),
            after,
            logistic_weight<kLanes>(after, cost) - before,
            {}};
  } else {
    constexpr bool kSquared = kLoss == LinearLoss::SquaredHinge;
    const F ridge = kSquared ? 0.5f / cost : F{}, limit = kSquared ? F(kInfinity) : cost;
    const F gradient = margin - 1.0f + (kSquared ? ridge * state : F{});
    const Mask<kLanes> low = state <= 0.0f, high = state >= limit;
    const F violation =
        choose(low, smaller(gradient, 0.0f), choose(high, larger(gradient, 0.0f), gradient));
    const F curvature = square + ridge;
    const F free = choose(curvature > 0.0f, state - gradient / curvature,
                          choose(gradient < 0.0f, limit, 0.0f));
    const F after = choose(work & has_cost, smaller(larger(free, 0.0f), limit), state);
    return {choose(has_cost, violation, 0.0f), after, after - state,
            (low & (gradient > upper_bound)) | (high & (gradient < lower_bound)) | ~has_cost};
  }
}

// The state for a dual variable of 0.
template <LinearLoss kLoss> constexpr float kInitialState =
    kLoss == LinearLoss::Logistic ? -kLogit : 0.0f;

// Computes the dual variables that belong to given weights, then the weights that belong to those.
template <int kLanes, LinearLoss kLoss>
void warm_up(const SiblingProblem& p, float* weights, float* state) {
  using F = Float<kLanes>;
  for (int64_t row = 0; row < p.rows; ++row) {
    const Mask<kLanes> positive = lanes_of<kLanes>(p.positive[row]);
    const F margin = choose(positive, F(1.0f), F(-1.0f)) * products<kLanes>(p, row, weights),
            cost = costs<kLanes>(p, row, positive);
    F begin;
    if constexpr (kLoss == LinearLoss::Logistic) {
      begin = smaller(larger(-margin, -kLogit), kLogit);
    } else if constexpr (kLoss == LinearLoss::SquaredHinge) {
      begin = 2.0f * cost * larger(1.0f - margin, 0.0f);
    } else {
      begin = choose(margin < 1.0f, cost, 0.0f);
    }
    write(state + row * kLanes, begin);
  }
  __builtin_memset(weights, 0, uint64_t(p.columns) * kLanes * sizeof(float));
  for (int64_t row = 0; row < p.rows; ++row) {
    const Mask<kLanes> positive = lanes_of<kLanes>(p.positive[row]);
    F dual = read<F>(state + row * kLanes);
    if constexpr (kLoss == LinearLoss::Logistic) {
      dual = logistic_weight<kLanes>(dual, costs<kLanes>(p, row, positive));
    }
    add_row<kLanes>(p, row, choose(positive, dual, -dual), weights);
  }
}

template <int kLanes, LinearLoss kLoss>
void run(const SiblingProblem& p, float* weights, float* state, int32_t* order,
         SiblingStats* stats) {
  using F = Float<kLanes>;
  uint64_t random = p.seed * 0x9E3779B97F4A7C15u | 1u;
  int64_t active = p.rows;
  for (int64_t i = 0; i < p.rows; ++i) {
    order[i] = int32_t(i);
  }
  if (p.warm) {
    warm_up<kLanes, kLoss>(p, weights, state);
  } else {
    for (int64_t i = 0; i < p.rows * kLanes; ++i) {
      state[i] = kInitialState<kLoss>;
    }
  }
  // Gradients beyond which a row at a bound is left out.
  F upper_bound = kInfinity, lower_bound = -kInfinity;
  Mask<kLanes> work = lanes_of<kLanes>((1u << p.labels) - 1);
  stats->sweeps = 0;
  while (stats->sweeps < p.sweeps && any(work) && !p.stopped(p.work)) {
    ++stats->sweeps;
    F largest = -kInfinity, smallest = kInfinity;
    shuffle(order, active, random);
    for (int64_t at = 0; at < active; ++at) {
      const int64_t row = order[at];
      const Mask<kLanes> positive = lanes_of<kLanes>(p.positive[row]);
      const F y = choose(positive, F(1.0f), F(-1.0f));
      const DualUpdate<kLanes> update = visit<kLanes, kLoss>(
          read<F>(state + row * kLanes), y * products<kLanes>(p, row, weights),
          costs<kLanes>(p, row, positive), p.square[row], work, upper_bound, lower_bound);
      largest = choose(work, larger(largest, update.violation), largest);
      smallest = choose(work, smaller(smallest, update.violation), smallest);
      if (any(update.change != 0.0f)) {
        write(state + row * kLanes, update.state);
        add_row<kLanes>(p, row, y * update.change, weights);
      }
      if (!any(work & ~update.out)) {
        exchange(order, at--, --active);
      }
    }
    // Includes the largest violation, because at an optimum the gradients are 0, not only equal.
    const F max_violation = larger(largest, -smallest),
            range = kLoss == LinearLoss::Logistic ? max_violation
                                                  : larger(largest - smallest, max_violation);
    const Mask<kLanes> open = work & ~(range <= p.tolerance);
    upper_bound = choose(largest > 0.0f, largest, kInfinity);
    lower_bound = choose(smallest < 0.0f, smallest, -kInfinity);
    work = active == p.rows ? open : work;
    // The active rows have converged: check all rows once more.
    if (!any(open)) {
      active = p.rows;
      upper_bound = kInfinity;
      lower_bound = -kInfinity;
    }
  }
  stats->unconverged = 0;
  for (int64_t c = 0; c < p.labels; ++c) {
    stats->unconverged -= work.part[c / width_of(kLanes)][c % width_of(kLanes)];
  }
}

template <int kLanes>
void run_loss(const SiblingProblem& p, float* weights, float* state, int32_t* order,
              SiblingStats* stats) {
  switch (p.loss) {
    case LinearLoss::SquaredHinge:
      return run<kLanes, LinearLoss::SquaredHinge>(p, weights, state, order, stats);
    case LinearLoss::Hinge: return run<kLanes, LinearLoss::Hinge>(p, weights, state, order, stats);
    case LinearLoss::Logistic:
      return run<kLanes, LinearLoss::Logistic>(p, weights, state, order, stats);
  }
}

void solve(const SiblingProblem& p, float* weights, float* state, int32_t* order,
           SiblingStats* stats) {
  switch (sibling_lanes(p.labels)) {
    case 4: return run_loss<4>(p, weights, state, order, stats);
    case 8: return run_loss<8>(p, weights, state, order, stats);
    default: return run_loss<kSiblingLanes>(p, weights, state, order, stats);
  }
}

} // namespace

extern const SiblingSolverTable sibling_solver{solve};

} // namespace xsoftmax::XS_ISA
