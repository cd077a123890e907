#include "samplers/union_merge.h"

#include "core/checks.h"
#include "core/shape_checks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace xsoftmax {

using at::Tensor;

Tensor merge_log_counts(at::TensorList log_counts) {
  constexpr const char* op = "merge_log_counts";
  TORCH_CHECK_VALUE(!log_counts.empty(), op, ": expected at least one tensor of log counts, got none");
  for (const Tensor& log_count : log_counts) {
    check::floating(op, "log_counts", log_count);
    check::broadcasts(op, "log_counts", log_count, "the first of them", log_counts[0]);
    check::same_device(op, "log_counts", log_count, "the first of them", log_counts[0]);
  }
  if (log_counts.size() == 1) {
    return log_counts[0].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  }
  // float64: where an element stands decides whether vector or scalar code takes it, which differ in the last bit.
  Tensor sum = log_counts[0].to(at::kDouble);
  for (size_t i = 1; i < log_counts.size(); ++i) {
    sum = at::logaddexp(sum, log_counts[i].to(at::kDouble));
  }
  return sum.to(at::kFloat);
}

Tensor union_classes(const Tensor& queries, const OptionalTensor& target, at::TensorList ids) {
  constexpr const char* op = "union_classes";
  check::dim(op, "queries", queries, 2);
  const c10::SymInt rows = queries.sym_size(0);
  std::vector<Tensor> columns;
  if (given(target)) {
    check::int64(op, "target", *target);
    check::same_device(op, "target", *target, "queries", queries);
    TORCH_CHECK_VALUE((target->dim() == 1 || target->dim() == 2) && target->sym_size(0) == rows, op, ": expected target of shape [", rows, "] or [", rows,
                      ", T], got ", target->sym_sizes());
    columns.push_back(target->dim() == 1 ? target->unsqueeze(1) : *target);
  } else {
    columns.push_back(at::zeros_symint({rows, 1}, queries.options().dtype(at::kLong)));
  }
  for (const Tensor& of_set : ids) {
    check::int64(op, "ids", of_set);
    check::same_device(op, "ids", of_set, "queries", queries);
    TORCH_CHECK_VALUE(of_set.dim() == 1 || (of_set.dim() == 2 && of_set.sym_size(0) == rows), op, ": expected ids of shape [M] or [", rows, ", M], got ",
                      of_set.sym_sizes());
    columns.push_back(of_set.expand_symint({rows, of_set.sym_size(-1)}));
  }
  return at::cat(columns, 1);
}

namespace {

// target_log_count of private set k: a column for each target and for each id of the sets of parts before its own.
void check_private_counts(const char* op, const Tensor& counts, at::TensorList ids, at::IntArrayRef part, size_t k, const c10::SymInt& targets,
                          const OptionalTensor& target) {
  c10::SymInt width = targets;
  for (size_t before = 0; before < k && part[before] != part[k]; ++before) {
    width += ids[before].sym_size(-1);
  }
  check::dim(op, "target_log_count", counts, 2);
  TORCH_CHECK_VALUE(counts.sym_size(1) >= width, op, ": expected target_log_count of private sets with at least ", width,
                    " columns, the targets and the ids of the sets before, got ", counts.sym_size(1));
  TORCH_CHECK_VALUE(!given(target) || (target->dim() >= 1 && target->sym_numel() == counts.sym_size(0) * targets), op, ": expected target for each of ",
                    counts.sym_size(0), " rows of target_log_count, got ", target->sym_sizes());
}

} // namespace

std::tuple<std::vector<Tensor>, std::vector<Tensor>> union_merge(at::TensorList ids, at::TensorList log_count,
                                                                 const c10::List<OptionalTensor>& target_log_count, at::IntArrayRef part, int64_t first_private,
                                                                 at::TensorList asked, at::IntArrayRef of_set, const OptionalTensor& target) {
  constexpr const char* op = "union_merge";
  const size_t sets = ids.size();
  TORCH_CHECK_VALUE(log_count.size() == sets && target_log_count.size() == sets && part.size() == sets && asked.size() == of_set.size() && first_private >= 0,
                    op, ": expected a log_count, a target_log_count and a part for each of ", sets, " sets, and a set for each count that was asked for");
  std::vector<std::vector<Tensor>> counts(sets);
  for (size_t k = 0; k < sets; ++k) {
    check::int64(op, "ids", ids[k]);
    check::floating(op, "log_count", log_count[k]);
    TORCH_CHECK_VALUE(ids[k].dim() >= 1, op, ": expected ids of shape [M] or [Q, M], got one id");
    counts[k].push_back(log_count[k]);
  }
  if (given(target)) {
    check::int64(op, "target", *target);
  }
  for (size_t i = 0; i < asked.size(); ++i) {
    TORCH_CHECK_VALUE(of_set[i] >= 0 && size_t(of_set[i]) < sets, op, ": expected of_set in [0, ", sets, "), got ", of_set[i]);
    counts[of_set[i]].push_back(asked[i]);
  }
  const c10::SymInt targets = given(target) && target->dim() == 2 ? target->sym_size(1) : c10::SymInt(1);
  std::vector<Tensor> of_targets;
  for (size_t k = 0; k < sets; ++k) {
    const OptionalTensor of_classes = target_log_count.get(k);
    const bool is_private = int64_t(k) >= first_private && given(of_classes);
    if (given(of_classes)) {
      check::floating(op, "target_log_count", *of_classes);
    }
    if (is_private) {
      check_private_counts(op, *of_classes, ids, part, k, targets, target); // the targets, then the ids of the sets of parts before this one
      c10::SymInt column = targets;
      for (size_t before = 0; before < k && part[before] != part[k]; ++before) {
        const c10::SymInt width = ids[before].sym_size(-1);
        counts[before].push_back(of_classes->narrow_symint(1, column, width));
        column += width;
      }
    }
    if (!given(target) || !given(of_classes)) {
      of_targets.push_back(at::empty({0}, log_count[k].options()));
    } else {
      of_targets.push_back(is_private ? of_classes->narrow_symint(1, 0, targets).reshape_symint(target->sym_sizes()) : *of_classes);
    }
  }
  std::vector<Tensor> merged;
  for (const auto& of_set : counts) {
    merged.push_back(merge_log_counts(of_set));
  }
  return {merged, of_targets};
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("merge_log_counts(Tensor[] log_counts) -> Tensor", merge_log_counts);
  m.def("union_classes(Tensor queries, Tensor? target, Tensor[] ids) -> Tensor", union_classes);
  m.def(
      "union_merge(Tensor[] ids, Tensor[] log_count, Tensor?[] target_log_count, int[] part, int first_private, Tensor[] asked, int[] of_set, "
      "Tensor? target) -> (Tensor[] log_count, Tensor[] target_log_count)",
      union_merge);
}

} // namespace xsoftmax
