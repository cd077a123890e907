#include "trees/label_tree.h"

#include <xsoftmax/trees.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/serialize/input-archive.h>

#include <algorithm>

#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

LabelTree of(const LabelTreeNodes& nodes) { return LabelTree(std::get<0>(nodes), std::get<1>(nodes)); }

Tensor as_counts(const Tensor& counts) { return counts.detach().to(at::kCPU, at::kDouble); }

} // namespace

LabelTreeImpl::LabelTreeImpl(const Tensor& parents, const Tensor& classes) {
  std::tie(first_child, parent, node_class, class_node) = label_tree(parents, classes);
  measure();
  register_buffer("first_child", first_child);
  register_buffer("parent", parent);
  register_buffer("node_class", node_class);
  register_buffer("class_node", class_node);
}

void LabelTreeImpl::measure() {
  layer_sizes.clear();
  group_sizes.clear();
  const Tensor on_cpu = first_child.to(at::kCPU);
  const int64_t* first = on_cpu.const_data_ptr<int64_t>();
  for (int64_t begin = 0, end = 1; end < num_nodes();) {
    int64_t group = 0;
    for (int64_t v = begin; v < end; ++v) {
      group = std::max(group, first[v + 1] - first[v]);
    }
    begin = std::exchange(end, first[end]);
    layer_sizes.push_back(end - begin);
    group_sizes.push_back(group);
  }
}

Tensor LabelTreeImpl::path(const Tensor& ids) const {
  Tensor node = class_node.take(ids);
  std::vector<Tensor> up{node};
  for (int64_t layer = 1; layer < depth(); ++layer) {
    node = at::where(node.gt(0), parent.take(node.clamp_min(0)), -1);
    up.push_back(node);
  }
  std::reverse(up.begin(), up.end());
  Tensor path = at::stack(up, -1).narrow(-1, 0, depth());
  path = at::where(path.gt(0), path, -1);
  return path.gather(-1, path.lt(0).to(at::kChar).argsort(/*stable=*/true, /*dim=*/-1, /*descending=*/false)); // shallow leaves begin with -1
}

void LabelTreeImpl::load(torch::serialize::InputArchive& archive) {
  Tensor parents, classes;
  archive.read("parent", parents, /*is_buffer=*/true);
  archive.read("node_class", classes, /*is_buffer=*/true);
  const auto [first, up, class_of, leaf] = label_tree(parents.to(at::kCPU), classes.to(at::kCPU));
  const auto device = parent.device();
  first_child.set_data(first.to(device)); // in the registered buffers themselves
  parent.set_data(up.to(device));
  node_class.set_data(class_of.to(device));
  class_node.set_data(leaf.to(device));
  measure();
}

void LabelTreeImpl::to(torch::Device device, torch::Dtype, bool non_blocking) { to(device, non_blocking); }
void LabelTreeImpl::to(torch::Dtype, bool) {}
void LabelTreeImpl::to(torch::Device device, bool non_blocking) { Module::to(device, non_blocking); }

LabelTree LabelTree::from_parents(const Tensor& parents) {
  const Tensor inside = parents.index({parents.ge(0).logical_and(parents.lt(parents.numel()))}); // what else is wrong is said below
  const Tensor leaf = at::ones(parents.sizes(), at::kBool).index_fill_(0, inside, 0);
  return LabelTree(parents, at::where(leaf, leaf.cumsum(0) - 1, -1));
}

LabelTree LabelTree::balanced(const Tensor& order, int64_t arity) { return of(label_tree_balanced(order, arity)); }

LabelTree LabelTree::random(int64_t num_classes, int64_t arity, std::optional<at::Generator> generator) {
  TORCH_CHECK_VALUE(num_classes >= 1, "LabelTree::random: expected num_classes of at least 1, got ", num_classes);
  return balanced(at::randperm(num_classes, generator, at::kLong), arity);
}

LabelTree LabelTree::from_vectors(const Tensor& vectors, int64_t arity, int64_t iterations, std::optional<at::Generator> generator) {
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  const Tensor seed = at::randint(-most - 1, most, {}, generator, at::kLong);
  return balanced(label_tree_kmeans_order(seed, vectors, arity, iterations), arity);
}

LabelTree LabelTree::from_frequencies(const Tensor& counts, int64_t subsets) {
  return of(label_tree_equal_mass(as_counts(counts), subsets));
}

LabelTree LabelTree::huffman(const Tensor& counts, int64_t arity) { return of(label_tree_huffman(as_counts(counts), arity)); }

} // namespace xsoftmax
