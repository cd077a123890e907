#pragma once

#include "core/optional.h"

#include <string_view>
#include <tuple>

namespace xsoftmax {

// Draws from the classes outside a set: the noise of CANE, the complementary sums of Botev et al. (2017).

/// The options of complement_sample and complement_log_count.
struct ComplementOptions {
  int64_t num_classes = 0; ///< N
  int64_t num_samples = 0; ///< draws for each query
  int64_t tries = 0;       ///< of a sampler for each of them; 0: uniform over what is outside

  template <typename Visitor>
  void visit(Visitor& v) {
    v("num_classes", num_classes);
    v("num_samples", num_samples);
    v("tries", tries);
  }
};

/// sort_sets(sets, num_classes) -> inside: each set in rising order, what is none behind all classes, as num_classes + its column.
/// sets int64 [Q, C], or [1, C] for all queries: no class twice in one, -1 for none. Errors: on the CPU ValueError for a class that stands twice,
/// IndexError for one that there is not.
at::Tensor sort_sets(const at::Tensor& sets, int64_t num_classes);

/// complement_sample(seed, inside, draws, queries, options) -> ids int64 [Q, num_samples], outside each query's set.
///
/// inside: of sort_sets. draws int64 [Q, num_samples tries], of a sampler: of each `tries` that follow one another the first that is outside is
/// taken. Where none is, and without draws, a class uniform over what is outside, its number floor(u (N - |C|)) from a number u of 53 bits of
/// Philox block (query, draw). Of queries [Q, D] only the number of rows matters. Where nothing is outside: any class.
at::Tensor complement_sample(const at::Tensor& seed, const at::Tensor& inside, const OptionalTensor& draws, const at::Tensor& queries,
                             std::string_view options);

/// complement_log_count(inside, inside_count, ids, log_count, target, target_count, options) -> (log_count, target_log_count)
///
/// Log expected counts, log(num_samples q_x), of what complement_sample draws:
///
///     q_x(j) = q_j (1 + f + ... + f^(tries - 1)) + f^tries / (N - |C|),   f the sum of q over the set
///
/// which is q_j / (1 - f) where f is small. ids int64 [Q, P], drawn: +inf where nothing is outside. target int64 [Q], [Q, T] or none: -inf for
/// a class of the set and for -1. inside_count (the shape of `inside`, or [C]), log_count and target_count (the shapes of ids and target): what
/// the sampler says of these classes, log(num_samples tries q_j); all none without a sampler: q_x = 1 / (N - |C|). Both results
/// float32, target_log_count [0] without targets.
std::tuple<at::Tensor, at::Tensor> complement_log_count(const at::Tensor& inside, const OptionalTensor& inside_count, const at::Tensor& ids,
                                                        const OptionalTensor& log_count, const OptionalTensor& target, const OptionalTensor& target_count,
                                                        std::string_view options);

} // namespace xsoftmax
