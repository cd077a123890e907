#include "proposal/adaptive_checks.h"

#include "op/checks.h"
#include "op/shape_checks.h"
#include "proposal/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <string>
#include <vector>

// Checks of what the operators of adaptive samplers take.

namespace xsoftmax {

using at::Tensor;

void check_at_least(std::string_view owner, const char* argument, int64_t value, int64_t least) {
  TORCH_CHECK_VALUE(value >= least, owner, ": expected ", argument, " of at least ", least,
                    ", got ", value);
}

void check_distinct(std::string_view owner, int64_t num_samples, int64_t drawable) {
  TORCH_CHECK_VALUE(
      num_samples <= drawable, owner, ": expected num_samples of at most ", drawable,
      ", the number of classes that can be drawn, since a class is drawn at most once, got ",
      num_samples, ": draw fewer, or with replacement (distinct=False)");
}

Tensor check_constructor(std::string_view owner, int64_t num_classes, int64_t dim, int64_t min_dim,
                         const Tensor& exclude, int64_t drawn) {
  check_at_least(owner, "num_classes", num_classes, 1);
  check_at_least(owner, "dim", dim, min_dim);
  const std::string name(owner);
  check::dim(name.c_str(), "exclude", exclude, 1);
  check::int64(name.c_str(), "exclude", exclude);
  if (exclude.is_cpu()) {
    check::class_ids(name.c_str(), "exclude", exclude, num_classes);
  }
  const Tensor is_drawn =
      at::ones({num_classes}, exclude.options().dtype(at::kBool)).index_fill_(0, exclude, false);
  const int64_t left = is_drawn.sum().item<int64_t>();
  TORCH_CHECK_VALUE(left >= 1, owner, ": expected exclude to leave at least one of ", num_classes,
                    " classes, got all of them");
  check_distinct(owner, drawn, left);
  return is_drawn;
}

void check_private(std::string_view owner, bool shared) {
  TORCH_CHECK_VALUE(!shared, owner, ": expected shared=False, got True: it draws for each query");
}

void check_index_size(const char* op, at::TensorList index, size_t count) {
  TORCH_CHECK_VALUE(index.size() == count, op, ": expected an index of ", count, " tables, got ",
                    index.size());
}

void check_step(const char* op, const Tensor& step) {
  check::dim(op, "step", step, 0);
  check::int64(op, "step", step);
}

void check_recent(const char* op, const Tensor& recent) {
  check::dim(op, "recent", recent, 0);
  check::int64(op, "recent", recent);
}

void check_queries(const char* op, const Tensor& queries, const c10::SymInt& dim) {
  check::floating(op, "queries", queries);
  TORCH_CHECK_VALUE(queries.dim() == 2 && queries.sym_size(1) == dim, op,
                    ": expected queries of shape [Q, ", dim, "], got ", queries.sym_sizes());
}

void check_rows(const char* op, const char* arg, const Tensor& rows, const c10::SymInt& num_classes,
                const c10::SymInt& dim) {
  check::floating(op, arg, rows);
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.sym_size(0) == num_classes && rows.sym_size(1) == dim,
                    op, ": expected ", arg, " of shape [", num_classes, ", ", dim, "], got ",
                    rows.sym_sizes());
}

void check_class_table(const char* op, const Tensor& weight, const OptionalTensor& bias,
                       const c10::SymInt& num_classes, const c10::SymInt& dim, bool has_bias) {
  check_rows(op, "weight", weight, num_classes, dim);
  TORCH_CHECK_VALUE(is_defined(bias) == has_bias, op, ": expected ",
                    has_bias ? "a bias" : "no bias",
                    " for a sampler built with bias=", has_bias ? "True" : "False", ", got ",
                    is_defined(bias) ? "one" : "none");
  if (is_defined(bias)) {
    check::dim(op, "bias", *bias, 1);
    check::floating(op, "bias", *bias);
    check::size(op, "bias", *bias, 0, weight.sym_size(0), "the rows of weight");
    check::same_device(op, "bias", *bias, "weight", weight);
  }
}

void check_finite_rows(const char* op, const char* arg, const Tensor& weight) {
  constexpr int64_t kRows = 1 << 16; // bounds the memory of the squares
  const auto is_finite = [&](int64_t begin) {
    return weight.narrow(0, begin, std::min(kRows, weight.size(0) - begin))
        .to(at::kFloat)
        .square()
        .sum(1)
        .isfinite();
  };
  std::vector<Tensor> all{at::ones({}, weight.options().dtype(at::kBool))};
  for (int64_t begin = 0; begin < weight.size(0); begin += kRows) {
    all.push_back(is_finite(begin).all());
  }
  if (at::stack(all).all().item<bool>()) { // the only value read from the device
    return;
  }
  for (int64_t begin = 0; begin < weight.size(0); begin += kRows) {
    const Tensor bad = is_finite(begin).logical_not().nonzero();
    if (bad.size(0) > 0) {
      const int64_t row = begin + bad[0].item<int64_t>();
      TORCH_CHECK_VALUE(false, op, ": expected ", arg,
                        " with squared norms that are finite in float32, got a norm of ",
                        weight[row].to(at::kDouble).norm().item<double>(), " for row ", row);
    }
  }
}

void check_finite_bias(const char* op, const OptionalTensor& bias) {
  if (is_defined(bias)) {
    const Tensor bad = bias->isfinite().logical_not().nonzero();
    TORCH_CHECK_VALUE(bad.size(0) == 0, op, ": expected bias with finite values, got ",
                      (*bias)[bad[0].item<int64_t>()].item<double>(), " at [",
                      bad[0].item<int64_t>(), "]");
  }
}

void check_query_ids(const char* op, const Tensor& queries, const Tensor& ids) {
  check::int64(op, "ids", ids);
  check::same_device(op, "ids", ids, "queries", queries);
  TORCH_CHECK_VALUE(ids.dim() == 1 || (ids.dim() == 2 && ids.sym_size(0) == queries.sym_size(0)),
                    op, ": expected ids of shape [S] or with a row for each query, got shape ",
                    ids.sym_sizes());
}

void check_targets(const char* op, const Tensor& queries, const OptionalTensor& target) {
  if (is_defined(target)) {
    check::int64(op, "target", *target);
    TORCH_CHECK_VALUE(
        (target->dim() == 1 || target->dim() == 2) && target->sym_size(0) == queries.sym_size(0),
        op, ": expected target of shape [Q] or [Q, T] with Q = ", queries.sym_size(0),
        ", got shape ", target->sym_sizes());
    check::same_device(op, "target", *target, "queries", queries);
  }
}

void check_draws(const char* op, const Tensor& seed, const Tensor& queries, bool shared,
                 const OptionalTensor& target) {
  check_sampling(op, seed, shared ? std::nullopt : std::optional(queries.sym_size(0)), 0);
  check::same_device(op, "seed", seed, "queries", queries);
  check_targets(op, queries, target);
}

} // namespace xsoftmax
