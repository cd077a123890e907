#pragma once

#include "estimator/estimator_rows.h"

#include <xsoftmax/ops.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// The registry of estimators. A built-in estimator consists of three functions: the loss and its
// gradient in ATen calls, and a loop over the candidates of one query (estimator_losses.h). A
// registered estimator consists of its loss only, which autograd differentiates. candidate_loss
// handles hits, expected counts and checks.

namespace xsoftmax {

struct EstimatorGradient {
  at::Tensor target; ///< [Q]
  at::Tensor score;  ///< [Q, C]
};

/// How candidates enter a loss: as the log of the sum of e^adjusted, or as the sum of
/// softplus(adjusted).
enum class Combination { LogSumExp, Softplus };

struct Estimator {
  std::string name;
  EstimatorTraits traits;
  std::function<at::Tensor(const CandidateBatch&)> loss;
  EstimatorGradient (*gradient)(const CandidateBatch&) = nullptr;
  /// The loop over one query in the CPU and CUDA kernels.
  std::optional<RowLoss> row_loss = std::nullopt;
  /// How candidates enter the loss; nullopt: in another way, so no shard may score only some of
  /// them.
  std::optional<Combination> combination = std::nullopt;
  /// Returns the loss [Q] from the joined candidates, without label smoothing.
  at::Tensor (*joined_loss)(const at::Tensor& target, const at::Tensor& sum) = nullptr;
  /// Returns the log normaliser [Q], if the loss without label smoothing is the log normaliser
  /// minus the score of the target; otherwise nullptr.
  at::Tensor (*log_normalizer)(const CandidateBatch&) = nullptr;

  bool has_kernels() const { return gradient != nullptr && row_loss.has_value(); }
};

/// Returns the estimator of that name, or throws an error of `op` that lists the known names. The
/// reference stays valid.
const Estimator& find_estimator(const char* op, std::string_view name);
/// Throws a ValueError of `op` if z_loss is out of range, or not 0 for an estimator without a log
/// normaliser.
void check_z_loss(const char* op, double z_loss, const Estimator& estimator);
/// Returns the names of all estimators.
std::vector<std::string> estimator_names();

} // namespace xsoftmax
