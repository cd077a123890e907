#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>

namespace xsoftmax {

/// How many queries at least a thread takes of a pass over the logits of a block.
inline constexpr int64_t kQueriesPerTask = 16;

/// Classes [begin, begin + size) of a table; whether their logits were saved by the forward pass.
struct ClassBlock {
  int64_t begin, size;
  bool saved;
};

/// How the CPU kernels cut a table into blocks of classes, so that the logits of a block stay in cache and those of all classes
/// never exist. Block i belongs to group i % groups; a group's blocks are worked through in rising order by one thread, and its
/// sums join those of the other groups in order: results do not depend on the number of threads. With a single group the blocks
/// are wider, and the products and the passes over a block are what runs on several threads. A function of the shape alone.
struct BlockPlan {
  int64_t classes = 0;
  int64_t saved = 0; ///< the first classes, whose logits the forward pass keeps for the backward pass
  int64_t width = 1; ///< of a block
  int64_t groups = 1;

  int64_t saved_blocks() const { return (saved + width - 1) / width; }
  int64_t count() const { return saved_blocks() + (classes - saved + width - 1) / width; }
  ClassBlock block(int64_t i) const;
};

/// `group_bytes`: what one group holds beside its thread's scratch. `dtype`: of the logits.
BlockPlan plan_blocks(int64_t queries, int64_t classes, int64_t features, int64_t saved, int64_t group_bytes, at::ScalarType dtype);

/// Calls task(first, last) over all groups: on several threads, below autograd.
template <typename Task>
void for_each_group(const BlockPlan& plan, const Task& task) {
  const auto run = [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    task(first, last);
  };
  if (plan.groups == 1) {
    run(0, 1); // outside a parallel region, so that the products inside use all threads
  } else {
    at::parallel_for(0, plan.groups, 1, run);
  }
}

/// input and weight on their way to the products of blocks.
struct LinearOperands {
  LinearOperands(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

  at::Tensor input;     ///< [Q, D] in factor_dtype
  at::Tensor weight;    ///< [N, D] as it came: blocks are converted as they are read
  at::Tensor bias;      ///< [N] in opmath, contiguous, or undefined
  at::ScalarType dtype; ///< of logits and sums: opmath
  bool rounds;          ///< factors of float32 products to bfloat16: multiplies_bfloat16
  at::ScalarType factor_dtype; ///< of what products read: bfloat16 of such a table that rounds, else dtype
};

/// What one thread needs to work on blocks. The tensors that it hands out live until the next call of the same function.
class BlockScratch {
 public:
  BlockScratch(const LinearOperands& operands, const BlockPlan& plan) : operands_(operands), plan_(plan) {}

  /// Rows of the weight: a view, or a copy in the factors' dtype.
  at::Tensor rows(const ClassBlock& block);
  /// Uninitialised [Q, size] in the dtype of sums.
  at::Tensor logits_buffer(const ClassBlock& block);
  /// Uninitialised [size, D] in the dtype of sums.
  at::Tensor rows_buffer(const ClassBlock& block);

 private:
  at::Tensor view(at::Tensor& buffer, at::ScalarType dtype, int64_t capacity, int64_t rows, int64_t columns) const;

  const LinearOperands& operands_;
  const BlockPlan plan_;
  at::Tensor rows_, logits_, gradient_;
};

} // namespace xsoftmax
