#include "core/checks.h"
#include "core/optional.h"
#include "losses/linear_candidate_loss.h"
#include "xsoftmax/ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kOp = "sampled_softmax_loss";

void check_arguments(const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& class_weight,
                     int64_t reduction, int64_t ignore_index, double label_smoothing) {
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.sym_sizes().slice(0, input.dim() - 1) == target.sym_sizes(), kOp,
                    ": expected target of the shape of input without its last dimension, ",
                    input.sym_sizes().slice(0, std::max<int64_t>(0, input.dim() - 1)), ", got ", target.sym_sizes());
  check::int64(kOp, "target", target);
  check::same_device(kOp, "target", target, "input", input);
  check::dim(kOp, "weight", weight, 2);
  if (given(class_weight)) {
    check::dim(kOp, "class_weight", *class_weight, 1);
    check::floating(kOp, "class_weight", *class_weight);
    check::same_device(kOp, "class_weight", *class_weight, "input", input);
    check::size(kOp, "class_weight", *class_weight, 0, weight.sym_size(0), "the rows of weight");
    TORCH_CHECK_VALUE(label_smoothing == 0, kOp, ": expected label_smoothing of 0 beside class weights, got ", label_smoothing,
                      " (the weighted mean over all classes cannot be had from a sample)");
  }
  TORCH_CHECK_VALUE(reduction >= 0 && reduction < at::Reduction::END, kOp, ": expected reduction 0 (none), 1 (mean) or 2 (sum), got ",
                    reduction);
  if (target.is_cpu() && !at::isTensorSubclassLike(target)) { // values can be read
    check::class_ids(kOp, "target", target, weight.size(0), ignore_index);
  }
}

} // namespace

Tensor sampled_softmax_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                            const OptionalTensor& private_ids, const OptionalTensor& shared_ids,
                            const OptionalTensor& private_log_count, const OptionalTensor& shared_log_count,
                            const OptionalTensor& target_log_count, const OptionalTensor& class_weight, std::string_view estimator,
                            bool remove_accidental_hits, int64_t fixed_private, int64_t fixed_shared, int64_t reduction,
                            int64_t ignore_index, double label_smoothing, bool sparse_grad) {
  check_arguments(input, weight, target, class_weight, reduction, ignore_index, label_smoothing);
  const Tensor flat = target.reshape({-1});
  Tensor loss = linear_candidate_loss(input.reshape_symint({flat.sym_size(0), input.sym_size(-1)}), weight, bias, flat, private_ids,
                                      shared_ids, private_log_count, shared_log_count, target_log_count, estimator,
                                      remove_accidental_hits, fixed_private, fixed_shared, label_smoothing, ignore_index, sparse_grad);
  Tensor total;
  if (given(class_weight)) {
    const Tensor id = targets_that_count(flat, ignore_index);
    const Tensor scale = class_weight->to(loss.scalar_type()).index_select(0, id) * flat.ne(ignore_index);
    loss = loss * scale;
    total = reduction == at::Reduction::Mean ? scale.sum() : total;
  } else if (reduction == at::Reduction::Mean) {
    total = flat.ne(ignore_index).sum();
  }
  switch (reduction) {
    case at::Reduction::Mean: return loss.sum() / total;
    case at::Reduction::Sum: return loss.sum();
    default: return loss.reshape_symint(target.sym_sizes());
  }
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("sampled_softmax_loss(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? private_ids, Tensor? shared_ids, "
        "Tensor? private_log_count=None, Tensor? shared_log_count=None, Tensor? target_log_count=None, Tensor? class_weight=None, "
        "str estimator=\"sampled_softmax\", bool remove_accidental_hits=True, int fixed_private=0, int fixed_shared=0, "
        "int reduction=1, int ignore_index=-100, float label_smoothing=0.0, bool sparse_grad=True) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeImplicitAutograd, m) { m.impl("sampled_softmax_loss", sampled_softmax_loss); }

} // namespace xsoftmax
