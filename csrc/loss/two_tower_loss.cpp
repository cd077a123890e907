#include "loss/two_tower_loss.h"

#include "op/anomalies.h"
#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "loss/tower_candidates.h"
#include "loss/tower_loss.h"
#include "loss/two_tower_checks.h"
#include "loss/two_tower_memory.h"
#include "xsoftmax/ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kTwoTowerLoss = "two_tower_loss_";
constexpr const char* kNegatives = "ids of negatives";

void check_vectors(const char* name, const Tensor& vectors, const Tensor& query) {
  // Composites may also be called with tensors of other layouts, such as sparse ones.
  check::strided(kTwoTowerLoss, name, vectors);
  check::floating(kTwoTowerLoss, name, vectors);
  check::same_device(kTwoTowerLoss, name, vectors, "query", query);
  check::finite_queries(kTwoTowerLoss, name, vectors);
}

void check_ids(const char* name, const Tensor& ids, c10::SymIntArrayRef shape,
               const Tensor& query) {
  check::strided(kTwoTowerLoss, name, ids);
  check::same_device(kTwoTowerLoss, name, ids, "query", query);
  check::int64(kTwoTowerLoss, name, ids);
  TORCH_CHECK_VALUE(ids.sym_sizes() == shape, kTwoTowerLoss, ": expected ", name, " of shape ",
                    shape, ", got ", ids.sym_sizes());
  check::in_memory(kTwoTowerLoss, name, ids);
}

// Checks the arguments of a call. Returns whether the memory has places.
bool check_call(const Tensor& query, const Tensor& item, const Tensor& item_id,
                at::TensorList negatives, const OptionalTensor& weight, at::TensorList memory,
                bool counted, const TwoTowerOptions& options) {
  TORCH_CHECK_VALUE(query.dim() == 2 && item.sym_sizes() == query.sym_sizes(), kTwoTowerLoss,
                    ": expected query and item of one shape [Q, D], got ", query.sym_sizes(),
                    " and ", item.sym_sizes());
  check_vectors("query", query, query);
  check_vectors("item", item, query);
  check_ids("item_id", item_id, query.sym_sizes().slice(0, 1), query);
  if (is_defined(weight)) {
    check::strided(kTwoTowerLoss, "weight", *weight);
  }
  check_tower_weight(kTwoTowerLoss, weight, query);
  if (has_parts(kTwoTowerLoss, "negatives", negatives, 2)) {
    const Tensor& vectors = negatives[0];
    const bool shared = vectors.dim() == 2,
               fits = shared || (vectors.dim() == 3 && vectors.sym_size(0) == query.sym_size(0));
    TORCH_CHECK_VALUE(fits && vectors.sym_size(-1) == query.sym_size(1), kTwoTowerLoss,
                      ": expected vectors of negatives of shape [S, ", query.sym_size(1), "] or [",
                      query.sym_size(0), ", P, ", query.sym_size(1), "], got ",
                      vectors.sym_sizes());
    check_vectors("vectors of negatives", vectors, query);
    check_ids(kNegatives, negatives[1], vectors.sym_sizes().slice(0, vectors.dim() - 1), query);
    TORCH_CHECK_VALUE(
        !shared || options.num_items.has_value() || !counted, kTwoTowerLoss,
        ": expected num_items, from which negatives [S, D] are drawn uniformly, got none");
  }
  return check_memory(kTwoTowerLoss, memory, query);
}

// Checks the arguments of the step that check_call does not take. Returns the options of the
// counts.
StreamingOptions check_step(const Tensor& query, const Tensor& item_id, at::TensorList everyone,
                            const Tensor& temperature, at::TensorList counts,
                            std::string_view counts_options) {
  if (has_parts(kTwoTowerLoss, "everyone", everyone, 2)) {
    check::dim(kTwoTowerLoss, "vectors of everyone", everyone[0], 2);
    check::size(kTwoTowerLoss, "vectors of everyone", everyone[0], 1, query.sym_size(1),
                "the width of query");
    check_vectors("vectors of everyone", everyone[0], query);
    check_ids("ids of everyone", everyone[1], everyone[0].sym_sizes().slice(0, 1), query);
  }
  check::strided(kTwoTowerLoss, "temperature", temperature);
  check_temperature(kTwoTowerLoss, temperature, query);
  if (counts.empty()) {
    return {};
  }
  const StreamingOptions options = streaming_options(kTwoTowerLoss, counts_options);
  check_streaming(kTwoTowerLoss, "item_id", item_id, state_of(counts), options);
  return options;
}

// Returns a copy of ids after checking that they are in [0, number), or any if number is 0.
struct KnownIds {
  int64_t number;
  bool has_num_items;

  Tensor operator()(const Tensor& ids, const char* name) const {
    static const auto op = find_op<decltype(known_ids)>("xsoftmax::known_ids");
    return op.call(ids, number, kTwoTowerLoss, name, has_num_items);
  }
};

// The candidates of a step.
struct StepCandidates {
  // Shared by all queries: vectors, ids, and whether each place is filled.
  std::vector<Tensor> vectors, ids, is_filled;
  Tensor draws; // number of shared samples with replacement for one query, without `uniform`
  int64_t uniform = 0; // number of shared samples drawn uniformly
  Tensor private_vectors, private_ids; // undefined if queries have none

  // items, item_ids: those of the batch.
  StepCandidates(const Tensor& items, const Tensor& item_ids)
      : draws(at::full(at::IntArrayRef{}, c10::Scalar(item_ids.sym_size(0) - 1),
                       item_ids.options())) {
    add(items, item_ids, all(item_ids));
  }

  void add_negatives(const Tensor& more, const Tensor& more_ids) {
    if (more.dim() == 3) {
      private_vectors = more;
      private_ids = more_ids;
    } else {
      add(more, more_ids, all(more_ids));
      uniform = more_ids.sym_size(0).guard_int(__FILE__, __LINE__);
    }
  }

  // Appends the memory after the other candidates, so that for equal ids the vector with a gradient
  // is used.
  void add_memory(at::TensorList memory, int64_t warmup) {
    static const auto read = find_op<decltype(two_tower_memory)>("xsoftmax::two_tower_memory");
    const auto [more, more_ids, places, number] = read.call(memory, warmup);
    draws = draws + number;
    add(more.to(vectors[0].scalar_type()), more_ids, places);
  }

 private:
  static Tensor all(const Tensor& tensor) {
    return at::ones_symint({tensor.sym_size(0)}, tensor.options().dtype(at::kBool));
  }
  void add(const Tensor& more, const Tensor& more_ids, const Tensor& places) {
    vectors.push_back(more);
    ids.push_back(more_ids);
    is_filled.push_back(places);
  }
};

// Returns which of the ids [Q, P] are among those of `others` [M] for which `is_eligible` is true.
Tensor is_among(const Tensor& ids, const Tensor& others, const Tensor& is_eligible) {
  if (others.sym_size(0) == 0) {
    return at::zeros_like(ids, at::kBool);
  }
  // The first of `others` is an item of the batch and always takes part.
  const Tensor known = at::where(is_eligible, others, others.narrow(0, 0, 1));
  return listed(ids.reshape({1, -1}), known.unsqueeze(0)).view_as(ids);
}

// Returns the private and shared candidates with the log of their expected counts. log_count:
// returns those of ids among the shared candidates. counted: whether frequencies are corrected.
template <typename LogCount>
Proposal sets_of(const StepCandidates& candidates, const Tensor& item_id, bool counted,
                 const LogCount& log_count) {
  Proposal sets;
  const Tensor &private_ids = candidates.private_ids, all_ids = at::cat(candidates.ids),
               target_count = log_count(item_id), log_one = at::zeros({}, target_count.options());
  Tensor count = log_count(all_ids);
  const Tensor is_eligible =
      first_occurrences(all_ids) & at::cat(candidates.is_filled) & ~count.isneginf();
  // Without counts all expected counts are 1, so an item that is a shared candidate must not be a
  // private one also.
  if (private_ids.defined() && !counted) {
    const Tensor is_repeated = first_occurrences(private_ids).logical_not() |
        is_among(private_ids, all_ids, at::cat(candidates.is_filled));
    sets.push_back(
        {private_ids,
         at::zeros_like(is_repeated, target_count.options()).masked_fill(is_repeated, kInfinite),
         at::full_like(target_count, -kInfinite), true});
  } else if (private_ids.defined()) {
    const auto log_indicator = [&](const Tensor& tensor) {
      return at::where(listed(tensor, private_ids), 0.0, -kInfinite);
    };
    count = at::logaddexp(count, log_indicator(all_ids));
    sets.push_back({private_ids,
                    at::logaddexp(log_count(private_ids), log_one)
                        .masked_fill(~first_occurrences(private_ids), kInfinite),
                    log_indicator(item_id.unsqueeze(1)).squeeze(1), true});
  }
  sets.push_back({all_ids, count.masked_fill(~is_eligible, kInfinite), target_count, true});
  return sets;
}

} // namespace

void check_two_tower(const Tensor& query, const Tensor& item, const Tensor& item_id,
                     at::TensorList negatives, const OptionalTensor& weight, at::TensorList memory,
                     bool counted, std::string_view options) {
  check_call(query, item, item_id, negatives, weight, memory, counted,
             two_tower_options(kTwoTowerLoss, options));
}

Tensor two_tower_loss_(const Tensor& query, const Tensor& item, const Tensor& item_id,
                       at::TensorList negatives, at::TensorList everyone,
                       const OptionalTensor& weight, const Tensor& temperature,
                       at::TensorList counts, at::TensorList memory, std::array<bool, 2> updated,
                       std::string_view counts_options, std::string_view text) {
  static const auto update = find_op<decltype(two_tower_update_)>("xsoftmax::two_tower_update_");
  static const auto log_prob =
      find_op<decltype(streaming_log_prob)>("xsoftmax::streaming_log_prob");
  const TwoTowerOptions options = two_tower_options(kTwoTowerLoss, text);
  const bool counted = has_parts(kTwoTowerLoss, "counts", counts, 4);
  const bool has_memory =
      check_call(query, item, item_id, negatives, weight, memory, counted, options);
  const StreamingOptions stream =
      check_step(query, item_id, everyone, temperature, counts, counts_options);
  const KnownIds known{(counted ? stream.num_ids : options.num_items).value_or(0),
                       options.num_items.has_value()};

  const Tensor scaled = normalize_vectors(query, options) / temperature,
               target_vectors = normalize_vectors(item, options);
  Tensor items = target_vectors, ids = known(item_id, "item_id");
  if (!everyone.empty()) {
    items = normalize_vectors(everyone[0], options);
    ids = known(everyone[1], "ids of everyone");
  }
  StepCandidates candidates(items, ids);
  if (!negatives.empty()) {
    const Tensor vectors = normalize_vectors(negatives[0], options),
                 more = known(negatives[1], kNegatives);
    candidates.add_negatives(vectors, more);
  }

  Proposal sets;
  { // counts and memory have no gradient, even if a state tensor requires one
    const at::NoGradGuard no_grad;
    if (has_memory) {
      candidates.add_memory(memory, options.memory_warmup);
      candidates.ids.back() = known(candidates.ids.back(), "ids of memory");
    }
    const at::TensorList counts_to = updated[0] ? counts : at::TensorList{},
                         memory_to = updated[1] && has_memory ? memory : at::TensorList{};
    if (!counts_to.empty() || !memory_to.empty()) {
      update.call(ids, items.detach(), counts_to, memory_to, counts_options);
    }
    sets = sets_of(candidates, item_id, counted, [&](const Tensor& tensor) {
      return !counted
          ? at::zeros_like(tensor, tensor.options().dtype(at::kFloat))
          : inclusion_log_count(
                log_prob.call(tensor, counts[0], counts[1], counts[2], counts[3], counts_options)
                    .to(at::kFloat),
                candidates.draws, candidates.uniform, options.num_items.value_or(0));
    });
  }
  std::vector<Tensor> vectors{at::cat(candidates.vectors)};
  if (candidates.private_vectors.defined()) {
    vectors.insert(vectors.begin(), candidates.private_vectors);
  }
  TowerOptions step;
  step.estimator = options.estimator;
  step.remove_accidental_hits = options.remove_accidental_hits;
  step.reduction = options.reduction;
  return tower_loss(scaled, target_vectors, item_id, vectors, sets, step, weight);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "check_two_tower(Tensor query, Tensor item, Tensor item_id, Tensor[] negatives, Tensor? "
      "weight, Tensor[] memory, bool counted, str options=\"\") -> ()",
      check_two_tower);
  m.def(
      "two_tower_loss_(Tensor query, Tensor item, Tensor item_id, Tensor[] negatives, Tensor[] "
      "everyone, Tensor? weight, Tensor temperature, "
      "Tensor(a!)[] counts, Tensor(b!)[] memory, bool[2] updated, str counts_options=\"\", str "
      "options=\"\") -> Tensor",
      two_tower_loss_);
}

} // namespace xsoftmax
