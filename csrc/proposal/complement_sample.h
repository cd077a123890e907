#pragma once

#include "op/optional.h"

#include <bit>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <utility>

namespace xsoftmax {

// Draws from the classes outside a set: the noise of CANE, and complementary sum sampling (Botev et
// al., 2017).

/// The options of complement_sample and complement_log_count.
struct ComplementOptions {
  int64_t num_classes = 0; ///< N
  int64_t num_samples = 0; ///< draws per query
  int64_t tries = 0; ///< draws of a sampler to try for each of them; 0: uniform outside the set

  template <typename Visitor>
  void visit(Visitor& v) {
    v("num_classes", num_classes);
    v("num_samples", num_samples);
    v("tries", tries);
  }
};

/// sort_sets(sets, num_classes) -> inside: sorts each set in ascending order. -1 sorts last, as
/// num_classes + its column. sets: int64 [Q, C], or [1, C] for all queries, no class twice in a
/// set, -1 for no class. On the CPU raises ValueError for a repeated class and IndexError for an id
/// out of range.
at::Tensor sort_sets(const at::Tensor& sets, int64_t num_classes);

/// complement_sample(seed, inside, draws, queries, options) -> ids: draws int64 [Q, num_samples]
/// outside each query's set.
///
/// inside: returned by sort_sets. draws: int64 [Q, num_samples tries], of a sampler; of each
/// `tries` consecutive draws the first one outside the set is taken. If there is none, or without
/// draws, the class is uniform outside the set: its rank there is floor(u (N - |C|)), with u from
/// the 53 upper bits of Philox block (query, draw). Only the number of rows of queries
/// [Q, D] matters. If no class is outside, returns arbitrary classes.
at::Tensor complement_sample(const at::Tensor& seed, const at::Tensor& inside,
                             const OptionalTensor& draws, const at::Tensor& queries,
                             std::string_view options);

/// complement_log_count(inside, inside_count, ids, log_count, target, target_count, options) ->
/// (log_count, target_log_count): returns log(num_samples q_x), the log expected counts of the
/// draws of complement_sample, both float32. With f the sum of q over the set,
///
///     q_x(j) = q_j (1 + f + ... + f^(tries - 1)) + f^tries / (N - |C|),
///
/// about q_j / (1 - f) if f is small. ids: the drawn int64 [Q, P]; +inf if no class is outside.
/// target: int64 [Q], [Q, T] or none; -inf for -1 and for classes of the set; target_log_count is
/// [0] without targets. inside_count (the shape of `inside`, or [C]), log_count and target_count
/// (the shapes of ids and target): the sampler's log counts log(num_samples tries q_j) of these
/// classes; all none without a sampler: q_x = 1 / (N - |C|).
std::tuple<at::Tensor, at::Tensor> complement_log_count(
    const at::Tensor& inside, const OptionalTensor& inside_count, const at::Tensor& ids,
    const OptionalTensor& log_count, const OptionalTensor& target,
    const OptionalTensor& target_count, std::string_view options);

// For the implementations of the two operators.

/// Checks the arguments and returns the options.
ComplementOptions check_complement_sample(const at::Tensor& seed, const at::Tensor& inside,
                                          const OptionalTensor& draws, const at::Tensor& queries,
                                          std::string_view text);
ComplementOptions check_complement_log_count(const at::Tensor& inside,
                                             const OptionalTensor& inside_count,
                                             const at::Tensor& ids, const OptionalTensor& log_count,
                                             const OptionalTensor& target,
                                             const OptionalTensor& target_count,
                                             std::string_view text);

/// The composites, for any device.
at::Tensor complement_sample_composite(const at::Tensor& seed, const at::Tensor& inside,
                                       const OptionalTensor& draws, const at::Tensor& queries,
                                       std::string_view text);
std::tuple<at::Tensor, at::Tensor> complement_log_count_composite(
    const at::Tensor& inside, const OptionalTensor& inside_count, const at::Tensor& ids,
    const OptionalTensor& log_count, const OptionalTensor& target,
    const OptionalTensor& target_count, std::string_view text);

/// Returns 1 + f + ... + f^(n - 1) and f^n, by doubling. T: a tensor or a double; `one` is 1 in its
/// shape.
template <typename T>
std::pair<T, T> geometric_sum(const T& f, const T& one, int64_t n) {
  T sum = one, power = f;
  for (int bit = int(std::bit_width(uint64_t(n))) - 2; bit >= 0; --bit) {
    sum = sum * (power + 1.0);
    power = power * power;
    if (n >> bit & 1) {
      sum = sum * f + 1.0;
      power = power * f;
    }
  }
  return {sum, power};
}

} // namespace xsoftmax
