#include "table/cuda_sorted_ids.cuh"

#include <ATen/cuda/cub.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <limits>

namespace xsoftmax::cuda {
namespace {

using at::Tensor;

// Ids of two tensors, one after the other.
struct JoinedIds {
  const int64_t *first, *second;
  int64_t first_count, count, last;

  __device__ int64_t operator[](int64_t i) const {
    const int64_t id = i < first_count ? first[i] : second[i - first_count];
    CUDA_KERNEL_ASSERT(id >= 0 && id <= last);
    return id;
  }
};

template <typename Id>
__global__ void take_ids_kernel(Id* out, Id* places, JoinedIds ids) {
  for (int64_t i = global_thread(); i < ids.count; i += grid_threads()) {
    out[i] = Id(ids[i]);
    places[i] = Id(i);
  }
}

constexpr int kBlockThreads = 512, kRounds = 18, kBlockIds = kBlockThreads * kRounds;
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;

// Sorts up to kBlockIds ids in one block, with a pass per digit, least significant first. Each warp
// takes consecutive ids, a lane one in each round. Dynamic shared memory: the ids and their
// positions, which are read into registers before they are overwritten. More rounds, and ids of
// eight bytes, would need more registers than a thread has.
__global__ void __launch_bounds__(kBlockThreads)
    sort_ids_kernel(int32_t* sorted, int32_t* order, JoinedIds ids, int passes) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ int starts[kDigits * kBlockThreads / kWarp]; // [warps][kDigits]
  __shared__ int storage[kWarp];
  int32_t* const keys = reinterpret_cast<int32_t*>(shared);
  uint16_t* const places = reinterpret_cast<uint16_t*>(keys + ids.count);
  const int count = int(ids.count), warps = int(blockDim.x) / kWarp,
            warp = int(threadIdx.x) / kWarp,
            rounds = (count + int(blockDim.x) - 1) / int(blockDim.x);
  const int begin = warp * rounds * kWarp, end = std::min(count, begin + rounds * kWarp);
  int* const mine = starts + warp * kDigits;
  int32_t key[kRounds];
  int to[kRounds]; // first the rank among the equal digits of the warp, then the new position
  for (int pass = 0; pass < passes; ++pass) {
    const auto digit_of = [&](int32_t id) {
      return int(id >> (pass * kDigitBits)) & (kDigits - 1);
    };
    for (int digit = lane(); digit < kDigits; digit += kWarp) {
      mine[digit] = 0;
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      const int i = begin + k * kWarp + lane();
      key[k] = i >= end ? int32_t(0) : pass > 0 ? keys[i] : int32_t(ids[i]);
    }
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      if (begin + k * kWarp < end) { // the same for all lanes
        const bool have = begin + k * kWarp + lane() < end;
        const int digit = have ? digit_of(key[k]) : kDigits;
        const unsigned equal = __match_any_sync(kAllLanes, digit),
                       below = equal & ((1u << lane()) - 1);
        const int seen = have ? mine[digit] : 0;
        to[k] = seen + __popc(below);
        __syncwarp();
        if (have && below == 0) {
          mine[digit] = seen + __popc(equal);
        }
        __syncwarp();
      }
    }
    __syncthreads();
    // Replaces the counts by their exclusive sums, all warps of a digit before the next digit.
    constexpr int kEach = kDigits / kWarp;
    const auto count_of = [&](int j) -> int& {
      const int at = int(threadIdx.x) * kEach + j;
      return starts[at % warps * kDigits + at / warps];
    };
    int sum = 0, total = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      sum += count_of(j);
    }
    int start = block_inclusive_sum(sum, &total, storage) - sum;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int found = count_of(j);
      count_of(j) = start;
      start += found;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      if (begin + k * kWarp + lane() < end) {
        to[k] += mine[digit_of(key[k])];
        keys[to[k]] = key[k]; // all have been read
      }
    }
#pragma unroll
    for (int k = 0; k < kRounds; ++k) { // key is not needed any more
      const int i = begin + k * kWarp + lane();
      key[k] = i >= end ? int32_t(0) : int32_t(pass > 0 ? int(places[i]) : i);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      if (begin + k * kWarp + lane() < end) {
        places[to[k]] = uint16_t(key[k]);
      }
    }
    __syncthreads();
  }
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) {
    sorted[i] = keys[i];
    order[i] = int32_t(places[i]);
  }
}

// Sorts in one block, or returns false if there are too many ids for it, or a block of this device
// has too little shared memory.
bool sort_in_block(const Tensor& sorted, const Tensor& order, const JoinedIds& ids, int64_t bits) {
  constexpr int kIdBytes = sizeof(int32_t) + sizeof(uint16_t);
  if (sorted.scalar_type() != at::kInt || ids.count > kBlockIds) {
    return false;
  }
  // Always for the most ids: another thread may set it between this call and the launch.
  if (cudaFuncSetAttribute(sort_ids_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           kBlockIds * kIdBytes) != cudaSuccess) {
    (void)cudaGetLastError(); // the next check of a launch must not report it
    return false;
  }
  // Few ids need few warps: sums over the counts of all warps take longer than four rounds.
  const auto threads = unsigned(
      std::clamp<int64_t>((ids.count + 4 * kWarp - 1) / (4 * kWarp) * kWarp, kWarp, kBlockThreads));
  const int passes = int(bits + kDigitBits - 1) / kDigitBits;
  sort_ids_kernel<<<1, threads, size_t(ids.count) * kIdBytes, c10::cuda::getCurrentCUDAStream()>>>(
      sorted.mutable_data_ptr<int32_t>(), order.mutable_data_ptr<int32_t>(), ids, passes);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}

template <typename Id>
void sort(Tensor& sorted, Tensor& order, const JoinedIds& ids, const at::TensorOptions& options) {
  const auto dtype = options.dtype(c10::CppTypeToScalarType<Id>::value);
  const int64_t count = ids.count, bits = std::max(1, int(std::bit_width(uint64_t(ids.last))));
  const Tensor results = at::empty({2, count}, dtype);
  sorted = results.select(0, 0);
  order = results.select(0, 1);
  if (count == 0 || sort_in_block(sorted, order, ids, bits)) {
    return;
  }
  const Tensor unsorted = at::empty({2, count}, dtype);
  Id* const copied = unsorted.mutable_data_ptr<Id>();
  take_ids_kernel<<<grid_size(count, kThreads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      copied, copied + count, ids);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  at::cuda::cub::radix_sort_pairs(copied, sorted.mutable_data_ptr<Id>(), copied + count,
                                  order.mutable_data_ptr<Id>(), count, /*descending=*/false,
                                  /*begin_bit=*/0, /*end_bit=*/bits);
}

} // namespace

SortedIds::SortedIds(const Tensor& first_ids, int64_t last, const Tensor& second_ids) {
  const Tensor first = first_ids.contiguous(),
               second = second_ids.defined() ? second_ids.contiguous() : first.new_empty({0});
  const JoinedIds ids{first.const_data_ptr<int64_t>(), second.const_data_ptr<int64_t>(),
                      first.numel(), first.numel() + second.numel(), last};
  // A radix sort makes one pass over all keys and values per byte of a key.
  constexpr int64_t kMaxNarrow = std::numeric_limits<int32_t>::max();
  // ATen's sort counts in int.
  TORCH_CHECK(ids.count <= kMaxNarrow, "sorted_ids: ids: expected at most ", kMaxNarrow,
              " on a CUDA device, got ", ids.count);
  if (last <= kMaxNarrow) {
    sort<int32_t>(sorted, order, ids, first.options());
  } else {
    sort<int64_t>(sorted, order, ids, first.options());
  }
}

} // namespace xsoftmax::cuda
