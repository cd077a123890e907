#include "proposal/static/static_follow.h"

#include "op/checks.h"
#include "op/find_op.h"
#include "op/host_state.h"
#include "op/operators.h"
#include "op/options.h"
#include "proposal/adaptive.h"
#include "proposal/adaptive_checks.h"
#include "proposal/static/static_tables.h"
#include "proposal/static/static_tail.h"
#include "proposal/stream/streaming_counts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

// The training step of a sampler whose distribution follows a stream.

namespace xsoftmax {

using at::Tensor;

namespace {

int64_t check_follow(const Tensor& target, const OptionalTensor& counted, const Tensor& excluded,
                     const Tensor& step, const StreamingState& state, at::TensorList tables,
                     std::string_view counts_text, std::string_view text) {
  constexpr const char* op = "static_follow_";
  const StreamingOptions counts = streaming_options(op, counts_text);
  const samplers::FollowOptions options = follow_options(op, text);
  TORCH_CHECK_VALUE(!counts.open(), op, ": expected counts of dense ids, got those of open ids");
  check_streaming(op, "target", target, state, counts);
  if (is_defined(counted)) {
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
  if (is_defined(counted)) {
    check::class_ids(op, "counted", counted->dim() == 2 ? counted->select(1, 0) : *counted, classes,
                     -1);
  }
  static_follow_(target, counted, excluded, step, count, total, last, seen, tables, counts_text,
                 text);
}

} // namespace

samplers::FollowOptions follow_options(const char* op, std::string_view text) {
  const auto options = parse_options<samplers::FollowOptions>(op, text);
  TORCH_CHECK_VALUE(options.power >= 0 && std::isfinite(options.power), op,
                    ": expected power as a finite number of at least 0, got ", options.power);
  TORCH_CHECK_VALUE(options.uniform_share > 0 && options.uniform_share <= 1, op,
                    ": expected uniform_share in (0, 1], got ", options.uniform_share);
  check_at_least(op, "refresh_every", options.refresh_every, 0);
  return options;
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
  if (is_defined(counted)) {
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
    std::vector<Tensor> new_tables = empty_tables(count.device());
    fill_tables(new_tables, distribution, options.distinct);
    for (int table = 0; table < kStaticTables; ++table) {
      if (new_tables[table].numel() > 0) {
        tables[table].copy_(new_tables[table]);
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
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("static_follow_", static_follow_);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("static_follow_", static_follow_meta); }

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("static_follow_", static_follow_cpu); }

} // namespace xsoftmax
