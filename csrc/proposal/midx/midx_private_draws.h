#pragma once

#include "proposal/midx/midx_query_blocks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {

/// Draws a private set per query, block by block. Its buffers are reused between blocks.
class MidxPrivateDraws {
 public:
  MidxPrivateDraws(const CheckedMidxIndex& checked, int64_t samples, bool distinct)
      : checked_(checked), tables_(checked.tables), k_(checked.codewords), samples_(samples),
        log_samples_(std::log(double(samples))), distinct_(distinct), set_(tables_, samples),
        sum_(k_), heads_(k_ + 1), first_(samples), draw_(samples) {
    bits_.reserve(samples);
  }

  /// Draws for the queries begin, begin + 1, ...: ids and log_count [Q, M], and the counts
  /// [Q, width] of the classes target [Q, width], where -1 means no class.
  void run(uint64_t seed, uint64_t begin, const MidxQueries& queries, int64_t width,
           const int64_t* target, int64_t* ids, float* log_count, float* target_log_count) {
    const int64_t n = queries.log_z.size(0);
    for (int64_t t = 0; t < n * width; ++t) {
      checked_.prefetch_cell(target[t]);
    }
    for (int64_t q = 0; q < n; ++q) {
      const MidxQueryRow row(queries, q, k_);
      finite_ = std::isfinite(row.log_z);
      draw(seed, begin + uint64_t(q), row, ids + q * samples_, log_count + q * samples_);
      for (int64_t t = q * width; t < (q + 1) * width; ++t) {
        target_log_count[t] = log_count_of(row, target[t]);
      }
      // The classes of a query's slots are read one query later, after they have been prefetched.
      if (q > 0) {
        read_classes(ids + (q - 1) * samples_, log_count + (q - 1) * samples_);
      }
    }
    if (n > 0) {
      read_classes(ids + (n - 1) * samples_, log_count + (n - 1) * samples_);
    }
  }

 private:
  void draw(uint64_t seed, uint64_t query, const MidxQueryRow& row, int64_t* slots,
            float* log_count) {
    if (!finite_) { // the query is not finite, and neither is its loss: any classes will do
      for (int64_t j = 0; j < samples_; ++j) {
        slots[j] = distinct_ ? j : arbitrary_slot(seed, query, j, tables_.classes);
        log_count[j] = std::numeric_limits<float>::quiet_NaN();
      }
    } else if (distinct_) {
      draw_distinct(seed, query, row, slots, log_count);
    } else {
      draw_independent(seed, query, row, slots, log_count);
    }
  }

  void read_classes(int64_t* ids, float* log_count) const {
    for (int64_t j = 0; j < samples_; ++j) {
      ids[j] = checked_.class_at(ids[j]);
    }
    if (tables_.prefix && !distinct_) {
      for (int64_t j = 0; j < samples_; ++j) {
        log_count[j] += float(checked_.log_weight_of(ids[j]));
      }
    }
  }

  // The count of a class, drawn or not, for the query of the last draw.
  float log_count_of(const MidxQueryRow& row, int64_t id) const {
    const int64_t cell = id < 0 ? -1 : checked_.cell_of(id);
    if (cell < 0) {
      return -std::numeric_limits<float>::infinity();
    }
    if (!finite_) {
      return std::numeric_limits<float>::quiet_NaN();
    }
    const double log_weight = checked_.log_weight_of(id),
                 log_q = row.log_density(cell, k_) + log_weight;
    return float(distinct_ ? set_.log_count_by_weight(std::exp(log_weight), cell, log_q)
                           : log_samples_ + log_q);
  }

  // Returns the first k whose running sum exceeds `target_sum`.
  int64_t search(double target_sum) const {
    const double* sum = sum_.data();
    int64_t n = k_;
    while (n > 1) {
      const int64_t half = n / 2;
      sum += sum[half - 1] > target_sum ? 0 : half;
      n -= half;
    }
    return sum - sum_.data();
  }

  void draw_independent(uint64_t seed, uint64_t query, const MidxQueryRow& row, int64_t* slots,
                        float* log_count) {
    double total = 0;
    for (int64_t k = 0; k < k_; ++k) {
      sum_[k] = total += row.first_probability[k];
    }
    std::fill(heads_.begin(), heads_.end(), 0);
    bits_.clear();
    for (int64_t j = 0; j < samples_; ++j) {
      bits_.emplace_back(seed, query, j);
      first_[j] = search(bits_[j].first() * total);
      ++heads_[first_[j] + 1];
    }
    // Group draws by first codeword, so that each group shares the running sums over the second.
    for (int64_t k = 0; k < k_; ++k) {
      heads_[k + 1] += heads_[k];
    }
    for (int64_t j = 0; j < samples_; ++j) {
      draw_[heads_[first_[j]]++] = j;
    }
    const double offset = log_samples_ - row.log_z;
    for (int64_t at = 0; at < samples_;) {
      const int64_t k1 = first_[draw_[at]], end = heads_[k1];
      const double* mass = tables_.mass + k1 * k_;
      const double first_term = offset + row.first[k1];
      total = 0;
      for (int64_t k = 0; k < k_; ++k) {
        sum_[k] = total += mass[k] * row.second_exp[k];
      }
      for (; at < end; ++at) {
        const int64_t j = draw_[at];
        const int64_t k2 = search(bits_[j].second() * total);
        slots[j] = tables_.draw(k1 * k_ + k2, bits_[j].in_cell());
        checked_.prefetch_class(slots[j]);
        log_count[j] = float(first_term + row.second[k2]);
      }
    }
  }

  void draw_distinct(uint64_t seed, uint64_t query, const MidxQueryRow& row, int64_t* slots,
                     float* log_count) {
    const auto fill = [&](int64_t k1, double* share) {
      const double total =
          midx_query_rows().weigh(share, tables_.mass + k1 * k_, row.second_exp, k_);
      const double scale = total > 0 ? row.first_probability[k1] / total : 0.0;
      for (int64_t k = 0; k < k_; ++k) {
        share[k] *= scale;
      }
    };
    set_.plan(row.first_probability, fill);
    set_.draw(seed, query, fill, slots);
    for (int64_t j = 0; j < samples_; ++j) {
      const int64_t id = checked_.class_at(slots[j]), cell = checked_.cell_of(id);
      TORCH_CHECK_VALUE(cell >= 0,
                        "midx_sample: expected order with classes that are in a cell, got class ",
                        id, ", which is in none");
      const double log_weight = tables_.prefix ? checked_.log_weight_of(id) : 0.0;
      log_count[j] = float(set_.log_count(slots[j], cell, row.log_density(cell, k_) + log_weight));
    }
  }

  const CheckedMidxIndex& checked_;
  const MidxCellTables& tables_;
  const int64_t k_, samples_;
  const double log_samples_;
  const bool distinct_;
  bool finite_ = false; // whether the query of the last draw has a finite log Z
  SystematicSampler set_;
  std::vector<double> sum_;
  std::vector<int64_t> heads_, first_, draw_;
  std::vector<MidxDrawBits> bits_;
};

} // namespace xsoftmax
