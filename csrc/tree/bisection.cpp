#include "tree/bisection.h"

#include "random/philox.h"
#include "table/sparse_dots.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numeric>

// The steps of a bisection, with sums that do not depend on the number of threads.

namespace xsoftmax {

// Blocks of a sum over many rows, added in order, so that the sum does not depend on the number of
// threads.
static constexpr int64_t kSumBlocks = 8;

Bisection::Bisection(const SparseRowsView& vectors, const ClusterOptions& cluster_options,
                     LongWork& work)
    : vectors_(vectors), work_(work), seed_(cluster_options.seed),
      iterations_(cluster_options.iterations), spherical_(cluster_options.spherical),
      total_(vectors.features, 0.0), sum_(vectors.features, 0.0),
      direction_(vectors.features, 0.0f), seen_(vectors.features, uint8_t(0)) {}

void Bisection::cut(int32_t* rows, int64_t size, int64_t left, uint64_t key) {
  if (left > 0 && left < size) {
    cut_rows(rows, size, left, key);
  }
}

int64_t Bisection::cut_by_distance(int32_t* rows, int64_t size, uint64_t key) {
  return cut_rows(rows, size, std::nullopt, key);
}

int64_t Bisection::cut_rows(int32_t* rows, int64_t size, std::optional<int64_t> fixed_left,
                            uint64_t key) {
  int64_t left = fixed_left.value_or(size / 2);
  side_.assign(size, 1);
  score_.resize(size);
  order_.resize(size);
  add_all(rows, size);
  // Start from two random rows as centres.
  const PhiloxBlock block = philox(seed_, key, uint64_t(size));
  const int64_t one = int64_t(multiply_shift(block.low(), uint64_t(size)));
  const int64_t other =
      (one + 1 + int64_t(multiply_shift(block.high(), uint64_t(size - 1)))) % size;
  middle_ = 0.5 * (add_direction(rows[one], 1.0) - add_direction(rows[other], -1.0));
  for (int64_t iteration = 0; iteration < iterations_ && !work_.stopped(); ++iteration) {
    if (iteration > 0) {
      make_direction(left, size);
    }
    score(rows, size);
    left = fixed_left.has_value() ? left : closer_rows(size);
    assign(rows, size, left);
    if (changes_.empty()) {
      break;
    }
    if (iteration + 1 < iterations_) {
      add_changes(sum_);
    }
  }
  for (const int32_t j : touched_) {
    total_[j] = sum_[j] = 0;
    direction_[j] = 0;
    seen_[j] = 0;
  }
  touched_.clear();
  move(rows, size);
  work_.add(size);
  return left;
}

int64_t Bisection::closer_rows(int64_t size) const {
  const auto [lowest, highest] = std::minmax_element(score_.begin(), score_.begin() + size);
  if (*lowest == *highest) {
    return size / 2; // for instance labels without examples
  }
  const int64_t closer = std::count_if(score_.begin(), score_.begin() + size,
                                       [&](float score) { return score > middle_; }),
                fewest = (size + 15) / 16;
  return std::clamp(closer, fewest, size - fewest);
}

void Bisection::add_rows(int64_t begin, int64_t end, double* sum) const {
  for (int64_t i = begin; i < end && !stopped_at(i); ++i) {
    const double sign = changes_[i].sign;
    for (int64_t t = vectors_.offset[changes_[i].row]; t < vectors_.offset[changes_[i].row + 1];
         ++t) {
      sum[vectors_.column[t]] += sign * vectors_.value[t];
    }
  }
}

void Bisection::add_all(const int32_t* rows, int64_t size) {
  changes_.clear();
  for (int64_t i = 0; i < size; ++i) {
    changes_.push_back({rows[i], 1});
  }
  if (adds_in_blocks()) {
    touched_.resize(vectors_.features); // most of them occur
    std::iota(touched_.begin(), touched_.end(), int32_t(0));
    add_changes(total_);
    return;
  }
  for (int64_t i = 0; i < size && !stopped_at(i); ++i) {
    for (int64_t t = vectors_.offset[rows[i]]; t < vectors_.offset[rows[i] + 1]; ++t) {
      const int32_t j = vectors_.column[t];
      total_[j] += vectors_.value[t];
      if (seen_[j] == 0) {
        seen_[j] = 1;
        touched_.push_back(j);
      }
    }
  }
}

bool Bisection::adds_in_blocks() const {
  int64_t numbers = 0;
  for (const Change& change : changes_) {
    numbers += vectors_.offset[change.row + 1] - vectors_.offset[change.row];
  }
  return numbers >= 4 * kSumBlocks * vectors_.features; // else blocks do not pay off
}

void Bisection::add_changes(std::vector<double>& sum) {
  const int64_t count = int64_t(changes_.size());
  if (!adds_in_blocks()) {
    add_rows(0, count, sum.data());
    return;
  }
  blocks_.resize(kSumBlocks);
  at::parallel_for(0, kSumBlocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      blocks_[b].assign(vectors_.features, 0.0);
      add_rows(count * b / kSumBlocks, count * (b + 1) / kSumBlocks, blocks_[b].data());
    }
  });
  for (const auto& block : blocks_) {
    for (int64_t j = 0; j < vectors_.features; ++j) {
      sum[j] += block[j];
    }
  }
}

double Bisection::add_direction(int32_t row, double sign) {
  double square = 0;
  for (int64_t t = vectors_.offset[row]; t < vectors_.offset[row + 1]; ++t) {
    square += double(vectors_.value[t]) * vectors_.value[t];
  }
  const double scale = !spherical_ ? sign : square > 0 ? sign / std::sqrt(square) : 0.0;
  for (int64_t t = vectors_.offset[row]; t < vectors_.offset[row + 1]; ++t) {
    direction_[vectors_.column[t]] += float(scale * vectors_.value[t]);
  }
  return spherical_ ? 0.0 : square;
}

void Bisection::make_direction(int64_t left, int64_t size) {
  double scale[2] = {1.0 / double(left), 1.0 / double(size - left)};
  if (spherical_) {
    double square[2] = {0, 0};
    for (const int32_t j : touched_) {
      square[0] += sum_[j] * sum_[j];
      square[1] += (total_[j] - sum_[j]) * (total_[j] - sum_[j]);
    }
    for (int half = 0; half < 2; ++half) {
      scale[half] = square[half] > 0 ? 1.0 / std::sqrt(square[half]) : 0.0;
    }
  }
  double square = 0; // that of the first centre minus that of the second
  for (const int32_t j : touched_) {
    const double first = scale[0] * sum_[j], second = scale[1] * (total_[j] - sum_[j]);
    direction_[j] = float(first - second);
    square += first * first - second * second;
  }
  middle_ = spherical_ ? 0.0 : 0.5 * square;
}

void Bisection::score(const int32_t* rows, int64_t size) {
  constexpr int64_t kBlock = 1024;
  at::parallel_for(0, size, kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && !work_.stopped(); i += kBlock) {
      sparse_dots().dots(vectors_.offset, vectors_.column, vectors_.value, rows + i,
                         std::min(kBlock, end - i), direction_.data(), score_.data() + i);
    }
  });
}

void Bisection::assign(const int32_t* rows, int64_t size, int64_t left) {
  std::iota(order_.begin(), order_.end(), int32_t(0));
  std::nth_element(order_.begin(), order_.begin() + left, order_.end(), [&](int32_t a, int32_t b) {
    return score_[a] > score_[b] || (score_[a] == score_[b] && a < b);
  });
  next_side_.assign(size, 1);
  for (int64_t k = 0; k < left; ++k) {
    next_side_[order_[k]] = 0;
  }
  changes_.clear();
  for (int64_t i = 0; i < size; ++i) {
    if (next_side_[i] != side_[i]) {
      changes_.push_back({rows[i], next_side_[i] == 0 ? 1 : -1});
    }
  }
  side_.swap(next_side_);
}

void Bisection::move(int32_t* rows, int64_t size) {
  moved_.clear();
  int64_t to = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (side_[i] == 0) {
      rows[to++] = rows[i];
    } else {
      moved_.push_back(rows[i]);
    }
  }
  std::copy(moved_.begin(), moved_.end(), rows + to);
}

} // namespace xsoftmax
