#include "proposal/complement_sample.h"

#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "proposal/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

Tensor columns_of(const Tensor& rows) {
  return at::arange(at::Scalar(rows.sym_size(1)), rows.options());
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

ComplementOptions checked_options(const char* op, std::string_view text) {
  const auto options = parse_options<ComplementOptions>(op, text);
  TORCH_CHECK_VALUE(options.num_classes >= 1 && options.num_samples >= 0 && options.tries >= 0, op,
                    ": expected num_classes of at least 1, and num_samples and tries of at least "
                    "0, got ",
                    options.num_classes, ", ", options.num_samples, " and ", options.tries);
  return options;
}

} // namespace

ComplementOptions check_complement_sample(const Tensor& seed, const Tensor& inside,
                                          const OptionalTensor& draws, const Tensor& queries,
                                          std::string_view text) {
  constexpr const char* op = "complement_sample";
  const ComplementOptions options = checked_options(op, text);
  check_inside(op, inside, "queries", queries);
  check_sampling(op, seed, queries.sym_size(0), options.num_samples);
  check::same_device(op, "seed", seed, "inside", inside);
  if (is_defined(draws)) {
    check_inside(op, inside, "draws", *draws);
    check::int64(op, "draws", *draws);
    check::size(op, "draws", *draws, 0, queries.sym_size(0), "the queries");
    check::size(op, "draws", *draws, 1, options.num_samples * options.tries,
                "num_samples times tries");
  }
  return options;
}

ComplementOptions check_complement_log_count(const Tensor& inside,
                                             const OptionalTensor& inside_count, const Tensor& ids,
                                             const OptionalTensor& log_count,
                                             const OptionalTensor& target,
                                             const OptionalTensor& target_count,
                                             std::string_view text) {
  constexpr const char* op = "complement_log_count";
  const ComplementOptions options = checked_options(op, text);
  const bool sampled = options.tries > 0;
  check_inside(op, inside, "ids", ids);
  TORCH_CHECK_VALUE(is_defined(inside_count) == sampled && is_defined(log_count) == sampled &&
                        is_defined(target_count) == (sampled && is_defined(target)),
                    op,
                    ": expected inside_count, log_count and target_count if tries is above 0, and "
                    "none otherwise, got tries of ",
                    options.tries);
  check::int64(op, "ids", ids);
  const auto check_counts = [&](const char* name, const OptionalTensor& count) {
    if (is_defined(count)) {
      check::floating(op, name, *count);
      check::same_device(op, name, *count, "inside", inside);
    }
  };
  check_counts("inside_count", inside_count);
  check_counts("log_count", log_count);
  const auto check_shape = [&](const char* name, const OptionalTensor& count, c10::SymInt width) {
    const auto fits = [&](int64_t axis, const c10::SymInt& size) {
      return count->dim() < axis || count->sym_size(-axis) == size || count->sym_size(-axis) == 1;
    };
    TORCH_CHECK_VALUE(
        !is_defined(count) || (count->dim() <= 2 && fits(1, width) && fits(2, ids.sym_size(0))), op,
        ": expected ", name, " of a shape that broadcasts to [", ids.sym_size(0), ", ", width,
        "], got ", count->sym_sizes());
  };
  check_shape("inside_count", inside_count, inside.sym_size(1));
  check_shape("log_count", log_count, ids.sym_size(1));
  if (is_defined(target)) {
    check::int64(op, "target", *target);
    TORCH_CHECK_VALUE(
        (target->dim() == 1 || target->dim() == 2) && target->sym_size(0) == ids.sym_size(0), op,
        ": expected target of shape [", ids.sym_size(0), "] or [", ids.sym_size(0), ", T], got ",
        target->sym_sizes());
    check::same_device(op, "target", *target, "inside", inside);
    check_counts("target_count", target_count);
    TORCH_CHECK_VALUE(!is_defined(target_count) || target_count->sym_sizes() == target->sym_sizes(),
                      op, ": expected target_count for each target, ", target->sym_sizes(),
                      ", got ", target_count->sym_sizes());
  }
  return options;
}

namespace {

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
    return is_defined(of_sampler) ? (of_sampler->to(at::kDouble).exp() * scale + fallback).log()
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
  const auto [sum, power] = geometric_sum(mass, at::ones_like(mass), options.tries);
  return {sum / double(options.tries), power * uniform};
}

} // namespace

Tensor complement_sample_composite(const Tensor& seed, const Tensor& inside,
                                   const OptionalTensor& draws, const Tensor& queries,
                                   std::string_view text) {
  constexpr int64_t resolution = int64_t(1) << 53;
  using Size = c10::SymInt;
  const ComplementOptions options = check_complement_sample(seed, inside, draws, queries, text);
  static const auto uniform =
      find_op<Tensor(const Tensor&, Size, Size, std::optional<Size>, Size, bool)>(
          "xsoftmax::uniform_sample");
  const Tensor numbers =
      uniform.call(seed, 0, resolution, queries.sym_size(0), options.num_samples, false);
  const Tensor ids = uniform_outside(inside, numbers.to(at::kDouble).div_(double(resolution)),
                                     options.num_classes);
  if (!is_defined(draws) || options.tries == 0) {
    return ids;
  }
  const std::vector<Size> sizes{queries.sym_size(0), options.num_samples, options.tries};
  const Tensor outside = is_inside(inside, *draws).logical_not().view_symint(sizes);
  const Tensor drawn =
      draws->reshape_symint(sizes).gather(2, outside.to(at::kChar).argmax(2, true)).squeeze(2);
  return at::where(outside.any(2), drawn, ids);
}

std::tuple<Tensor, Tensor> complement_log_count_composite(
    const Tensor& inside, const OptionalTensor& inside_count, const Tensor& ids,
    const OptionalTensor& log_count, const OptionalTensor& target,
    const OptionalTensor& target_count, std::string_view text) {
  const ComplementOptions options =
      check_complement_log_count(inside, inside_count, ids, log_count, target, target_count, text);
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
            .log_count(options.tries > 0 ? OptionalTensor(rows(*target_count)) : std::nullopt,
                       classes)
            .masked_fill(is_zero, -kInfinite);
    target_log_count = target_log_count.to(at::kFloat).reshape_symint(target->sym_sizes());
  }
  return {
      distribution.log_count(log_count, ids).masked_fill(nothing_outside, kInfinite).to(at::kFloat),
      target_log_count};
}

Tensor complement_sample(const Tensor& seed, const Tensor& inside, const OptionalTensor& draws,
                         const Tensor& queries, std::string_view options) {
  static const auto op = find_op<decltype(complement_sample)>("xsoftmax::complement_sample");
  return op.call(seed, inside, draws, queries, options);
}

std::tuple<Tensor, Tensor> complement_log_count(const Tensor& inside,
                                                const OptionalTensor& inside_count,
                                                const Tensor& ids, const OptionalTensor& log_count,
                                                const OptionalTensor& target,
                                                const OptionalTensor& target_count,
                                                std::string_view options) {
  static const auto op = find_op<decltype(complement_log_count)>("xsoftmax::complement_log_count");
  return op.call(inside, inside_count, ids, log_count, target, target_count, options);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "complement_sample(Tensor seed, Tensor inside, Tensor? draws, Tensor queries, str options) "
      "-> Tensor");
  m.def(
      "complement_log_count(Tensor inside, Tensor? inside_count, Tensor ids, Tensor? log_count, "
      "Tensor? target, Tensor? target_count, "
      "str options) -> (Tensor log_count, Tensor target_log_count)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("complement_sample", complement_sample_composite);
  m.impl("complement_log_count", complement_log_count_composite);
}

} // namespace xsoftmax
