#include "samplers/in_batch_sample.h"

#include "core/checks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/eye.h>
#include <torch/library.h>

#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_counts(const char* op, const char* argument, const Tensor& ids, const Tensor& counts, const Tensor& total, const Tensor& drawn) {
  check::int64(op, argument, ids);
  check::dim(op, "counts", counts, 1);
  check::int64(op, "counts", counts);
  check::dim(op, "total", total, 0);
  check::int64(op, "total", total);
  check::dim(op, "drawn", drawn, 0);
  check::int64(op, "drawn", drawn);
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"counts", counts}, {"total", total}, {"drawn", drawn}}) {
    check::same_device(op, name, tensor, argument, ids);
  }
}

void check_target(const Tensor& target, const Tensor& counts, const Tensor& total, const Tensor& drawn) {
  constexpr const char* op = "in_batch_sample";
  check_counts(op, "target", target, counts, total, drawn);
  TORCH_CHECK_VALUE(target.dim() == 1 || (target.dim() == 2 && target.sym_size(1) >= 1), op, ": expected target of shape [Q] or [Q, T], got ",
                    target.sym_sizes());
}

// At least 1: before the first batch every class has p = 0, not 0 / 0.
Tensor log_counts(const Tensor& ids, const Tensor& counts, const Tensor& total, const Tensor& drawn) {
  const Tensor count = counts.index_select(0, ids.clamp_min(0).reshape({-1})).view_symint(ids.sym_sizes());
  const Tensor others = (drawn - 1).clamp_min(0).to(at::kDouble).log(), all = total.clamp_min(1).to(at::kDouble).log();
  return (count.to(at::kDouble).log() + (others - all)).to(at::kFloat).masked_fill(ids.lt(0), -kInfinity);
}

std::tuple<Tensor, Tensor, Tensor> in_batch_sample_cpu(const Tensor& target, Tensor& counts, Tensor& total, Tensor& drawn, bool update) {
  check_target(target, counts, total, drawn);
  check::class_ids("in_batch_sample", "target", target, counts.size(0), -1);
  return in_batch_sample(target, counts, total, drawn, update);
}

Tensor in_batch_log_count_cpu(const Tensor& ids, const Tensor& counts, const Tensor& total, const Tensor& drawn) {
  check_counts("in_batch_log_count", "ids", ids, counts, total, drawn);
  check::class_ids("in_batch_log_count", "ids", ids, counts.size(0), -1);
  return in_batch_log_count(ids, counts, total, drawn);
}

} // namespace

std::tuple<Tensor, Tensor, Tensor> in_batch_sample(const Tensor& target, Tensor& counts, Tensor& total, Tensor& drawn, bool update) {
  check_target(target, counts, total, drawn);
  const Tensor targets = target.clone(); // which may be one of the counts
  const Tensor given = targets.dim() == 2 ? targets.select(1, 0) : targets;
  const Tensor absent = given.lt(0), ids = given.clamp_min(0), counted = absent.logical_not().to(at::kLong);
  drawn.copy_(counted.sum());
  if (update) {
    counts.index_add_(0, ids, counted);
    total.add_(drawn);
  }
  const Tensor of_target = log_counts(targets, counts, total, drawn), of_class = target.dim() == 2 ? of_target.select(1, 0) : of_target;
  const c10::SymInt queries = given.sym_size(0);
  const Tensor itself = at::eye_symint(queries, absent.options());
  const Tensor nothing = itself.logical_or(absent.unsqueeze(0)).logical_or(absent.unsqueeze(1));
  return {ids, of_class.unsqueeze(0).expand_symint({queries, queries}).masked_fill(nothing, kInfinity), of_target};
}

Tensor in_batch_log_count(const Tensor& ids, const Tensor& counts, const Tensor& total, const Tensor& drawn) {
  check_counts("in_batch_log_count", "ids", ids, counts, total, drawn);
  return log_counts(ids, counts, total, drawn);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("in_batch_sample(Tensor target, Tensor(a!) counts, Tensor(b!) total, Tensor(c!) drawn, bool update) -> "
        "(Tensor ids, Tensor log_count, Tensor target_log_count)");
  m.def("in_batch_log_count(Tensor ids, Tensor counts, Tensor total, Tensor drawn) -> Tensor");
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
