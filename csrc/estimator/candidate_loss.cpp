#include "estimator/candidate_loss.h"

#include "op/autocast.h"
#include "op/checks.h"
#include "op/operators.h"
#include "op/optional.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "xsoftmax/ops.h"
#include "op/find_op.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kCandidateLoss = "candidate_loss"; // the operator that users call
constexpr const char* kScoreColumns = "the target, then the private, then the shared candidates";

void check_scores(const Tensor& scores) {
  check::dim(kCandidateLoss, "scores", scores, 2);
  TORCH_CHECK_TYPE(scores.scalar_type() == at::kFloat || scores.scalar_type() == at::kDouble,
                   kCandidateLoss, ": expected scores of dtype float32 or float64, got ",
                   check::name(scores.scalar_type()));
}

void check_estimator_loss(const EstimatorArguments& arguments) {
  const auto& [scores, target, candidates, options, estimator] = arguments;
  check_scores(scores);
  check_candidates(kCandidateLoss, "scores", scores, target, candidates, options);
  check::size(kCandidateLoss, "scores", scores, 1,
              candidates.private_width() + candidates.shared_width() + 1, kScoreColumns);
}

Tensor estimator_loss_any(const Tensor& scores, const Tensor& target,
                          const OptionalTensors& candidates, at::IntArrayRef distinct,
                          std::string_view options) {
  return estimator_loss_reference({kCandidateLoss, scores, target, candidates, distinct, options});
}

Tensor estimator_loss_backward_any(const Tensor& grad, const Tensor& scores, const Tensor& target,
                                   const OptionalTensors& candidates, at::IntArrayRef distinct,
                                   std::string_view options) {
  return estimator_loss_backward_reference(
      grad, {kCandidateLoss, scores, target, candidates, distinct, options});
}

Tensor estimator_loss_meta(const Tensor& scores, const Tensor& target,
                           const OptionalTensors& candidates, at::IntArrayRef distinct,
                           std::string_view options) {
  const EstimatorArguments checked(kCandidateLoss, scores, target, candidates, distinct, options);
  return at::empty_symint({scores.sym_size(0)}, scores.options());
}

Tensor estimator_loss_backward_meta(const Tensor& grad, const Tensor& scores, const Tensor& target,
                                    const OptionalTensors& candidates, at::IntArrayRef distinct,
                                    std::string_view options) {
  const EstimatorArguments checked(kCandidateLoss, scores, target, candidates, distinct, options);
  check_estimator_loss_backward(grad, scores);
  return at::empty_symint(scores.sym_sizes(), scores.options());
}

Tensor call_loss(const Tensor& scores, const Tensor& target, const OptionalTensors& candidates,
                 at::IntArrayRef distinct, std::string_view options) {
  static const auto op = find_op<decltype(estimator_loss_any)>("xsoftmax::estimator_loss");
  return op.call(scores, target, candidates, distinct, options);
}

Tensor call_backward(const Tensor& grad, const Tensor& scores, const Tensor& target,
                     const OptionalTensors& candidates, at::IntArrayRef distinct,
                     std::string_view options) {
  static const auto op =
      find_op<decltype(estimator_loss_backward_any)>("xsoftmax::estimator_loss_backward");
  return op.call(grad, scores, target, candidates, distinct, options);
}

class EstimatorLoss : public torch::autograd::Function<EstimatorLoss> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& scores,
                        const Tensor& target, const OptionalTensors& candidates,
                        at::IntArrayRef distinct, std::string_view options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    torch::autograd::variable_list saved{scores, target};
    for (size_t i = 0; i < candidates.size(); ++i) {
      saved.push_back(std::optional<Tensor>(candidates.get(i)).value_or(Tensor()));
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["distinct"] = distinct.vec();
    ctx->saved_data["options"] = std::string(options);
    return call_loss(scores, target, candidates, distinct, options);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    torch::autograd::variable_list result(5);
    if (ctx->needs_input_grad(0)) {
      const auto saved = ctx->get_saved_variables();
      OptionalTensors candidates;
      for (size_t i = 2; i < saved.size(); ++i) {
        candidates.push_back(optional(saved[i]));
      }
      result[0] = call_backward(grads[0], saved[0], saved[1], candidates,
                                ctx->saved_data["distinct"].toIntVector(),
                                ctx->saved_data["options"].toStringRef());
    }
    return result;
  }
};

Tensor estimator_loss_autograd(const Tensor& scores, const Tensor& target,
                               const OptionalTensors& candidates, at::IntArrayRef distinct,
                               std::string_view options) {
  check::strided_tensors(kCandidateLoss, {{"scores", &scores}, {"target", &target}});
  return EstimatorLoss::apply(scores, target, candidates, distinct, options);
}

// Under autocast the loss runs in float32, because it is cheap and sums exponentials. Ids are not
// cast.
template <c10::DeviceType device>
Tensor estimator_loss_autocast(const Tensor& scores, const Tensor& target,
                               const OptionalTensors& candidates, at::IntArrayRef distinct,
                               std::string_view options) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  return call_loss(at::autocast::cached_cast(at::kFloat, scores, device), target, candidates,
                   distinct, options);
}

Tensor candidate_loss_op(const Tensor& scores, const Tensor& target, at::TensorList ids,
                         at::TensorList log_count, const OptionalTensors& target_log_count,
                         const c10::List<bool>& distinct, std::string_view options) {
  return candidate_loss(scores, target,
                        make_proposal(kCandidateLoss, ids, log_count, target_log_count, distinct),
                        parse_options<EstimatorOptions>(kCandidateLoss, options));
}

// Options of candidate_batch, the operator behind estimators written in Python.
struct BatchOptions : EstimatorTraits {
  bool remove_accidental_hits = true;
  double label_smoothing = 0.0;

  template <typename Visitor>
  void visit(Visitor& visitor) {
    EstimatorTraits::visit(visitor);
    visitor("remove_accidental_hits", remove_accidental_hits);
    visitor("label_smoothing", label_smoothing);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> candidate_batch(
    const Tensor& scores, const Tensor& target, at::TensorList ids, at::TensorList log_count,
    const OptionalTensors& target_log_count, const c10::List<bool>& distinct,
    std::string_view options) {
  constexpr const char* op = "candidate_batch";
  const auto parsed = parse_options<BatchOptions>(op, options);
  check_scores(scores);
  const Proposal sets = make_proposal(op, ids, log_count, target_log_count, distinct);
  const Candidates candidates = arrange_columns(sets, scores.sym_size(0), parsed);
  TORCH_CHECK_VALUE(
      !(parsed.needs_target_count || parsed.corrects_target) ||
          is_defined(candidates.target_log_count),
      op,
      ": expected target_log_count of the sets that are drawn, with needs_target_count=true where "
      "corrects_target is, got none");
  check_columns(op, "scores", scores, target, candidates);
  check::size(op, "scores", scores, 1, candidates.private_width() + candidates.shared_width() + 1,
              kScoreColumns);
  const auto batch = make_batch(scores, target, candidates, parsed, parsed.remove_accidental_hits,
                                parsed.label_smoothing);
  const Tensor count =
      batch.target_log_count.defined() ? batch.target_log_count : scores.new_empty({0});
  return {batch.target, batch.score, batch.log_weight, batch.adjusted,
          batch.drawn,  batch.draws, batch.covered,    count};
}

} // namespace

EstimatorArguments::EstimatorArguments(const char* op, const Tensor& scores, const Tensor& target,
                                       const OptionalTensors& candidates, at::IntArrayRef distinct,
                                       std::string_view options)
    : scores(scores), target(target), candidates(op, candidates, distinct),
      options(parse_options<EstimatorOptions>(op, options)),
      estimator(find_estimator(op, this->options.estimator)) {
  check_estimator_loss(*this);
}

Tensor estimator_loss(const Tensor& scores, const Tensor& target, const Candidates& candidates,
                      const EstimatorOptions& options) {
  return call_loss(scores, target, candidates.tensors(), candidates.distinct(), text_of(options));
}

Tensor estimator_loss_backward(const Tensor& grad, const Tensor& scores, const Tensor& target,
                               const Candidates& candidates, const EstimatorOptions& options) {
  return call_backward(grad, scores, target, candidates.tensors(), candidates.distinct(),
                       text_of(options));
}

Tensor candidate_loss(const Tensor& scores, const Tensor& target, const Proposal& sets,
                      const EstimatorOptions& options) {
  TORCH_CHECK_VALUE(
      in_column_order(sets), kCandidateLoss,
      ": expected sets in the order of the columns of scores, the private before the shared ones, "
      "of both the distinct ones first");
  check::dim(kCandidateLoss, "scores", scores, 2); // the dtype is checked after autocast
  const Estimator& estimator = find_estimator(kCandidateLoss, options.estimator);
  const Candidates candidates = arrange_columns(sets, scores.sym_size(0), estimator.traits);
  if (estimator.has_kernels()) {
    return estimator_loss(scores, target, candidates, options);
  }
  return estimator_loss_reference({scores, target, candidates, options, estimator});
}

CandidateBatch make_batch(const Tensor& scores, const Tensor& target, const Candidates& candidates,
                          const EstimatorTraits& traits, bool remove_accidental_hits,
                          double label_smoothing) {
  const auto& [private_ids, shared_ids, private_log_count, shared_log_count, count_of_target,
               distinct_private, distinct_shared] = candidates;
  const Tensor score = scores.narrow_symint(1, 1, scores.sym_size(1) - 1);
  const c10::SymInt queries = scores.sym_size(0), private_width = candidates.private_width(),
                    shared_width = score.sym_size(1) - private_width;
  const auto long_options = target.options();
  const Tensor no_ids = at::zeros_symint({queries, 0}, long_options),
               no_count = at::zeros_symint({queries, 0}, scores.options());
  const Tensor ids = at::cat(
      {is_defined(private_ids) ? *private_ids : no_ids,
       is_defined(shared_ids) ? shared_ids->expand_symint({queries, shared_width}) : no_ids},
      1);
  const auto log_count = [&](const OptionalTensor& count, const c10::SymInt& columns) {
    return is_defined(count) ? count->to(scores.scalar_type()).expand_symint({queries, columns})
                             : no_count;
  };
  const Tensor counts = at::cat(
      {log_count(private_log_count, private_width), log_count(shared_log_count, shared_width)}, 1);

  Tensor drawn = at::zeros_symint({private_width + shared_width},
                                  long_options.dtype(at::kBool)); // not in a distinct set
  drawn.narrow_symint(0, distinct_private, private_width - distinct_private).fill_(true);
  drawn.narrow_symint(0, private_width + distinct_shared, shared_width - distinct_shared)
      .fill_(true);
  const bool remove_drawn_hits = remove_accidental_hits && traits.drops_drawn_hits;
  const bool remove_distinct_hits = remove_accidental_hits && traits.drops_distinct_hits;
  const Tensor present = counts.ne(kInfinite), draw = drawn.logical_and(present);
  const Tensor equal = ids.eq(target.unsqueeze(1)),
               hit = equal.logical_and(at::where(drawn, remove_drawn_hits, remove_distinct_hits));
  const Tensor covered = equal.logical_and(drawn.logical_not()).logical_and(present).any(1);
  Tensor out = hit.logical_or(present.logical_not()); // left out
  if (traits.replaces_a_sample && distinct_private + distinct_shared > 0) {
    out = out.logical_or(
        draw.logical_and(draw.cumsum(1).eq(1)).logical_and(covered.logical_not().unsqueeze(1)));
  }
  Tensor log_weight = at::where(out, -kInfinite, traits.weighs ? -counts : at::zeros_like(counts));
  const Tensor target_log_count =
      is_defined(count_of_target) ? count_of_target->to(scores.scalar_type()) : Tensor();
  const Tensor draws = draw.sum(1).to(scores.scalar_type());
  if (remove_drawn_hits && traits.renormalizes && target_log_count.defined()) {
    const Tensor live = out.logical_not().logical_and(drawn).sum(1).to(scores.scalar_type());
    const Tensor others = (draws - target_log_count.exp()).clamp_min(0);
    const Tensor factor = at::where(live.gt(0), (others / live).log(), 0.0);
    log_weight = at::where(drawn, log_weight + factor.unsqueeze(1), log_weight);
  }
  Tensor target_score = scores.select(1, 0);
  if (traits.corrects_target) { // a target that cannot be sampled is not corrected
    target_score = target_score - at::where(target_log_count.eq(-kInfinite), 0.0, target_log_count);
  }
  const Tensor adjusted = at::where(log_weight.eq(-kInfinite), -kInfinite, score + log_weight);
  return {target_score, score,   log_weight,       adjusted,       drawn,
          draws,        covered, target_log_count, label_smoothing};
}

Tensor loss_of_scores(const EstimatorArguments& arguments, double z_loss) {
  const auto& [scores, target, candidates, options, estimator] = arguments;
  const Tensor loss = estimator.has_kernels() ? estimator_loss(scores, target, candidates, options)
                                              : estimator_loss_reference(arguments);
  if (z_loss == 0) {
    return loss;
  }
  const CandidateBatch batch =
      make_batch(scores, target, candidates, estimator.traits, options.remove_accidental_hits, 0.0);
  return loss + estimator.log_normalizer(batch).square() * z_loss;
}

Tensor estimator_loss_reference(const EstimatorArguments& arguments) {
  const auto& [scores, target, candidates, options, estimator] = arguments;
  check_estimator_loss(arguments);
  const CandidateBatch batch = make_batch(scores, target, candidates, estimator.traits,
                                          options.remove_accidental_hits, options.label_smoothing);
  const Tensor loss = estimator.loss(batch);
  TORCH_CHECK_VALUE(loss.sym_sizes() == batch.target.sym_sizes(), kCandidateLoss,
                    ": expected estimator \"", estimator.name, "\" to give a loss for each query, ",
                    batch.target.sym_sizes(), ", got ", loss.sym_sizes());
  return loss;
}

void check_estimator_loss_backward(const Tensor& grad, const Tensor& scores) {
  constexpr const char* op = "candidate_loss_backward";
  check::dim(op, "grad", grad, 1);
  check::size(op, "grad", grad, 0, scores.sym_size(0), "the rows of scores");
  check::floating(op, "grad", grad);
  check::same_device(op, "grad", grad, "scores", scores);
}

Tensor estimator_loss_backward_reference(const Tensor& grad, const EstimatorArguments& arguments) {
  const auto& [scores, target, candidates, options, estimator] = arguments;
  check_estimator_loss_backward(grad, scores);
  TORCH_CHECK_VALUE(estimator.gradient != nullptr, kCandidateLoss,
                    ": expected an estimator with a gradient, got \"", estimator.name, "\"");
  const auto gradient =
      estimator.gradient(make_batch(scores, target, candidates, estimator.traits,
                                    options.remove_accidental_hits, options.label_smoothing));
  const Tensor column = grad.unsqueeze(1);
  return at::where(column.eq(0), 0.0,
                   at::cat({gradient.target.unsqueeze(1), gradient.score}, 1) * column);
}

XSOFTMAX_OPERATORS(m) {
  const std::string sets =
      std::string("(Tensor scores, Tensor target, ") + kProposalSchema + ", str options=\"\") -> ";
  m.def(("candidate_loss" + sets + "Tensor").c_str(), candidate_loss_op);
  m.def(("candidate_batch" + sets +
         "(Tensor target_score, Tensor score, Tensor log_weight, Tensor adjusted, Tensor drawn, "
         "Tensor draws, "
         "Tensor covered, Tensor target_count)")
            .c_str(),
        candidate_batch);
  const std::string columns =
      std::string("Tensor scores, Tensor target, ") + kCandidatesSchema + ") -> Tensor";
  m.def(("estimator_loss(" + columns).c_str());
  m.def(("estimator_loss_backward(Tensor grad, " + columns).c_str());
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("estimator_loss", estimator_loss_any);
  m.impl("estimator_loss_backward", estimator_loss_backward_any);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("estimator_loss", estimator_loss_meta);
  m.impl("estimator_loss_backward", estimator_loss_backward_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("estimator_loss", estimator_loss_autograd);
  m.impl("estimator_loss_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) {
  m.impl("estimator_loss", estimator_loss_autocast<c10::DeviceType::CPU>);
  disable_autocast(m, {"estimator_loss_backward"});
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) {
  m.impl("estimator_loss", estimator_loss_autocast<c10::DeviceType::CUDA>);
  disable_autocast(m, {"estimator_loss_backward"});
}

} // namespace xsoftmax
