#include "table/ragged_scores.h"

#include "op/anomalies.h"
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
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kRaggedScores = "ragged_scores";

RowGradients call_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                           const Tensor& ids, const Tensor& offsets,
                           std::array<bool, 3> output_mask) {
  static const auto op =
      find_op<decltype(ragged_scores_backward_reference)>("xsoftmax::ragged_scores_backward");
  return op.call(grad, input, weight, ids, offsets, output_mask);
}

// Returns the query of each id.
Tensor query_of_ids(const Tensor& ids, const Tensor& offsets) {
  const Tensor ends = offsets.narrow(0, 1, offsets.size(0) - 1).contiguous();
  return at::searchsorted(ends, at::arange(ids.size(0), offsets.options()), /*out_int32=*/false,
                          /*right=*/true);
}

Tensor ragged_scores_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const Tensor& ids, const Tensor& offsets, std::optional<bool>) {
  check_ragged_scores(input, weight, bias, ids, offsets);
  return at::empty_symint({ids.sym_size(0)},
                          input.options().dtype(opmath_dtype(input.scalar_type())));
}

RowGradients ragged_scores_backward_meta(const Tensor& grad, const Tensor& input,
                                         const Tensor& weight, const Tensor& ids,
                                         const Tensor& offsets, std::array<bool, 3> output_mask) {
  check_ragged_scores_backward(grad, input, weight, ids, offsets);
  return row_gradients_meta(input, ids.sym_size(0).min(weight.sym_size(0)), output_mask);
}

class RaggedScores : public torch::autograd::Function<RaggedScores> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias, const Tensor& ids,
                        const Tensor& offsets, std::optional<bool> sparse_grad) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({input, weight, ids, offsets});
    ctx->saved_data["sparse_grad"] = sparse_grad;
    ctx->saved_data["has_bias"] = is_defined(bias);
    return ragged_scores(input, weight, bias, ids, offsets, sparse_grad);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto wanted = wanted_gradients(*ctx, ctx->saved_data["has_bias"].toBool());
    const auto gradients = call_backward(grads[0], saved[0], saved[1], saved[2], saved[3], wanted);
    auto result = row_gradients_as_grads(gradients, saved[1], wanted,
                                         ctx->saved_data["sparse_grad"].toOptional<bool>());
    result.resize(6);
    return result;
  }
};

Tensor ragged_scores_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                              const Tensor& ids, const Tensor& offsets,
                              std::optional<bool> sparse_grad) {
  check::strided_tensors(
      kRaggedScores,
      {{"input", &input}, {"weight", &weight}, {"ids", &ids}, {"offsets", &offsets}});
  register_row_tables(sparse_grad, weight, bias);
  return RaggedScores::apply(input, weight, bias, ids, offsets, sparse_grad);
}

Tensor ragged_scores_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                              const Tensor& ids, const Tensor& offsets,
                              std::optional<bool> sparse_grad) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const OptionalTensor same =
      is_defined(bias) ? OptionalTensor(bias->to(weight.scalar_type())) : bias;
  return ragged_scores(input.to(weight.scalar_type()), weight, same, ids, offsets, sparse_grad);
}

} // namespace

Tensor ragged_scores(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     const Tensor& ids, const Tensor& offsets, std::optional<bool> sparse_grad) {
  static const auto op = find_op<decltype(ragged_scores_reference)>("xsoftmax::ragged_scores");
  return op.call(input, weight, bias, ids, offsets, sparse_grad);
}

void check_ragged_scores(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         const Tensor& ids, const Tensor& offsets) {
  check::linear(kRaggedScores, input, weight, bias);
  check::finite_queries(kRaggedScores, "input", input);
  check::dim(kRaggedScores, "ids", ids, 1);
  check::int64(kRaggedScores, "ids", ids);
  check::same_device(kRaggedScores, "ids", ids, "input", input);
  check::dim(kRaggedScores, "offsets", offsets, 1);
  check::int64(kRaggedScores, "offsets", offsets);
  check::same_device(kRaggedScores, "offsets", offsets, "input", input);
  check::size(kRaggedScores, "offsets", offsets, 0, input.sym_size(0) + 1,
              "one more than the rows of input");
}

void check_ragged_scores_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                  const Tensor& ids, const Tensor& offsets) {
  check_ragged_scores(input, weight, std::nullopt, ids, offsets);
  constexpr const char* op = "ragged_scores_backward";
  check::dim(op, "grad", grad, 1);
  check::size(op, "grad", grad, 0, ids.sym_size(0), "the number of ids");
  check::dtype(op, "grad", grad, opmath_dtype(input.scalar_type()));
}

Tensor ragged_scores_reference(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& ids, const Tensor& offsets,
                               std::optional<bool>) {
  check_ragged_scores(input, weight, bias, ids, offsets);
  const auto dtype = opmath_dtype(input.scalar_type());
  const Tensor query = input.index_select(0, query_of_ids(ids, offsets)).to(dtype);
  const Tensor scores = (query * weight.index_select(0, ids).to(dtype)).sum(1);
  return is_defined(bias) ? scores + bias->index_select(0, ids).to(dtype) : scores;
}

RowGradients ragged_scores_backward_reference(const Tensor& grad, const Tensor& input,
                                              const Tensor& weight, const Tensor& ids,
                                              const Tensor& offsets,
                                              std::array<bool, 3> output_mask) {
  check_ragged_scores_backward(grad, input, weight, ids, offsets);
  const auto [want_input, want_weight, want_bias] = output_mask;
  const auto dtype = grad.scalar_type();
  const Tensor query = query_of_ids(ids, offsets);
  Tensor grad_input = input.new_empty({0, input.size(1)}), rows = ids.new_empty({0}),
         values = input.new_empty({0, input.size(1)}), bias_values = input.new_empty({0});
  if (want_input) {
    grad_input =
        at::zeros({input.size(0), input.size(1)}, grad.options())
            .index_add_(0, query, grad.unsqueeze(1) * weight.index_select(0, ids).to(dtype))
            .to(input.scalar_type());
  }
  if (want_weight || want_bias) {
    rows = std::get<0>(sort_rows(ids));
  }
  if (want_weight) {
    const Tensor every = grad.unsqueeze(1) * input.index_select(0, query).to(dtype);
    values = std::get<1>(sum_equal_rows(ids, every)).to(input.scalar_type());
  }
  if (want_bias) {
    bias_values = std::get<1>(sum_equal_rows(ids, grad)).to(input.scalar_type());
  }
  return limit_rows({grad_input, rows, values, bias_values}, weight.size(0));
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "ragged_scores(Tensor input, Tensor weight, Tensor? bias, Tensor ids, Tensor offsets, bool? "
      "sparse_grad=None) -> Tensor");
  m.def(
      "ragged_scores_backward(Tensor grad, Tensor input, Tensor weight, Tensor ids, Tensor "
      "offsets, bool[3] output_mask) "
      "-> (Tensor grad_input, Tensor rows, Tensor values, Tensor bias_values)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("ragged_scores", ragged_scores_reference);
  m.impl("ragged_scores_backward", ragged_scores_backward_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("ragged_scores", ragged_scores_meta);
  m.impl("ragged_scores_backward", ragged_scores_backward_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("ragged_scores", ragged_scores_autograd);
  m.impl("ragged_scores_backward", torch::autograd::autogradNotImplementedFallback());
}

XSOFTMAX_AUTOCAST(m) {
  m.impl("ragged_scores", ragged_scores_autocast);
  disable_autocast(m, {"ragged_scores_backward"});
}

} // namespace xsoftmax
