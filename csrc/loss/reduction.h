#pragma once

#include "op/optional.h"

#include <xsoftmax/options.h>

#include <tuple>

// reduced_loss(loss [Q], target [*], class_weight [N] or none, options) -> [*] or a scalar
//   Reduces the losses of queries as torch.nn.CrossEntropyLoss does. Losses of ignored targets are
//   dropped, even if they are not finite. options: ReductionOptions.
//
//     share = class_weight[target], or 1; 0 where target == ignore_index
//     "none": loss * share; "sum": (loss * share).sum(); "mean": (loss * share).sum() / share.sum()

namespace xsoftmax {

at::Tensor reduced_loss(const at::Tensor& loss, const at::Tensor& target,
                        const OptionalTensor& class_weight, const ReductionOptions& options);

/// Returns the weight of each loss in reduced_loss without class weights, [Q] of `dtype`, for
/// target [Q]. All weights are equal, because the loss of an ignored query is 0. Returns nullopt
/// for reduction "none" and for an empty batch.
OptionalTensor mean_weights(const at::Tensor& target, const ReductionOptions& options,
                            at::ScalarType dtype);

/// Returns "none", "mean" or "sum" as at::Reduction. Throws a ValueError of `op` for other text.
int64_t reduction_code(const char* op, const std::string& reduction);

/// Checks input [*, D] of a floating dtype, weight [N, D], and target [*] or, with several
/// positives per query, [*, T]: int64 in [0, N) or ignore_index (values are checked only on the
/// CPU). T = N looks like one-hot targets and is an error unless `soft`.
void check_batch(const char* op, const at::Tensor& input, const at::Tensor& target,
                 const at::Tensor& weight, int64_t ignore_index, bool soft = false);

/// Return input [*, D] as [Q, D], and target [*] as [Q]; the tensor itself if it has that shape.
at::Tensor as_queries(const at::Tensor& input, const c10::SymInt& queries);
at::Tensor as_vector(const at::Tensor& target);

/// Checks class_weight [classes]: floating dtype, on the device of target.
void check_class_weight(const char* op, const OptionalTensor& class_weight,
                        const c10::SymInt& classes, const at::Tensor& target);

/// Returns input [Q, D] with zeros in the rows whose target [Q] is ignore_index. Those rows may
/// hold NaN, and 0 * NaN would reach the gradient of the table. On the CPU returns input itself if
/// no target is ignored.
at::Tensor mask_ignored_rows(const at::Tensor& input, const at::Tensor& target,
                             const c10::SymInt& ignore_index);

// counted_queries(input [*, D], target [*], weight [N, D], ignore_index, soft) ->
// (queries [Q, D], target [Q])
//   Returns the batch as samplers receive it, without gradient. An ignored query has target -1 and
//   a row of zeros, whatever it holds; on the CPU queries is input itself if no query is ignored.
//   For several positives, target [*, T], the result is [Q, T]: the distinct positives
//   (loss/several_positives.h), with the first repeated in place of padding.
//
// Throws all errors of a batch, so that they come before the sampler changes. soft: the target has
// probabilities, and T may be N. values: false skips zeroing the queries, for samplers that use
// only their number.
std::tuple<at::Tensor, at::Tensor> counted_queries(const at::Tensor& input,
                                                   const at::Tensor& target,
                                                   const at::Tensor& weight, int64_t ignore_index,
                                                   bool soft = false, bool values = true);

} // namespace xsoftmax
