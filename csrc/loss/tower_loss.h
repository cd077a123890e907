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

} // namespace xsoftmax
