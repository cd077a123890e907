#pragma once

#include "core/cpu_dispatch.h"

#include <cstdint>

namespace xsoftmax {

// Linear classifiers of up to 16 sibling labels over the same sparse rows, all at once. For each label, y_i = 1 for its rows and -1 for the
// others of the parent,
//
//     min_w  |w|^2 / 2 + sum_i C_i loss(y_i w.x_i),    loss(m) = max(0, 1 - m)^2, max(0, 1 - m) or log(1 + e^-m)
//
// by coordinate descent on the dual (Hsieh et al., "A dual coordinate descent method for large-scale linear SVM", ICML 2008; Yu, Huang and
// Lin, "Dual coordinate descent methods for logistic regression and maximum entropy models", 2011): row after row, in an order drawn anew
// each sweep, w.x_i is read and w moved along x_i. The labels of a group are lanes of a vector register: one reading of a row, and of the
// weights of its columns [columns][lanes], serves them all, where one label at a time would gather single numbers.
//
// A label is done when the projected gradients of a sweep over all rows are at most `tolerance` from 0 and from each other (logistic: from 0).
// Rows at a bound of every label still at work, with a gradient beyond the last sweep's largest or least, are left out until the
// others have converged ("shrinking"). A label's result depends on its group, not on threads.
//
// Warm: from weights w that are near the best, the dual variables that would belong to them if they were the best, a_i = -C_i loss'(y_i w.x_i),
// are where the descent begins, and so does w = sum_i a_i y_i x_i.

enum class LinearLoss : int { SquaredHinge = 0, Hinge = 1, Logistic = 2 };

constexpr int64_t kSiblingLanes = 16;

/// Lanes that a group of so many labels takes: 4, 8 or 16.
constexpr int64_t sibling_lanes(int64_t labels) { return labels <= 4 ? 4 : labels <= 8 ? 8 : kSiblingLanes; }

struct SiblingProblem {
  int64_t rows;
  const int64_t* start;  ///< [rows + 1]
  int64_t columns;
  const int32_t* column; ///< of each entry; no column twice in a row
  const float* value;
  const float* square;      ///< [rows] |x_i|^2
  const uint16_t* positive; ///< [rows] bit c: the row is one of label c
  const float* cost;        ///< [rows][lanes]: C_i; null: the two below
  float positive_cost, negative_cost;
  int64_t labels;           ///< 1 .. 16
  LinearLoss loss;
  float tolerance;          ///< above 0
  int64_t sweeps;           ///< at most
  uint64_t seed;
  bool warm;                ///< `weights` holds what to begin from
  bool (*stopped)(const void* work); ///< asked before each sweep: none begins where it is so
  const void* work;
};

struct SiblingStats {
  int64_t sweeps;      ///< that were made
  int64_t unconverged; ///< labels that were not done
};

/// The loops of the solver. `lanes` is sibling_lanes(labels).
struct SiblingSolverTable {
  /// weights [columns][lanes]: 0 on entry, unless warm; state [rows][lanes] and order [rows]: scratch.
  void (*solve)(const SiblingProblem& problem, float* weights, float* state, int32_t* order, SiblingStats* stats);
};

XS_DECLARE_ISA_TABLE(SiblingSolverTable, sibling_solver)

} // namespace xsoftmax
