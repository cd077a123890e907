#pragma once

#include "samplers/draws.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

// Sets of classes from the cells of a MIDX index on CPU.

namespace xsoftmax {

/// The tables of midx_index.h that say which classes a cell holds.
struct MidxCellTables {
  int64_t cells, classes; ///< K^2 and A
  const int64_t* order;
  const int64_t* start;
  const double* mass;
  const double* prefix;   ///< nullptr where all weights are 1, as the next
  const double* heaviest;

  int64_t size(int64_t cell) const { return start[cell + 1] - start[cell]; }
  double weight(int64_t slot, int64_t cell) const {
    return prefix == nullptr ? 1.0 : prefix[slot] - (slot > start[cell] ? prefix[slot - 1] : 0.0);
  }
  /// The slot of a class of `cell`, drawn by weight with 44 random bits.
  int64_t draw(int64_t cell, uint64_t bits) const {
    const int64_t begin = start[cell], n = size(cell);
    if (prefix == nullptr) {
      return begin + int64_t(multiply_shift(bits << 20, uint64_t(n)));
    }
    return begin + below(cell, double(bits) * 0x1p-44 * mass[cell]);
  }
  /// Which class of a cell lies at `weight` when they stand end to end.
  int64_t below(int64_t cell, double weight) const {
    const double *first = prefix + start[cell], *last = prefix + start[cell + 1];
    return std::min<int64_t>(std::upper_bound(first, last, weight) - first, last - first - 1);
  }
};

/// M different classes by systematic sampling proportional to size, with inclusion probabilities exactly pi_i = min(1, c q_i), sum pi_i =
/// M. A cell's share of q goes to its classes by weight. Classes that are certain are taken; the others are laid end to end, cell after
/// cell, each of length pi_i, the classes of a cell rotated at random; the points u, u + 1, ... pick one each.
class MidxSystematicSet {
 public:
  MidxSystematicSet(const MidxCellTables& tables, int64_t samples)
      : tables_(tables), samples_(samples) {}

  /// share [cells]: sums to 1, above 0 wherever there is a class. Finds c.
  void plan(const double* share) {
    threshold_.assign(tables_.cells, std::numeric_limits<double>::infinity());
    tail_.resize(tables_.cells);
    certain_ = 0;
    for (bool grown = true; grown;) {
      double rest = 0;
      for (int64_t c = 0; c < tables_.cells; ++c) {
        tail_[c] = threshold_[c] == std::numeric_limits<double>::infinity() ? share[c] : share[c] * uncertain_part(c);
        rest += tail_[c];
      }
      scale_ = rest > 0 ? double(samples_ - certain_) / rest : 0.0;
      grown = certain_ < samples_ && grow(share);
    }
  }

  /// After plan: the slots of a set, those that are certain first.
  void draw(uint64_t seed, uint64_t query, int64_t* slots) {
    int64_t* out = slots;
    int64_t last = -1;
    for (int64_t c = 0; c < tables_.cells; ++c) {
      if (threshold_[c] != std::numeric_limits<double>::infinity()) {
        for (int64_t slot = tables_.start[c]; slot < tables_.start[c + 1]; ++slot) {
          if (certain(slot, c)) {
            *out++ = slot;
          }
        }
      }
      last = tail_[c] > 0 ? c : last;
    }
    const int64_t points = samples_ - (out - slots);
    const double u = unit_double(philox(seed, query, 0).low());
    double position = 0;
    int64_t k = 0;
    for (int64_t c = 0; c <= last && k < points; ++c) {
      // Rounding may leave the last point behind the end: it belongs to the last cell.
      const double length = scale_ * tail_[c], end = c == last ? double(points) : position + length;
      if (u + double(k) < end && tail_[c] > 0) {
        const int64_t picked = pick(c, length, u + double(k) - position, end - position, points - k, philox(seed, query, 1 + c).low(), out);
        out += picked;
        k += picked;
      }
      position = end;
    }
    fill(slots, out);
  }

  /// log pi of a class: log_q the log of its probability in one draw.
  double log_count(int64_t slot, int64_t cell, double log_q) const { return count(certain(slot, cell), log_q); }
  /// The same for a class of which only the weight is known.
  double log_count_by_weight(double weight, int64_t cell, double log_q) const {
    return count(weight >= threshold_[cell] * (1 - 1e-6), log_q); // that of a table in float32
  }

 private:
  bool certain(int64_t slot, int64_t cell) const { return tables_.weight(slot, cell) >= threshold_[cell]; }

  double count(bool certain, double log_q) const { return certain ? 0.0 : std::min(0.0, std::log(scale_) + log_q); }

  double uncertain_part(int64_t cell) const {
    double weight = 0;
    for (int64_t slot = tables_.start[cell]; slot < tables_.start[cell + 1]; ++slot) {
      weight += certain(slot, cell) ? 0.0 : tables_.weight(slot, cell);
    }
    return weight / tables_.mass[cell];
  }

  // Marks the classes whose pi has reached 1 under the present c.
  bool grow(const double* share) {
    bool grown = false;
    for (int64_t c = 0; c < tables_.cells; ++c) {
      const double heaviest = tables_.prefix == nullptr ? 1.0 : tables_.heaviest[c];
      if (tail_[c] > 0 && scale_ * share[c] * heaviest >= tables_.mass[c]) {
        const double threshold = tables_.mass[c] / (scale_ * share[c]);
        for (int64_t slot = tables_.start[c]; slot < tables_.start[c + 1]; ++slot) {
          const double weight = tables_.weight(slot, c);
          if (weight >= threshold && weight < threshold_[c]) {
            ++certain_;
            grown = true;
          }
        }
        threshold_[c] = std::min(threshold_[c], threshold);
      }
    }
    return grown;
  }

  // Puts down the slots under the points at, at + 1, ... below `end` in a cell, `most` at most; returns how many.
  int64_t pick(int64_t cell, double length, double at, double end, int64_t most, uint64_t bits, int64_t* out) {
    const int64_t begin = tables_.start[cell], n = tables_.size(cell), cut = int64_t(multiply_shift(bits, uint64_t(n)));
    const bool mixed = threshold_[cell] != std::numeric_limits<double>::infinity(); // some are certain, others are not
    if (mixed) {
      left_.clear();
      for (int64_t i = 0; i < n; ++i) {
        const int64_t slot = begin + (i + cut < n ? i + cut : i + cut - n);
        if (!certain(slot, cell)) {
          left_.push_back(slot);
        }
      }
    }
    const int64_t held = mixed ? int64_t(left_.size()) : n;
    const double base = tables_.prefix == nullptr || cut == 0 ? 0.0 : tables_.prefix[begin + cut - 1];
    double sum = 0; // of the classes of left_ before `rank`
    int64_t rank = 0, picked = 0;
    for (; picked < std::min(most, held) && at + double(picked) < end; ++picked) {
      const double fraction = (at + double(picked)) / length;
      int64_t place;
      if (tables_.prefix == nullptr) {
        place = int64_t(fraction * double(n));
      } else if (mixed) {
        const double aim = fraction * tail_weight(cell);
        for (; rank + 1 < held && sum + tables_.weight(left_[rank], cell) <= aim; ++rank) {
          sum += tables_.weight(left_[rank], cell);
        }
        place = rank;
      } else {
        const double aim = base + fraction * tables_.mass[cell];
        const int64_t found = tables_.below(cell, aim < tables_.mass[cell] ? aim : aim - tables_.mass[cell]);
        place = found >= cut ? found - cut : found - cut + n;
      }
      // No class is longer than the distance of two points, so places rise, but for rounding.
      out[picked] = picked > 0 ? std::max(place, out[picked - 1] + 1) : place;
    }
    int64_t bound = held;
    for (int64_t i = picked - 1; i >= 0 && out[i] >= bound; --i) {
      out[i] = --bound;
    }
    for (int64_t i = 0; i < picked; ++i) {
      out[i] = mixed ? left_[out[i]] : begin + (out[i] + cut < n ? out[i] + cut : out[i] + cut - n);
    }
    return picked;
  }

  double tail_weight(int64_t cell) const {
    double weight = 0;
    for (const int64_t slot : left_) {
      weight += tables_.weight(slot, cell);
    }
    return weight;
  }

  // What rounding has left undrawn: any classes that do not stand yet.
  void fill(int64_t* slots, int64_t* out) const {
    if (out == slots + samples_) {
      return;
    }
    std::vector<bool> taken(tables_.classes);
    for (const int64_t* slot = slots; slot < out; ++slot) {
      taken[*slot] = true;
    }
    for (int64_t slot = 0; out < slots + samples_; ++slot) {
      if (!taken[slot]) {
        *out++ = slot;
      }
    }
  }

  const MidxCellTables& tables_;
  int64_t samples_, certain_ = 0;
  double scale_ = 0;              // c
  std::vector<double> threshold_; // the weight from which a class of a cell is certain
  std::vector<double> tail_;      // the share of a cell's other classes
  std::vector<int64_t> left_;
};

} // namespace xsoftmax
