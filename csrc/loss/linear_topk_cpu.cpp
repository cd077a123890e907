#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "cpu/products.h"
#include "loss/class_blocks.h"
#include "loss/linear_topk.h"
#include "loss/logit_blocks.h"
#include "loss/softmax_rows.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

template <typename A>
struct Scored {
  A logit;
  int64_t id;

  // Orders by descending logit, then ascending class. A heap in this order has the worst in front.
  friend bool operator<(const Scored& a, const Scored& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  }
};

// The running softmax and the best classes of one group of blocks, per query.
template <typename A>
struct GroupBest {
  std::vector<A> max, sum;
  std::vector<Scored<A>> heaps; // [Q, k]: a heap of the best count[q] classes of each query
  std::vector<int64_t> count;

  GroupBest(int64_t queries, int64_t k)
      : max(queries, -std::numeric_limits<A>::infinity()), sum(queries, A(0)), heaps(queries * k),
        count(queries, 0) {}
};

// Finds the best classes and the softmax. A: dtype of the logits.
template <typename A>
class TopKPass {
 public:
  TopKPass(const LinearOperands& operands, const BlockPlan& plan, const LogitOptions& options,
           int64_t k)
      : operands_(operands), plan_(plan), transform_(options, operands),
        bias_(operands.bias.defined() ? const_data<A>(operands.bias) : nullptr),
        queries_(operands.input.size(0)), k_(k), groups_(plan.groups, GroupBest<A>(queries_, k)) {}

  void run(A* values, int64_t* indices) {
    for_each_group(plan_, [&](int64_t first, int64_t last) {
      BlockScratch scratch(operands_, plan_);
      for (int64_t g = first; g < last; ++g) {
        for (int64_t i = g; i < plan_.count(); i += plan_.groups) {
          const ClassBlock block = plan_.block(i);
          Tensor logits = scratch.logits_buffer(block);
          multiply(logits, operands_.input, scratch.rows(block).t(),
                   {.bfloat16 = operands_.rounds});
          visit_block(groups_[g], data<A>(logits), block);
        }
      }
    });
    at::parallel_for(0, queries_, kQueriesPerTask, [&](int64_t first, int64_t last) {
      std::vector<Scored<A>> best;
      for (int64_t q = first; q < last; ++q) {
        write_query(q, best, values + q * k_, indices + q * k_);
      }
    });
  }

 private:
  void visit_block(GroupBest<A>& group, A* logits, const ClassBlock& block) const {
    const A* bias = bias_ == nullptr ? nullptr : bias_ + block.begin;
    at::parallel_for(0, queries_, kQueriesPerTask, [&](int64_t first, int64_t last) {
      for (int64_t q = first; q < last; ++q) {
        A* row = logits + q * block.size;
        // Ranks by scores, because a softcap may round different scores to equal logits.
        if (transform_.active()) {
          visit_row(&group.heaps[q * k_], group.count[q], row, bias, block,
                    std::numeric_limits<A>::infinity());
          softmax_rows().of(row).transform(row, bias, transform_.rows(), block.size);
          softmax_rows().of(row).fold(&group.max[q], &group.sum[q], row, nullptr, block.size);
          continue;
        }
        const A top =
            softmax_rows().of(row).fold(&group.max[q], &group.sum[q], row, bias, block.size);
        visit_row(&group.heaps[q * k_], group.count[q], row, bias, block, top);
      }
    });
  }

  void visit_row(Scored<A>* heap, int64_t& count, const A* row, const A* bias,
                 const ClassBlock& block, A top) const {
    const auto scored = [&](int64_t j) {
      return Scored<A>{bias == nullptr ? row[j] : row[j] + bias[j], block.begin + j};
    };
    int64_t j = 0;
    for (; j < block.size && count < k_; ++j) {
      heap[count++] = scored(j);
      std::push_heap(heap, heap + count);
    }
    // Classes are visited in ascending order, so a class that ties with the worst in the heap has a
    // higher id and is not added.
    if (!(top > heap[0].logit)) {
      return;
    }
    while ((j = softmax_rows().of(row).find_above(row, bias, j, block.size, heap[0].logit)) <
           block.size) {
      std::pop_heap(heap, heap + k_);
      heap[k_ - 1] = scored(j++);
      std::push_heap(heap, heap + k_);
    }
  }

  void write_query(int64_t q, std::vector<Scored<A>>& best, A* values, int64_t* indices) const {
    A max = -std::numeric_limits<A>::infinity(), sum = 0;
    best.clear();
    for (const GroupBest<A>& group : groups_) {
      max = group.max[q] > max ? group.max[q] : max;
      best.insert(best.end(), group.heaps.begin() + q * k_,
                  group.heaps.begin() + q * k_ + group.count[q]);
    }
    for (const GroupBest<A>& group : groups_) {
      sum += group.sum[q] * std::exp(group.max[q] - max);
    }
    const A log_sum = std::log(sum);
    if (std::isnan(max + log_sum)) {
      for (int64_t i = 0; i < k_; ++i) {
        values[i] = std::numeric_limits<A>::quiet_NaN();
        indices[i] = i;
      }
      return;
    }
    std::partial_sort(best.begin(), best.begin() + k_, best.end());
    for (int64_t i = 0; i < k_; ++i) {
      values[i] = (logit_of(best[i].logit) - max) - log_sum;
      indices[i] = best[i].id;
    }
  }

  A logit_of(A score) const {
    if (transform_.active()) {
      softmax_rows().of(&score).transform(&score, nullptr, transform_.rows(), 1);
    }
    return score;
  }

  const LinearOperands& operands_;
  const BlockPlan plan_;
  const BlockTransform<A> transform_;
  const A* const bias_;
  const int64_t queries_, k_;
  std::vector<GroupBest<A>> groups_;
};

TopK linear_topk_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     c10::SymInt k, std::string_view text) {
  const LogitOptions options = check_linear_topk(input, weight, bias, k, text);
  if (use_reference()) {
    return linear_topk_reference(input, weight, bias, k, text);
  }
  const int64_t queries = input.size(0), count = k.expect_int();
  const Tensor values =
      at::empty({queries, count}, input.options().dtype(opmath_dtype(input.scalar_type())));
  const Tensor indices = at::empty({queries, count}, input.options().dtype(at::kLong));
  if (values.numel() == 0) {
    return {values, indices};
  }
  const LinearOperands operands(input, weight, bias);
  const BlockPlan plan = plan_blocks(queries, weight.size(0), input.size(1), /*saved=*/0,
                                     queries * (count * 16 + 24), operands.dtype);
  dispatch_sums(operands.dtype, [&](auto zero) {
    using A = decltype(zero);
    TopKPass<A>(operands, plan, options, count)
        .run(data<A>(values), indices.mutable_data_ptr<int64_t>());
  });
  return {values, indices};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("linear_topk", linear_topk_cpu); }

} // namespace xsoftmax
