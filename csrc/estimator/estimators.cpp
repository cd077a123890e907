#include "estimator/estimators.h"

#include "estimator/logit_transform.h"
#include "op/checks.h"
#include "op/operators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <limits>
#include <mutex>
#include <string>

namespace xsoftmax {
namespace {

using at::Tensor;

// The share of each class in the estimated mean score of all classes: weight 1 for the target,
// e^log_weight for a candidate, divided by the sum of the weights.
struct MeanShares { Tensor target, score; };

MeanShares mean_shares(const CandidateBatch& batch) {
  const Tensor weight = batch.log_weight.exp();
  const Tensor total = weight.sum(1) + 1.0;
  return {total.reciprocal(), weight / total.unsqueeze(1)};
}

Tensor softmax_normalizer(const CandidateBatch& batch) {
  return at::logsumexp(at::cat({batch.target.unsqueeze(1), batch.adjusted}, 1), 1);
}

// Returns -log of the target's probability in the softmax over {target} and the weighted
// candidates. With label smoothing e: (1 - e) times that plus e times (log normaliser - mean
// score), where the mean over all classes is estimated with the same weights.
Tensor softmax_loss(const CandidateBatch& batch) {
  const Tensor normalizer = softmax_normalizer(batch);
  if (batch.label_smoothing == 0) {
    return normalizer - batch.target;
  }
  const auto [target, score] = mean_shares(batch);
  const Tensor mean =
      target * batch.target + at::where(score.eq(0), 0.0, score * batch.score).sum(1);
  return normalizer - (1 - batch.label_smoothing) * batch.target - batch.label_smoothing * mean;
}

// Returns softmax_loss without label smoothing from the logsumexp over the candidates.
Tensor softmax_of_sum(const Tensor& target, const Tensor& log_sum) {
  return at::logaddexp(target, log_sum) - target;
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

// Binary classification of the target against the candidates. NCE (Gutmann and Hyvarinen, 2012;
// with log Z = 0) subtracts the log expected count from every score; negative sampling (Mikolov et
// al., 2013) uses the scores unchanged.
Tensor logistic_of_sum(const Tensor& target, const Tensor& sum) {
  return at::softplus(-target) + sum;
}
Tensor logistic_loss(const CandidateBatch& batch) {
  return logistic_of_sum(batch.target, at::softplus(batch.adjusted).sum(1));
}

EstimatorGradient logistic_gradient(const CandidateBatch& batch) {
  return {batch.target.sigmoid() - 1, batch.adjusted.sigmoid()};
}

// Returns sum_j 1 / c_j softplus(s_j - s_y), the bound of Titsias, 2016.
Tensor one_vs_each_loss(const CandidateBatch& batch) {
  const Tensor weight = batch.log_weight.exp();
  return at::where(weight.eq(0), 0.0,
                   weight * at::softplus(batch.score - batch.target.unsqueeze(1)))
      .sum(1);
}

EstimatorGradient one_vs_each_gradient(const CandidateBatch& batch) {
  const Tensor weight = batch.log_weight.exp();
  const Tensor score =
      at::where(weight.eq(0), 0.0, weight * (batch.score - batch.target.unsqueeze(1)).sigmoid());
  return {-score.sum(1), score};
}

// The discriminative loss -log p_y - sum_j log(1 - p_j) over the weighted softmax p of {target} and
// candidates (Ji et al., 2016). Let b be the best candidate if it scores above the target. Two
// steps keep the arithmetic stable when p_b is near 1:
//   - log(1 - p_b) is the logsumexp without b minus the logsumexp of all, because 1 - p_b cancels.
//   - odds_b = p_b / (1 - p_b) may overflow. The gradient contains it only multiplied by 1 - p_b or
//     p_i, so the products are computed instead.
struct BlackOut {
  Tensor probability; ///< [Q, 1 + C]
  Tensor best; ///< [Q, 1 + C]: true at b
  Tensor others_share; ///< [Q, 1 + C]: p_i / (1 - p_b), 0 at b; all 0 if there is no b
  Tensor log_normalizer; ///< [Q]
  Tensor log_others; ///< [Q]: logsumexp without b; unspecified if there is no b
  Tensor odds; ///< [Q, 1 + C]: p_j / (1 - p_j) for candidates other than b, else 0

  explicit BlackOut(const CandidateBatch& batch) {
    const Tensor all = at::cat({batch.target.unsqueeze(1), batch.adjusted}, 1),
                 all_false = at::zeros_like(all, at::kBool);
    best = all_false.scatter(1, all.argmax(1, true), true);
    best.select(1, 0).fill_(false);
    const Tensor others = all.masked_fill(best, -std::numeric_limits<double>::infinity()),
                 exists = best.any(1, true);
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
  const Tensor counted =
      found.odds.narrow(1, 1, batch.adjusted.size(1)); // log(1 - p) = -log(1 + odds)
  const Tensor best_probability =
      at::where(found.best.any(1), found.log_normalizer - found.log_others, 0.0);
  return found.log_normalizer - batch.target + counted.log1p().sum(1) + best_probability;
}

EstimatorGradient blackout_gradient(const CandidateBatch& batch) {
  const BlackOut found(batch);
  const Tensor best_probability = at::where(found.best, found.probability, 0.0),
               left = 1 - found.odds.sum(1, true);
  const Tensor gradient = found.probability * left + found.odds + best_probability -
      best_probability.sum(1, true) * found.others_share;
  return {gradient.select(1, 0) - 1, gradient.narrow(1, 1, batch.adjusted.size(1))};
}

Tensor importance_of_sum(const Tensor& target, const Tensor& log_sum) {
  return at::where(log_sum.isneginf(), 0.0, log_sum - target);
}

// Returns the log normaliser estimated from the candidates only, including hits (Bengio and
// Senecal, 2003); 0 if there are none.
Tensor importance_normalizer(const CandidateBatch& batch) {
  const Tensor normalizer = at::logsumexp(batch.adjusted, 1);
  return at::where(normalizer.isneginf(), 0.0, normalizer);
}

Tensor importance_loss(const CandidateBatch& batch) {
  return importance_of_sum(batch.target, at::logsumexp(batch.adjusted, 1));
}

EstimatorGradient importance_gradient(const CandidateBatch& batch) {
  const Tensor normalizer = at::logsumexp(batch.adjusted, 1, true), none = normalizer.isneginf();
  return {at::where(none, 0.0, -at::ones_like(normalizer)).squeeze(1),
          at::where(none, 0.0, (batch.adjusted - normalizer).exp())};
}

// CANE (Han et al., 2018, Algorithm 1). The distinct candidates are C; the n drawn columns are the
// noise, sampled from q. With A the sum of e^score over C and the target, and m_j = s_j - log q_j:
//     y in C:  mean_j log(A + e^m_j) - s_y
//     else:    log(sum over C of e^score + e^m_y) - s_y, where the target is its own noise
// The variant with the log of the mean has less variance:
//     y in C:  log(A + mean_j e^m_j) - s_y
//     else:    log(sum over C of e^score + mean_j e^m_j) - s_y, where the target replaces the first
//              noise sample
// The softmax is the optimum of both for any n and q, because at the softmax the gradients that a
// noise sample receives from targets outside C cancel those from targets in C.
struct Cane {
  Tensor draws; // [Q] number of noise samples, at least 1
  Tensor distinct; // [Q, C] adjusted, -inf for noise
  Tensor noise; // [Q, C] m_j, -inf for the columns of C
  Tensor log_a; // [Q]
  Tensor corrected_target; // [Q] log term of the target in the normaliser if it is not in C
  Tensor others; // [Q, C] log terms of the candidates in that case
  Tensor outside; // [Q] logsumexp of corrected_target and others

  Cane(const CandidateBatch& batch, bool mean_of_logs) : draws(batch.draws.clamp_min(1)) {
    const Tensor log_draws = draws.log();
    distinct = batch.adjusted.masked_fill(batch.drawn, -kInfinite);
    noise = (batch.adjusted + log_draws.unsqueeze(1))
                .masked_fill(batch.drawn.logical_not(), -kInfinite);
    log_a = at::logsumexp(at::cat({batch.target.unsqueeze(1), distinct}, 1), 1);
    // A target that cannot be sampled (log count -inf) is not corrected.
    const Tensor count = mean_of_logs ? batch.target_log_count - log_draws : batch.target_log_count;
    corrected_target = batch.target - at::where(batch.target_log_count.isneginf(), 0.0, count);
    const Tensor live = batch.drawn.logical_and(batch.adjusted.isneginf().logical_not()),
                 first = live.logical_and(live.cumsum(1).eq(1));
    others = mean_of_logs ? distinct : batch.adjusted.masked_fill(first, -kInfinite);
    outside = at::logsumexp(at::cat({corrected_target.unsqueeze(1), others}, 1), 1);
  }
};

template <bool kMeanOfLogs>
Tensor cane_normalizer(const CandidateBatch& batch) {
  const Cane parts(batch, kMeanOfLogs);
  Tensor inside = at::logsumexp(at::cat({batch.target.unsqueeze(1), batch.adjusted}, 1), 1);
  if (kMeanOfLogs) {
    inside =
        parts.log_a + at::softplus(parts.noise - parts.log_a.unsqueeze(1)).sum(1) / parts.draws;
  }
  return at::where(batch.covered, inside, parts.outside);
}

template <bool kMeanOfLogs>
Tensor cane_loss(const CandidateBatch& batch) {
  return cane_normalizer<kMeanOfLogs>(batch) - batch.target;
}

template <bool kMeanOfLogs>
EstimatorGradient cane_gradient(const CandidateBatch& batch) {
  const Cane parts(batch, kMeanOfLogs);
  Tensor target, score;
  if (kMeanOfLogs) {
    const Tensor share =
        (parts.noise - parts.log_a.unsqueeze(1)).sigmoid() / parts.draws.unsqueeze(1);
    const Tensor left = 1 - share.sum(1); // share of C and the target
    target = (batch.target - parts.log_a).exp() * left;
    score = (parts.distinct - parts.log_a.unsqueeze(1)).exp() * left.unsqueeze(1) + share;
  } else {
    const Tensor probability = at::cat({batch.target.unsqueeze(1), batch.adjusted}, 1).softmax(1);
    target = probability.select(1, 0);
    score = probability.narrow(1, 1, batch.adjusted.size(1));
  }
  const Tensor outside_target = (parts.corrected_target - parts.outside).exp();
  const Tensor outside_score = (parts.others - parts.outside.unsqueeze(1)).exp();
  return {at::where(batch.covered, target, outside_target) - 1,
          at::where(batch.covered.unsqueeze(1), score, outside_score)};
}

Estimator softmax_estimator(const char* name, const EstimatorTraits& traits) {
  return {.name = name,
          .traits = traits,
          .loss = softmax_loss,
          .gradient = softmax_gradient,
          .row_loss = RowLoss::Softmax,
          .combination = Combination::LogSumExp,
          .joined_loss = softmax_of_sum,
          .log_normalizer = softmax_normalizer};
}

Estimator logistic_estimator(const char* name, const EstimatorTraits& traits) {
  return {.name = name,
          .traits = traits,
          .loss = logistic_loss,
          .gradient = logistic_gradient,
          .row_loss = RowLoss::Logistic,
          .combination = Combination::Softplus,
          .joined_loss = logistic_of_sum};
}

template <bool kMeanOfLogs>
Estimator cane_estimator(const char* name) {
  return {.name = name,
          .traits = {.needs_target_count = true,
                     .weighs = true,
                     .drops_distinct_hits = true,
                     .has_noise = true},
          .loss = cane_loss<kMeanOfLogs>,
          .gradient = cane_gradient<kMeanOfLogs>,
          .row_loss = kMeanOfLogs ? RowLoss::Cane : RowLoss::CaneLogOfMean,
          .log_normalizer = cane_normalizer<kMeanOfLogs>};
}

// Estimators that also correct the target's score (corrects_target) learn to tell the target from
// samples of the same distribution. Their optimum is the softmax only if a class occurs in a set
// once as the target and once per time it was sampled: hits among samples with replacement
// therefore stay, whereas a distinct set holds the class once. With a head (distinct candidates),
// the number of other classes must not depend on whether the head contains the target, because
// otherwise the size of the set would reveal it: the target then replaces a sample
// (replaces_a_sample).
const Estimator kEstimators[] = {
    softmax_estimator("sampled_softmax",
                      {.renormalizes = true,
                       .weighs = true,
                       .drops_distinct_hits = true,
                       .drops_drawn_hits = true,
                       .smooths = true}),
    softmax_estimator("ranking",
                      {.corrects_target = true,
                       .needs_target_count = true,
                       .weighs = true,
                       .drops_distinct_hits = true,
                       .replaces_a_sample = true,
                       .smooths = true}),
    logistic_estimator("nce",
                       {.corrects_target = true,
                        .needs_target_count = true,
                        .weighs = true,
                        .drops_distinct_hits = true}),
    logistic_estimator("negative_sampling",
                       {.drops_distinct_hits = true, .drops_drawn_hits = true}),
    {"one_vs_each",
     {.renormalizes = true, .weighs = true, .drops_distinct_hits = true, .drops_drawn_hits = true},
     one_vs_each_loss,
     one_vs_each_gradient,
     RowLoss::OneVsEach},
    {"blackout",
     {.corrects_target = true,
      .needs_target_count = true,
      .weighs = true,
      .drops_distinct_hits = true,
      .drops_drawn_hits = true},
     blackout_loss,
     blackout_gradient,
     RowLoss::BlackOut},
    {"importance",
     {.weighs = true},
     importance_loss,
     importance_gradient,
     RowLoss::Importance,
     Combination::LogSumExp,
     importance_of_sum,
     importance_normalizer},
    cane_estimator</*kMeanOfLogs=*/true>("cane"),
    cane_estimator</*kMeanOfLogs=*/false>("cane_log_of_mean"),
};

struct Registry {
  std::mutex mutex;
  // A deque, because its entries do not move when one is added.
  std::deque<Estimator> estimators{std::begin(kEstimators), std::end(kEstimators)};

  const Estimator* find(std::string_view name) const {
    const auto found =
        std::find_if(estimators.begin(), estimators.end(),
                     [&](const Estimator& estimator) { return estimator.name == name; });
    return found == estimators.end() ? nullptr : &*found;
  }
};

Registry& registry() {
  static Registry registry;
  return registry;
}

} // namespace

const Estimator& find_estimator(const char* op, std::string_view name) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  if (const Estimator* found = known.find(name)) {
    return *found;
  }
  std::string names;
  for (const Estimator& estimator : known.estimators) {
    names += (names.empty() ? "\"" : ", \"") + estimator.name + "\"";
  }
  TORCH_CHECK_VALUE(false, op, ": expected estimator to be one of ", names, ", got \"", name, "\"");
}

void check_z_loss(const char* op, double z_loss, const Estimator& estimator) {
  check_z_loss(op, z_loss);
  TORCH_CHECK_VALUE(z_loss == 0 || estimator.log_normalizer != nullptr, op,
                    ": expected z_loss of 0 with estimator \"", estimator.name,
                    "\", which has no log normaliser, got ", z_loss);
}

std::vector<std::string> estimator_names() {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  std::vector<std::string> names;
  for (const Estimator& estimator : known.estimators) {
    names.push_back(estimator.name);
  }
  return names;
}

void register_estimator(const std::string& name, const EstimatorTraits& traits,
                        std::function<Tensor(const CandidateBatch&)> loss) {
  TORCH_CHECK_VALUE(loss != nullptr, "register_estimator: expected a function for \"", name,
                    "\", got none");
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  TORCH_CHECK_VALUE(known.find(name) == nullptr,
                    "register_estimator: expected a name that is not taken, got \"", name, "\"");
  known.estimators.push_back({name, traits, std::move(loss)});
}

XSOFTMAX_OPERATORS(m) {
  m.def("estimator_names() -> str[]", estimator_names);
  m.def("estimator_smooths(str estimator) -> bool", [](std::string_view name) {
    return find_estimator("estimator_smooths", name).traits.smooths;
  });
  m.def("estimator_has_normalizer(str estimator) -> bool", [](std::string_view name) {
    return find_estimator("estimator_has_normalizer", name).log_normalizer != nullptr;
  });
  m.def("estimator_has_noise(str estimator) -> bool", [](std::string_view name) {
    return find_estimator("estimator_has_noise", name).traits.has_noise;
  });
}

} // namespace xsoftmax
