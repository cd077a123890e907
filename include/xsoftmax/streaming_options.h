#pragma once

// Options of counts of a stream, and of samplers that follow one, with their defaults: what constructors in C++ take, and operators read from text.

#include <cstdint>
#include <optional>

namespace xsoftmax::samplers {

/// Of StreamingCounts; see xsoftmax.samplers.StreamingCounts.
struct StreamingOptions {
  std::optional<int64_t> num_ids = std::nullopt;  ///< N: ids are in [0, N); none: open ids, any int64
  std::optional<double> half_life = std::nullopt; ///< in ids seen; none: nothing is forgotten
  std::optional<double> alpha = std::nullopt;     ///< of open ids, in (0, 1], in the place of half_life: the weight of a new gap
  int64_t buckets = 1 << 20;                      ///< of open ids, for each hash function
  int64_t hashes = 2;                             ///< of open ids, at most 64

  bool open() const { return !num_ids.has_value(); }
  /// Whether counts are integers.
  bool exact() const { return !open() && !half_life.has_value(); }

  template <typename Visitor>
  void visit(Visitor& v) {
    v("num_ids", num_ids);
    v("half_life", half_life);
    v("alpha", alpha);
    v("buckets", buckets);
    v("hashes", hashes);
  }
};

/// Of a UnigramSampler that follows counts: q_i = (1 - uniform_share) counts_i^power / sum_j counts_j^power + uniform_share / n, n the classes that are
/// not excluded.
struct FollowOptions {
  double power = 0.75;          ///< finite and at least 0
  double uniform_share = 0.01;  ///< in (0, 1]
  int64_t refresh_every = 1000; ///< steps between two rebuilds of the tables; 0: only at step 0
  bool distinct = true;         ///< how it draws; the class sets it

  template <typename Visitor>
  void visit(Visitor& v) {
    v("power", power);
    v("uniform_share", uniform_share);
    v("refresh_every", refresh_every);
    v("distinct", distinct);
  }
};

} // namespace xsoftmax::samplers
