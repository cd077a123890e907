#include "matcher/sibling_trainer.h"

#include "random/philox.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace xsoftmax {

void SiblingTrainer::train(const LayerTask& layer, const ParentRows& rows, int64_t parent,
                           int64_t child, int64_t count, std::vector<ChildWeight>& weights,
                           LayerStats& stats) {
  const LinearTraining& training = layer.training;
  const RowLists& labels = layer.labels;
  const int64_t first = layer.first_child[parent] + child;
  const int64_t lanes = sibling_lanes(count), n = rows.count(), columns = rows.columns();
  SiblingProblem problem{};
  rows.fill(problem);
  positive_.assign(n, 0);
  if (layer.costs != nullptr) {
    cost_.assign(n * lanes, training.negative_cost);
  }
  for (int64_t c = 0; c < count; ++c) {
    const int64_t begin = labels.offset[first + c];
    rows.match(labels.row + begin, labels.size(first + c), [&](int64_t row, int64_t t) {
      positive_[row] |= uint16_t(1u << c);
      if (layer.costs != nullptr) {
        cost_[row * lanes + c] = training.positive_cost * layer.costs[begin + t];
      }
    });
  }
  problem.positive = positive_.data();
  problem.cost = layer.costs == nullptr ? nullptr : cost_.data();
  problem.positive_cost = training.positive_cost;
  problem.negative_cost = training.negative_cost;
  problem.labels = count;
  problem.loss = training.loss;
  problem.tolerance = training.tolerance;
  problem.sweeps = training.sweeps;
  problem.seed = philox(training.seed, uint64_t(first), 0).low();
  const SiblingSolverTable& solver = sibling_solver();
  weight_.assign(columns * lanes, 0.0f);
  problem.warm =
      layer.initial != nullptr && load_initial(*layer.initial, rows, parent, child, count);
  problem.stopped = [](const void* work) { return static_cast<const LongWork*>(work)->stopped(); };
  problem.work = &work_;
  state_.resize(n * lanes);
  order_.resize(n);
  SiblingStats group_stats;
  solver.solve(problem, weight_.data(), state_.data(), order_.data(), &group_stats);
  stats.sweeps += group_stats.sweeps;
  stats.unconverged += group_stats.unconverged;
  keep_largest(training, columns, count, child, weights, stats);
}

void SiblingTrainer::keep_largest(const LinearTraining& training, int64_t columns, int64_t count,
                                  int64_t child, std::vector<ChildWeight>& weights,
                                  LayerStats& stats) {
  const int64_t lanes = sibling_lanes(count);
  float lowest_kept[kSiblingLanes];
  int64_t equals[kSiblingLanes]; // how many weights of size `lowest_kept` may stay
  for (int64_t c = 0; c < count; ++c) {
    equals[c] = columns;
    lowest_kept[c] = std::max(training.threshold, std::numeric_limits<float>::min());
    if (training.max_weights > 0 && training.max_weights < columns) {
      size_.resize(columns);
      for (int64_t j = 0; j < columns; ++j) {
        size_[j] = std::abs(weight_[j * lanes + c]);
      }
      std::nth_element(size_.begin(), size_.begin() + training.max_weights - 1, size_.end(),
                       std::greater<>());
      const float last = size_[training.max_weights - 1];
      if (last >= lowest_kept[c]) {
        lowest_kept[c] = last;
        equals[c] = std::count(size_.begin(), size_.begin() + training.max_weights, last);
      }
    }
  }
  for (int64_t j = 0; j < columns; ++j) {
    const float* w = weight_.data() + j * lanes;
    for (int64_t c = 0; c < count; ++c) {
      stats.weights += w[c] != 0.0f;
      const float size = std::abs(w[c]);
      if (size > lowest_kept[c] || (size == lowest_kept[c] && equals[c]-- > 0)) {
        weights.push_back({int32_t(j), int32_t(child + c), w[c]});
      }
    }
  }
}

bool SiblingTrainer::load_initial(const InitialLayer& initial, const ParentRows& rows,
                                  int64_t parent, int64_t child, int64_t count) {
  const LinearLayerView& view = initial.view;
  const int64_t lanes = sibling_lanes(count);
  int64_t column = 0, entry = initial.entry[parent];
  bool any = false;
  for (int64_t row = view.chunk[parent]; row < view.chunk[parent + 1]; ++row) {
    const int64_t end = entry + view.weights(row);
    for (; column < rows.columns() && rows.feature(column) < view.feature[row]; ++column) {
    }
    const bool is_column = column < rows.columns() && rows.feature(column) == view.feature[row];
    for (; entry < end; ++entry) {
      const int64_t c = initial.child(entry) - child;
      if (is_column && c >= 0 && c < count) {
        weight_[column * lanes + c] = initial.value(entry);
        any = true;
      }
    }
  }
  return any;
}

} // namespace xsoftmax
