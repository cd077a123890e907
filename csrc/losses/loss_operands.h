#pragma once

#include "core/dtypes.h"
#include "core/optional.h"
#include "losses/candidate_loss.h"
#include "losses/estimator_rows.h"
#include "losses/estimators.h"

namespace xsoftmax {

/// Contiguous copies, where needed, of what LossRows points into.
struct LossOperands {
  at::Tensor scores, target, private_ids, shared_ids, private_log_count, shared_log_count, target_log_count;

  explicit LossOperands(const CandidateLossArgs& args)
      : scores(args.scores.contiguous()),
        target(args.target.contiguous()),
        private_ids(plain(args.private_ids)),
        shared_ids(plain(args.shared_ids)),
        private_log_count(plain(args.private_log_count, scores.scalar_type())),
        shared_log_count(plain(args.shared_log_count, scores.scalar_type())),
        target_log_count(plain(args.target_log_count, scores.scalar_type())) {}

  static at::Tensor plain(const std::optional<at::Tensor>& tensor, at::ScalarType dtype = at::kLong) {
    return given(tensor) ? tensor->to(dtype).contiguous() : at::Tensor();
  }

  template <typename T>
  LossRows<T> rows(const CandidateLossArgs& args, const Estimator& estimator) const {
    const auto pointer = [](const at::Tensor& tensor) { return tensor.defined() ? const_data<T>(tensor) : nullptr; };
    const auto ids = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<int64_t>() : nullptr; };
    LossRows<T> rows{};
    rows.scores = pointer(scores);
    rows.target = ids(target);
    rows.private_ids = ids(private_ids);
    rows.shared_ids = ids(shared_ids);
    rows.private_log_count = pointer(private_log_count);
    rows.shared_log_count = pointer(shared_log_count);
    rows.target_log_count = pointer(target_log_count);
    rows.private_width = private_ids.defined() ? private_ids.size(1) : 0;
    rows.shared_width = shared_ids.defined() ? shared_ids.size(0) : 0;
    rows.shared_count_stride = shared_log_count.defined() && shared_log_count.dim() == 2 ? rows.shared_width : 0;
    rows.fixed_private = args.fixed_private;
    rows.fixed_shared = args.fixed_shared;
    rows.remove_distinct_hits = args.remove_accidental_hits && estimator.drops_distinct_hits;
    rows.remove_drawn_hits = args.remove_accidental_hits && estimator.drops_drawn_hits;
    rows.renormalize = estimator.renormalizes;
    rows.correct_target = estimator.corrects_target;
    rows.take_a_draw = estimator.takes_a_draw && args.fixed_private + args.fixed_shared > 0;
    rows.weigh = estimator.weighs;
    rows.label_smoothing = T(args.label_smoothing);
    return rows;
  }
};

} // namespace xsoftmax
