#pragma once

#include "op/optional.h"
#include "random/philox.h"

// Shared by the sampling ops. Each is a pure function of `seed`, a 0-dim int64 tensor with the
// Philox key: the same seed gives the same draws for any number of threads. num_queries: none for
// one set shared by the batch, ids [M]; otherwise one set per query, ids [Q, M]. A shared set is
// drawn like that of query 0. A seed of shape [2] holds the key and the number of the first query,
// so that a part of a batch gets the same draws as in the whole batch.

namespace xsoftmax {

/// Checks that seed is int64 [], or [2] if num_queries is given, and that num_queries and
/// num_samples are not negative.
void check_sampling(const char* op, const at::Tensor& seed,
                    const std::optional<c10::SymInt>& num_queries, const c10::SymInt& num_samples);

/// Returns an uninitialised int64 tensor [M] or [Q, M] on seed's device.
at::Tensor empty_samples(const at::Tensor& seed, const std::optional<c10::SymInt>& num_queries,
                         const c10::SymInt& num_samples);

/// Checks the classes passed to a constructor: int64, one dimension, in [0, num_classes). Returns
/// them sorted and unique; an empty tensor for none.
at::Tensor checked_classes(const char* owner, const char* argument, const OptionalTensor& classes,
                           int64_t num_classes);

/// A seed, read on the device that draws.
class DrawSeed {
 public:
  explicit DrawSeed(const at::Tensor& seed)
      : key_(seed.const_data_ptr<int64_t>()),
        first_(seed.dim() == 1 ? key_ + seed.stride(0) : nullptr) {}

  XS_HOST_DEVICE uint64_t key() const { return uint64_t(*key_); }
  /// Returns the number in the whole batch of query q of this call.
  XS_HOST_DEVICE uint64_t query(int64_t q) const { return uint64_t(first_ ? *first_ + q : q); }

 private:
  const int64_t *key_, *first_; // first_: nullptr unless the seed has shape [2]
};

/// Returns the grain size (in queries) of a parallel loop in which each query costs about `work`
/// draws.
inline int64_t query_grain(int64_t work) {
  return std::max<int64_t>(1, 2048 / std::max<int64_t>(1, work));
}

} // namespace xsoftmax
