#include "losses/candidate_loss.h"

#include "core/autocast.h"
#include "core/checks.h"
#include "core/optional.h"
#include "losses/estimators.h"
#include "xsoftmax/ops.h"

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

constexpr const char* kOp = "candidate_loss";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

c10::SymInt width(const OptionalTensor& ids, int64_t axis) { return given(ids) ? ids->sym_size(axis) : c10::SymInt(0); }

// The batch as an estimator sees it, in ATen calls.
CandidateBatch make_batch(const CandidateLossArgs& args, const Estimator& estimator) {
  const Tensor score = args.scores.narrow(1, 1, args.scores.size(1) - 1);
  const int64_t queries = args.scores.size(0), own = given(args.private_ids) ? args.private_ids->size(1) : 0, all = score.size(1) - own;
  const auto long_options = args.target.options();
  const Tensor no_ids = at::zeros({queries, 0}, long_options), no_count = at::zeros({queries, 0}, args.scores.options());
  const Tensor ids = at::cat({given(args.private_ids) ? *args.private_ids : no_ids,
                              given(args.shared_ids) ? args.shared_ids->expand({queries, all}) : no_ids}, 1);
  const auto log_count = [&](const OptionalTensor& count, int64_t columns) {
    return given(count) ? count->to(args.scores.scalar_type()).expand({queries, columns})
                        : at::zeros({queries, columns}, args.scores.options());
  };
  const Tensor counts = at::cat({log_count(args.private_log_count, own), log_count(args.shared_log_count, all)}, 1);

  const int64_t own_draws = own - args.fixed_private, all_draws = all - args.fixed_shared;
  Tensor drawn = at::zeros({own + all}, long_options.dtype(at::kBool)); // not one of a distinct set
  drawn.narrow(0, args.fixed_private, own_draws).fill_(true);
  drawn.narrow(0, own + args.fixed_shared, all_draws).fill_(true);
  const bool remove_drawn_hits = args.remove_accidental_hits && estimator.drops_drawn_hits;
  const bool remove_distinct_hits = args.remove_accidental_hits && estimator.drops_distinct_hits;
  const Tensor removable = at::where(drawn, remove_drawn_hits, remove_distinct_hits);
  const Tensor equal = ids.eq(args.target.unsqueeze(1)), hit = equal.logical_and(removable);
  const Tensor covered = equal.logical_and(drawn.logical_not()).logical_and(counts.ne(kInfinity)).any(1);
  Tensor out = hit.logical_or(counts.eq(kInfinity)); // takes no part
  if (estimator.takes_a_draw && args.fixed_private + args.fixed_shared > 0) {
    out = out.logical_or(drawn.logical_and(drawn.cumsum(0).eq(1)).logical_and(covered.logical_not().unsqueeze(1)));
  }
  Tensor log_weight = at::where(out, -kInfinity, estimator.weighs ? -counts : at::zeros_like(counts));
  const bool renormalize = remove_drawn_hits && estimator.renormalizes && given(args.target_log_count);
  if (renormalize && own_draws + all_draws > 0) {
    const Tensor live = out.logical_not().logical_and(drawn).sum(1).to(args.scores.scalar_type());
    const Tensor rest = (double(own_draws + all_draws) - args.target_log_count->to(args.scores.scalar_type()).exp()).clamp_min(0);
    const Tensor factor = at::where(live.gt(0), (rest / live).log(), 0.0);
    log_weight = at::where(drawn, log_weight + factor.unsqueeze(1), log_weight);
  }
  Tensor target = args.scores.select(1, 0);
  if (estimator.corrects_target) {
    const Tensor log_count = args.target_log_count->to(args.scores.scalar_type());
    target = target - at::where(log_count.eq(-kInfinity), 0.0, log_count); // a target that no draw can give owes no correction
  }
  const Tensor adjusted = at::where(log_weight.eq(-kInfinity), -kInfinity, score + log_weight);
  const Tensor target_log_count = given(args.target_log_count) ? args.target_log_count->to(args.scores.scalar_type()) : Tensor();
  return {target, score, log_weight, adjusted, drawn, own_draws + all_draws, covered, target_log_count, args.label_smoothing};
}

Tensor candidate_loss_meta(XS_CANDIDATE_LOSS_PARAMS) {
  check_candidate_loss({XS_CANDIDATE_LOSS_ARGS});
  return at::empty_symint({scores.sym_size(0)}, scores.options());
}

Tensor candidate_loss_backward_meta(const Tensor& grad, XS_CANDIDATE_LOSS_PARAMS) {
  check_candidate_loss_backward(grad, {XS_CANDIDATE_LOSS_ARGS});
  return at::empty_symint(scores.sym_sizes(), scores.options());
}

class CandidateLoss : public torch::autograd::Function<CandidateLoss> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, XS_CANDIDATE_LOSS_PARAMS) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto tensor = [](const OptionalTensor& optional) { return optional.value_or(Tensor()); };
    ctx->save_for_backward({scores, target, tensor(private_ids), tensor(shared_ids), tensor(private_log_count),
                            tensor(shared_log_count), tensor(target_log_count)});
    ctx->saved_data["estimator"] = std::string(estimator);
    ctx->saved_data["remove_accidental_hits"] = remove_accidental_hits;
    ctx->saved_data["fixed_private"] = fixed_private;
    ctx->saved_data["fixed_shared"] = fixed_shared;
    ctx->saved_data["label_smoothing"] = label_smoothing;
    return candidate_loss(XS_CANDIDATE_LOSS_ARGS);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    torch::autograd::variable_list result(12);
    if (ctx->needs_input_grad(0)) {
      const auto saved = ctx->get_saved_variables();
      const std::string estimator = ctx->saved_data["estimator"].toStringRef();
      result[0] = candidate_loss_backward(
          grads[0], saved[0], saved[1], optional(saved[2]), optional(saved[3]), optional(saved[4]), optional(saved[5]),
          optional(saved[6]), estimator, ctx->saved_data["remove_accidental_hits"].toBool(), ctx->saved_data["fixed_private"].toInt(),
          ctx->saved_data["fixed_shared"].toInt(), ctx->saved_data["label_smoothing"].toDouble());
    }
    return result;
  }
};

Tensor candidate_loss_autograd(XS_CANDIDATE_LOSS_PARAMS) { return CandidateLoss::apply(XS_CANDIDATE_LOSS_ARGS); }

// A loss is small and sums exponentials: at least float32, ids as they are.
template <c10::DeviceType device>
Tensor candidate_loss_autocast(XS_CANDIDATE_LOSS_PARAMS) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const Tensor wide = at::autocast::cached_cast(at::kFloat, scores, device);
  return candidate_loss(wide, XS_CANDIDATES_ARGS);
}

} // namespace

Tensor candidate_loss(XS_CANDIDATE_LOSS_PARAMS) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("xsoftmax::candidate_loss", "")
                             .typed<decltype(candidate_loss_reference)>();
  return op.call(XS_CANDIDATE_LOSS_ARGS);
}

Tensor candidate_loss_backward(const Tensor& grad, XS_CANDIDATE_LOSS_PARAMS) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("xsoftmax::candidate_loss_backward", "")
                             .typed<decltype(candidate_loss_backward_reference)>();
  return op.call(grad, XS_CANDIDATE_LOSS_ARGS);
}

void check_candidates(const char* op, const char* rows_arg, const Tensor& rows, XS_CANDIDATES_PARAMS) {
  const std::string rows_of = std::string("the rows of ") + rows_arg;
  const auto one_a_query = [&](const char* arg, const Tensor& tensor) {
    check::size(op, arg, tensor, 0, rows.sym_size(0), rows_of.c_str());
    check::same_device(op, arg, tensor, rows_arg, rows);
  };
  check::dim(op, "target", target, 1);
  check::int64(op, "target", target);
  one_a_query("target", target);
  const auto check_ids = [&](const char* arg, const OptionalTensor& ids, const char* count_arg, const OptionalTensor& log_count,
                             bool is_private) {
    if (given(ids)) {
      check::dim(op, arg, *ids, is_private ? 2 : 1);
      check::int64(op, arg, *ids);
      check::same_device(op, arg, *ids, rows_arg, rows);
      if (is_private) {
        one_a_query(arg, *ids);
      }
    }
    if (given(log_count)) {
      const bool of_ids = given(ids) && log_count->sym_sizes() == ids->sym_sizes();
      const bool of_pairs = given(ids) && !is_private && log_count->dim() == 2 && log_count->sym_size(0) == rows.sym_size(0) &&
                            log_count->sym_size(1) == ids->sym_size(0);
      TORCH_CHECK_VALUE(of_ids || of_pairs, op, ": expected ", count_arg, " of the shape of ", arg,
                        is_private ? "" : ", or with a row for each query", ", got shape ", log_count->sym_sizes());
      check::floating(op, count_arg, *log_count);
      check::same_device(op, count_arg, *log_count, rows_arg, rows);
    }
  };
  check_ids("private_ids", private_ids, "private_log_count", private_log_count, true);
  check_ids("shared_ids", shared_ids, "shared_log_count", shared_log_count, false);
  const auto fixed = [&](const char* arg, int64_t value, const c10::SymInt& most) {
    TORCH_CHECK_VALUE(value >= 0 && most >= value, op, ": expected ", arg, " in [0, ", most, "], got ", value);
  };
  fixed("fixed_private", fixed_private, width(private_ids, 1));
  fixed("fixed_shared", fixed_shared, width(shared_ids, 0));
  if (given(target_log_count)) {
    check::dim(op, "target_log_count", *target_log_count, 1);
    check::floating(op, "target_log_count", *target_log_count);
    one_a_query("target_log_count", *target_log_count);
  }
  const Estimator& chosen = find_estimator(op, estimator);
  TORCH_CHECK_VALUE(!chosen.needs_target_count || given(target_log_count), op, ": expected target_log_count for estimator \"",
                    chosen.name, "\", got none");
  TORCH_CHECK_VALUE(label_smoothing >= 0 && label_smoothing <= 1, op, ": expected label_smoothing in [0, 1], got ", label_smoothing);
  TORCH_CHECK_VALUE(chosen.smooths || label_smoothing == 0, op, ": expected label_smoothing=0 for estimator \"", chosen.name, "\", got ",
                    label_smoothing);
}

void check_candidate_loss(const CandidateLossArgs& args) {
  check::dim(kOp, "scores", args.scores, 2);
  TORCH_CHECK_TYPE(args.scores.scalar_type() == at::kFloat || args.scores.scalar_type() == at::kDouble, kOp,
                   ": expected scores of dtype float32 or float64, got ", check::name(args.scores.scalar_type()));
  check_candidates(kOp, "scores", args.scores, args.target, args.private_ids, args.shared_ids, args.private_log_count,
                   args.shared_log_count, args.target_log_count, args.estimator, args.remove_accidental_hits, args.fixed_private,
                   args.fixed_shared, args.label_smoothing);
  check::size(kOp, "scores", args.scores, 1, width(args.private_ids, 1) + width(args.shared_ids, 0) + 1,
              "the target, then the private, then the shared candidates");
}

void check_candidate_loss_backward(const Tensor& grad, const CandidateLossArgs& args) {
  check_candidate_loss(args);
  constexpr const char* op = "candidate_loss_backward";
  check::dim(op, "grad", grad, 1);
  check::size(op, "grad", grad, 0, args.scores.sym_size(0), "the rows of scores");
  check::floating(op, "grad", grad);
  check::same_device(op, "grad", grad, "scores", args.scores);
}

Tensor candidate_loss_reference(XS_CANDIDATE_LOSS_PARAMS) {
  const CandidateLossArgs args{XS_CANDIDATE_LOSS_ARGS};
  check_candidate_loss(args);
  const Estimator& chosen = find_estimator(kOp, estimator);
  return chosen.loss(make_batch(args, chosen));
}

Tensor candidate_loss_backward_reference(const Tensor& grad, XS_CANDIDATE_LOSS_PARAMS) {
  const CandidateLossArgs args{XS_CANDIDATE_LOSS_ARGS};
  check_candidate_loss_backward(grad, args);
  const Estimator& chosen = find_estimator(kOp, estimator);
  const auto gradient = chosen.gradient(make_batch(args, chosen));
  const Tensor column = grad.unsqueeze(1);
  return at::where(column.eq(0), 0.0, at::cat({gradient.target.unsqueeze(1), gradient.score}, 1) * column);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("candidate_loss(Tensor scores, " XS_CANDIDATES_SCHEMA ") -> Tensor");
  m.def("candidate_loss_backward(Tensor grad, Tensor scores, " XS_CANDIDATES_SCHEMA ") -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("candidate_loss", candidate_loss_reference);
  m.impl("candidate_loss_backward", candidate_loss_backward_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("candidate_loss", candidate_loss_meta);
  m.impl("candidate_loss_backward", candidate_loss_backward_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("candidate_loss", candidate_loss_autograd);
  m.impl("candidate_loss_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) {
  m.impl("candidate_loss", candidate_loss_autocast<c10::DeviceType::CPU>);
  m.impl("candidate_loss_backward", torch::CppFunction::makeFromBoxedFunction<below_autocast>());
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) {
  m.impl("candidate_loss", candidate_loss_autocast<c10::DeviceType::CUDA>);
  m.impl("candidate_loss_backward", torch::CppFunction::makeFromBoxedFunction<below_autocast>());
}

} // namespace xsoftmax
