#pragma once

#include "losses/class_blocks.h"

namespace xsoftmax {

/// Collects the gradients of weight [N, D] and bias [N] from the gradients of logits, block by
/// block, on the CPU. Undefined tensors are not wanted.
struct BlockGradients {
  const LinearOperands& operands;
  const BlockPlan& plan;
  at::Tensor weight; ///< in the dtype of the table
  at::Tensor bias;   ///< in the dtype of sums
  bool add;          ///< to what they hold, which must be in the dtype of sums

  /// slope [Q, size]: of the block's logits; rows: of the block, as scratch gives them; input [Q, D]
  /// in the dtype of sums: the group's part of the input's gradient; first: nothing is there yet.
  void take(BlockScratch& scratch, const ClassBlock& block, const at::Tensor& rows, const at::Tensor& slope, const at::Tensor& input, bool first) const;
};

/// out [Q, D] = the sum of parts [groups, Q, D] in order, rounded once.
void join_parts(const at::Tensor& parts, const at::Tensor& out);

} // namespace xsoftmax
