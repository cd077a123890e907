#pragma once

#include "op/cuda_launch.cuh"
#include "cpu/simd.h"

#include <ATen/OpMathType.h>

#include <cmath>
#include <limits>

// Lists of the classes that may be among the best k of a query, on a device. A block of kThreads
// threads fills a list; all member functions are barriers.

namespace xsoftmax::cuda {

constexpr int kPerThread = 4; ///< maximum number of candidates that a thread adds at once

/// Returns the capacity of a list: room for all candidates that remain after rescore(), and for
/// all that a block adds at once.
inline int64_t list_capacity(int64_t k) { return 2 * k + kThreads * kPerThread; }

/// Memory of L lists.
struct ListStorage {
  double* score;     ///< [L, capacity]
  int64_t* id;       ///< [L, capacity]
  float* error;      ///< [L, capacity], error bound of a score; -1: it was computed in float64
  double* threshold; ///< [L], at least k classes of the query score this much
  int64_t* count;    ///< [L]
  int64_t capacity;

  /// Bytes per candidate.
  static constexpr int64_t kBytes = sizeof(double) + sizeof(int64_t) + sizeof(float);
};

enum QueryState : int32_t { kSearched, kZero, kUndefined };

/// A query. It is searched as z 2^exponent, whose largest coordinate is in [1, 2), so that bounds
/// neither overflow nor underflow.
struct SearchQuery {
  double length, residual; ///< |z|; |z - scale x code|
  double scale;
  /// Error bounds of products with rounded rows (search_products.cuh).
  float factor, residual_error, norm_error, least_error;
  int32_t exponent, state;
};

#ifdef __CUDACC__
/// Returns the largest float that is not above x.
__device__ inline float below(double x) {
  const float nearest = float(x);
  return double(nearest) > x ? nextafterf(nearest, -std::numeric_limits<float>::infinity())
                             : nearest;
}

/// Maps a float to an integer of the same order, at least 1; NaN is the smallest.
__device__ inline uint32_t rank_of(float x) {
  return x != x ? 1u : max(1u, uint32_t(on_device::ordered(x + 0.0f)) ^ 0x80000000u);
}
__device__ inline float from_rank(uint32_t key) {
  return on_device::from_ordered(int32_t(key ^ 0x80000000u));
}

/// Scores classes for one query in float64. One warp per class.
template <typename T>
struct RowScorer {
  const T* rows;
  const T* bias; ///< nullptr: none
  int64_t features, classes;
  const double* query; ///< [features], scaled by 2^exponent
  int exponent;

  __device__ double operator()(int64_t id) const {
    CUDA_KERNEL_ASSERT(id < classes); // ids come from index[0]
    const T* row = rows + id * features;
    double sum = 0;
    for (int64_t d = lane(); d < features; d += kWarp) {
      sum += query[d] * double(row[d]);
    }
    sum = warp_sum(sum);
    return bias == nullptr ? sum : sum + ldexp(double(bias[id]), exponent);
  }
};

/// A class that may be among the best.
struct Candidate {
  double score;
  float error; ///< error bound of the score; -1: it was computed in float64
  int64_t id;
  bool is_candidate; ///< false: not a candidate

  __device__ double slack() const { return error < 0 ? 0.0 : double(error); }
  __device__ bool reaches(double threshold) const {
    return is_candidate && !(score + slack() < threshold);
  }
};

/// A view of one list, held by every thread of a block.
class SearchList {
 public:
  /// storage: shared memory of kWarp elements.
  __device__ SearchList(const ListStorage& memory, int64_t list, int64_t k, int64_t* storage)
      : score_(memory.score + list * memory.capacity), id_(memory.id + list * memory.capacity),
        error_(memory.error + list * memory.capacity), capacity_(memory.capacity), k_(k),
        storage_(storage) {}

  __device__ void clear(double least) {
    count = 0;
    threshold = least;
  }
  __device__ void load(const ListStorage& memory, int64_t list) {
    count = memory.count[list];
    threshold = memory.threshold[list];
  }
  __device__ void store(const ListStorage& memory, int64_t list) const {
    if (threadIdx.x == 0) {
      memory.count[list] = count;
      memory.threshold[list] = threshold;
    }
    __syncthreads();
  }
  /// Returns candidate i; for i >= count one that is not a candidate.
  __device__ Candidate operator[](int64_t i) const {
    return i < count ? Candidate{score_[i], error_[i], id_[i], true} : Candidate{0, 0, 0, false};
  }

  /// Adds the candidates of all threads that reach the threshold.
  template <int N, typename Scorer>
  __device__ void add(const Candidate (&mine)[N], const Scorer& scorer) {
    static_assert(N <= kPerThread);
    for (int attempt = 0;; ++attempt) {
      int64_t accepted = 0, total_accepted;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        accepted += mine[n].reaches(threshold) ? 1 : 0;
      }
      int64_t place = count + block_inclusive_sum(accepted, &total_accepted, storage_) - accepted;
      if (count + total_accepted <= capacity_) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if (mine[n].reaches(threshold)) {
            score_[place] = mine[n].score;
            error_[place] = mine[n].error;
            id_[place++] = mine[n].id;
          }
        }
        count += total_accepted;
        __syncthreads();
        return;
      }
      attempt == 0 ? tighten() : rescore(scorer);
    }
  }

  /// Raises the threshold to the k-th largest lower bound, and drops the candidates that cannot
  /// reach it.
  __device__ void tighten() {
    if (count < k_) {
      return;
    }
    uint32_t least = 0; // the largest key that at least k candidates reach, built bit by bit
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
      int64_t reach = 0;
      for (int64_t base = 0; base < count; base += blockDim.x) {
        const int64_t i = base + threadIdx.x;
        reach += __syncthreads_count(i < count && key(i) >= (least | bit));
      }
      least = reach >= k_ ? least | bit : least;
    }
    const double reached = from_rank(least);
    threshold = reached > threshold ? reached : threshold;
    int64_t kept = 0;
    for (int64_t base = 0; base < count; base += blockDim.x) {
      const int64_t i = base + threadIdx.x;
      const Candidate mine = (*this)[i];
      const bool keep = mine.reaches(threshold);
      int64_t more;
      const int64_t place = kept + block_inclusive_sum(int64_t(keep), &more, storage_) - 1;
      if (keep) { // safe: the sum above is a barrier, so all threads have read their candidates
        score_[place] = mine.score;
        error_[place] = mine.error;
        id_[place] = mine.id;
      }
      kept += more;
    }
    count = kept;
    __syncthreads();
  }

  /// Scores all candidates in float64 and keeps the best k, best first.
  template <typename Scorer>
  __device__ void rescore(const Scorer& scorer) {
    tighten();
    for (int64_t i = threadIdx.x / kWarp; i < count; i += blockDim.x / kWarp) {
      if (!(error_[i] < 0)) {
        const double score = scorer(id_[i]);
        if (lane() == 0) {
          score_[i] = score;
          error_[i] = -1;
        }
      }
    }
    __syncthreads();
    sort();
    count = count < k_ ? count : k_;
    if (count == k_ && score_[k_ - 1] > threshold) {
      threshold = score_[k_ - 1];
    }
    __syncthreads();
  }

  int64_t count = 0;
  double threshold = -std::numeric_limits<double>::infinity();

 private:
  __device__ uint32_t key(int64_t i) const {
    return rank_of(below((*this)[i].score - (*this)[i].slack()));
  }

  // Bitonic sort of candidates with exact scores. Every comparison moves the better candidate to
  // the lower index, so indices past the last candidate can be treated as holding the worst.
  __device__ void sort() {
    for (int64_t size = 2; size / 2 < count; size *= 2) {
      for (int64_t half = size / 2; half > 0; half /= 2) {
        const bool mirrored = half == size / 2;
        for (int64_t pair = threadIdx.x; pair / half * 2 * half < count; pair += blockDim.x) {
          const int64_t begin = pair / half * 2 * half, one = begin + pair % half,
                        other = mirrored ? begin + 2 * half - 1 - pair % half : one + half;
          if (other < count &&
              (score_[other] > score_[one] ||
               (score_[other] == score_[one] && id_[other] < id_[one]))) {
            const double score = score_[one];
            const int64_t id = id_[one];
            score_[one] = score_[other];
            id_[one] = id_[other];
            score_[other] = score;
            id_[other] = id;
          }
        }
        __syncthreads();
      }
    }
  }

  double* score_;
  int64_t* id_;
  float* error_;
  int64_t capacity_, k_;
  int64_t* storage_;
};
#endif

} // namespace xsoftmax::cuda
