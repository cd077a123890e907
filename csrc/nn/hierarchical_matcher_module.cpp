#include "nn/hierarchical_matcher.h"
#include "nn/modules.h"

#include "op/optional.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/serialize/input-archive.h>

namespace xsoftmax::nn {

using at::Tensor;

namespace {

constexpr const char* kHierarchicalMatcherModule = "HierarchicalMatcher";

TreeTables tables(const LabelTree& tree) { return {kHierarchicalMatcherModule, tree->tables()}; }

} // namespace

HierarchicalMatcherImpl::HierarchicalMatcherImpl(int64_t in_features, const LabelTree& label_tree,
                                                 const HierarchicalMatcherOptions& options)
    : TreeTableImpl(kHierarchicalMatcherModule, in_features, label_tree,
                    {.bias = options.bias, .reduction = options.reduction}, {}),
      matcher_(options) {
  TORCH_CHECK_VALUE(tree->depth() > 0, kHierarchicalMatcherModule,
                    ": expected a tree of at least 2 nodes, got 1");
  matcher::check_options(kHierarchicalMatcherModule, options);
  layer = register_buffer("layer", at::ones({}, at::kLong));
}

Tensor HierarchicalMatcherImpl::forward(const Tensor& input, const Tensor& target) {
  return matcher_loss(input, edges->weight, bias(), target, tables(tree), tree->layer_sizes,
                      tree->group_sizes, layer.item<int64_t>(), matcher_);
}

bool HierarchicalMatcherImpl::next_layer() {
  const at::NoGradGuard no_grad;
  const auto current_layer = layer.item<int64_t>();
  if (current_layer == tree->depth()) {
    return false;
  }
  catch_up(); // applies pending updates, which must not be copied to the children
  for (const Tensor& rows : edges->parameters()) {
    matcher_next_layer_(rows, tree->parent, tree->layer_sizes, current_layer);
  }
  layer.add_(1);
  return true;
}

void HierarchicalMatcherImpl::init_from_prototypes(const Tensor& input, const Tensor& target) {
  const at::NoGradGuard no_grad;
  // Applies pending updates: the beam reads the layers above, and new rows must not copy them.
  catch_up();
  matcher_init_layer_(edges->parameters(), input, target, tables(tree), tree->layer_sizes,
                      layer.item<int64_t>(), matcher_);
}

std::tuple<Tensor, Tensor> HierarchicalMatcherImpl::topk(const Tensor& input, int64_t k,
                                                         std::optional<int64_t> beam,
                                                         const Tensor& exclude) const {
  const auto current_layer = layer.item<int64_t>();
  TORCH_CHECK_VALUE(current_layer == tree->depth(), kHierarchicalMatcherModule,
                    ": expected all of ", tree->depth(), " layers trained, got layer ",
                    current_layer, " at work; see next_layer");
  catch_up();
  const auto width = beam.has_value() ? std::optional<c10::SymInt>(*beam) : std::nullopt;
  return matcher_topk(input, edges->weight, bias(), tables(tree), k, width, optional(exclude),
                      matcher_);
}

Tensor HierarchicalMatcherImpl::predict(const Tensor& input) const {
  return std::get<1>(topk(input, 1)).squeeze(-1);
}

void HierarchicalMatcherImpl::load(torch::serialize::InputArchive& archive) {
  Tensor saved;
  if (archive.try_read("layer", saved, /*is_buffer=*/true)) {
    const int64_t depth = tree_of(archive)->depth(), loaded = saved.item<int64_t>();
    TORCH_CHECK_VALUE(loaded >= 1 && loaded <= depth, kHierarchicalMatcherModule,
                      ": expected a checkpoint with layer in [1, ", depth, "], got ", loaded);
  }
  TreeTableImpl::load(archive);
}

} // namespace xsoftmax::nn
