#include "core/dtypes.h"
#include "core/impl.h"
#include "losses/candidate_loss.h"
#include "losses/estimator_rows.h"
#include "losses/estimators.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kScoresPerTask = 8192;

// Contiguous copies, where needed, of what LossRows points into.
struct Operands {
  Tensor scores, target, private_ids, shared_ids, private_log_count, shared_log_count, target_log_count;

  explicit Operands(const CandidateLossArgs& args)
      : scores(args.scores.contiguous()),
        target(args.target.contiguous()),
        private_ids(plain(args.private_ids)),
        shared_ids(plain(args.shared_ids)),
        private_log_count(plain(args.private_log_count, scores.scalar_type())),
        shared_log_count(plain(args.shared_log_count, scores.scalar_type())),
        target_log_count(plain(args.target_log_count, scores.scalar_type())) {}

  static Tensor plain(const OptionalTensor& tensor, at::ScalarType dtype = at::kLong) {
    return tensor.has_value() && tensor->defined() ? tensor->to(dtype).contiguous() : Tensor();
  }

  template <typename T>
  LossRows<T> rows(const CandidateLossArgs& args, const Estimator& estimator) const {
    const auto pointer = [](const Tensor& tensor) { return tensor.defined() ? const_data<T>(tensor) : nullptr; };
    const auto ids = [](const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<int64_t>() : nullptr; };
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
    rows.fixed_private = args.fixed_private;
    rows.fixed_shared = args.fixed_shared;
    rows.remove_hits = args.remove_accidental_hits;
    rows.renormalize = estimator.renormalizes;
    rows.correct_target = estimator.corrects_target;
    rows.label_smoothing = T(args.label_smoothing);
    return rows;
  }
};

template <typename T>
void run_rows(const LossRows<T>& rows, int64_t queries) {
  const int64_t width = 1 + rows.private_width + rows.shared_width;
  at::parallel_for(0, queries, std::max<int64_t>(1, kScoresPerTask / width), [&](int64_t first, int64_t last) {
    std::vector<T> buffer(2 * width);
    estimator_rows().of(T{}).softmax(rows, first, last, buffer.data());
  });
}

template <typename T>
Tensor loss_cpu(const CandidateLossArgs& args) {
  const Operands operands(args);
  const Tensor loss = at::empty({args.scores.size(0)}, args.scores.options());
  auto rows = operands.rows<T>(args, find_estimator(args.estimator));
  rows.loss = data<T>(loss);
  run_rows(rows, loss.size(0));
  return loss;
}

template <typename T>
Tensor loss_backward_cpu(const Tensor& grad, const CandidateLossArgs& args) {
  const Operands operands(args);
  const Tensor grad_loss = grad.to(args.scores.scalar_type()).contiguous();
  const Tensor grad_scores = at::empty_like(operands.scores);
  auto rows = operands.rows<T>(args, find_estimator(args.estimator));
  rows.grad_loss = const_data<T>(grad_loss);
  rows.grad_scores = data<T>(grad_scores);
  run_rows(rows, grad_scores.size(0));
  return grad_scores;
}

Tensor candidate_loss_cpu(XS_CANDIDATE_LOSS_PARAMS) {
  const CandidateLossArgs args{XS_CANDIDATE_LOSS_ARGS};
  check_candidate_loss(args);
  if (use_reference()) {
    return candidate_loss_reference(XS_CANDIDATE_LOSS_ARGS);
  }
  return scores.scalar_type() == at::kDouble ? loss_cpu<double>(args) : loss_cpu<float>(args);
}

Tensor candidate_loss_backward_cpu(const Tensor& grad, XS_CANDIDATE_LOSS_PARAMS) {
  const CandidateLossArgs args{XS_CANDIDATE_LOSS_ARGS};
  check_candidate_loss_backward(grad, args);
  if (use_reference()) {
    return candidate_loss_backward_reference(grad, XS_CANDIDATE_LOSS_ARGS);
  }
  return scores.scalar_type() == at::kDouble ? loss_backward_cpu<double>(grad, args) : loss_backward_cpu<float>(grad, args);
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("candidate_loss", candidate_loss_cpu);
  m.impl("candidate_loss_backward", candidate_loss_backward_cpu);
}

} // namespace xsoftmax
