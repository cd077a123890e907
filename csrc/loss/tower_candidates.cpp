#include "loss/tower_candidates.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/shape_checks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/expm1.h>
#include <ATen/ops/log1p.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>

namespace xsoftmax {

using at::Tensor;

Tensor known_ids(const Tensor& ids, int64_t num_ids, std::string owner, std::string argument,
                 bool has_num_items) {
  check::int64(owner.c_str(), argument.c_str(), ids);
  return ids.clone();
}

Tensor first_occurrences(const Tensor& ids) {
  constexpr const char* op = "first_occurrences";
  TORCH_CHECK_VALUE(ids.dim() >= 1, op, ": expected ids with at least 1 dimension, got none");
  check::int64(op, "ids", ids);
  if (ids.sym_size(-1) == 0) {
    return ids.to(at::kBool);
  }
  const auto [ordered, order] = ids.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/false);
  const c10::SymInt others = ids.sym_size(-1) - 1;
  const Tensor changes =
      ordered.narrow_symint(-1, 1, others).ne(ordered.narrow_symint(-1, 0, others));
  const Tensor first = at::cat({at::ones_like(ordered.narrow(-1, 0, 1), at::kBool), changes}, -1);
  return at::empty_like(first).scatter(-1, order, first);
}

Tensor listed(const Tensor& ids, const Tensor& lists) {
  constexpr const char* op = "listed";
  check::int64(op, "ids", ids);
  check::int64(op, "lists", lists);
  check::dim(op, "lists", lists, 2);
  TORCH_CHECK_VALUE(ids.dim() == 1 || (ids.dim() == 2 && ids.sym_size(0) == lists.sym_size(0)), op,
                    ": expected ids of shape [M], or [", lists.sym_size(0),
                    ", M], a row for each list, got ", ids.sym_sizes());
  check::same_device(op, "lists", lists, "ids", ids);
  const Tensor query_ids = ids.dim() == 2
      ? ids.contiguous()
      : ids.expand_symint({lists.sym_size(0), ids.sym_size(0)}).contiguous();
  if (lists.sym_size(1) == 0) {
    return at::zeros_like(query_ids, at::kBool);
  }
  const Tensor ordered = std::get<0>(lists.sort(1));
  return ordered.gather(1, at::searchsorted(ordered, query_ids).clamp_max(lists.sym_size(1) - 1))
      .eq(query_ids);
}

Tensor inclusion_log_count(const Tensor& log_prob, const Tensor& draws, int64_t uniform_draws,
                           int64_t num_ids) {
  constexpr const char* op = "inclusion_log_count";
  check::floating(op, "log_prob", log_prob);
  check::dim(op, "draws", draws, 0);
  check::same_device(op, "draws", draws, "log_prob", log_prob);
  TORCH_CHECK_VALUE(uniform_draws >= 0 && (uniform_draws == 0 || num_ids >= 1), op,
                    ": expected uniform_draws of at least 0, and num_ids of at least 1 if "
                    "there are some, got ",
                    uniform_draws, " and ", num_ids);
  const double uniform =
      uniform_draws == 0 ? 0 : double(uniform_draws) * std::log1p(-1.0 / double(num_ids));
  const Tensor number = draws.to(at::kDouble),
               log_not_drawn = at::log1p(-log_prob.to(at::kDouble).exp().clamp_max(1));
  return (-at::expm1(at::where(number.gt(0), number * log_not_drawn, 0.0) + uniform))
      .log()
      .to(at::kFloat);
}

namespace {

Tensor known_ids_cpu(const Tensor& ids, int64_t num_ids, std::string owner, std::string argument,
                     bool has_num_items) {
  check::int64(owner.c_str(), argument.c_str(), ids);
  if (num_ids > 0) {
    try {
      check::class_ids(owner.c_str(), argument.c_str(), ids, num_ids);
    } catch (const c10::IndexError& error) {
      TORCH_CHECK_INDEX(false, error.what_without_backtrace(), ": make the loss with ",
                        has_num_items ? "num_items=None" : "counts=StreamingCounts(None)",
                        " for ids of any size, or call resize_classes(num_items)");
    }
  }
  return ids.clone();
}

} // namespace

XSOFTMAX_OPERATORS(m) {
  m.def(
      "known_ids(Tensor ids, int num_ids, str owner, str argument, bool has_num_items=True) -> "
      "Tensor");
  m.def("first_occurrences(Tensor ids) -> Tensor", first_occurrences);
  m.def("listed(Tensor ids, Tensor lists) -> Tensor", listed);
  m.def(
      "inclusion_log_count(Tensor log_prob, Tensor draws, int uniform_draws, int num_ids) -> "
      "Tensor",
      inclusion_log_count);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("known_ids", known_ids); }

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("known_ids", known_ids_cpu); }

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("known_ids", known_ids); }

} // namespace xsoftmax
