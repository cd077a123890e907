#include "losses/estimators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/where.h>
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

constexpr std::array<Estimator, 2> kEstimators{{
    {"sampled_softmax", false, true, softmax_loss, softmax_gradient, RowLoss::Softmax},
    {"ranking", true, false, softmax_loss, softmax_gradient, RowLoss::Softmax},
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

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) { m.def("estimator_names() -> str[]", estimator_names); }

} // namespace xsoftmax
