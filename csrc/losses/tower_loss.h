#pragma once

#include "losses/candidates.h"

#include <array>
#include <tuple>

// tower_loss (xsoftmax/ops.h says what it is): the operators below it take the columns of the sets (losses/candidates.h), vectors [S, D] and private_vectors
// [Q, P, D], or none.
//
// On the CPU scores exist for a block of queries at a time (16 MB). Where the gradient that reaches the loss is known but for a factor, as that of a mean or a
// sum, float32 and float64 gradients are made with the loss, else (16-bit ones, reduction "none") by a second pass.

namespace xsoftmax {

/// Checked.
struct TowerArguments {
  const at::Tensor &query, &target_vector, &target;
  const OptionalTensor &vectors, &private_vectors;
  Candidates candidates;
  EstimatorOptions options;
  const Estimator& estimator;

  TowerArguments(const at::Tensor& query, const at::Tensor& target_vector, const at::Tensor& target, const OptionalTensor& vectors,
                 const OptionalTensor& private_vectors, const OptionalTensors& candidates, at::IntArrayRef distinct, std::string_view options);
};

/// loss [Q], times grad; and the gradients of (loss * grad).sum() for query, target_vector, vectors and private_vectors, without rows where not wanted.
using TowerState = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using TowerWants = std::array<bool, 4>;

/// The composite: any device, and the oracle of the tests.
TowerState tower_loss_forward_reference(const TowerArguments& arguments, const at::Tensor& grad, TowerWants wanted);
void check_tower_grad(const at::Tensor& grad, const at::Tensor& query);
/// Weights of queries, [Q] or none.
void check_tower_weight(const char* op, const OptionalTensor& weight, const at::Tensor& query);

// known_ids(ids, num_ids, owner, argument, has_num_items) -> ids, a copy, once all of them are known to lie in [0, num_ids) (CPU; num_ids 0: any are well). A
// step that changes state asks first: an error changes nothing. An op without a result would be dropped by compilers.
// has_num_items: whether num_items of the loss limits the ids, or its counts alone; the error says how to allow more.
// Errors: TypeError, IndexError.
at::Tensor known_ids(const at::Tensor& ids, int64_t num_ids, std::string owner, std::string argument, bool has_num_items);

// first_occurrences(ids [*, S]) -> bool [*, S]: false for an id that stands before in its row.
at::Tensor first_occurrences(const at::Tensor& ids);

// listed(ids [M] or [Q, M], lists [Q, P]) -> bool [Q, M]: whether an id is in the list of a query.
at::Tensor listed(const at::Tensor& ids, const at::Tensor& lists);

// inclusion_log_count(log_prob, draws, uniform_draws, num_ids) -> float32: log(1 - (1 - p)^draws (1 - 1 / num_ids)^uniform_draws), the probability that an
// id is among so many independent draws, p = exp(log_prob). draws: a 0-dim tensor; num_ids is of no matter for 0 uniform_draws.
at::Tensor inclusion_log_count(const at::Tensor& log_prob, const at::Tensor& draws, int64_t uniform_draws, int64_t num_ids);

} // namespace xsoftmax
