#include "tree/tree_losses.h"

#include "op/anomalies.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/options.h"
#include "cpu/products.h"
#include "op/shape_checks.h"
#include "estimator/candidates.h"
#include "estimator/estimators.h"
#include "estimator/logit_transform.h"
#include "loss/reduction.h"
#include "tree/beam_search.h"
#include "tree/edge_tables.h"
#include "tree/hierarchical_softmax.h"
#include "tree/tree_scores.h"

#include <xsoftmax/ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kNoId = std::numeric_limits<int64_t>::min();

// A checked batch: queries [Q, D] and targets [Q].
struct Batch {
  Tensor queries, target, counts;

  Batch(const char* op, const Tensor& input, const Tensor& target, const Tensor& weight,
        const OptionalTensor& bias, const TreeTables& tree, const OptionalTensor& class_weight,
        int64_t ignore_index) {
    check::strided(op, "input", input);
    check::strided(op, "target", target);
    TORCH_CHECK_VALUE(input.dim() >= 1, op,
                      ": expected input of shape [*, D], got a tensor without dimensions");
    TORCH_CHECK_VALUE(input.sym_sizes().slice(0, input.dim() - 1) == target.sym_sizes(), op,
                      ": expected target of shape ", input.sym_sizes().slice(0, input.dim() - 1),
                      ", got ", target.sym_sizes());
    check::int64(op, "target", target);
    check::same_device(op, "target", target, "input", input);
    check::dim(op, "class_node", tree.class_node, 1);
    check_class_weight(op, class_weight, tree.class_node.sym_size(0), target);
    this->target = target.reshape({-1});
    counts = this->target.ne(ignore_index);
    queries = input.reshape_symint({this->target.sym_size(0), input.sym_size(-1)});
    if (!at::autocast::is_autocast_enabled(
            input.device().type())) { // otherwise autocast casts later
      check::linear(op, queries, weight, bias);
    }
    if (check::can_read(target)) {
      check::class_ids(op, "target", target, tree.class_node.size(0), ignore_index);
    }
    check::finite_queries(op, "input", input, target, ignore_index);
  }

  c10::SymInt size() const { return target.sym_size(0); }
  Tensor known() const { return at::where(counts, target, 0); }
};

// Returns the nodes of the target and of the proposal's candidates, as columns for tree_scores and
// candidate_loss.
Tensor nodes_of(const Batch& batch, const TreeTables& tree, const Proposal& sets,
                const std::string& estimator) {
  const Tensor target_ids = batch.known().unsqueeze(1);
  std::vector<Tensor> ids{target_ids}, absent;
  Tensor covered = at::zeros_symint({batch.size(), 1}, batch.counts.options());
  const auto wide = [&](const Tensor& tensor) {
    return tensor.expand_symint({batch.size(), tensor.sym_size(-1)});
  };
  for (const CandidateSet& set : sets) {
    check::same_device("beam_tree_loss", "ids of a set", set.ids, "target", target_ids);
    check::same_device("beam_tree_loss", "log_count of a set", set.log_count, "target", target_ids);
    ids.push_back(wide(set.ids));
    absent.push_back(wide(set.log_count).eq(std::numeric_limits<double>::infinity()));
    if (set.distinct) {
      covered = covered.logical_or(
          ids.back().eq(target_ids).logical_and(absent.back().logical_not()).any(1, true));
    }
  }
  // Columns that take no part get the target's node, where they cost no edge: absent candidates,
  // and for "cane" the draws of queries whose target is in none of the distinct sets.
  std::vector<Tensor> unused{at::zeros_symint({batch.size(), 1}, batch.counts.options())};
  for (size_t i = 0; i < sets.size(); ++i) {
    unused.push_back(estimator == "cane" && !sets[i].distinct
                         ? absent[i].logical_or(covered.logical_not())
                         : absent[i]);
  }
  const Tensor nodes = label_tree_nodes(
      tree.class_node, at::where(at::cat(unused, 1), target_ids, at::cat(ids, 1)), kNoId);
  return at::where(batch.counts.unsqueeze(1), nodes, 0);
}

} // namespace

Tensor hierarchical_softmax_loss(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, const Tensor& target,
                                 const TreeTables& tree, at::IntArrayRef layer_sizes,
                                 at::IntArrayRef group_sizes, const OptionalTensor& class_weight,
                                 const HierarchicalSoftmaxOptions& options) {
  const Batch batch("hierarchical_softmax_loss", input, target, weight, bias, tree, class_weight,
                    options.ignore_index);
  const Tensor nodes = label_tree_nodes(tree.class_node, batch.target, options.ignore_index);
  const Tensor loss =
      hierarchical_softmax(batch.queries, weight, bias, tree.first_child, tree.parent, nodes,
                           layer_sizes, group_sizes, options.sparse_grad);
  return reduced_loss(loss, target, class_weight, options);
}

void check_beam_tree_options(const SampledSoftmaxOptions& options) {
  constexpr const char* op = "beam_tree_loss";
  TORCH_CHECK_VALUE(!transforms(options) && options.z_loss == 0, op,
                    ": expected logit_scale of 1, no softcap and no z_loss, got ",
                    options.logit_scale, ", ", options.softcap, " and ", options.z_loss);
  reduction_code(op, options.reduction);
  find_estimator(op, options.estimator);
}

Tensor beam_tree_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const Tensor& target, const TreeTables& tree, at::IntArrayRef layer_sizes,
                      const Proposal& sets, const OptionalTensor& class_weight,
                      const SampledSoftmaxOptions& options) {
  const Batch batch("beam_tree_loss", input, target, weight, bias, tree, class_weight,
                    options.ignore_index);
  check_beam_tree_options(options);
  const Tensor nodes = nodes_of(batch, tree, sets, options.estimator);
  const Tensor scores = tree_scores(batch.queries, weight, bias, tree.parent, nodes, layer_sizes,
                                    /*differences_only=*/true, options.sparse_grad);
  return reduced_loss(candidate_loss(scores, batch.known(), sets, options), target, class_weight,
                      options);
}

Tensor tree_cross_entropy(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const Tensor& target, const TreeTables& tree, at::IntArrayRef layer_sizes,
                          const OptionalTensor& class_weight, const ReductionOptions& options) {
  constexpr const char* op = "tree_cross_entropy";
  const Batch batch(op, input, target, weight, bias, tree, class_weight, options.ignore_index);
  const bool low = weight.scalar_type() == at::kHalf || weight.scalar_type() == at::kBFloat16;
  const auto whole = [&](const Tensor& tensor) { return low ? tensor.to(at::kFloat) : tensor; };
  const auto gather_path = [&](const Tensor& rows) {
    return tree_class_scores(whole(rows), tree.parent, tree.class_node, layer_sizes, 0);
  };
  const int64_t reduction = reduction_code(op, options.reduction);
  CrossEntropyOptions exact;
  static_cast<ReductionOptions&>(exact) = options;
  const Tensor loss =
      linear_cross_entropy(whole(batch.queries), gather_path(weight),
                           is_defined(bias) ? OptionalTensor(gather_path(*bias)) : bias,
                           batch.target, class_weight, exact);
  return reduction == at::Reduction::None ? loss.reshape_symint(target.sym_sizes()) : loss;
}

std::tuple<Tensor, Tensor> tree_queries(const Tensor& input, const Tensor& target,
                                        const Tensor& weight, const OptionalTensor& bias,
                                        const TreeTables& tree, int64_t ignore_index,
                                        const OptionalTensor& class_weight) {
  const Batch batch("beam_tree_loss", input, target, weight, bias, tree, class_weight,
                    ignore_index);
  const Tensor queries = batch.queries.detach();
  return {at::where(batch.counts.unsqueeze(1), queries, at::zeros({}, queries.options())),
          at::where(batch.counts, batch.target, -1)};
}

Tensor beam_tree_candidates(const OptionalTensor& seed, const Tensor& queries, const Tensor& weight,
                            const OptionalTensor& bias, const TreeTables& tree,
                            at::IntArrayRef layer_sizes, const BeamOptions& options) {
  constexpr const char* op = "beam_tree_candidates";
  TORCH_CHECK_VALUE(options.num_candidates >= 1, op,
                    ": expected num_candidates of at least 1, got ", options.num_candidates);
  if (!options.routed) {
    TORCH_CHECK_VALUE(options.beam >= options.num_candidates, op,
                      ": expected beam of at least num_candidates, ", options.num_candidates,
                      ", got ", options.beam);
    return std::get<1>(
               beam_search(queries, weight, bias, tree.first_child, tree.node_class, options.beam))
        .narrow(1, 0, options.num_candidates);
  }
  TORCH_CHECK_VALUE(is_defined(seed), op, ": expected a seed of routed candidates, got none");
  check_layer_sizes(op, layer_sizes, weight.sym_size(0));
  TORCH_CHECK_VALUE(layer_sizes.size() == 2, op,
                    ": expected a tree of one layer of subsets of routed candidates, got ",
                    layer_sizes.size(), " layers");
  const auto subsets = [&](const Tensor& rows) {
    return rows.detach().narrow(0, 0, layer_sizes[0]);
  };
  const auto dtype = opmath_dtype(weight.scalar_type());
  Tensor scores = wide_product(queries.detach(), subsets(weight).t(), dtype);
  scores = is_defined(bias) ? scores + subsets(*bias).to(dtype) : scores;
  return tree_routed_candidates(*seed, scores, tree.first_child, tree.node_class,
                                options.num_candidates);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "hierarchical_softmax_loss(Tensor input, Tensor weight, Tensor? bias, Tensor target, "
      "Tensor[] tree, int[] layer_sizes, "
      "int[] group_sizes, Tensor? class_weight=None, str options=\"\") -> Tensor",
      [](const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
         const Tensor& target, at::TensorList tree, at::IntArrayRef layer_sizes,
         at::IntArrayRef group_sizes, const OptionalTensor& class_weight,
         std::string_view options) {
        constexpr const char* op = "hierarchical_softmax_loss";
        return hierarchical_softmax_loss(input, weight, bias, target, {op, tree}, layer_sizes,
                                         group_sizes, class_weight,
                                         parse_options<HierarchicalSoftmaxOptions>(op, options));
      });
  m.def((std::string("beam_tree_loss(Tensor input, Tensor weight, Tensor? bias, Tensor target, "
                     "Tensor[] tree, int[] layer_sizes, ") +
         kProposalSchema + ", Tensor? class_weight=None, str options=\"\") -> Tensor")
            .c_str(),
        [](const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
           const Tensor& target, at::TensorList tree, at::IntArrayRef layer_sizes,
           at::TensorList ids, at::TensorList log_count, const OptionalTensors& target_log_count,
           const c10::List<bool>& distinct, const OptionalTensor& class_weight,
           std::string_view options) {
          constexpr const char* op = "beam_tree_loss";
          return beam_tree_loss(input, weight, bias, target, {op, tree}, layer_sizes,
                                make_proposal(op, ids, log_count, target_log_count, distinct),
                                class_weight, parse_options<SampledSoftmaxOptions>(op, options));
        });
  m.def(
      "tree_cross_entropy(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor[] tree, "
      "int[] layer_sizes, "
      "Tensor? class_weight=None, str options=\"\") -> Tensor",
      [](const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
         const Tensor& target, at::TensorList tree, at::IntArrayRef layer_sizes,
         const OptionalTensor& class_weight, std::string_view options) {
        constexpr const char* op = "tree_cross_entropy";
        return tree_cross_entropy(input, weight, bias, target, {op, tree}, layer_sizes,
                                  class_weight, parse_options<SampledSoftmaxOptions>(op, options));
      });
  m.def(
      "tree_queries(Tensor input, Tensor target, Tensor weight, Tensor? bias, Tensor[] tree, int "
      "ignore_index, Tensor? class_weight=None) -> "
      "(Tensor queries, Tensor counted)",
      [](const Tensor& input, const Tensor& target, const Tensor& weight,
         const OptionalTensor& bias, at::TensorList tree, int64_t ignore_index,
         const OptionalTensor& class_weight) {
        return tree_queries(input, target, weight, bias, {"tree_queries", tree}, ignore_index,
                            class_weight);
      });
  m.def(
      "beam_tree_candidates(Tensor? seed, Tensor queries, Tensor weight, Tensor? bias, Tensor[] "
      "tree, int[] layer_sizes, "
      "str options) -> Tensor",
      [](const OptionalTensor& seed, const Tensor& queries, const Tensor& weight,
         const OptionalTensor& bias, at::TensorList tree, at::IntArrayRef layer_sizes,
         std::string_view options) {
        constexpr const char* op = "beam_tree_candidates";
        return beam_tree_candidates(seed, queries, weight, bias, {op, tree}, layer_sizes,
                                    parse_options<BeamOptions>(op, options));
      });
}

} // namespace xsoftmax
