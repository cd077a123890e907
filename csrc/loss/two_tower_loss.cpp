#include "loss/two_tower_loss.h"

#include "op/anomalies.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/options.h"
#include "estimator/estimators.h"
#include "loss/exclude_topk.h"
#include "loss/linear_topk.h"
#include "loss/reduction.h"
#include "loss/tower_loss.h"
#include "proposal/modules.h"
#include "proposal/stream/streaming_counts.h"
#include "xsoftmax/ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kOp = "two_tower_loss_";
constexpr const char* kNegatives = "ids of negatives";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Parses the options and checks that they are consistent. Errors name `owner`.
TwoTowerOptions checked_options(const char* owner, std::string_view text) {
  const auto options = parse_options<TwoTowerOptions>(owner, text);
  const Estimator& estimator = find_estimator(owner, options.estimator);
  TORCH_CHECK_VALUE(estimator.has_kernels() && !estimator.traits.has_noise, owner,
                    ": expected an estimator of the library without noise, got '",
                    options.estimator, "'");
  reduction_code(owner, options.reduction);
  TORCH_CHECK_VALUE(options.similarity == "dot" || options.similarity == "cosine", owner,
                    ": expected similarity to be one of 'dot', 'cosine', got '", options.similarity,
                    "'");
  TORCH_CHECK_VALUE(options.temperature > 0 && options.temperature < kInfinity, owner,
                    ": expected temperature above 0, got ", options.temperature);
  const auto at_least = [&](const char* name, int64_t value, int64_t least) {
    TORCH_CHECK_VALUE(value >= least, owner, ": expected ", name, " of at least ", least, ", got ",
                      value);
  };
  at_least("num_items", options.num_items.value_or(1), 1);
  at_least("memory", options.memory, 0);
  at_least("memory_warmup", options.memory_warmup, 0);
  at_least("dim", options.dim.value_or(1), 1);
  TORCH_CHECK_VALUE(options.memory == 0 || options.dim.has_value(), owner,
                    ": expected dim, the width of the vectors, for memory=", options.memory,
                    ", got none");
  return options;
}

// Returns the vectors whose dot products are the similarities.
Tensor similar(const Tensor& vectors, const TwoTowerOptions& options) {
  return options.similarity == "dot" ? vectors
                                     : vectors /
          at::linalg_vector_norm(vectors, 2, {-1}, true).clamp_min(1e-12).expand_as(vectors);
}

void check_vectors(const char* name, const Tensor& vectors, const Tensor& query) {
  // Composites may also be called with tensors of other layouts, such as sparse ones.
  check::strided(kOp, name, vectors);
  check::floating(kOp, name, vectors);
  check::same_device(kOp, name, vectors, "query", query);
  check::finite_queries(kOp, name, vectors);
}

void check_ids(const char* name, const Tensor& ids, c10::SymIntArrayRef shape,
               const Tensor& query) {
  check::strided(kOp, name, ids);
  check::same_device(kOp, name, ids, "query", query);
  check::int64(kOp, name, ids);
  TORCH_CHECK_VALUE(ids.sym_sizes() == shape, kOp, ": expected ", name, " of shape ", shape,
                    ", got ", ids.sym_sizes());
  check::in_memory(kOp, name, ids);
}

// Returns whether the list has `parts` tensors. Throws unless it has that many or none.
bool has(const char* op, const char* name, at::TensorList tensors, size_t parts) {
  TORCH_CHECK_VALUE(tensors.empty() || tensors.size() == parts, op, ": expected ", name, " as ",
                    parts, " tensors or none, got ", tensors.size());
  return !tensors.empty();
}

// Returns whether there is a memory. Checks that its tensors are consistent.
bool check_memory_tensors(const char* op, at::TensorList memory) {
  if (!has(op, "memory", memory, 3)) {
    return false;
  }
  check::dim(op, "memory", memory[0], 2);
  check::floating(op, "memory", memory[0]);
  check::dim(op, "memory_id", memory[1], 1);
  check::int64(op, "memory_id", memory[1]);
  check::size(op, "memory_id", memory[1], 0, memory[0].sym_size(0), "the places of memory");
  check::dim(op, "memory_state", memory[2], 1);
  check::int64(op, "memory_state", memory[2]);
  check::size(op, "memory_state", memory[2], 0, 2, "the items and calls so far");
  check::same_device(op, "memory_id", memory[1], "memory", memory[0]);
  check::same_device(op, "memory_state", memory[2], "memory", memory[0]);
  return true;
}

// Returns whether the memory has places. Checks that its vectors have the width of `items`.
bool check_memory(const char* op, at::TensorList memory, const Tensor& items) {
  if (!check_memory_tensors(op, memory)) {
    return false;
  }
  for (const Tensor& part : memory) {
    check::same_device(op, "memory", part, "items", items);
  }
  const bool has_places = memory[0].sym_size(0) > 0;
  TORCH_CHECK_VALUE(!has_places || memory[0].sym_size(1) == items.sym_size(1), op,
                    ": expected vectors of the width of memory, ", memory[0].sym_size(1), ", got ",
                    items.sym_size(1));
  return has_places;
}

// Checks the arguments of a call. Returns whether the memory has places.
bool check_call(const Tensor& query, const Tensor& item, const Tensor& item_id,
                at::TensorList negatives, const OptionalTensor& weight, at::TensorList memory,
                bool counted, const TwoTowerOptions& options) {
  TORCH_CHECK_VALUE(query.dim() == 2 && item.sym_sizes() == query.sym_sizes(), kOp,
                    ": expected query and item of one shape [Q, D], got ", query.sym_sizes(),
                    " and ", item.sym_sizes());
  check_vectors("query", query, query);
  check_vectors("item", item, query);
  check_ids("item_id", item_id, query.sym_sizes().slice(0, 1), query);
  if (given(weight)) {
    check::strided(kOp, "weight", *weight);
  }
  check_tower_weight(kOp, weight, query);
  if (has(kOp, "negatives", negatives, 2)) {
    const Tensor& vectors = negatives[0];
    const bool shared = vectors.dim() == 2,
               fits = shared || (vectors.dim() == 3 && vectors.sym_size(0) == query.sym_size(0));
    TORCH_CHECK_VALUE(fits && vectors.sym_size(-1) == query.sym_size(1), kOp,
                      ": expected vectors of negatives of shape [S, ", query.sym_size(1), "] or [",
                      query.sym_size(0), ", P, ", query.sym_size(1), "], got ",
                      vectors.sym_sizes());
    check_vectors("vectors of negatives", vectors, query);
    check_ids(kNegatives, negatives[1], vectors.sym_sizes().slice(0, vectors.dim() - 1), query);
    TORCH_CHECK_VALUE(
        !shared || options.num_items.has_value() || !counted, kOp,
        ": expected num_items, from which negatives [S, D] are drawn uniformly, got none");
  }
  return check_memory(kOp, memory, query);
}

void check_everyone(at::TensorList everyone, const Tensor& query) {
  if (has(kOp, "everyone", everyone, 2)) {
    check::dim(kOp, "vectors of everyone", everyone[0], 2);
    check::size(kOp, "vectors of everyone", everyone[0], 1, query.sym_size(1),
                "the width of query");
    check_vectors("vectors of everyone", everyone[0], query);
    check_ids("ids of everyone", everyone[1], everyone[0].sym_sizes().slice(0, 1), query);
  }
}

void check_topk(const char* op, const Tensor& query, const Tensor& item_vectors,
                const Tensor& temperature, const c10::SymInt& k, const OptionalTensor& exclude) {
  check::floating(op, "query", query);
  TORCH_CHECK_VALUE(query.dim() >= 1, op, ": expected query of shape [*, D], got ",
                    query.sym_sizes());
  check::dim(op, "item_vectors", item_vectors, 2);
  check::floating(op, "item_vectors", item_vectors);
  check::same_device(op, "item_vectors", item_vectors, "query", query);
  check::size(op, "item_vectors", item_vectors, 1, query.sym_size(-1), "the width of query");
  check::dim(op, "temperature", temperature, 0);
  check::floating(op, "temperature", temperature);
  if (!temperature.is_cpu()) { // a CPU scalar is valid with vectors on any device
    check::same_device(op, "temperature", temperature, "query", query);
  }
  TORCH_CHECK_VALUE(k >= 0 && k <= item_vectors.sym_size(0), op, ": expected k in [0, ",
                    item_vectors.sym_size(0), "] (the rows of item_vectors), got ", k);
  if (given(exclude)) {
    check::int64(op, "exclude", *exclude);
    check::same_device(op, "exclude", *exclude, "query", query);
  }
}

StreamingState state_of(at::TensorList counts) {
  return {counts[0], counts[1], counts[2], counts[3]};
}

// Checks the arguments of an update. Returns whether the memory has places.
bool check_update(const Tensor& ids, const Tensor& items, at::TensorList counts,
                  at::TensorList memory, std::string_view counts_options) {
  constexpr const char* op = "two_tower_update_";
  check::dim(op, "items", items, 2);
  check::floating(op, "items", items);
  check::dim(op, "ids", ids, 1);
  check::int64(op, "ids", ids);
  check::size(op, "ids", ids, 0, items.sym_size(0), "the items");
  check::same_device(op, "ids", ids, "items", items);
  if (has(op, "counts", counts, 4)) {
    check_streaming(op, "ids", ids, state_of(counts), streaming_options(op, counts_options));
  }
  return check_memory(op, memory, items);
}

void update_meta(const Tensor& ids, const Tensor& items, at::TensorList counts,
                 at::TensorList memory, std::string_view counts_options) {
  check_update(ids, items, counts, memory, counts_options);
}

// The candidates that all queries share: vectors, ids and whether each place is filled; and the
// number of samples with replacement for one query.
struct Shared {
  std::vector<Tensor> vectors, ids, filled;
  Tensor draws;

  void add(const Tensor& more, const Tensor& more_ids, const Tensor& places) {
    vectors.push_back(more);
    ids.push_back(more_ids);
    filled.push_back(places);
  }
};

// Appends the memory after the other candidates, so that for equal ids the vector with a gradient
// is used.
void add_memory(Shared& shared, at::TensorList memory, int64_t warmup) {
  static const auto read = find_op<decltype(two_tower_memory)>("xsoftmax::two_tower_memory");
  const auto [vectors, ids, filled, number] = read.call(memory, warmup);
  shared.draws = shared.draws + number;
  shared.add(vectors.to(shared.vectors[0].scalar_type()), ids, filled);
}

// Returns which of the ids [Q, P] are among those of `others` [M] for which `takes_part` is true.
Tensor among(const Tensor& ids, const Tensor& others, const Tensor& takes_part) {
  if (others.sym_size(0) == 0) {
    return at::zeros_like(ids, at::kBool);
  }
  // The first of `others` is an item of the batch and always takes part.
  const Tensor known = at::where(takes_part, others, others.narrow(0, 0, 1));
  return listed(ids.reshape({1, -1}), known.unsqueeze(0)).view_as(ids);
}

} // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> two_tower_state(std::string owner, std::string_view text,
                                                           std::optional<int64_t> counted_ids) {
  const TwoTowerOptions options = checked_options(owner.c_str(), text);
  TORCH_CHECK_VALUE(!options.num_items.has_value() || !counted_ids.has_value() ||
                        *counted_ids == *options.num_items,
                    owner, ": expected counts of ", options.num_items.value_or(0),
                    " ids, got those of ", counted_ids.value_or(0));
  return {at::scalar_tensor(options.temperature, at::kDouble),
          at::zeros({options.memory, options.dim.value_or(0)}, at::kFloat),
          at::zeros({options.memory}, at::kLong), at::zeros({2}, at::kLong)};
}

void check_two_tower(const Tensor& query, const Tensor& item, const Tensor& item_id,
                     at::TensorList negatives, const OptionalTensor& weight, at::TensorList memory,
                     bool counted, std::string_view options) {
  check_call(query, item, item_id, negatives, weight, memory, counted,
             checked_options(kOp, options));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> two_tower_memory(at::TensorList memory, int64_t warmup) {
  constexpr const char* op = "two_tower_memory";
  TORCH_CHECK_VALUE(check_memory_tensors(op, memory), op,
                    ": expected memory with places, got none");
  const c10::SymInt size = memory[0].sym_size(0);
  const Tensor seen = memory[2].select(0, 0), calls = memory[2].select(0, 1);
  const Tensor age = at::arange(c10::Scalar(size), memory[1].options());
  const Tensor newest = at::remainder(seen - 1 - age, c10::Scalar(size));
  const Tensor number = at::where(calls.ge(warmup), seen.clamp_max(c10::Scalar(size)), 0);
  return {memory[0].index_select(0, newest), memory[1].index_select(0, newest), age.lt(number),
          number};
}

void two_tower_update_(const Tensor& ids, const Tensor& items, at::TensorList counts,
                       at::TensorList memory, std::string_view counts_options) {
  static const auto count = find_op<decltype(streaming_update_)>("xsoftmax::streaming_update_");
  const bool has_places = check_update(ids, items, counts, memory, counts_options);
  if (!counts.empty()) {
    auto [number, total, last, seen] = state_of(counts);
    count.call(ids, std::nullopt, number, total, last, seen, counts_options);
  }
  if (has_places) {
    const int64_t size = memory[0].size(0), kept = std::min(size, ids.size(0)),
                  first = ids.size(0) - kept;
    const Tensor places =
        at::remainder(memory[2].select(0, 0) + first + at::arange(kept, ids.options()), size);
    memory[0].index_copy_(0, places, items.narrow(0, first, kept).to(memory[0].scalar_type()));
    memory[1].index_copy_(0, places, ids.narrow(0, first, kept));
    memory[2].select(0, 0).add_(ids.size(0));
    memory[2].select(0, 1).add_(1);
  }
}

Tensor two_tower_loss_(const Tensor& query, const Tensor& item, const Tensor& item_id,
                       at::TensorList negatives, at::TensorList everyone,
                       const OptionalTensor& weight, const Tensor& temperature,
                       at::TensorList counts, at::TensorList memory, std::array<bool, 2> updated,
                       std::string_view counts_options, std::string_view text) {
  static const auto known_op = find_op<decltype(known_ids)>("xsoftmax::known_ids");
  static const auto update = find_op<decltype(two_tower_update_)>("xsoftmax::two_tower_update_");
  static const auto log_prob =
      find_op<decltype(streaming_log_prob)>("xsoftmax::streaming_log_prob");
  const TwoTowerOptions options = checked_options(kOp, text);
  const bool counted = has(kOp, "counts", counts, 4);
  const bool has_places =
      check_call(query, item, item_id, negatives, weight, memory, counted, options);
  check_everyone(everyone, query);
  check::strided(kOp, "temperature", temperature);
  check::dim(kOp, "temperature", temperature, 0);
  check::floating(kOp, "temperature", temperature);
  if (!temperature.is_cpu()) { // a CPU scalar is valid on any device
    check::same_device(kOp, "temperature", temperature, "query", query);
  }
  const StreamingOptions stream =
      counted ? streaming_options(kOp, counts_options) : StreamingOptions{};
  if (counted) {
    check_streaming(kOp, "item_id", item_id, state_of(counts), stream);
  }
  const int64_t num_known = (counted ? stream.num_ids : options.num_items).value_or(0);
  const auto known = [&](const Tensor& ids, const char* name) {
    return known_op.call(ids, num_known, kOp, name, options.num_items.has_value());
  };

  const Tensor scaled = similar(query, options) / temperature, of_target = similar(item, options);
  Tensor items = of_target, ids = known(item_id, "item_id");
  if (!everyone.empty()) {
    items = similar(everyone[0], options);
    ids = known(everyone[1], "ids of everyone");
  }
  Tensor of_query, of_query_ids;
  Shared shared;
  shared.draws = at::full(at::IntArrayRef{}, c10::Scalar(ids.sym_size(0) - 1), ids.options());
  const auto all = [](const Tensor& of) {
    return at::ones_symint({of.sym_size(0)}, of.options().dtype(at::kBool));
  };
  shared.add(items, ids, all(ids));
  int64_t uniform = 0;
  if (!negatives.empty()) {
    const Tensor vectors = similar(negatives[0], options), more = known(negatives[1], kNegatives);
    if (vectors.dim() == 3) {
      of_query = vectors;
      of_query_ids = more;
    } else {
      shared.add(vectors, more, all(more));
      uniform = more.sym_size(0).guard_int(__FILE__, __LINE__);
    }
  }

  Proposal sets;
  { // counts and memory have no gradient, even if a state tensor requires one
    const at::NoGradGuard no_grad;
    if (has_places) {
      add_memory(shared, memory, options.memory_warmup);
      shared.ids.back() = known(shared.ids.back(), "ids of memory");
    }
    const at::TensorList counts_to = updated[0] ? counts : at::TensorList{},
                         memory_to = updated[1] && has_places ? memory : at::TensorList{};
    if (!counts_to.empty() || !memory_to.empty()) {
      update.call(ids, items.detach(), counts_to, memory_to, counts_options);
    }
    // Returns the log expected count of ids among the shared candidates.
    const auto log_count = [&](const Tensor& of) {
      return !counted
          ? at::zeros_like(of, of.options().dtype(at::kFloat))
          : inclusion_log_count(
                log_prob.call(of, counts[0], counts[1], counts[2], counts[3], counts_options)
                    .to(at::kFloat),
                shared.draws, uniform, options.num_items.value_or(0));
    };
    const Tensor all_ids = at::cat(shared.ids), target_count = log_count(item_id),
                 certain = at::zeros({}, target_count.options());
    Tensor count = log_count(all_ids);
    const Tensor takes_part =
        first_occurrences(all_ids) & at::cat(shared.filled) & ~count.isneginf();
    // Without counts all expected counts are 1, so an item that is a shared candidate must not be a
    // private one also.
    if (of_query.defined() && !counted) {
      const Tensor again = first_occurrences(of_query_ids).logical_not() |
          among(of_query_ids, all_ids, at::cat(shared.filled));
      sets.push_back({of_query_ids,
                      at::zeros_like(again, target_count.options()).masked_fill(again, kInfinity),
                      at::full_like(target_count, -kInfinity), true});
    } else if (of_query.defined()) {
      const auto present = [&](const Tensor& of) {
        return at::where(listed(of, of_query_ids), 0.0, -kInfinity);
      };
      count = at::logaddexp(count, present(all_ids));
      sets.push_back({of_query_ids,
                      at::logaddexp(log_count(of_query_ids), certain)
                          .masked_fill(~first_occurrences(of_query_ids), kInfinity),
                      present(item_id.unsqueeze(1)).squeeze(1), true});
    }
    sets.push_back({all_ids, count.masked_fill(~takes_part, kInfinity), target_count, true});
  }
  std::vector<Tensor> vectors{at::cat(shared.vectors)};
  if (of_query.defined()) {
    vectors.insert(vectors.begin(), of_query);
  }
  TowerOptions step;
  step.estimator = options.estimator;
  step.remove_accidental_hits = options.remove_accidental_hits;
  step.reduction = options.reduction;
  return tower_loss(scaled, of_target, item_id, vectors, sets, step, weight);
}

std::tuple<std::vector<Tensor>, std::string> two_tower_resized(std::string owner,
                                                               at::TensorList memory,
                                                               int64_t num_items, bool open,
                                                               std::string_view text) {
  const char* name = owner.c_str();
  TwoTowerOptions options = checked_options(name, text);
  TORCH_CHECK_VALUE(num_items >= 1, name, ": expected num_items of at least 1, got ", num_items);
  check_memory_tensors(name, memory);
  if (options.num_items.has_value()) {
    options.num_items = num_items;
  }
  std::vector<Tensor> resized;
  for (const Tensor& part : memory) {
    resized.push_back(part.detach().clone());
  }
  if (open || memory.empty() || memory[0].sym_size(0) == 0) {
    return {resized, print_options(options)};
  }
  const int64_t size = memory[0].size(0);
  const Tensor seen = memory[2].select(0, 0), number = seen.clamp_max(size);
  const Tensor place = at::arange(size, memory[1].options()),
               oldest_first = at::remainder(seen - number + place, size);
  const Tensor filled = place.lt(number),
               kept = filled & memory[1].index_select(0, oldest_first).lt(num_items);
  const Tensor count = kept.sum(), loses = count.lt(number), remains = place.lt(count);
  const Tensor order =
      std::get<1>(kept.to(at::kByte).sort(/*stable=*/true, /*dim=*/0, /*descending=*/true));
  const Tensor from = oldest_first.index_select(0, order);
  const auto laid_out = [&](const Tensor& part, const Tensor& stays) {
    return at::where(loses, part.index_select(0, from).masked_fill(stays.logical_not(), 0), part);
  };
  resized[0] = laid_out(resized[0], remains.unsqueeze(1));
  resized[1] = laid_out(resized[1], remains);
  resized[2].select(0, 0).copy_(at::where(loses, count, seen));
  return {resized, print_options(options)};
}

TopK two_tower_topk(const Tensor& query, const Tensor& item_vectors, const Tensor& temperature,
                    c10::SymInt k, const OptionalTensor& exclude, std::string_view text) {
  constexpr const char* op = "two_tower_topk";
  const TwoTowerOptions options = checked_options(op, text);
  check_topk(op, query, item_vectors, temperature, k, exclude);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType dtype =
      opmath_dtype(at::promote_types(query.scalar_type(), item_vectors.scalar_type()));
  const c10::SymInt items = item_vectors.sym_size(0);
  const Tensor excluded = given(exclude) ? *exclude : Tensor();
  const Tensor rows =
      (similar(query.to(dtype), options) / temperature).reshape_symint({-1, query.sym_size(-1)});
  const TopK found = linear_topk(rows, similar(item_vectors.to(dtype), options), std::nullopt,
                                 with_excluded(k, excluded, items));
  return without_excluded(op, query, found, excluded, items, k);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "two_tower_state(str owner, str options, int? counted_ids=None) -> (Tensor temperature, "
      "Tensor memory, Tensor memory_id, Tensor memory_state)",
      two_tower_state);
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
  m.def(
      "two_tower_resized(str owner, Tensor[] memory, int num_items, bool open, str options=\"\") "
      "-> (Tensor[] memory, str options)",
      two_tower_resized);
  m.def(
      "two_tower_topk(Tensor query, Tensor item_vectors, Tensor temperature, SymInt k, Tensor? "
      "exclude=None, str options=\"\") -> "
      "(Tensor values, Tensor ids)",
      two_tower_topk);
  m.def(
      "two_tower_memory(Tensor[] memory, int warmup) -> (Tensor vectors, Tensor ids, Tensor "
      "filled, Tensor number)");
  m.def(
      "two_tower_update_(Tensor ids, Tensor items, Tensor(a!)[] counts, Tensor(b!)[] memory, str "
      "counts_options=\"\") -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("two_tower_memory", two_tower_memory);
  m.impl("two_tower_update_", two_tower_update_);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("two_tower_memory", two_tower_memory);
  m.impl("two_tower_update_", update_meta);
}

} // namespace xsoftmax
