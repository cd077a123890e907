#pragma once

#include "proposal/midx/midx_query_blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace xsoftmax {

/// Returns the share of each cell [K, K] in the mixture of the queries. Sums run in groups that
/// depend on the shape only, so the result does not depend on the number of threads.
inline at::Tensor midx_mixture(const at::Tensor& queries, const CheckedMidxIndex& checked,
                               bool rms) {
  constexpr int64_t kGroups = 16;
  const int64_t blocks = (queries.size(0) + kMidxBlock - 1) / kMidxBlock,
                per_group = std::max<int64_t>(1, (blocks + kGroups - 1) / kGroups);
  std::vector<at::Tensor> partial((blocks + per_group - 1) / per_group);
  for_midx_blocks(queries, checked, per_group, [&](int64_t begin, const MidxQueries& block) {
    at::Tensor& sum = partial[begin / kMidxBlock / per_group];
    const at::Tensor densities = midx_density_sums(block, rms);
    sum = sum.defined() ? sum.add_(densities) : densities;
  });
  at::Tensor sum = partial.empty() ? at::ones_like(checked.mass) : partial[0];
  for (size_t i = 1; i < partial.size(); ++i) {
    sum.add_(partial[i]);
  }
  return midx_mixture_shares(sum, checked.mass, rms);
}

/// Draws one set for the batch from cells with shares [K, K], and counts any classes in it.
class MidxSharedDraws {
  auto filler() const { // before its callers, because its return type is deduced
    return [share = share_, k = tables_.codewords](int64_t row, double* cells) {
      std::copy_n(share + row * k, k, cells);
    };
  }

 public:
  MidxSharedDraws(const CheckedMidxIndex& checked, const at::Tensor& shares, int64_t samples,
                  bool distinct)
      : checked_(checked), tables_(checked.tables), shares_(shares),
        share_(shares.const_data_ptr<double>()), samples_(samples),
        log_samples_(std::log(double(samples))), finite_(std::isfinite(share_[0])),
        distinct_(distinct), set_(tables_, samples) {
    if (distinct_ && finite_) {
      set_.plan(shares_.sum(1).const_data_ptr<double>(), filler());
    }
  }

  /// Draws ids [M], sorted if without replacement.
  void draw(uint64_t seed, int64_t* ids) {
    if (!finite_) { // some query is not finite, and neither is its loss: any classes will do
      for (int64_t j = 0; j < samples_; ++j) {
        ids[j] = j % tables_.classes;
      }
    } else if (distinct_) {
      set_.draw(seed, 0, filler(), ids);
    } else {
      draw_independent(seed, ids);
    }
    for (int64_t j = 0; j < samples_; ++j) {
      checked_.prefetch_class(ids[j]);
    }
    for (int64_t j = 0; j < samples_; ++j) {
      ids[j] = checked_.class_at(ids[j]);
    }
    if (distinct_) {
      std::sort(ids, ids + samples_);
    }
  }

  /// Writes the log_count [n] of classes ids [n]; -inf for the id -1.
  void count(const int64_t* ids, int64_t n, float* log_count) const {
    for (int64_t i = 0; i < n; ++i) {
      checked_.prefetch_cell(ids[i]);
    }
    for (int64_t i = 0; i < n; ++i) {
      log_count[i] = log_count_of(ids[i]);
    }
  }

 private:
  void draw_independent(uint64_t seed, int64_t* slots) const {
    std::vector<double> sum(tables_.cells);
    double total = 0;
    for (int64_t c = 0; c < tables_.cells; ++c) {
      sum[c] = total += share_[c];
    }
    for (int64_t j = 0; j < samples_; ++j) {
      const PhiloxBlock block = philox(seed, 0, j);
      int64_t c =
          std::upper_bound(sum.begin(), sum.end(), unit_double(block.low()) * total) - sum.begin();
      // Rounding may put the last point past the end.
      for (c = std::min(c, tables_.cells - 1); tables_.size(c) == 0; --c) {
      }
      slots[j] = tables_.draw(c, block.high() >> 20);
    }
  }

  float log_count_of(int64_t id) const {
    const int64_t c = id < 0 ? -1 : checked_.cell_of(id);
    if (c < 0) {
      return -std::numeric_limits<float>::infinity();
    }
    const double log_weight = checked_.log_weight_of(id),
                 log_q = std::log(share_[c] / tables_.mass[c]) + log_weight;
    return float(distinct_ && finite_ ? set_.log_count_by_weight(std::exp(log_weight), c, log_q)
                                      : log_samples_ + log_q);
  }

  const CheckedMidxIndex& checked_;
  const MidxCellTables& tables_;
  const at::Tensor shares_;
  const double* share_;
  const int64_t samples_;
  const double log_samples_;
  const bool finite_, distinct_;
  SystematicSampler set_;
};

} // namespace xsoftmax
