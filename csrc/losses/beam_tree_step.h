#pragma once

#include "losses/tree_losses.h"
#include "samplers/cane_kind.h"

#include <ATen/core/Generator.h>

namespace xsoftmax {

// beam_tree_step(input, weight!, bias!, target, tree, layer_sizes, state!, noise, options, generator, steps!, class_weight) -> loss
//
// A training step of BeamTreeLoss, up to the reduced loss:
//
//     queries, counted = tree_queries(input, target, weight, bias, tree, ignore_index, class_weight)
//     found = beam_tree_candidates(seed, queries, weight, bias, tree, layer_sizes, options)
//     outside = noise.sample_outside(queries, found, counted, generator)
//     beam_tree_count_step_(weight, bias, tree, layer_sizes, steps, options)
//     loss = beam_tree_loss(input, weight, bias, target, tree, layer_sizes, [present_set(found), outside], class_weight, options)
//
// noise, state: a sampler of kind "complement", as of samplers/sampler_kind.h. options: BeamTreeStepOptions. steps: int64 [] on the CPU, none: this
// step is not counted.
//
// beam_tree_count_step_(weight!, bias!, tree, layer_sizes, steps!, options) counts a step that trains the edges, one that records a gradient of
// them, and balances them (tree_balance_) where `balance_every` says so. Edges that autograd has saved change, too: a gradient depends on sums
// along whole paths alone, which stay as they are.

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

/// Moves the mean of the children of each node to the edge above the node, in the memory of the edges: autograd does not see it.
void balance_edges(const at::Tensor& weight, const OptionalTensor& bias, const TreeTables& tree, at::IntArrayRef layer_sizes);

/// With autograd.
at::Tensor beam_tree_step(const BeamTreeStep& step, const BeamTreeStepOptions& options);

} // namespace xsoftmax
