#include "core/dtypes.h"
#include "core/impl.h"
#include "losses/candidate_loss.h"
#include "losses/loss_operands.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kScoresPerTask = 8192;

template <typename T>
void run_rows(RowLoss loss, const LossRows<T>& rows, int64_t queries) {
  at::parallel_for(0, queries, std::max<int64_t>(1, kScoresPerTask / (1 + rows.candidates())), [&](int64_t first, int64_t last) {
    std::vector<T> buffer(rows.buffer_size());
    estimator_rows().of(T{}).of(loss)(rows, first, last, buffer.data());
  });
}

template <typename T>
Tensor loss_cpu(const CandidateLossArgs& args) {
  const LossOperands operands(args);
  const Tensor loss = at::empty({args.scores.size(0)}, args.scores.options());
  const Estimator& estimator = find_estimator("candidate_loss", args.estimator);
  auto rows = operands.rows<T>(args, estimator);
  rows.loss = data<T>(loss);
  run_rows(estimator.row_loss, rows, loss.size(0));
  return loss;
}

template <typename T>
Tensor loss_backward_cpu(const Tensor& grad, const CandidateLossArgs& args) {
  const LossOperands operands(args);
  const Tensor grad_loss = grad.to(args.scores.scalar_type()).contiguous();
  const Tensor grad_scores = at::empty_like(operands.scores);
  const Estimator& estimator = find_estimator("candidate_loss", args.estimator);
  auto rows = operands.rows<T>(args, estimator);
  rows.grad_loss = const_data<T>(grad_loss);
  rows.grad_scores = data<T>(grad_scores);
  run_rows(estimator.row_loss, rows, grad_scores.size(0));
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
