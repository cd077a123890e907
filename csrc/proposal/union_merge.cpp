#include "proposal/union_merge.h"

#include "op/checks.h"
#include "cpu/memory.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "proposal/candidate_set.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

namespace xsoftmax {

using at::Tensor;

namespace {

constexpr int64_t kFewCounts = 1024; // above this, multi-threaded operators are faster

bool can_merge(at::TensorList log_counts) {
  return log_counts[0].sym_numel() <= kFewCounts && log_counts[1].sym_numel() <= kFewCounts &&
      std::all_of(log_counts.begin(), log_counts.end(), [&](const Tensor& log_count) {
           return check::can_read(log_count) && !check::has_gradient(log_count) &&
               log_count.scalar_type() == at::kFloat && log_count.dim() >= 1 &&
               log_count.dim() <= 2;
         });
}

// Returns log(e^a + e^b), computed in float64 in one pass.
Tensor merged_pair(const Tensor& a, const Tensor& b) {
  const auto broadcast = [](int64_t one, int64_t other) { return one == 1 ? other : one; };
  const int64_t rows = broadcast(a.dim() == 2 ? a.size(0) : 1, b.dim() == 2 ? b.size(0) : 1),
                width = broadcast(a.size(-1), b.size(-1));
  const auto element = [&](const Tensor& tensor) {
    const int64_t row_step = tensor.dim() == 2 && tensor.size(0) > 1 ? tensor.stride(0) : 0,
                  step = tensor.size(-1) > 1 ? tensor.stride(-1) : 0;
    return [from = tensor.const_data_ptr<float>(), row_step, step](int64_t row, int64_t j) {
      return double(from[row * row_step + j * step]);
    };
  };
  const Tensor merged = a.dim() == 1 && b.dim() == 1 ? at::empty({width}, a.options())
                                                     : at::empty({rows, width}, a.options());
  float* const out = merged.mutable_data_ptr<float>();
  const auto element_a = element(a), element_b = element(b);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < width; ++j) {
      const double x = element_a(row, j), y = element_b(row, j), most = std::max(x, y);
      out[row * width + j] =
          float(x == y && std::isinf(x) ? x : most + std::log1p(std::exp(-std::abs(x - y))));
    }
  }
  return merged;
}

} // namespace

Tensor merge_log_counts(at::TensorList log_counts) {
  constexpr const char* op = "merge_log_counts";
  TORCH_CHECK_VALUE(!log_counts.empty(), op,
                    ": expected at least one tensor of log counts, got none");
  for (const Tensor& log_count : log_counts) {
    check::floating(op, "log_counts", log_count);
    check::broadcasts(op, "log_counts", log_count, "the first of them", log_counts[0]);
    check::same_device(op, "log_counts", log_count, "the first of them", log_counts[0]);
  }
  if (log_counts.size() == 1) {
    return log_counts[0].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  }
  if (log_counts.size() == 2 && can_merge(log_counts)) {
    return merged_pair(log_counts[0], log_counts[1]);
  }
  // float64, because ATen uses vector or scalar code depending on an element's position, and their
  // float32 results differ in the last bit.
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
  if (is_defined(target)) {
    check::int64(op, "target", *target);
    check::same_device(op, "target", *target, "queries", queries);
    TORCH_CHECK_VALUE((target->dim() == 1 || target->dim() == 2) && target->sym_size(0) == rows, op,
                      ": expected target of shape [", rows, "] or [", rows, ", T], got ",
                      target->sym_sizes());
    columns.push_back(target->dim() == 2 ? *target
                          : check::can_read(*target)
                          ? strided_view(*target, {target->size(0), 1}, {target->stride(0), 1})
                          : target->unsqueeze(1));
  } else {
    columns.push_back(at::zeros_symint({rows, 1}, queries.options().dtype(at::kLong)));
  }
  for (const Tensor& set_ids : ids) {
    check::int64(op, "ids", set_ids);
    check::same_device(op, "ids", set_ids, "queries", queries);
    TORCH_CHECK_VALUE(set_ids.dim() == 1 || (set_ids.dim() == 2 && set_ids.sym_size(0) == rows), op,
                      ": expected ids of shape [M] or [", rows, ", M], got ", set_ids.sym_sizes());
    columns.push_back(set_ids);
  }
  const Tensor classes = concat_columns(columns, rows, /*by_rows=*/true);
  return classes.is_same(columns[0]) ? classes.clone() : classes;
}

namespace {

// Checks target_log_count of private set k: one column per target, then one per id of the sets of
// earlier parts.
void check_private_counts(const char* op, const Tensor& counts, at::TensorList ids,
                          at::IntArrayRef part, size_t k, const c10::SymInt& targets,
                          const OptionalTensor& target) {
  c10::SymInt width = targets;
  for (size_t before = 0; before < k && part[before] != part[k]; ++before) {
    width += ids[before].sym_size(-1);
  }
  check::dim(op, "target_log_count", counts, 2);
  TORCH_CHECK_VALUE(
      counts.sym_size(1) >= width, op, ": expected target_log_count of private sets with at least ",
      width, " columns, the targets and the ids of the sets before, got ", counts.sym_size(1));
  TORCH_CHECK_VALUE(!is_defined(target) ||
                        (target->dim() >= 1 && target->sym_numel() == counts.sym_size(0) * targets),
                    op, ": expected target for each of ", counts.sym_size(0),
                    " rows of target_log_count, got ", target->sym_sizes());
}

} // namespace

std::tuple<std::vector<Tensor>, std::vector<Tensor>> union_merge(
    at::TensorList ids, at::TensorList log_count, const c10::List<OptionalTensor>& target_log_count,
    at::IntArrayRef part, int64_t first_private, at::TensorList queried_counts,
    at::IntArrayRef of_set, const OptionalTensor& target) {
  constexpr const char* op = "union_merge";
  const size_t sets = ids.size();
  TORCH_CHECK_VALUE(log_count.size() == sets && target_log_count.size() == sets &&
                        part.size() == sets && queried_counts.size() == of_set.size() &&
                        first_private >= 0,
                    op, ": expected a log_count, a target_log_count and a part for each of ", sets,
                    " sets, and a set for each count that was asked for");
  std::vector<std::vector<Tensor>> counts(sets);
  for (size_t k = 0; k < sets; ++k) {
    check::int64(op, "ids", ids[k]);
    check::floating(op, "log_count", log_count[k]);
    TORCH_CHECK_VALUE(ids[k].dim() >= 1, op, ": expected ids of shape [M] or [Q, M], got one id");
    counts[k].push_back(log_count[k]);
  }
  if (is_defined(target)) {
    check::int64(op, "target", *target);
  }
  for (size_t i = 0; i < queried_counts.size(); ++i) {
    TORCH_CHECK_VALUE(of_set[i] >= 0 && size_t(of_set[i]) < sets, op, ": expected of_set in [0, ",
                      sets, "), got ", of_set[i]);
    counts[of_set[i]].push_back(queried_counts[i]);
  }
  const c10::SymInt targets =
      is_defined(target) && target->dim() == 2 ? target->sym_size(1) : c10::SymInt(1);
  std::vector<Tensor> target_counts;
  for (size_t k = 0; k < sets; ++k) {
    const OptionalTensor target_counts_of_set = target_log_count.get(k);
    const bool is_private = int64_t(k) >= first_private && is_defined(target_counts_of_set);
    if (is_defined(target_counts_of_set)) {
      check::floating(op, "target_log_count", *target_counts_of_set);
    }
    if (is_private) {
      // Columns: the targets, then the ids of the sets of earlier parts.
      check_private_counts(op, *target_counts_of_set, ids, part, k, targets, target);
      c10::SymInt column = targets;
      for (size_t before = 0; before < k && part[before] != part[k]; ++before) {
        const c10::SymInt width = ids[before].sym_size(-1);
        counts[before].push_back(target_counts_of_set->narrow_symint(1, column, width));
        column += width;
      }
    }
    if (!is_defined(target) || !is_defined(target_counts_of_set)) {
      target_counts.push_back(at::empty({0}, log_count[k].options()));
    } else {
      target_counts.push_back(is_private ? target_counts_of_set->narrow_symint(1, 0, targets)
                                               .reshape_symint(target->sym_sizes())
                                         : *target_counts_of_set);
    }
  }
  std::vector<Tensor> merged;
  for (const auto& of_set : counts) {
    merged.push_back(merge_log_counts(of_set));
  }
  return {merged, target_counts};
}

XSOFTMAX_OPERATORS(m) {
  m.def("merge_log_counts(Tensor[] log_counts) -> Tensor", merge_log_counts);
  m.def("union_classes(Tensor queries, Tensor? target, Tensor[] ids) -> Tensor", union_classes);
  m.def(
      "union_merge(Tensor[] ids, Tensor[] log_count, Tensor?[] target_log_count, int[] part, int "
      "first_private, Tensor[] queried_counts, int[] of_set, "
      "Tensor? target) -> (Tensor[] log_count, Tensor[] target_log_count)",
      union_merge);
}

} // namespace xsoftmax
