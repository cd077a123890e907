#include "proposal/static/static_sample.h"

#include "op/operators.h"
#include "op/shape_checks.h"
#include "op/checks.h"
#include "op/host_state.h"
#include "cpu/memory.h"
#include "op/options.h"
#include "proposal/adaptive.h"
#include "proposal/static/log_uniform_sample.h"
#include "proposal/modules.h"
#include "proposal/static/static_tail.h"
#include "proposal/stream/streaming_counts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using OptionalSize = std::optional<c10::SymInt>;
using Draws = std::tuple<Tensor, Tensor, Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- tables

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

Tensor given_weights(const std::string& owner, const Tensor& weights, std::optional<double> power) {
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

// ---- draws

double log_of(int64_t count) { return std::log(double(count)); }

struct Drawn {
  Tensor ids;
  // For "table": log c, where a class's expected count is c q; float64, 0-dim.
  Tensor log_scale;
};

Drawn draw(const StaticOptions& options, const Tensor& seed, OptionalSize queries,
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
Tensor is_one_of(const Tensor& ids, const Tensor& classes) {
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
    return at::where(is_one_of(ids, tables[kOrder]), at::zeros({}, ids.options().dtype(at::kFloat)),
                     -kInfinity);
  }
  if (options.distribution == "table") {
    static const auto log_prob =
        find_op<Tensor(const Tensor&, const Tensor&)>("xsoftmax::table_log_prob");
    Tensor log_count = log_prob.call(tables[kProbability], ids);
    const double most = options.distinct ? 0.0 : kInfinity;
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
      return i < options.low || i >= options.num_classes ? float(-kInfinity) : count;
    });
    return counts;
  }
  if (options.distribution == "log_uniform") {
    return log_uniform_log_count(ids, options.low, options.num_classes, static_log_scale(options));
  }
  const Tensor log_count = at::full({}, static_log_scale(options), ids.options().dtype(at::kFloat));
  return log_count.masked_fill(ids.lt(options.low).logical_or_(ids.ge(options.num_classes)),
                               -kInfinity);
}

// Returns the log counts of drawn ids. For "uniform" and "fixed" they are one number.
Tensor log_counts_of_draws(const StaticOptions& options, const Drawn& drawn,
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

// ---- a distribution that follows a stream

int64_t check_follow(const Tensor& target, const OptionalTensor& counted, const Tensor& excluded,
                     const Tensor& step, const StreamingState& state, at::TensorList tables,
                     std::string_view counts_text, std::string_view text) {
  constexpr const char* op = "static_follow_";
  const StreamingOptions counts = streaming_options(op, counts_text);
  const samplers::FollowOptions options = follow_options(op, text);
  TORCH_CHECK_VALUE(!counts.open(), op, ": expected counts of dense ids, got those of open ids");
  check_streaming(op, "target", target, state, counts);
  if (given(counted)) {
    check::int64(op, "counted", *counted);
    TORCH_CHECK_VALUE(counted->dim() == 1 || (counted->dim() == 2 && counted->sym_size(1) >= 1), op,
                      ": expected counted of shape [C] or [C, T], got ", counted->sym_sizes());
    check::same_device(op, "counted", *counted, "target", target);
  }
  check::dim(op, "excluded", excluded, 1);
  check::int64(op, "excluded", excluded);
  check::same_device(op, "excluded", excluded, "target", target);
  check::dim(op, "step", step, 0);
  check::int64(op, "step", step);
  TORCH_CHECK_VALUE(tables.size() == kStaticTables, op, ": expected ", int(kStaticTables),
                    " tables, got ", tables.size());
  const char* names[] = {"probability", "bins", "order", "cumulative"};
  check_tail(op, tail_of(tables));
  const bool needed[] = {true, !options.distinct, options.distinct, options.distinct};
  for (int table = 0; table < kLaidOut; ++table) {
    const bool doubles = table == kProbability || table == kCumulative;
    check::dtype(op, names[table], tables[table], doubles ? at::kDouble : at::kLong);
    if (needed[table]) {
      check::dim(op, names[table], tables[table], table == kBins ? 2 : 1);
      check::size(op, names[table], tables[table], 0, *counts.num_ids, "num_ids");
      check::same_device(op, names[table], tables[table], "target", target);
    }
  }
  if (!options.distinct) {
    check::size(op, "bins", tables[kBins], 1, 2, "a threshold and a class");
  }
  return *counts.num_ids;
}

void static_follow_meta(const Tensor& target, const OptionalTensor& counted, const Tensor& excluded,
                        Tensor& step, Tensor& count, Tensor& total, Tensor& last, Tensor& seen,
                        at::TensorList tables, std::string_view counts_text,
                        std::string_view text) {
  check_follow(target, counted, excluded, step, {count, total, last, seen}, tables, counts_text,
               text);
}

void static_follow_cpu(const Tensor& target, const OptionalTensor& counted, const Tensor& excluded,
                       Tensor& step, Tensor& count, Tensor& total, Tensor& last, Tensor& seen,
                       at::TensorList tables, std::string_view counts_text, std::string_view text) {
  constexpr const char* op = "static_follow_";
  const int64_t classes = check_follow(target, counted, excluded, step, {count, total, last, seen},
                                       tables, counts_text, text);
  check::class_ids(op, "target", target, classes, -1);
  check::class_ids(op, "excluded", excluded, classes);
  if (given(counted)) {
    check::class_ids(op, "counted", counted->dim() == 2 ? counted->select(1, 0) : *counted, classes,
                     -1);
  }
  static_follow_(target, counted, excluded, step, count, total, last, seen, tables, counts_text,
                 text);
}

Draws static_sample_cpu(const Tensor& seed, const Tensor& queries, const OptionalTensor& target,
                        at::TensorList tables, std::string_view text) {
  if (given(target)) {
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

Tensor distribution_weights(const StaticOptions& options, at::Device device) {
  const auto doubles = at::TensorOptions(at::kDouble).device(device);
  Tensor weights = options.distribution == "uniform"
      ? at::ones({options.num_classes}, doubles)
      : at::arange(1, options.num_classes + 1, doubles).reciprocal_().log1p_();
  weights.narrow(0, 0, options.low).zero_();
  return weights;
}

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

samplers::FollowOptions follow_options(const char* op, std::string_view text) {
  const auto options = parse_options<samplers::FollowOptions>(op, text);
  TORCH_CHECK_VALUE(options.power >= 0 && std::isfinite(options.power), op,
                    ": expected power as a finite number of at least 0, got ", options.power);
  TORCH_CHECK_VALUE(options.uniform_share > 0 && options.uniform_share <= 1, op,
                    ": expected uniform_share in (0, 1], got ", options.uniform_share);
  check_at_least(op, "refresh_every", options.refresh_every, 0);
  return options;
}

std::tuple<std::vector<Tensor>, std::string> static_tables(std::string owner,
                                                           const OptionalTensor& weights,
                                                           std::optional<double> power,
                                                           const OptionalTensor& classes,
                                                           std::string_view text) {
  StaticOptions options = parse_options<StaticOptions>(owner.c_str(), text);
  Tensor mass;
  if (given(weights)) {
    mass = given_weights(owner, *weights, power);
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

Draws static_sample(const Tensor& seed, const Tensor& queries, const OptionalTensor& target,
                    at::TensorList tables, std::string_view text) {
  constexpr const char* op = "static_sample";
  const StaticOptions options = static_options(op, tables, text);
  check::dim(op, "queries", queries, 2);
  const Drawn drawn = draw(
      options, seed, options.shared ? OptionalSize() : OptionalSize(queries.sym_size(0)), tables);
  Tensor of_target = at::empty({0}, seed.options().dtype(at::kFloat));
  if (given(target)) {
    check::int64(op, "target", *target);
    of_target = log_counts(options, drawn.log_scale, *target, tables);
  }
  return {drawn.ids, log_counts_of_draws(options, drawn, tables), of_target};
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

void static_follow_(const Tensor& target, const OptionalTensor& counted, const Tensor& excluded,
                    Tensor& step, Tensor& count, Tensor& total, Tensor& last, Tensor& seen,
                    at::TensorList tables, std::string_view counts_text, std::string_view text) {
  constexpr const char* op = "static_follow_";
  const int64_t classes = check_follow(target, counted, excluded, step, {count, total, last, seen},
                                       tables, counts_text, text);
  const auto options = follow_options(op, text);
  const int64_t now = step.item<int64_t>();
  const bool due = refresh_is_due(now, options.refresh_every);
  Tensor drawn;
  if (due) {
    drawn = at::ones({classes}, count.options().dtype(at::kDouble)).index_fill_(0, excluded, 0.0);
    TORCH_CHECK_VALUE(drawn.any().item<bool>(), op, ": expected excluded to leave a class of ",
                      classes, ", got all of them");
  }
  if (given(counted)) {
    static const auto update = find_op<decltype(streaming_update_)>("xsoftmax::streaming_update_");
    update.call(counted->dim() == 2 ? counted->select(1, 0) : *counted, {}, count, total, last,
                seen, counts_text);
  }
  if (due) {
    static const auto read = find_op<decltype(streaming_count)>("xsoftmax::streaming_count");
    const Tensor counts = read.call(at::arange(classes, count.options().dtype(at::kLong)), count,
                                    total, last, seen, counts_text);
    const Tensor scaled = counts.mul(drawn).div(
        counts.mul(drawn).max().clamp_min(std::numeric_limits<double>::min()));
    const Tensor mass = scaled.pow(options.power).masked_fill(scaled.eq(0), 0.0), sum = mass.sum();
    const Tensor uniform = drawn.div(drawn.sum());
    const Tensor distribution = at::where(
        sum.gt(0),
        mass.mul((1 - options.uniform_share) / sum).add(uniform.mul(options.uniform_share)),
        uniform);
    std::vector<Tensor> fresh = empty_tables(count.device());
    fill_tables(fresh, distribution, options.distinct);
    for (int table = 0; table < kStaticTables; ++table) {
      if (fresh[table].numel() > 0) {
        tables[table].copy_(fresh[table]);
      }
    }
  }
  step.fill_(int64_t(uint64_t(now) + 1));
}

XSOFTMAX_OPERATORS(m) {
  m.def("follow_options(str owner, str options) -> str",
        [](std::string owner, std::string_view text) {
          return print_options(follow_options(owner.c_str(), text));
        });
  m.def(
      "static_follow_(Tensor target, Tensor? counted, Tensor excluded, Tensor(a!) step, Tensor(b!) "
      "count, Tensor(c!) total, Tensor(d!) last, "
      "Tensor(e!) seen, Tensor(f!)[] tables, str counts_options, str options) -> ()",
      kUsesHostState);
  m.def(
      "static_tables(str owner, Tensor? weights, float? power, Tensor? classes, str options) -> "
      "(Tensor[] tables, str options)",
      static_tables);
  m.def(
      "static_sample(Tensor seed, Tensor queries, Tensor? target, Tensor[] tables, str options) -> "
      "(Tensor ids, Tensor log_count, Tensor target_log_count)",
      kUsesHostState);
  m.def("static_log_count(Tensor ids, Tensor[] tables, str options) -> Tensor", kUsesHostState);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("static_follow_", static_follow_);
  m.impl("static_sample", static_sample);
  m.impl("static_log_count", static_log_count);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("static_follow_", static_follow_meta);
  m.impl("static_sample", static_sample);
  m.impl("static_log_count", static_log_count);
}

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("static_follow_", static_follow_cpu);
  m.impl("static_sample", static_sample_cpu);
  m.impl("static_log_count", static_log_count_cpu);
}

} // namespace xsoftmax
