#include "core/optional.h"
#include "losses/modules.h"
#include "samplers/modules.h"
#include "trees/beam_search.h"
#include "trees/edge_tables.h"
#include "trees/hierarchical_softmax.h"
#include "trees/label_tree.h"
#include "trees/tree_scores.h"

#include <xsoftmax/nn.h>
#include <xsoftmax/ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

namespace xsoftmax::nn {

using at::Tensor;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor rows(const Tensor& input) { return input.unsqueeze(0).flatten(0, -2); }

} // namespace

TreeLossImpl::TreeLossImpl(const char* name, int64_t in_features, LabelTree given_tree, const LossOptions& options, bool sparse_grad)
    : name_(name), options_(options), sparse_grad_(sparse_grad) {
  TORCH_CHECK_VALUE(!given_tree.is_empty(), name, ": expected a tree, got none");
  reduction_code(options.reduction);
  TORCH_CHECK_VALUE(options.label_smoothing == 0, name, ": expected label_smoothing of 0, got ", options.label_smoothing);
  TORCH_CHECK_VALUE(!options.weight.defined() || (options.weight.dim() == 1 && options.weight.size(0) == given_tree->num_classes()), name,
                    ": expected weight of shape [", given_tree->num_classes(), "], got ", options.weight.sizes());
  tree = register_module("tree", LabelTree(given_tree->parent.to(at::kCPU), given_tree->node_class.to(at::kCPU)));
  edges = register_module("edges", torch::nn::Linear(torch::nn::LinearOptions(in_features, tree->num_edges()).bias(options.bias)));
  if (options.weight.defined()) {
    weight = register_buffer("weight", options.weight);
  }
}

Tensor TreeLossImpl::flatten(const Tensor& input, const Tensor& target) const {
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.sizes().slice(0, input.dim() - 1) == target.sizes(), name_,
                    ": expected target of the shape of input without its last dimension, got input ", input.sizes(), " and target ",
                    target.sizes());
  return rows(input);
}

Tensor TreeLossImpl::leaves(const Tensor& target) const { return label_tree_nodes(tree->class_node, target.reshape({-1}), options_.ignore_index); }

Tensor TreeLossImpl::reduced(const Tensor& loss, const Tensor& target) const {
  const Tensor flat = target.reshape({-1}), counts = flat.ne(options_.ignore_index);
  const Tensor share = weight.defined() ? at::where(counts, weight.index_select(0, at::where(counts, flat, 0)).to(loss.scalar_type()), 0.0)
                                        : counts.to(loss.scalar_type());
  const Tensor each = at::where(counts, loss, 0.0) * share;
  if (options_.reduction == "none") {
    return each.reshape(target.sizes());
  }
  return options_.reduction == "mean" ? each.sum() / share.sum() : each.sum();
}

void TreeLossImpl::check_k(int64_t k) const {
  TORCH_CHECK_VALUE(k >= 0 && k <= tree->num_classes(), name_, ": expected k in [0, ", tree->num_classes(), "], got ", k);
}

HierarchicalSoftmaxLossImpl::HierarchicalSoftmaxLossImpl(int64_t in_features, LabelTree tree, const LossOptions& options, bool sparse_grad)
    : TreeLossImpl("HierarchicalSoftmaxLoss", in_features, std::move(tree), options, sparse_grad) {}

Tensor HierarchicalSoftmaxLossImpl::forward(const Tensor& input, const Tensor& target) {
  const Tensor loss = hierarchical_softmax_loss(flatten(input, target), edges->weight, optional(edges->bias), tree->first_child, tree->parent,
                                                leaves(target), tree->layer_sizes, tree->group_sizes, sparse_grad_);
  return reduced(loss, target);
}

std::tuple<Tensor, Tensor> HierarchicalSoftmaxLossImpl::topk(const Tensor& input, int64_t k) const {
  check_k(k);
  const auto [values, classes] = hierarchical_topk(rows(input), edges->weight, optional(edges->bias), tree->first_child, tree->node_class, k);
  const auto shape = with_last(input, k);
  return {values.reshape(shape), classes.reshape(shape)};
}

Tensor HierarchicalSoftmaxLossImpl::log_prob(const Tensor& input) {
  const Tensor found = hierarchical_log_prob(edges->forward(rows(input)), tree->parent, tree->class_node, tree->layer_sizes);
  return found.reshape(with_last(input, tree->num_classes()));
}

BeamTreeLossImpl::BeamTreeLossImpl(int64_t in_features, LabelTree given_tree, const BeamTreeOptions& beam, const LossOptions& options)
    : TreeLossImpl("BeamTreeLoss", in_features, std::move(given_tree), options, beam.sparse_grad), beam_(beam),
      estimator_(cane_estimator(name_, beam.noise_reduction)) {
  TORCH_CHECK_VALUE(beam.num_candidates >= 1, name_, ": expected num_candidates of at least 1, got ", beam.num_candidates);
  TORCH_CHECK_VALUE(beam.num_noises >= 0, name_, ": expected num_noises of at least 0, got ", beam.num_noises);
  balance_every_ = beam.balance_every.value_or(std::max<int64_t>(100, tree->num_edges() / 500));
  TORCH_CHECK_VALUE(balance_every_ >= 0, name_, ": expected balance_every of at least 0, got ", balance_every_);
  TORCH_CHECK_VALUE(!beam.routed || (tree->depth() == 2 && tree->parent.index_select(0, tree->class_node).gt(0).all().item<bool>()), name_,
                    ": expected a tree of one layer of subsets beside routed");
  beam_.num_candidates = std::min(beam.num_candidates, tree->num_classes());
  beam_.beam = std::min(beam.beam.value_or(beam_.num_candidates), tree->num_classes());
  TORCH_CHECK_VALUE(*beam_.beam >= beam_.num_candidates, name_, ": expected beam of at least num_candidates, ", beam_.num_candidates, ", got ",
                    *beam_.beam);
  // Nothing is outside all classes; a routed query has those of its own subset alone.
  beam_.num_noises = beam_.num_candidates == tree->num_classes() && !beam.routed ? 0 : beam.num_noises;
  noise_sampler = register_module("noise", noise_or_uniform(name_, beam.noise_sampler, tree->num_classes()));
  TORCH_CHECK_VALUE(dynamic_cast<samplers::AdaptiveSamplerImpl*>(noise_sampler.get()) == nullptr, name_,
                    ": expected a noise_sampler that follows no class table, which a tree has none of, got ", noise_sampler->name());
  check_draws_all(name_, *noise_sampler, Tensor());
  noise_ = std::make_shared<samplers::ComplementSampler>(noise_sampler);
  steps = register_buffer("steps", at::zeros({}, at::kLong));
  if (tree->depth() > 1) {
    const at::NoGradGuard no_grad;
    edges->weight.mul_(std::pow(double(tree->depth()), -0.5)); // so that a class scores as it would with a row of its own
  }
}

Tensor BeamTreeLossImpl::forward(const Tensor& input, const Tensor& target, std::optional<at::Generator> generator) {
  if (!is_training()) {
    return exact(input, target);
  }
  const Tensor queries = flatten(input, target), flat = target.reshape({-1}), counts = flat.ne(options_.ignore_index);
  const auto dtype = edges->weight.scalar_type(); // what the constructor made may have been moved to 16 bits, whose rounding moves scores
  const bool fine = beam_.balance_every.has_value() || dtype == at::kFloat || dtype == at::kDouble;
  if (balance_every_ > 0 && fine && at::GradMode::is_enabled() && edges->weight.requires_grad()) {
    if (steps.scalar_type() != at::kLong) { // to(dtype) converts it like any buffer
      steps.set_data(steps.to(at::kLong));
    }
    steps.add_(1);
    if (steps.item<int64_t>() % balance_every_ == 0) {
      balance();
    }
  }
  const Tensor own = leaves(target).unsqueeze(1), known = at::where(counts, flat, 0);
  const Tensor found = candidates(queries, generator);
  const auto noise = noise_->sample(queries.detach(), beam_.num_noises, found, known, generator);
  const Tensor absent = found.lt(0);
  const Tensor log_count = at::cat({at::zeros(found.sizes(), noise.log_count.options()).masked_fill(absent, kInfinity), noise.log_count}, 1);
  // What takes no part, where it is known: at the target's node it costs no edge.
  const Tensor covered = estimator_ == "cane" ? found.eq(known.unsqueeze(1)).any(1, true) : at::ones_like(counts).unsqueeze(1);
  const Tensor unused = at::cat({absent, covered.logical_not().expand(noise.ids.sizes())}, 1);
  const Tensor ids = at::cat({found.clamp_min(0), noise.ids}, 1);
  const Tensor nodes = at::cat({own, at::where(unused, own, tree->class_node.take(ids))}, 1);
  const Tensor scores = tree_scores(queries, edges->weight, optional(edges->bias), tree->parent, at::where(counts.unsqueeze(1), nodes, 0),
                                    tree->layer_sizes, /*differences_only=*/true, sparse_grad_);
  const Tensor loss = candidate_loss(scores, known, ids, std::nullopt, log_count, std::nullopt, noise.target_log_count, estimator_, true,
                                     found.size(1), 0);
  return reduced(loss, target);
}

Tensor BeamTreeLossImpl::candidates(const Tensor& input, std::optional<at::Generator> generator) const {
  const Tensor queries = rows(input).detach();
  Tensor found;
  if (beam_.routed) {
    const int64_t subsets = tree->layer_sizes[0];
    const Tensor weight = edges->weight.detach().narrow(0, 0, subsets);
    const Tensor bias = edges->bias.defined() ? edges->bias.detach().narrow(0, 0, subsets) : Tensor();
    found = tree_routed_candidates(samplers::draw_seed(queries, generator), at::linear(queries, weight, optional(bias)), tree->first_child,
                                   tree->node_class, beam_.num_candidates);
  } else {
    found = std::get<1>(beam_search(queries, edges->weight, optional(edges->bias), tree->first_child, tree->node_class, *beam_.beam))
                .narrow(1, 0, beam_.num_candidates);
  }
  return found.reshape(with_last(input, beam_.num_candidates));
}

Tensor BeamTreeLossImpl::class_scores(const Tensor& queries) {
  return tree_class_scores(edges->forward(queries), tree->parent, tree->class_node, tree->layer_sizes);
}

Tensor BeamTreeLossImpl::exact(const Tensor& input, const Tensor& target) {
  const Tensor queries = flatten(input, target);
  const bool low = edges->weight.scalar_type() == at::kHalf || edges->weight.scalar_type() == at::kBFloat16; // sums along paths are float32
  const auto whole = [&](const Tensor& tensor) { return low ? tensor.to(at::kFloat) : tensor; };
  const auto along = [&](const Tensor& rows) { return tree_class_scores(rows, tree->parent, tree->class_node, tree->layer_sizes, 0); };
  const Tensor table = along(whole(edges->weight));
  const Tensor bias = edges->bias.defined() ? along(whole(edges->bias)) : Tensor();
  const int64_t reduction = reduction_code(options_.reduction);
  const Tensor loss =
      linear_cross_entropy(whole(queries), table, optional(bias), target.reshape({-1}), optional(weight), reduction, options_.ignore_index, 0.0);
  return reduction == at::Reduction::None ? loss.reshape(target.sizes()) : loss;
}

Tensor BeamTreeLossImpl::scores(const Tensor& input) { return class_scores(rows(input)).reshape(with_last(input, tree->num_classes())); }

Tensor BeamTreeLossImpl::log_prob(const Tensor& input) { return at::log_softmax(scores(input), -1); }

std::tuple<Tensor, Tensor> BeamTreeLossImpl::topk(const Tensor& input, int64_t k) const {
  check_k(k);
  const auto [values, classes] = beam_search(rows(input), edges->weight, optional(edges->bias), tree->first_child, tree->node_class,
                                             std::max(k, *beam_.beam));
  const auto shape = with_last(input, k);
  return {values.narrow(1, 0, k).reshape(shape), classes.narrow(1, 0, k).reshape(shape)};
}

void BeamTreeLossImpl::balance() {
  for (const Tensor& table : edges->parameters()) {
    tree_balance_(table.tensor_data(), tree->first_child, tree->layer_sizes); // unseen by autograd: see trees in nn.h
  }
}

} // namespace xsoftmax::nn
