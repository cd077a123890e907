#include "tree/beam_tree_step.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "table/updates/pending_updates.h"
#include "proposal/candidate_set.h"
#include "proposal/modules.h"
#include "proposal/sampler_kind.h"
#include "tree/edge_tables.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kBeamTreeStep = "beam_tree_step";

// Whether a step trains the edges and counts for balancing. 16-bit edges are balanced only on
// request, because rounding changes scores.
bool learns(const Tensor& weight, const BeamTreeStepOptions& options) {
  const auto dtype = weight.scalar_type();
  return options.balance_every > 0 &&
      (options.balances_16_bits || dtype == at::kFloat || dtype == at::kDouble) &&
      at::GradMode::is_enabled() && weight.requires_grad() && !weight.is_meta() &&
      check::is_plain(weight);
}

void count_step(const Tensor& weight, const OptionalTensor& bias, const TreeTables& tree,
                at::IntArrayRef layer_sizes, const OptionalTensor& steps,
                const BeamTreeStepOptions& options) {
  if (!is_defined(steps) || !learns(weight, options)) {
    return;
  }
  check::dim(kBeamTreeStep, "steps", *steps, 0);
  check::int64(kBeamTreeStep, "steps", *steps);
  TORCH_CHECK_TYPE(check::can_read(*steps), kBeamTreeStep,
                   ": expected steps on the CPU, got a tensor on ", steps->device());
  const at::AutoDispatchBelowADInplaceOrView guard;
  const int64_t count = steps->item<int64_t>() + 1;
  if (count % options.balance_every == 0) {
    balance_edges(weight, bias, tree, layer_sizes);
  }
  steps->fill_(count);
}

} // namespace

void balance_edges(const Tensor& weight, const OptionalTensor& bias, const TreeTables& tree,
                   at::IntArrayRef layer_sizes) {
  std::vector<Tensor> tables;
  const auto add = [&](const char* name, const Tensor& table) {
    check_tree_balance(table, tree.first_child, layer_sizes);
    check::writable(kBeamTreeStep, name, table);
    tables.push_back(table);
  };
  add("weight", weight);
  if (is_defined(bias)) {
    add("bias", *bias); // checked before weight changes
  }
  for (const Tensor& table : tables) {
    catch_up(table); // applies pending updates: rows whose updates differ have no common mean
    tree_balance_(table.tensor_data(), tree.first_child, layer_sizes);
  }
}

Tensor beam_tree_step(const BeamTreeStep& step, const BeamTreeStepOptions& options) {
  Proposal sets;
  {
    const at::AutoDispatchBelowADInplaceOrView guard; // sampling is not differentiable
    check_beam_tree_options(options);
    const auto [queries, counted] =
        tree_queries(step.input, step.target, step.weight, step.bias, step.tree,
                     options.ignore_index, step.class_weight);
    const OptionalTensor seed = options.routed
        ? OptionalTensor(samplers::draw_seed(queries, step.generator))
        : std::nullopt;
    const Tensor found = beam_tree_candidates(seed, queries, step.weight, step.bias, step.tree,
                                              step.layer_sizes, options);
    const CandidateSet outside =
        step.noise({queries, counted, step.generator, /*training=*/true}, found);
    const auto [ids, log_count] = always_scored_set(found);
    sets = {{ids, log_count, Tensor(), /*distinct=*/true}, outside};
  }
  // Counted last, because nothing below can fail.
  count_step(step.weight, step.bias, step.tree, step.layer_sizes, step.steps, options);
  return beam_tree_loss(step.input, step.weight, step.bias, step.target, step.tree,
                        step.layer_sizes, sets, step.class_weight, options);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "beam_tree_step(Tensor input, Tensor(a!) weight, Tensor(b!)? bias, Tensor target, Tensor[] "
      "tree, int[] layer_sizes, Tensor(c!)[] state, "
      "str noise, str options, Generator? generator, Tensor(d!)? steps, Tensor? class_weight) -> "
      "Tensor",
      [](const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
         const Tensor& target, at::TensorList tree, at::IntArrayRef layer_sizes,
         at::TensorList state, std::string_view noise, std::string_view text,
         std::optional<at::Generator> generator, const OptionalTensor& steps,
         const OptionalTensor& class_weight) {
        const SamplerView complement(kBeamTreeStep, noise, state);
        TORCH_CHECK_VALUE(complement.name() == "complement", kBeamTreeStep,
                          ": expected noise of kind complement, got ", complement.name());
        const auto options = parse_options<BeamTreeStepOptions>(kBeamTreeStep, text);
        const auto outside = [&](const DrawRequest& request, const Tensor& candidates) {
          return sample_outside(complement, request, candidates);
        };
        const TreeTables tables(kBeamTreeStep, tree);
        return beam_tree_step({input, weight, bias, target, tables, layer_sizes, outside,
                               std::move(generator), steps, class_weight},
                              options);
      });
  m.def(
      "beam_tree_balance_(Tensor(a!) weight, Tensor(b!)? bias, Tensor[] tree, int[] layer_sizes) "
      "-> ()",
      [](const Tensor& weight, const OptionalTensor& bias, at::TensorList tree,
         at::IntArrayRef layer_sizes) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        balance_edges(weight, bias, {kBeamTreeStep, tree}, layer_sizes);
      });
  m.def(
      "beam_tree_count_step_(Tensor(a!) weight, Tensor(b!)? bias, Tensor[] tree, int[] "
      "layer_sizes, Tensor(c!)? steps, str options) -> ()",
      [](const Tensor& weight, const OptionalTensor& bias, at::TensorList tree,
         at::IntArrayRef layer_sizes, const OptionalTensor& steps, std::string_view text) {
        count_step(weight, bias, {kBeamTreeStep, tree}, layer_sizes, steps,
                   parse_options<BeamTreeStepOptions>(kBeamTreeStep, text));
      });
}

} // namespace xsoftmax
