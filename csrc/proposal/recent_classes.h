#pragma once

#include "op/optional.h"
#include "proposal/adaptive.h"

#include <ATen/core/Tensor.h>

#include <optional>

// Classes that were added since the last rebuild of an index (adaptive.h: `recent`).

namespace xsoftmax {

/// The drawable recent classes of an index over `drawn` drawable classes.
class RecentClasses {
 public:
  RecentClasses(const char* op, const at::Tensor& recent, int64_t drawn, int64_t num_classes);

  int64_t count() const { return count_; }
  /// Returns ids with recent classes replaced by others, so that the indexed part of an index can
  /// be queried for them.
  at::Tensor others(const at::Tensor& ids) const;
  OptionalTensor others(const OptionalTensor& ids) const {
    return is_defined(ids) ? OptionalTensor(others(*ids)) : ids;
  }
  /// Returns the log_count of `ids` in all `num_samples` draws, given that of others(ids) in as
  /// many draws from the indexed part.
  at::Tensor log_count(const at::Tensor& ids, const at::Tensor& log_count_of_others,
                       int64_t num_samples) const;
  /// Turns draws from the indexed part into draws from all classes, with the same seed.
  /// `num_queries`: none for a shared set.
  PrivateDraws join(const at::Tensor& seed, const std::optional<c10::SymInt>& num_queries,
                    const OptionalTensor& target, const PrivateDraws& other_draws,
                    int64_t num_samples) const;

 private:
  int64_t count_, first_, drawn_;
};

} // namespace xsoftmax
