#include "table/candidate_scores.h"

#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/optional.h"
#include "table/row_tables.h"
#include "op/shape_checks.h"
#include "op/wanted_gradients.h"
#include "table/row_gradient.h"
#include "xsoftmax/ops.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kCandidateScores = "candidate_scores";

Tensor ids_or_empty(const OptionalTensor& ids, const Tensor& input, bool is_private) {
  if (is_defined(ids)) {
    return *ids;
  }
  const auto options = input.options().dtype(at::kLong);
  return is_private ? at::empty_symint({input.sym_size(0), 0}, options) : at::empty({0}, options);
}

Tensor candidate_scores_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& private_ids, const OptionalTensor& shared_ids,
                             std::optional<bool>) {
  check_candidate_scores(input, weight, bias, private_ids, shared_ids);
  const c10::SymInt width = (is_defined(private_ids) ? private_ids->sym_size(1) : c10::SymInt(0)) +
      (is_defined(shared_ids) ? shared_ids->sym_size(0) : c10::SymInt(0));
  return at::empty_symint({input.sym_size(0), width},
                          input.options().dtype(opmath_dtype(input.scalar_type())));
}

RowGradients candidate_scores_backward_meta(const Tensor& grad, const Tensor& input,
                                            const Tensor& weight, const OptionalTensor& private_ids,
                                            const OptionalTensor& shared_ids,
                                            std::array<bool, 3> output_mask,
                                            const OptionalTensor& scale, bool dense) {
  check_candidate_scores_backward(grad, input, weight, private_ids, shared_ids, scale);
  return row_gradients_meta(input, candidate_rows(private_ids, shared_ids), output_mask,
                            dense ? std::optional(weight.sym_size(0)) : std::nullopt);
}

class CandidateScores : public torch::autograd::Function<CandidateScores> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& private_ids, const OptionalTensor& shared_ids,
                        std::optional<bool> sparse_grad) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward(
        {input, weight, private_ids.value_or(Tensor()), shared_ids.value_or(Tensor())});
    ctx->saved_data["sparse_grad"] = sparse_grad;
    ctx->saved_data["has_bias"] = is_defined(bias);
    return candidate_scores(input, weight, bias, private_ids, shared_ids, sparse_grad);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1];
    const auto wanted = wanted_gradients(*ctx, ctx->saved_data["has_bias"].toBool());
    const OptionalTensor private_ids = optional(saved[2]), shared_ids = optional(saved[3]);
    const bool sparse = is_row_sparse(ctx->saved_data["sparse_grad"].toOptional<bool>(),
                                      candidate_rows(private_ids, shared_ids), weight);
    const auto gradients = candidate_scores_backward(grads[0], input, weight, private_ids,
                                                     shared_ids, wanted, std::nullopt, !sparse);
    auto result = sparse ? row_gradients_as_grads(gradients, weight, wanted, true)
                         : table_gradients_as_grads(gradients, wanted);
    result.resize(6);
    return result;
  }
};

Tensor candidate_scores_autograd(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, const OptionalTensor& private_ids,
                                 const OptionalTensor& shared_ids,
                                 std::optional<bool> sparse_grad) {
  check::strided_tensors(kCandidateScores, {{"input", &input}, {"weight", &weight}});
  register_row_tables(sparse_grad, weight, bias);
  return CandidateScores::apply(input, weight, bias, private_ids, shared_ids, sparse_grad);
}

// Casting the table would touch all of its N rows, so the queries are cast to the table's dtype.
Tensor candidate_scores_autocast(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, const OptionalTensor& private_ids,
                                 const OptionalTensor& shared_ids,
                                 std::optional<bool> sparse_grad) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const OptionalTensor same =
      is_defined(bias) ? OptionalTensor(bias->to(weight.scalar_type())) : bias;
  return candidate_scores(input.to(weight.scalar_type()), weight, same, private_ids, shared_ids,
                          sparse_grad);
}

} // namespace

Tensor candidate_scores(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& private_ids, const OptionalTensor& shared_ids,
                        std::optional<bool> sparse_grad) {
  static const auto op =
      find_op<decltype(candidate_scores_reference)>("xsoftmax::candidate_scores");
  return op.call(input, weight, bias, private_ids, shared_ids, sparse_grad);
}

RowGradients candidate_scores_backward(const Tensor& grad, const Tensor& input,
                                       const Tensor& weight, const OptionalTensor& private_ids,
                                       const OptionalTensor& shared_ids,
                                       std::array<bool, 3> output_mask, const OptionalTensor& scale,
                                       bool dense) {
  static const auto op =
      find_op<decltype(candidate_scores_backward_reference)>("xsoftmax::candidate_scores_backward");
  return op.call(grad, input, weight, private_ids, shared_ids, output_mask, scale, dense);
}

Tensor expand_to_queries(const Tensor& scale, const c10::SymInt& queries) {
  return scale.dim() == 0 ? scale.expand_symint({queries}) : scale;
}

c10::SymInt candidate_rows(const OptionalTensor& private_ids, const OptionalTensor& shared_ids) {
  return (is_defined(private_ids) ? private_ids->sym_numel() : c10::SymInt(0)) +
      (is_defined(shared_ids) ? shared_ids->sym_size(0) : c10::SymInt(0));
}

void check_candidate_scores(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& private_ids, const OptionalTensor& shared_ids) {
  check::linear(kCandidateScores, input, weight, bias);
  TORCH_CHECK_VALUE(is_defined(private_ids) || is_defined(shared_ids), kCandidateScores,
                    ": expected private_ids, shared_ids or both, got neither");
  if (is_defined(private_ids)) {
    check::dim(kCandidateScores, "private_ids", *private_ids, 2);
    check::int64(kCandidateScores, "private_ids", *private_ids);
    check::same_device(kCandidateScores, "private_ids", *private_ids, "input", input);
    check::size(kCandidateScores, "private_ids", *private_ids, 0, input.sym_size(0),
                "the rows of input");
  }
  if (is_defined(shared_ids)) {
    check::dim(kCandidateScores, "shared_ids", *shared_ids, 1);
    check::int64(kCandidateScores, "shared_ids", *shared_ids);
    check::same_device(kCandidateScores, "shared_ids", *shared_ids, "input", input);
  }
}

void check_candidate_scores_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& private_ids,
                                     const OptionalTensor& shared_ids,
                                     const OptionalTensor& scale) {
  check_candidate_scores(input, weight, std::nullopt, private_ids, shared_ids);
  constexpr const char* op = "candidate_scores_backward";
  check::dim(op, "grad", grad, 2);
  check::size(op, "grad", grad, 0, input.sym_size(0), "the rows of input");
  check::size(op, "grad", grad, 1,
              (is_defined(private_ids) ? private_ids->sym_size(1) : c10::SymInt(0)) +
                  (is_defined(shared_ids) ? shared_ids->sym_size(0) : c10::SymInt(0)),
              "the candidates of a query");
  check::dtype(op, "grad", grad, opmath_dtype(input.scalar_type()));
  check::same_device(op, "grad", grad, "input", input);
  if (is_defined(scale)) {
    if (scale->dim() != 0) {
      check::dim(op, "scale", *scale, 1);
      check::size(op, "scale", *scale, 0, grad.sym_size(0), "the rows of grad");
    }
    check::same_dtype(op, "scale", *scale, "grad", grad);
    check::same_device(op, "scale", *scale, "grad", grad);
  }
}

Tensor candidate_scores_reference(const Tensor& input, const Tensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& private_ids,
                                  const OptionalTensor& shared_ids, std::optional<bool>) {
  check_candidate_scores(input, weight, bias, private_ids, shared_ids);
  const auto dtype = opmath_dtype(input.scalar_type());
  const Tensor query = input.to(dtype);
  const Tensor pair_ids = ids_or_empty(private_ids, input, true),
               all = ids_or_empty(shared_ids, input, false);
  const Tensor pair_rows = weight.index_select(0, pair_ids.flatten())
                               .to(dtype)
                               .view({pair_ids.size(0), pair_ids.size(1), weight.size(1)});
  Tensor pair_scores = at::bmm(pair_rows, query.unsqueeze(2)).squeeze(2);
  Tensor all_scores = at::mm(query, weight.index_select(0, all).to(dtype).t());
  if (is_defined(bias)) {
    pair_scores =
        pair_scores + bias->index_select(0, pair_ids.flatten()).to(dtype).view_as(pair_ids);
    all_scores = all_scores + bias->index_select(0, all).to(dtype);
  }
  return at::cat({pair_scores, all_scores}, 1);
}

RowGradients candidate_scores_backward_reference(const Tensor& grad, const Tensor& input,
                                                 const Tensor& weight,
                                                 const OptionalTensor& private_ids,
                                                 const OptionalTensor& shared_ids,
                                                 std::array<bool, 3> output_mask,
                                                 const OptionalTensor& scale, bool dense) {
  check_candidate_scores_backward(grad, input, weight, private_ids, shared_ids, scale);
  Tensor query = input.to(grad.scalar_type());
  Tensor scores_grad = grad;
  if (is_defined(scale)) { // masked, because 0 * inf is NaN and ignored queries may hold anything
    const Tensor factor = expand_to_queries(*scale, grad.sym_size(0)).unsqueeze(1);
    query = query.masked_fill(factor.eq(0), 0);
    scores_grad = (grad * factor).masked_fill(grad.eq(0).logical_or(factor.eq(0)), 0);
  }
  const Tensor pair_ids = ids_or_empty(private_ids, input, true),
               all = ids_or_empty(shared_ids, input, false);
  const int64_t width = pair_ids.size(1), shared = all.size(0), dims = weight.size(1);
  const Tensor pair_grad = scores_grad.narrow(1, 0, width),
               all_grad = scores_grad.narrow(1, width, shared);
  const auto [want_input, want_weight, want_bias] = output_mask;

  Tensor grad_input = input.new_empty({0, dims}), rows = pair_ids.new_empty({0}),
         values = input.new_empty({0, dims}), bias_values = input.new_empty({0});
  if (want_input) {
    const Tensor pair_rows = weight.index_select(0, pair_ids.flatten())
                                 .to(grad.scalar_type())
                                 .view({pair_ids.size(0), width, dims});
    grad_input = at::bmm(pair_grad.unsqueeze(1), pair_rows).squeeze(1) +
        at::mm(all_grad, weight.index_select(0, all).to(grad.scalar_type()));
    grad_input = grad_input.to(input.scalar_type());
  }
  if (want_weight || want_bias) {
    const Tensor ids = at::cat({pair_ids.flatten(), all});
    rows = std::get<0>(sort_rows(ids));
    if (want_weight) {
      const Tensor pair_values = (pair_grad.unsqueeze(2) * query.unsqueeze(1)).flatten(0, 1);
      const Tensor every = at::cat({pair_values, at::mm(all_grad.t(), query)});
      values = std::get<1>(sum_equal_rows(ids, every)).to(input.scalar_type());
    }
    if (want_bias) {
      const Tensor every = at::cat({pair_grad.flatten(), all_grad.sum(0)});
      bias_values = std::get<1>(sum_equal_rows(ids, every)).to(input.scalar_type());
    }
  }
  const RowGradients gradients{grad_input, rows, values, bias_values};
  return dense ? to_dense_rows(gradients, weight.size(0), output_mask) : gradients;
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "candidate_scores(Tensor input, Tensor weight, Tensor? bias, Tensor? private_ids, Tensor? "
      "shared_ids, "
      "bool? sparse_grad=None) -> Tensor");
  m.def(
      "candidate_scores_backward(Tensor grad, Tensor input, Tensor weight, Tensor? private_ids, "
      "Tensor? shared_ids, "
      "bool[3] output_mask, Tensor? scale=None, bool dense=False) -> (Tensor grad_input, Tensor "
      "rows, Tensor values, Tensor bias_values)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("candidate_scores", candidate_scores_reference);
  m.impl("candidate_scores_backward", candidate_scores_backward_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("candidate_scores", candidate_scores_meta);
  m.impl("candidate_scores_backward", candidate_scores_backward_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("candidate_scores", candidate_scores_autograd);
  m.impl("candidate_scores_backward", torch::autograd::autogradNotImplementedFallback());
}

XSOFTMAX_AUTOCAST(m) {
  m.impl("candidate_scores", candidate_scores_autocast);
  disable_autocast(m, {"candidate_scores_backward"});
}

} // namespace xsoftmax
