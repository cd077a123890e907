#pragma once

#include "op/long_work.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <tuple>

namespace xsoftmax {

// Elements of the product of a block of rows with all codewords: half a megabyte.
constexpr int64_t kProductElements = 1 << 17;

/// Calls task(begin, block) for blocks of `rows`, converted to float32, on several threads.
/// `columns` is the width of each block's product. The blocks depend only on the shape, and each
/// product runs on one thread, so rounding does not depend on the number of threads. Throws
/// Interrupted if the enclosing long work is stopped.
template <typename Task>
void for_row_blocks(const at::Tensor& rows, int64_t columns, const Task& task) {
  const int64_t block =
      std::clamp<int64_t>(kProductElements / std::max<int64_t>(1, columns), 128, 1024);
  const int64_t blocks = (rows.size(0) + block - 1) / block;
  const auto run = [&](int64_t i) {
    const int64_t begin = i * block;
    task(begin,
         rows.narrow(0, begin, std::min(block, rows.size(0) - begin)).to(at::kFloat).contiguous());
  };
  if (blocks == 1) {
    // In a parallel region, as for several blocks, so that the product runs on one thread.
    at::parallel_for(0, 2, 1, [&](int64_t first, int64_t) {
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

/// Finds the nearest of `codewords` [K, D] for each of `rows` [n, D], both float32 on CPU. Returns
/// its index, int64 [n], and its squared distance, float32 [n]. Results do not depend on the number
/// of threads.
std::tuple<at::Tensor, at::Tensor> nearest_codeword_cpu(const at::Tensor& rows,
                                                        const at::Tensor& codewords);

} // namespace xsoftmax
