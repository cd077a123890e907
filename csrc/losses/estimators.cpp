#include "losses/estimators.h"

#include "losses/logit_transform.h"

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

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Share of each class in the estimated mean of all scores: weight 1 for the target, e^log_weight for a candidate, over their sum.
struct MeanShares { Tensor target, score; };

MeanShares mean_shares(const CandidateBatch& batch) {
  const Tensor weight = batch.log_weight.exp();
  const Tensor total = weight.sum(1) + 1.0;
  return {total.reciprocal(), weight / total.unsqueeze(1)};
}

Tensor softmax_normalizer(const CandidateBatch& batch) { return at::logsumexp(at::cat({batch.target.unsqueeze(1), batch.adjusted}, 1), 1); }

// -log of the softmax over {target} and the weighted candidates. Label smoothing e: (1 - e) times that, and e times
// (log normaliser - mean score), the mean over all classes estimated with the same weights.
Tensor softmax_loss(const CandidateBatch& batch) {
  const Tensor normalizer = softmax_normalizer(batch);
  if (batch.label_smoothing == 0) {
    return normalizer - batch.target;
  }
  const auto [target, score] = mean_shares(batch);
  const Tensor mean = target * batch.target + at::where(score.eq(0), 0.0, score * batch.score).sum(1);
  return normalizer - (1 - batch.label_smoothing) * batch.target - batch.label_smoothing * mean;
}

// The same from the log of the sum over the candidates, without label smoothing.
Tensor softmax_of_sum(const Tensor& target, const Tensor& log_sum) { return at::logaddexp(target, log_sum) - target; }

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
Tensor logistic_of_sum(const Tensor& target, const Tensor& sum) { return at::softplus(-target) + sum; }
Tensor logistic_loss(const CandidateBatch& batch) { return logistic_of_sum(batch.target, at::softplus(batch.adjusted).sum(1)); }

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

Tensor importance_of_sum(const Tensor& target, const Tensor& log_sum) { return at::where(log_sum.isneginf(), 0.0, log_sum - target); }

// The normaliser estimated from the draws alone, hits among them (Bengio and Senecal, 2003).
Tensor importance_normalizer(const CandidateBatch& batch) {
  const Tensor normalizer = at::logsumexp(batch.adjusted, 1);
  return at::where(normalizer.isneginf(), 0.0, normalizer);
}

Tensor importance_loss(const CandidateBatch& batch) { return importance_of_sum(batch.target, at::logsumexp(batch.adjusted, 1)); }

EstimatorGradient importance_gradient(const CandidateBatch& batch) {
  const Tensor normalizer = at::logsumexp(batch.adjusted, 1, true), none = normalizer.isneginf();
  return {at::where(none, 0.0, -at::ones_like(normalizer)).squeeze(1), at::where(none, 0.0, (batch.adjusted - normalizer).exp())};
}

// CANE (Algorithm 1): the distinct candidates are C, the n draws the noise, from q. With A the sum of e^score over C and the target, and
// m_j = s_j - log q_j:
//     y in C:  mean_j log(A + e^m_j) - s_y
//     else:    log(sum over C of e^score + e^m_y) - s_y: the target is its own noise
// or, with the log of the mean, which has less noise of its own:
//     y in C:  log(A + mean_j e^m_j) - s_y
//     else:    log(sum over C of e^score + mean_j e^m_j) - s_y, the target in the place of the first draw
// The optimum of both is the softmax, for any n and q: what the targets outside C put on a slot of the noise is what those in C leave to it.
struct Cane {
  Tensor draws;            // [Q], at least 1
  Tensor distinct;         // [Q, C] adjusted, -inf for draws
  Tensor noise;            // [Q, C] m_j, -inf for candidates
  Tensor log_a;            // [Q]
  Tensor corrected_target; // [Q] of a target that is not in C: its log term in the normaliser
  Tensor others;           // [Q, C] the log terms of the candidates beside it
  Tensor outside;          // [Q] log of the sum of all these terms

  Cane(const CandidateBatch& batch, bool mean_of_logs) : draws(batch.draws.clamp_min(1)) {
    const Tensor log_draws = draws.log();
    distinct = batch.adjusted.masked_fill(batch.drawn, -kInfinity);
    noise = (batch.adjusted + log_draws.unsqueeze(1)).masked_fill(batch.drawn.logical_not(), -kInfinity);
    log_a = at::logsumexp(at::cat({batch.target.unsqueeze(1), distinct}, 1), 1);
    // A target that no draw can give owes no correction.
    const Tensor count = mean_of_logs ? batch.target_log_count - log_draws : batch.target_log_count;
    corrected_target = batch.target - at::where(batch.target_log_count.isneginf(), 0.0, count);
    const Tensor live = batch.drawn.logical_and(batch.adjusted.isneginf().logical_not()), first = live.logical_and(live.cumsum(1).eq(1));
    others = mean_of_logs ? distinct : batch.adjusted.masked_fill(first, -kInfinity);
    outside = at::logsumexp(at::cat({corrected_target.unsqueeze(1), others}, 1), 1);
  }
};

template <bool kMeanOfLogs>
Tensor cane_normalizer(const CandidateBatch& batch) {
  const Cane parts(batch, kMeanOfLogs);
  Tensor inside = at::logsumexp(at::cat({batch.target.unsqueeze(1), batch.adjusted}, 1), 1);
  if (kMeanOfLogs) {
    inside = parts.log_a + at::softplus(parts.noise - parts.log_a.unsqueeze(1)).sum(1) / parts.draws;
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
    const Tensor share = (parts.noise - parts.log_a.unsqueeze(1)).sigmoid() / parts.draws.unsqueeze(1);
    const Tensor left = 1 - share.sum(1); // for C and the target
    target = (batch.target - parts.log_a).exp() * left;
    score = (parts.distinct - parts.log_a.unsqueeze(1)).exp() * left.unsqueeze(1) + share;
  } else {
    const Tensor probability = at::cat({batch.target.unsqueeze(1), batch.adjusted}, 1).softmax(1);
    target = probability.select(1, 0);
    score = probability.narrow(1, 1, batch.adjusted.size(1));
  }
  const Tensor outside_target = (parts.corrected_target - parts.outside).exp();
  const Tensor outside_score = (parts.others - parts.outside.unsqueeze(1)).exp();
  return {at::where(batch.covered, target, outside_target) - 1, at::where(batch.covered.unsqueeze(1), score, outside_score)};
}

// An estimator that lowers the target's score, too, tells a target from draws that could all have been it: the classes of a set are told
// apart by their p / c exactly where a class stands once for the target and once for each draw that gave it. A distinct set holds it once.
// Beside a head the set must hold as many other classes whether the target is in the head or not: else it tells them apart by its size.
const Estimator kEstimators[] = {
    {"sampled_softmax",
     {.renormalizes = true, .weighs = true, .drops_distinct_hits = true, .drops_drawn_hits = true, .smooths = true},
     softmax_loss,
     softmax_gradient,
     RowLoss::Softmax,
     Joined::LogSumExp,
     softmax_of_sum,
     softmax_normalizer},
    {"ranking",
     {.corrects_target = true, .needs_target_count = true, .weighs = true, .drops_distinct_hits = true, .takes_a_draw = true, .smooths = true},
     softmax_loss,
     softmax_gradient,
     RowLoss::Softmax,
     Joined::LogSumExp,
     softmax_of_sum,
     softmax_normalizer},
    {"nce",
     {.corrects_target = true, .needs_target_count = true, .weighs = true, .drops_distinct_hits = true},
     logistic_loss,
     logistic_gradient,
     RowLoss::Logistic,
     Joined::Softplus,
     logistic_of_sum},
    {"negative_sampling",
     {.drops_distinct_hits = true, .drops_drawn_hits = true},
     logistic_loss,
     logistic_gradient,
     RowLoss::Logistic,
     Joined::Softplus,
     logistic_of_sum},
    {"one_vs_each",
     {.renormalizes = true, .weighs = true, .drops_distinct_hits = true, .drops_drawn_hits = true},
     one_vs_each_loss,
     one_vs_each_gradient,
     RowLoss::OneVsEach},
    {"blackout",
     {.corrects_target = true, .needs_target_count = true, .weighs = true, .drops_distinct_hits = true, .drops_drawn_hits = true},
     blackout_loss,
     blackout_gradient,
     RowLoss::BlackOut},
    {"importance", {.weighs = true}, importance_loss, importance_gradient, RowLoss::Importance, Joined::LogSumExp, importance_of_sum, importance_normalizer},
    {"cane",
     {.needs_target_count = true, .weighs = true, .drops_distinct_hits = true, .has_noise = true},
     cane_loss<true>,
     cane_gradient<true>,
     RowLoss::Cane,
     std::nullopt,
     nullptr,
     cane_normalizer<true>},
    {"cane_log_of_mean",
     {.needs_target_count = true, .weighs = true, .drops_distinct_hits = true, .has_noise = true},
     cane_loss<false>,
     cane_gradient<false>,
     RowLoss::CaneLogOfMean,
     std::nullopt,
     nullptr,
     cane_normalizer<false>},
};

struct Registry {
  std::mutex mutex;
  std::deque<Estimator> estimators{std::begin(kEstimators), std::end(kEstimators)}; // whose entries stay where they are

  const Estimator* find(std::string_view name) const {
    const auto found = std::find_if(estimators.begin(), estimators.end(), [&](const Estimator& estimator) { return estimator.name == name; });
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
  TORCH_CHECK_VALUE(z_loss == 0 || estimator.log_normalizer != nullptr, op, ": expected z_loss of 0 with estimator \"", estimator.name,
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

void register_estimator(const std::string& name, const EstimatorTraits& traits, std::function<Tensor(const CandidateBatch&)> loss) {
  TORCH_CHECK_VALUE(loss != nullptr, "register_estimator: expected a function for \"", name, "\", got none");
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  TORCH_CHECK_VALUE(known.find(name) == nullptr, "register_estimator: expected a name that is not taken, got \"", name, "\"");
  known.estimators.push_back({name, traits, std::move(loss)});
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("estimator_names() -> str[]", estimator_names);
  m.def("estimator_smooths(str estimator) -> bool", [](std::string_view name) { return find_estimator("estimator_smooths", name).traits.smooths; });
  m.def("estimator_has_normalizer(str estimator) -> bool",
        [](std::string_view name) { return find_estimator("estimator_has_normalizer", name).log_normalizer != nullptr; });
  m.def("estimator_has_noise(str estimator) -> bool", [](std::string_view name) { return find_estimator("estimator_has_noise", name).traits.has_noise; });
}

} // namespace xsoftmax
