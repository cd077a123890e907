#include "cpu/impl.h"
#include "op/checks.h"
#include "op/operators.h"
#include "proposal/complement_sample.h"
#include "proposal/sampling.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

namespace xsoftmax {
namespace {

using at::Tensor;

// The kernels do in one pass what takes the composites some twenty calls.

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
    return complement_sample_composite(seed, inside, draws, queries, text);
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
    return complement_log_count_composite(inside, inside_count, ids, log_count, target,
                                          target_count, text);
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

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("complement_sample", complement_sample_cpu);
  m.impl("complement_log_count", complement_log_count_cpu);
}

} // namespace xsoftmax
