// The composites of linear_cross_entropy: forward and backward pass in ATen calls.

#include "loss/linear_cross_entropy.h"

#include "cpu/dtypes.h"
#include "op/optional.h"
#include "op/composite_block.h"
#include "estimator/logit_transform.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

// Shared by the composites: the operands in opmath_type, and the weights of the terms of the loss
//     loss_q = target_weight_q (log Z_q - s_qt)
//              + smoothing_weight sum_c class_weight_c (log Z_q - s_qc)
//              + z_weight_q (log Z_q)^2,   or 0 if q is ignored.
struct ReferenceTerms {
  // bias and class_weight: [N], zeros and ones if absent.
  Tensor query, bias, class_weight, counted, target_weight, z_weight;
  double smoothing_weight;
  LogitOptions transform;

  ReferenceTerms(const Tensor& input, const Tensor& weight, const OptionalTensor& bias_or_none,
                 const Tensor& target, const OptionalTensor& class_weight_or_none,
                 const CrossEntropyOptions& options)
      : query(input.to(opmath_dtype(input.scalar_type()))),
        bias(is_defined(bias_or_none) ? bias_or_none->to(query.scalar_type())
                                      : at::zeros({weight.size(0)}, query.options())),
        class_weight(is_defined(class_weight_or_none)
                         ? class_weight_or_none->to(query.scalar_type())
                         : at::ones({weight.size(0)}, query.options())),
        counted(target.ne(options.ignore_index)),
        smoothing_weight(weight.size(0) > 0 ? options.label_smoothing / double(weight.size(0)) : 0),
        transform(options) {
    const Tensor weight_of_target = weight.size(0) > 0
        ? class_weight.index_select(0, target.masked_fill(counted.logical_not(), 0))
        : at::zeros({target.size(0)}, query.options());
    target_weight = weight_of_target * (1 - options.label_smoothing);
    if (options.z_loss != 0) {
      z_weight = weight_of_target * options.z_loss;
    }
  }

  Tensor products(const Tensor& weight, int64_t begin, int64_t size) const {
    return at::mm(query, weight.narrow(0, begin, size).to(query.scalar_type()).t());
  }
  // Returns the factor [Q, 1] of the probabilities in the gradient of the logits. target_grad and
  // smoothing_grad [Q]: `grad` times the weights of the first two terms, 0 if ignored.
  Tensor probability_scale(const Tensor& grad, const Tensor& target_grad,
                           const Tensor& smoothing_grad, const Tensor& ignored,
                           const Tensor& normalizer, double z_loss) const {
    // Without smoothing the class weights of all classes are not used, because an infinite one
    // times 0 would be NaN.
    const Tensor scale =
        (smoothing_weight > 0 ? target_grad + smoothing_grad * class_weight.sum() : target_grad)
            .unsqueeze(1);
    if (z_loss == 0) {
      return scale;
    }
    const Tensor log_z = (normalizer.select(0, 0) + normalizer.select(0, 1)).unsqueeze(1);
    return scale + (grad * z_weight).masked_fill(ignored, 0).unsqueeze(1) * 2 * log_z;
  }
  // Returns the logits, given the products without bias.
  Tensor logits(const Tensor& products, int64_t begin) const {
    return transform_logits(products + bias.narrow(0, begin, products.size(1)), transform);
  }
};

} // namespace

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
         weighted_logit_sum = at::zeros({queries}, floats.dtype(at::kDouble));
  for (int64_t begin = 0; begin < classes; begin += kCompositeBlock) {
    const int64_t size = std::min(kCompositeBlock, classes - begin);
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
    const Tensor in_block = target.ge(begin).logical_and(target.lt(begin + size));
    target_logit = at::where(
        in_block, logits.gather(1, (target - begin).clamp(0, size - 1).unsqueeze(1)).squeeze(1),
        target_logit);
    if (terms.smoothing_weight > 0) {
      weighted_logit_sum = weighted_logit_sum +
          (logits.to(at::kDouble) * terms.class_weight.narrow(0, begin, size)).sum(1);
    }
  }
  const Tensor log_sum = sum.log();
  Tensor loss = terms.target_weight * ((largest - target_logit) + log_sum);
  if (terms.smoothing_weight > 0) {
    const Tensor whole = (largest.to(at::kDouble) + log_sum) * terms.class_weight.sum(at::kDouble);
    loss = loss + (terms.smoothing_weight * (whole - weighted_logit_sum)).to(loss.scalar_type());
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
  const Tensor smoothing_weight = terms.smoothing_weight > 0
      ? (grad * terms.smoothing_weight).masked_fill(ignored, 0)
      : at::zeros_like(grad);
  const Tensor largest = normalizer.select(0, 0).unsqueeze(1),
               log_sum = normalizer.select(0, 1).unsqueeze(1);
  const Tensor scale = terms.probability_scale(grad, target_grad, smoothing_weight, ignored,
                                               normalizer, options.z_loss);
  Tensor grad_input = at::zeros({want_input ? input.size(0) : 0, features}, terms.query.options());
  const Tensor grad_weight = at::empty({want_weight ? classes : 0, features}, input.options());
  const Tensor grad_bias = at::empty({want_bias ? classes : 0}, input.options());
  for (int64_t begin = 0; begin < classes; begin += kCompositeBlock) {
    const int64_t size = std::min(kCompositeBlock, classes - begin);
    const Tensor logits = terms.logits(terms.products(weight, begin, size), begin);
    Tensor slope = scale * ((logits - largest) - log_sum).exp();
    if (terms.smoothing_weight > 0) {
      slope = slope - smoothing_weight.unsqueeze(1) * terms.class_weight.narrow(0, begin, size);
    }
    const Tensor in_block = target.ge(begin).logical_and(target.lt(begin + size));
    slope.scatter_add_(1, (target - begin).clamp(0, size - 1).unsqueeze(1),
                       target_grad.neg().masked_fill(in_block.logical_not(), 0).unsqueeze(1));
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

} // namespace xsoftmax
