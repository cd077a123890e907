#include "op/checks.h"
#include "cpu/impl.h"
#include "op/state_lock.h"
#include "proposal/stream/streaming_counts.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kAhead = 16, kGrain = 2048;

bool has_plain_layout(const StreamingState& state) {
  return !use_reference() && state.count.is_contiguous() && state.last.is_contiguous();
}

// Sums of integers below 2^53 are exact in any order, and so are the increments of a decayed count.
void update_dense_cpu(const Tensor& ids, const StreamingState& state,
                      const StreamingOptions& options) {
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const int64_t size = ids.numel();
  const int64_t number = std::count_if(id, id + size, [](int64_t i) { return i >= 0; });
  if (number == 0) {
    return;
  }
  if (options.exact()) {
    int64_t* count = state.count.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < size; ++i) {
      __builtin_prefetch(count + id[std::min(i + kAhead, size - 1)], 1);
      if (id[i] >= 0) {
        ++count[id[i]];
      }
    }
    *state.total.mutable_data_ptr<int64_t>() += number;
    return;
  }
  double *count = state.count.mutable_data_ptr<double>(),
         *total = state.total.mutable_data_ptr<double>();
  int64_t *last = state.last.mutable_data_ptr<int64_t>(),
          *seen = state.seen.mutable_data_ptr<int64_t>();
  const int64_t now = int64_t(uint64_t(*seen) + uint64_t(number));
  for (int64_t i = 0; i < size; ++i) {
    const int64_t ahead = id[std::min(i + kAhead, size - 1)];
    __builtin_prefetch(count + ahead, 1);
    __builtin_prefetch(last + ahead, 1);
    const int64_t row = id[i];
    if (row < 0) {
      continue;
    }
    if (last[row] != now) { // first occurrence in this batch
      count[row] *= std::exp2((double(last[row]) - double(now)) / *options.half_life);
      last[row] = now;
    }
    count[row] += 1;
  }
  *total = *total * std::exp2(-double(number) / *options.half_life) + double(number);
  *seen = now;
}

void update_open(const Tensor& ids, const bool* mask, const StreamingState& state,
                 const StreamingOptions& options) {
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const int64_t size = ids.numel(),
                number = mask == nullptr ? size : std::count(mask, mask + size, true);
  if (number == 0) {
    return;
  }
  double *gaps = state.count.mutable_data_ptr<double>(),
         *total = state.total.mutable_data_ptr<double>();
  int64_t *last_seen = state.last.mutable_data_ptr<int64_t>(),
          *seen = state.seen.mutable_data_ptr<int64_t>();
  const int64_t now = int64_t(uint64_t(*seen) + uint64_t(number));
  const double memory = streaming_memory(options),
               log_keep = options.alpha.has_value() ? std::log1p(-*options.alpha) : 0;
  at::parallel_for(0, options.hashes, 1, [&](int64_t first, int64_t end) {
    std::vector<int64_t> bucket(number);
    for (int64_t k = first; k < end; ++k) {
      bucket.clear();
      for (int64_t i = 0; i < size; ++i) {
        if (mask == nullptr || mask[i]) {
          bucket.push_back(streaming_bucket(id[i], k, options.buckets));
        }
      }
      std::sort(bucket.begin(), bucket.end());
      double* gap = gaps + k * options.buckets;
      int64_t* last = last_seen + k * options.buckets;
      for (auto at = bucket.begin(); at != bucket.end();) {
        const auto next =
            std::find_if(at, bucket.end(), [&](int64_t other) { return other != *at; });
        const double occurrences = double(next - at), before = double(last[*at]),
                     length = occurrences * gap[*at];
        if (gap[*at] > 0) {
          const double weight = options.alpha.has_value()
              ? -std::expm1(occurrences * log_keep)
              : length / (length + std::min(before, memory));
          gap[*at] += weight * ((double(now) - before) / occurrences - gap[*at]);
        } else {
          gap[*at] = double(now) / occurrences;
        }
        last[*at] = now;
        at = next;
      }
    }
  });
  *total = *total *
          (options.half_life.has_value() ? std::exp2(-double(number) / *options.half_life) : 1.0) +
      double(number);
  *seen = now;
}

void streaming_update_cpu(const Tensor& ids, const OptionalTensor& mask, Tensor& count,
                          Tensor& total, Tensor& last, Tensor& seen, std::string_view text) {
  const StreamingState state{count, total, last, seen};
  constexpr const char* op = "streaming_update_";
  const StreamingOptions options = streaming_options(op, text);
  check_streaming(op, "ids", ids, state, options);
  const Tensor unmasked = unmasked_ids(op, ids, mask, options).contiguous();
  const std::lock_guard guard(state_lock(total));
  if (!options.open()) {
    check::class_ids(op, "ids", unmasked, *options.num_ids, -1);
  }
  if (!has_plain_layout(state)) {
    streaming_update_(ids, mask, count, total, last, seen, text);
  } else if (options.open()) {
    const Tensor counted = is_defined(mask) ? mask->contiguous() : Tensor();
    update_open(unmasked, counted.defined() ? counted.const_data_ptr<bool>() : nullptr, state,
                options);
  } else {
    update_dense_cpu(unmasked, state, options);
  }
}

// Returns the longest gap of an id; +inf if one of its buckets was never seen.
double longest_gap(const double* gaps, int64_t id, const StreamingOptions& options) {
  double longest = 0;
  for (int64_t k = 0; k < options.hashes; ++k) {
    const double gap = gaps[k * options.buckets + streaming_bucket(id, k, options.buckets)];
    longest = gap > 0 ? std::max(longest, gap) : std::numeric_limits<double>::infinity();
  }
  return longest;
}

/// Returns open_value(gap), exact_value(count) or decayed_value(count, log 2 of the decay) for each
/// id.
template <typename Open, typename Exact, typename Decayed>
Tensor map_ids(const Tensor& ids, const StreamingState& state, const StreamingOptions& options,
               const Open& open_value, const Exact& exact_value, const Decayed& decayed_value) {
  const Tensor flat = ids.contiguous(),
               out = at::empty(ids.sizes(), ids.options().dtype(at::kDouble));
  const int64_t* id = flat.const_data_ptr<int64_t>();
  double* to = out.mutable_data_ptr<double>();
  const double* number = options.exact() ? nullptr : state.count.const_data_ptr<double>();
  const int64_t* count = options.exact() ? state.count.const_data_ptr<int64_t>() : nullptr;
  const int64_t* last = options.exact() ? nullptr : state.last.const_data_ptr<int64_t>();
  const double now = options.exact() ? 0 : double(*state.seen.const_data_ptr<int64_t>());
  at::parallel_for(0, flat.numel(), kGrain, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      if (options.open()) {
        to[i] = open_value(longest_gap(number, id[i], options));
      } else if (options.exact()) {
        to[i] = exact_value(id[i] < 0 ? 0.0 : double(count[id[i]]));
      } else {
        to[i] = id[i] < 0
            ? decayed_value(0.0, 0.0)
            : decayed_value(number[id[i]], (double(last[id[i]]) - now) / *options.half_life);
      }
    }
  });
  return out;
}

/// Checks the arguments. Returns whether the kernel supports the state.
bool checked(const char* op, const Tensor& ids, const StreamingState& state,
             const StreamingOptions& options) {
  check_streaming(op, "ids", ids, state, options);
  if (!options.open()) {
    check::class_ids(op, "ids", ids, *options.num_ids, -1);
  }
  return has_plain_layout(state);
}

Tensor streaming_count_cpu(const Tensor& ids, const Tensor& count, const Tensor& total,
                           const Tensor& last, const Tensor& seen, std::string_view text) {
  const StreamingState state{count, total, last, seen};
  constexpr const char* op = "streaming_count";
  const StreamingOptions options = streaming_options(op, text);
  if (!checked(op, ids, state, options)) {
    return streaming_count(ids, count, total, last, seen, text);
  }
  const std::shared_lock guard(state_lock(total));
  const double number = options.open() ? *total.const_data_ptr<double>() : 0;
  return map_ids(
      ids, state, options, [&](double gap) { return number / gap; },
      [](double count) { return count; },
      [](double count, double decay) { return count * std::exp2(decay); });
}

Tensor streaming_log_prob_cpu(const Tensor& ids, const Tensor& count, const Tensor& total,
                              const Tensor& last, const Tensor& seen, std::string_view text) {
  const StreamingState state{count, total, last, seen};
  constexpr const char* op = "streaming_log_prob";
  const StreamingOptions options = streaming_options(op, text);
  if (!checked(op, ids, state, options)) {
    return streaming_log_prob(ids, count, total, last, seen, text);
  }
  const std::shared_lock guard(state_lock(total));
  const double number =
      options.exact() ? double(*total.const_data_ptr<int64_t>()) : *total.const_data_ptr<double>();
  const double all = std::log(std::max(number, 1.0));
  return map_ids(
      ids, state, options, [](double gap) { return -std::log(gap); },
      [&](double count) { return std::log(count) - all; },
      [&](double count, double decay) { return std::log(count) + decay * kLog2 - all; });
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("streaming_update_", streaming_update_cpu);
  m.impl("streaming_count", streaming_count_cpu);
  m.impl("streaming_log_prob", streaming_log_prob_cpu);
}

} // namespace xsoftmax
