#include "loss/linear_candidate_loss.h"

#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/host_reads.h"
#include "op/operators.h"
#include "op/optional.h"
#include "op/options.h"
#include "table/scale_gradient.h"
#include "table/row_tables.h"
#include "op/shape_checks.h"
#include "estimator/candidate_loss.h"
#include "estimator/logit_transform.h"
#include "estimator/loss_shares.h"
#include "table/candidate_scores.h"
#include "table/row_terms.h"
#include "xsoftmax/ops.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kLinearCandidateLoss = "sampled_softmax_loss"; // the operator that users call

CandidateLossState forward_any(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& target,
                               const OptionalTensors& candidates, at::IntArrayRef distinct,
                               std::string_view options, std::array<bool, 2> wanted,
                               const OptionalTensor& share, bool aligned) {
  return linear_candidate_loss_forward_reference(
      {input, weight, bias, target, candidates, distinct, options, share}, wanted, aligned);
}

CandidateLossState call_forward(const Tensor& input, const Tensor& weight,
                                const OptionalTensor& bias, const Tensor& target,
                                const OptionalTensors& candidates, at::IntArrayRef distinct,
                                std::string_view options, std::array<bool, 2> wanted,
                                const OptionalTensor& share, bool aligned) {
  static const auto op = find_op<decltype(forward_any)>("xsoftmax::linear_candidate_loss_forward");
  return op.call(input, weight, bias, target, candidates, distinct, options, wanted, share,
                 aligned);
}

CandidateLossState forward_meta(const Tensor& input, const Tensor& weight,
                                const OptionalTensor& bias, const Tensor& target,
                                const OptionalTensors& candidates, at::IntArrayRef distinct,
                                std::string_view options, std::array<bool, 2> wanted,
                                const OptionalTensor& share, bool aligned) {
  const LinearLossArguments checked(input, weight, bias, target, candidates, distinct, options,
                                    share);
  const auto dtype = input.options().dtype(opmath_dtype(input.scalar_type()));
  const auto queries = [&](bool is_wanted) {
    return is_wanted ? input.sym_size(0) : c10::SymInt(0);
  };
  const c10::SymInt width = 1 + checked.candidates.private_width();
  const ScoreColumns columns(width, checked.candidates.shared_width(), aligned);
  return {at::empty_symint({input.sym_size(0)}, dtype),
          at::empty_symint({queries(wanted[0]), input.sym_size(1)}, dtype),
          at::empty_symint({queries(wanted[1]), columns.width}, dtype),
          at::empty_symint({input.sym_size(0), width}, target.options())};
}

Tensor as_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

// Sums the losses if share is given; they are already multiplied by it. Without autograd.
Tensor join_loss_and_share(const Tensor& loss, const OptionalTensor& share) {
  if (!is_defined(share) || !check::can_read(loss)) {
    return is_defined(share) ? loss.sum() : loss;
  }
  const Tensor sum = at::empty({}, loss.options());
  dispatch_sums(loss.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    *data<T>(sum) =
        T(std::accumulate(const_data<T>(loss), const_data<T>(loss) + loss.numel(), 0.0));
  });
  return sum;
}

Tensor loss_only(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                 const Tensor& target, const OptionalTensors& candidates, at::IntArrayRef distinct,
                 std::string_view options, const OptionalTensor& share) {
  return join_loss_and_share(
      std::get<0>(call_forward(input, weight, bias, target, candidates, distinct, options,
                               {false, false}, share, false)),
      share);
}

Tensor call_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                 const Tensor& target, const OptionalTensors& candidates, at::IntArrayRef distinct,
                 std::string_view options, const OptionalTensor& share) {
  static const auto op = find_op<decltype(loss_only)>("xsoftmax::linear_candidate_loss");
  return op.call(input, weight, bias, target, candidates, distinct, options, share);
}

// Returns whether the backward pass can use the saved gradients without scaling. `grad` must be
// known to be 1, the usual case of loss.backward(). No query may be ignored, because its input may
// hold NaN, which only a factor of 0 masks. No second derivative may be needed, because it must see
// the dependence on `grad`.
bool has_nothing_to_scale(const Tensor& grad, const Tensor& target, int64_t ignore_index) {
  if (grad.dim() != 0 || !grad.is_cpu() || at::GradMode::is_enabled() ||
      at::isTensorSubclassLike(grad) || at::isTensorSubclassLike(target)) {
    return false;
  }
  const bool is_one = grad.scalar_type() == at::kFloat
      ? check::readable(grad).const_data_ptr<float>()[0] == 1
      : grad.item<double>() == 1;
  const Tensor ids = check::readable(target);
  const int64_t* const first = ids.const_data_ptr<int64_t>();
  return is_one && std::find(first, first + ids.numel(), ignore_index) == first + ids.numel();
}

class LinearCandidateLoss : public torch::autograd::Function<LinearCandidateLoss> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                        const OptionalTensors& candidates, at::IntArrayRef distinct,
                        std::string_view options, const OptionalTensor& share) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const bool want_input = input.requires_grad();
    const bool want_table = weight.requires_grad() || (is_defined(bias) && bias->requires_grad());
    const Candidates columns(kLinearCandidateLoss, candidates, distinct);
    const bool aligned = check::on_device(input) && is_defined(columns.shared_ids);
    auto [loss, grad_input, grad_scores, row_ids] =
        call_forward(input, weight, bias, target, candidates, distinct, options,
                     {want_input, want_table}, share, aligned);
    const auto parsed = parse_options<SampledSoftmaxOptions>(kLinearCandidateLoss, options);
    ctx->save_for_backward({input, weight, grad_input, grad_scores, row_ids,
                            columns.shared_ids.value_or(Tensor()), target});
    ctx->saved_data["ignore_index"] = parsed.ignore_index;
    ctx->saved_data["sparse_grad"] = parsed.sparse_grad;
    ctx->saved_data["has_bias"] = is_defined(bias);
    ctx->saved_data["aligned"] = aligned;
    return join_loss_and_share(loss, share);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1];
    Tensor grad_input = saved[2], grad_scores = saved[3], query = input;
    const bool want_bias = ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2);
    bool want_table = ctx->needs_input_grad(1) || want_bias;
    torch::autograd::variable_list result(3);
    // Factors of grad_input, [Q], and of grad_scores, [Q] or 0-dim; nullopt: 1.
    OptionalTensor grad, score_scale;
    const int64_t ignore_index = ctx->saved_data["ignore_index"].toInt();
    if (check::on_device(input)) { // the host cannot read the factor without a synchronisation
      // Only the product with shared rows reads queries whose scores have a gradient of 0.
      const bool reads_all = saved[5].defined() && want_table, same = grads[0].dim() == 0;
      const Tensor no_queries = input.new_empty_symint({0, input.sym_size(1)}),
                   no_scores = grad_scores.new_empty_symint({0, grad_scores.sym_size(1)});
      const auto scaled =
          scale_loss_gradients(grads[0], saved[6], ignore_index, grad_input,
                               same ? no_scores : grad_scores, reads_all ? input : no_queries);
      grad_input = std::get<0>(scaled);
      grad_scores = same ? grad_scores : std::get<1>(scaled);
      query = reads_all ? std::get<2>(scaled) : input;
      score_scale =
          same ? OptionalTensor(as_dtype(grads[0], grad_scores.scalar_type())) : std::nullopt;
    } else if (!has_nothing_to_scale(grads[0], saved[6], ignore_index)) {
      // The gradient of a mean is infinite if all queries are ignored, hence the mask.
      score_scale = grad =
          grads[0].expand_symint({saved[6].sym_size(0)}).masked_fill(saved[6].eq(ignore_index), 0);
    }
    if (ctx->saved_data["aligned"].toBool() && want_table) {
      const ScoreColumns columns(saved[4].sym_size(1), saved[5].sym_size(0), true);
      grad_scores = grad_scores.narrow_symint(1, columns.padding, columns.count);
    }
    const std::array<bool, 3> wanted{false, ctx->needs_input_grad(1), want_bias};
    const OptionalTensor shared_ids = optional(saved[5]);
    const bool sparse = want_table &&
        is_row_sparse(ctx->saved_data["sparse_grad"].toOptional<bool>(),
                      candidate_rows(saved[4], shared_ids), weight);
    if (want_table && sparse && !is_defined(shared_ids) && ctx->needs_input_grad(1) &&
        can_store_row_terms(weight)) {
      const RowTerms terms = row_terms(grad_scores, saved[4], score_scale, query, weight.size(0));
      store_row_terms(weight, terms);
      result[2] = want_bias
          ? row_gradient_tensor(terms.rows, terms.coefficients.to(weight.scalar_type()),
                                weight.size(0), true)
          : result[2];
      want_table = false;
    }
    if (want_table) {
      const auto gradients = candidate_scores_backward(grad_scores, query, weight, saved[4],
                                                       shared_ids, wanted, score_scale, !sparse);
      result = sparse ? row_gradients_as_grads(gradients, weight, wanted, true)
                      : table_gradients_as_grads(gradients, wanted);
    }
    if (ctx->needs_input_grad(0)) {
      result[0] = as_dtype(
          is_defined(grad) ? scale_gradient(grad_input, grad->unsqueeze(1), input) : grad_input,
          input.scalar_type());
    }
    result.resize(8);
    return result;
  }
};

Tensor loss_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     const Tensor& target, const OptionalTensors& candidates,
                     at::IntArrayRef distinct, std::string_view options,
                     const OptionalTensor& share) {
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_loss(input, weight, bias, target, candidates, distinct, options, share);
  }
  check::strided_tensors(kLinearCandidateLoss,
                         {{"input", &input}, {"weight", &weight}, {"target", &target}});
  register_row_tables(
      parse_options<SampledSoftmaxOptions>(kLinearCandidateLoss, options).sparse_grad, weight,
      bias);
  return LinearCandidateLoss::apply(input, weight, bias, target, candidates, distinct, options,
                                    share);
}

// The queries are cast to the dtype of the table, because a cast of the table would read all N
// rows.
Tensor loss_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     const Tensor& target, const OptionalTensors& candidates,
                     at::IntArrayRef distinct, std::string_view options,
                     const OptionalTensor& share) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const OptionalTensor same =
      is_defined(bias) ? OptionalTensor(bias->to(weight.scalar_type())) : bias;
  return call_loss(input.to(weight.scalar_type()), weight, same, target, candidates, distinct,
                   options, share);
}

} // namespace

LinearLossArguments::LinearLossArguments(const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& bias, const Tensor& target,
                                         const OptionalTensors& candidates,
                                         at::IntArrayRef distinct, std::string_view options,
                                         const OptionalTensor& share)
    : input(input), weight(weight), bias(bias), target(target),
      candidates(kLinearCandidateLoss, candidates, distinct),
      options(parse_options<SampledSoftmaxOptions>(kLinearCandidateLoss, options)), share(share) {
  check::linear(kLinearCandidateLoss, input, weight, bias);
  check_candidates(kLinearCandidateLoss, "input", input, target, this->candidates, this->options);
  TORCH_CHECK_VALUE(!transforms(this->options) && this->options.z_loss == 0, kLinearCandidateLoss,
                    ": expected logit_scale of 1, no softcap and no z_loss in one step, got ",
                    this->options.logit_scale, ", ", this->options.softcap, " and ",
                    this->options.z_loss);
  if (is_defined(share)) {
    check::dim(kLinearCandidateLoss, "share", *share, 1);
    check::floating(kLinearCandidateLoss, "share", *share);
    check::size(kLinearCandidateLoss, "share", *share, 0, input.sym_size(0), "the rows of input");
    check::same_device(kLinearCandidateLoss, "share", *share, "input", input);
  }
}

Tensor linear_candidate_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const Tensor& target, const Candidates& candidates,
                             const SampledSoftmaxOptions& options, const OptionalTensor& share) {
  return call_loss(input, weight, bias, target, candidates.tensors(), candidates.distinct(),
                   text_of(options), share);
}

Tensor targets_or_zero(const Tensor& target, int64_t ignore_index) {
  return at::where(target.eq(ignore_index), 0, target);
}

ScoreColumns::ScoreColumns(const c10::SymInt& row_width, const c10::SymInt& shared_width,
                           bool aligned)
    : padding(aligned ? (8 - row_width % 8) % 8 : c10::SymInt(0)), count(row_width + shared_width),
      width(aligned ? (padding + count + 7) / 8 * 8 : count) {}

const Estimator& row_estimator(const SampledSoftmaxOptions& options) {
  const Estimator& estimator = find_estimator(kLinearCandidateLoss, options.estimator);
  TORCH_CHECK_VALUE(estimator.has_kernels(), kLinearCandidateLoss,
                    ": expected an estimator with a loop over rows, got \"", estimator.name, "\"");
  return estimator;
}

CandidateLossState linear_candidate_loss_forward_reference(const LinearLossArguments& arguments,
                                                           std::array<bool, 2> wanted,
                                                           bool aligned) {
  const auto& [input, weight, bias, target, candidates, options, share] = arguments;
  const OptionalTensor& shared_ids = candidates.shared_ids;
  const Tensor ids = targets_or_zero(target, options.ignore_index),
               counts = target.ne(options.ignore_index);
  const Tensor row_ids = is_defined(candidates.private_ids)
      ? at::cat({ids.unsqueeze(1), *candidates.private_ids}, 1)
      : ids.unsqueeze(1);
  const Tensor scores = candidate_scores(input, weight, bias, row_ids, shared_ids, false);
  Tensor loss = at::where(counts, estimator_loss(scores, ids, candidates, options), 0.0);
  if (is_defined(share)) {
    const Tensor shares = share->to(loss.scalar_type());
    // A query of weight 0 may have a loss of NaN.
    loss = at::where(shares.eq(0), 0.0, loss * shares);
  }
  Tensor grad_input = scores.new_empty({0, input.size(1)}),
         grad_scores = scores.new_empty({0, scores.size(1)});
  if (wanted[0] || wanted[1]) {
    const Tensor wide = counts.to(scores.scalar_type());
    const Tensor gradient = estimator_loss_backward(
        is_defined(share) ? at::where(counts, share->to(wide.scalar_type()), 0.0) : wide, scores,
        ids, candidates, options);
    if (wanted[0]) {
      grad_input = std::get<0>(candidate_scores_backward(gradient, input, weight, row_ids,
                                                         shared_ids, {true, false, false}))
                       .to(scores.scalar_type());
    }
    grad_scores = wanted[1] ? gradient : grad_scores;
  }
  if (aligned) {
    const ScoreColumns columns(row_ids.size(1), is_defined(shared_ids) ? shared_ids->size(0) : 0,
                               aligned);
    const int64_t padding = columns.padding.expect_int();
    grad_scores = at::constant_pad_nd(
        grad_scores, {padding, columns.width.expect_int() - padding - grad_scores.size(1)});
  }
  return {loss, grad_input, grad_scores, row_ids};
}

XSOFTMAX_OPERATORS(m) {
  const std::string arguments =
      std::string("Tensor input, Tensor weight, Tensor? bias, Tensor target, ") + kCandidatesSchema;
  m.def(("linear_candidate_loss(" + arguments + ", Tensor? share=None) -> Tensor").c_str());
  m.def(("linear_candidate_loss_forward(" + arguments +
         ", bool[2] wanted, Tensor? share=None, bool aligned=False) -> "
         "(Tensor loss, Tensor grad_input, Tensor grad_scores, Tensor row_ids)")
            .c_str());
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("linear_candidate_loss", loss_only);
  m.impl("linear_candidate_loss_forward", forward_any);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("linear_candidate_loss_forward", forward_meta); }

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("linear_candidate_loss", loss_autograd);
  m.impl("linear_candidate_loss_forward", torch::autograd::autogradNotImplementedFallback());
}

XSOFTMAX_AUTOCAST(m) {
  m.impl("linear_candidate_loss", loss_autocast);
  disable_autocast(m, {"linear_candidate_loss_forward"});
}

} // namespace xsoftmax
