#pragma once

#include "core/long_work.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <tuple>

namespace xsoftmax {

constexpr int64_t kProductElements = 1 << 17; // of a block of rows, with all codewords: half a megabyte

/// Calls task(begin, block) with blocks of `rows` in float32, on several threads. A function of the shape alone cuts them, and each
/// product runs on one thread, so that rounding does not depend on how many there are. Throws where long work that it is part of is stopped.
template <typename Task>
void for_row_blocks(const at::Tensor& rows, int64_t columns, const Task& task) {
  const int64_t block = std::clamp<int64_t>(kProductElements / std::max<int64_t>(1, columns), 128, 1024);
  const int64_t blocks = (rows.size(0) + block - 1) / block;
  const auto run = [&](int64_t i) {
    const int64_t begin = i * block;
    task(begin, rows.narrow(0, begin, std::min(block, rows.size(0) - begin)).to(at::kFloat).contiguous());
  };
  if (blocks == 1) {
    at::parallel_for(0, 2, 1, [&](int64_t first, int64_t) { // in a parallel region as the others: on one thread
      const at::AutoDispatchBelowADInplaceOrView guard;
      if (first == 0) {
        run(0);
      }
    });
    return;
  }
  LongWork* const work = LongWork::current();
  at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (int64_t i = first; i < last && !long_work::stopped(work); ++i) {
      run(i);
      long_work::add(work, 0);
    }
  });
  long_work::check(work);
}

/// The nearest of `codewords` [K, D] for each of `rows` [n, D], both float32 on CPU: index int64 [n], squared distance float32 [n]. The
/// same for any number of threads.
std::tuple<at::Tensor, at::Tensor> nearest_codeword_cpu(const at::Tensor& rows, const at::Tensor& codewords);

} // namespace xsoftmax
