#include "op/checks.h"
#include "proposal/candidate_set.h"
#include "tree/beam_tree_step.h"
#include "loss/exclude_topk.h"
#include "nn/modules.h"
#include "tree/tree_losses.h"
#include "proposal/modules.h"
#include "tree/beam_search.h"
#include "tree/edge_tables.h"
#include "tree/hierarchical_softmax.h"

#include <xsoftmax/ops.h>
#include <xsoftmax/optim.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/zeros.h>
#include <torch/serialize/input-archive.h>

#include <algorithm>
#include <cmath>

namespace xsoftmax::nn {

using at::Tensor;

namespace {

TreeTables tables(const LabelTree& tree) { return {"LabelTree", tree->tables()}; }

int64_t classes_of(const char* name, const LabelTree& tree) {
  TORCH_CHECK_VALUE(!tree.is_empty(), name, ": expected a tree, got none");
  return tree->num_classes();
}

} // namespace

TreeTableImpl::TreeTableImpl(const char* name, int64_t in_features, const LabelTree& label_tree,
                             const LossOptions& options, std::vector<std::string> optional)
    : TableLossImpl(name, classes_of(name, label_tree), options, std::move(optional)) {
  tree = register_module("tree", LabelTree(label_tree->parent, label_tree->node_class));
  edges = register_module(
      "edges",
      torch::nn::Linear(
          torch::nn::LinearOptions(in_features, tree->num_edges()).bias(options.bias)));
}

std::optional<Tensor> TreeTableImpl::bias() const { return optional(edges->bias); }

LabelTree TreeTableImpl::tree_of(torch::serialize::InputArchive& archive) const {
  torch::serialize::InputArchive state;
  if (!archive.try_read("tree", state)) {
    return tree;
  }
  LabelTree loaded = LabelTree::balanced(1);
  loaded->load(state);
  return loaded;
}

void TreeTableImpl::load(torch::serialize::InputArchive& archive) {
  check_tree(tree_of(archive));
  TableLossImpl::load(archive);
}

TreeLossImpl::TreeLossImpl(const char* name, int64_t in_features, LabelTree label_tree,
                           const LossOptions& options)
    : TreeTableImpl(name, in_features, label_tree, options, {"noise", "steps"}) {
  TORCH_CHECK_VALUE(options.label_smoothing == 0, name, ": expected label_smoothing of 0, got ",
                    options.label_smoothing);
  TORCH_CHECK_VALUE(options.logit_scale == 1 && options.softcap == 0 && options.z_loss == 0, name,
                    ": expected logit_scale of 1, no softcap and no z_loss, got ",
                    options.logit_scale, ", ", options.softcap, " and ", options.z_loss);
}

std::optional<Tensor> TreeLossImpl::class_weight() const { return optional(weight); }

void TreeTableImpl::check_tree(const LabelTree& loaded) const {
  TORCH_CHECK_VALUE(loaded->parent.sizes() == tree->parent.sizes() &&
                        loaded->num_classes() == tree->num_classes(),
                    name_, ": expected a checkpoint of a tree of ", tree->parent.size(0),
                    " nodes and ", tree->num_classes(), " classes, got one of ",
                    loaded->parent.size(0), " and ", loaded->num_classes());
}

void TreeTableImpl::check_k(int64_t k) const {
  TORCH_CHECK_VALUE(k >= 0 && k <= tree->num_classes(), name_, ": expected k in [0, ",
                    tree->num_classes(), "], got ", k);
}

HierarchicalSoftmaxLossImpl::HierarchicalSoftmaxLossImpl(int64_t in_features, LabelTree tree,
                                                         const LossOptions& options,
                                                         std::optional<bool> sparse_grad)
    : TreeLossImpl("HierarchicalSoftmaxLoss", in_features, std::move(tree), options),
      step_{{.reduction = options.reduction, .ignore_index = options.ignore_index}, sparse_grad} {}

Tensor HierarchicalSoftmaxLossImpl::forward(const Tensor& input, const Tensor& target) {
  return is_training() ? loss(input, target) : exact(input, target);
}

Tensor HierarchicalSoftmaxLossImpl::exact(const Tensor& input, const Tensor& target) const {
  catch_up();
  return loss(input, target);
}

Tensor HierarchicalSoftmaxLossImpl::loss(const Tensor& input, const Tensor& target) const {
  return hierarchical_softmax_loss(input, edges->weight, bias(), target, tables(tree),
                                   tree->layer_sizes, tree->group_sizes, class_weight(), step_);
}

std::tuple<Tensor, Tensor> HierarchicalSoftmaxLossImpl::topk(const Tensor& input, int64_t k,
                                                             const Tensor& exclude) const {
  check_k(k);
  catch_up();
  const int64_t classes = tree->num_classes(),
                wanted = with_excluded(k, exclude, classes).expect_int();
  const auto found = hierarchical_topk(as_rows(input), edges->weight, bias(), tree->first_child,
                                       tree->node_class, wanted);
  return without_excluded(name_, input, found, exclude, classes, k);
}

Tensor HierarchicalSoftmaxLossImpl::log_prob(const Tensor& input) {
  if (!at::autocast::is_autocast_enabled(input.device().type())) {
    check::same_dtype(name_, "weight", edges->weight, "input", input);
  }
  catch_up();
  const Tensor scores = linear_scores(as_rows(input), edges->weight, optional(edges->bias));
  const Tensor found =
      hierarchical_log_prob(scores, tree->parent, tree->class_node, tree->layer_sizes);
  return found.reshape(replace_last_dim(input, tree->num_classes()));
}

BeamTreeLossImpl::BeamTreeLossImpl(int64_t in_features, LabelTree label_tree,
                                   const BeamTreeOptions& beam, const LossOptions& options)
    : TreeLossImpl("BeamTreeLoss", in_features, std::move(label_tree), options) {
  TORCH_CHECK_VALUE(beam.num_candidates >= 1, name_,
                    ": expected num_candidates of at least 1, got ", beam.num_candidates);
  TORCH_CHECK_VALUE(beam.num_noises >= 0, name_, ": expected num_noises of at least 0, got ",
                    beam.num_noises);
  TORCH_CHECK_VALUE(beam.balance_every.value_or(0) >= 0, name_,
                    ": expected balance_every of at least 0, got ", *beam.balance_every);
  step_.estimator = cane_estimator(name_, beam.noise_reduction);
  step_.reduction = options.reduction;
  step_.ignore_index = options.ignore_index;
  step_.sparse_grad = beam.sparse_grad;
  step_.num_candidates = std::min(beam.num_candidates, tree->num_classes());
  step_.beam = std::min(beam.beam.value_or(step_.num_candidates), tree->num_classes());
  step_.routed = beam.routed;
  step_.balance_every =
      beam.balance_every.value_or(std::max<int64_t>(100, tree->num_edges() / 500));
  step_.balances_16_bits = beam.balance_every.has_value();
  BeamTreeLossImpl::check_tree(tree);
  TORCH_CHECK_VALUE(step_.beam >= step_.num_candidates, name_,
                    ": expected beam of at least num_candidates, ", step_.num_candidates, ", got ",
                    step_.beam);
  // If all classes are candidates, there are no classes outside. A routed query has only candidates
  // of its own subset.
  const bool outside = step_.num_candidates < tree->num_classes() || beam.routed;
  noise = register_module("noise",
                          make_noise_sampler(name_, beam.noise_sampler,
                                             {.num_noises = outside ? beam.num_noises : 0,
                                              .num_classes = tree->num_classes(),
                                              .dim = in_features,
                                              .bias = options.bias,
                                              .follows_table = false}));
  noise->claim(name_);
  steps = register_buffer("steps", at::zeros({}, at::kLong));
  if (tree->depth() > 1) {
    const at::NoGradGuard no_grad;
    // Scores get the variance that they would have with one row per class.
    edges->weight.mul_(std::pow(double(tree->depth()), -0.5));
  }
}

void BeamTreeLossImpl::check_tree(const LabelTree& loaded) const {
  TreeTableImpl::check_tree(loaded);
  TORCH_CHECK_VALUE(
      !step_.routed ||
          (loaded->depth() == 2 &&
           loaded->parent.index_select(0, loaded->class_node).gt(0).all().item<bool>()),
      name_, ": expected a tree of one layer of subsets for routed");
}

Tensor BeamTreeLossImpl::forward(const Tensor& input, const Tensor& target,
                                 std::optional<at::Generator> generator) {
  if (!is_training()) {
    return exact(input, target);
  }
  const auto outside = [this](const DrawRequest& request, const Tensor& found) {
    return noise->sample_outside(request.queries, found, request.target.value_or(Tensor()),
                                 request.generator);
  };
  const OptionalTensor edge_bias = bias();
  const TreeTables tree_tables = tables(tree);
  return beam_tree_step({input, edges->weight, edge_bias, target, tree_tables, tree->layer_sizes,
                         outside, std::move(generator), steps, class_weight()},
                        step_);
}

Tensor BeamTreeLossImpl::candidates(const Tensor& input,
                                    std::optional<at::Generator> generator) const {
  const Tensor queries = as_rows(input).detach();
  const OptionalTensor seed =
      step_.routed ? optional(samplers::draw_seed(queries, generator)) : std::nullopt;
  return beam_tree_candidates(seed, queries, edges->weight, bias(), tables(tree), tree->layer_sizes,
                              step_)
      .reshape(replace_last_dim(input, step_.num_candidates));
}

Tensor BeamTreeLossImpl::exact(const Tensor& input, const Tensor& target) const {
  catch_up();
  return tree_cross_entropy(input, edges->weight, bias(), target, tables(tree), tree->layer_sizes,
                            class_weight(), step_);
}

Tensor BeamTreeLossImpl::scores(const Tensor& input) {
  catch_up();
  const Tensor scores = linear_scores(as_rows(input), edges->weight, optional(edges->bias));
  return tree_class_scores(scores, tree->parent, tree->class_node, tree->layer_sizes)
      .reshape(replace_last_dim(input, tree->num_classes()));
}

std::tuple<Tensor, Tensor> BeamTreeLossImpl::class_table() const {
  catch_up();
  const auto gather_path = [&](const Tensor& rows) {
    return tree_class_scores(rows, tree->parent, tree->class_node, tree->layer_sizes, 0);
  };
  return {gather_path(edges->weight), edges->bias.defined() ? gather_path(edges->bias) : Tensor()};
}

Tensor BeamTreeLossImpl::log_prob(const Tensor& input) {
  return at::log_softmax(scores(input), -1);
}

std::tuple<Tensor, Tensor> BeamTreeLossImpl::topk(const Tensor& input, int64_t k,
                                                  std::optional<int64_t> width_argument,
                                                  const Tensor& exclude) const {
  check_k(k);
  int64_t width = width_argument.value_or(std::max(k, step_.beam));
  TORCH_CHECK_VALUE(width >= k, name_, ": expected width of at least k=", k, ", got ", width);
  width = std::max(width, with_excluded(k, exclude, tree->num_classes()).expect_int());
  catch_up();
  const auto found = beam_search(as_rows(input), edges->weight, bias(), tree->first_child,
                                 tree->node_class, width);
  return without_excluded(name_, input, found, exclude, tree->num_classes(), k);
}

void BeamTreeLossImpl::balance() {
  balance_edges(edges->weight, bias(), tables(tree), tree->layer_sizes);
}

} // namespace xsoftmax::nn
