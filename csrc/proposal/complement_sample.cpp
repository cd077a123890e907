#include "proposal/complement_sample.h"

#include "cpu/impl.h"
#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "proposal/sampling.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <numeric>

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
  TORCH_CHECK_VALUE(
      is_defined(inside_count) == sampled && is_defined(log_count) == sampled &&
          is_defined(target_count) == (sampled && is_defined(target)),
      op, ": expected the counts of a sampler with tries alone, got tries = ", options.tries);
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

// Returns 1 + f + ... + f^(n - 1) and f^n, by doubling. T: a tensor or a double; `one` is 1 in its
// shape.
template <typename T>
std::pair<T, T> geometric_sum(const T& f, const T& one, int64_t n) {
  T sum = one, power = f;
  for (int bit = int(std::bit_width(uint64_t(n))) - 2; bit >= 0; --bit) {
    sum = sum * (power + 1.0);
    power = power * power;
    if (n >> bit & 1) {
      sum = sum * f + 1.0;
      power = power * f;
    }
  }
  return {sum, power};
}

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

Tensor complement_sample_any(const Tensor& seed, const Tensor& inside, const OptionalTensor& draws,
                             const Tensor& queries, std::string_view text) {
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

std::tuple<Tensor, Tensor> complement_log_count_any(
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

// The kernels for the CPU do in one pass what takes the composites some twenty calls.

// A row that sort_sets returned: `size` numbers in ascending order, the first `count` of which are
// classes.
struct SortedSet {
  const int64_t* ids;
  int64_t size, count;

  // Searches without branches, which draws at random would make the processor mispredict.
  bool has(int64_t id) const {
    const int64_t* at = ids;
    for (int64_t left = size; left > 1;) {
      const int64_t half = left / 2;
      at += at[half] <= id ? half : 0;
      left -= half;
    }
    return size > 0 && *at == id;
  }

  // Returns the class with `rank` classes outside the set before it.
  int64_t outside(int64_t rank, int64_t num_classes) const {
    int64_t first = 0, last = size;
    while (first < last) {
      const int64_t middle = (first + last) / 2, before = ids[middle] - middle;
      if (before <= rank) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return std::clamp<int64_t>(rank + first, 0, num_classes - 1);
  }
};

class SortedSets {
 public:
  SortedSets(const Tensor& inside, int64_t num_classes)
      : inside_(inside.contiguous()), ids_(inside_.const_data_ptr<int64_t>()),
        size_(inside.size(1)), step_(inside.size(0) == 1 ? 0 : size_), num_classes_(num_classes) {}

  SortedSet operator[](int64_t query) const {
    const int64_t* const ids = ids_ + query * step_;
    return {ids, size_, std::lower_bound(ids, ids + size_, num_classes_) - ids};
  }

 private:
  Tensor inside_;
  const int64_t* ids_;
  int64_t size_, step_, num_classes_;
};

Tensor complement_sample_cpu(const Tensor& seed, const Tensor& inside, const OptionalTensor& draws,
                             const Tensor& queries, std::string_view text) {
  constexpr const char* op = "complement_sample";
  const ComplementOptions options = check_complement_sample(seed, inside, draws, queries, text);
  if (is_defined(draws)) { // a sampler written in Python may return any numbers
    check::class_ids(op, "draws", *draws, options.num_classes);
  }
  if (use_reference()) {
    return complement_sample_any(seed, inside, draws, queries, text);
  }
  const int64_t num_samples = options.num_samples, tries = is_defined(draws) ? options.tries : 0;
  const Tensor out = empty_samples(seed, queries.size(0), num_samples),
               drawn = is_defined(draws) ? draws->contiguous() : out;
  const SortedSets sets(inside, options.num_classes);
  const DrawSeed from(seed);
  const int64_t* const draw = drawn.const_data_ptr<int64_t>();
  int64_t* const ids = out.mutable_data_ptr<int64_t>();
  at::parallel_for(0, queries.size(0), query_grain(num_samples), [&](int64_t begin, int64_t end) {
    for (int64_t q = begin; q < end; ++q) {
      const SortedSet set = sets[q];
      const double left = double(options.num_classes - set.count);
      for (int64_t i = q * num_samples; i < (q + 1) * num_samples; ++i) {
        const int64_t *const last = draw + (i + 1) * tries,
                             *const found = std::find_if(last - tries, last,
                                                         [&](int64_t id) { return !set.has(id); });
        if (found != last) {
          ids[i] = *found;
        } else {
          const PhiloxBlock block = philox(from.key(), from.query(q), i - q * num_samples);
          ids[i] = set.outside(int64_t(unit_double(block.low()) * left), options.num_classes);
        }
      }
    }
  });
  return out;
}

// Returns the counts as float64 of the given sizes; undefined for none.
Tensor counts_of(const OptionalTensor& log_count, at::IntArrayRef sizes) {
  return is_defined(log_count) ? log_count->to(at::kDouble).exp().expand(sizes).contiguous()
                               : Tensor();
}

const double* data_of(const Tensor& counts) {
  return counts.defined() ? counts.const_data_ptr<double>() : nullptr;
}

// OutsideDistribution for one query.
struct RowDistribution {
  double scale, fallback;

  // of_sampler: the expected count in its draws; nullptr without one.
  double count(const double* of_sampler) const {
    return of_sampler ? *of_sampler * scale + fallback : fallback;
  }
};

// inside_count: for each class of the set; nullptr without a sampler.
RowDistribution row_distribution(const SortedSet& set, const double* inside_count,
                                 const ComplementOptions& options) {
  const double left = double(options.num_classes - set.count),
               uniform = double(options.num_samples) / std::max(left, 1.0);
  if (!inside_count) {
    return {0, uniform};
  }
  const double draws = double(options.num_samples) * double(options.tries),
               mass = std::min(std::accumulate(inside_count, inside_count + set.count, 0.0) / draws,
                               1.0);
  const auto [sum, power] = geometric_sum(mass, 1.0, options.tries);
  return {sum / double(options.tries), power * uniform};
}

std::tuple<Tensor, Tensor> complement_log_count_cpu(
    const Tensor& inside, const OptionalTensor& inside_count, const Tensor& ids,
    const OptionalTensor& log_count, const OptionalTensor& target,
    const OptionalTensor& target_count, std::string_view text) {
  if (use_reference()) {
    return complement_log_count_any(inside, inside_count, ids, log_count, target, target_count,
                                    text);
  }
  const ComplementOptions options =
      check_complement_log_count(inside, inside_count, ids, log_count, target, target_count, text);
  const int64_t width = ids.size(1), size = inside.size(1), rows = ids.size(0);
  const bool of_batch = inside.size(0) == 1 &&
      (!is_defined(inside_count) || inside_count->dim() < 2 || inside_count->size(0) == 1);
  const Tensor inside_counts = counts_of(inside_count, {of_batch ? 1 : rows, size}),
               counts = counts_of(log_count, ids.sizes()),
               targets = is_defined(target) ? target->contiguous() : Tensor(),
               target_counts =
                   is_defined(target) ? counts_of(target_count, targets.sizes()) : Tensor();
  const auto empty = [&](at::IntArrayRef sizes) {
    return at::empty(sizes, ids.options().dtype(at::kDouble));
  };
  Tensor out = empty(ids.sizes()),
         target_out = empty(targets.defined() ? targets.sizes() : at::IntArrayRef({0}));
  const SortedSets sets(inside, options.num_classes);
  const int64_t num_targets = rows > 0 ? target_out.numel() / rows : 0;
  const double *const of_inside = data_of(inside_counts), *const of_ids = data_of(counts),
                      *const of_target = data_of(target_counts);
  const int64_t* const target_id = targets.defined() ? targets.const_data_ptr<int64_t>() : nullptr;
  double *const found = out.mutable_data_ptr<double>(),
                *const target_found = target_out.mutable_data_ptr<double>();
  const RowDistribution shared =
      of_batch ? row_distribution(sets[0], of_inside, options) : RowDistribution{};
  at::parallel_for(0, rows, query_grain(width + size), [&](int64_t begin, int64_t end) {
    for (int64_t q = begin; q < end; ++q) {
      const SortedSet set = sets[q];
      const RowDistribution outside = of_batch
          ? shared
          : row_distribution(set, of_inside ? of_inside + q * size : nullptr, options);
      const bool nothing_outside = set.count >= options.num_classes;
      for (int64_t i = q * width; i < (q + 1) * width; ++i) {
        found[i] = nothing_outside ? kInfinite : outside.count(of_ids ? of_ids + i : nullptr);
      }
      for (int64_t i = q * num_targets; i < (q + 1) * num_targets; ++i) {
        const bool is_zero = nothing_outside || target_id[i] < 0 || set.has(target_id[i]);
        target_found[i] = is_zero ? 0.0 : outside.count(of_target ? of_target + i : nullptr);
      }
    }
  });
  return {out.log_().to(at::kFloat), target_out.log_().to(at::kFloat)};
}

} // namespace

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
  m.impl("complement_sample", complement_sample_any);
  m.impl("complement_log_count", complement_log_count_any);
}

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("complement_sample", complement_sample_cpu);
  m.impl("complement_log_count", complement_log_count_cpu);
}

} // namespace xsoftmax
