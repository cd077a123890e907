#pragma once

#include "proposal/draws.h"
#include "proposal/sampling_cuda.cuh"
#include "proposal/static/static_tail.h"

#include <cmath>
#include <limits>

// Draws of the static samplers on a device, and their expected counts.

namespace xsoftmax::cuda {

#ifdef __CUDACC__
struct UniformDraw {
  int64_t low;
  uint64_t n;
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const {
    return low + int64_t(uniform_below(seed, query, draw, n));
  }
};

// Each draw recomputes its query's permutation: three Philox blocks, and no memory.
struct DistinctUniformDraw {
  int64_t low;
  uint64_t n;
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const {
    return low + int64_t(RandomPermutation(seed, query, n)(draw));
  }
};

struct LogUniformDraw {
  int64_t low, high;
  double start, span;

  // The host computes the logarithms, as for the CPU kernel, so that draws have the same bits.
  LogUniformDraw(int64_t low, int64_t high)
      : low(low), high(high), start(std::log1p(double(low))),
        span(std::log1p(double(high)) - start) {}
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const {
    return log_uniform_draw(seed, query, draw, low, high, start, span);
  }
};

struct AliasDraw {
  const AliasBin* bins;
  int64_t classes;
  StaticTail tail;

  /// bins: contiguous, kept alive by the caller.
  AliasDraw(const at::Tensor& bins, const StaticTail& tail)
      : bins(reinterpret_cast<const AliasBin*>(bins.const_data_ptr<int64_t>())),
        classes(bins.size(0)), tail(tail) {}
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const {
    const int64_t tail_id = tail.count() > 0 ? tail.draw(seed, query, draw) : -1,
                  id = tail_id < 0 ? alias_draw(seed, query, draw, bins, tail.first) : tail_id;
    CUDA_KERNEL_ASSERT(id >= 0 && id < classes); // fails only if the table is corrupt
    return id;
  }
};

struct UniformCount {
  int64_t low, high;
  float count;
  __device__ float operator()(int64_t id) const {
    return id < low || id >= high ? -std::numeric_limits<float>::infinity() : count;
  }
};

struct LogUniformCount {
  int64_t low, high;
  double log_scale;
  __device__ float operator()(int64_t id) const {
    return log_uniform_count(id, low, high, log_scale);
  }
};

/// Computed in float64, because the two logarithms nearly cancel.
struct TableCount {
  const double* probability;
  int64_t classes;
  const double* scale_on_device; ///< nullptr: use `log_scale`
  double log_scale;
  double most; ///< 0 for distinct draws, else infinity
  __device__ float operator()(int64_t id) const {
    CUDA_KERNEL_ASSERT(id < classes); // an ignored target may be any negative number
    const double count =
        (id < 0 ? -std::numeric_limits<double>::infinity() : log(probability[id])) +
        (scale_on_device == nullptr ? log_scale : *scale_on_device);
    return float(count > most ? most : count);
  }
};
#endif

} // namespace xsoftmax::cuda
