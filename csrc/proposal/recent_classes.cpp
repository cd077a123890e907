#include "proposal/recent_classes.h"

#include "op/checks.h"
#include "op/find_op.h"
#include "op/shape_checks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include <cmath>

// Draws and counts of classes that were added since the last rebuild of an index.

namespace xsoftmax {

using at::Tensor;

RecentClasses::RecentClasses(const char* op, const Tensor& recent, int64_t drawn,
                             int64_t num_classes)
    : count_(check::int64_item(recent)), first_(num_classes - count_), drawn_(drawn) {
  TORCH_CHECK_VALUE(count_ == 0 || (count_ > 0 && count_ < drawn), op, ": expected recent in [0, ",
                    drawn, "), the classes that are drawn, got ", count_);
}

Tensor RecentClasses::others(const Tensor& ids) const { return ids.masked_fill(ids.ge(first_), 0); }

Tensor RecentClasses::log_count(const Tensor& ids, const Tensor& log_count_of_others,
                                int64_t num_samples) const {
  const Tensor scaled = log_count_of_others + std::log(double(drawn_ - count_) / double(drawn_));
  return at::where(
      ids.ge(first_),
      at::full({}, std::log(double(num_samples) / double(drawn_)), log_count_of_others.options()),
      scaled);
}

PrivateDraws RecentClasses::join(const Tensor& seed, const std::optional<c10::SymInt>& num_queries,
                                 const OptionalTensor& target, const PrivateDraws& other_draws,
                                 int64_t num_samples) const {
  using Size = c10::SymInt;
  static const auto uniform =
      find_op<Tensor(const Tensor&, Size, Size, std::optional<Size>, Size, bool)>(
          "xsoftmax::uniform_sample");
  // Another key, so that the choice of the part is independent of the draws in it.
  constexpr int64_t kOtherKey = 0x5bd1e9955bd1e995;
  const Tensor key = seed.dim() == 0
      ? seed.bitwise_xor(kOtherKey)
      : at::cat({seed.narrow(0, 0, 1).bitwise_xor(kOtherKey), seed.narrow(0, 1, 1)});
  // Positions among all drawable classes, recent ones first.
  const Tensor place = uniform.call(key, 0, drawn_, num_queries, num_samples, false);
  const auto& [others, other_count, target_log_count] = other_draws;
  const Tensor ids = at::where(place.lt(count_), place + first_, others);
  return {
      ids, log_count(ids, other_count, num_samples),
      is_defined(target) ? log_count(*target, target_log_count, num_samples) : target_log_count};
}

} // namespace xsoftmax
