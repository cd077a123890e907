#pragma once

#include "core/optional.h"

#include <xsoftmax/candidates.h>
#include <xsoftmax/loss_options.h>

#include <string>

// Several positives for a query: target [*, T] beside input [*, D]. Entries of ignore_index are padding, and a class that stands twice counts once.
//
//     mean   the mean over the positives y of the loss of y against the candidates without the other positives
//     sum    the loss of all positives as one class, whose score is logsumexp(s_y): -log of their summed probability
//
// Independent draws of one set that hit another positive are drawn in vain: with M draws, k of them in vain and C the summed expected count of the
// other positives, the draws that are left have counts c (M - k) / (M - C), those of q renormalised to the classes outside. Of several such sets
// the counts stay as they are. A query whose positives are all padding is ignored.

namespace xsoftmax {

/// Whether target [*, T] has T > 1 positives for each query of input [*, D]. One or none becomes target [*].
bool has_several(const at::Tensor& input, at::Tensor& target, int64_t ignore_index);

/// The different positives of each query, [Q, T] in falling order, with -1 behind them.
at::Tensor different_positives(const at::Tensor& target, int64_t ignore_index);

/// Refuses what does not go with several positives, in the name of `op`.
void check_positives(const char* op, const PositivesOptions& options, const OptionalTensor& class_weight, double label_smoothing);

/// What the loss of a positive counts for its query, [Q, T]: for "mean" its class weight over their number, 0 for padding; or [Q, 1] for "sum".
at::Tensor positive_shares(const at::Tensor& positives, const PositivesOptions& options, const OptionalTensor& class_weight, at::ScalarType dtype);

/// loss [Q], the shares of each query already in it, as ReductionOptions say: `shape` is that of the queries.
at::Tensor reduced_positives(const char* op, const at::Tensor& loss, const at::Tensor& shares, const std::string& reduction, c10::SymIntArrayRef shape);

/// Before they are put together: the loss of each positive, or of all of a query as one class.
struct PositivesLoss {
  at::Tensor loss;   ///< [Q, T] or [Q, 1], of padding anything
  at::Tensor scores; ///< [Q, T], of the positives
  at::Tensor score;  ///< what stands for the target: scores, or [Q, 1]
};
/// positives as different_positives gives them.
PositivesLoss losses_of_positives(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& positives,
                                  const Proposal& sets, const SampledSoftmaxOptions& options, const OptionalTensor& log_z);

/// sampled_softmax_loss, checked, of several positives.
at::Tensor several_positives_loss(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& target, const Proposal& sets,
                                  const SampledSoftmaxOptions& options, const OptionalTensor& class_weight, const OptionalTensor& log_z);

} // namespace xsoftmax
