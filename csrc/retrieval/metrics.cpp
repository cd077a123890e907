#include <xsoftmax/ops.h>

#include "op/checks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace xsoftmax::metrics {
namespace {

using at::Tensor;

/// Predictions and right classes of the R queries that have a right class. Each right class is
/// listed once, padded with -1.
struct Hits {
  Tensor hits;      ///< float64 [R, k], 1 where a prediction is right
  Tensor sizes;     ///< int64 [R], the number of right classes
  Tensor predicted; ///< int64 [R, k]
  Tensor correct;     ///< int64 [R, T]
};

bool has_duplicates(const Tensor& sorted) {
  const int64_t last = sorted.size(1) - 1;
  const Tensor left = sorted.narrow(1, 0, last), next = sorted.narrow(1, 1, last);
  return left.eq(next).logical_and(left.ge(0)).any().item<bool>();
}

/// Sorts each row and replaces repeated classes by -1.
Tensor remove_duplicates(const Tensor& rows) {
  Tensor sorted = std::get<0>(rows.sort(1, /*descending=*/true)).clone();
  if (sorted.size(1) > 1) {
    const int64_t last = sorted.size(1) - 1;
    const Tensor is_repeated = sorted.narrow(1, 1, last).eq(sorted.narrow(1, 0, last));
    sorted.narrow(1, 1, last).masked_fill_(is_repeated, -1);
  }
  return sorted;
}

Hits hits_of(const char* name, const Tensor& predictions, const Tensor& truth, int64_t k) {
  TORCH_CHECK_VALUE(k >= 1, name, ": expected k of at least 1, got ", k);
  check::dtype(name, "predictions", predictions, at::kLong);
  check::dtype(name, "truth", truth, at::kLong);
  TORCH_CHECK_VALUE(predictions.dim() == 2 && predictions.size(1) >= k, name,
                    ": expected predictions of shape [Q, ", k, " or more], got ",
                    predictions.sizes());
  TORCH_CHECK_VALUE((truth.dim() == 1 || truth.dim() == 2) && truth.size(0) == predictions.size(0),
                    name, ": expected truth of shape [", predictions.size(0), "] or [",
                    predictions.size(0), ", T], got ", truth.sizes());
  const Tensor targets = truth.dim() == 1 ? truth.unsqueeze(1) : truth,
               best = predictions.narrow(1, 0, k);
  for (const auto& [argument, ids] :
       {std::pair{"predictions", best}, std::pair{"truth", targets}}) {
    TORCH_CHECK_VALUE(ids.numel() == 0 || ids.min().item<int64_t>() >= -1, name,
                      ": expected classes of 0 or more in ", argument, ", or -1 for none, got ",
                      ids.min().item<int64_t>());
  }
  TORCH_CHECK_VALUE(best.numel() == 0 || !has_duplicates(std::get<0>(best.sort(1))), name,
                    ": expected different predictions for a query, got one twice");
  const Tensor correct = remove_duplicates(targets), counts = correct.ge(0).sum(1),
               found = counts.gt(0).nonzero().squeeze(1);
  TORCH_CHECK_VALUE(found.numel() > 0, name,
                    ": expected a query for which a class is right, got none of ",
                    predictions.size(0));
  const Tensor predicted = best.index_select(0, found), classes = correct.index_select(0, found);
  const Tensor hits =
      predicted.unsqueeze(2).eq(classes.unsqueeze(1)).any(2).logical_and(predicted.ge(0));
  return {hits.to(at::kDouble), counts.index_select(0, found), predicted, classes};
}

} // namespace

double precision_at_k(const Tensor& predictions, const Tensor& truth, int64_t k) {
  return hits_of("precision_at_k", predictions, truth, k).hits.sum(1).div(k).mean().item<double>();
}

double recall_at_k(const Tensor& predictions, const Tensor& truth, int64_t k) {
  const Hits found = hits_of("recall_at_k", predictions, truth, k);
  return found.hits.sum(1).div(found.sizes).mean().item<double>();
}

double ndcg_at_k(const Tensor& predictions, const Tensor& truth, int64_t k) {
  const Hits found = hits_of("ndcg_at_k", predictions, truth, k);
  const Tensor discount = at::arange(2, k + 2, found.hits.options()).log2().reciprocal();
  const Tensor ideal = discount.cumsum(0).index_select(0, found.sizes.clamp_max(k) - 1);
  return found.hits.matmul(discount).div(ideal).mean().item<double>();
}

double psp_at_k(const Tensor& predictions, const Tensor& truth, int64_t k,
                const Tensor& propensity) {
  constexpr const char* name = "psp_at_k";
  const Hits found = hits_of(name, predictions, truth, k);
  check::floating(name, "propensity", propensity);
  const int64_t least =
      1 + std::max(found.correct.max().item<int64_t>(), found.predicted.max().item<int64_t>());
  TORCH_CHECK_VALUE(propensity.dim() == 1 && propensity.size(0) >= least, name,
                    ": expected propensity of shape [", least, " or more], got ",
                    propensity.sizes());
  TORCH_CHECK_VALUE(propensity.gt(0).logical_and(propensity.le(1)).all().item<bool>(), name,
                    ": expected propensity in (0, 1], got others");
  const Tensor gains = propensity.to(at::kDouble).reciprocal();
  const Tensor hit_gains = gains.take(found.predicted.clamp_min(0)).mul(found.hits);
  const Tensor correct_gains =
      gains.take(found.correct.clamp_min(0)).masked_fill(found.correct.lt(0), 0);
  const Tensor largest = std::get<0>(correct_gains.topk(std::min(k, correct_gains.size(1)), 1));
  return hit_gains.sum().div(largest.sum()).item<double>();
}

Tensor propensity(const Tensor& counts, int64_t num_examples, double a, double b) {
  constexpr const char* name = "propensity";
  TORCH_CHECK_VALUE(num_examples >= 3, name, ": expected num_examples of at least 3, got ",
                    num_examples);
  const Tensor numbers = counts.to(at::kDouble);
  TORCH_CHECK_VALUE(
      counts.dim() == 1 && numbers.ge(0).logical_and(numbers.isfinite()).all().item<bool>(), name,
      ": expected counts of shape [N], each finite and at least 0, got shape ", counts.sizes());
  TORCH_CHECK_VALUE(b > -1, name, ": expected b above -1, got ", b);
  const double c = (std::log(double(num_examples)) - 1) * std::pow(b + 1, a);
  return numbers.add(b).pow(-a).mul(c).add(1).reciprocal();
}

double coverage(const Tensor& candidates, const Tensor& target, int64_t ignore_index) {
  constexpr const char* name = "coverage";
  check::dtype(name, "candidates", candidates, at::kLong);
  check::dtype(name, "target", target, at::kLong);
  const bool fits = candidates.dim() == 1 ||
      (candidates.dim() > 1 && candidates.sizes().slice(0, candidates.dim() - 1) == target.sizes());
  TORCH_CHECK_VALUE(target.dim() >= 1 && fits, name,
                    ": expected candidates of shape [C] or [*, C] and target of shape [*], got ",
                    candidates.sizes(), " and ", target.sizes());
  const Tensor counted = target.ge(0).logical_and(target.ne(ignore_index));
  TORCH_CHECK_VALUE(counted.any().item<bool>(), name, ": expected a target of 0 or more, got none");
  return candidates.eq(target.unsqueeze(-1))
      .any(-1)
      .masked_select(counted)
      .to(at::kDouble)
      .mean()
      .item<double>();
}

} // namespace xsoftmax::metrics
