#include "losses/linear_candidate_loss.h"

#include "core/autocast.h"
#include "core/checks.h"
#include "core/dtypes.h"
#include "core/optional.h"
#include "core/scale_gradient.h"
#include "scores/candidate_scores.h"
#include "xsoftmax/ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

CandidateLossState call_forward(XS_LINEAR_CANDIDATE_LOSS_PARAMS, std::array<bool, 2> output_mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("xsoftmax::linear_candidate_loss_forward", "")
                             .typed<decltype(linear_candidate_loss_forward_reference)>();
  return op.call(XS_LINEAR_CANDIDATE_LOSS_ARGS, output_mask);
}

CandidateLossState linear_candidate_loss_forward_meta(XS_LINEAR_CANDIDATE_LOSS_PARAMS, std::array<bool, 2> output_mask) {
  check_linear_candidate_loss(XS_LINEAR_CANDIDATE_LOSS_ARGS);
  const auto options = input.options().dtype(opmath_dtype(input.scalar_type()));
  const auto queries = [&](bool wanted) { return wanted ? input.sym_size(0) : c10::SymInt(0); };
  const c10::SymInt own = 1 + (given(private_ids) ? private_ids->sym_size(1) : c10::SymInt(0));
  const c10::SymInt shared = given(shared_ids) ? shared_ids->sym_size(0) : c10::SymInt(0);
  return {at::empty_symint({input.sym_size(0)}, options), at::empty_symint({queries(output_mask[0]), input.sym_size(1)}, options),
          at::empty_symint({queries(output_mask[1]), own + shared}, options),
          at::empty_symint({input.sym_size(0), own}, target.options())};
}

Tensor loss_only(XS_LINEAR_CANDIDATE_LOSS_PARAMS, bool) {
  return std::get<0>(call_forward(XS_LINEAR_CANDIDATE_LOSS_ARGS, {false, false}));
}

class LinearCandidateLoss : public torch::autograd::Function<LinearCandidateLoss> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, XS_LINEAR_CANDIDATE_LOSS_PARAMS, bool sparse_grad) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const bool want_input = input.requires_grad();
    const bool want_table = weight.requires_grad() || (given(bias) && bias->requires_grad());
    auto [loss, grad_input, grad_scores, own_ids] = call_forward(XS_LINEAR_CANDIDATE_LOSS_ARGS, {want_input, want_table});
    ctx->save_for_backward({input, weight, grad_input, grad_scores, own_ids, shared_ids.value_or(Tensor()), target});
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["sparse_grad"] = sparse_grad;
    ctx->saved_data["has_bias"] = given(bias);
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &grad_input = saved[2], &grad_scores = saved[3];
    const bool want_bias = ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2);
    const bool want_table = ctx->needs_input_grad(1) || want_bias;
    torch::autograd::variable_list result(3);
    // A mean over no query at all sends infinity.
    const Tensor grad = grads[0].masked_fill(saved[6].eq(ctx->saved_data["ignore_index"].toInt()), 0);
    if (want_table) {
      const std::array<bool, 3> wanted{false, ctx->needs_input_grad(1), want_bias};
      const auto gradients = candidate_scores_backward(grad_scores, input, weight, saved[4], optional(saved[5]), wanted, grad);
      result = row_gradients_as_grads(gradients, weight.sym_size(0), wanted, ctx->saved_data["sparse_grad"].toBool());
    }
    if (ctx->needs_input_grad(0)) {
      result[0] = scale_gradient(grad_input, grad.unsqueeze(1), input).to(input.scalar_type());
    }
    result.resize(16);
    return result;
  }
};

Tensor linear_candidate_loss_autograd(XS_LINEAR_CANDIDATE_LOSS_PARAMS, bool sparse_grad) {
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return linear_candidate_loss(XS_LINEAR_CANDIDATE_LOSS_ARGS, sparse_grad);
  }
  return LinearCandidateLoss::apply(XS_LINEAR_CANDIDATE_LOSS_ARGS, sparse_grad);
}

// A cast of the table would touch all of its N rows, so the queries take the table's dtype.
Tensor linear_candidate_loss_autocast(XS_LINEAR_CANDIDATE_LOSS_PARAMS, bool sparse_grad) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const OptionalTensor same = given(bias) ? OptionalTensor(bias->to(weight.scalar_type())) : bias;
  return linear_candidate_loss(input.to(weight.scalar_type()), weight, same, XS_CANDIDATES_ARGS, ignore_index, sparse_grad);
}

} // namespace

Tensor linear_candidate_loss(XS_LINEAR_CANDIDATE_LOSS_PARAMS, bool sparse_grad) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("xsoftmax::linear_candidate_loss", "")
                             .typed<decltype(linear_candidate_loss)>();
  return op.call(XS_LINEAR_CANDIDATE_LOSS_ARGS, sparse_grad);
}

Tensor targets_that_count(const Tensor& target, int64_t ignore_index) { return at::where(target.eq(ignore_index), 0, target); }

void check_linear_candidate_loss(XS_LINEAR_CANDIDATE_LOSS_PARAMS) {
  constexpr const char* op = "sampled_softmax_loss"; // the op that users call
  check::linear(op, input, weight, bias);
  check_candidates(op, "input", input, XS_CANDIDATES_ARGS);
}

CandidateLossState linear_candidate_loss_forward_reference(XS_LINEAR_CANDIDATE_LOSS_PARAMS, std::array<bool, 2> output_mask) {
  check_linear_candidate_loss(XS_LINEAR_CANDIDATE_LOSS_ARGS);
  const Tensor ids = targets_that_count(target, ignore_index).unsqueeze(1), counts = target.ne(ignore_index);
  const Tensor own_ids = given(private_ids) ? at::cat({ids, *private_ids}, 1) : ids;
  const Tensor scores = candidate_scores(input, weight, bias, own_ids, shared_ids, false);
  const Tensor loss = at::where(counts, candidate_loss(scores, ids.squeeze(1), private_ids, shared_ids, private_log_count,
                                                       shared_log_count, target_log_count, estimator, remove_accidental_hits,
                                                       fixed_private, fixed_shared, label_smoothing), 0.0);
  Tensor grad_input = scores.new_empty({0, input.size(1)}), grad_scores = scores.new_empty({0, scores.size(1)});
  if (output_mask[0] || output_mask[1]) {
    const Tensor gradient = candidate_loss_backward(counts.to(scores.scalar_type()), scores, ids.squeeze(1), private_ids, shared_ids,
                                                    private_log_count, shared_log_count, target_log_count, estimator,
                                                    remove_accidental_hits, fixed_private, fixed_shared, label_smoothing);
    if (output_mask[0]) {
      grad_input = std::get<0>(candidate_scores_backward(gradient, input, weight, own_ids, shared_ids, {true, false, false}))
                       .to(scores.scalar_type());
    }
    grad_scores = output_mask[1] ? gradient : grad_scores;
  }
  return {loss, grad_input, grad_scores, own_ids};
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
#define XS_SCHEMA_ARGS                                                                                                             \
  "Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? private_ids, Tensor? shared_ids, Tensor? private_log_count, " \
  "Tensor? shared_log_count, Tensor? target_log_count, str estimator, bool remove_accidental_hits, int fixed_private, "            \
  "int fixed_shared, float label_smoothing, int ignore_index, "
  m.def("linear_candidate_loss(" XS_SCHEMA_ARGS "bool sparse_grad) -> Tensor");
  m.def("linear_candidate_loss_forward(" XS_SCHEMA_ARGS
        "bool[2] output_mask) -> (Tensor loss, Tensor grad_input, Tensor grad_scores, Tensor own_ids)");
#undef XS_SCHEMA_ARGS
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("linear_candidate_loss", loss_only);
  m.impl("linear_candidate_loss_forward", linear_candidate_loss_forward_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("linear_candidate_loss_forward", linear_candidate_loss_forward_meta); }

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("linear_candidate_loss", linear_candidate_loss_autograd);
  m.impl("linear_candidate_loss_forward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) {
  m.impl("linear_candidate_loss", linear_candidate_loss_autocast);
  m.impl("linear_candidate_loss_forward", torch::CppFunction::makeFromBoxedFunction<below_autocast>());
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) {
  m.impl("linear_candidate_loss", linear_candidate_loss_autocast);
  m.impl("linear_candidate_loss_forward", torch::CppFunction::makeFromBoxedFunction<below_autocast>());
}

} // namespace xsoftmax
