#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>

namespace xsoftmax {

/// Least number of queries per thread in a pass over the logits of a block.
inline constexpr int64_t kQueriesPerTask = 16;

/// The classes [begin, begin + size) of a table. saved: whether the forward pass saved their
/// logits.
struct ClassBlock {
  int64_t begin, size;
  bool saved;
};

/// Splits a table into blocks of classes for the CPU kernels, so that the logits of a block stay in
/// cache and [Q, N] is never in memory. Block i belongs to group i % groups. One thread processes
/// the blocks of a group in order, and the sums of the groups are combined in order, so results do
/// not depend on the number of threads. With a single group the blocks are wider, and the matrix
/// products and the passes within a block are parallel instead. The plan depends only on the
/// shapes.
struct BlockPlan {
  int64_t classes = 0;
  /// Number of leading classes whose logits the forward pass saves for the backward pass.
  int64_t saved = 0;
  int64_t width = 1; ///< classes per block
  int64_t groups = 1;

  int64_t saved_blocks() const { return (saved + width - 1) / width; }
  int64_t count() const { return saved_blocks() + (classes - saved + width - 1) / width; }
  ClassBlock block(int64_t i) const;
};

/// Returns the plan. group_bytes: memory of one group, without the scratch of its thread. dtype:
/// dtype of the logits.
BlockPlan plan_blocks(int64_t queries, int64_t classes, int64_t features, int64_t saved,
                      int64_t group_bytes, at::ScalarType dtype);

/// Calls task(first, last) over ranges of groups, on several threads and below autograd.
template <typename Task>
void for_each_group(const BlockPlan& plan, const Task& task) {
  const auto run = [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    task(first, last);
  };
  if (plan.groups == 1) {
    run(0, 1); // not in a parallel region, so that the products in `task` use all threads
  } else {
    at::parallel_for(0, plan.groups, 1, run);
  }
}

/// The operands of the matrix products over blocks.
struct LinearOperands {
  LinearOperands(const at::Tensor& input, const at::Tensor& weight,
                 const std::optional<at::Tensor>& bias);

  at::Tensor input;     ///< [Q, D] in factor_dtype
  at::Tensor weight;    ///< [N, D] in its own dtype; blocks are converted when they are read
  at::Tensor bias;      ///< [N] in opmath_type, contiguous, or undefined
  at::ScalarType dtype; ///< opmath_type, the dtype of logits and sums
  bool rounds; ///< whether products round float32 factors to bfloat16 (uses_bfloat16_operands)
  /// dtype of the factors of products: bfloat16 for a bfloat16 table if `rounds`, else `dtype`.
  at::ScalarType factor_dtype;
};

/// Scratch memory of one thread that processes blocks. A tensor that a function returns is valid
/// until the next call of the same function.
class BlockScratch {
 public:
  BlockScratch(const LinearOperands& operands, const BlockPlan& plan)
      : operands_(operands), plan_(plan) {}

  /// Returns the block's rows of the weight in factor_dtype, as a view if possible.
  at::Tensor rows(const ClassBlock& block);
  /// Returns an uninitialised [Q, size] in the accumulation dtype.
  at::Tensor logits_buffer(const ClassBlock& block);
  /// Returns an uninitialised [size, D] in the accumulation dtype.
  at::Tensor rows_buffer(const ClassBlock& block);

 private:
  at::Tensor view(at::Tensor& buffer, at::ScalarType dtype, int64_t capacity, int64_t rows,
                  int64_t columns) const;

  const LinearOperands& operands_;
  const BlockPlan plan_;
  at::Tensor rows_, logits_, gradient_;
};

} // namespace xsoftmax
