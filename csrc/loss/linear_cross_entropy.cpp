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
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <c10/core/SymBool.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kOp = "linear_cross_entropy";
constexpr int64_t kSavedBytes = 40 << 20;  // bytes of logits that the forward pass saves
constexpr int64_t kReferenceBlock = 8192;  // classes per block in the composites

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

LinearGradients gradients_meta(const Tensor& input, const Tensor& weight, at::ScalarType dtype,
                               std::array<bool, 3> output_mask) {
  const c10::SymInt none(0), classes = weight.sym_size(0), features = weight.sym_size(1);
  const auto options = input.options().dtype(dtype);
  return {at::empty_symint({output_mask[0] ? input.sym_size(0) : none, features}, options),
          at::empty_symint({output_mask[1] ? classes : none, features}, options),
          at::empty_symint({output_mask[2] ? classes : none}, options)};
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
  if (!given(class_weight)) {
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
  switch (reduction_code(kOp, options.reduction)) {
    case at::Reduction::Mean:
      return loss.sum() /
          mean_divisor(target, class_weight, options.ignore_index, loss.scalar_type());
    case at::Reduction::Sum: return loss.sum();
    default: return loss;
  }
}

// Returns gradient * factor in the dtype of `source`. If `gradient` is `ours` and already has that
// dtype, works in place, and returns it unchanged for a factor of 1.
Tensor scaled(const Tensor& gradient, const Tensor& factor, const Tensor& source, bool ours) {
  if (!ours || at::isTensorSubclassLike(gradient) || at::isTensorSubclassLike(factor)) {
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
                                     given(bias) && bias->requires_grad()};
    const Tensor counted = mask_ignored_rows(
        input, target, parse_options<CrossEntropyOptions>(kOp, text).ignore_index);
    const Tensor grad =
        given(shares) ? *shares : divisor->reciprocal().expand_symint({input.sym_size(0)});
    auto [loss, grad_input, grad_weight, grad_bias] =
        call_with_gradients(grad, counted, weight, bias, target, class_weight, text, wanted);
    ctx->save_for_backward(
        {grad_input, grad_weight, grad_bias, input, weight, bias.value_or(Tensor())});
    // Hooks may keep references to the saved tensors.
    ctx->saved_data["hooked"] = at::SavedTensorDefaultHooks::get_hooks().has_value();
    return given(shares) ? at::dot(loss, *shares) : loss.sum() / *divisor;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    // Whether nothing else can read the saved gradients, so that they may be changed in place.
    const bool ours = !torch::autograd::get_current_graph_task_keep_graph() &&
        !at::GradMode::is_enabled() && !ctx->saved_data["hooked"].toBool();
    torch::autograd::variable_list result(8);
    for (const size_t i : {0, 1, 2}) {
      if (ctx->needs_input_grad(i)) {
        result[i] = scaled(saved[i], grads[0], saved[3 + i], ours);
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
        input, target, parse_options<CrossEntropyOptions>(kOp, text).ignore_index);
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
    const std::array<bool, 3> wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                     saved[2].defined() && ctx->needs_input_grad(2)};
    auto [grad_input, grad_weight, grad_bias] = call_backward(
        grads[0], saved[0], saved[1], optional(saved[2]), saved[3], optional(saved[4]), saved[5],
        saved[6], ctx->saved_data["options"].toStringRef(), wanted);
    return {wanted[0] ? grad_input : Tensor(),
            wanted[1] ? grad_weight : Tensor(),
            wanted[2] ? grad_bias : Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

Tensor without_gradient(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Tensor& target, const OptionalTensor& class_weight,
                        std::string_view text) {
  const CrossEntropyOptions options =
      check_linear_cross_entropy(input, weight, bias, target, class_weight, text);
  check::finite_queries(kOp, "input", input, target, options.ignore_index);
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
  const int64_t reduction = reduction_code(kOp, options.reduction);
  // Forward-mode derivatives are not implemented; autograd raises the error.
  const auto derived = [](const Tensor& tensor) {
    return tensor.requires_grad() || tensor._fw_grad(/*level=*/0).defined();
  };
  const bool needed = at::GradMode::is_enabled() &&
      (derived(input) || derived(weight) || (given(bias) && derived(*bias)));
  if (!needed) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_loss(input, weight, bias, target, class_weight, text);
  }
  check::finite_queries(kOp, "input", input, target, options.ignore_index);
  check::given_tensors(kOp, {{"input", &input}, {"weight", &weight}, {"target", &target}});
  const OptionalTensor weights =
      given(class_weight) ? OptionalTensor(class_weight->detach()) : std::nullopt;
  const at::ScalarType sums = opmath_dtype(input.scalar_type());
  if (reduction != at::Reduction::None &&
      (input.scalar_type() == sums || check::on_device(input))) {
    OptionalTensor divisor, shares;
    // The mean over an empty batch is NaN.
    const bool empty = TORCH_GUARD_SIZE_OBLIVIOUS(input.sym_size(0).sym_eq(0));
    if (reduction == at::Reduction::Mean && check::on_device(input) && !given(weights) && !empty) {
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
  const OptionalTensor weights = given(class_weight) && class_weight->scalar_type() != at::kDouble
      ? OptionalTensor(class_weight->to(at::kFloat))
      : class_weight;
  return call_loss(cast.input, cast.weight, cast.bias, target, weights, text);
}

// Shared by the composites: the operands in opmath_type, and the weights of the terms of the loss
//     loss_q = target_weight_q (log Z_q - s_qt) + even sum_c class_weight_c (log Z_q - s_qc)
//              + z_weight_q (log Z_q)^2,   or 0 if q is ignored.
struct ReferenceTerms {
  // bias and class_weight: [N], zeros and ones if absent.
  Tensor query, bias, class_weight, counted, target_weight, z_weight;
  double even;
  LogitOptions transform;

  ReferenceTerms(const Tensor& input, const Tensor& weight, const OptionalTensor& bias_or_none,
                 const Tensor& target, const OptionalTensor& class_weight_or_none,
                 const CrossEntropyOptions& options)
      : query(input.to(opmath_dtype(input.scalar_type()))),
        bias(given(bias_or_none) ? bias_or_none->to(query.scalar_type())
                                 : at::zeros({weight.size(0)}, query.options())),
        class_weight(given(class_weight_or_none) ? class_weight_or_none->to(query.scalar_type())
                                                 : at::ones({weight.size(0)}, query.options())),
        counted(target.ne(options.ignore_index)),
        even(weight.size(0) > 0 ? options.label_smoothing / double(weight.size(0)) : 0),
        transform(options) {
    const Tensor of_target = weight.size(0) > 0
        ? class_weight.index_select(0, target.masked_fill(counted.logical_not(), 0))
        : at::zeros({target.size(0)}, query.options());
    target_weight = of_target * (1 - options.label_smoothing);
    if (options.z_loss != 0) {
      z_weight = of_target * options.z_loss;
    }
  }

  Tensor products(const Tensor& weight, int64_t begin, int64_t size) const {
    return at::mm(query, weight.narrow(0, begin, size).to(query.scalar_type()).t());
  }
  // Returns the logits, given the products without bias.
  Tensor logits(const Tensor& products, int64_t begin) const {
    return transform_logits(products + bias.narrow(0, begin, products.size(1)), transform);
  }
};

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
  check::linear(kOp, input, weight, bias);
  check::dim(kOp, "target", target, 1);
  check::int64(kOp, "target", target);
  check::same_device(kOp, "target", target, "input", input);
  check::size(kOp, "target", target, 0, input.sym_size(0), "the rows of input");
  if (given(class_weight)) {
    check::dim(kOp, "class_weight", *class_weight, 1);
    check::same_device(kOp, "class_weight", *class_weight, "input", input);
    check::size(kOp, "class_weight", *class_weight, 0, weight.sym_size(0), "the rows of weight");
    check::floating(kOp, "class_weight", *class_weight);
  }
  const auto options = parse_options<CrossEntropyOptions>(kOp, text);
  TORCH_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1, kOp,
                    ": expected label_smoothing in [0, 1], got ", options.label_smoothing);
  check_logits(kOp, options);
  check_z_loss(kOp, options.z_loss);
  TORCH_CHECK_VALUE(options.workspace_mb >= 1, kOp, ": expected workspace_mb of at least 1, got ",
                    options.workspace_mb);
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

CrossEntropyState linear_cross_entropy_forward_reference(const Tensor& input, const Tensor& weight,
                                                         const OptionalTensor& bias,
                                                         const Tensor& target,
                                                         const OptionalTensor& class_weight,
                                                         std::string_view text, bool save_logits) {
  const CrossEntropyOptions options =
      check_linear_cross_entropy(input, weight, bias, target, class_weight, text);
  const int64_t classes = weight.size(0), queries = input.size(0);
  const ReferenceTerms terms(input, weight, bias, target, class_weight, options);
  const auto floats = terms.query.options();
  const int64_t saved =
      save_logits ? saved_classes(queries, classes, input.scalar_type()).expect_int() : 0;
  const Tensor saved_logits = at::empty({queries, saved}, floats);
  Tensor largest = at::full({queries}, -std::numeric_limits<double>::infinity(), floats),
         sum = at::zeros({queries}, floats), target_logit = at::zeros({queries}, floats),
         even_sum = at::zeros({queries}, floats.dtype(at::kDouble));
  for (int64_t begin = 0; begin < classes; begin += kReferenceBlock) {
    const int64_t size = std::min(kReferenceBlock, classes - begin);
    const Tensor products = terms.products(weight, begin, size);
    const Tensor logits = terms.logits(products, begin);
    if (const int64_t keep = std::min(size, saved - begin); keep > 0) {
      saved_logits.narrow(1, begin, keep)
          .copy_((transforms(options) ? logits : products).narrow(1, 0, keep));
    }
    const Tensor new_largest = at::maximum(largest, logits.amax(1));
    const Tensor shift =
        new_largest.masked_fill(new_largest.eq(-std::numeric_limits<double>::infinity()), 0);
    sum = sum * (largest - shift).exp() + (logits - shift.unsqueeze(1)).exp().sum(1);
    largest = new_largest;
    const Tensor here = target.ge(begin).logical_and(target.lt(begin + size));
    target_logit = at::where(
        here, logits.gather(1, (target - begin).clamp(0, size - 1).unsqueeze(1)).squeeze(1),
        target_logit);
    if (terms.even > 0) {
      even_sum =
          even_sum + (logits.to(at::kDouble) * terms.class_weight.narrow(0, begin, size)).sum(1);
    }
  }
  const Tensor log_sum = sum.log();
  Tensor loss = terms.target_weight * ((largest - target_logit) + log_sum);
  if (terms.even > 0) {
    const Tensor whole = (largest.to(at::kDouble) + log_sum) * terms.class_weight.sum(at::kDouble);
    loss = loss + (terms.even * (whole - even_sum)).to(loss.scalar_type());
  }
  if (options.z_loss != 0) {
    loss = loss + terms.z_weight * (largest + log_sum).square();
  }
  return {loss.masked_fill(terms.counted.logical_not(), 0), at::stack({largest, log_sum}),
          saved_logits};
}

LinearGradients linear_cross_entropy_backward_reference(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const Tensor& target, const OptionalTensor& class_weight, const Tensor& normalizer,
    const Tensor& saved_logits, std::string_view text, std::array<bool, 3> output_mask) {
  const CrossEntropyOptions options = check_linear_cross_entropy_backward(
      grad, input, weight, bias, target, class_weight, normalizer, saved_logits, text);
  const auto [want_input, want_weight, want_bias] = output_mask;
  const int64_t classes = weight.size(0), features = weight.size(1);
  const ReferenceTerms terms(input, weight, bias, target, class_weight, options);
  const Tensor ignored = terms.counted.logical_not();
  const Tensor target_grad = (grad * terms.target_weight).masked_fill(ignored, 0);
  const Tensor even =
      terms.even > 0 ? (grad * terms.even).masked_fill(ignored, 0) : at::zeros_like(grad);
  const Tensor largest = normalizer.select(0, 0).unsqueeze(1),
               log_sum = normalizer.select(0, 1).unsqueeze(1);
  // Without smoothing the class weights of all classes are not used, because an infinite one times
  // 0 would be NaN.
  Tensor scale =
      (terms.even > 0 ? target_grad + even * terms.class_weight.sum() : target_grad).unsqueeze(1);
  if (options.z_loss != 0) {
    scale = scale +
        (grad * terms.z_weight).masked_fill(ignored, 0).unsqueeze(1) * 2 * (largest + log_sum);
  }
  Tensor grad_input = at::zeros({want_input ? input.size(0) : 0, features}, terms.query.options());
  const Tensor grad_weight = at::empty({want_weight ? classes : 0, features}, input.options());
  const Tensor grad_bias = at::empty({want_bias ? classes : 0}, input.options());
  for (int64_t begin = 0; begin < classes; begin += kReferenceBlock) {
    const int64_t size = std::min(kReferenceBlock, classes - begin);
    const Tensor logits = terms.logits(terms.products(weight, begin, size), begin);
    Tensor slope = scale * ((logits - largest) - log_sum).exp();
    if (terms.even > 0) {
      slope = slope - even.unsqueeze(1) * terms.class_weight.narrow(0, begin, size);
    }
    const Tensor here = target.ge(begin).logical_and(target.lt(begin + size));
    slope.scatter_add_(1, (target - begin).clamp(0, size - 1).unsqueeze(1),
                       target_grad.neg().masked_fill(here.logical_not(), 0).unsqueeze(1));
    if (transforms(options)) {
      slope = (slope * transform_derivative(logits, options)).masked_fill(ignored.unsqueeze(1), 0);
    }
    if (want_input) {
      grad_input =
          grad_input + at::mm(slope, weight.narrow(0, begin, size).to(slope.scalar_type()));
    }
    if (want_weight) {
      grad_weight.narrow(0, begin, size).copy_(at::mm(slope.t(), terms.query));
    }
    if (want_bias) {
      grad_bias.narrow(0, begin, size).copy_(slope.sum(0));
    }
  }
  return {grad_input.to(input.scalar_type()), grad_weight, grad_bias};
}

CrossEntropyWithGradients linear_cross_entropy_with_gradients_composite(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const Tensor& target, const OptionalTensor& class_weight, std::string_view text,
    std::array<bool, 3> output_mask) {
  // Casts 16-bit operands first, because otherwise the gradients would be rounded.
  if (const auto dtype = opmath_dtype(input.scalar_type()); input.scalar_type() != dtype) {
    const auto wide = [dtype](const Tensor& tensor) { return tensor.to(dtype); };
    return linear_cross_entropy_with_gradients_composite(
        grad, wide(input), wide(weight), given(bias) ? OptionalTensor(wide(*bias)) : bias, target,
        class_weight, text, output_mask);
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

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_autocast);
  m.impl("linear_cross_entropy_forward",
         torch::CppFunction::makeFromBoxedFunction<below_autocast>());
  m.impl("linear_cross_entropy_backward",
         torch::CppFunction::makeFromBoxedFunction<below_autocast>());
  m.impl("linear_cross_entropy_with_gradients",
         torch::CppFunction::makeFromBoxedFunction<below_autocast>());
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_autocast);
  m.impl("linear_cross_entropy_forward",
         torch::CppFunction::makeFromBoxedFunction<below_autocast>());
  m.impl("linear_cross_entropy_backward",
         torch::CppFunction::makeFromBoxedFunction<below_autocast>());
  m.impl("linear_cross_entropy_with_gradients",
         torch::CppFunction::makeFromBoxedFunction<below_autocast>());
}

} // namespace xsoftmax
