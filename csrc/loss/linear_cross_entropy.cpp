#include "loss/linear_cross_entropy.h"

#include "op/anomalies.h"
#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/host_reads.h"
#include "op/operators.h"
#include "op/optional.h"
#include "op/options.h"
#include "table/scale_gradient.h"
#include "op/shape_checks.h"
#include "estimator/logit_transform.h"
#include "estimator/loss_shares.h"
#include "loss/linear_backward.h"
#include "loss/reduction.h"
#include "xsoftmax/ops.h"
#include "op/find_op.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <c10/core/SymBool.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kLinearCrossEntropy = "linear_cross_entropy";
constexpr int64_t kSavedBytes = 40 << 20;  // bytes of logits that the forward pass saves

CrossEntropyState call_forward(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& target,
                               const OptionalTensor& class_weight, std::string_view text,
                               bool save_logits) {
  static const auto op = find_op<decltype(linear_cross_entropy_forward_reference)>(
      "xsoftmax::linear_cross_entropy_forward");
  return op.call(input, weight, bias, target, class_weight, text, save_logits);
}

LinearGradients call_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                              const OptionalTensor& bias, const Tensor& target,
                              const OptionalTensor& class_weight, const Tensor& normalizer,
                              const Tensor& saved_logits, std::string_view text,
                              std::array<bool, 3> output_mask) {
  static const auto op = find_op<decltype(linear_cross_entropy_backward_reference)>(
      "xsoftmax::linear_cross_entropy_backward");
  return op.call(grad, input, weight, bias, target, class_weight, normalizer, saved_logits, text,
                 output_mask);
}

CrossEntropyWithGradients call_with_gradients(const Tensor& grad, const Tensor& input,
                                              const Tensor& weight, const OptionalTensor& bias,
                                              const Tensor& target,
                                              const OptionalTensor& class_weight,
                                              std::string_view text,
                                              std::array<bool, 3> output_mask) {
  static const auto op = find_op<decltype(linear_cross_entropy_with_gradients_composite)>(
      "xsoftmax::linear_cross_entropy_with_gradients");
  return op.call(grad, input, weight, bias, target, class_weight, text, output_mask);
}

CrossEntropyState forward_meta(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& target,
                               const OptionalTensor& class_weight, std::string_view text,
                               bool save_logits) {
  check_linear_cross_entropy(input, weight, bias, target, class_weight, text);
  const auto floats = input.options().dtype(opmath_dtype(input.scalar_type()));
  const c10::SymInt queries = input.sym_size(0);
  const c10::SymInt saved = save_logits
      ? saved_classes(queries, weight.sym_size(0), input.scalar_type())
      : c10::SymInt(0);
  return {at::empty_symint({queries}, floats), at::empty_symint({c10::SymInt(2), queries}, floats),
          at::empty_symint({queries, saved}, floats)};
}

LinearGradients backward_meta(const Tensor& grad, const Tensor& input, const Tensor& weight,
                              const OptionalTensor& bias, const Tensor& target,
                              const OptionalTensor& class_weight, const Tensor& normalizer,
                              const Tensor& saved_logits, std::string_view text,
                              std::array<bool, 3> output_mask) {
  check_linear_cross_entropy_backward(grad, input, weight, bias, target, class_weight, normalizer,
                                      saved_logits, text);
  return gradients_meta(input, weight, input.scalar_type(), output_mask);
}

CrossEntropyWithGradients with_gradients_meta(const Tensor& grad, const Tensor& input,
                                              const Tensor& weight, const OptionalTensor& bias,
                                              const Tensor& target,
                                              const OptionalTensor& class_weight,
                                              std::string_view text,
                                              std::array<bool, 3> output_mask) {
  check_linear_cross_entropy_with_gradients(grad, input, weight, bias, target, class_weight, text);
  auto [grad_input, grad_weight, grad_bias] =
      gradients_meta(input, weight, opmath_dtype(input.scalar_type()), output_mask);
  return {at::empty_symint({input.sym_size(0)},
                           input.options().dtype(opmath_dtype(input.scalar_type()))),
          grad_input, grad_weight, grad_bias};
}

// Returns the divisor of a mean, 0-dim in `dtype`, as in at::nll_loss.
Tensor mean_divisor(const Tensor& target, const OptionalTensor& class_weight, int64_t ignore_index,
                    at::ScalarType dtype) {
  const Tensor counted = target.ne(ignore_index);
  if (!is_defined(class_weight)) {
    return counted.sum().to(dtype);
  }
  // Clamps ids out of range, which the kernel reports.
  const Tensor ids =
      target.masked_fill(counted.logical_not(), 0).clamp(0, class_weight->sym_size(0) - 1);
  const Tensor weights = class_weight->detach().to(dtype).index_select(0, ids);
  return weights.masked_fill(counted.logical_not(), 0).sum();
}

// Reduces the losses [Q] of the queries.
Tensor reduce(const Tensor& loss, const Tensor& target, const OptionalTensor& class_weight,
              const CrossEntropyOptions& options) {
  switch (reduction_code(kLinearCrossEntropy, options.reduction)) {
    case at::Reduction::Mean:
      return loss.sum() /
          mean_divisor(target, class_weight, options.ignore_index, loss.scalar_type());
    case at::Reduction::Sum: return loss.sum();
    default: return loss;
  }
}

// Returns gradient * factor in the dtype of `source`. If `gradient` is `owns_gradient` and already
// has that dtype, works in place, and returns it unchanged for a factor of 1.
Tensor scaled(const Tensor& gradient, const Tensor& factor, const Tensor& source,
              bool owns_gradient) {
  if (!owns_gradient || at::isTensorSubclassLike(gradient) || at::isTensorSubclassLike(factor)) {
    return scale_gradient(gradient, factor, source).to(source.scalar_type());
  }
  if (gradient.scalar_type() != source.scalar_type()) {
    Tensor narrow = at::empty(gradient.sizes(), gradient.options().dtype(source.scalar_type()));
    return at::mul_out(narrow, gradient, factor);
  }
  // Reading a factor on a device would synchronise.
  const bool one = factor.is_cpu() && factor.item<double>() == 1;
  return one ? gradient : gradient.mul_(factor);
}

// Returns loss.sum() / divisor, or dot(loss, shares) if shares [Q] is given: on a device one launch
// computes the shares (mean_shares).
class ReducedCrossEntropy : public torch::autograd::Function<ReducedCrossEntropy> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                        const OptionalTensor& class_weight, const OptionalTensor& divisor,
                        const OptionalTensor& shares, std::string_view text) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const std::array<bool, 3> wanted{input.requires_grad(), weight.requires_grad(),
                                     is_defined(bias) && bias->requires_grad()};
    const Tensor counted = mask_ignored_rows(
        input, target, parse_options<CrossEntropyOptions>(kLinearCrossEntropy, text).ignore_index);
    const Tensor grad =
        is_defined(shares) ? *shares : divisor->reciprocal().expand_symint({input.sym_size(0)});
    auto [loss, grad_input, grad_weight, grad_bias] =
        call_with_gradients(grad, counted, weight, bias, target, class_weight, text, wanted);
    ctx->save_for_backward(
        {grad_input, grad_weight, grad_bias, input, weight, bias.value_or(Tensor())});
    // Hooks may keep references to the saved tensors.
    ctx->saved_data["hooked"] = at::SavedTensorDefaultHooks::get_hooks().has_value();
    return is_defined(shares) ? at::dot(loss, *shares) : loss.sum() / *divisor;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    // Whether nothing else can read the saved gradients, so that they may be changed in place.
    const bool owns_gradient = !torch::autograd::get_current_graph_task_keep_graph() &&
        !at::GradMode::is_enabled() && !ctx->saved_data["hooked"].toBool();
    torch::autograd::variable_list result(8);
    for (const size_t i : {0, 1, 2}) {
      if (ctx->needs_input_grad(i)) {
        result[i] = scaled(saved[i], grads[0], saved[3 + i], owns_gradient);
      }
    }
    return result;
  }
};

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                        const OptionalTensor& class_weight, std::string_view text) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor counted = mask_ignored_rows(
        input, target, parse_options<CrossEntropyOptions>(kLinearCrossEntropy, text).ignore_index);
    auto [loss, normalizer, saved_logits] =
        call_forward(counted, weight, bias, target, class_weight, text,
                     /*save_logits=*/!check::on_device(input));
    ctx->save_for_backward({counted, weight, bias.value_or(Tensor()), target,
                            class_weight.value_or(Tensor()), normalizer, saved_logits});
    ctx->saved_data["options"] = std::string(text);
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const std::array<bool, 3> wanted = wanted_gradients(*ctx, saved[2].defined());
    const LinearGradients gradients = call_backward(
        grads[0], saved[0], saved[1], optional(saved[2]), saved[3], optional(saved[4]), saved[5],
        saved[6], ctx->saved_data["options"].toStringRef(), wanted);
    return as_grads(gradients, wanted, 6);
  }
};

Tensor without_gradient(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Tensor& target, const OptionalTensor& class_weight,
                        std::string_view text) {
  const CrossEntropyOptions options =
      check_linear_cross_entropy(input, weight, bias, target, class_weight, text);
  check::finite_queries(kLinearCrossEntropy, "input", input, target, options.ignore_index);
  const Tensor counted = mask_ignored_rows(input, target, options.ignore_index);
  const Tensor loss = std::get<0>(
      call_forward(counted, weight, bias, target, class_weight, text, /*save_logits=*/false));
  return reduce(loss, target, class_weight, options);
}

Tensor call_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                 const Tensor& target, const OptionalTensor& class_weight, std::string_view text) {
  static const auto op = find_op<decltype(without_gradient)>("xsoftmax::linear_cross_entropy");
  return op.call(input, weight, bias, target, class_weight, text);
}

Tensor linear_cross_entropy_autograd(const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& bias, const Tensor& target,
                                     const OptionalTensor& class_weight, std::string_view text) {
  const CrossEntropyOptions options =
      check_linear_cross_entropy(input, weight, bias, target, class_weight, text);
  const int64_t reduction = reduction_code(kLinearCrossEntropy, options.reduction);
  // Forward-mode derivatives are not implemented; autograd raises the error.
  const auto derived = [](const Tensor& tensor) {
    return tensor.requires_grad() || tensor._fw_grad(/*level=*/0).defined();
  };
  const bool needed = at::GradMode::is_enabled() &&
      (derived(input) || derived(weight) || (is_defined(bias) && derived(*bias)));
  if (!needed) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_loss(input, weight, bias, target, class_weight, text);
  }
  check::finite_queries(kLinearCrossEntropy, "input", input, target, options.ignore_index);
  check::strided_tensors(kLinearCrossEntropy,
                         {{"input", &input}, {"weight", &weight}, {"target", &target}});
  const OptionalTensor weights =
      is_defined(class_weight) ? OptionalTensor(class_weight->detach()) : std::nullopt;
  const at::ScalarType sums = opmath_dtype(input.scalar_type());
  if (reduction != at::Reduction::None &&
      (input.scalar_type() == sums || check::on_device(input))) {
    OptionalTensor divisor, shares;
    // The mean over an empty batch is NaN.
    const bool empty = TORCH_GUARD_SIZE_OBLIVIOUS(input.sym_size(0).sym_eq(0));
    if (reduction == at::Reduction::Mean && check::on_device(input) && !is_defined(weights) &&
        !empty) {
      shares = mean_shares(target, options.ignore_index, sums);
    } else {
      divisor = reduction == at::Reduction::Mean
          ? mean_divisor(target, weights, options.ignore_index, sums)
          : at::ones({}, input.options().dtype(sums));
    }
    return ReducedCrossEntropy::apply(input, weight, bias, target, weights, divisor, shares, text);
  }
  const Tensor loss = LinearCrossEntropy::apply(input, weight, bias, target, weights, text);
  return reduce(loss, target, weights, options);
}

Tensor linear_cross_entropy_autocast(const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& bias, const Tensor& target,
                                     const OptionalTensor& class_weight, std::string_view text) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const CastOperands cast(input, weight, bias);
  // Class weights are cast to float32, because the loss is computed in float32.
  const OptionalTensor weights =
      is_defined(class_weight) && class_weight->scalar_type() != at::kDouble
      ? OptionalTensor(class_weight->to(at::kFloat))
      : class_weight;
  return call_loss(cast.input, cast.weight, cast.bias, target, weights, text);
}

} // namespace

Tensor linear_cross_entropy(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const Tensor& target, const OptionalTensor& class_weight,
                            const CrossEntropyOptions& options) {
  return call_loss(input, weight, bias, target, class_weight, text_of(options));
}

c10::SymInt saved_classes(const c10::SymInt& queries, const c10::SymInt& classes,
                          at::ScalarType dtype) {
  const int64_t fitting = kSavedBytes / int64_t(c10::elementSize(opmath_dtype(dtype)));
  return classes.min(c10::SymInt(fitting) / queries.max(1));
}

CrossEntropyOptions check_linear_cross_entropy(const Tensor& input, const Tensor& weight,
                                               const OptionalTensor& bias, const Tensor& target,
                                               const OptionalTensor& class_weight,
                                               std::string_view text) {
  check::linear(kLinearCrossEntropy, input, weight, bias);
  check::dim(kLinearCrossEntropy, "target", target, 1);
  check::int64(kLinearCrossEntropy, "target", target);
  check::same_device(kLinearCrossEntropy, "target", target, "input", input);
  check::size(kLinearCrossEntropy, "target", target, 0, input.sym_size(0), "the rows of input");
  if (is_defined(class_weight)) {
    check::dim(kLinearCrossEntropy, "class_weight", *class_weight, 1);
    check::same_device(kLinearCrossEntropy, "class_weight", *class_weight, "input", input);
    check::size(kLinearCrossEntropy, "class_weight", *class_weight, 0, weight.sym_size(0),
                "the rows of weight");
    check::floating(kLinearCrossEntropy, "class_weight", *class_weight);
  }
  const auto options = parse_options<CrossEntropyOptions>(kLinearCrossEntropy, text);
  TORCH_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                    kLinearCrossEntropy, ": expected label_smoothing in [0, 1], got ",
                    options.label_smoothing);
  check_logits(kLinearCrossEntropy, options);
  check_z_loss(kLinearCrossEntropy, options.z_loss);
  TORCH_CHECK_VALUE(options.workspace_mb >= 1, kLinearCrossEntropy,
                    ": expected workspace_mb of at least 1, got ", options.workspace_mb);
  return options;
}

CrossEntropyOptions check_linear_cross_entropy_with_gradients(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const Tensor& target, const OptionalTensor& class_weight, std::string_view text) {
  const auto options = check_linear_cross_entropy(input, weight, bias, target, class_weight, text);
  constexpr const char* op = "linear_cross_entropy_with_gradients";
  check::dim(op, "grad", grad, 1);
  check::size(op, "grad", grad, 0, input.sym_size(0), "the rows of input");
  check::same_device(op, "grad", grad, "input", input);
  check::dtype(op, "grad", grad, opmath_dtype(input.scalar_type()));
  return options;
}

CrossEntropyOptions check_linear_cross_entropy_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const Tensor& target, const OptionalTensor& class_weight, const Tensor& normalizer,
    const Tensor& saved_logits, std::string_view text) {
  const auto options = check_linear_cross_entropy(input, weight, bias, target, class_weight, text);
  constexpr const char* op = "linear_cross_entropy_backward";
  const auto state = [&](const char* name, const Tensor& tensor, int64_t dims,
                         int64_t queries_axis) {
    check::dim(op, name, tensor, dims);
    check::size(op, name, tensor, queries_axis, input.sym_size(0), "the rows of input");
    check::same_device(op, name, tensor, "input", input);
    check::dtype(op, name, tensor, opmath_dtype(input.scalar_type()));
  };
  state("grad", grad, 1, 0);
  state("normalizer", normalizer, 2, 1);
  state("saved_logits", saved_logits, 2, 0);
  check::size(op, "normalizer", normalizer, 0, 2, "largest logit, log of the sum");
  TORCH_CHECK_VALUE(saved_logits.sym_size(1) <= weight.sym_size(0), op,
                    ": expected saved_logits with at most ", weight.sym_size(0),
                    " classes, got shape ", saved_logits.sym_sizes());
  return options;
}

CrossEntropyWithGradients linear_cross_entropy_with_gradients_composite(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const Tensor& target, const OptionalTensor& class_weight, std::string_view text,
    std::array<bool, 3> output_mask) {
  // Casts 16-bit operands first, because otherwise the gradients would be rounded.
  if (const auto dtype = opmath_dtype(input.scalar_type()); input.scalar_type() != dtype) {
    const auto wide = [dtype](const Tensor& tensor) { return tensor.to(dtype); };
    return linear_cross_entropy_with_gradients_composite(
        grad, wide(input), wide(weight), is_defined(bias) ? OptionalTensor(wide(*bias)) : bias,
        target, class_weight, text, output_mask);
  }
  auto [loss, normalizer, saved] =
      call_forward(input, weight, bias, target, class_weight, text, true);
  auto [grad_input, grad_weight, grad_bias] = call_backward(
      grad, input, weight, bias, target, class_weight, normalizer, saved, text, output_mask);
  return {loss, grad_input, grad_weight, grad_bias};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "linear_cross_entropy(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? "
      "class_weight=None, "
      "str options=\"\") -> Tensor");
  m.def(
      "linear_cross_entropy_forward(Tensor input, Tensor weight, Tensor? bias, Tensor target, "
      "Tensor? class_weight, "
      "str options, bool save_logits) -> (Tensor loss, Tensor normalizer, Tensor saved_logits)");
  m.def(
      "linear_cross_entropy_backward(Tensor grad, Tensor input, Tensor weight, Tensor? bias, "
      "Tensor target, Tensor? class_weight, "
      "Tensor normalizer, Tensor saved_logits, str options, bool[3] output_mask) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "linear_cross_entropy_with_gradients(Tensor grad, Tensor input, Tensor weight, Tensor? bias, "
      "Tensor target, "
      "Tensor? class_weight, str options, bool[3] output_mask) "
      "-> (Tensor loss, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("linear_cross_entropy", without_gradient);
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_forward_reference);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_reference);
  m.impl("linear_cross_entropy_with_gradients", linear_cross_entropy_with_gradients_composite);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("linear_cross_entropy_forward", forward_meta);
  m.impl("linear_cross_entropy_backward", backward_meta);
  m.impl("linear_cross_entropy_with_gradients", with_gradients_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_autograd);
  m.impl("linear_cross_entropy_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("linear_cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("linear_cross_entropy_with_gradients", torch::autograd::autogradNotImplementedFallback());
}

XSOFTMAX_AUTOCAST(m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_autocast);
  disable_autocast(m,
                   {"linear_cross_entropy_forward", "linear_cross_entropy_backward",
                    "linear_cross_entropy_with_gradients"});
}

} // namespace xsoftmax
