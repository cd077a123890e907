#include "losses/estimators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <limits>
#include <string>

namespace xsoftmax {
namespace {

using at::Tensor;

// Share of each class in the estimated mean of all scores: weight 1 for the target, e^log_weight for a candidate, over their sum.
struct MeanShares {
  Tensor target, score;
};

MeanShares mean_shares(const CandidateBatch& batch) {
  const Tensor weight = batch.log_weight.exp();
  const Tensor total = weight.sum(1) + 1.0;
  return {total.reciprocal(), weight / total.unsqueeze(1)};
}

// -log of the softmax over {target} and the weighted candidates. Label smoothing e: (1 - e) times that, and e times
// (log normaliser - mean score), the mean over all classes estimated with the same weights.
Tensor softmax_loss(const CandidateBatch& batch) {
  const Tensor normalizer = at::logsumexp(at::cat({batch.target.unsqueeze(1), batch.adjusted}, 1), 1);
  if (batch.label_smoothing == 0) {
    return normalizer - batch.target;
  }
  const auto [target, score] = mean_shares(batch);
  const Tensor mean = target * batch.target + at::where(score.eq(0), 0.0, score * batch.score).sum(1);
  return normalizer - (1 - batch.label_smoothing) * batch.target - batch.label_smoothing * mean;
}

EstimatorGradient softmax_gradient(const CandidateBatch& batch) {
  const Tensor probability = at::cat({batch.target.unsqueeze(1), batch.adjusted}, 1).softmax(1);
  Tensor target = probability.select(1, 0) - (1 - batch.label_smoothing);
  Tensor score = probability.narrow(1, 1, batch.adjusted.size(1));
  if (batch.label_smoothing != 0) {
    const auto shares = mean_shares(batch);
    target = target - batch.label_smoothing * shares.target;
    score = score - batch.label_smoothing * shares.score;
  }
  return {target, score};
}

// Binary classification, target against candidates. NCE (Gutmann and Hyvarinen, 2012; with log Z = 0) lowers every score by its log
// expected count; negative sampling (Mikolov et al., 2013) takes them as they are.
Tensor logistic_loss(const CandidateBatch& batch) {
  return at::softplus(-batch.target) + at::softplus(batch.adjusted).sum(1);
}

EstimatorGradient logistic_gradient(const CandidateBatch& batch) { return {batch.target.sigmoid() - 1, batch.adjusted.sigmoid()}; }

// sum_j 1 / c_j softplus(s_j - s_y): the bound of Titsias, 2016.
Tensor one_vs_each_loss(const CandidateBatch& batch) {
  const Tensor weight = batch.log_weight.exp();
  return at::where(weight.eq(0), 0.0, weight * at::softplus(batch.score - batch.target.unsqueeze(1))).sum(1);
}

EstimatorGradient one_vs_each_gradient(const CandidateBatch& batch) {
  const Tensor weight = batch.log_weight.exp();
  const Tensor score = at::where(weight.eq(0), 0.0, weight * (batch.score - batch.target.unsqueeze(1)).sigmoid());
  return {-score.sum(1), score};
}

// Discriminative loss over the weighted softmax p of {target} and candidates: -log p_y - sum_j log(1 - p_j) (Ji et al., 2016).
// With b the best candidate where it is above the target: log(1 - p_b) is the log sum of the others less that of all, since 1 less a p near
// 1 has no digits; and odds_b = p_b / (1 - p_b), which may be beyond any float, stands in the gradient only times 1 - p_b or p_i.
struct BlackOut {
  Tensor probability;    ///< [Q, 1 + C]
  Tensor best;           ///< [Q, 1 + C]: true at b
  Tensor others_share;   ///< [Q, 1 + C]: p_i / (1 - p_b), 0 at b; 0 without a b
  Tensor log_normalizer; ///< [Q]
  Tensor log_others;     ///< [Q]: log sum of the others; without a b of any value
  Tensor odds;           ///< [Q, 1 + C]: p_j / (1 - p_j) of the other candidates, else 0

  explicit BlackOut(const CandidateBatch& batch) {
    const Tensor all = at::cat({batch.target.unsqueeze(1), batch.adjusted}, 1), nowhere = at::zeros_like(all, at::kBool);
    best = nowhere.scatter(1, all.argmax(1, true), true);
    best.select(1, 0).fill_(false);
    const Tensor others = all.masked_fill(best, -std::numeric_limits<double>::infinity()), exists = best.any(1, true);
    probability = all.softmax(1);
    others_share = at::where(exists, others.softmax(1), 0.0);
    log_normalizer = at::logsumexp(all, 1);
    log_others = at::logsumexp(others, 1);
    odds = at::where(best, 0.0, probability / (1 - probability));
    odds.select(1, 0).fill_(0.0);
  }
};

Tensor blackout_loss(const CandidateBatch& batch) {
  const BlackOut found(batch);
  const Tensor counted = found.odds.narrow(1, 1, batch.adjusted.size(1)); // log(1 - p) = -log(1 + odds)
  const Tensor of_best = at::where(found.best.any(1), found.log_normalizer - found.log_others, 0.0);
  return found.log_normalizer - batch.target + counted.log1p().sum(1) + of_best;
}

EstimatorGradient blackout_gradient(const CandidateBatch& batch) {
  const BlackOut found(batch);
  const Tensor of_best = at::where(found.best, found.probability, 0.0), left = 1 - found.odds.sum(1, true);
  const Tensor gradient = found.probability * left + found.odds + of_best - of_best.sum(1, true) * found.others_share;
  return {gradient.select(1, 0) - 1, gradient.narrow(1, 1, batch.adjusted.size(1))};
}

// The normaliser estimated from the draws alone, hits among them (Bengio and Senecal, 2003).
Tensor importance_loss(const CandidateBatch& batch) {
  const Tensor normalizer = at::logsumexp(batch.adjusted, 1);
  return at::where(normalizer.isneginf(), 0.0, normalizer - batch.target);
}

EstimatorGradient importance_gradient(const CandidateBatch& batch) {
  const Tensor normalizer = at::logsumexp(batch.adjusted, 1, true), none = normalizer.isneginf();
  return {at::where(none, 0.0, -at::ones_like(normalizer)).squeeze(1), at::where(none, 0.0, (batch.adjusted - normalizer).exp())};
}

// An estimator that lowers the target's score, too, tells a target from draws that could all have been it: the classes of a set are told
// apart by their p / c exactly where a class stands once for the target and once for each draw that gave it. A distinct set holds it once.
constexpr std::array<Estimator, 7> kEstimators{{
    // corrects_target, renormalizes, weighs, drops_distinct_hits, drops_drawn_hits, smooths
    {"sampled_softmax", false, true, true, true, true, true, softmax_loss, softmax_gradient, RowLoss::Softmax},
    {"ranking", true, false, true, true, false, true, softmax_loss, softmax_gradient, RowLoss::Softmax},
    {"nce", true, false, true, true, false, false, logistic_loss, logistic_gradient, RowLoss::Logistic},
    {"negative_sampling", false, false, false, true, true, false, logistic_loss, logistic_gradient, RowLoss::Logistic},
    {"one_vs_each", false, true, true, true, true, false, one_vs_each_loss, one_vs_each_gradient, RowLoss::OneVsEach},
    {"blackout", true, false, true, true, true, false, blackout_loss, blackout_gradient, RowLoss::BlackOut},
    {"importance", false, false, true, false, false, false, importance_loss, importance_gradient, RowLoss::Importance},
}};

} // namespace

const Estimator& find_estimator(const char* op, std::string_view name) {
  std::string names;
  for (const Estimator& estimator : kEstimators) {
    if (name == estimator.name) {
      return estimator;
    }
    names += (names.empty() ? "\"" : ", \"") + std::string(estimator.name) + "\"";
  }
  TORCH_CHECK_VALUE(false, op, ": expected estimator to be one of ", names, ", got \"", name, "\"");
}

std::vector<std::string> estimator_names() {
  std::vector<std::string> names;
  for (const Estimator& estimator : kEstimators) {
    names.emplace_back(estimator.name);
  }
  return names;
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("estimator_names() -> str[]", estimator_names);
  m.def("estimator_corrects_target(str estimator) -> bool",
        [](std::string_view name) { return find_estimator("estimator_corrects_target", name).corrects_target; });
}

} // namespace xsoftmax
