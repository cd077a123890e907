#include "op/checks.h"
#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "cpu/memory.h"
#include "op/optional.h"
#include "cpu/products.h"
#include "loss/block_gradients.h"
#include "loss/class_blocks.h"
#include "loss/linear_cross_entropy.h"
#include "loss/logit_blocks.h"
#include "loss/softmax_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

// The weights of the terms of the loss of a query:
//     loss_q = target_weight (log Z_q - s_qt)
//              + smoothing_weight sum_c class_weight_c (log Z_q - s_qc)
//              + z_weight (log Z_q)^2,   or 0 if q is ignored.
template <typename A>
struct LossTerms {
  const int64_t* target;
  int64_t ignore_index;
  const A* class_weight; // nullptr: ones
  double label_smoothing;
  double smoothing_weight;           // label_smoothing / classes
  double weight_sum;     // sum of all class weights; set only if smoothing_weight > 0
  double z_loss;

  bool ignored(int64_t q) const { return target[q] == ignore_index; }
  A target_weight(int64_t q) const { return A(1 - label_smoothing) * class_weight_of(q); }
  A z_weight(int64_t q) const { return A(z_loss) * class_weight_of(q); }
  A class_weight_of(int64_t q) const {
    return class_weight == nullptr ? A(1) : class_weight[target[q]];
  }
};

// Owns the tensors of LossTerms, contiguous and checked.
struct LossInputs {
  Tensor target, class_weight;
  CrossEntropyOptions options;
  int64_t classes;

  LossInputs(const char* op, const Tensor& input, const Tensor& weight, const Tensor& target,
             const OptionalTensor& class_weight, const CrossEntropyOptions& options)
      : target(target.contiguous()), options(options), classes(weight.size(0)) {
    check::class_ids(op, "target", this->target, classes, options.ignore_index);
    if (is_defined(class_weight)) {
      this->class_weight = class_weight->to(opmath_dtype(input.scalar_type())).contiguous();
    }
  }

  template <typename A>
  LossTerms<A> terms() const {
    const A* weights = class_weight.defined() ? const_data<A>(class_weight) : nullptr;
    const double label_smoothing = options.label_smoothing,
                 smoothing_weight =
                     label_smoothing > 0 && classes > 0 ? label_smoothing / double(classes) : 0;
    const double sum = smoothing_weight == 0 ? 0
        : weights == nullptr                 ? double(classes)
                                             : class_weight.sum(at::kDouble).item<double>();
    return {target.const_data_ptr<int64_t>(),
            options.ignore_index,
            weights,
            label_smoothing,
            smoothing_weight,
            sum,
            options.z_loss};
  }
};

// Logits of the blocks with saved == true, kept from the forward to the backward pass.
struct SavedLogits {
  Tensor tensor; // [Q, saved]; or packed [saved Q]: the blocks [Q, size] concatenated
  bool packed = false;

  Tensor of(const ClassBlock& block, int64_t queries) const {
    return packed
        ? tensor.narrow(0, block.begin * queries, block.size * queries).view({queries, block.size})
        : tensor.narrow(1, block.begin, block.size);
  }
};

// The sums over the classes of one group, per query.
template <typename A>
struct GroupSums {
  std::vector<A> max, sum;
  std::vector<double> weighted_sum; // sum_c class_weight_c s_c

  GroupSums(int64_t queries, bool smooth)
      : max(queries, -std::numeric_limits<A>::infinity()), sum(queries, A(0)),
        weighted_sum(smooth ? queries : 0, 0.0) {}

  void join(const GroupSums& other, int64_t q) {
    const A top = max[q] > other.max[q] ? max[q] : other.max[q];
    const A shift = top == -std::numeric_limits<A>::infinity() ? A(0) : top;
    sum[q] = sum[q] * std::exp(max[q] - shift) + other.sum[q] * std::exp(other.max[q] - shift);
    max[q] = top;
    if (!weighted_sum.empty()) {
      weighted_sum[q] += other.weighted_sum[q];
    }
  }
};

// Computes the losses and the normalizer. A: dtype of the logits.
template <typename A>
class ForwardPass {
 public:
  ForwardPass(const LinearOperands& operands, const BlockPlan& plan, const LossTerms<A>& terms,
              const LogitOptions& transform, const SavedLogits& saved)
      : operands_(operands), plan_(plan), terms_(terms), saved_(saved),
        transform_(transform, operands), bias_(transform_.remaining_bias()),
        queries_(operands.input.size(0)), target_logit_(queries_, A(0)),
        groups_(plan.groups, GroupSums<A>(queries_, terms.smoothing_weight > 0)) {}

  void run(A* loss, A* normalizer) {
    for_each_group(plan_, [&](int64_t first, int64_t last) {
      BlockScratch scratch(operands_, plan_);
      for (int64_t g = first; g < last; ++g) {
        for (int64_t i = g; i < plan_.count(); i += plan_.groups) {
          const ClassBlock block = plan_.block(i);
          fold_block(groups_[g], logits(scratch, block), block);
        }
      }
    });
    GroupSums<A>& sums = groups_[0];
    for (int64_t q = 0; q < queries_; ++q) {
      for (int64_t g = 1; g < plan_.groups; ++g) {
        sums.join(groups_[g], q);
      }
      normalizer[q] = sums.max[q];
      normalizer[queries_ + q] = std::log(sums.sum[q]);
      loss[q] = terms_.ignored(q) ? A(0) : query_loss(sums, q, normalizer[queries_ + q]);
    }
  }

 private:
  // Returns the logits of a block. Saved logits are computed directly into their final memory.
  Tensor logits(BlockScratch& scratch, const ClassBlock& block) const {
    const Tensor out = block.saved ? saved_.of(block, queries_) : scratch.logits_buffer(block);
    multiply(out, operands_.input, scratch.rows(block).t(), {.bfloat16 = operands_.rounds});
    transform_.apply(out, block);
    return out;
  }

  void fold_block(GroupSums<A>& sums, const Tensor& logits, const ClassBlock& block) {
    const A* bias = bias_ == nullptr ? nullptr : bias_ + block.begin;
    const A* weight = terms_.class_weight == nullptr ? nullptr : terms_.class_weight + block.begin;
    const double weight_sum = terms_.smoothing_weight > 0 && weight != nullptr
        ? std::accumulate(weight, weight + block.size, 0.0)
        : double(block.size);
    at::parallel_for(0, queries_, kQueriesPerTask, [&](int64_t first, int64_t last) {
      for (int64_t q = first; q < last; ++q) {
        const A* row = const_data<A>(logits) + q * logits.stride(0);
        softmax_rows().of(row).fold(&sums.max[q], &sums.sum[q], row, bias, block.size);
        if (terms_.smoothing_weight > 0) {
          // Subtracts the running maximum, because a float sum of logits far from 0 loses
          // precision.
          const A shift = std::isfinite(sums.max[q]) ? sums.max[q] : A(0);
          sums.weighted_sum[q] +=
              double(softmax_rows().of(row).weighted_sum(row, bias, weight, shift, block.size));
          sums.weighted_sum[q] += weight_sum * double(shift);
        }
        const int64_t j = terms_.target[q] - block.begin;
        if (uint64_t(j) < uint64_t(block.size)) {
          target_logit_[q] = row[j] + (bias == nullptr ? A(0) : bias[j]);
        }
      }
    });
  }

  A query_loss(const GroupSums<A>& sums, int64_t q, A log_sum) const {
    A loss = terms_.target_weight(q) * ((sums.max[q] - target_logit_[q]) + log_sum);
    if (terms_.z_loss != 0) {
      const A log_normalizer = sums.max[q] + log_sum;
      loss += terms_.z_weight(q) * log_normalizer * log_normalizer;
    }
    if (terms_.smoothing_weight == 0) {
      return loss;
    }
    return loss +
        A(terms_.smoothing_weight *
          (terms_.weight_sum * (double(sums.max[q]) + log_sum) - sums.weighted_sum[q]));
  }

  const LinearOperands& operands_;
  const BlockPlan plan_;
  const LossTerms<A> terms_;
  const SavedLogits saved_;
  const BlockTransform<A> transform_;
  const A* const bias_;
  const int64_t queries_;
  std::vector<A> target_logit_;
  std::vector<GroupSums<A>> groups_;
};

// Computes the gradients. A: dtype of the logits.
template <typename A>
class BackwardPass {
 public:
  // grad [Q], normalizer [2, Q].
  BackwardPass(const LinearOperands& operands, const BlockPlan& plan, const LossTerms<A>& terms,
               const LogitOptions& transform, const A* grad, const A* normalizer,
               const SavedLogits& saved)
      : operands_(operands), plan_(plan), terms_(terms), grad_(grad), normalizer_(normalizer),
        saved_(saved), transform_(transform, operands), bias_(transform_.remaining_bias()),
        queries_(operands.input.size(0)) {}

  // Undefined gradients are not computed. grad_input_parts [groups, Q, D] in opmath_type: partial
  // sums. add: whether to add to grad_weight and grad_bias instead of overwriting them.
  void run(const Tensor& grad_input_parts, const Tensor& grad_weight, const Tensor& grad_bias,
           bool add) const {
    const BlockGradients gradients{operands_, plan_, grad_weight, grad_bias, add};
    for_each_group(plan_, [&](int64_t first, int64_t last) {
      BlockScratch scratch(operands_, plan_);
      for (int64_t g = first; g < last; ++g) {
        const Tensor part = grad_input_parts.defined() ? grad_input_parts.select(0, g) : Tensor();
        for (int64_t i = g; i < plan_.count(); i += plan_.groups) {
          const ClassBlock block = plan_.block(i);
          const Tensor rows = scratch.rows(block),
                       slope = block.saved && saved_.packed ? saved_.of(block, queries_)
                                                            : scratch.logits_buffer(block);
          set_slope(slope, rows, block);
          gradients.take(scratch, block, rows, slope, part, /*first=*/i == g);
        }
      }
    });
  }

 private:
  // Writes the gradient of the logits of a block: (softmax - one-hot) times the gradient of the
  // loss, plus the terms of smoothing and z_loss.
  void set_slope(Tensor slope, const Tensor& rows, const ClassBlock& block) const {
    Tensor saved;
    if (block.saved) {
      saved = saved_.of(block, queries_);
    } else {
      multiply(slope, operands_.input, rows.t(), {.bfloat16 = operands_.rounds});
      transform_.apply(slope, block);
    }
    const A* bias = bias_ == nullptr ? nullptr : bias_ + block.begin;
    const A* weight = terms_.class_weight == nullptr || terms_.smoothing_weight == 0
        ? nullptr
        : terms_.class_weight + block.begin;
    at::parallel_for(0, queries_, kQueriesPerTask, [&](int64_t first, int64_t last) {
      for (int64_t q = first; q < last; ++q) {
        A* row = data<A>(slope) + q * block.size;
        const auto& kernels = softmax_rows().of(row);
        const bool ignored = terms_.ignored(q);
        const A target_grad = ignored ? A(0) : grad_[q] * terms_.target_weight(q);
        const A smoothing_weight =
            ignored || terms_.smoothing_weight == 0 ? A(0) : A(grad_[q] * terms_.smoothing_weight);
        const A max = normalizer_[q],
                scale =
                    A((target_grad + smoothing_weight * terms_.weight_sum + z_grad(q, ignored)) *
                      std::exp(-normalizer_[queries_ + q]));
        const A* logits = block.saved ? const_data<A>(saved) + q * saved.stride(0) : row;
        const int64_t j = terms_.target[q] - block.begin;
        const bool in_block = uint64_t(j) < uint64_t(block.size);
        A at_target = target_grad; // subtracted from the gradient of the target's score
        if (transform_.active()) { // read before the gradient overwrites the logit
          at_target *= in_block ? transform_.derivative(logits[j]) : A(1);
          kernels.transformed_gradient(row, logits, weight, max, scale, smoothing_weight,
                                       block.size, transform_.rows());
        } else {
          kernels.gradient(row, logits, bias, weight, max, scale, smoothing_weight, block.size);
        }
        if (in_block) {
          row[j] -= at_target;
        }
      }
    });
  }

  // Returns the gradient of the log normaliser from z_loss.
  A z_grad(int64_t q, bool ignored) const {
    if (terms_.z_loss == 0 || ignored) {
      return A(0);
    }
    return 2 * grad_[q] * terms_.z_weight(q) * (normalizer_[q] + normalizer_[queries_ + q]);
  }

  const LinearOperands& operands_;
  const BlockPlan plan_;
  const LossTerms<A> terms_;
  const A* const grad_;
  const A* const normalizer_;
  const SavedLogits saved_;
  const BlockTransform<A> transform_;
  const A* const bias_;
  const int64_t queries_;
};

CrossEntropyState linear_cross_entropy_forward_cpu(const Tensor& input, const Tensor& weight,
                                                   const OptionalTensor& bias, const Tensor& target,
                                                   const OptionalTensor& class_weight,
                                                   std::string_view text, bool save_logits) {
  const CrossEntropyOptions options =
      check_linear_cross_entropy(input, weight, bias, target, class_weight, text);
  const LossInputs inputs("linear_cross_entropy", input, weight, target, class_weight, options);
  if (use_reference()) {
    return linear_cross_entropy_forward_reference(input, weight, bias, target, class_weight, text,
                                                  save_logits);
  }
  const int64_t queries = input.size(0), classes = weight.size(0);
  const int64_t saved =
      save_logits ? saved_classes(queries, classes, input.scalar_type()).expect_int() : 0;
  const auto floats = input.options().dtype(opmath_dtype(input.scalar_type()));
  const Tensor loss = at::empty({queries}, floats), normalizer = at::empty({2, queries}, floats),
               saved_logits = at::empty({queries, saved}, floats);
  if (queries == 0) {
    return {loss, normalizer, saved_logits};
  }
  const LinearOperands operands(input, weight, bias);
  const BlockPlan plan = plan_blocks(queries, classes, input.size(1), saved,
                                     queries * int64_t(sizeof(double)) * 3, operands.dtype);
  dispatch_sums(operands.dtype, [&](auto zero) {
    using A = decltype(zero);
    ForwardPass<A>(operands, plan, inputs.terms<A>(), options, {saved_logits})
        .run(data<A>(loss), data<A>(normalizer));
  });
  return {loss, normalizer, saved_logits};
}

LinearGradients linear_cross_entropy_backward_cpu(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const Tensor& target, const OptionalTensor& class_weight, const Tensor& normalizer,
    const Tensor& saved_logits, std::string_view text, std::array<bool, 3> output_mask) {
  const CrossEntropyOptions options = check_linear_cross_entropy_backward(
      grad, input, weight, bias, target, class_weight, normalizer, saved_logits, text);
  const LossInputs inputs("linear_cross_entropy_backward", input, weight, target, class_weight,
                          options);
  if (use_reference()) {
    return linear_cross_entropy_backward_reference(grad, input, weight, bias, target, class_weight,
                                                   normalizer, saved_logits, text, output_mask);
  }
  const auto [want_input, want_weight, want_bias] = output_mask;
  const int64_t queries = input.size(0), classes = weight.size(0), features = weight.size(1);
  if (queries == 0 || classes == 0 || !(want_input || want_weight || want_bias)) {
    return {at::zeros({want_input ? queries : 0, features}, input.options()),
            at::zeros({want_weight ? classes : 0, features}, input.options()),
            at::zeros({want_bias ? classes : 0}, input.options())};
  }
  const LinearOperands operands(input, weight, bias);
  const auto sums = input.options().dtype(opmath_dtype(input.scalar_type()));
  const int64_t part_bytes = want_input ? queries * features * int64_t(sums.dtype().itemsize()) : 0;
  const BlockPlan plan =
      plan_blocks(queries, classes, features, saved_logits.size(1), part_bytes, operands.dtype);
  const Tensor parts = want_input ? at::empty({plan.groups, queries, features}, sums) : Tensor();
  const Tensor grad_weight = at::empty({want_weight ? classes : 0, features}, input.options());
  const Tensor grad_bias = at::empty({want_bias ? classes : 0}, sums);
  const Tensor loss_grad = grad.contiguous(), state = normalizer.contiguous();
  dispatch_sums(operands.dtype, [&](auto zero) {
    using A = decltype(zero);
    const BackwardPass<A> pass(operands, plan, inputs.terms<A>(), options, const_data<A>(loss_grad),
                               const_data<A>(state), {saved_logits.contiguous()});
    pass.run(parts, want_weight ? grad_weight : Tensor(), want_bias ? grad_bias : Tensor(),
             /*add=*/false);
  });
  const Tensor grad_input = at::empty({want_input ? queries : 0, features}, input.options());
  if (want_input) {
    join_parts(parts, grad_input);
  }
  return {grad_input, grad_weight, grad_bias.to(input.scalar_type())};
}

// Returns the number of queries per chunk. The logits of a chunk are kept from the forward to the
// backward pass, so no product is computed twice, but each chunk reads and writes the gradient of
// the table again. Returns 0 if chunks would be too small to be faster.
int64_t chunk_size(int64_t queries, int64_t classes, int64_t logit_bytes) {
  constexpr int64_t kChunkBytes = 54 << 20, kFewestQueries = 96;
  const int64_t fitting = kChunkBytes / std::max<int64_t>(1, classes * logit_bytes);
  if (fitting >= queries) {
    return queries;
  }
  const int64_t chunks = (queries + fitting - 1) / std::max<int64_t>(1, fitting);
  return fitting < kFewestQueries ? 0 : (queries + chunks - 1) / chunks;
}

CrossEntropyWithGradients linear_cross_entropy_with_gradients_cpu(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const Tensor& target, const OptionalTensor& class_weight, std::string_view text,
    std::array<bool, 3> output_mask) {
  const CrossEntropyOptions options = check_linear_cross_entropy_with_gradients(
      grad, input, weight, bias, target, class_weight, text);
  const int64_t queries = input.size(0), classes = weight.size(0), features = weight.size(1);
  int64_t step = chunk_size(queries, classes, int64_t(input.dtype().itemsize()));
  if (step < queries && uses_bfloat16_operands(weight)) {
    // Recomputing a product costs less than reading and writing the gradient of the table again.
    step = 0;
  }
  if (use_reference() || step == 0 || classes == 0 ||
      input.scalar_type() != opmath_dtype(input.scalar_type())) {
    return linear_cross_entropy_with_gradients_composite(grad, input, weight, bias, target,
                                                         class_weight, text, output_mask);
  }
  const LossInputs inputs("linear_cross_entropy", input, weight, target, class_weight, options);
  const auto [want_input, want_weight, want_bias] = output_mask;
  const Tensor loss = at::empty({queries}, input.options()), loss_grad = grad.contiguous(),
               query = input.contiguous();
  const Tensor grad_input = at::empty({want_input ? queries : 0, features}, input.options());
  const Tensor grad_weight = at::empty({want_weight ? classes : 0, features}, input.options());
  const Tensor grad_bias = at::empty({want_bias ? classes : 0}, input.options());
  const SavedLogits saved{at::empty({classes * step}, input.options()), /*packed=*/true};
  dispatch_sums(input.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    LossTerms<A> terms = inputs.terms<A>();
    std::vector<A> normalizer(2 * step);
    for (int64_t first = 0; first < queries; first += step) {
      const int64_t count = std::min(step, queries - first);
      const LinearOperands operands(query.narrow(0, first, count), weight, bias);
      const BlockPlan plan =
          plan_blocks(count, classes, features, classes,
                      want_input ? count * features * int64_t(sizeof(A)) : 0, operands.dtype);
      terms.target = inputs.target.const_data_ptr<int64_t>() + first;
      ForwardPass<A>(operands, plan, terms, options, saved)
          .run(data<A>(loss) + first, normalizer.data());
      const Tensor parts =
          want_input ? recycled_empty({plan.groups, count, features}, input.options()) : Tensor();
      BackwardPass<A>(operands, plan, terms, options, const_data<A>(loss_grad) + first,
                      normalizer.data(), saved)
          .run(parts, want_weight ? grad_weight : Tensor(), want_bias ? grad_bias : Tensor(),
               /*add=*/first > 0);
      if (want_input) {
        join_parts(parts, grad_input.narrow(0, first, count));
      }
    }
  });
  return {loss, grad_input, grad_weight, grad_bias};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("linear_cross_entropy_with_gradients", linear_cross_entropy_with_gradients_cpu);
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_forward_cpu);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_cpu);
}

} // namespace xsoftmax
