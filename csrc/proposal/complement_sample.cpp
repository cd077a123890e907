#include "proposal/complement_sample.h"

#include "op/checks.h"
#include "op/operators.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "proposal/modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <bit>
#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

void check_sets(const Tensor& sets, int64_t num_classes) {
  constexpr const char* op = "sort_sets";
  check::dim(op, "sets", sets, 2);
  check::int64(op, "sets", sets);
  TORCH_CHECK_VALUE(num_classes >= 1, op, ": expected num_classes of at least 1, got ",
                    num_classes);
}

Tensor columns_of(const Tensor& rows) {
  return at::arange(at::Scalar(rows.sym_size(1)), rows.options());
}

Tensor sort_sets_cpu(const Tensor& sets, int64_t num_classes) {
  constexpr const char* op = "sort_sets";
  const Tensor inside = sort_sets(sets, num_classes).contiguous(),
               sets_in_order = sets.contiguous();
  const int64_t *id = sets_in_order.const_data_ptr<int64_t>(),
                *sorted = inside.const_data_ptr<int64_t>(), size = inside.size(1);
  for (int64_t i = 0; i < inside.numel(); ++i) {
    TORCH_CHECK_INDEX(id[i] >= -1 && id[i] < num_classes, op, ": expected classes in [0, ",
                      num_classes, "), or -1 for none, got ", id[i], " at [", i / size, ", ",
                      i % size, "]");
    TORCH_CHECK_VALUE(i % size == 0 || sorted[i] != sorted[i - 1], op,
                      ": expected sets without repeats, got ", sorted[i],
                      " twice in that of query ", i / size);
  }
  return inside;
}

Tensor sort_sets_meta(const Tensor& sets, int64_t num_classes) {
  check_sets(sets, num_classes);
  return at::empty_like(sets, at::MemoryFormat::Contiguous);
}

void check_inside(const char* op, const Tensor& inside, const char* argument, const Tensor& ids) {
  check::dim(op, "inside", inside, 2);
  check::int64(op, "inside", inside);
  check::dim(op, argument, ids, 2);
  check::same_device(op, argument, ids, "inside", inside);
  TORCH_CHECK_VALUE(inside.sym_size(0) == 1 || inside.sym_size(0) == ids.sym_size(0), op,
                    ": expected inside with 1 row or ", ids.sym_size(0), ", the queries, got ",
                    inside.sym_size(0));
}

// Returns the insertion positions of `values` in ascending `rows` [Q or 1, C].
Tensor ranks(const Tensor& rows, const Tensor& values, bool right) {
  return at::searchsorted(rows.sym_size(0) == 1 ? rows.select(0, 0) : rows, values.contiguous(),
                          /*out_int32=*/false, right);
}

// Returns the number of classes outside each set, [Q or 1, 1].
Tensor outside_counts(const Tensor& inside, int64_t num_classes) {
  return num_classes - inside.lt(num_classes).sum(1, true);
}

// Returns ids [Q, M]: the class of rank floor(share * count) among the `count` classes outside, for
// share float64 [Q, M] in [0, 1).
Tensor uniform_outside(const Tensor& inside, const Tensor& share, int64_t num_classes) {
  const Tensor index = (share * outside_counts(inside, num_classes)).to(at::kLong);
  const Tensor before = inside - columns_of(inside); // number of outside classes before each
  return (index + ranks(before, index, /*right=*/true)).clamp(0, num_classes - 1);
}

// Returns whether each class is in its query's set.
Tensor is_inside(const Tensor& inside, const Tensor& ids) {
  if (inside.sym_size(1) == 0) {
    return at::zeros_like(ids, at::kBool);
  }
  const Tensor place =
      ranks(inside, ids, /*right=*/false).clamp_max(at::Scalar(inside.sym_size(1) - 1));
  return (inside.sym_size(0) == 1 ? inside.select(0, 0).take(place) : inside.gather(1, place))
      .eq(ids);
}

// Computes log(num_samples q_x) = log(count scale + fallback) for a class outside the set with the
// expected count `count` in the sampler's draws.
struct OutsideDistribution {
  Tensor scale, fallback; // float64 [Q or 1, 1]; scale is undefined without a sampler

  Tensor log_count(const OptionalTensor& of_sampler, const Tensor& ids) const {
    return of_sampler.has_value() ? (of_sampler->to(at::kDouble).exp() * scale + fallback).log()
                                  : fallback.log().expand_symint(ids.sym_sizes());
  }
};

OutsideDistribution make_outside_distribution(const Tensor& inside,
                                              const OptionalTensor& inside_count,
                                              const Tensor& left,
                                              const ComplementOptions& options) {
  const Tensor uniform = double(options.num_samples) / left.to(at::kDouble).clamp_min_(1.0);
  if (!is_defined(inside_count)) {
    return {{}, uniform};
  }
  const double draws = double(options.num_samples) * double(options.tries);
  const Tensor count =
      at::where(inside.lt(options.num_classes), inside_count->to(at::kDouble).exp(), 0.0);
  const Tensor mass = count.sum(1, true).div_(draws).clamp_max_(1.0);
  // 1 + f + ... + f^(n - 1) and f^n, by doubling from n = 1 to the number of tries.
  Tensor geometric_sum = at::ones_like(mass), power = mass;
  for (int bit = int(std::bit_width(uint64_t(options.tries))) - 2; bit >= 0; --bit) {
    geometric_sum = geometric_sum * (power + 1.0);
    power = power.square();
    if (options.tries >> bit & 1) {
      geometric_sum = geometric_sum * mass + 1.0;
      power = power * mass;
    }
  }
  return {geometric_sum / double(options.tries), power * uniform};
}

} // namespace

Tensor sort_sets(const Tensor& sets, int64_t num_classes) {
  check_sets(sets, num_classes);
  return std::get<0>(at::where(sets.ge(0), sets, columns_of(sets) + num_classes).sort(1));
}

Tensor complement_sample(const Tensor& seed, const Tensor& inside, const OptionalTensor& draws,
                         const Tensor& queries, std::string_view text) {
  constexpr const char* op = "complement_sample";
  constexpr int64_t resolution = int64_t(1) << 53;
  using Size = c10::SymInt;
  const auto options = parse_options<ComplementOptions>(op, text);
  check_inside(op, inside, "queries", queries);
  check::same_device(op, "seed", seed, "inside", inside);
  static const auto uniform =
      find_op<Tensor(const Tensor&, Size, Size, std::optional<Size>, Size, bool)>(
          "xsoftmax::uniform_sample");
  const Tensor numbers =
      uniform.call(seed, 0, resolution, queries.sym_size(0), options.num_samples, false);
  const Tensor ids = uniform_outside(inside, numbers.to(at::kDouble).div_(double(resolution)),
                                     options.num_classes);
  if (!is_defined(draws)) {
    return ids;
  }
  check_inside(op, inside, "draws", *draws);
  check::int64(op, "draws", *draws);
  check::size(op, "draws", *draws, 0, queries.sym_size(0), "the queries");
  check::size(op, "draws", *draws, 1, options.num_samples * options.tries,
              "num_samples times tries");
  const std::vector<Size> sizes{queries.sym_size(0), options.num_samples, options.tries};
  const Tensor outside = is_inside(inside, *draws).logical_not().view_symint(sizes);
  const Tensor drawn =
      draws->reshape_symint(sizes).gather(2, outside.to(at::kChar).argmax(2, true)).squeeze(2);
  return at::where(outside.any(2), drawn, ids);
}

std::tuple<Tensor, Tensor> complement_log_count(const Tensor& inside,
                                                const OptionalTensor& inside_count,
                                                const Tensor& ids, const OptionalTensor& log_count,
                                                const OptionalTensor& target,
                                                const OptionalTensor& target_count,
                                                std::string_view text) {
  constexpr const char* op = "complement_log_count";
  const auto options = parse_options<ComplementOptions>(op, text);
  const bool sampled = options.tries > 0;
  check_inside(op, inside, "ids", ids);
  TORCH_CHECK_VALUE(
      is_defined(inside_count) == sampled && is_defined(log_count) == sampled &&
          is_defined(target_count) == (sampled && is_defined(target)),
      op, ": expected the counts of a sampler with tries alone, got tries = ", options.tries);
  check::int64(op, "ids", ids);
  const auto check_counts = [&](const char* name, const OptionalTensor& count,
                                const char* reference_name, const Tensor& classes) {
    if (is_defined(count)) {
      check::floating(op, name, *count);
      TORCH_CHECK_VALUE(count->dim() <= classes.dim(), op, ": expected ", name, " with at most ",
                        classes.dim(), " dimensions, got shape ", count->sym_sizes());
      check::broadcasts(op, name, *count, reference_name, classes);
      check::same_device(op, name, *count, "inside", inside);
    }
  };
  check_counts("inside_count", inside_count, "inside", inside);
  check_counts("log_count", log_count, "ids", ids);
  if (is_defined(target)) {
    check::int64(op, "target", *target);
    TORCH_CHECK_VALUE(
        (target->dim() == 1 || target->dim() == 2) && target->sym_size(0) == ids.sym_size(0), op,
        ": expected target of shape [", ids.sym_size(0), "] or [", ids.sym_size(0), ", T], got ",
        target->sym_sizes());
    check::same_device(op, "target", *target, "inside", inside);
    check_counts("target_count", target_count, "target", *target);
    TORCH_CHECK_VALUE(!is_defined(target_count) || target_count->sym_sizes() == target->sym_sizes(),
                      op, ": expected target_count for each target, ", target->sym_sizes(),
                      ", got ", target_count->sym_sizes());
  }
  const Tensor left = outside_counts(inside, options.num_classes), nothing_outside = left.eq(0);
  const OutsideDistribution distribution =
      make_outside_distribution(inside, inside_count, left, options);
  Tensor target_log_count = at::empty({0}, ids.options().dtype(at::kFloat));
  if (is_defined(target)) {
    const auto rows = [&](const Tensor& values) {
      return values.dim() == 1 ? values.unsqueeze(1) : values;
    };
    const Tensor
        classes = rows(*target),
        is_zero = is_inside(inside, classes).logical_or(classes.lt(0)).logical_or(nothing_outside);
    target_log_count =
        distribution
            .log_count(sampled ? OptionalTensor(rows(*target_count)) : std::nullopt, classes)
            .masked_fill(is_zero, -kInfinite);
    target_log_count = target_log_count.to(at::kFloat).reshape_symint(target->sym_sizes());
  }
  return {
      distribution.log_count(log_count, ids).masked_fill(nothing_outside, kInfinite).to(at::kFloat),
      target_log_count};
}

namespace {

// Checks draws first, because a sampler written in Python may return any numbers.
Tensor complement_of_given(const Tensor& seed, const Tensor& inside, const OptionalTensor& draws,
                           const Tensor& queries, std::string_view text) {
  constexpr const char* op = "complement_sample";
  if (is_defined(draws) && check::can_read(*draws)) {
    check::int64(op, "draws", *draws);
    check::class_ids(op, "draws", *draws, parse_options<ComplementOptions>(op, text).num_classes);
  }
  return complement_sample(seed, inside, draws, queries, text);
}

} // namespace

XSOFTMAX_OPERATORS(m) {
  m.def("sort_sets(Tensor sets, int num_classes) -> Tensor");
  m.def(
      "complement_sample(Tensor seed, Tensor inside, Tensor? draws, Tensor queries, str options) "
      "-> Tensor",
      complement_of_given);
  m.def(
      "complement_log_count(Tensor inside, Tensor? inside_count, Tensor ids, Tensor? log_count, "
      "Tensor? target, Tensor? target_count, "
      "str options) -> (Tensor log_count, Tensor target_log_count)",
      complement_log_count);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("sort_sets", sort_sets); }
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("sort_sets", sort_sets_cpu); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("sort_sets", sort_sets_meta); }

} // namespace xsoftmax
