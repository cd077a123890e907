#include "estimator/candidate_shares.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/options.h"
#include "estimator/candidate_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

void check_dtype(const char* op, const char* argument, const Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble, op,
                   ": expected ", argument, " of dtype float32 or float64, got ",
                   check::name(tensor.scalar_type()));
}

// Returns the logsumexp along a dimension. Its gradient is 0, not NaN, where all elements are -inf.
Tensor log_sum(const Tensor& x, int64_t dim) {
  if (x.size(dim) == 0) {
    return x.sum(dim) - kInfinite;
  }
  const Tensor largest = x.detach().amax(dim, true).clamp_min(std::numeric_limits<float>::lowest());
  const Tensor sum = (x - largest).exp().sum(dim);
  const Tensor none = sum.eq(0);
  return at::where(none, -kInfinite, sum.masked_fill(none, 1.0).log() + largest.squeeze(dim));
}

// The columns of the partial sums, which depend on the estimator and on the kinds of sets present.
struct ShareColumns {
  ShareColumns(const char* op, const EstimatorOptions& options, bool has_distinct, bool has_drawn)
      : estimator(find_estimator(op, options.estimator)), traits(estimator.traits),
        distinct(has_distinct), drawn(has_drawn) {
    TORCH_CHECK_VALUE(estimator.combination.has_value(), op,
                      ": expected an estimator whose candidates enter as one sum "
                      "(\"sampled_softmax\", \"ranking\", "
                      "\"nce\", \"negative_sampling\" or \"importance\"), got \"",
                      options.estimator, "\"");
    renormalizes = traits.renormalizes && options.remove_accidental_hits && drawn;
    counts_target = traits.needs_target_count || renormalizes;
    smooths = options.label_smoothing != 0;
  }

  int64_t size() const {
    const int64_t sums = int64_t(distinct) + int64_t(drawn);
    return 1 + int64_t(counts_target) + sums + (renormalizes ? 2 : 0) + (smooths ? 2 * sums : 0);
  }

  const Estimator& estimator;
  const EstimatorTraits& traits;
  const bool distinct, drawn;
  bool renormalizes, counts_target, smooths;
};

ShareColumns columns_of(const char* op, const EstimatorOptions& options,
                        const c10::List<bool>& distinct) {
  const auto count = std::count(distinct.begin(), distinct.end(), true);
  return {op, options, count > 0, size_t(count) < distinct.size()};
}

// Joins candidates [Q, C] to [Q], as the estimator does.
Tensor combine_scores(const Estimator& estimator, const Tensor& adjusted) {
  return *estimator.combination == Combination::LogSumExp ? log_sum(adjusted, 1)
                                                          : at::softplus(adjusted).sum(1);
}

} // namespace

Tensor candidate_shares(const Tensor& scores, const Tensor& target, const Proposal& sets,
                        const EstimatorOptions& options) {
  constexpr const char* op = "candidate_shares";
  check::dim(op, "scores", scores, 2);
  check_dtype(op, "scores", scores);
  check::dim(op, "target", target, 1);
  check::int64(op, "target", target);
  check::size(op, "target", target, 0, scores.sym_size(0), "the rows of scores");
  TORCH_CHECK_VALUE(
      in_column_order(sets), op,
      ": expected sets in the order of the columns of scores, the private before the shared ones, "
      "of both the distinct ones first");
  c10::List<bool> distinct;
  for (const CandidateSet& set : sets) {
    distinct.push_back(set.distinct);
  }
  const ShareColumns columns = columns_of(op, options, distinct);
  EstimatorTraits traits = columns.traits;
  traits.replaces_a_sample = traits.corrects_target = false;
  const Candidates candidates = arrange_columns(sets, scores.sym_size(0), traits);
  check_columns(op, "scores", scores, target, candidates);
  check::size(op, "scores", scores, 1, candidates.private_width() + candidates.shared_width() + 1,
              "the target, then the private, then the shared candidates");
  traits.renormalizes = false; // loss_of_shares does it, with the samples of all shards
  const CandidateBatch batch =
      make_batch(scores, target, candidates, traits, options.remove_accidental_hits, 0.0);
  const Tensor has_target = target.ge(0);

  std::vector<Tensor> shares{at::where(has_target, batch.target, 0.0)};
  const auto add_constant = [&](const Tensor& values) {
    shares.push_back(values.to(scores.scalar_type()));
  };
  if (columns.counts_target) {
    // Samples of several distributions cannot be renormalised; an infinite count marks this case.
    const Tensor count = is_defined(candidates.target_log_count)
        ? candidates.target_log_count->to(scores.scalar_type())
        : at::full(has_target.sizes(), kInfinite, scores.options());
    add_constant(at::where(has_target, count, 0.0));
  }
  for (const bool for_draws : {false, true}) {
    if (!(for_draws ? columns.drawn : columns.distinct)) {
      continue;
    }
    const bool all = !columns.drawn || !columns.distinct;
    const auto select_columns = [&](const Tensor& values, double elsewhere) {
      return all ? values : values.masked_fill(batch.drawn.ne(for_draws), elsewhere);
    };
    shares.push_back(combine_scores(columns.estimator, select_columns(batch.adjusted, -kInfinite)));
    if (columns.smooths) {
      const Tensor weight = select_columns(batch.log_weight.exp(), 0.0);
      shares.push_back(at::where(weight.eq(0), 0.0, weight * batch.score).sum(1));
      add_constant(weight.sum(1));
    }
  }
  if (columns.renormalizes) {
    add_constant(batch.log_weight.ne(-kInfinite).logical_and(batch.drawn).sum(1));
    add_constant(batch.draws);
  }
  return at::stack(shares, 1);
}

Tensor loss_of_shares(const Tensor& shares, const c10::List<bool>& distinct,
                      const EstimatorOptions& options) {
  constexpr const char* op = "loss_of_shares";
  const ShareColumns columns = columns_of(op, options, distinct);
  check::dim(op, "shares", shares, 3);
  check_dtype(op, "shares", shares);
  check::size(op, "shares", shares, 2, columns.size(),
              "the columns of this estimator and these sets");
  int64_t next = 0;
  const auto column = [&] { return shares.select(2, next++); };
  const Tensor score = column().sum(0), count = columns.counts_target ? column().sum(0) : Tensor();
  std::vector<Tensor> sums;
  Tensor weighted, weights; // sums of weight * score and of weight
  const bool is_log = *columns.estimator.combination == Combination::LogSumExp;
  for (const bool for_draws : {false, true}) {
    if (!(for_draws ? columns.drawn : columns.distinct)) {
      continue;
    }
    Tensor sum = column();
    sum = is_log ? log_sum(sum, 0) : sum.sum(0);
    Tensor sum_of_scores = columns.smooths ? column().sum(0) : Tensor(),
           sum_of_weights = columns.smooths ? column().sum(0) : Tensor();
    if (for_draws && columns.renormalizes) {
      const Tensor live = column().sum(0), draws = column().sum(0), is_known = count.ne(kInfinite);
      const Tensor others = (draws - count.exp()).clamp_min(0);
      const Tensor factor = at::where(live.gt(0).logical_and(is_known), (others / live).log(), 0.0);
      sum = sum + factor;
      if (columns.smooths) {
        sum_of_scores = sum_of_scores * factor.exp();
        sum_of_weights = sum_of_weights * factor.exp();
      }
    }
    sums.push_back(sum);
    if (columns.smooths) {
      weighted = weighted.defined() ? weighted + sum_of_scores : sum_of_scores;
      weights = weights.defined() ? weights + sum_of_weights : sum_of_weights;
    }
  }
  // A target that cannot be sampled (log count -inf) is not corrected.
  const Tensor target =
      columns.traits.corrects_target ? score - at::where(count.eq(-kInfinite), 0.0, count) : score;
  Tensor sum =
      sums.empty() ? (is_log ? at::zeros_like(score) - kInfinite : at::zeros_like(score)) : sums[0];
  if (sums.size() == 2) {
    sum = is_log ? log_sum(at::stack(sums), 0) : sums[0] + sums[1];
  }
  const Tensor loss = columns.estimator.joined_loss(target, sum);
  if (!columns.smooths) {
    return loss;
  }
  // The loss is normaliser - target; smoothing turns it into
  // (1 - e) (normaliser - target) + e (normaliser - mean).
  const Tensor mean = weights.defined() ? (target + weighted) / (1 + weights) : target;
  return loss + options.label_smoothing * (target - mean);
}

XSOFTMAX_OPERATORS(m) {
  m.def((std::string("candidate_shares(Tensor scores, Tensor target, ") + kProposalSchema +
         ", str options=\"\") -> Tensor")
            .c_str(),
        [](const Tensor& scores, const Tensor& target, at::TensorList ids, at::TensorList log_count,
           const OptionalTensors& target_log_count, const c10::List<bool>& distinct,
           std::string_view options) {
          constexpr const char* op = "candidate_shares";
          return candidate_shares(scores, target,
                                  make_proposal(op, ids, log_count, target_log_count, distinct),
                                  parse_options<EstimatorOptions>(op, options));
        });
  m.def("loss_of_shares(Tensor shares, bool[] distinct, str options=\"\") -> Tensor",
        [](const Tensor& shares, const c10::List<bool>& distinct, std::string_view options) {
          return loss_of_shares(shares, distinct,
                                parse_options<EstimatorOptions>("loss_of_shares", options));
        });
  m.def("estimator_is_joined(str estimator) -> bool", [](std::string_view name) {
    return find_estimator("estimator_is_joined", name).combination.has_value();
  });
  m.def("estimator_replaces_a_sample(str estimator) -> bool", [](std::string_view name) {
    return find_estimator("estimator_replaces_a_sample", name).traits.replaces_a_sample;
  });
}

} // namespace xsoftmax
