#include "loss/several_positives.h"

#include "op/checks.h"
#include "estimator/candidate_loss.h"
#include "estimator/logit_transform.h"
#include "loss/reduction.h"
#include "xsoftmax/ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kSeveralPositives = "sampled_softmax_loss"; // the operator that users call

bool is_draw(const CandidateSet& set) { return !set.distinct && set.ids.sym_size(-1) != 0; }

// Returns a tensor of a set as [Q, M] or [1, M].
Tensor as_matrix(const Tensor& set_tensor) {
  return set_tensor.dim() == 2 ? set_tensor : set_tensor.unsqueeze(0);
}

// Selects the target of each row of a query: one of its positives, for R rows per query.
struct RowTargets {
  const Tensor& positives; ///< [Q, T]
  Tensor column;           ///< [Q, R]: column in `positives`

  // Returns [Q, R]: the values [Q, T] of the selected positives.
  Tensor gather(const Tensor& each) const { return each.gather(1, column); }
};

// Expands a set to the rows of each query. removes_hits: leave out positives other than the target
// of the row, and renormalise the counts of the other candidates if `renormalizes`.
CandidateSet set_of_rows(const CandidateSet& set, const RowTargets& rows, bool removes_hits,
                         bool renormalizes, at::ScalarType dtype) {
  const Tensor ids = as_matrix(set.ids), counts = as_matrix(set.log_count).to(dtype);
  const Tensor targets = rows.gather(rows.positives);
  const c10::SymInt queries = targets.sym_size(0), each = targets.sym_size(1),
                    width = ids.sym_size(1);
  Tensor log_count = counts.unsqueeze(1).expand_symint({queries, each, width});
  Tensor target_log_count =
      set.target_log_count.defined() ? rows.gather(set.target_log_count.to(dtype)) : Tensor();
  if (removes_hits) {
    const Tensor positive =
        ids.unsqueeze(1).eq(rows.positives.unsqueeze(2)).any(1, /*keepdim=*/true);
    const Tensor others = positive.logical_and(ids.unsqueeze(1).ne(targets.unsqueeze(2)));
    log_count = log_count.masked_fill(others, kInfinite);
    if (renormalizes && target_log_count.defined()) {
      const Tensor present = counts.ne(kInfinite).unsqueeze(1);
      const Tensor draws = present.sum(2).to(at::kDouble),
                   left = draws - others.logical_and(present).sum(2);
      const Tensor expected =
          set.target_log_count.to(at::kDouble).exp().masked_fill(rows.positives.lt(0), 0);
      const Tensor expected_left =
          draws - (expected.sum(1, /*keepdim=*/true) - rows.gather(expected)).clamp_min(0);
      const Tensor scale =
          at::where(left.gt(0).logical_and(expected_left.gt(0)), (left / expected_left).log(), 0.0)
              .to(dtype);
      log_count = log_count + scale.unsqueeze(2);
      target_log_count = target_log_count + scale;
    }
  }
  const Tensor row_ids = set.ids.dim() == 1 ? set.ids
                                            : ids.unsqueeze(1)
                                                  .expand_symint({queries, each, width})
                                                  .reshape_symint({queries * each, width});
  return {row_ids, log_count.reshape_symint({queries * each, width}),
          target_log_count.defined() ? target_log_count.reshape({-1}) : target_log_count,
          set.distinct};
}

// Returns the column [Q, 1] of the positive that represents all positives of a query: the first
// that a distinct set contains, or else the first.
Tensor representative_column(const Proposal& sets, const Tensor& positives) {
  Tensor covered = at::zeros_like(positives, at::kBool);
  for (const CandidateSet& set : sets) {
    if (set.distinct) {
      const Tensor present = as_matrix(set.log_count).ne(kInfinite).unsqueeze(1);
      covered = covered.logical_or(
          as_matrix(set.ids).unsqueeze(1).eq(positives.unsqueeze(2)).logical_and(present).any(2));
    }
  }
  // Descending values, so that argmax returns the first match.
  const Tensor preference = at::arange(positives.sym_size(1), 0, -1, positives.options());
  return (covered.logical_and(positives.ge(0)) * preference).argmax(1, /*keepdim=*/true);
}

// Returns the score [Q, 1] of all positives as one class. If the estimator corrects the target, the
// log expected count of each positive is subtracted first.
Tensor joint_score(const Tensor& scores, const Tensor& positives, const Proposal& sets,
                   bool subtracts_log_count) {
  Tensor corrected = scores;
  if (subtracts_log_count) {
    Tensor count = at::full_like(scores, -kInfinite);
    for (const CandidateSet& set : sets) {
      count = set.target_log_count.defined()
          ? at::logaddexp(count, set.target_log_count.to(scores.scalar_type()))
          : count;
    }
    corrected = scores - count.masked_fill(count.eq(-kInfinite), 0);
  }
  // A query with only padding keeps a finite score, which is not used.
  const Tensor padding = positives.lt(0).logical_and(positives.ge(0).any(1, /*keepdim=*/true));
  return at::logsumexp(corrected.masked_fill(padding, -kInfinite), 1, /*keepdim=*/true);
}

} // namespace

bool has_multiple_positives(const Tensor& input, Tensor& target, int64_t ignore_index) {
  if (target.dim() == 0 || target.dim() != input.dim()) {
    return false;
  }
  const c10::SymIntArrayRef queries = target.sym_sizes().slice(0, target.dim() - 1);
  if (target.sym_size(-1) == 0) {
    target = at::full_symint(queries, ignore_index, target.options());
  } else if (target.sym_size(-1) == 1) {
    target = target.squeeze(-1);
  }
  return target.dim() == input.dim();
}

Tensor distinct_positives(const Tensor& target, int64_t ignore_index) {
  const auto sort_descending = [](const Tensor& ids) {
    return std::get<0>(ids.sort(1, /*descending=*/true));
  };
  const Tensor rows = target.unsqueeze(0).flatten(0, -2),
               ordered = sort_descending(rows.masked_fill(rows.eq(ignore_index), -1));
  const c10::SymInt others = ordered.sym_size(1) - 1;
  const Tensor repeats =
      ordered.narrow_symint(1, 1, others).eq(ordered.narrow_symint(1, 0, others));
  return sort_descending(at::cat(
      {ordered.narrow(1, 0, 1), ordered.narrow_symint(1, 1, others).masked_fill(repeats, -1)}, 1));
}

void check_positives(const char* op, const PositivesOptions& options,
                     const OptionalTensor& class_weight, double label_smoothing) {
  const bool sums_positives = options.positives == "sum";
  TORCH_CHECK_VALUE(sums_positives || options.positives == "mean", op,
                    ": expected positives to be \"mean\" or \"sum\", got \"", options.positives,
                    "\"");
  TORCH_CHECK_VALUE(label_smoothing == 0, op,
                    ": expected label_smoothing of 0 with several positives of a query, got ",
                    label_smoothing);
  TORCH_CHECK_VALUE(
      !sums_positives || !is_defined(class_weight), op,
      ": expected no class weights with positives=\"sum\", which makes one class of several");
}

Tensor positive_shares(const Tensor& positives, const PositivesOptions& options,
                       const OptionalTensor& class_weight, at::ScalarType dtype) {
  const Tensor counts = positives.ge(0);
  if (options.positives == "sum") {
    return counts.any(1, /*keepdim=*/true).to(dtype);
  }
  const Tensor shares = counts.to(dtype) / counts.sum(1, /*keepdim=*/true).clamp_min(1).to(dtype);
  if (!is_defined(class_weight)) {
    return shares;
  }
  const Tensor ids = positives.clamp_min(0).flatten();
  const Tensor weights =
      class_weight->detach().to(dtype).index_select(0, ids).reshape_symint(positives.sym_sizes());
  return at::where(counts, shares * weights, 0.0); // 0 times an infinite weight would be NaN
}

Tensor reduced_positives(const char* op, const Tensor& loss, const Tensor& shares,
                         const std::string& reduction, c10::SymIntArrayRef shape) {
  switch (reduction_code(op, reduction)) {
    case at::Reduction::Mean: return loss.sum() / shares.sum();
    case at::Reduction::Sum: return loss.sum();
    default: return loss.reshape_symint(shape);
  }
}

PositivesLoss losses_of_positives(const Tensor& input, const Tensor& weight,
                                  const OptionalTensor& bias, const Tensor& positives,
                                  const Proposal& sets, const SampledSoftmaxOptions& options,
                                  const OptionalTensor& log_z) {
  const Estimator& estimator = find_estimator(kSeveralPositives, options.estimator);
  const EstimatorTraits& traits = estimator.traits;
  const bool sums_positives = options.positives == "sum";
  TORCH_CHECK_VALUE(!sums_positives || !traits.has_noise, kSeveralPositives,
                    ": expected positives=\"mean\" with estimator \"", estimator.name,
                    "\", got \"sum\"");
  for (const CandidateSet& set : sets) {
    TORCH_CHECK_VALUE(!set.target_log_count.defined() ||
                          set.target_log_count.sym_sizes() == positives.sym_sizes(),
                      kSeveralPositives, ": expected target_log_count of a set for each positive, ",
                      positives.sym_sizes(), ", got shape ", set.target_log_count.sym_sizes());
  }
  const c10::SymInt queries = positives.sym_size(0), width = positives.sym_size(1);

  // Scores the positives [Q, T] and the candidates [Q, C] together, so that each row of the table
  // is read once.
  Proposal sets_without_targets = sets;
  for (CandidateSet& set : sets_without_targets) {
    set.target_log_count = Tensor();
  }
  const Candidates columns = arrange_columns(sets_without_targets, queries, {});
  const Tensor counts = positives.ge(0), known = positives.clamp_min(0);
  const Tensor flat = input.reshape_symint({queries, input.sym_size(-1)});
  // Ignored queries may hold NaN.
  const Tensor rows =
      at::where(counts.any(1, /*keepdim=*/true), flat, at::zeros({}, flat.options()));
  const Tensor ids =
      is_defined(columns.private_ids) ? at::cat({known, *columns.private_ids}, 1) : known;
  Tensor scores =
      candidate_scores(rows, weight, bias, ids, columns.shared_ids, options.sparse_grad);
  scores = transform_logits(scores, options);
  scores = is_defined(log_z) ? scores - *log_z : scores;
  const Tensor positive_scores = scores.narrow_symint(1, 0, width);
  const Tensor scores_of_candidates = scores.narrow_symint(1, width, scores.sym_size(1) - width);

  // One row per positive, or one per query if all positives are one class.
  const RowTargets targets{
      positives,
      sums_positives ? representative_column(sets, positives)
                     : at::arange(width, positives.options()).expand_symint({queries, width})};
  const bool removes = options.remove_accidental_hits;
  const bool renormalizes = std::count_if(sets.begin(), sets.end(), is_draw) == 1;
  Proposal row_sets;
  for (const CandidateSet& set : sets) {
    const bool removes_hits = !sums_positives ||
        (removes && (set.distinct ? traits.drops_distinct_hits : traits.drops_drawn_hits));
    row_sets.push_back(set_of_rows(set, targets, removes_hits, renormalizes && is_draw(set),
                                   scores.scalar_type()));
    if (sums_positives && traits.corrects_target && row_sets.back().target_log_count.defined()) {
      row_sets.back().target_log_count.fill_(-kInfinite); // joint_score has corrected the score
    }
  }
  const Tensor score = sums_positives
      ? joint_score(positive_scores, positives, sets, traits.corrects_target)
      : positive_scores;
  const c10::SymInt rows_per_query = score.sym_size(1);
  const Tensor matrix = at::cat({score.unsqueeze(2),
                                 scores_of_candidates.unsqueeze(1).expand_symint(
                                     {queries, rows_per_query, scores_of_candidates.sym_size(1)})},
                                2)
                            .flatten(0, 1);
  const Tensor row_target = targets.gather(known).flatten();
  const Candidates candidates = arrange_columns(row_sets, queries * rows_per_query, traits);
  check_candidates(kSeveralPositives, "input", matrix, row_target, candidates, options);
  const Tensor loss =
      loss_of_scores({matrix, row_target, candidates, options, estimator}, options.z_loss);
  return {loss.reshape_symint(score.sym_sizes()), positive_scores, score};
}

Tensor several_positives_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                              const Tensor& target, const Proposal& sets,
                              const SampledSoftmaxOptions& options,
                              const OptionalTensor& class_weight, const OptionalTensor& log_z) {
  check_positives(kSeveralPositives, options, class_weight, options.label_smoothing);
  const Tensor positives = distinct_positives(target, options.ignore_index);
  const Tensor loss =
      losses_of_positives(input, weight, bias, positives, sets, options, log_z).loss;
  const Tensor shares = positive_shares(positives, options, class_weight, loss.scalar_type());
  const Tensor query_loss = at::where(shares.eq(0), 0.0, loss * shares).sum(1);
  return reduced_positives(kSeveralPositives, query_loss, shares, options.reduction,
                           target.sym_sizes().slice(0, target.dim() - 1));
}

} // namespace xsoftmax
