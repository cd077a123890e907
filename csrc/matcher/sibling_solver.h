#pragma once

#include "cpu/cpu_dispatch.h"

#include <cstdint>

namespace xsoftmax {

// Trains linear classifiers of up to 16 sibling labels on the same sparse rows, all at once. For
// each label, with y_i = 1 for its rows and -1 for the others of the parent, solves
//
//     min_w  |w|^2 / 2 + sum_i C_i loss(y_i w.x_i)
//     loss(m) = max(0, 1 - m)^2, max(0, 1 - m) or log(1 + e^-m)
//
// by coordinate descent on the dual (Hsieh et al., "A dual coordinate descent method for
// large-scale linear SVM", ICML 2008; Yu, Huang and Lin, "Dual coordinate descent methods for
// logistic regression and maximum entropy models", 2011). Each step reads w.x_i of one row and
// moves w along x_i; the order of rows is shuffled in each sweep. The labels of a group are the
// lanes of a vector register: all of them share one read of a row and of the weights
// [columns][lanes] of its columns, where training one label at a time would gather single numbers.
//
// A label has converged if the projected gradients of a sweep over all rows are within `tolerance`
// of 0 and of each other (logistic: of 0). A row is left out until the other rows have converged
// ("shrinking") if it is at a bound of every label still in training, with a gradient beyond the
// extremes of the last sweep. A label's result depends on its group, but not on threads.
//
// Warm start: from weights w near the optimum, descent starts at the dual variables that belong to
// w if w is optimal, a_i = -C_i loss'(y_i w.x_i), and at w = sum_i a_i y_i x_i.

enum class LinearLoss : int { SquaredHinge = 0, Hinge = 1, Logistic = 2 };

constexpr int64_t kSiblingLanes = 16;

/// Returns the number of lanes for a group of that many labels: 4, 8 or 16.
constexpr int64_t sibling_lanes(int64_t labels) {
  return labels <= 4 ? 4 : labels <= 8 ? 8 : kSiblingLanes;
}

struct SiblingProblem {
  int64_t rows;
  const int64_t* start; ///< [rows + 1]
  int64_t columns;
  const int32_t* column; ///< of each entry; unique within a row
  const float* value;
  const float* square; ///< [rows] |x_i|^2
  const uint16_t* positive; ///< [rows] bit c is set if the row has label c
  const float* cost; ///< [rows][lanes]: C_i; null: the next two apply
  float positive_cost, negative_cost;
  int64_t labels; ///< 1 to 16
  LinearLoss loss;
  float tolerance; ///< above 0
  int64_t sweeps; ///< maximum number
  uint64_t seed;
  bool warm; ///< `weights` has the initial weights
  bool (*stopped)(const void* work); ///< called before each sweep; true stops the solver
  const void* work;
};

struct SiblingStats {
  int64_t sweeps; ///< number of sweeps
  int64_t unconverged; ///< number of labels that did not converge
};

/// The solver's loops. `lanes` is sibling_lanes(labels).
struct SiblingSolverTable {
  /// weights [columns][lanes] must be 0 on entry, unless warm. state [rows][lanes] and order [rows]
  /// are scratch.
  void (*solve)(const SiblingProblem& problem, float* weights, float* state, int32_t* order,
                SiblingStats* stats);
};

XS_DECLARE_ISA_TABLE(SiblingSolverTable, sibling_solver)

} // namespace xsoftmax
