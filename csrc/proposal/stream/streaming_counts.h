#pragma once

#include <xsoftmax/options.h>

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>

namespace xsoftmax {

// Counts how often ids occur in a stream of batches; older occurrences count less.
//
// Dense ids: one count per id, which decays by half per `half_life` ids seen. Each row stores the
// number of ids seen when it was last updated, so that a batch touches only the rows of its ids.
// Open ids (any int64): hash tables of smoothed gaps. The gap of an id is the number of ids from
// one occurrence to the next, on average 1 / q (Yi et al., "Sampling-Bias-Corrected Neural Modeling
// for Large Corpus Item Recommendations", RecSys 2019, Algorithm 2).
//
// Thread safety on the CPU: look-ups of one state run concurrently, updates run one at a time.
//
// State:
//
//     count  int64 [N] without decay, float64 [N] with decay, as of `last`. For open ids the gaps,
//            float64 [hashes, buckets], 0 for a bucket without a gap yet
//     total  0-dim, of count's dtype: the decayed number of ids
//     last   int64, the shape of count: `seen` after the batch of the row's last occurrence; [0]
//            with int64 counts
//     seen   int64, 0-dim: the number of ids so far; unused with int64 counts

using samplers::StreamingOptions;

/// The tensors of the state, which are updated in place.
struct StreamingState { at::Tensor count, total, last, seen; };

/// streaming_counts(owner, options) -> (count, total, last, seen), on the CPU: creates the state
/// for a constructor. `owner`: the class named in errors. Raises ValueError.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> streaming_counts(
    std::string owner, std::string_view options);

/// streaming_update_(ids, mask, count!, total!, last!, seen!, options) -> (): counts a batch.
///
/// ids: int64 of any shape. Skips ids where mask (bool, the shape of ids) is false and, for dense
/// ids, those equal to -1. Their order does not matter. With B ids counted, all counts decay by
/// 2^(-B / half_life) before the new ids are added.
///
/// Open ids: the gap of a bucket that occurs n times in a batch moves from g to g + w ((seen -
/// last) / n - g), with w = 1 - (1 - alpha)^n if alpha is given, else w = n g / (n g + min(last,
/// half_life / ln 2)): the gap is then seen / (number of occurrences) while seen < half_life, and
/// afterwards averages over a window given by half_life. The first gap is seen / n. Raises
/// TypeError, ValueError or, on the CPU, IndexError before anything changes.
void streaming_update_(const at::Tensor& ids, const OptionalTensor& mask, at::Tensor& count,
                       at::Tensor& total, at::Tensor& last, at::Tensor& seen,
                       std::string_view options);

/// streaming_forget_(ids, count!, total!, last!, seen, options) -> (): resets dense ids (int64 in
/// [0, N), any shape) as if they had never been seen, and subtracts them from total. Errors as in
/// streaming_update_; ValueError for open ids, which share buckets with other ids.
void streaming_forget_(const at::Tensor& ids, at::Tensor& count, at::Tensor& total,
                       at::Tensor& last, const at::Tensor& seen, std::string_view options);

/// streaming_resize_(count!, total!, last!, seen, num_ids, options) -> options: resizes dense
/// counts to num_ids ids. New ids were never seen; the counts of removed ids are subtracted from
/// `total`. In place, in amortised O(number of ids added or removed). Does nothing for open ids.
/// Raises ValueError or TypeError.
std::string streaming_resize_(at::Tensor& count, at::Tensor& total, at::Tensor& last,
                              const at::Tensor& seen, int64_t num_ids, std::string_view options);

/// streaming_count(ids, count, total, last, seen, options) -> float64 of ids' shape: returns the
/// decayed counts, 0 for -1; for open ids total / gap.
at::Tensor streaming_count(const at::Tensor& ids, const at::Tensor& count, const at::Tensor& total,
                           const at::Tensor& last, const at::Tensor& seen,
                           std::string_view options);

/// streaming_log_prob(ids, count, total, last, seen, options) -> float64 of ids' shape: returns
/// log(count / total), -inf for an id that was never seen and, for dense ids, for -1. For open ids
/// returns -log(gap), with the longest gap over the hash functions, because collisions only shorten
/// gaps.
at::Tensor streaming_log_prob(const at::Tensor& ids, const at::Tensor& count,
                              const at::Tensor& total, const at::Tensor& last,
                              const at::Tensor& seen, std::string_view options);

/// Parses the options and checks their combination; errors name `owner`.
StreamingOptions streaming_options(const char* owner, std::string_view text);
/// Checks the arguments of every kernel. `ids_name`: the argument's name in errors.
void check_streaming(const char* op, const char* ids_name, const at::Tensor& ids,
                     const StreamingState& state, const StreamingOptions& options);
/// Returns the ids to count, with -1 where mask is false. Open ids are returned unchanged.
at::Tensor unmasked_ids(const char* op, const at::Tensor& ids, const OptionalTensor& mask,
                        const StreamingOptions& options);

// ---- arithmetic shared by the host kernel and the composite

constexpr double kLog2 = 0.69314718055994530942;

/// Returns the number of ids after which an occurrence weighs 1 / e in the average gap.
inline double streaming_memory(const StreamingOptions& options) {
  return options.half_life.has_value() ? *options.half_life / kLog2
                                       : std::numeric_limits<double>::infinity();
}

/// Returns the bucket of an id under hash function k: the finalizer of splitmix64.
inline int64_t streaming_bucket(int64_t id, int64_t k, int64_t buckets) {
  uint64_t x = uint64_t(id) + (uint64_t(k) + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return int64_t((x >> 1) % uint64_t(buckets));
}

} // namespace xsoftmax
