#pragma once

#include "op/optional.h"

#include <xsoftmax/ops.h>
#include <xsoftmax/options.h>

#include <string>

// Several positives per query: target [*, T] for input [*, D]. Entries of ignore_index are padding,
// and duplicates of a class count once.
//
//     mean   the mean over the positives y of the loss of y against the candidates, without the
//            other positives
//     sum    -log of the summed probability of the positives: the loss of all positives as one
//            class with score logsumexp(s_y)
//
// Samples with replacement that hit another positive are discarded. If k of the M samples of a set
// are discarded and C is the summed expected count of the other positives, the remaining samples
// have the counts c (M - k) / (M - C), because q is renormalised to the classes that remain. With
// more than one such set the counts are not changed. A query with only padding is ignored.

namespace xsoftmax {

/// Returns whether target is [*, T] with T > 1 positives per query of input [*, D]. Replaces a
/// target with T = 1 or T = 0 by the equivalent target [*].
bool has_multiple_positives(const at::Tensor& input, at::Tensor& target, int64_t ignore_index);

/// Returns the distinct positives of each query, [Q, T], in descending order and padded with -1.
at::Tensor distinct_positives(const at::Tensor& target, int64_t ignore_index);

/// Throws a ValueError of `op` for options that several positives do not support.
void check_positives(const char* op, const PositivesOptions& options,
                     const OptionalTensor& class_weight, double label_smoothing);

/// Returns the weight of each loss. For "mean", [Q, T]: the class weight of the positive divided by
/// the number of positives of the query, 0 for padding. For "sum", [Q, 1].
at::Tensor positive_shares(const at::Tensor& positives, const PositivesOptions& options,
                           const OptionalTensor& class_weight, at::ScalarType dtype);

/// Reduces loss [Q], which is already multiplied by `shares`, as ReductionOptions define. `shape`:
/// shape [*] of the queries.
at::Tensor reduced_positives(const char* op, const at::Tensor& loss, const at::Tensor& shares,
                             const std::string& reduction, c10::SymIntArrayRef shape);

/// Losses before the reduction: one per positive, or one per query if all positives are one class.
struct PositivesLoss {
  at::Tensor loss; ///< [Q, T] or [Q, 1]; unspecified for padding
  at::Tensor scores; ///< [Q, T] scores of the positives
  at::Tensor score; ///< score of the target in each loss: `scores`, or [Q, 1]
};
/// Computes the losses of positives, which come from distinct_positives().
PositivesLoss losses_of_positives(const at::Tensor& input, const at::Tensor& weight,
                                  const OptionalTensor& bias, const at::Tensor& positives,
                                  const Proposal& sets, const SampledSoftmaxOptions& options,
                                  const OptionalTensor& log_z);

/// Checks the arguments and returns sampled_softmax_loss with several positives per query.
at::Tensor several_positives_loss(const at::Tensor& input, const at::Tensor& weight,
                                  const OptionalTensor& bias, const at::Tensor& target,
                                  const Proposal& sets, const SampledSoftmaxOptions& options,
                                  const OptionalTensor& class_weight, const OptionalTensor& log_z);

} // namespace xsoftmax
