#pragma once

#include <xsoftmax/streaming_options.h>

#include "core/optional.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>

namespace xsoftmax {

// How often ids stand in a stream of batches, with older ids counting less.
//
// Dense ids: a count for each, which halves while `half_life` ids are seen. Each row has the number of ids seen when it was last counted, so that a
// batch touches the rows of its ids alone. Open ids (any int64): a table of smoothed gaps, by hash functions. The gap of an id is the number of ids
// from one sighting to the next, on average 1 / q (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
// RecSys 2019, Algorithm 2).
//
// Calls of several threads on one state: on the CPU look-ups run side by side, changes one after the other.
//
// State:
//   count  int64 [N] where nothing is forgotten, float64 [N], as of `last`, or of open ids the gaps, float64 [hashes, buckets], 0: none so far
//   total  0-dim, of count's dtype: the decayed number of ids
//   last   int64, the shape of count: `seen` after the batch that held the row's last sighting; [0] beside int64 counts
//   seen   int64, 0-dim: the number of ids so far; not used beside int64 counts

using samplers::StreamingOptions;

/// Its tensors, which are written to.
struct StreamingState { at::Tensor count, total, last, seen; };

/// streaming_counts(owner, options) -> (count, total, last, seen), on the CPU: what a constructor does. `owner`: the class that errors name.
/// Errors: ValueError.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> streaming_counts(std::string owner, std::string_view options);

/// streaming_update_(ids, mask, count!, total!, last!, seen!, options) -> ()
///
/// Counts a batch: ids int64 of any shape, without those where mask (bool, the shape of ids) is false, and, of dense ids, those of -1. Their order
/// does not matter. With B ids counted, all counts fall by 2^(-B / half_life) before theirs rise.
///
/// Of open ids, the gap of a bucket that has n sightings in a batch moves from g to g + w ((seen - last) / n - g), with w = 1 - (1 - alpha)^n, or
/// w = n g / (n g + min(last, half_life / ln 2)): then it is seen / (number of sightings) while seen < half_life, and later the window is that of
/// half_life. The first one is seen / n. Errors, before anything changes: TypeError, ValueError, on the CPU IndexError.
void streaming_update_(const at::Tensor& ids, const OptionalTensor& mask, at::Tensor& count, at::Tensor& total, at::Tensor& last, at::Tensor& seen,
                       std::string_view options);

/// streaming_forget_(ids, count!, total!, last!, seen, options) -> ()
///
/// Dense ids (int64 in [0, N), any shape) as if they had never been seen; total is that of the others. Errors as of streaming_update_; ValueError for open ids,
/// whose buckets are those of others as well.
void streaming_forget_(const at::Tensor& ids, at::Tensor& count, at::Tensor& total, at::Tensor& last, const at::Tensor& seen, std::string_view options);

/// streaming_resize_(count!, total!, last!, seen, num_ids, options) -> options: dense counts of num_ids ids, new ones of which were never seen; the counts of
/// ids that are gone leave `total`. In place, in amortised O(the ids that come or go). Open ids have no number: nothing happens. Errors: ValueError, TypeError.
std::string streaming_resize_(at::Tensor& count, at::Tensor& total, at::Tensor& last, const at::Tensor& seen, int64_t num_ids, std::string_view options);

/// streaming_count(ids, count, total, last, seen, options) -> float64 of ids' shape: the decayed counts, 0 for -1. Of open ids, total / gap.
at::Tensor streaming_count(const at::Tensor& ids, const at::Tensor& count, const at::Tensor& total, const at::Tensor& last, const at::Tensor& seen,
                           std::string_view options);

/// streaming_log_prob(ids, count, total, last, seen, options) -> float64 of ids' shape: log(count / total), -inf for an id that was never seen, and for
/// -1 of dense ids. Of open ids -log(gap), with the longest gap of the hash functions: others only shorten it.
at::Tensor streaming_log_prob(const at::Tensor& ids, const at::Tensor& count, const at::Tensor& total, const at::Tensor& last, const at::Tensor& seen,
                              std::string_view options);

/// The options, where they go with one another; `owner` is named in errors.
StreamingOptions streaming_options(const char* owner, std::string_view text);
/// What all kernels call. `ids_name`: the argument.
void check_streaming(const char* op, const char* ids_name, const at::Tensor& ids, const StreamingState& state, const StreamingOptions& options);
/// The ids to count, -1 where none is; of open ids they stay.
at::Tensor shown_ids(const char* op, const at::Tensor& ids, const OptionalTensor& mask, const StreamingOptions& options);

// ---- arithmetic of host and composite

constexpr double kLog2 = 0.69314718055994530942;

/// After how many ids the average gap forgets: a sighting then weighs 1 / e.
inline double streaming_memory(const StreamingOptions& options) {
  return options.half_life.has_value() ? *options.half_life / kLog2 : std::numeric_limits<double>::infinity();
}

/// A bucket of hash function k: the finalizer of splitmix64.
inline int64_t streaming_bucket(int64_t id, int64_t k, int64_t buckets) {
  uint64_t x = uint64_t(id) + (uint64_t(k) + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return int64_t((x >> 1) % uint64_t(buckets));
}

} // namespace xsoftmax
