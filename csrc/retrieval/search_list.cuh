#pragma once

#include "core/cuda_launch.cuh"
#include "core/simd.h"

#include <ATen/OpMathType.h>

#include <cmath>
#include <limits>

// Lists of the classes that may be among the best k of a query, on a device. A block of kThreads fills
// a list; all its functions are barriers.

namespace xsoftmax::cuda {

constexpr int kPerThread = 4; ///< candidates that a thread adds to a list at once, at most

/// How many candidates a list holds: no fewer than remain when it has been settled, and all that a
/// block adds at once.
inline int64_t list_capacity(int64_t k) { return 2 * k + kThreads * kPerThread; }

/// Lists [L] as they lie in memory.
struct ListMemory {
  double* score;     ///< [L, capacity]
  int64_t* id;       ///< [L, capacity]
  float* error;      ///< [L, capacity], by how much a score may be wrong; -1: it was computed in float64
  double* threshold; ///< [L], which k classes of the query score
  int64_t* count;    ///< [L]
  int64_t capacity;

  static constexpr int64_t kBytes = sizeof(double) + sizeof(int64_t) + sizeof(float); ///< of a candidate
};

enum QueryState : int32_t { kSearched, kZero, kUndefined };

/// A query, searched as z 2^exponent, whose largest coordinate is in [1, 2), so that bounds neither
/// overflow nor vanish.
struct SearchQuery {
  double length, lost; ///< |z|; |z - scale x code|
  double scale;
  float factor, lost_error, norm_error, least_error; ///< of products with rounded rows (search_products.cuh)
  int32_t exponent, state;
};

#ifdef __CUDACC__
/// The largest float that is not above x.
__device__ inline float below(double x) {
  const float nearest = float(x);
  return double(nearest) > x ? nextafterf(nearest, -std::numeric_limits<float>::infinity()) : nearest;
}

/// A float as a whole number of the same order, at least 1; NaN is the least.
__device__ inline uint32_t rank_of(float x) { return x != x ? 1u : max(1u, uint32_t(on_device::ordered(x + 0.0f)) ^ 0x80000000u); }
__device__ inline float from_rank(uint32_t key) { return on_device::from_ordered(int32_t(key ^ 0x80000000u)); }

/// The scores of one query in float64, a warp a class.
template <typename T>
struct RowScorer {
  const T* rows;
  const T* bias; ///< nullptr: none
  int64_t features, classes;
  const double* query; ///< [features], scaled
  int exponent;

  __device__ double operator()(int64_t id) const {
    CUDA_KERNEL_ASSERT(id < classes); // index[0]
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
  float error; ///< by how much the score may be wrong; -1: it was computed in float64
  int64_t id;
  bool there; ///< false: none

  __device__ double slack() const { return error < 0 ? 0.0 : double(error); }
  __device__ bool reaches(double threshold) const { return there && !(score + slack() < threshold); }
};

/// One list, in every thread of a block.
class SearchList {
 public:
  /// storage: shared, of kWarp elements.
  __device__ SearchList(const ListMemory& memory, int64_t list, int64_t k, int64_t* storage)
      : score_(memory.score + list * memory.capacity), id_(memory.id + list * memory.capacity), error_(memory.error + list * memory.capacity),
        capacity_(memory.capacity), k_(k), storage_(storage) {}

  __device__ void clear(double least) {
    count = 0;
    threshold = least;
  }
  __device__ void load(const ListMemory& memory, int64_t list) {
    count = memory.count[list];
    threshold = memory.threshold[list];
  }
  __device__ void store(const ListMemory& memory, int64_t list) const {
    if (threadIdx.x == 0) {
      memory.count[list] = count;
      memory.threshold[list] = threshold;
    }
    __syncthreads();
  }
  /// No candidate for i >= count.
  __device__ Candidate operator[](int64_t i) const { return i < count ? Candidate{score_[i], error_[i], id_[i], true} : Candidate{0, 0, 0, false}; }

  /// Adds those of all threads that the threshold leaves.
  template <int N, typename Scorer>
  __device__ void add(const Candidate (&mine)[N], const Scorer& scorer) {
    static_assert(N <= kPerThread);
    for (int attempt = 0;; ++attempt) {
      int64_t some = 0, all;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        some += mine[n].reaches(threshold) ? 1 : 0;
      }
      int64_t place = count + block_inclusive_sum(some, &all, storage_) - some;
      if (count + all <= capacity_) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if (mine[n].reaches(threshold)) {
            score_[place] = mine[n].score;
            error_[place] = mine[n].error;
            id_[place++] = mine[n].id;
          }
        }
        count += all;
        __syncthreads();
        return;
      }
      attempt == 0 ? tighten() : settle(scorer);
    }
  }

  /// Raises the threshold to what k candidates score at least, and drops those that cannot score as much.
  __device__ void tighten() {
    if (count < k_) {
      return;
    }
    uint32_t least = 0; // the largest that k keys reach, bit by bit
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
      if (keep) { // all have read theirs: the sum is a barrier
        score_[place] = mine.score;
        error_[place] = mine.error;
        id_[place] = mine.id;
      }
      kept += more;
    }
    count = kept;
    __syncthreads();
  }

  /// Computes the scores of all candidates in float64, and keeps the best k, best first.
  template <typename Scorer>
  __device__ void settle(const Scorer& scorer) {
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
  __device__ uint32_t key(int64_t i) const { return rank_of(below((*this)[i].score - (*this)[i].slack())); }

  // A bitonic sort of candidates with exact scores. All comparisons leave the better one at the lower
  // place, so the places behind the last candidate take part as if they held the worst.
  __device__ void sort() {
    for (int64_t size = 2; size / 2 < count; size *= 2) {
      for (int64_t half = size / 2; half > 0; half /= 2) {
        const bool mirrored = half == size / 2;
        for (int64_t pair = threadIdx.x; pair / half * 2 * half < count; pair += blockDim.x) {
          const int64_t begin = pair / half * 2 * half, one = begin + pair % half, other = mirrored ? begin + 2 * half - 1 - pair % half : one + half;
          if (other < count && (score_[other] > score_[one] || (score_[other] == score_[one] && id_[other] < id_[one]))) {
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
