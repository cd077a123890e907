#include "proposal/static/static_sample.h"

#include "op/operators.h"
#include "op/shape_checks.h"
#include "op/checks.h"
#include "op/find_op.h"
#include "op/host_state.h"
#include "op/options.h"
#include "proposal/static/log_uniform_sample.h"
#include "proposal/static/static_tail.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

// Draws of samplers with fixed weights, and expected counts.

namespace xsoftmax {
namespace {

using at::Tensor;
using OptionalSize = std::optional<c10::SymInt>;
using Draws = std::tuple<Tensor, Tensor, Tensor>;

double log_of(int64_t count) { return std::log(double(count)); }

struct DrawnIds {
  Tensor ids;
  // For "table": log c, where a class's expected count is c q; float64, 0-dim.
  Tensor log_scale;
};

DrawnIds draw(const StaticOptions& options, const Tensor& seed, OptionalSize queries,
              at::TensorList tables) {
  using Size = c10::SymInt;
  static const auto uniform = find_op<Tensor(const Tensor&, Size, Size, OptionalSize, Size, bool)>(
      "xsoftmax::uniform_sample");
  static const auto log_uniform = find_op<Tensor(const Tensor&, Size, Size, OptionalSize, Size)>(
      "xsoftmax::log_uniform_sample");
  static const auto alias =
      find_op<Tensor(const Tensor&, const Tensor&, OptionalSize, Size, at::TensorList)>(
          "xsoftmax::alias_sample");
  static const auto systematic =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                         OptionalSize, Size, at::TensorList)>(
          "xsoftmax::systematic_sample");
  if (options.distribution == "fixed") {
    return {tables[kOrder].clone(), {}};
  }
  if (options.distribution == "uniform") {
    return {uniform.call(seed, options.low, options.num_classes, queries, options.num_samples,
                         options.distinct),
            {}};
  }
  if (options.distribution == "log_uniform") {
    return {log_uniform.call(seed, options.low, options.num_classes, queries, options.num_samples),
            {}};
  }
  if (options.distinct) {
    auto [ids, log_scale] =
        systematic.call(seed, tables[kProbability], tables[kOrder], tables[kCumulative], queries,
                        options.num_samples, tail_of(tables));
    return {ids, log_scale};
  }
  const double log_total =
      std::log(static_tail("static_sample", tail_of(tables), options.num_classes).total());
  return {alias.call(seed, tables[kBins], queries, options.num_samples, tail_of(tables)),
          at::full({}, log_of(options.num_samples) - log_total, seed.options().dtype(at::kDouble))};
}

// Returns whether ids are in ascending `classes`. (at::isin would search in float64 and wait for
// the device.)
Tensor contains(const Tensor& ids, const Tensor& classes) {
  if (classes.sym_numel() == 0) {
    return at::zeros_like(ids, ids.options().dtype(at::kBool));
  }
  const Tensor place =
      at::searchsorted(classes, ids.contiguous()).clamp_max(at::Scalar(classes.sym_numel() - 1));
  return classes.take(place).eq(ids);
}

// Computed in float64, because log c and log q nearly cancel.
Tensor log_counts(const StaticOptions& options, const Tensor& log_scale, const Tensor& ids,
                  at::TensorList tables) {
  if (options.distribution == "fixed") {
    return at::where(contains(ids, tables[kOrder]), at::zeros({}, ids.options().dtype(at::kFloat)),
                     -kInfinite);
  }
  if (options.distribution == "table") {
    static const auto log_prob =
        find_op<Tensor(const Tensor&, const Tensor&)>("xsoftmax::table_log_prob");
    Tensor log_count = log_prob.call(tables[kProbability], ids);
    const double most = options.distinct ? 0.0 : kInfinite;
    if (check::can_read(log_count) && check::can_read(log_scale)) { // in one pass
      const Tensor counts = at::empty(log_count.sizes(), log_count.options().dtype(at::kFloat));
      const double* const from = log_count.const_data_ptr<double>();
      std::transform(from, from + log_count.numel(), counts.mutable_data_ptr<float>(),
                     [most, scale = log_scale.const_data_ptr<double>()[0]](double x) {
                       return float(std::min(x + scale, most));
                     });
      return counts;
    }
    return log_count.add_(log_scale).clamp_max_(most).to(at::kFloat);
  }
  if (options.distribution == "uniform" && check::can_read(ids)) { // in one pass
    const Tensor flat = ids.contiguous(),
                 counts = at::empty(ids.sizes(), ids.options().dtype(at::kFloat));
    const int64_t* const id = flat.const_data_ptr<int64_t>();
    const float count = float(static_log_scale(options));
    std::transform(id, id + flat.numel(), counts.mutable_data_ptr<float>(), [&](int64_t i) {
      return i < options.low || i >= options.num_classes ? float(-kInfinite) : count;
    });
    return counts;
  }
  if (options.distribution == "log_uniform") {
    return log_uniform_log_count(ids, options.low, options.num_classes, static_log_scale(options));
  }
  const Tensor log_count = at::full({}, static_log_scale(options), ids.options().dtype(at::kFloat));
  return log_count.masked_fill(ids.lt(options.low).logical_or_(ids.ge(options.num_classes)),
                               -kInfinite);
}

// Returns the log counts of drawn ids. For "uniform" and "fixed" they are one number.
Tensor log_counts_of_draws(const StaticOptions& options, const DrawnIds& drawn,
                           at::TensorList tables) {
  if (options.distribution == "uniform" || options.distribution == "fixed") {
    const double value = options.distribution == "fixed" ? 0.0 : static_log_scale(options);
    if (check::can_read(drawn.ids)) {
      const Tensor counts = at::empty(drawn.ids.sizes(), drawn.ids.options().dtype(at::kFloat));
      std::fill_n(counts.mutable_data_ptr<float>(), counts.numel(), float(value));
      return counts;
    }
    return at::full_symint(drawn.ids.sym_sizes(), value, drawn.ids.options().dtype(at::kFloat));
  }
  return log_counts(options, drawn.log_scale, drawn.ids, tables);
}

Draws static_sample_cpu(const Tensor& seed, const Tensor& queries, const OptionalTensor& target,
                        at::TensorList tables, std::string_view text) {
  if (is_defined(target)) {
    const StaticOptions options = static_options("static_sample", tables, text);
    check::int64("static_sample", "target", *target);
    check::class_ids("static_sample", "target", *target, options.num_classes, -1);
  }
  return static_sample(seed, queries, target, tables, text);
}

Tensor static_log_count_cpu(const Tensor& ids, at::TensorList tables, std::string_view text) {
  const StaticOptions options = static_options("static_log_count", tables, text);
  check::int64("static_log_count", "ids", ids);
  check::class_ids("static_log_count", "ids", ids, options.num_classes, -1);
  return static_log_count(ids, tables, text);
}

} // namespace

StaticOptions static_options(const char* op, at::TensorList tables, std::string_view text) {
  const StaticOptions options = parse_options<StaticOptions>(op, text);
  TORCH_CHECK_VALUE(tables.size() == kStaticTables, op, ": expected ", int(kStaticTables),
                    " tables, got ", tables.size());
  TORCH_CHECK_VALUE(
      options.distribution == "uniform" || options.distribution == "log_uniform" ||
          options.distribution == "table" || options.distribution == "fixed",
      op,
      ": expected distribution to be \"uniform\", \"log_uniform\", \"table\" or \"fixed\", got \"",
      options.distribution, "\"");
  return options;
}

double static_log_scale(const StaticOptions& options) {
  const double total = options.distribution == "uniform"
      ? double(options.num_classes - options.low)
      : std::log1p(double(options.num_classes)) - std::log1p(double(options.low));
  return log_of(options.num_samples) - std::log(total);
}

Draws static_sample(const Tensor& seed, const Tensor& queries, const OptionalTensor& target,
                    at::TensorList tables, std::string_view text) {
  constexpr const char* op = "static_sample";
  const StaticOptions options = static_options(op, tables, text);
  check::dim(op, "queries", queries, 2);
  const DrawnIds drawn = draw(
      options, seed, options.shared ? OptionalSize() : OptionalSize(queries.sym_size(0)), tables);
  Tensor target_log_count = at::empty({0}, seed.options().dtype(at::kFloat));
  if (is_defined(target)) {
    check::int64(op, "target", *target);
    target_log_count = log_counts(options, drawn.log_scale, *target, tables);
  }
  return {drawn.ids, log_counts_of_draws(options, drawn, tables), target_log_count};
}

Tensor static_log_count(const Tensor& ids, at::TensorList tables, std::string_view text) {
  constexpr const char* op = "static_log_count";
  const StaticOptions options = static_options(op, tables, text);
  check::int64(op, "ids", ids);
  Tensor log_scale;
  if (options.distribution == "table") { // draws for no query, only to get its scale
    log_scale = draw(options, at::zeros({}, ids.options()), c10::SymInt(0), tables).log_scale;
  }
  return log_counts(options, log_scale, ids, tables);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "static_sample(Tensor seed, Tensor queries, Tensor? target, Tensor[] tables, str options) -> "
      "(Tensor ids, Tensor log_count, Tensor target_log_count)",
      kUsesHostState);
  m.def("static_log_count(Tensor ids, Tensor[] tables, str options) -> Tensor", kUsesHostState);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("static_sample", static_sample);
  m.impl("static_log_count", static_log_count);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("static_sample", static_sample);
  m.impl("static_log_count", static_log_count);
}

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("static_sample", static_sample_cpu);
  m.impl("static_log_count", static_log_count_cpu);
}

} // namespace xsoftmax
