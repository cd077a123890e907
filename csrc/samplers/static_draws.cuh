#pragma once

#include "samplers/draws.h"
#include "samplers/sampling_cuda.cuh"

#include <cmath>
#include <limits>

// Draws of uniform and log-uniform samplers on a device, and their expected counts.

namespace xsoftmax::cuda {

#ifdef __CUDACC__
struct UniformDraw {
  int64_t low;
  uint64_t n;
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const { return low + int64_t(uniform_below(seed, query, draw, n)); }
};

// Every draw sets up the permutation of its query anew: three Philox blocks, and no memory.
struct DistinctUniformDraw {
  int64_t low;
  uint64_t n;
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const { return low + int64_t(RandomPermutation(seed, query, n)(draw)); }
};

struct LogUniformDraw {
  int64_t low, high;
  double start, span;

  // Logarithms on the host, as the CPU kernel takes them: the draws then have the same bits.
  LogUniformDraw(int64_t low, int64_t high) : low(low), high(high), start(std::log1p(double(low))), span(std::log1p(double(high)) - start) {}
  __device__ int64_t operator()(uint64_t seed, uint64_t query, uint64_t draw) const { return log_uniform_draw(seed, query, draw, low, high, start, span); }
};

struct UniformCount {
  int64_t low, high;
  float count;
  __device__ float operator()(int64_t id) const { return id < low || id >= high ? -std::numeric_limits<float>::infinity() : count; }
};

struct LogUniformCount {
  int64_t low, high;
  double log_scale;
  __device__ float operator()(int64_t id) const { return log_uniform_count(id, low, high, log_scale); }
};
#endif

} // namespace xsoftmax::cuda
