#include "op/checks.h"
#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "cpu/products.h"
#include "loss/block_gradients.h"
#include "loss/class_blocks.h"
#include "loss/linear_softmax.h"
#include "loss/logit_blocks.h"
#include "loss/softmax_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

// The running softmax sums of one group of blocks, per query.
template <typename A>
struct GroupTerms {
  std::vector<A> max, sum, weighted;

  explicit GroupTerms(int64_t queries)
      : max(queries, -std::numeric_limits<A>::infinity()), sum(queries, A(0)),
        weighted(queries, A(0)) {}

  void join(const GroupTerms& other, int64_t q) {
    constexpr A kMin = kMinDifference<A>;
    const A top = max[q] > other.max[q] ? max[q] : other.max[q];
    const A shift = top == -std::numeric_limits<A>::infinity() ? A(0) : top;
    const A mine = max[q] - shift, others = other.max[q] - shift;
    weighted[q] = std::exp(mine) * (weighted[q] + std::max(mine, kMin) * sum[q]) +
        std::exp(others) * (other.weighted[q] + std::max(others, kMin) * other.sum[q]);
    sum[q] = sum[q] * std::exp(mine) + other.sum[q] * std::exp(others);
    max[q] = top;
  }
};

// Computes the results of the forward pass. A: dtype of the logits.
template <typename A>
class SoftmaxForward {
 public:
  SoftmaxForward(const LinearOperands& operands, const BlockPlan& plan,
                 const BlockTransform<A>& transform, const Tensor& ids)
      : operands_(operands), plan_(plan), transform_(transform),
        ids_(ids.const_data_ptr<int64_t>()), each_(ids.size(1)), queries_(ids.size(0)),
        groups_(plan.groups, GroupTerms<A>(queries_)) {}

  // log_prob [Q, K] first holds the scores. entropy: [Q] or nullptr.
  void run(A* log_prob, A* log_normalizer, A* entropy, A* normalizer) {
    for_each_group(plan_, [&](int64_t first, int64_t last) {
      BlockScratch scratch(operands_, plan_);
      for (int64_t g = first; g < last; ++g) {
        for (int64_t i = g; i < plan_.count(); i += plan_.groups) {
          const ClassBlock block = plan_.block(i);
          const Tensor logits = scratch.logits_buffer(block);
          multiply(logits, operands_.input, scratch.rows(block).t(),
                   {.bfloat16 = operands_.rounds});
          transform_.apply(logits, block);
          fold_block(groups_[g], const_data<A>(logits), block, log_prob, entropy != nullptr);
        }
      }
    });
    GroupTerms<A>& sums = groups_[0];
    for (int64_t q = 0; q < queries_; ++q) {
      for (int64_t g = 1; g < plan_.groups; ++g) {
        sums.join(groups_[g], q);
      }
      const A max = sums.max[q], log_sum = std::log(sums.sum[q]);
      normalizer[q] = max;
      normalizer[queries_ + q] = log_sum;
      log_normalizer[q] = max + log_sum;
      for (A* value = log_prob + q * each_; value != log_prob + (q + 1) * each_; ++value) {
        *value = (*value - max) - log_sum;
      }
      if (entropy != nullptr) {
        entropy[q] = log_sum - sums.weighted[q] / sums.sum[q];
      }
    }
  }

 private:
  void fold_block(GroupTerms<A>& sums, const A* logits, const ClassBlock& block, A* score,
                  bool weighted) const {
    const A* all = transform_.remaining_bias();
    const A* bias = all == nullptr ? nullptr : all + block.begin;
    at::parallel_for(0, queries_, kQueriesPerTask, [&](int64_t first, int64_t last) {
      for (int64_t q = first; q < last; ++q) {
        const A* row = logits + q * block.size;
        const auto& kernels = softmax_rows().of(row);
        if (weighted) {
          kernels.fold_weighted(&sums.max[q], &sums.sum[q], &sums.weighted[q], row, bias,
                                block.size);
        } else {
          kernels.fold(&sums.max[q], &sums.sum[q], row, bias, block.size);
        }
        for (int64_t k = q * each_; k < (q + 1) * each_; ++k) {
          const int64_t j = ids_[k] - block.begin;
          if (uint64_t(j) < uint64_t(block.size)) {
            score[k] = row[j] + (bias == nullptr ? A(0) : bias[j]);
          }
        }
      }
    });
  }

  const LinearOperands& operands_;
  const BlockPlan& plan_;
  const BlockTransform<A>& transform_;
  const int64_t* const ids_;
  const int64_t each_, queries_;
  std::vector<GroupTerms<A>> groups_;
};

// Computes the gradients of the logits. A: dtype of the logits.
template <typename A>
struct SlopePass {
  const BlockTransform<A>& transform;
  const int64_t* ids;
  int64_t each, queries;
  const A* grad_log_prob; // [Q, K]
  const A* max;           // [Q]
  const A* constant;      // [Q]
  const A* slope;         // [Q] or nullptr

  // Overwrites the logits of a block [Q, size] with their gradients. Adds the bias first if the
  // logits do not include it.
  void run(A* logits, const ClassBlock& block) const {
    const A* all = transform.remaining_bias();
    const A* bias = all == nullptr ? nullptr : all + block.begin;
    at::parallel_for(0, queries, kQueriesPerTask, [&](int64_t first, int64_t last) {
      for (int64_t q = first; q < last; ++q) {
        A* row = logits + q * block.size;
        const auto& kernels = softmax_rows().of(row);
        if (slope == nullptr) {
          kernels.gradient(row, row, bias, nullptr, max[q], constant[q], A(0), block.size);
        } else {
          kernels.gradient_of_entropy(row, row, bias, max[q], constant[q], slope[q], block.size);
        }
        for (int64_t k = q * each; k < (q + 1) * each; ++k) {
          const int64_t j = ids[k] - block.begin;
          if (uint64_t(j) < uint64_t(block.size)) {
            row[j] += grad_log_prob[k];
          }
        }
      }
    });
  }
};

SoftmaxTerms forward_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         const Tensor& ids, bool entropy, std::string_view text) {
  const LogitOptions transform = check_linear_softmax(input, weight, bias, ids, text);
  check::class_ids("linear_softmax", "ids", ids, weight.size(0));
  if (use_reference() || input.size(0) == 0 || weight.size(0) == 0) {
    return linear_softmax_forward_reference(input, weight, bias, ids, entropy, text);
  }
  const int64_t queries = input.size(0);
  const auto options = input.options().dtype(opmath_dtype(input.scalar_type()));
  const Tensor log_prob = at::empty(ids.sizes(), options), log_z = at::empty({queries}, options);
  const Tensor entropies = at::empty({entropy ? queries : 0}, options);
  const Tensor normalizer = at::empty({2, queries}, options), flat = ids.contiguous();
  const LinearOperands operands(input, weight, bias);
  const BlockPlan plan = plan_blocks(queries, weight.size(0), input.size(1), /*saved=*/0,
                                     queries * int64_t(sizeof(double)) * 3, operands.dtype);
  dispatch_sums(operands.dtype, [&](auto zero) {
    using A = decltype(zero);
    const BlockTransform<A> blocks(transform, operands);
    SoftmaxForward<A>(operands, plan, blocks, flat)
        .run(data<A>(log_prob), data<A>(log_z), entropy ? data<A>(entropies) : nullptr,
             data<A>(normalizer));
  });
  return {log_prob, log_z, entropies, normalizer};
}

SoftmaxGradients backward_cpu(const Tensor& grad_log_prob, const Tensor& grad_log_normalizer,
                              const Tensor& grad_entropy, const Tensor& input, const Tensor& weight,
                              const OptionalTensor& bias, const Tensor& ids,
                              const Tensor& normalizer, const Tensor& entropy,
                              std::string_view text, std::array<bool, 3> mask) {
  const SoftmaxBackward grads{grad_log_prob, grad_log_normalizer, grad_entropy,
                              ids,           normalizer,          entropy};
  const LogitOptions transform = check_linear_softmax_backward(input, weight, bias, grads, text);
  // The forward pass has checked the ids. An id out of range is in no block and has no effect.
  const int64_t queries = input.size(0), classes = weight.size(0), features = weight.size(1);
  if (use_reference() || queries == 0 || classes == 0) {
    return linear_softmax_backward_reference(input, weight, bias, grads, text, mask);
  }
  const LinearOperands operands(input, weight, bias);
  const auto sums = grad_log_prob.options();
  const int64_t part_bytes = mask[0] ? queries * features * int64_t(sums.dtype().itemsize()) : 0;
  const BlockPlan plan =
      plan_blocks(queries, classes, features, /*saved=*/0, part_bytes, operands.dtype);
  const Tensor parts = mask[0] ? at::empty({plan.groups, queries, features}, sums) : Tensor();
  const Tensor grad_input = at::empty({mask[0] ? queries : 0, features}, input.options());
  const Tensor grad_weight = at::empty({mask[1] ? classes : 0, features}, input.options());
  const Tensor grad_bias = at::empty({mask[2] ? classes : 0}, sums);
  const BlockGradients gradients{operands, plan, mask[1] ? grad_weight : Tensor(),
                                 mask[2] ? grad_bias : Tensor(), /*add=*/false};
  const auto [constant, slope] = grads.coefficients();
  const Tensor id_gradient = grad_log_prob.contiguous(), state = normalizer.contiguous();
  const Tensor flat = ids.contiguous(), scale = constant.contiguous();
  const Tensor moved = slope.defined() ? slope.contiguous() : slope;
  dispatch_sums(operands.dtype, [&](auto zero) {
    using A = decltype(zero);
    const BlockTransform<A> blocks(transform, operands);
    const SlopePass<A> pass{blocks,
                            flat.const_data_ptr<int64_t>(),
                            ids.size(1),
                            queries,
                            const_data<A>(id_gradient),
                            const_data<A>(state),
                            const_data<A>(scale),
                            moved.defined() ? const_data<A>(moved) : nullptr};
    for_each_group(plan, [&](int64_t first, int64_t last) {
      BlockScratch scratch(operands, plan);
      for (int64_t g = first; g < last; ++g) {
        const Tensor part = mask[0] ? parts.select(0, g) : Tensor();
        for (int64_t i = g; i < plan.count(); i += plan.groups) {
          const ClassBlock block = plan.block(i);
          const Tensor rows = scratch.rows(block), logits = scratch.logits_buffer(block);
          multiply(logits, operands.input, rows.t(), {.bfloat16 = operands.rounds});
          blocks.apply(logits, block);
          const Tensor derivative =
              blocks.active() ? transform_derivative(logits, transform) : Tensor();
          pass.run(data<A>(logits), block);
          if (derivative.defined()) {
            logits.mul_(derivative);
          }
          gradients.take(scratch, block, rows, logits, part, /*first=*/i == g);
        }
      }
    });
  });
  if (mask[0]) {
    join_parts(parts, grad_input);
  }
  return {grad_input, grad_weight, grad_bias.to(input.scalar_type())};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("linear_softmax_forward", forward_cpu);
  m.impl("linear_softmax_backward", backward_cpu);
}

} // namespace xsoftmax
