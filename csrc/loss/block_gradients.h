#pragma once

#include "loss/class_blocks.h"

namespace xsoftmax {

/// Accumulates the gradients of weight [N, D] and bias [N] from the gradients of logits on the CPU,
/// one block of classes at a time. An undefined tensor means that the gradient is not needed.
struct BlockGradients {
  const LinearOperands& operands;
  const BlockPlan& plan;
  at::Tensor weight; ///< dtype of the table
  at::Tensor bias;   ///< in the accumulation dtype
  bool add;          ///< add to weight and bias, which must then have the accumulation dtype

  /// Adds the gradients of one block. slope [Q, size]: gradient of the block's logits. rows: the
  /// block's rows of the weight, from scratch.rows(). input [Q, D] in the accumulation dtype: the
  /// group's partial sum of the input gradient, overwritten if `first`.
  void take(BlockScratch& scratch, const ClassBlock& block, const at::Tensor& rows,
            const at::Tensor& slope, const at::Tensor& input, bool first) const;
};

/// Writes to out [Q, D] the sum over the groups of parts [groups, Q, D], in order of the groups and
/// rounded once.
void join_parts(const at::Tensor& parts, const at::Tensor& out);

} // namespace xsoftmax
