// Initialises the rows of a layer: copies of their parents' rows, or sums of their examples.

#include "nn/hierarchical_matcher.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/options.h"
#include "matcher/shortlist.h"
#include "tree/tree_scores.h"
#include "op/find_op.h"

#include <xsoftmax/ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;
using matcher::Edges;
using matcher::Layer;

constexpr const char* kHierarchicalMatcherInit = "matcher_init_layer_";
constexpr int64_t kBlock = 4096;  // examples summed at once
constexpr int64_t kSample = 4096; // examples used to fit scale and offset
constexpr int64_t kPart = 512;    // of those, examples scored at once

struct Prototypes {
  // For each node of the layer: sum_{i of c} (h_i - m) / sqrt(n_c), and -m times that.
  Tensor rows, shift;
};

struct Examples {
  Tensor queries, nodes; // [n, D]; [n, T], the true nodes of the layer, padded with -1
  int64_t size() const { return queries.size(0); }
};

// Adds the sums and the number of a block of examples to those of the nodes.
void add_block(const Prototypes& sums, const Tensor& counts, const Tensor& centred,
               const Tensor& nodes, int64_t begin) {
  const Tensor right = std::get<0>(nodes.sort(1)), later = right.slice(1, 1);
  // A node above two labels of an example counts once.
  later.masked_fill_(later.eq(right.slice(1, 0, -1)), -1);
  const Tensor is_target = right.ge(0), row = is_target.nonzero().select(1, 0);
  const auto unique = at::_unique2(right.masked_select(is_target) - begin, /*sorted=*/true,
                                   /*return_inverse=*/true);
  // Only nodes that occur are touched.
  const auto& [found, place] = std::pair(std::get<0>(unique), std::get<1>(unique));
  const Tensor has = at::_sparse_coo_tensor_unsafe(at::stack({place, row}),
                                                   at::ones({place.size(0)}, centred.options()),
                                                   {found.size(0), centred.size(0)});
  sums.rows.index_add_(0, found, at::mm(has, centred));
  counts.index_add_(0, found,
                    at::bincount(place, std::nullopt, found.size(0)).to(centred.scalar_type()));
}

Prototypes prototypes(const Examples& examples, const Layer& current_layer, bool centre) {
  const Tensor& queries = examples.queries;
  const at::ScalarType dtype = c10::promoteTypes(queries.scalar_type(), at::kFloat);
  const auto options = queries.options().dtype(dtype);
  const Tensor mean = centre ? queries.mean(at::IntArrayRef({0}), /*keepdim=*/false, dtype)
                             : at::zeros({queries.size(1)}, options);
  const Prototypes sums{at::zeros({current_layer.size(), queries.size(1)}, options), {}};
  const Tensor counts = at::zeros({current_layer.size()}, options);
  for (int64_t first = 0; first < examples.size(); first += kBlock) {
    const auto block = [&](const Tensor& tensor) { return tensor.slice(0, first, first + kBlock); };
    add_block(sums, counts, block(queries).to(dtype) - mean, block(examples.nodes),
              current_layer.begin);
  }
  sums.rows.div_(counts.clamp_min(1).sqrt().unsqueeze(1));
  return {sums.rows, sums.rows.mv(mean).neg()};
}

// Returns the scores of the nodes on the shortlists of a sample of the examples, and whether they
// are true nodes. Both are float64.
std::pair<Tensor, Tensor> scores_of_sample(const Examples& examples, const Edges& edges,
                                           const Layer& current_layer,
                                           const Prototypes& prototype_sums,
                                           const HierarchicalMatcherOptions& options) {
  const int64_t count = std::min(examples.size(), kSample);
  const Tensor sample = (at::arange(count, examples.nodes.options()) * (examples.size() - 1))
                            .floor_divide(std::max<int64_t>(count - 1, 1));
  std::vector<Tensor> scores, right;
  for (const Tensor& part : sample.split(kPart)) {
    const Tensor queries = examples.queries.index_select(0, part);
    const auto [nodes, offsets, is_right] = matcher::step_shortlist(
        queries, examples.nodes.index_select(0, part), edges, current_layer, options);
    scores.push_back(ragged_scores(queries.to(prototype_sums.rows.scalar_type()),
                                   prototype_sums.rows, prototype_sums.shift,
                                   nodes - current_layer.begin, offsets,
                                   /*sparse_grad=*/false)
                         .to(at::kDouble));
    right.push_back(is_right.to(at::kDouble));
  }
  return {at::cat(scores), at::cat(right)};
}

// Returns the derivative of node_losses with respect to the score.
Tensor slopes(const Tensor& scores, const Tensor& right, const std::string& loss) {
  const Tensor sign = right * 2 - 1, margin = sign * scores;
  return loss == "squared_hinge" ? sign * (1 - margin).clamp_min(0) * -2
                                 : sign * margin.neg().sigmoid().neg();
}

// Returns the scale and offset of the scores that minimise the loss. unit: root mean square of the
// scores.
std::pair<double, double> fit(const Tensor& scores, const Tensor& right, double unit,
                              bool has_offset, const std::string& loss) {
  const Tensor by_unit = scores / unit, values = at::zeros({2}, scores.options());
  torch::optim::LBFGS optimizer(std::vector<Tensor>{values},
                                torch::optim::LBFGSOptions(1)
                                    .max_iter(100)
                                    .tolerance_grad(1e-9)
                                    .tolerance_change(1e-12)
                                    .line_search_fn("strong_wolfe"));
  optimizer.step([&] {
    const at::NoGradGuard no_grad;
    const Tensor fitted = values.select(0, 0) * by_unit + values.select(0, 1);
    const Tensor slope = slopes(fitted, right, loss);
    const Tensor offset_slope = has_offset ? slope.mean() : at::zeros({}, scores.options());
    values.mutable_grad() = at::stack({(slope * by_unit).mean(), offset_slope});
    return matcher::node_losses(fitted, right, loss).mean();
  });
  return {values.select(0, 0).item<double>() / unit, values.select(0, 1).item<double>()};
}

Tensor check_init_layer(at::TensorList tables, const Tensor& input, const Tensor& target,
                        const TreeTables& tree, at::IntArrayRef layer_sizes, int64_t layer,
                        const HierarchicalMatcherOptions& options) {
  TORCH_CHECK_VALUE(tables.size() == 1 || tables.size() == 2, kHierarchicalMatcherInit,
                    ": expected tables as weight, or weight and bias, got ", tables.size(),
                    " tensors");
  const Edges edges{tables[0], tables.size() == 2 ? OptionalTensor(tables[1]) : std::nullopt, tree,
                    layer_sizes};
  matcher::check_options(kHierarchicalMatcherInit, options);
  const Tensor queries = matcher::check_step(kHierarchicalMatcherInit, input, target, edges);
  check::linear(kHierarchicalMatcherInit, queries, edges.weight, edges.bias); // also under autocast
  const Layer current_layer(kHierarchicalMatcherInit, layer_sizes, layer);
  TORCH_CHECK_VALUE(queries.sym_size(0) >= 1, kHierarchicalMatcherInit,
                    ": expected at least one example, got none");
  return queries;
}

void init_layer(at::TensorList tables, const Tensor& input, const Tensor& target,
                at::TensorList label_tree, at::IntArrayRef layer_sizes, int64_t layer,
                std::string_view text) {
  const TreeTables tree(kHierarchicalMatcherInit, label_tree);
  const auto options = parse_options<HierarchicalMatcherOptions>(kHierarchicalMatcherInit, text);
  const Tensor queries = check_init_layer(tables, input, target, tree, layer_sizes, layer, options);
  const bool has_bias = tables.size() == 2;
  TORCH_CHECK_VALUE(queries.isfinite().all().item<bool>(), kHierarchicalMatcherInit,
                    ": expected input of finite numbers, got others");
  const Edges edges{tables[0], has_bias ? OptionalTensor(tables[1]) : std::nullopt, tree,
                    layer_sizes};
  const Layer current_layer(kHierarchicalMatcherInit, layer_sizes, layer);
  const Examples examples{
      queries,
      matcher::true_nodes(kHierarchicalMatcherInit,
                          target.reshape({queries.size(0), target.size(-1)}), edges, layer)};
  TORCH_CHECK_VALUE(examples.nodes.lt(current_layer.end).all().item<bool>(),
                    kHierarchicalMatcherInit, ": expected parent with a node of layer ", layer,
                    " above each label that is deeper, got another");
  const Prototypes prototype_sums = prototypes(examples, current_layer, has_bias);
  const auto [scores, right] =
      scores_of_sample(examples, edges, current_layer, prototype_sums, options);
  const double unit = scores.numel() > 0 ? scores.square().mean().sqrt().item<double>() : 0;
  const bool fits = !(unit <= 0) && std::isfinite(unit);
  const auto [scale, offset] =
      fits ? fit(scores, right, unit, has_bias, options.loss) : std::pair(1.0, 0.0);
  const auto dtype = tables[0].scalar_type();
  const Tensor rows = (prototype_sums.rows * scale).to(dtype),
               shift = (prototype_sums.shift * scale + offset).to(dtype);
  TORCH_CHECK_VALUE((fits || unit == 0) && rows.isfinite().all().item<bool>() &&
                        shift.isfinite().all().item<bool>(),
                    kHierarchicalMatcherInit,
                    ": expected input whose sums and scores are finite, got larger numbers");
  tables[0].narrow(0, current_layer.begin - 1, current_layer.size()).copy_(rows);
  if (has_bias) {
    tables[1].narrow(0, current_layer.begin - 1, current_layer.size()).copy_(shift);
  }
}

void init_layer_meta(at::TensorList tables, const Tensor& input, const Tensor& target,
                     at::TensorList tree, at::IntArrayRef layer_sizes, int64_t layer,
                     std::string_view text) {
  check_init_layer(tables, input, target, {kHierarchicalMatcherInit, tree}, layer_sizes, layer,
                   parse_options<HierarchicalMatcherOptions>(kHierarchicalMatcherInit, text));
}

void check_next_layer(const Tensor& table, const Tensor& parent, at::IntArrayRef layer_sizes,
                      int64_t layer) {
  constexpr const char* op = "matcher_next_layer_";
  check::floating(op, "table", table);
  TORCH_CHECK_VALUE(table.dim() == 1 || table.dim() == 2, op,
                    ": expected table of shape [E] or [E, D], got ", table.sym_sizes());
  check_nodes(op, "parent", parent, table, table.sym_size(0) + 1);
  check_layer_sizes(op, layer_sizes, table.sym_size(0));
  const auto layers = int64_t(layer_sizes.size());
  TORCH_CHECK_VALUE(layer >= 1 && layer < layers, op, ": expected layer in [1, ", layers, "), got ",
                    layer);
}

void next_layer(const Tensor& table, const Tensor& parent, at::IntArrayRef layer_sizes,
                int64_t layer) {
  check_next_layer(table, parent, layer_sizes, layer);
  const Layer next("matcher_next_layer_", layer_sizes, layer + 1);
  const Tensor above = (parent.narrow(0, next.begin, next.size()) - 1).clamp_min(0);
  table.narrow(0, next.begin - 1, next.size()).copy_(table.index_select(0, above));
}

} // namespace

void matcher_next_layer_(const Tensor& table, const Tensor& parent, at::IntArrayRef layer_sizes,
                         int64_t layer) {
  static const auto op = find_op<decltype(next_layer)>("xsoftmax::matcher_next_layer_");
  op.call(table, parent, layer_sizes, layer);
}

void matcher_init_layer_(at::TensorList tables, const Tensor& input, const Tensor& target,
                         const TreeTables& tree, at::IntArrayRef layer_sizes, int64_t layer,
                         const HierarchicalMatcherOptions& options) {
  static const auto op = find_op<decltype(init_layer)>("xsoftmax::matcher_init_layer_");
  const std::vector<Tensor> tensors{tree.first_child, tree.parent, tree.node_class,
                                    tree.class_node};
  op.call(tables, input, target, tensors, layer_sizes, layer, print_options(options));
}

XSOFTMAX_OPERATORS(m) {
  m.def("matcher_next_layer_(Tensor(a!) table, Tensor parent, int[] layer_sizes, int layer) -> ()");
  m.def(
      "matcher_init_layer_(Tensor(a!)[] tables, Tensor input, Tensor target, Tensor[] tree, int[] "
      "layer_sizes, int layer, "
      "str options=\"\") -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("matcher_next_layer_", next_layer);
  m.impl("matcher_init_layer_", init_layer);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("matcher_next_layer_", check_next_layer);
  m.impl("matcher_init_layer_", init_layer_meta);
}

} // namespace xsoftmax
