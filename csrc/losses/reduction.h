#pragma once

#include "core/optional.h"

#include <xsoftmax/loss_options.h>

#include <tuple>

// reduced_loss(loss [Q], target [*], class_weight [N] or none, options) -> [*] or a scalar: the losses of queries as torch.nn.CrossEntropyLoss
// puts them together; those of ignored targets are dropped, whatever they are. options: ReductionOptions.
//
//     share = class_weight[target], or 1; 0 where target == ignore_index
//     "none": loss * share; "sum": (loss * share).sum(); "mean": (loss * share).sum() / share.sum()

namespace xsoftmax {

at::Tensor reduced_loss(const at::Tensor& loss, const at::Tensor& target, const OptionalTensor& class_weight, const ReductionOptions& options);

/// What each loss counts in reduced_loss without class weights, [Q] of `dtype`, for target [Q]: all the same, since the loss of an ignored query is 0. None for
/// "none" and where there is no query.
OptionalTensor equal_shares(const at::Tensor& target, const ReductionOptions& options, at::ScalarType dtype);

/// "none", "mean" or "sum", as at::Reduction.
int64_t reduction_code(const char* op, const std::string& reduction);

/// input [*, D] of a floating dtype, target [*] or, several positives of each query, [*, T], int64 in [0, N) or ignore_index (checked on the CPU), weight [N,
/// D]. soft: T may be N, where it is refused otherwise, as that of one-hot targets.
void check_batch(const char* op, const at::Tensor& input, const at::Tensor& target, const at::Tensor& weight, int64_t ignore_index, bool soft = false);

/// input [*, D] as [Q, D], and target [*] as [Q]: the tensor itself where it has that shape.
at::Tensor as_queries(const at::Tensor& input, const c10::SymInt& queries);
at::Tensor as_vector(const at::Tensor& target);

/// class_weight [classes] of a floating dtype, on target's device.
void check_class_weight(const char* op, const OptionalTensor& class_weight, const c10::SymInt& classes, const at::Tensor& target);

/// input [Q, D] with zeros in the rows whose target [Q] is ignore_index, which may hold anything:
/// 0 times NaN would reach the gradient of the table. input itself where the CPU sees that none is.
at::Tensor counted_rows(const at::Tensor& input, const at::Tensor& target, const c10::SymInt& ignore_index);

// counted_queries(input [*, D], target [*], weight [N, D], ignore_index, soft) -> (queries [Q, D], target [Q]): what samplers are shown of a batch,
// without gradient: zeros and -1 for a query that is ignored, which may hold anything; on the CPU input itself where none is. Of several
// positives, target [*, T], [Q, T]: the different ones (losses/several_positives.h), the first once more in the place of padding. All that is
// wrong with a batch is said here, before a sampler changes.
// soft: the target is that of given probabilities, whose T may be N.
// values: without it queries are input as it is, for samplers that look at their number alone.
std::tuple<at::Tensor, at::Tensor> counted_queries(const at::Tensor& input, const at::Tensor& target, const at::Tensor& weight, int64_t ignore_index,
                                                   bool soft = false, bool values = true);

} // namespace xsoftmax
