#pragma once

#include "proposal/midx/midx_cell_tables.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

// Draws sets of distinct classes from the cells of a MIDX index on CPU.

namespace xsoftmax {

/// Draws M distinct classes by systematic sampling proportional to size, with inclusion
/// probabilities exactly pi_i = min(1, c q_i), sum pi_i = M.
///
/// The share of a cell in q is split over its classes by weight. Classes with pi = 1 (certain) are
/// always taken. The others are laid end to end on a line, cell by cell, each with length pi_i and
/// the classes of a cell rotated at random; each of the points u, u + 1, ... picks one class.
///
/// The cells of one first codeword form a row. For most rows only the total share is needed; the
/// shares of the cells in the other rows are computed on demand.
class SystematicSampler {
 public:
  SystematicSampler(const MidxCellTables& tables, int64_t samples)
      : tables_(tables), rows_(tables.codewords), samples_(samples), place_(rows_, -1),
        row_tail_(rows_) {}

  /// Finds c. row_share [K], with sum 1: the share of each row, above 0 if it contains a class.
  /// fill(row, share) writes the shares of a row's K cells.
  template <typename Fill>
  void plan(const double* row_share, const Fill& fill) {
    std::fill(place_.begin(), place_.end(), -1);
    open_ = 0;
    std::copy_n(row_share, rows_, row_tail_.data());
    certain_ = 0;
    for (bool changed = true; changed;) {
      const double uncertain = std::accumulate(row_tail_.begin(), row_tail_.end(), 0.0);
      scale_ = uncertain > 0 ? double(samples_ - certain_) / uncertain : 0.0;
      changed = false;
      for (int64_t row = 0; certain_ < samples_ && row < rows_; ++row) {
        // The share of a class is at most that of its row.
        if (row_tail_[row] > 0 && scale_ * row_share[row] >= 1 - 1e-9) {
          changed |= grow(open(row, fill), row);
        }
      }
    }
    TORCH_CHECK_VALUE(
        certain_ <= samples_,
        "MIDX: expected prefix, heaviest and mass that fit together, got weights for ", certain_,
        " classes that are drawn for certain in sets of ", samples_);
  }

  /// Draws the slots of a set, the certain ones first. Call plan before.
  template <typename Fill>
  void draw(uint64_t seed, uint64_t query, const Fill& fill, int64_t* slots) {
    int64_t* out = slots;
    int64_t last = -1;
    for (int64_t row = 0; row < rows_; ++row) {
      out = place_[row] < 0 ? out : write_certain(row, out);
      last = row_tail_[row] > 0 ? row : last;
    }
    const int64_t points = samples_ - (out - slots);
    const double u = unit_double(philox(seed, query, 0).low());
    double position = 0;
    int64_t k = 0;
    for (int64_t row = 0; row <= last && k < points; ++row) {
      // Rounding may put the last point past the end: it then picks from the last row, and there
      // from the last cell.
      const double end = row == last ? double(points) : position + scale_ * row_tail_[row];
      if (u + double(k) < end && row_tail_[row] > 0) {
        const int64_t picked =
            pick_in_row(open(row, fill), row, u, k, position, end, points, seed, query, out);
        out += picked;
        k += picked;
      }
      position = end;
    }
    fill_missing(slots, out);
  }

  /// Returns log pi of a class. log_q: the log of its probability in a single draw.
  double log_count(int64_t slot, int64_t cell, double log_q) const {
    return count(certain(slot, cell), log_q);
  }
  /// The same for a class given by its weight instead of its slot.
  double log_count_by_weight(double weight, int64_t cell, double log_q) const {
    // The tolerance allows for a weight read from a float32 table.
    return count(weight >= threshold(cell) * (1 - 1e-6), log_q);
  }

 private:
  // A row with the shares of its cells. If `mixed`, some classes are certain: in each cell those
  // with a weight of at least `threshold`, and `tail` is the share of the others. Otherwise the
  // tail is `share`.
  struct Row {
    std::vector<double> share, tail, threshold;
    bool mixed = false;

    const double* tails() const { return mixed ? tail.data() : share.data(); }
  };

  template <typename Fill>
  Row& open(int64_t row, const Fill& fill) {
    if (place_[row] < 0) {
      if (open_ == int64_t(open_rows_.size())) {
        open_rows_.emplace_back().share.resize(rows_);
      }
      place_[row] = open_++;
      open_rows_[place_[row]].mixed = false;
      fill(row, open_rows_[place_[row]].share.data());
    }
    return open_rows_[place_[row]];
  }

  double threshold(int64_t cell) const {
    const int64_t place = place_[cell / rows_];
    return place < 0 || !open_rows_[place].mixed ? kNever
                                                 : open_rows_[place].threshold[cell % rows_];
  }

  bool certain(int64_t slot, int64_t cell) const {
    return tables_.weight(slot, cell) >= threshold(cell);
  }

  double count(bool certain, double log_q) const {
    return certain ? 0.0 : std::min(0.0, std::log(scale_) + log_q);
  }

  double uncertain_fraction(int64_t cell, double threshold) const {
    double weight = 0;
    for (int64_t slot = tables_.start[cell]; slot < tables_.start[cell + 1]; ++slot) {
      const double class_weight = tables_.weight(slot, cell);
      weight += class_weight >= threshold ? 0.0 : class_weight;
    }
    return weight / tables_.mass[cell];
  }

  // Marks the classes of a row whose pi has reached 1 with the present c.
  bool grow(Row& cells, int64_t row) {
    bool changed = false;
    const double *mass = tables_.mass + row * rows_,
                 *heaviest = tables_.prefix == nullptr ? nullptr : tables_.heaviest + row * rows_;
    for (int64_t k = 0; k < rows_; ++k) {
      const double share = cells.share[k];
      if (share > 0 && scale_ * share * (heaviest == nullptr ? 1.0 : heaviest[k]) >= mass[k] &&
          cells.tails()[k] > 0) {
        if (!cells.mixed) {
          cells.tail = cells.share;
          cells.threshold.assign(rows_, kNever);
          cells.mixed = true;
        }
        const int64_t c = row * rows_ + k;
        const double threshold = tables_.mass[c] / (scale_ * share);
        for (int64_t slot = tables_.start[c]; slot < tables_.start[c + 1]; ++slot) {
          const double weight = tables_.weight(slot, c);
          if (weight >= threshold && weight < cells.threshold[k]) {
            ++certain_;
            changed = true;
          }
        }
        cells.threshold[k] = std::min(cells.threshold[k], threshold);
        cells.tail[k] = share * uncertain_fraction(c, cells.threshold[k]);
      }
    }
    if (changed) {
      row_tail_[row] = std::accumulate(cells.tail.begin(), cells.tail.end(), 0.0);
    }
    return changed;
  }

  int64_t* write_certain(int64_t row, int64_t* out) const {
    const Row& cells = open_rows_[place_[row]];
    for (int64_t k = 0; cells.mixed && k < rows_; ++k) {
      const int64_t c = row * rows_ + k;
      for (int64_t slot = tables_.start[c];
           cells.threshold[k] != kNever && slot < tables_.start[c + 1]; ++slot) {
        if (certain(slot, c)) {
          *out++ = slot;
        }
      }
    }
    return out;
  }

  // Picks the classes at the points u + k, u + k + 1, ... of a row that occupies [begin, end) on
  // the line. Returns how many points there were.
  int64_t pick_in_row(const Row& cells, int64_t row, double u, int64_t k, double begin, double end,
                      int64_t points, uint64_t seed, uint64_t query, int64_t* out) {
    const double* tail = cells.tails();
    int64_t last = rows_ - 1, done = 0;
    while (last > 0 && !(tail[last] > 0)) {
      --last;
    }
    double position = begin;
    for (int64_t i = 0; i <= last && k + done < points; ++i) {
      const double length = scale_ * tail[i],
                   cell_end = i == last ? end : std::min(end, position + length),
                   at = u + double(k + done);
      if (at < cell_end && tail[i] > 0) {
        const int64_t c = row * rows_ + i;
        done += pick(c, length, at - position, cell_end - position, points - k - done,
                     cell_rotation(seed, query, c, tables_.size(c)), out + done);
      }
      position = cell_end;
    }
    return done;
  }

  // Writes the slots at the points at, at + 1, ... below `end` in a cell, at most `limit`. Returns
  // how many there were.
  int64_t pick(int64_t cell, double length, double at, double end, int64_t limit, int64_t cut,
               int64_t* out) {
    const int64_t begin = tables_.start[cell], n = tables_.size(cell);
    const bool mixed = threshold(cell) != kNever; // some classes are certain, others are not
    if (mixed) {
      uncertain_slots_.clear();
      for (int64_t i = 0; i < n; ++i) {
        const int64_t slot = begin + (i + cut < n ? i + cut : i + cut - n);
        if (!certain(slot, cell)) {
          uncertain_slots_.push_back(slot);
        }
      }
    }
    const int64_t count = mixed ? int64_t(uncertain_slots_.size()) : n;
    const double base =
        tables_.prefix == nullptr || cut == 0 ? 0.0 : tables_.prefix[begin + cut - 1];
    double sum = 0; // of the classes in uncertain_slots_ before `rank`
    int64_t rank = 0, picked = 0;
    for (; picked < std::min(limit, count) && at + double(picked) < end; ++picked) {
      const double fraction = (at + double(picked)) / length;
      int64_t place;
      if (tables_.prefix == nullptr) {
        place = int64_t(fraction * double(n));
      } else if (mixed) {
        const double target_sum = fraction * tail_weight(cell);
        for (; rank + 1 < count && sum + tables_.weight(uncertain_slots_[rank], cell) <= target_sum;
             ++rank) {
          sum += tables_.weight(uncertain_slots_[rank], cell);
        }
        place = rank;
      } else {
        const double target_sum = base + fraction * tables_.mass[cell];
        const int64_t found = tables_.below(
            cell, target_sum < tables_.mass[cell] ? target_sum : target_sum - tables_.mass[cell]);
        place = found >= cut ? found - cut : found - cut + n;
      }
      // A class is at most as long as the distance of two points, so places increase, except for
      // rounding.
      out[picked] = picked > 0 ? std::max(place, out[picked - 1] + 1) : place;
    }
    int64_t bound = count;
    for (int64_t i = picked - 1; i >= 0 && out[i] >= bound; --i) {
      out[i] = --bound;
    }
    for (int64_t i = 0; i < picked; ++i) {
      out[i] = mixed ? uncertain_slots_[out[i]]
                     : begin + (out[i] + cut < n ? out[i] + cut : out[i] + cut - n);
    }
    return picked;
  }

  double tail_weight(int64_t cell) const {
    double weight = 0;
    for (const int64_t slot : uncertain_slots_) {
      weight += tables_.weight(slot, cell);
    }
    return weight;
  }

  // Fills the places that rounding left empty with any classes not yet in the set.
  void fill_missing(int64_t* slots, int64_t* out) const {
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

  static constexpr double kNever = std::numeric_limits<double>::infinity();

  const MidxCellTables& tables_;
  const int64_t rows_, samples_;
  int64_t certain_ = 0, open_ = 0;
  double scale_ = 0; // c
  std::vector<int64_t> place_;    // position of each row in open_rows_, or -1
  std::vector<double> row_tail_;  // the share of a row's classes that are not certain
  std::vector<Row> open_rows_;
  std::vector<int64_t> uncertain_slots_;
};

} // namespace xsoftmax
