#include "proposal/in_batch_sample.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/options.h"
#include "proposal/modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/eye.h>
#include <torch/library.h>

#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

Tensor first_column(const Tensor& ids) { return ids.dim() == 2 ? ids.select(1, 0) : ids; }

void check_targets(const char* name, const Tensor& ids) {
  TORCH_CHECK_VALUE(ids.dim() == 1 || (ids.dim() == 2 && ids.sym_size(1) >= 1),
                    "in_batch_sample: expected ", name, " of shape [Q] or [Q, T], got ",
                    ids.sym_sizes());
}

StreamingOptions checked(const char* op, const char* argument, const Tensor& ids,
                         const StreamingState& state, const Tensor& drawn, std::string_view text) {
  const StreamingOptions options = streaming_options(op, text);
  check_streaming(op, argument, ids, state, options);
  check::dim(op, "drawn", drawn, 0);
  check::int64(op, "drawn", drawn);
  check::same_device(op, "drawn", drawn, argument, ids);
  return options;
}

StreamingOptions check_sample(const Tensor& target, const OptionalTensor& counted,
                              const StreamingState& state, const Tensor& drawn,
                              std::string_view text) {
  constexpr const char* op = "in_batch_sample";
  const StreamingOptions options = checked(op, "target", target, state, drawn, text);
  check_targets("target", target);
  if (is_defined(counted)) {
    check::int64(op, "counted", *counted);
    check_targets("counted", *counted);
    check::same_device(op, "counted", *counted, "target", target);
  }
  return options;
}

Tensor log_counts(const Tensor& ids, const StreamingState& state, const Tensor& drawn,
                  std::string_view text) {
  static const auto log_prob =
      find_op<decltype(streaming_log_prob)>("xsoftmax::streaming_log_prob");
  const Tensor others = (drawn - 1).clamp_min(0).to(at::kDouble).log();
  return (log_prob.call(ids, state.count, state.total, state.last, state.seen, text) + others)
      .to(at::kFloat)
      .masked_fill(ids.lt(0), -kInfinite);
}

std::tuple<Tensor, Tensor, Tensor> in_batch_sample_cpu(const Tensor& target,
                                                       const OptionalTensor& counted, Tensor& count,
                                                       Tensor& total, Tensor& last, Tensor& seen,
                                                       Tensor& drawn, std::string_view text) {
  const StreamingOptions options =
      check_sample(target, counted, {count, total, last, seen}, drawn, text);
  if (!options.open()) {
    check::class_ids("in_batch_sample", "target", target, *options.num_ids, -1);
    check::class_ids("in_batch_sample", "counted",
                     is_defined(counted) ? first_column(*counted) : target, *options.num_ids, -1);
  }
  return in_batch_sample(target, counted, count, total, last, seen, drawn, text);
}

Tensor in_batch_log_count_cpu(const Tensor& ids, const Tensor& count, const Tensor& total,
                              const Tensor& last, const Tensor& seen, const Tensor& drawn,
                              std::string_view text) {
  const StreamingOptions options =
      checked("in_batch_log_count", "ids", ids, {count, total, last, seen}, drawn, text);
  if (!options.open()) {
    check::class_ids("in_batch_log_count", "ids", ids, *options.num_ids, -1);
  }
  return in_batch_log_count(ids, count, total, last, seen, drawn, text);
}

} // namespace

std::tuple<Tensor, Tensor, Tensor> in_batch_sample(const Tensor& target,
                                                   const OptionalTensor& counted, Tensor& count,
                                                   Tensor& total, Tensor& last, Tensor& seen,
                                                   Tensor& drawn, std::string_view text) {
  const StreamingState state{count, total, last, seen};
  check_sample(target, counted, state, drawn, text);
  const Tensor targets = target.clone(); // because `target` may alias one of the counts
  const Tensor is_ignored = first_column(targets).lt(0), ids = first_column(targets).clamp_min(0);
  drawn.copy_(is_ignored.logical_not().sum());
  if (is_defined(counted)) {
    static const auto update = find_op<decltype(streaming_update_)>("xsoftmax::streaming_update_");
    const Tensor counted_targets = first_column(*counted);
    update.call(counted_targets, counted_targets.ge(0), count, total, last, seen, text);
  }
  const Tensor target_log_count = log_counts(targets, state, drawn, text),
               class_log_count = first_column(target_log_count);
  const c10::SymInt queries = ids.sym_size(0);
  const Tensor diagonal = at::eye_symint(queries, is_ignored.options());
  const Tensor is_excluded =
      diagonal.logical_or(is_ignored.unsqueeze(0)).logical_or(is_ignored.unsqueeze(1));
  return {ids,
          class_log_count.unsqueeze(0)
              .expand_symint({queries, queries})
              .masked_fill(is_excluded, kInfinite),
          target_log_count};
}

Tensor in_batch_log_count(const Tensor& ids, const Tensor& count, const Tensor& total,
                          const Tensor& last, const Tensor& seen, const Tensor& drawn,
                          std::string_view text) {
  const StreamingState state{count, total, last, seen};
  checked("in_batch_log_count", "ids", ids, state, drawn, text);
  return log_counts(ids, state, drawn, text);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "in_batch_sample(Tensor target, Tensor? counted, Tensor(a!) count, Tensor(b!) total, "
      "Tensor(c!) last, Tensor(d!) seen, Tensor(e!) drawn, "
      "str options) -> (Tensor ids, Tensor log_count, Tensor target_log_count)");
  m.def(
      "in_batch_log_count(Tensor ids, Tensor count, Tensor total, Tensor last, Tensor seen, Tensor "
      "drawn, str options) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("in_batch_sample", in_batch_sample);
  m.impl("in_batch_log_count", in_batch_log_count);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("in_batch_sample", in_batch_sample);
  m.impl("in_batch_log_count", in_batch_log_count);
}

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("in_batch_sample", in_batch_sample_cpu);
  m.impl("in_batch_log_count", in_batch_log_count_cpu);
}

} // namespace xsoftmax
