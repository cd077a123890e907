#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "estimator/candidate_loss.h"
#include "estimator/loss_operands.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kScoresPerTask = 8192;

template <typename T>
void run_rows(const EstimatorArguments& arguments, const LossRows<T>& rows, int64_t queries) {
  at::parallel_for(0, queries, std::max<int64_t>(1, kScoresPerTask / (1 + rows.candidates())),
                   [&](int64_t first, int64_t last) {
                     const RowLoss loss = *arguments.estimator.row_loss;
                     std::vector<T> buffer(rows.buffer_size(loss));
                     estimator_rows().of(T{}).of(loss)(rows, first, last, buffer.data());
                   });
}

template <typename T>
Tensor loss_cpu(const EstimatorArguments& arguments) {
  const LossOperands operands(arguments);
  const Tensor loss = at::empty({arguments.scores.size(0)}, arguments.scores.options());
  auto rows = operands.rows<T>(arguments);
  rows.loss = data<T>(loss);
  run_rows(arguments, rows, loss.size(0));
  return loss;
}

template <typename T>
Tensor loss_backward_cpu(const Tensor& grad, const EstimatorArguments& arguments) {
  const LossOperands operands(arguments);
  const Tensor grad_loss = grad.to(arguments.scores.scalar_type()).contiguous();
  const Tensor grad_scores = at::empty_like(operands.scores);
  auto rows = operands.rows<T>(arguments);
  rows.grad_loss = const_data<T>(grad_loss);
  rows.grad_scores = data<T>(grad_scores);
  run_rows(arguments, rows, grad_scores.size(0));
  return grad_scores;
}

Tensor estimator_loss_cpu(const Tensor& scores, const Tensor& target,
                          const OptionalTensors& candidates, at::IntArrayRef distinct,
                          std::string_view options) {
  const EstimatorArguments arguments("candidate_loss", scores, target, candidates, distinct,
                                     options);
  if (use_reference() || !arguments.estimator.has_kernels()) {
    return estimator_loss_reference(arguments);
  }
  return scores.scalar_type() == at::kDouble ? loss_cpu<double>(arguments)
                                             : loss_cpu<float>(arguments);
}

Tensor estimator_loss_backward_cpu(const Tensor& grad, const Tensor& scores, const Tensor& target,
                                   const OptionalTensors& candidates, at::IntArrayRef distinct,
                                   std::string_view options) {
  const EstimatorArguments arguments("candidate_loss", scores, target, candidates, distinct,
                                     options);
  check_estimator_loss_backward(grad, scores);
  if (use_reference() || !arguments.estimator.has_kernels()) {
    return estimator_loss_backward_reference(grad, arguments);
  }
  return scores.scalar_type() == at::kDouble ? loss_backward_cpu<double>(grad, arguments)
                                             : loss_backward_cpu<float>(grad, arguments);
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("estimator_loss", estimator_loss_cpu);
  m.impl("estimator_loss_backward", estimator_loss_backward_cpu);
}

} // namespace xsoftmax
