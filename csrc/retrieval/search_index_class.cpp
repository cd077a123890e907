#include <xsoftmax/search.h>

#include "op/optional.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kSearchIndexClass = "SearchIndex";
constexpr int64_t kCalibrating = 256; // queries from which the cells for a recall are estimated

Tensor rows_of(const Tensor& input, const Tensor& weight) {
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.size(-1) == weight.size(1), kSearchIndexClass,
                    ": expected input of shape [*, ", weight.size(1), "], got ", input.sizes());
  return input.detach().reshape({-1, weight.size(1)});
}

std::tuple<Tensor, Tensor> remove_excluded(const Tensor& scores, const Tensor& ids,
                                           const Tensor& exclude, int64_t classes, int64_t k) {
  using ExcludeTopk = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                 c10::SymInt, c10::SymInt);
  static const auto op = find_op<ExcludeTopk>("xsoftmax::exclude_topk");
  return op.call(scores, ids, exclude.reshape({scores.size(0), exclude.size(-1)}), classes, k);
}

} // namespace

SearchIndex::SearchIndex(const Tensor& weight, const Tensor& bias, int64_t codewords,
                         const Tensor& queries)
    : weight_(weight.detach()), bias_(bias.defined() ? bias.detach() : bias),
      tensors_(midx_search_index(
          weight_, optional(bias_), std::nullopt, std::nullopt, codewords, at::zeros({}, at::kLong),
          queries.defined() ? OptionalTensor(rows_of(queries, weight_).to(weight_.options()))
                            : std::nullopt)) {
  if (queries.defined()) {
    calibrate(queries);
  }
}

SearchIndex SearchIndex::to(at::Device device) const {
  SearchIndex moved = *this;
  const auto move = [&](Tensor& tensor) { tensor = tensor.defined() ? tensor.to(device) : tensor; };
  move(moved.weight_);
  move(moved.bias_);
  move(moved.queries_);
  std::for_each(moved.tensors_.begin(), moved.tensors_.end(), move);
  return moved;
}

void SearchIndex::calibrate(const Tensor& queries) {
  queries_ = rows_of(queries, weight_).to(weight_.options(), /*non_blocking=*/false, /*copy=*/true);
  budgets_.clear();
}

std::optional<int64_t> SearchIndex::cells_of(const Tensor& queries, int64_t k, double recall) {
  const int64_t known = queries_.defined() ? queries_.size(0) : 0;
  if (known < kCalibrating) { // collects the first queries that are searched
    const Tensor more = queries.slice(0, 0, kCalibrating - known).to(weight_.scalar_type());
    queries_ = known > 0 ? at::cat({queries_, more}) : more.clone();
  }
  const auto found = budgets_.find({k, recall});
  if (found != budgets_.end()) {
    return found->second;
  }
  if (queries_.size(0) < kCalibrating) {
    return std::nullopt;
  }
  const int64_t cells =
      search_budget(queries_, weight_, optional(bias_), tensors_, k, recall).item<int64_t>();
  return budgets_[{k, recall}] = cells;
}

SearchResult SearchIndex::search(const Tensor& input, int64_t k, const SearchLimits& limits,
                                 const Tensor& exclude) {
  const Tensor queries = rows_of(input, weight_);
  TORCH_CHECK_TYPE(input.device() == weight_.device(), kSearchIndexClass,
                   ": expected input on the table's device ", weight_.device(), ", got ",
                   input.device());
  TORCH_CHECK_VALUE(!limits.recall.has_value() || !limits.max_cells.has_value(), kSearchIndexClass,
                    ": expected recall or max_cells, got both");
  const double recall = limits.recall.value_or(1.0);
  TORCH_CHECK_VALUE(recall > 0 && recall <= 1, kSearchIndexClass,
                    ": expected recall in (0, 1], got ", recall);
  const auto batch = input.sizes().slice(0, input.dim() - 1);
  TORCH_CHECK_VALUE(
      !exclude.defined() ||
          (exclude.dim() == input.dim() && exclude.sizes().slice(0, input.dim() - 1) == batch),
      kSearchIndexClass,
      ": expected exclude of shape [*, E], input's but for its last dimension, got ",
      exclude.sizes());
  TORCH_CHECK_VALUE(k >= 0 && k <= weight_.size(0), kSearchIndexClass, ": expected k in [0, ",
                    weight_.size(0), "], got ", k);
  const int64_t classes = weight_.size(0);
  const int64_t wanted = exclude.defined() ? std::min(classes, k + exclude.size(-1)) : k;
  const std::optional<int64_t> cells =
      recall < 1 ? cells_of(queries, wanted, recall) : limits.max_cells;
  const auto [scores, ids, read, certified] =
      search_topk(queries, weight_, optional(bias_), tensors_, wanted,
                  cells.has_value() ? "max_cells=" + std::to_string(*cells) : std::string());
  const auto [best, best_ids] = exclude.defined()
      ? remove_excluded(scores, ids, exclude, classes, k)
      : std::tuple(scores, ids);
  std::vector<int64_t> shape = batch.vec();
  shape.push_back(k);
  return {best.reshape(shape), best_ids.reshape(shape), read.reshape(batch),
          certified.reshape(batch)};
}

} // namespace xsoftmax
