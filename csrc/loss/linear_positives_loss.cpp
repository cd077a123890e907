#include "loss/linear_positives_loss.h"

#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/options.h"
#include "cpu/products.h"
#include "op/shape_checks.h"
#include "op/slices.h"
#include "estimator/logit_transform.h"
#include "loss/linear_backward.h"
#include "loss/reduction.h"
#include "loss/several_positives.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kLinearPositivesLoss =
    "linear_positives_loss"; // the operator that users call
constexpr int64_t kLogitBytes = 54 << 20; // bytes of logits per block

ExactPositivesOptions check_arguments(const Tensor& input, const Tensor& weight,
                                      const OptionalTensor& bias, const Tensor& positives,
                                      const Tensor& shares, std::string_view text) {
  const auto options = parse_options<ExactPositivesOptions>(kLinearPositivesLoss, text);
  check_positives(kLinearPositivesLoss, options, std::nullopt, options.label_smoothing);
  check_logits(kLinearPositivesLoss, options);
  check_z_loss(kLinearPositivesLoss, options.z_loss);
  const bool sums_positives = options.positives == "sum";
  check::linear(kLinearPositivesLoss, input, weight, bias);
  check::dim(kLinearPositivesLoss, "positives", positives, 2);
  check::int64(kLinearPositivesLoss, "positives", positives);
  check::size(kLinearPositivesLoss, "positives", positives, 0, input.sym_size(0),
              "the rows of input");
  check::same_device(kLinearPositivesLoss, "positives", positives, "input", input);
  TORCH_CHECK_VALUE(positives.sym_size(1) >= 1, kLinearPositivesLoss,
                    ": expected at least one column of positives, got shape ",
                    positives.sym_sizes());
  check::dim(kLinearPositivesLoss, "shares", shares, 2);
  check::dtype(kLinearPositivesLoss, "shares", shares, opmath_dtype(input.scalar_type()));
  check::same_device(kLinearPositivesLoss, "shares", shares, "input", input);
  check::size(kLinearPositivesLoss, "shares", shares, 0, input.sym_size(0), "the rows of input");
  check::size(kLinearPositivesLoss, "shares", shares, 1,
              sums_positives ? c10::SymInt(1) : positives.sym_size(1),
              sums_positives ? "one for all positives" : "the positives");
  return options;
}

void check_grad(const Tensor& grad, const Tensor& input) {
  check::dim(kLinearPositivesLoss, "grad", grad, 1);
  check::floating(kLinearPositivesLoss, "grad", grad);
  check::size(kLinearPositivesLoss, "grad", grad, 0, input.sym_size(0), "the rows of input");
  check::same_device(kLinearPositivesLoss, "grad", grad, "input", input);
}

// The state of a block of queries that both passes compute.
struct QueryBlock {
  Tensor ids;        // [q, T] positives, with the first repeated in place of padding
  Tensor counts;     // [q, T] bool: not padding
  Tensor logits;     // [q, N] in opmath_type, -inf at the positives
  Tensor derivative; // [q, N] derivative of logits with respect to scores; undefined: 1
  Tensor positive_logits;       // [q, T] logits of the positives
  Tensor score;      // `positive_logits`, or its logsumexp [q, 1]
  Tensor normalizer; // [q, 1] logsumexp over the other classes

  QueryBlock(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
             const Tensor& positives, const ExactPositivesOptions& options, bool wants_derivative)
      : ids(at::where(positives.lt(0), positives.narrow(1, 0, 1), positives).clamp_min(0)),
        counts(positives.ge(0)) {
    const auto floats = input.options().dtype(opmath_dtype(input.scalar_type()));
    logits = at::empty({input.size(0), weight.size(0)}, floats);
    const bool rounds = uses_bfloat16_operands(weight);
    for_slices(logits, weight.size(0), [&](int64_t begin, int64_t size) {
      Tensor slice_logits = logits.narrow(1, begin, size);
      multiply_in_parts(slice_logits, input, weight.narrow(0, begin, size).t(),
                        {.bfloat16 = rounds});
      transform_products(
          slice_logits,
          is_defined(bias) ? OptionalTensor(bias->narrow(0, begin, size)) : std::nullopt, options);
    });
    if (wants_derivative && transforms(options)) {
      derivative = transform_derivative(logits, options);
    }
    positive_logits = logits.gather(1, ids);
    logits.scatter_(1, ids, -kInfinite);
    normalizer = at::empty({input.size(0), 1}, floats);
    for_slices(logits, input.size(0), [&](int64_t begin, int64_t size) {
      normalizer.narrow(0, begin, size)
          .copy_(at::logsumexp(logits.narrow(0, begin, size), 1, /*keepdim=*/true));
    });
    const Tensor padding = counts.logical_not().logical_and(counts.any(1, /*keepdim=*/true));
    score = options.positives == "sum"
        ? at::logsumexp(positive_logits.masked_fill(padding, -kInfinite), 1, /*keepdim=*/true)
        : positive_logits;
  }
};

// How much gradient a block of queries moves from its positives to the other classes.
struct GradientMass {
  Tensor score_gradient;   // [q, T] or [q, 1], from each positive
  Tensor total;   // [q, 1], to the other classes
  Tensor no_gradient;   // [q, 1] bool: the query has no gradient
  Tensor no_softmax_gradient; // [q, 1] bool: the other classes have no gradient

  // share: the block's shares. grad_loss [q, 1]: the gradient of the losses.
  GradientMass(const QueryBlock& block, const Tensor& share, const Tensor& grad_loss,
               double z_loss) {
    const Tensor is_ignored = share.eq(0).logical_or(grad_loss.eq(0));
    // Share of the classes that are not positives.
    const Tensor others = (block.normalizer - block.score).sigmoid();
    score_gradient = at::where(is_ignored, 0.0, grad_loss * share * others);
    total = score_gradient.sum(1, /*keepdim=*/true);
    no_gradient = total.eq(0);
    no_softmax_gradient = no_gradient;
    if (z_loss != 0) {
      const Tensor pull =
          grad_loss * share * at::logaddexp(block.normalizer, block.score) * (2 * z_loss);
      total = total + at::where(is_ignored, 0.0, pull * others).sum(1, /*keepdim=*/true);
      score_gradient = score_gradient - at::where(is_ignored, 0.0, pull * (1 - others));
      no_gradient = is_ignored.all(1, /*keepdim=*/true);
      no_softmax_gradient = total.eq(0);
    }
  }
};

// Calls task(begin, size) over blocks of queries.
template <typename Task>
void for_each_block(const Tensor& input, const Tensor& weight, const Task& task) {
  const int64_t queries = input.size(0),
                bytes = std::max<int64_t>(1, weight.size(0)) *
      at::elementSize(opmath_dtype(input.scalar_type()));
  const int64_t width = std::max<int64_t>(1, kLogitBytes / bytes);
  for (int64_t begin = 0; begin < queries; begin += width) {
    task(begin, std::min(width, queries - begin));
  }
}

Tensor positives_forward_any(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const Tensor& positives, const Tensor& shares, std::string_view text) {
  const ExactPositivesOptions options =
      check_arguments(input, weight, bias, positives, shares, text);
  Tensor loss = at::zeros({input.size(0)}, shares.options());
  for_each_block(input, weight, [&](int64_t begin, int64_t size) {
    const QueryBlock block(input.narrow(0, begin, size), weight, bias,
                           positives.narrow(0, begin, size), options, /*wants_derivative=*/false);
    const Tensor share = shares.narrow(0, begin, size);
    Tensor positive_logits = at::softplus(block.normalizer - block.score);
    if (options.z_loss != 0) {
      positive_logits =
          positive_logits + at::logaddexp(block.normalizer, block.score).square() * options.z_loss;
    }
    loss.narrow(0, begin, size).copy_(at::where(share.eq(0), 0.0, positive_logits * share).sum(1));
  });
  return loss;
}

PositivesGradients positives_backward_any(const Tensor& grad, const Tensor& input,
                                          const Tensor& weight, const OptionalTensor& bias,
                                          const Tensor& positives, const Tensor& shares,
                                          std::string_view text, std::array<bool, 3> mask) {
  const ExactPositivesOptions options =
      check_arguments(input, weight, bias, positives, shares, text);
  check_grad(grad, input);
  const bool sums_positives = options.positives == "sum";
  const auto accumulates = shares.options();
  const bool rounds = uses_bfloat16_operands(weight);
  Tensor grad_input = at::empty({mask[0] ? input.size(0) : 0, input.size(1)}, input.options());
  Tensor grad_weight = at::zeros({mask[1] ? weight.size(0) : 0, weight.size(1)}, accumulates);
  Tensor grad_bias = at::zeros({mask[2] ? weight.size(0) : 0}, accumulates);
  for_each_block(input, weight, [&](int64_t begin, int64_t size) {
    const Tensor rows = input.narrow(0, begin, size), share = shares.narrow(0, begin, size);
    QueryBlock block(rows, weight, bias, positives.narrow(0, begin, size), options,
                     /*wants_derivative=*/true);
    const Tensor grad_loss = grad.narrow(0, begin, size).to(shares.scalar_type()).unsqueeze(1);
    const GradientMass mass(block, share, grad_loss, options.z_loss);
    // The gradient overwrites the logits; it is 0 for a query without a finite normaliser.
    Tensor& gradient = block.logits;
    for_slices(gradient, size, [&](int64_t first, int64_t count) {
      Tensor part = gradient.narrow(0, first, count);
      part.sub_(block.normalizer.narrow(0, first, count))
          .exp_()
          .mul_(mass.total.narrow(0, first, count))
          .masked_fill_(mass.no_softmax_gradient.narrow(0, first, count), 0);
    });
    const Tensor positive_gradient = sums_positives
        ? mass.score_gradient * (block.positive_logits - block.score).exp()
        : mass.score_gradient;
    // Padding has the id of the first positive and must write the same value.
    gradient.scatter_(
        1, block.ids,
        -at::where(block.counts, positive_gradient,
                   at::where(mass.no_gradient, 0.0, positive_gradient.narrow(1, 0, 1))));
    if (block.derivative.defined()) {
      gradient.mul_(block.derivative.masked_fill_(mass.no_gradient, 0));
    }
    const Tensor counted = rows.masked_fill(mass.no_gradient, 0); // an ignored query may hold NaN
    // The partial sums of the gradient of the queries, one per slice of classes.
    const Tensor parts = at::zeros({mask[0] ? kSlices : 0, size, input.size(1)}, accumulates);
    for_slices(gradient, weight.size(0), [&](int64_t first, int64_t count) {
      const Tensor class_gradient = gradient.narrow(1, first, count);
      const Tensor product = rounded_coefficients(class_gradient, weight);
      if (mask[0]) {
        multiply_in_parts(parts.select(0, first / slice_width(weight.size(0))), product,
                          weight.narrow(0, first, count), {.bfloat16 = rounds});
      }
      if (mask[1]) {
        multiply_in_parts(grad_weight.narrow(0, first, count), product.t(), counted,
                          {.add = true, .bfloat16 = rounds});
      }
      if (mask[2]) {
        grad_bias.narrow(0, first, count).add_(class_gradient.sum(0));
      }
    });
    if (mask[0]) {
      grad_input.narrow(0, begin, size).copy_(parts.sum(0));
    }
  });
  return {grad_input, grad_weight.to(weight.scalar_type()), grad_bias.to(weight.scalar_type())};
}

// Checks the ids also, which only the CPU can read.
Tensor positives_forward_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const Tensor& positives, const Tensor& shares, std::string_view text) {
  check_arguments(input, weight, bias, positives, shares, text);
  check::class_ids(kLinearPositivesLoss, "positives", positives, weight.size(0), -1);
  return positives_forward_any(input, weight, bias, positives, shares, text);
}

PositivesGradients positives_backward_cpu(const Tensor& grad, const Tensor& input,
                                          const Tensor& weight, const OptionalTensor& bias,
                                          const Tensor& positives, const Tensor& shares,
                                          std::string_view text, std::array<bool, 3> mask) {
  check_arguments(input, weight, bias, positives, shares, text);
  check::class_ids(kLinearPositivesLoss, "positives", positives, weight.size(0), -1);
  return positives_backward_any(grad, input, weight, bias, positives, shares, text, mask);
}

Tensor positives_forward_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                              const Tensor& positives, const Tensor& shares,
                              std::string_view text) {
  check_arguments(input, weight, bias, positives, shares, text);
  return at::empty_symint({input.sym_size(0)}, shares.options());
}

PositivesGradients positives_backward_meta(const Tensor& grad, const Tensor& input,
                                           const Tensor& weight, const OptionalTensor& bias,
                                           const Tensor& positives, const Tensor& shares,
                                           std::string_view text, std::array<bool, 3> mask) {
  check_arguments(input, weight, bias, positives, shares, text);
  check_grad(grad, input);
  return gradients_meta(input, weight, input.scalar_type(), mask);
}

Tensor call_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    const Tensor& positives, const Tensor& shares, std::string_view text) {
  static const auto op =
      find_op<decltype(positives_forward_any)>("xsoftmax::positives_cross_entropy");
  return op.call(input, weight, bias, positives, shares, text);
}

PositivesGradients call_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, const Tensor& positives,
                                 const Tensor& shares, std::string_view text,
                                 std::array<bool, 3> mask) {
  static const auto op =
      find_op<decltype(positives_backward_any)>("xsoftmax::positives_cross_entropy_backward");
  return op.call(grad, input, weight, bias, positives, shares, text, mask);
}

class PositivesCrossEntropy : public torch::autograd::Function<PositivesCrossEntropy> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias, const Tensor& positives,
                        const Tensor& shares, std::string_view text) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({input, weight, bias.value_or(Tensor()), positives, shares});
    ctx->saved_data["options"] = std::string(text);
    return call_forward(input, weight, bias, positives, shares, text);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const std::array<bool, 3> wanted = wanted_gradients(*ctx, saved[2].defined());
    const PositivesGradients gradients =
        call_backward(grads[0], saved[0], saved[1], optional(saved[2]), saved[3], saved[4],
                      ctx->saved_data["options"].toStringRef(), wanted);
    return as_grads(gradients, wanted, 6);
  }
};

Tensor forward_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Tensor& positives, const Tensor& shares, std::string_view text) {
  check::strided_tensors(
      kLinearPositivesLoss,
      {{"input", &input}, {"weight", &weight}, {"positives", &positives}, {"shares", &shares}});
  return PositivesCrossEntropy::apply(input, weight, bias, positives, shares, text);
}

Tensor loss_op(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
               const Tensor& target, const OptionalTensor& class_weight, std::string_view options) {
  return linear_positives_loss(input, weight, bias, target, class_weight,
                               parse_options<ExactPositivesOptions>(kLinearPositivesLoss, options));
}

// Products run in the autocast dtype, as in linear_cross_entropy.
Tensor forward_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Tensor& positives, const Tensor& shares, std::string_view text) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const CastOperands cast(input, weight, bias);
  return call_forward(cast.input, cast.weight, cast.bias, positives, shares, text);
}

} // namespace

Tensor linear_positives_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const Tensor& target, const OptionalTensor& class_weight,
                             const ExactPositivesOptions& options) {
  check_batch(kLinearPositivesLoss, input, target, weight, options.ignore_index);
  TORCH_CHECK_VALUE(target.dim() == input.dim(), kLinearPositivesLoss,
                    ": expected target of shape [*, T] for input of shape ", input.sym_sizes(),
                    ", got ", target.sym_sizes());
  check_class_weight(kLinearPositivesLoss, class_weight, weight.sym_size(0), target);
  check_positives(kLinearPositivesLoss, options, class_weight, options.label_smoothing);
  Tensor rows_of_positives = target;
  if (!has_multiple_positives(input, rows_of_positives, options.ignore_index)) {
    rows_of_positives = rows_of_positives.unsqueeze(-1);
  }
  const Tensor positives = distinct_positives(rows_of_positives, options.ignore_index);
  const Tensor shares =
      positive_shares(positives, options, class_weight, opmath_dtype(input.scalar_type()));
  const Tensor queries = input.reshape_symint({positives.sym_size(0), input.sym_size(-1)});
  const Tensor loss = call_forward(mask_ignored_rows(queries, positives.select(1, 0), -1), weight,
                                   bias, positives, shares, text_of(options));
  return reduced_positives(kLinearPositivesLoss, loss, shares, options.reduction,
                           target.sym_sizes().slice(0, target.dim() - 1));
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "linear_positives_loss(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? "
      "class_weight=None, str options=\"\") -> Tensor",
      loss_op);
  m.def(
      "positives_cross_entropy(Tensor input, Tensor weight, Tensor? bias, Tensor positives, Tensor "
      "shares, str options) -> Tensor");
  m.def(
      "positives_cross_entropy_backward(Tensor grad, Tensor input, Tensor weight, Tensor? bias, "
      "Tensor positives, Tensor shares, str options, "
      "bool[3] mask) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("positives_cross_entropy", positives_forward_any);
  m.impl("positives_cross_entropy_backward", positives_backward_any);
}

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("positives_cross_entropy", positives_forward_cpu);
  m.impl("positives_cross_entropy_backward", positives_backward_cpu);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("positives_cross_entropy", positives_forward_meta);
  m.impl("positives_cross_entropy_backward", positives_backward_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("positives_cross_entropy", forward_autograd);
  m.impl("positives_cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
}

XSOFTMAX_AUTOCAST(m) {
  m.impl("positives_cross_entropy", forward_autocast);
  disable_autocast(m, {"positives_cross_entropy_backward"});
}

} // namespace xsoftmax
