#pragma once

// An estimator turns the scores of the target and of the candidates into the loss of a query. One of your own is a function of a
// CandidateBatch in differentiable ATen calls, registered by name; the library's have a gradient and a loop over a row on CPU as well.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace xsoftmax {

/// What an estimator sees, for a batch of Q queries and C candidates, in float32 or float64. Candidates that hit the target, where hits are
/// removed, have a log weight of -inf and take no part.
struct CandidateBatch {
  at::Tensor target;     ///< [Q] scores of the targets, less their log expected count where the estimator corrects the target
  at::Tensor score;      ///< [Q, C] scores of the candidates
  at::Tensor log_weight; ///< [Q, C]: e^(score + log_weight) summed over C is the estimate of the sum over classes j != y of e^s_j
  at::Tensor adjusted;   ///< [Q, C] score + log_weight, -inf where log_weight is
  at::Tensor drawn;      ///< [C] bool: an independent draw, not one of a distinct set
  at::Tensor draws;      ///< [Q] how many of those take part, in the dtype of the scores
  at::Tensor covered;    ///< [Q] bool: the target is in a distinct set
  at::Tensor target_log_count; ///< [Q] the target's log expected count in all sets; undefined where the estimator does not ask for it
  double label_smoothing;
};

/// What an estimator asks of the candidates.
struct EstimatorTraits {
  bool corrects_target = false;     ///< the target's score is lowered by its own log expected count
  bool needs_target_count = false;  ///< that count must be known
  bool renormalizes = false;        ///< where hits are removed, q is renormalised to the other classes
  bool weighs = false;              ///< candidates weigh 1 / expected count, not 1
  bool drops_distinct_hits = false; ///< hits are removed where the caller says so, among distinct candidates: else they always stay
  bool drops_drawn_hits = false;    ///< the same among independent draws
  bool takes_a_draw = false;        ///< beside distinct candidates: a target that is none of them takes the place of the first independent draw
  bool smooths = false;             ///< there is a form with label smoothing
  bool has_noise = false;           ///< independent draws stand for what the other candidates leave out: it wants some of both

  template <typename Visitor>
  void visit(Visitor& visitor) {
    visitor("corrects_target", corrects_target);
    visitor("needs_target_count", needs_target_count);
    visitor("renormalizes", renormalizes);
    visitor("weighs", weighs);
    visitor("drops_distinct_hits", drops_distinct_hits);
    visitor("drops_drawn_hits", drops_drawn_hits);
    visitor("takes_a_draw", takes_a_draw);
    visitor("smooths", smooths);
    visitor("has_noise", has_noise);
  }
};

/// From here on `estimator=name` of every loss, in every language, is `loss`: the losses [Q] of a batch, in differentiable ATen calls.
void register_estimator(const std::string& name, const EstimatorTraits& traits, std::function<at::Tensor(const CandidateBatch&)> loss);

} // namespace xsoftmax
