#include "op/options.h"
#include "tree/label_tree.h"

#include <xsoftmax/trees.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randperm.h>
#include <torch/serialize/input-archive.h>

#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

LabelTree make_label_tree(const LabelTreeNodes& nodes) {
  return LabelTree(std::get<0>(nodes), std::get<1>(nodes));
}

} // namespace

LabelTreeImpl::LabelTreeImpl(const Tensor& parents, const Tensor& classes) {
  std::tie(first_child, parent, node_class, class_node) = label_tree(parents, optional(classes));
  measure();
  register_buffer("first_child", first_child);
  register_buffer("parent", parent);
  register_buffer("node_class", node_class);
  register_buffer("class_node", class_node);
}

void LabelTreeImpl::measure() {
  const Tensor layers = label_tree_layers(first_child);
  const int64_t *sizes = layers.const_data_ptr<int64_t>(), *groups = sizes + layers.size(1);
  layer_sizes.assign(sizes, groups);
  group_sizes.assign(groups, groups + layers.size(1));
}

Tensor LabelTreeImpl::path(const Tensor& ids) const {
  return label_tree_path(class_node, parent, ids, depth());
}

void LabelTreeImpl::load(torch::serialize::InputArchive& archive) {
  Tensor parents, classes;
  archive.read("parent", parents, /*is_buffer=*/true);
  archive.read("node_class", classes, /*is_buffer=*/true);
  const auto [first, up, class_of, leaf] = label_tree(parents, classes);
  const auto device = parent.device();
  first_child.set_data(first.to(device)); // keep the registered buffers
  parent.set_data(up.to(device));
  node_class.set_data(class_of.to(device));
  class_node.set_data(leaf.to(device));
  measure();
}

void LabelTreeImpl::to(torch::Device device, torch::Dtype, bool non_blocking) {
  to(device, non_blocking);
}
void LabelTreeImpl::to(torch::Dtype, bool) {}
void LabelTreeImpl::to(torch::Device device, bool non_blocking) {
  Module::to(device, non_blocking);
}

LabelTree LabelTree::from_parents(const Tensor& parents, const Tensor& classes) {
  return LabelTree(parents, classes);
}

LabelTree LabelTree::balanced(const Tensor& order, int64_t arity) {
  return make_label_tree(label_tree_balanced(order, arity));
}

LabelTree LabelTree::balanced(int64_t num_classes, int64_t arity) {
  TORCH_CHECK_VALUE(num_classes >= 1,
                    "LabelTree::balanced: expected num_classes of at least 1, got ", num_classes);
  return balanced(at::arange(num_classes, at::kLong), arity);
}

LabelTree LabelTree::random(int64_t num_classes, int64_t arity,
                            std::optional<at::Generator> generator) {
  TORCH_CHECK_VALUE(num_classes >= 1, "LabelTree::random: expected num_classes of at least 1, got ",
                    num_classes);
  return balanced(at::randperm(num_classes, generator, at::kLong), arity);
}

LabelTree LabelTree::from_vectors(const Tensor& vectors, const TreeFromVectors& options,
                                  std::optional<at::Generator> generator) {
  const Tensor seed = at::randint(0, std::numeric_limits<int64_t>::max(), {}, generator, at::kLong);
  return make_label_tree(label_tree_from_vectors(seed, vectors, print_options(options)));
}

LabelTree LabelTree::from_frequencies(const Tensor& counts, int64_t subsets) {
  return make_label_tree(label_tree_equal_mass(counts, subsets));
}

LabelTree LabelTree::huffman(const Tensor& counts, int64_t arity) {
  return make_label_tree(label_tree_huffman(counts, arity));
}

} // namespace xsoftmax
