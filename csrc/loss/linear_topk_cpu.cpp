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
#include <memory>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

template <typename A>
struct Scored {
  A logit;
  int64_t id;

  // Orders by descending logit, then ascending class.
  friend bool operator<(const Scored& a, const Scored& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  }
};

// The running softmax of one group of blocks.
template <typename A>
struct GroupSoftmax {
  std::vector<A> max, sum; // [Q]

  explicit GroupSoftmax(int64_t queries)
      : max(queries, -std::numeric_limits<A>::infinity()), sum(queries, A(0)) {}
};

// The classes that may be among the best k of those that one task has visited. The candidates of
// query q are the first count[q] of its row. Other visited classes have at most the logit
// threshold[q].
template <typename A>
struct Candidates {
  std::unique_ptr<Scored<A>[]> scored; // [Q, capacity]
  std::vector<int64_t> count;
  std::vector<A> threshold;

  Candidates(int64_t queries, int64_t capacity)
      : scored(std::make_unique_for_overwrite<Scored<A>[]>(queries * capacity)), count(queries, 0),
        threshold(queries, -std::numeric_limits<A>::infinity()) {}
};

// Returns how many classes are compared one by one after find_above has found one.
int64_t run_size(int64_t k) { return std::clamp<int64_t>(k, 8, 64); }

// Returns the number of candidates that a query has room for. They are reduced to the best k when
// no run fits any more, which takes constant time per candidate, where a heap would take log k.
int64_t candidate_capacity(int64_t k) { return 2 * k + run_size(k); }

// Finds the best classes and the softmax. A: dtype of the logits.
template <typename A>
class TopKPass {
 public:
  TopKPass(const LinearOperands& operands, const BlockPlan& plan, const LogitOptions& options,
           int64_t k)
      : operands_(operands), plan_(plan), transform_(options, operands),
        bias_(operands.bias.defined() ? const_data<A>(operands.bias) : nullptr),
        queries_(operands.input.size(0)), k_(k), run_(run_size(k)),
        capacity_(candidate_capacity(k)), softmax_(plan.groups, GroupSoftmax<A>(queries_)),
        candidates_(plan.groups) {}

  void run(A* values, int64_t* indices) {
    for_each_group(plan_, [&](int64_t first, int64_t last) {
      BlockScratch scratch(operands_, plan_);
      candidates_[first] = std::make_unique<Candidates<A>>(queries_, capacity_);
      // Visits the classes of all groups of the task in ascending order, see visit_row.
      for (int64_t i = first; i < plan_.count(); ++i) {
        const int64_t group = i % plan_.groups;
        if (group < first || group >= last) {
          continue;
        }
        const ClassBlock block = plan_.block(i);
        Tensor logits = scratch.logits_buffer(block);
        multiply(logits, operands_.input, scratch.rows(block).t(), {.bfloat16 = operands_.rounds});
        visit_block(softmax_[group], *candidates_[first], data<A>(logits), block);
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
  void visit_block(GroupSoftmax<A>& softmax, Candidates<A>& candidates, A* logits,
                   const ClassBlock& block) const {
    const A* bias = bias_ == nullptr ? nullptr : bias_ + block.begin;
    at::parallel_for(0, queries_, kQueriesPerTask, [&](int64_t first, int64_t last) {
      for (int64_t q = first; q < last; ++q) {
        A* row = logits + q * block.size;
        // Ranks by scores, because a softcap may round different scores to equal logits.
        if (transform_.active()) {
          visit_row(candidates, q, row, bias, block, std::numeric_limits<A>::infinity());
          softmax_rows().of(row).transform(row, bias, transform_.rows(), block.size);
          softmax_rows().of(row).fold(&softmax.max[q], &softmax.sum[q], row, nullptr, block.size);
          continue;
        }
        const A top =
            softmax_rows().of(row).fold(&softmax.max[q], &softmax.sum[q], row, bias, block.size);
        visit_row(candidates, q, row, bias, block, top);
      }
    });
  }

  // top: no logit of the row is above it.
  void visit_row(Candidates<A>& candidates, int64_t q, const A* row, const A* bias,
                 const ClassBlock& block, A top) const {
    Scored<A>* const found = &candidates.scored[q * capacity_];
    int64_t& count = candidates.count[q];
    A& threshold = candidates.threshold[q];
    const auto keep_best = [&] {
      std::nth_element(found, found + k_ - 1, found + count);
      count = k_;
      threshold = found[k_ - 1].logit;
    };
    int64_t j = 0;
    if (count < k_) {
      for (; j < block.size && count < k_; ++j) {
        const A logit = logit_at(row, bias, j);
        // nth_element requires an order, in which NaN has no place; the result of a query with NaN
        // does not depend on its candidates.
        found[count++] = {std::isnan(logit) ? -std::numeric_limits<A>::infinity() : logit,
                          block.begin + j};
      }
      if (count < k_) {
        return;
      }
      keep_best();
    }
    // Classes are visited in ascending order, so a class that ties with the threshold has a higher
    // id than the k classes that reach it.
    if (!(top > threshold)) {
      return;
    }
    while ((j = softmax_rows().of(row).find_above(row, bias, j, block.size, threshold)) <
           block.size) {
      for (const int64_t end = std::min(j + run_, block.size); j < end; ++j) {
        const A logit = logit_at(row, bias, j);
        found[count] = {logit, block.begin + j};
        count += logit > threshold ? 1 : 0; // without a branch, because hits come in no order
      }
      if (count > capacity_ - run_) {
        keep_best();
      }
    }
  }

  static A logit_at(const A* row, const A* bias, int64_t j) {
    return bias == nullptr ? row[j] : row[j] + bias[j];
  }

  void write_query(int64_t q, std::vector<Scored<A>>& best, A* values, int64_t* indices) const {
    A max = -std::numeric_limits<A>::infinity(), sum = 0;
    for (const GroupSoftmax<A>& group : softmax_) {
      max = group.max[q] > max ? group.max[q] : max;
    }
    for (const GroupSoftmax<A>& group : softmax_) {
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
    best.clear();
    for (const auto& candidates : candidates_) {
      if (candidates != nullptr) {
        const Scored<A>* const found = &candidates->scored[q * capacity_];
        best.insert(best.end(), found, found + candidates->count[q]);
      }
    }
    std::nth_element(best.begin(), best.begin() + k_ - 1, best.end());
    std::sort(best.begin(), best.begin() + k_);
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
  const int64_t queries_, k_, run_, capacity_;
  std::vector<GroupSoftmax<A>> softmax_;
  std::vector<std::unique_ptr<Candidates<A>>> candidates_; // at the first group of each task
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
  // Each task has its own candidates; there are at most as many tasks as groups.
  const BlockPlan plan =
      plan_blocks(queries, weight.size(0), input.size(1), /*saved=*/0,
                  queries * (candidate_capacity(count) * 16 + 24), operands.dtype);
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
