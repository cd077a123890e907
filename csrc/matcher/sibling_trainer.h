#pragma once

#include "matcher/linear_layers_input.h"
#include "matcher/parent_rows.h"
#include "matcher/sibling_solver.h"
#include "op/long_work.h"

#include <cstdint>
#include <vector>

namespace xsoftmax {

/// A weight that is kept. `column` numbers the columns of the parent, `child` its children.
struct ChildWeight {
  int32_t column, child;
  float value;
};

/// Counts of a layer's training.
struct LayerStats {
  int64_t sweeps = 0, unconverged = 0, weights = 0;

  void operator+=(const LayerStats& other) {
    sweeps += other.sweeps;
    unconverged += other.unconverged;
    weights += other.weights;
  }
};

/// Trains groups of siblings on one thread.
class SiblingTrainer {
 public:
  explicit SiblingTrainer(const LongWork& work) : work_(work) {}

  /// Trains the children child .. child + count - 1 of a parent, counted from its first, on its
  /// rows, and appends their weights, column by column.
  void train(const LayerTask& layer, const ParentRows& rows, int64_t parent, int64_t child,
             int64_t count, std::vector<ChildWeight>& weights, LayerStats& stats);

 private:
  void keep_largest(const LinearTraining& training, int64_t columns, int64_t count, int64_t child,
                    std::vector<ChildWeight>& weights, LayerStats& stats);
  // Loads the initial weights and returns whether there are any.
  bool load_initial(const InitialLayer& initial, const ParentRows& rows, int64_t parent,
                    int64_t child, int64_t count);

  const LongWork& work_;
  std::vector<uint16_t> positive_;
  std::vector<float> cost_, weight_, state_, size_;
  std::vector<int32_t> order_;
};

} // namespace xsoftmax
