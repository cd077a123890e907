#pragma once

#include "losses/estimator_rows.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

// An estimator turns the scores of the target and of the candidates into the loss of a query. It is three functions: the loss and the
// gradient in ATen calls (here), and the loop over one query on CPU (estimator_rows.simd.cpp). candidate_loss does the rest: hits,
// expected counts, checks, autograd.

namespace xsoftmax {

/// What an estimator sees, for a batch. Candidates that hit the target have a log weight of -inf and take no part.
struct CandidateBatch {
  at::Tensor target;     ///< [Q] scores of the targets, less their log expected count where the estimator corrects the target
  at::Tensor score;      ///< [Q, C] scores of the candidates
  at::Tensor log_weight; ///< [Q, C]: e^adjusted summed over C is the estimate of sum over classes j != y of e^s_j
  at::Tensor adjusted;   ///< [Q, C] score + log_weight, -inf where log_weight is
  at::Tensor drawn;      ///< [C] bool: an independent draw, not one of a distinct set
  int64_t draws;         ///< how many of those there are
  at::Tensor covered;    ///< [Q] bool: the target is in the distinct set
  at::Tensor target_log_count; ///< [Q]; undefined where it is not given
  double label_smoothing;
};

struct EstimatorGradient {
  at::Tensor target; ///< [Q]
  at::Tensor score;  ///< [Q, C]
};

struct Estimator {
  const char* name;
  bool corrects_target = false;    ///< the target's score is lowered by its own log expected count
  bool needs_target_count = false; ///< its log expected count must be given
  bool renormalizes = false;       ///< where hits are removed, q is renormalised to the other classes
  bool weighs = false;             ///< candidates weigh 1 / expected count, not 1
  /// Hits are removed where the caller says so: else they always stay. Among distinct candidates, and among independent draws.
  bool drops_distinct_hits = false, drops_drawn_hits = false;
  bool takes_a_draw = false;       ///< beside distinct candidates: a target that is none of them takes the place of the first independent draw
  bool smooths = false;            ///< there is a form with label smoothing
  bool has_noise = false;          ///< independent draws stand for what the other candidates leave out: it wants some of both
  at::Tensor (*loss)(const CandidateBatch&);
  EstimatorGradient (*gradient)(const CandidateBatch&);
  RowLoss row_loss; ///< the loop over one query on CPU
};

/// The estimator of that name, or an error of `op` that lists the names there are.
const Estimator& find_estimator(const char* op, std::string_view name);
/// The names there are.
std::vector<std::string> estimator_names();

} // namespace xsoftmax
