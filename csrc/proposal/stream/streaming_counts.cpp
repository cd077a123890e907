#include "proposal/stream/streaming_counts.h"

#include "op/checks.h"
#include "cpu/memory.h"
#include "op/operators.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "op/state_lock.h"
#include "table/updates/resize_tables.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/expm1.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kMaxHashes = 64;

// Returns how often each of `rows` occurs among the counted keys; all keys are below `none`.
Tensor count_occurrences(const Tensor& rows, const Tensor& keys, const Tensor& counted,
                         int64_t none) {
  const Tensor sorted = std::get<0>(at::where(counted, keys, none).sort());
  return at::searchsorted(sorted, rows, /*out_int32=*/false, /*right=*/true)
      .sub(at::searchsorted(sorted, rows))
      .to(at::kDouble);
}

// Replaces keys that are not counted by one that is, which is then written twice with the same
// value.
Tensor replace_ignored(const Tensor& keys, const Tensor& counted) {
  return at::where(counted, keys, at::where(counted, keys, -1).max().clamp_min(0));
}

void update_dense(const Tensor& ids, const StreamingState& state, const StreamingOptions& options) {
  const Tensor counted = ids.ge(0), number = counted.sum();
  if (options.exact()) {
    state.count.index_add_(0, ids.clamp_min(0), counted.to(at::kLong));
    state.total.add_(number);
    return;
  }
  const Tensor rows = replace_ignored(ids, counted), any = number.gt(0),
               now = state.seen.add(number);
  const Tensor count = state.count.index_select(0, rows), last = state.last.index_select(0, rows);
  const Tensor decayed =
      count.mul(last.to(at::kDouble).sub(now.to(at::kDouble)).div(*options.half_life).exp2());
  // Not index_add_, which sums non-integers in an unspecified order.
  state.count.index_copy_(
      0, rows,
      at::where(any, decayed + count_occurrences(rows, ids, counted, *options.num_ids), count));
  state.last.index_copy_(0, rows, at::where(any, now, last));
  state.total.mul_(number.neg().to(at::kDouble).div(*options.half_life).exp2()).add_(number);
  state.seen.copy_(now);
}

Tensor logical_right_shift(const Tensor& x, int64_t bits) {
  return x.bitwise_right_shift(bits).bitwise_and((int64_t(1) << (64 - bits)) - 1);
}

Tensor buckets_of(const Tensor& ids, int64_t k, int64_t buckets) {
  Tensor x = ids.add(int64_t((uint64_t(k) + 1) * 0x9E3779B97F4A7C15u));
  x = x.bitwise_xor(logical_right_shift(x, 30)).mul(int64_t(0xBF58476D1CE4E5B9u));
  x = x.bitwise_xor(logical_right_shift(x, 27)).mul(int64_t(0x94D049BB133111EBu));
  return at::remainder(logical_right_shift(x.bitwise_xor(logical_right_shift(x, 31)), 1), buckets);
}

void update_open(const Tensor& ids, const Tensor& counted, const StreamingState& state,
                 const StreamingOptions& options) {
  const Tensor number = counted.sum(), any = number.gt(0), now = state.seen.add(number),
               time = now.to(at::kDouble);
  for (int64_t k = 0; k < options.hashes; ++k) {
    Tensor gaps = state.count.select(0, k), last_seen = state.last.select(0, k);
    const Tensor bucket = buckets_of(ids, k, options.buckets),
                 rows = replace_ignored(bucket, counted);
    const Tensor occurrences = count_occurrences(rows, bucket, counted, options.buckets);
    const Tensor gap = gaps.index_select(0, rows), last = last_seen.index_select(0, rows),
                 before = last.to(at::kDouble);
    const Tensor length = occurrences.mul(gap);
    const Tensor weight = options.alpha.has_value()
        ? at::expm1(occurrences.mul(std::log1p(-*options.alpha))).neg()
        : length.div(length.add(before.clamp_max(streaming_memory(options))));
    const Tensor moved = gap.add(weight.mul(time.sub(before).div(occurrences).sub(gap)));
    const Tensor next = at::where(gap.gt(0), moved, time.div(occurrences));
    gaps.index_copy_(0, rows, at::where(any, next, gap));
    last_seen.index_copy_(0, rows, at::where(any, now, last));
  }
  const Tensor decay_factor = options.half_life.has_value()
      ? number.neg().to(at::kDouble).div(*options.half_life).exp2()
      : at::ones_like(time);
  state.total.mul_(decay_factor).add_(number);
  state.seen.copy_(now);
}

// Returns the longest gap of each id; +inf if one of its buckets was never seen.
Tensor longest_gap(const Tensor& ids, const StreamingState& state,
                   const StreamingOptions& options) {
  const Tensor flat = ids.reshape({-1});
  Tensor longest;
  for (int64_t k = 0; k < options.hashes; ++k) {
    const Tensor gap =
        state.count.select(0, k).index_select(0, buckets_of(flat, k, options.buckets));
    const Tensor known = gap.masked_fill(gap.le(0), kInfinite);
    longest = k == 0 ? known : longest.maximum(known);
  }
  return longest.view_symint(ids.sym_sizes());
}

Tensor rows_of(const Tensor& table, const Tensor& ids) {
  return table.index_select(0, ids.clamp_min(0).reshape({-1}))
      .view_symint(ids.sym_sizes())
      .to(at::kDouble);
}

// Returns log 2 of the decay factor of each count, at most 0.
Tensor decay(const Tensor& ids, const StreamingState& state, const StreamingOptions& options) {
  return rows_of(state.last, ids).sub(state.seen.to(at::kDouble)).div(*options.half_life);
}

void streaming_update_meta(const Tensor& ids, const OptionalTensor& mask, Tensor& count,
                           Tensor& total, Tensor& last, Tensor& seen, std::string_view text) {
  const StreamingState state{count, total, last, seen};
  constexpr const char* op = "streaming_update_";
  const StreamingOptions options = streaming_options(op, text);
  check_streaming(op, "ids", ids, state, options);
  unmasked_ids(op, ids, mask, options);
}

void check_forget(const char* op, const Tensor& ids, const StreamingState& state,
                  const StreamingOptions& options) {
  TORCH_CHECK_VALUE(
      !options.open(), op,
      ": expected counts of dense ids, got those of open ids, whose buckets are shared");
  check_streaming(op, "ids", ids, state, options);
}

void streaming_forget_meta(const Tensor& ids, Tensor& count, Tensor& total, Tensor& last,
                           const Tensor& seen, std::string_view text) {
  constexpr const char* op = "streaming_forget_";
  check_forget(op, ids, {count, total, last, seen}, streaming_options(op, text));
}

// Threads share counts, so moving or clearing rows excludes counting a batch.
void forget_locked(const Tensor& ids, Tensor& count, Tensor& total, Tensor& last,
                   const Tensor& seen, std::string_view text) {
  const std::lock_guard guard(state_lock(total));
  streaming_forget_(ids, count, total, last, seen, text);
}

std::string resize_locked(Tensor& count, Tensor& total, Tensor& last, const Tensor& seen,
                          int64_t num_ids, std::string_view text) {
  const std::lock_guard guard(state_lock(total));
  return streaming_resize_(count, total, last, seen, num_ids, text);
}

} // namespace

StreamingOptions streaming_options(const char* owner, std::string_view text) {
  const StreamingOptions options = parse_options<StreamingOptions>(owner, text);
  TORCH_CHECK_VALUE(options.open() || *options.num_ids >= 1, owner,
                    ": expected num_ids of at least 1, got ", options.num_ids.value_or(0));
  TORCH_CHECK_VALUE(!options.half_life.has_value() ||
                        (*options.half_life > 0 && std::isfinite(*options.half_life)),
                    owner, ": expected half_life as a finite number above 0, got ",
                    options.half_life.value_or(0));
  TORCH_CHECK_VALUE(!options.alpha.has_value() || (*options.alpha > 0 && *options.alpha <= 1),
                    owner, ": expected alpha in (0, 1], got ", options.alpha.value_or(0));
  TORCH_CHECK_VALUE(
      !options.alpha.has_value() || (options.open() && !options.half_life.has_value()), owner,
      ": expected alpha only with open ids and without half_life, got alpha with ",
      options.open() ? "half_life" : "num_ids");
  TORCH_CHECK_VALUE(options.buckets >= 1, owner, ": expected buckets of at least 1, got ",
                    options.buckets);
  TORCH_CHECK_VALUE(options.hashes >= 1 && options.hashes <= kMaxHashes, owner,
                    ": expected hashes in [1, ", kMaxHashes, "], got ", options.hashes);
  return options;
}

void check_streaming(const char* op, const char* ids_name, const Tensor& ids,
                     const StreamingState& state, const StreamingOptions& options) {
  check::int64(op, ids_name, ids);
  check::in_memory(op, ids_name, ids);
  const auto numbers = options.exact() ? at::kLong : at::kDouble;
  check::dim(op, "count", state.count, options.open() ? 2 : 1);
  check::dtype(op, "count", state.count, numbers);
  check::same_device(op, "count", state.count, ids_name, ids);
  if (options.open()) {
    check::size(op, "count", state.count, 0, options.hashes, "the hash functions");
    check::size(op, "count", state.count, 1, options.buckets, "the buckets");
  } else {
    check::size(op, "count", state.count, 0, *options.num_ids, "num_ids");
  }
  check::dim(op, "total", state.total, 0);
  check::dtype(op, "total", state.total, numbers);
  check::same_device(op, "total", state.total, ids_name, ids);
  if (options.exact()) {
    return;
  }
  check::int64(op, "last", state.last);
  TORCH_CHECK_VALUE(state.last.sym_sizes() == state.count.sym_sizes(), op,
                    ": expected last of the shape of count, ", state.count.sym_sizes(), ", got ",
                    state.last.sym_sizes());
  check::in_memory(op, "last", state.last);
  check::same_device(op, "last", state.last, ids_name, ids);
  check::dim(op, "seen", state.seen, 0);
  check::int64(op, "seen", state.seen);
  check::same_device(op, "seen", state.seen, ids_name, ids);
}

Tensor unmasked_ids(const char* op, const Tensor& ids, const OptionalTensor& mask,
                    const StreamingOptions& options) {
  if (!is_defined(mask)) {
    return ids;
  }
  check::dtype(op, "mask", *mask, at::kBool);
  TORCH_CHECK_VALUE(mask->sym_sizes() == ids.sym_sizes(), op,
                    ": expected mask of the shape of ids, ", ids.sym_sizes(), ", got ",
                    mask->sym_sizes());
  check::same_device(op, "mask", *mask, "ids", ids);
  return options.open() ? ids : ids.masked_fill(mask->logical_not(), -1);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> streaming_counts(std::string owner,
                                                            std::string_view text) {
  const StreamingOptions options = streaming_options(owner.c_str(), text);
  const auto longs = at::TensorOptions(at::kLong),
             numbers = options.exact() ? longs : longs.dtype(at::kDouble);
  const std::vector<int64_t> shape = options.open()
      ? std::vector<int64_t>{options.hashes, options.buckets}
      : std::vector<int64_t>{*options.num_ids};
  return {table_zeros(shape, numbers), at::zeros({}, numbers),
          table_zeros(options.exact() ? std::vector<int64_t>{0} : shape, longs),
          at::zeros({}, longs)};
}

void streaming_update_(const Tensor& ids, const OptionalTensor& mask, Tensor& count, Tensor& total,
                       Tensor& last, Tensor& seen, std::string_view text) {
  const StreamingState state{count, total, last, seen};
  constexpr const char* op = "streaming_update_";
  const StreamingOptions options = streaming_options(op, text);
  check_streaming(op, "ids", ids, state, options);
  const Tensor unmasked = unmasked_ids(op, ids, mask, options).reshape({-1});
  if (unmasked.sym_numel() == 0) {
    return;
  }
  if (options.open()) {
    update_open(unmasked,
                is_defined(mask) ? mask->reshape({-1})
                                 : at::ones_like(unmasked, unmasked.options().dtype(at::kBool)),
                state, options);
  } else {
    update_dense(unmasked, state, options);
  }
}

void streaming_forget_(const Tensor& ids, Tensor& count, Tensor& total, Tensor& last,
                       const Tensor& seen, std::string_view text) {
  constexpr const char* op = "streaming_forget_";
  const StreamingOptions options = streaming_options(op, text);
  check_forget(op, ids, {count, total, last, seen}, options);
  if (ids.is_cpu()) {
    check::class_ids(op, "ids", ids, *options.num_ids);
  }
  if (ids.numel() == 0) {
    return;
  }
  const Tensor rows = std::get<0>(ids.reshape({-1}).sort()),
               first = at::ones_like(rows, rows.options().dtype(at::kBool));
  // Marks the first of equal ids, so that an id is subtracted once.
  first.slice(0, 1).copy_(rows.slice(0, 1).ne(rows.slice(0, 0, -1)));
  const Tensor counted = streaming_count(rows, count, total, last, seen, text);
  total.sub_(counted.mul(first).sum().to(total.scalar_type())).clamp_min_(0);
  count.index_fill_(0, rows, 0);
  if (!options.exact()) {
    last.index_fill_(0, rows, 0);
  }
}

std::string streaming_resize_(Tensor& count, Tensor& total, Tensor& last, const Tensor& seen,
                              int64_t num_ids, std::string_view text) {
  constexpr const char* op = "streaming_resize_";
  StreamingOptions options = streaming_options(op, text);
  check::strided(op, "count", count);
  check_streaming(op, "ids", at::empty({0}, count.options().dtype(at::kLong)),
                  {count, total, last, seen}, options);
  TORCH_CHECK_VALUE(num_ids >= 1, op, ": expected num_ids of at least 1, got ", num_ids);
  if (options.open()) {
    return std::string(text);
  }
  const int64_t before = *options.num_ids;
  if (num_ids < before) {
    streaming_forget_(at::arange(num_ids, before, count.options().dtype(at::kLong)), count, total,
                      last, seen, text);
  }
  std::vector<Tensor> tables{count}, rows;
  if (!options.exact()) {
    tables.push_back(last);
  }
  for (const Tensor& table : tables) {
    rows.push_back(at::zeros({std::max<int64_t>(0, num_ids - before)}, table.options()));
  }
  resize_tables_(tables, rows, std::vector<int64_t>(tables.size(), num_ids));
  options.num_ids = num_ids;
  return print_options(options);
}

Tensor streaming_count(const Tensor& ids, const Tensor& count, const Tensor& total,
                       const Tensor& last, const Tensor& seen, std::string_view text) {
  const StreamingState state{count, total, last, seen};
  constexpr const char* op = "streaming_count";
  const StreamingOptions options = streaming_options(op, text);
  check_streaming(op, "ids", ids, state, options);
  if (options.open()) {
    return total.div(longest_gap(ids, state, options));
  }
  const Tensor counted = rows_of(count, ids).masked_fill(ids.lt(0), 0.0);
  return options.exact() ? counted : counted.mul(decay(ids, state, options).exp2());
}

Tensor streaming_log_prob(const Tensor& ids, const Tensor& count, const Tensor& total,
                          const Tensor& last, const Tensor& seen, std::string_view text) {
  const StreamingState state{count, total, last, seen};
  constexpr const char* op = "streaming_log_prob";
  const StreamingOptions options = streaming_options(op, text);
  check_streaming(op, "ids", ids, state, options);
  if (options.open()) {
    return longest_gap(ids, state, options).log().neg();
  }
  // total is at least 1 from the first batch on. The clamp makes q 0 before it, instead of 0 / 0.
  const Tensor all = total.clamp_min(1).to(at::kDouble).log();
  Tensor log_count = rows_of(count, ids).log();
  log_count = options.exact() ? log_count : log_count.add(decay(ids, state, options).mul(kLog2));
  return log_count.sub(all).masked_fill(ids.lt(0), -kInfinite);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "streaming_counts(str owner, str options) -> (Tensor count, Tensor total, Tensor last, "
      "Tensor seen)",
      streaming_counts);
  m.def(
      "streaming_update_(Tensor ids, Tensor? mask, Tensor(a!) count, Tensor(b!) total, Tensor(c!) "
      "last, Tensor(d!) seen, str options) -> ()");
  m.def(
      "streaming_resize_(Tensor(a!) count, Tensor(b!) total, Tensor(c!) last, Tensor seen, int "
      "num_ids, str options) -> str");
  m.def(
      "streaming_forget_(Tensor ids, Tensor(a!) count, Tensor(b!) total, Tensor(c!) last, Tensor "
      "seen, str options) -> ()");
  m.def(
      "streaming_count(Tensor ids, Tensor count, Tensor total, Tensor last, Tensor seen, str "
      "options) -> Tensor");
  m.def(
      "streaming_log_prob(Tensor ids, Tensor count, Tensor total, Tensor last, Tensor seen, str "
      "options) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("streaming_update_", streaming_update_);
  m.impl("streaming_resize_", resize_locked);
  m.impl("streaming_forget_", forget_locked);
  m.impl("streaming_count", streaming_count);
  m.impl("streaming_log_prob", streaming_log_prob);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("streaming_update_", streaming_update_meta);
  m.impl("streaming_forget_", streaming_forget_meta);
  m.impl("streaming_count", streaming_count);
  m.impl("streaming_log_prob", streaming_log_prob);
}

} // namespace xsoftmax
