#include "loss/linear_softmax.h"

#include "op/operators.h"
#include "op/shape_checks.h"
#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/options.h"
#include "cpu/products.h"
#include "estimator/logit_transform.h"
#include "loss/linear_backward.h"
#include "loss/softmax_rows.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kLinearSoftmax = "linear_softmax";
constexpr double kMin = kMinDifference<double>;

SoftmaxGradients backward_any(const Tensor& grad_log_prob, const Tensor& grad_log_normalizer,
                              const Tensor& grad_entropy, const Tensor& input, const Tensor& weight,
                              const OptionalTensor& bias, const Tensor& ids,
                              const Tensor& normalizer, const Tensor& entropy,
                              std::string_view options, std::array<bool, 3> mask) {
  return linear_softmax_backward_reference(
      input, weight, bias,
      {grad_log_prob, grad_log_normalizer, grad_entropy, ids, normalizer, entropy}, options, mask);
}

SoftmaxTerms call_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const Tensor& ids, bool entropy, std::string_view options) {
  static const auto op =
      find_op<decltype(linear_softmax_forward_reference)>("xsoftmax::linear_softmax_forward");
  return op.call(input, weight, bias, ids, entropy, options);
}

SoftmaxTerms forward_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const Tensor& ids, bool entropy, std::string_view text) {
  check_linear_softmax(input, weight, bias, ids, text);
  const auto options = input.options().dtype(opmath_dtype(input.scalar_type()));
  const c10::SymInt queries = input.sym_size(0);
  return {at::empty_symint(ids.sym_sizes(), options), at::empty_symint({queries}, options),
          at::empty_symint({entropy ? queries : c10::SymInt(0)}, options),
          at::empty_symint({c10::SymInt(2), queries}, options)};
}

SoftmaxGradients backward_meta(const Tensor& grad_log_prob, const Tensor& grad_log_normalizer,
                               const Tensor& grad_entropy, const Tensor& input,
                               const Tensor& weight, const OptionalTensor& bias, const Tensor& ids,
                               const Tensor& normalizer, const Tensor& entropy,
                               std::string_view options, std::array<bool, 3> mask) {
  check_linear_softmax_backward(
      input, weight, bias,
      {grad_log_prob, grad_log_normalizer, grad_entropy, ids, normalizer, entropy}, options);
  return gradients_meta(input, weight, input.scalar_type(), mask);
}

class LinearSoftmax : public torch::autograd::Function<LinearSoftmax> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, const Tensor& ids,
                                                bool entropy, std::string_view options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [log_prob, log_normalizer, entropies, normalizer] =
        call_forward(input, weight, bias, ids, entropy, options);
    ctx->saved_data["options"] = std::string(options);
    ctx->save_for_backward({input, weight, bias.value_or(Tensor()), ids, normalizer, entropies});
    return {log_prob, log_normalizer, entropies};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_op<decltype(backward_any)>("xsoftmax::linear_softmax_backward");
    const auto saved = ctx->get_saved_variables();
    const std::array<bool, 3> wanted = wanted_gradients(*ctx, saved[2].defined());
    const SoftmaxGradients gradients =
        op.call(grads[0], grads[1], grads[2], saved[0], saved[1], optional(saved[2]), saved[3],
                saved[4], saved[5], ctx->saved_data["options"].toStringRef(), wanted);
    return as_grads(gradients, wanted, 6);
  }
};

std::tuple<Tensor, Tensor, Tensor> softmax_only(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, const Tensor& ids,
                                                bool entropy, std::string_view options) {
  auto [log_prob, log_normalizer, entropies, normalizer] =
      call_forward(input, weight, bias, ids, entropy, options);
  return {log_prob, log_normalizer, entropies};
}

std::tuple<Tensor, Tensor, Tensor> call_softmax(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, const Tensor& ids,
                                                bool entropy, std::string_view options) {
  static const auto op = find_op<decltype(softmax_only)>("xsoftmax::linear_softmax");
  return op.call(input, weight, bias, ids, entropy, options);
}

std::tuple<Tensor, Tensor, Tensor> softmax_autograd(const Tensor& input, const Tensor& weight,
                                                    const OptionalTensor& bias, const Tensor& ids,
                                                    bool entropy, std::string_view options) {
  check::strided_tensors(kLinearSoftmax, {{"input", &input}, {"weight", &weight}, {"ids", &ids}});
  const auto results = LinearSoftmax::apply(input, weight, bias, ids, entropy, options);
  return {results[0], results[1], results[2]};
}

std::tuple<Tensor, Tensor, Tensor> softmax_autocast(const Tensor& input, const Tensor& weight,
                                                    const OptionalTensor& bias, const Tensor& ids,
                                                    bool entropy, std::string_view options) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const CastOperands cast(input, weight, bias);
  return call_softmax(cast.input, cast.weight, cast.bias, ids, entropy, options);
}

// Returns the number of classes per block in the composites, for 64 MB of logits.
int64_t block_of(const Tensor& input) {
  const int64_t most = (int64_t(64) << 20) / (sizeof(float) * std::max<int64_t>(1, input.size(0)));
  return std::clamp<int64_t>(most, 1024, 65536);
}

// Returns ids [Q, K] sorted within each query, and their gradients: gradients of equal ids are
// summed into the last of them, the others are zero. The sums take log2(K) passes, so that their
// order is the same on every device.
std::tuple<Tensor, Tensor> sum_equal_ids(const Tensor& ids, const Tensor& gradient) {
  const auto [sorted, order] = ids.sort(/*stable=*/true, /*dim=*/1, /*descending=*/false);
  Tensor sums = gradient.gather(1, order);
  const int64_t each = ids.size(1);
  for (int64_t step = 1; step < each; step *= 2) {
    const Tensor same = sorted.narrow(1, step, each - step).eq(sorted.narrow(1, 0, each - step));
    const Tensor earlier = at::where(same, sums.narrow(1, 0, each - step), 0.0);
    sums = at::cat({sums.narrow(1, 0, step), sums.narrow(1, step, each - step) + earlier}, 1);
  }
  if (each > 1) {
    const Tensor repeats = sorted.narrow(1, 1, each - 1).eq(sorted.narrow(1, 0, each - 1));
    sums.narrow(1, 0, each - 1).masked_fill_(repeats, 0);
  }
  return {sorted, sums};
}

Tensor logits_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                 const LogitOptions& options, int64_t begin, int64_t size) {
  const auto dtype = opmath_dtype(input.scalar_type());
  const Tensor logits = wide_product(input, weight.narrow(0, begin, size).t(), dtype);
  transform_products(logits, is_defined(bias) ? OptionalTensor(bias->narrow(0, begin, size)) : bias,
                     options);
  return logits;
}

} // namespace

std::tuple<Tensor, Tensor, Tensor> linear_softmax(const Tensor& input, const Tensor& weight,
                                                  const OptionalTensor& bias, const Tensor& ids,
                                                  bool entropy, const LogitOptions& options) {
  return call_softmax(input, weight, bias, ids, entropy, text_of(options));
}

LogitOptions check_linear_softmax(const Tensor& input, const Tensor& weight,
                                  const OptionalTensor& bias, const Tensor& ids,
                                  std::string_view text) {
  check::linear(kLinearSoftmax, input, weight, bias);
  check::dim(kLinearSoftmax, "ids", ids, 2);
  check::int64(kLinearSoftmax, "ids", ids);
  check::size(kLinearSoftmax, "ids", ids, 0, input.sym_size(0), "the rows of input");
  check::same_device(kLinearSoftmax, "ids", ids, "input", input);
  const auto options = parse_options<LogitOptions>(kLinearSoftmax, text);
  check_logits(kLinearSoftmax, options);
  return options;
}

LogitOptions check_linear_softmax_backward(const Tensor& input, const Tensor& weight,
                                           const OptionalTensor& bias, const SoftmaxBackward& grads,
                                           std::string_view text) {
  const LogitOptions options = check_linear_softmax(input, weight, bias, grads.ids, text);
  constexpr const char* op = "linear_softmax_backward";
  const auto dtype = opmath_dtype(input.scalar_type());
  const c10::SymInt queries = input.sym_size(0);
  const auto sums = [&](const char* name, const Tensor& tensor, int64_t dim) {
    check::dim(op, name, tensor, dim);
    check::dtype(op, name, tensor, dtype);
    check::same_device(op, name, tensor, "input", input);
  };
  sums("grad_log_prob", grads.grad_log_prob, 2);
  check::size(op, "grad_log_prob", grads.grad_log_prob, 0, queries, "the rows of input");
  check::size(op, "grad_log_prob", grads.grad_log_prob, 1, grads.ids.sym_size(1), "the ids");
  sums("grad_log_normalizer", grads.grad_log_normalizer, 1);
  check::size(op, "grad_log_normalizer", grads.grad_log_normalizer, 0, queries,
              "the rows of input");
  sums("grad_entropy", grads.grad_entropy, 1);
  sums("entropy", grads.entropy, 1);
  if (grads.has_entropy()) {
    check::size(op, "grad_entropy", grads.grad_entropy, 0, queries, "the rows of input");
    check::size(op, "entropy", grads.entropy, 0, queries, "the rows of input");
  }
  sums("normalizer", grads.normalizer, 2);
  check::size(op, "normalizer", grads.normalizer, 0, 2, "largest logit, log of the sum");
  check::size(op, "normalizer", grads.normalizer, 1, queries, "the rows of input");
  return options;
}

std::array<Tensor, 2> SoftmaxBackward::coefficients() const {
  const Tensor log_sum = normalizer.select(0, 1), scale = (-log_sum).exp();
  const Tensor plain = grad_log_normalizer - grad_log_prob.sum(1);
  if (!has_entropy()) {
    return {plain * scale, Tensor()};
  }
  return {(plain + grad_entropy * (log_sum - entropy)) * scale, -grad_entropy * scale};
}

SoftmaxTerms linear_softmax_forward_reference(const Tensor& input, const Tensor& weight,
                                              const OptionalTensor& bias, const Tensor& ids,
                                              bool entropy, std::string_view text) {
  const LogitOptions transform = check_linear_softmax(input, weight, bias, ids, text);
  const int64_t queries = input.size(0), classes = weight.size(0), width = block_of(input);
  const auto options = input.options().dtype(opmath_dtype(input.scalar_type()));
  Tensor largest = at::full({queries}, -kInfinite, options), sum = at::zeros({queries}, options);
  Tensor weighted = at::zeros({queries}, options), score = at::zeros(ids.sizes(), options);
  for (int64_t begin = 0; begin < classes; begin += width) {
    const int64_t size = std::min(width, classes - begin);
    const Tensor logits = logits_of(input, weight, bias, transform, begin, size);
    const Tensor place = ids - begin, in_block = place.ge(0).logical_and(place.lt(size));
    score = at::where(in_block, logits.gather(1, place.clamp(0, size - 1)), score);
    const Tensor top = at::maximum(largest, logits.amax(1));
    const Tensor shift = top.masked_fill(top.eq(-kInfinite), 0);
    const Tensor moved = largest - shift, difference = logits - shift.unsqueeze(1);
    const Tensor each = difference.exp(), scale = moved.exp();
    if (entropy) {
      weighted = scale * (weighted + moved.clamp_min(kMin) * sum) +
          (each * difference.clamp_min(kMin)).sum(1);
    }
    sum = sum * scale + each.sum(1);
    largest = top;
  }
  const Tensor log_sum = sum.log();
  return {(score - largest.unsqueeze(1)) - log_sum.unsqueeze(1), largest + log_sum,
          entropy ? log_sum - weighted / sum : at::empty({0}, options),
          at::stack({largest, log_sum})};
}

SoftmaxGradients linear_softmax_backward_reference(const Tensor& input, const Tensor& weight,
                                                   const OptionalTensor& bias,
                                                   const SoftmaxBackward& grads,
                                                   std::string_view text,
                                                   std::array<bool, 3> mask) {
  const LogitOptions transform = check_linear_softmax_backward(input, weight, bias, grads, text);
  const int64_t classes = weight.size(0), features = weight.size(1), width = block_of(input);
  const auto sums = grads.grad_log_prob.options();
  const auto [constant, slope] = grads.coefficients();
  const Tensor largest = grads.normalizer.select(0, 0).unsqueeze(1);
  Tensor grad_input = at::zeros({mask[0] ? input.size(0) : 0, features}, sums);
  const Tensor grad_weight = at::empty({mask[1] ? classes : 0, features}, input.options());
  const Tensor grad_bias = at::empty({mask[2] ? classes : 0}, input.options());
  const auto [ids, id_gradient] = sum_equal_ids(grads.ids, grads.grad_log_prob);
  for (int64_t begin = 0; begin < classes; begin += width) {
    const int64_t size = std::min(width, classes - begin);
    const Tensor rows = weight.narrow(0, begin, size);
    const Tensor logits = logits_of(input, weight, bias, transform, begin, size);
    const Tensor difference = logits - largest;
    Tensor factor = constant.unsqueeze(1);
    if (slope.defined()) {
      factor = factor + slope.unsqueeze(1) * difference.clamp_min(kMin);
    }
    const Tensor place = ids - begin, in_block = place.ge(0).logical_and(place.lt(size));
    Tensor gradient = difference.exp() * factor;
    gradient.scatter_add_(1, place.clamp(0, size - 1), at::where(in_block, id_gradient, 0.0));
    if (transforms(transform)) {
      gradient = gradient * transform_derivative(logits, transform);
    }
    gradient = rounded_coefficients(gradient, weight);
    if (mask[0]) {
      grad_input = grad_input + wide_product(gradient, rows, sums.dtype().toScalarType());
    }
    if (mask[1]) {
      grad_weight.narrow(0, begin, size)
          .copy_(wide_product(gradient.t(), input, sums.dtype().toScalarType()));
    }
    if (mask[2]) {
      grad_bias.narrow(0, begin, size)
          .copy_(gradient.sum(0, /*keepdim=*/false, grad_input.scalar_type()));
    }
  }
  return {grad_input.to(input.scalar_type()), grad_weight, grad_bias};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "linear_softmax(Tensor input, Tensor weight, Tensor? bias, Tensor ids, bool entropy=False, "
      "str options=\"\") -> "
      "(Tensor log_prob, Tensor log_normalizer, Tensor entropy)");
  m.def(
      "linear_softmax_forward(Tensor input, Tensor weight, Tensor? bias, Tensor ids, bool entropy, "
      "str options) -> "
      "(Tensor log_prob, Tensor log_normalizer, Tensor entropy, Tensor normalizer)");
  m.def(
      "linear_softmax_backward(Tensor grad_log_prob, Tensor grad_log_normalizer, Tensor "
      "grad_entropy, "
      "Tensor input, Tensor weight, Tensor? bias, Tensor ids, Tensor normalizer, Tensor entropy, "
      "str options, bool[3] mask) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("linear_softmax", softmax_only);
  m.impl("linear_softmax_forward", linear_softmax_forward_reference);
  m.impl("linear_softmax_backward", backward_any);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("linear_softmax_forward", forward_meta);
  m.impl("linear_softmax_backward", backward_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("linear_softmax", softmax_autograd);
  m.impl("linear_softmax_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("linear_softmax_backward", torch::autograd::autogradNotImplementedFallback());
}

XSOFTMAX_AUTOCAST(m) {
  m.impl("linear_softmax", softmax_autocast);
  disable_autocast(m, {"linear_softmax_forward", "linear_softmax_backward"});
}

} // namespace xsoftmax
