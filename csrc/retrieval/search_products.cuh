#pragma once

#include "table/cuda_rows.cuh"
#include "retrieval/search_list.cuh"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

// Searches that read all rows: products on tensor cores of rows and queries rounded to 16 bits. The
// rounding error is bounded, and classes that may be among the best are scored again in float64.
//
// Let z' = z 2^(exponent + f), whose largest coordinate is in [1, 2), ẑ and ŵ the 16-bit values,
// and factor = 2^-f. Then the difference between the score z.w + b and factor ẑ.ŵ + b is at most
//
//   factor (|z'| |w - ŵ| + |z' - ẑ| |ŵ| + (D + 16) 2^-22 |ẑ| |ŵ|) + 2^-22 |b| + least_error
//   = residual_error |w - ŵ| + norm_error |ŵ| + ...
//
// for a product ẑ.ŵ that is summed in float32, in any order and with truncating additions.

namespace xsoftmax::cuda {

/// The 16-bit type of the products: that of the table, or bfloat16, which has the range of float32.
template <typename T>
using Rounded = std::conditional_t<std::is_same_v<T, c10::Half>, c10::Half, c10::BFloat16>;

/// Classes begin ... begin + size - 1 and the bounds of their rounding errors.
template <typename T>
struct RowBlock {
  const T* rows;       // all rows of the table
  const T* bias;       // nullptr: none
  Rounded<T>* rounded; // [size, features]; nullptr: the table has 16-bit rows
  float *residual, *norm; // [size]: |w - ŵ|, |ŵ|
  float* largest;     // [2], the maxima of residual and norm; zeroed by the caller
  int64_t begin, size, features;
};

#ifdef __CUDACC__
/// Rounds rows to 16 bits and bounds the rounding errors. One warp per row.
template <typename T>
__global__ void round_rows_kernel(RowBlock<T> block) {
  for (int64_t j = global_thread() / kWarp; j < block.size; j += grid_threads() / kWarp) {
    const T* row = block.rows + (block.begin + j) * block.features;
    double residual = 0, norm = 0;
    for (int64_t d = lane(); d < block.features; d += kWarp) {
      const double w = double(row[d]);
      const Rounded<T> rounded_value = Rounded<T>(float(w));
      residual += (w - double(rounded_value)) * (w - double(rounded_value));
      norm += double(rounded_value) * double(rounded_value);
      if (block.rounded != nullptr) {
        block.rounded[j * block.features + d] = rounded_value;
      }
    }
    const float residual_norm = float(sqrt(warp_sum(residual)) * (1 + 1e-6)),
                rounded_norm = float(sqrt(warp_sum(norm)) * (1 + 1e-6));
    if (lane() == 0) {
      block.residual[j] = residual_norm;
      block.norm[j] = rounded_norm;
      // Neither is negative, so their bits are ordered like integers.
      atomicMax(reinterpret_cast<int*>(block.largest), __float_as_int(residual_norm));
      atomicMax(reinterpret_cast<int*>(block.largest) + 1, __float_as_int(rounded_norm));
    }
  }
}

/// Returns the score of a class, computed from its rounded product, and its error bound.
template <typename T>
__device__ inline Candidate scored(const RowBlock<T>& block, const SearchQuery& query,
                                   float bias_scale, float product, int64_t j, float threshold) {
  const float bias = block.bias == nullptr ? 0.0f : float(block.bias[block.begin + j]) * bias_scale;
  const float score = product * query.factor + bias,
              fixed = fabsf(bias) * 0x1p-22f + query.least_error;
  Candidate one{
      score, query.residual_error * block.largest[0] + query.norm_error * block.largest[1] + fixed,
      block.begin + j, true};
  if (score + one.error < threshold) { // by the maxima of the block; false for NaN
    one.is_candidate = false;
    return one;
  }
  one.error = query.residual_error * block.residual[j] + query.norm_error * block.norm[j] + fixed;
  return one;
}

/// Adds the classes of a block whose products reach the threshold to the lists. One block of
/// threads per query. first: the list is empty.
template <typename T, int N>
__global__ void fold_products_kernel(RowBlock<T> block, const float* products,
                                     const SearchQuery* queries, const double* wide, int64_t width,
                                     int64_t count, ListStorage lists, RowScorer<T> scorer,
                                     int64_t k, bool first) {
  __shared__ int64_t storage[kWarp];
  for (int64_t q = blockIdx.x; q < count; q += gridDim.x) {
    const SearchQuery query = queries[q];
    SearchList list(lists, q, k, storage);
    if (!first) {
      list.load(lists, q);
    }
    scorer.query = wide + q * width;
    scorer.exponent = query.exponent;
    const float bias_scale = float(ldexp(1.0, query.exponent));
    const float* row = products + q * block.size;
    for (int64_t base = 0; base < block.size && query.state == kSearched;
         base += int64_t(blockDim.x) * N) {
      const int64_t j = base + int64_t(threadIdx.x) * N;
      const float threshold = below(list.threshold);
      Candidate mine[N];
      bool any_accepted = false;
      if (j < block.size) {
        const auto pack = load_pack<N>(row + j);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          mine[i] = scored(block, query, bias_scale, pack.values[i], j + i, threshold);
          any_accepted |= mine[i].reaches(list.threshold);
        }
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          mine[i] = {0, 0, 0, false};
        }
      }
      if (__syncthreads_or(any_accepted) != 0) {
        list.add(mine, scorer);
      }
    }
    list.store(lists, q);
  }
}
#endif

} // namespace xsoftmax::cuda
