#include "proposal/static/static_tables.h"

#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"
#include "op/options.h"
#include "cpu/memory.h"
#include "proposal/adaptive_checks.h"
#include "proposal/modules.h"
#include "proposal/static/static_tail.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

// The tables of a sampler with fixed weights, for its constructor.

namespace xsoftmax {

using at::Tensor;

namespace {

Tensor checked_weights(const std::string& owner, const char* argument, const Tensor& weights) {
  check::strided(owner.c_str(), argument, weights);
  TORCH_CHECK_VALUE(weights.dim() == 1 && weights.numel() >= 1, owner, ": expected ", argument,
                    " as a tensor [num_classes], got shape ", weights.sizes());
  TORCH_CHECK_TYPE(!weights.is_complex(), owner, ": expected ", argument, " of a real dtype, got ",
                   weights.scalar_type());
  const Tensor values = weights.detach().to(at::kDouble);
  const Tensor bad = values.isfinite().logical_and(values.ge(0)).logical_not();
  if (bad.any().item<bool>()) {
    const int64_t at = bad.nonzero()[0].item<int64_t>();
    TORCH_CHECK_VALUE(false, owner, ": expected ", argument,
                      " that are finite and not negative, got ", values[at].item<double>(), " at [",
                      at, "]");
  }
  TORCH_CHECK_VALUE(values.gt(0).any().item<bool>(), owner, ": expected ", argument,
                    " that are not all zero, got only zeros");
  return values.div(values.max()); // keeps the sum finite
}

Tensor weights_of_table(const std::string& owner, const Tensor& weights,
                        std::optional<double> power) {
  if (!power.has_value()) {
    return checked_weights(owner, "weights", weights);
  }
  TORCH_CHECK_VALUE(*power >= 0 && std::isfinite(*power), owner,
                    ": expected power as a finite number of at least 0, got ", *power);
  const Tensor counts = checked_weights(owner, "counts", weights);
  // 0^0 is 1, but a class with count 0 must remain one that is never drawn.
  return counts.pow(*power).masked_fill(counts.eq(0), 0.0);
}

// Excludes a prefix of the range by raising its lower end. Returns false if the excluded classes of
// the range are not its first ones.
bool exclude_prefix(StaticOptions& options, const Tensor& excluded) {
  const Tensor above = excluded.masked_select(excluded.ge(options.low));
  const int64_t count = above.numel();
  const bool prefix = count == 0 || above[count - 1].item<int64_t>() == options.low + count - 1;
  options.low += prefix ? count : 0;
  return prefix;
}

void set_tail(std::vector<Tensor>& tables, const std::vector<Tensor>& tail) {
  std::copy(tail.begin(), tail.end(), tables.begin() + kLaidOut);
}

} // namespace

void fill_tables(std::vector<Tensor>& tables, const Tensor& weights, bool distinct) {
  Tensor probability = table_empty({weights.numel()}, weights.options());
  at::div_out(probability, weights, weights.sum());
  tables[kProbability] = probability;
  static const auto alias = find_op<Tensor(const Tensor&)>("xsoftmax::alias_table");
  static const auto systematic =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&)>("xsoftmax::systematic_table");
  if (distinct) {
    std::tie(tables[kOrder], tables[kCumulative]) = systematic.call(probability);
  } else {
    tables[kBins] = alias.call(probability);
  }
  set_tail(tables, tail_tables({.first = weights.numel()}));
}

std::vector<Tensor> empty_tables(at::Device device) {
  const auto doubles = at::TensorOptions(at::kDouble).device(device),
             longs = doubles.dtype(at::kLong);
  std::vector<Tensor> tables{at::empty({0}, doubles), at::empty({0, 2}, longs),
                             at::empty({0}, longs), at::empty({0}, doubles)};
  tables.resize(kStaticTables);
  set_tail(tables, tail_tables({}));
  return tables;
}

Tensor distribution_weights(const StaticOptions& options, at::Device device) {
  const auto doubles = at::TensorOptions(at::kDouble).device(device);
  Tensor weights = options.distribution == "uniform"
      ? at::ones({options.num_classes}, doubles)
      : at::arange(1, options.num_classes + 1, doubles).reciprocal_().log1p_();
  weights.narrow(0, 0, options.low).zero_();
  return weights;
}

std::tuple<std::vector<Tensor>, std::string> static_tables(std::string owner,
                                                           const OptionalTensor& weights,
                                                           std::optional<double> power,
                                                           const OptionalTensor& classes,
                                                           std::string_view text) {
  StaticOptions options = parse_options<StaticOptions>(owner.c_str(), text);
  Tensor mass;
  if (is_defined(weights)) {
    mass = weights_of_table(owner, *weights, power);
    options.distribution = "table";
    options.num_classes = mass.numel();
  }
  TORCH_CHECK_VALUE(options.num_classes >= 1, owner, ": expected num_classes of at least 1, got ",
                    options.num_classes);
  TORCH_CHECK_VALUE(options.num_samples >= 0, owner, ": expected num_samples of at least 0, got ",
                    options.num_samples);
  const bool fixed = options.distribution == "fixed";
  const Tensor ids =
      checked_classes(owner.c_str(), fixed ? "ids" : "exclude", classes, options.num_classes);
  const at::Device device = mass.defined() ? mass.device() : ids.device();
  std::vector<Tensor> tables = empty_tables(device);
  if (fixed) {
    tables[kOrder] = ids;
    options.num_samples = ids.numel();
    return {tables, print_options(options)};
  }
  if (!mass.defined() &&
      (!exclude_prefix(options, ids) ||
       (options.distribution == "log_uniform" && options.distinct))) {
    mass = distribution_weights(options, device);
    options.distribution = "table";
    options.low = 0;
  }
  TORCH_CHECK_VALUE(ids.numel() < options.num_classes && options.low < options.num_classes, owner,
                    ": expected exclude to leave at least one of ", options.num_classes,
                    " classes, got all of them");
  int64_t drawable = options.num_classes - options.low;
  if (mass.defined()) {
    mass = mass.index_fill(0, ids.to(device), 0.0);
    drawable = mass.count_nonzero().item<int64_t>();
    TORCH_CHECK_VALUE(drawable > 0, owner,
                      ": expected a class of positive weight that is not excluded, got none");
    fill_tables(tables, mass, options.distinct);
  }
  if (options.distinct) {
    check_distinct(owner, options.num_samples, drawable);
  }
  return {tables, print_options(options)};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "static_tables(str owner, Tensor? weights, float? power, Tensor? classes, str options) -> "
      "(Tensor[] tables, str options)",
      static_tables);
}

} // namespace xsoftmax
