#pragma once

// Draws one set from systematic tables, as plain functions for host and CUDA code (the method is
// described in systematic_sample.h).

#include "random/philox.h"
#include "proposal/static/static_tail.h"
#include "proposal/static/systematic_sample.h"

#include <cmath>

namespace xsoftmax {

/// Buckets of the tables, and the tail.
constexpr int64_t kMaxSystematicParts = kMaxSystematicBuckets + 1;

/// Raw tables and the positions of their buckets.
struct SystematicTables {
  const double* probability;
  const int64_t* order;
  const double* cumulative;
  int64_t classes; ///< that the tables are built for
  int64_t buckets;
  StaticTail tail; ///< an additional part after all buckets, with one slot per class

  XS_HOST_DEVICE int64_t parts() const { return buckets + (tail.count() > 0 ? 1 : 0); }
  XS_HOST_DEVICE int64_t begin(int64_t bucket) const {
    const int64_t longer = classes % buckets; // the first buckets have one class more
    return bucket * (classes / buckets) + (bucket < longer ? bucket : longer);
  }
  /// Returns the number of slots in `bucket` that hold one of the first `count` sorted positions.
  XS_HOST_DEVICE int64_t slots_within(int64_t bucket, int64_t count) const {
    return count <= bucket ? 0 : (count - bucket + buckets - 1) / buckets;
  }
  /// Returns the slot of a sorted position.
  XS_HOST_DEVICE int64_t slot(int64_t position) const {
    return begin(position % buckets) + position / buckets;
  }
};

/// Depends on the number of samples: the certain classes, and the remainder of each bucket.
struct SystematicPlan {
  int64_t samples;
  int64_t certain;                             ///< t
  int64_t support; ///< number of classes with positive weight
  double tail; ///< weight of the classes after the certain ones
  int64_t first[kMaxSystematicParts]; ///< first slot after the certain classes
  int64_t last[kMaxSystematicParts]; ///< one past the last slot with positive weight
  double mass[kMaxSystematicParts]; ///< weight of the slots first .. last - 1
};

/// Returns the weight of all sorted positions from `position` on: one slot of each bucket, summed
/// in order.
XS_HOST_DEVICE inline double systematic_tail(const SystematicTables& tables, int64_t position) {
#ifdef __CUDA_ARCH__
  constexpr int kAhead = 32; // loads in flight together
#else
  constexpr int kAhead = 8;
#endif
  const int64_t slots = position / tables.buckets,
                more = position % tables.buckets; // the first `more` buckets hold one position more
  const int64_t all = tables.classes / tables.buckets, longer = tables.classes % tables.buckets;
  double tail = 0;
  for (int64_t first = 0; first < tables.buckets; first += kAhead) {
    double weight[kAhead];
    for (int i = 0; i < kAhead; ++i) {
      const int64_t b = first + i, slot = slots + (b < more ? 1 : 0);
      const bool exists = b < tables.buckets && slot < all + (b < longer ? 1 : 0);
      weight[i] = exists ? tables.cumulative[b * all + (b < longer ? b : longer) + slot] : 0.0;
    }
    for (int i = 0; i < kAhead; ++i) {
      tail += weight[i];
    }
  }
  return tail + tables.tail.mass;
}

/// Returns the first position in [0, end) for which `predicate` is true (it must be monotonic), or
/// end.
template <typename Predicate>
XS_HOST_DEVICE int64_t first_where(int64_t end, Predicate predicate) {
  int64_t first = 0;
  while (first < end) {
    const int64_t middle = first + (end - first) / 2;
    if (predicate(middle)) {
      end = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

/// Predicates for the binary searches of a plan: has_no_weight is true from the end of the support
/// on, is_enough from the number of certain classes on. checks.id(id, classes) validates each class
/// id before it is used.
template <typename Checks>
struct SystematicSearches {
  const SystematicTables& tables;
  int64_t num_samples;
  const Checks& checks;

  XS_HOST_DEVICE double weight_at(int64_t position) const {
    const int64_t id = tables.order[tables.slot(position)];
    checks.id(id, tables.classes);
    return tables.probability[id];
  }
  XS_HOST_DEVICE bool has_no_weight(int64_t position) const { return !(weight_at(position) > 0); }
  XS_HOST_DEVICE bool is_enough(int64_t t) const {
    return double(num_samples - t) * weight_at(t) <= systematic_tail(tables, t);
  }
};

/// Fills in one part of a plan, given the certain classes and the support of the tables.
XS_HOST_DEVICE inline void plan_bucket(SystematicPlan& plan, const SystematicTables& tables,
                                       int64_t b, int64_t certain, int64_t support) {
  if (b == tables.buckets) {
    plan.first[b] = tables.tail.first;
    plan.last[b] = tables.tail.end;
    plan.mass[b] = tables.tail.mass;
    return;
  }
  const int64_t begin = tables.begin(b), first = begin + tables.slots_within(b, certain);
  plan.last[b] = begin + tables.slots_within(b, support);
  plan.first[b] = first < plan.last[b] ? first : plan.last[b];
  plan.mass[b] = plan.first[b] < plan.last[b] ? tables.cumulative[plan.first[b]] : 0.0;
}

/// Returns an upper bound on the number of certain classes. No set is larger than what the tables
/// are built for, so no class of the tail is certain.
XS_HOST_DEVICE inline int64_t most_certain(int64_t num_samples, int64_t support) {
  return num_samples < support ? num_samples : support;
}

/// Makes the plan for `num_samples` (at most the number of classes). checks.samples(num_samples,
/// support) validates that so many classes can be drawn; each device reports errors in its own way.
template <typename Checks>
SystematicPlan make_systematic_plan(const SystematicTables& tables, int64_t num_samples,
                                    const Checks& checks) {
  const SystematicSearches<Checks> searches{tables, num_samples, checks};
  SystematicPlan plan;
  plan.samples = num_samples;
  plan.support = first_where(tables.classes, [&](int64_t p) { return searches.has_no_weight(p); });
  checks.samples(num_samples, plan.support);
  plan.certain = first_where(most_certain(num_samples, plan.support),
                             [&](int64_t t) { return searches.is_enough(t); });
  plan.tail = systematic_tail(tables, plan.certain);
  for (int64_t b = 0; b < tables.parts(); ++b) {
    plan_bucket(plan, tables, b, plan.certain, plan.support);
  }
  return plan;
}

/// Runs several binary searches in lockstep. A single search waits for memory at nearly every step;
/// these wait together.
template <int kLanes>
struct SlotSearches {
  int64_t first[kLanes]; ///< in: the search range is first .. first + size - 1
  int64_t size[kLanes]; ///< at least 1
  double target[kLanes];
  int64_t base[kLanes]; ///< rank of slot 0 if the bucket were not cut

  /// Sets `first` to the last slot whose cumulative weight is at least `target`; unchanged if there
  /// is none.
  XS_HOST_DEVICE void run(const double* cumulative, int lanes) {
    for (bool open = true; open;) {
      open = false;
      for (int i = 0; i < lanes; ++i) {
        const int64_t half = size[i] / 2;
        // A mask instead of a branch, which would be mispredicted half of the time.
        first[i] += half & -int64_t(cumulative[first[i] + half] >= target[i]);
        size[i] -= half;
        open |= size[i] > 1;
      }
    }
  }
};

/// The layout of one set: buckets in random order, each cut at a random slot.
class SystematicLayout {
 public:
  XS_HOST_DEVICE SystematicLayout(const SystematicTables& tables, const SystematicPlan& plan)
      : tables_(tables), plan_(plan) {}

  /// Lays out the set of a query, in two steps. The first (shuffle) can be parallelised over
  /// buckets.
  XS_HOST_DEVICE void lay_out(uint64_t seed, uint64_t query) {
    for (int64_t b = 0; b < tables_.parts(); ++b) {
      shuffle(seed, query, b);
    }
    arrange(seed, query);
  }

  /// Chooses where a bucket is cut, and which bucket it is swapped with.
  XS_HOST_DEVICE void shuffle(uint64_t seed, uint64_t query, int64_t b) {
    const PhiloxBlock block = philox(seed, query, 1 + uint64_t(b));
    bucket_[b] = b;
    rank_[b] = int64_t(multiply_shift(block.low(), uint64_t(b) + 1));
    // Not cut: the weight before the cut would involve a logarithm, whose bits depend on the
    // device.
    const bool whole = b == tables_.buckets && tables_.tail.log_uniform;
    cut_[b] = plan_.first[b] +
        (whole ? 0
               : int64_t(multiply_shift(block.high(), uint64_t(plan_.last[b] - plan_.first[b]))));
  }

  XS_HOST_DEVICE void arrange(uint64_t seed, uint64_t query) {
    const int64_t buckets = tables_.parts();
    for (int64_t b = buckets - 1; b >= 0; --b) {
      const int64_t other = rank_[b], chosen = bucket_[other];
      bucket_[other] = bucket_[b];
      bucket_[b] = chosen;
    }
    start_[0] = 0;
    rank_[0] = 0;
    last_place_ = 0;
    for (int64_t i = 0; i < buckets; ++i) {
      start_[i + 1] = start_[i] + plan_.mass[bucket_[i]];
      rank_[i + 1] = rank_[i] + plan_.last[bucket_[i]] - plan_.first[bucket_[i]];
      last_place_ = rank_[i + 1] > rank_[i] ? i + 1 : last_place_;
    }
    offset_ = unit_double(philox(seed, query, 0).low());
  }

  XS_HOST_DEVICE int64_t points() const { return plan_.samples - plan_.certain; }

  /// Computes ids [points()], the classes at the points, in three steps. The first and the last can
  /// be parallelised over points.
  XS_HOST_DEVICE void pick(int64_t* ids) const {
    rank<16>(ids, 0, points());
    make_increasing(ids);
    name(ids, 0, points());
  }

  /// Sets ids[k], first <= k < last, to the rank of the class at point k; kLanes points at a time.
  template <int kLanes>
  XS_HOST_DEVICE void rank(int64_t* ids, int64_t first, int64_t last) const {
    int64_t at = 0;
    for (int64_t k = first; k < last; k += kLanes) {
      const int lanes = kLanes == 1 ? 1 : int(last - k < kLanes ? last - k : kLanes);
      SlotSearches<kLanes> searches;
      for (int i = 0; i < lanes; ++i) {
        at = find_id(searches, i, (offset_ + double(k + i)) / double(points()), at);
      }
      searches.run(tables_.cumulative, lanes);
      for (int i = 0; i < lanes; ++i) {
        ids[k + i] = searches.base[i] + searches.first[i];
      }
    }
  }

  /// Returns whether make_increasing changes nothing at point k.
  XS_HOST_DEVICE bool is_increasing(const int64_t* ids, int64_t k) const {
    return (k == 0 || ids[k] > ids[k - 1]) && ids[k] < rank_[tables_.parts()];
  }

  /// Makes the ranks distinct. No class is longer than the distance between two points, so ranks
  /// ascend except for rounding. If two points share a class, the second one moves to the next
  /// class; points pushed past the end move back.
  XS_HOST_DEVICE void make_increasing(int64_t* ids) const {
    for (int64_t k = 1; k < points(); ++k) {
      ids[k] = ids[k] <= ids[k - 1] ? ids[k - 1] + 1 : ids[k];
    }
    int64_t bound = rank_[tables_.parts()];
    for (int64_t k = points() - 1; k >= 0 && ids[k] >= bound; --k) {
      ids[k] = --bound;
    }
  }

  /// Replaces the ranks ids[k], first <= k < last, by classes.
  XS_HOST_DEVICE void name(int64_t* ids, int64_t first, int64_t last) const {
    int64_t at = 0;
    for (int64_t k = first; k < last; ++k) {
      ids[k] = class_of_rank(ids[k], at);
    }
  }

 private:
  /// Sets up the search of `lane` for the class at a fraction of the layout's length. `at` is the
  /// position of the previous point's bucket; returns the position of this one's.
  template <int kLanes>
  XS_HOST_DEVICE int64_t find_id(SlotSearches<kLanes>& searches, int lane, double fraction,
                                 int64_t at) const {
    const double total = start_[tables_.parts()];
    // Rounding may move the last point past the end, where only empty buckets can follow.
    while (at + 1 < last_place_ && std::fma(fraction, total, -start_[at + 1]) >= 0) {
      ++at;
    }
    const int64_t b = bucket_[at], first = plan_.first[b], last = plan_.last[b], cut = cut_[b];
    const double inside = std::fma(fraction, total, -start_[at]);
    const bool late = b == tables_.buckets;
    // weight of the slots cut .. last - 1, which come first
    const double head = !late ? tables_.cumulative[cut]
        : cut == first        ? plan_.mass[b]
                              : tables_.tail.even_from(cut);
    const bool in_head = inside < head || cut == first;
    searches.first[lane] = in_head ? cut : first;
    searches.size[lane] = in_head ? last - cut : cut - first;
    searches.target[lane] = in_head ? head - inside : plan_.mass[b] - (inside - head);
    searches.base[lane] = rank_[at] + (in_head ? -cut : last - cut - first);
    if (late) {
      searches.first[lane] = tables_.tail.last_with(searches.target[lane], searches.first[lane],
                                                    searches.first[lane] + searches.size[lane]);
      searches.size[lane] = 1;
    }
    return at;
  }

  XS_HOST_DEVICE int64_t class_of_rank(int64_t rank, int64_t& at) const {
    while (rank >= rank_[at + 1]) {
      ++at;
    }
    const int64_t b = bucket_[at], slot = cut_[b] + rank - rank_[at];
    return tables_.order[slot < plan_.last[b] ? slot : slot - (plan_.last[b] - plan_.first[b])];
  }

  // A copy, because a layout in shared memory must not refer to one thread's kernel parameters.
  SystematicTables tables_;
  const SystematicPlan& plan_;
  int64_t bucket_[kMaxSystematicParts]; // the part at each position of the layout
  int64_t cut_[kMaxSystematicParts]; // per part
  double start_[kMaxSystematicParts + 1]; // weight before each position
  int64_t rank_[kMaxSystematicParts + 1]; // number of classes before each position
  int64_t last_place_ = 0; // one past the last nonempty bucket
  double offset_; // u
};

} // namespace xsoftmax
