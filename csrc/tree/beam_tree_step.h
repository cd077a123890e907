#pragma once

#include "tree/tree_losses.h"
#include "proposal/cane_kind.h"

#include <ATen/core/Generator.h>

namespace xsoftmax {

// beam_tree_step(input, weight!, bias!, target, tree, layer_sizes, state!, noise, options,
// generator, steps!, class_weight) -> loss: runs a training step of BeamTreeLoss, up to the reduced
// loss:
//
//     queries, counted = tree_queries(input, target, weight, bias, tree, ignore_index,
//                                     class_weight)
//     found = beam_tree_candidates(seed, queries, weight, bias, tree, layer_sizes, options)
//     outside = noise.sample_outside(queries, found, counted, generator)
//     beam_tree_count_step_(weight, bias, tree, layer_sizes, steps, options)
//     loss = beam_tree_loss(input, weight, bias, target, tree, layer_sizes,
//                           [always_scored_set(found), outside], class_weight, options)
//
// noise, state: a sampler of kind "complement" (proposal/sampler_kind.h). options:
// BeamTreeStepOptions. steps: int64 [] on the CPU, or none if this step is not counted.
//
// beam_tree_count_step_(weight!, bias!, tree, layer_sizes, steps!, options): counts a step that
// trains the edges (one that records a gradient for them) and balances the edges (tree_balance_)
// every `balance_every` steps. Balancing also changes edges that autograd has saved. That is safe
// because gradients depend only on sums along whole paths, which balancing preserves.

struct BeamTreeStep {
  const at::Tensor& input;
  const at::Tensor& weight;
  const OptionalTensor& bias;
  const at::Tensor& target;
  const TreeTables& tree;
  at::IntArrayRef layer_sizes;
  SampleOutside noise;
  std::optional<at::Generator> generator = std::nullopt;
  OptionalTensor steps = std::nullopt;
  OptionalTensor class_weight = std::nullopt;
};

/// Moves the mean of each node's children to the edge above the node. Writes to the memory of the
/// edges without autograd noticing.
void balance_edges(const at::Tensor& weight, const OptionalTensor& bias, const TreeTables& tree,
                   at::IntArrayRef layer_sizes);

/// Differentiable.
at::Tensor beam_tree_step(const BeamTreeStep& step, const BeamTreeStepOptions& options);

} // namespace xsoftmax
