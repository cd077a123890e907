#pragma once

#include "losses/estimator_rows.h"

#include <xsoftmax/estimators.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// The estimators there are. Each of the library's is three functions: the loss and the gradient in ATen calls, and the loop over one query on CPU
// (estimator_rows.simd.cpp). One that was registered is its loss alone, which autograd differentiates. candidate_loss does the rest: hits, expected
// counts, checks.

namespace xsoftmax {

struct EstimatorGradient {
  at::Tensor target; ///< [Q]
  at::Tensor score;  ///< [Q, C]
};

/// How candidates enter a loss: by the log of the sum of e^adjusted, or by the sum of softplus(adjusted).
enum class Joined { LogSumExp, Softplus };

struct Estimator {
  std::string name;
  EstimatorTraits traits;
  std::function<at::Tensor(const CandidateBatch&)> loss;
  EstimatorGradient (*gradient)(const CandidateBatch&) = nullptr;
  std::optional<RowLoss> row_loss = std::nullopt; ///< the loop over one query on CPU
  std::optional<Joined> joined = std::nullopt;    ///< none: candidates enter in another way, and must be in one place
  at::Tensor (*joined_loss)(const at::Tensor& target, const at::Tensor& sum) = nullptr; ///< the loss [Q] from that, without label smoothing
  /// [Q], where the loss without label smoothing is it less the score of the target; nullptr: the loss is another function
  at::Tensor (*log_normalizer)(const CandidateBatch&) = nullptr;

  bool has_kernels() const { return gradient != nullptr && row_loss.has_value(); }
};

/// The estimator of that name, or an error of `op` that lists the names there are. Stays where it is.
const Estimator& find_estimator(const char* op, std::string_view name);
/// Refuses z_loss other than 0 for an estimator without a log normaliser, in the name of `op`.
void check_z_loss(const char* op, double z_loss, const Estimator& estimator);
/// The names there are.
std::vector<std::string> estimator_names();

} // namespace xsoftmax
