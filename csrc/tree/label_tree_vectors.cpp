#include "op/checks.h"
#include "op/operators.h"
#include "op/options.h"
#include "tree/label_tree.h"
#include "tree/label_tree_clusters.h"

#include <xsoftmax/trees.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace xsoftmax {

using at::Tensor;

LabelTreeNodes label_tree_from_vectors(const Tensor& seed, const Tensor& vectors,
                                       std::string_view options) {
  constexpr const char* op = "label_tree_from_vectors";
  const auto tree_options = parse_options<TreeFromVectors>(op, options);
  check::dim(op, "vectors", vectors, 2);
  check::floating(op, "vectors", vectors);
  TORCH_CHECK_VALUE(tree_options.max_leaf_size >= 0, op,
                    ": expected max_leaf_size of at least 1, or 0 for none, got ",
                    tree_options.max_leaf_size);
  TORCH_CHECK_VALUE(tree_options.balanced || tree_options.max_leaf_size > 0, op,
                    ": expected max_leaf_size of at least 1 with balanced=false, got 0");
  if (tree_options.max_leaf_size == 0) {
    return label_tree_balanced(label_tree_kmeans_order(seed, vectors.detach().cpu(),
                                                       tree_options.arity, tree_options.iterations),
                               tree_options.arity);
  }
  const Tensor rows = vectors.detach().to(at::kCPU, at::kFloat), is_nonzero = rows.ne(0),
               places = is_nonzero.nonzero();
  const Tensor offsets = at::cat({at::zeros({1}, places.options()), is_nonzero.sum(1).cumsum(0)});
  return label_tree_clusters(seed, offsets, places.select(1, 1).to(at::kInt),
                             rows.masked_select(is_nonzero), rows.size(1), tree_options);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "label_tree_from_vectors(Tensor seed, Tensor vectors, str options=\"\") -> (Tensor parents, "
      "Tensor classes)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("label_tree_from_vectors", label_tree_from_vectors);
}

} // namespace xsoftmax
