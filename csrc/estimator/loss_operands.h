#pragma once

#include "cpu/dtypes.h"
#include "op/optional.h"
#include "estimator/candidate_loss.h"
#include "estimator/estimator_rows.h"

#include <utility>

namespace xsoftmax {

/// Owns the contiguous tensors that LossRows points into. Copies only where needed.
struct LossOperands {
  at::Tensor scores, target, private_ids, shared_ids, private_log_count, shared_log_count,
      target_log_count;

  explicit LossOperands(const EstimatorArguments& arguments)
      : LossOperands(arguments, arguments.scores.contiguous()) {}
  /// Takes the scores of the arguments with a column stride of 1; their row stride is free.
  LossOperands(const EstimatorArguments& arguments, at::Tensor with_unit_column_stride)
      : scores(std::move(with_unit_column_stride)), target(arguments.target.contiguous()),
        private_ids(plain(arguments.candidates.private_ids)),
        shared_ids(plain(arguments.candidates.shared_ids)),
        private_log_count(plain(arguments.candidates.private_log_count, scores.scalar_type())),
        shared_log_count(plain(arguments.candidates.shared_log_count, scores.scalar_type())),
        target_log_count(plain(arguments.candidates.target_log_count, scores.scalar_type())) {}

  static at::Tensor plain(const std::optional<at::Tensor>& tensor,
                          at::ScalarType dtype = at::kLong) {
    if (!is_defined(tensor)) {
      return at::Tensor();
    }
    const at::Tensor cast = tensor->scalar_type() == dtype ? *tensor : tensor->to(dtype);
    // Autograd may create zero tensors, which have no memory.
    return (cast._is_zerotensor() ? cast.clone() : cast).contiguous();
  }

  template <typename T>
  LossRows<T> rows(const EstimatorArguments& arguments) const {
    const auto pointer = [](const at::Tensor& tensor) {
      return tensor.defined() ? const_data<T>(tensor) : nullptr;
    };
    const auto ids = [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.const_data_ptr<int64_t>() : nullptr;
    };
    const EstimatorTraits& traits = arguments.estimator.traits;
    const bool remove_hits = arguments.options.remove_accidental_hits;
    LossRows<T> rows{};
    rows.scores = pointer(scores);
    rows.stride = scores.stride(0);
    rows.target = ids(target);
    rows.private_ids = ids(private_ids);
    rows.shared_ids = ids(shared_ids);
    rows.private_log_count = pointer(private_log_count);
    rows.shared_log_count = pointer(shared_log_count);
    rows.target_log_count = pointer(target_log_count);
    rows.private_width = private_ids.defined() ? private_ids.size(1) : 0;
    rows.shared_width = shared_ids.defined() ? shared_ids.size(0) : 0;
    rows.shared_count_stride =
        shared_log_count.defined() && shared_log_count.dim() == 2 ? rows.shared_width : 0;
    rows.distinct_private = arguments.candidates.distinct_private;
    rows.distinct_shared = arguments.candidates.distinct_shared;
    rows.remove_distinct_hits = remove_hits && traits.drops_distinct_hits;
    rows.remove_drawn_hits = remove_hits && traits.drops_drawn_hits;
    rows.renormalize = traits.renormalizes;
    rows.correct_target = traits.corrects_target;
    rows.replace_a_sample =
        traits.replaces_a_sample && rows.distinct_private + rows.distinct_shared > 0;
    rows.weigh = traits.weighs;
    rows.label_smoothing = T(arguments.options.label_smoothing);
    return rows;
  }
};

} // namespace xsoftmax
