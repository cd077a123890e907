#pragma once

#include "estimator/candidates.h"

#include <array>
#include <tuple>

// The operators below tower_loss (contract: xsoftmax/ops.h). They take the concatenated columns of
// the sets (estimator/candidates.h) and their vectors: vectors [S, D] or none, and private_vectors
// [Q, P, D] or none.
//
// On the CPU, scores are in memory for one block of queries at a time (16 MB). float32 and float64
// gradients are computed together with the loss if the gradient of each loss is known up to a
// common factor, as for a mean or a sum. Otherwise (16-bit dtypes, reduction "none") a second pass
// computes them.

namespace xsoftmax {

/// The arguments of the operators. The constructor parses and checks them.
struct TowerArguments {
  const at::Tensor &query, &target_vector, &target;
  const OptionalTensor &vectors, &private_vectors;
  Candidates candidates;
  EstimatorOptions options;
  const Estimator& estimator;

  TowerArguments(const at::Tensor& query, const at::Tensor& target_vector, const at::Tensor& target,
                 const OptionalTensor& vectors, const OptionalTensor& private_vectors,
                 const OptionalTensors& candidates, at::IntArrayRef distinct,
                 std::string_view options);
};

/// (loss * grad [Q], gradients of (loss * grad).sum() with respect to query, target_vector, vectors
/// and private_vectors). Gradients that are not needed have 0 rows.
using TowerState = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
/// Whether the gradients of query, target_vector, vectors and private_vectors are needed.
using GradientMask = std::array<bool, 4>;

/// Composite in ATen calls: runs on any device and is the oracle of the tests.
TowerState tower_loss_forward_reference(const TowerArguments& arguments, const at::Tensor& grad,
                                        GradientMask wanted);
void check_tower_grad(const at::Tensor& grad, const at::Tensor& query);
/// Checks the weights of the queries, [Q] or none.
void check_tower_weight(const char* op, const OptionalTensor& weight, const at::Tensor& query);

// known_ids(ids, num_ids, owner, argument, has_num_items) -> ids
//   Returns a copy of ids after checking that all are in [0, num_ids); only on the CPU, and any id
//   is valid if num_ids is 0. A step that changes state calls it first, so that an error changes
//   nothing. It has a result because compilers would remove an operator without one. owner and
//   argument: names for errors. has_num_items: whether num_items of the loss limits the ids, or
//   only its counts; the error says how to allow more. Errors: TypeError, IndexError.
at::Tensor known_ids(const at::Tensor& ids, int64_t num_ids, std::string owner,
                     std::string argument, bool has_num_items);

// first_occurrences(ids [*, S]) -> bool [*, S]: whether an id does not occur earlier in its row.
at::Tensor first_occurrences(const at::Tensor& ids);

// listed(ids [M] or [Q, M], lists [Q, P]) -> bool [Q, M]: whether an id is in the list of the
// query.
at::Tensor listed(const at::Tensor& ids, const at::Tensor& lists);

// inclusion_log_count(log_prob, draws, uniform_draws, num_ids) -> float32
//   Returns log(1 - (1 - p)^draws (1 - 1 / num_ids)^uniform_draws), p = exp(log_prob): the log
//   probability that an id is among `draws` samples from p and `uniform_draws` uniform samples, all
//   with replacement. draws: a 0-dim tensor. num_ids is not used if uniform_draws is 0.
at::Tensor inclusion_log_count(const at::Tensor& log_prob, const at::Tensor& draws,
                               int64_t uniform_draws, int64_t num_ids);

} // namespace xsoftmax
