#pragma once

#include "core/optional.h"
#include "core/philox.h"

// What the sampling ops share. Each is a pure function of `seed`, a 0-dim int64 tensor whose 64 bits are the Philox key: the same
// seed gives the same draws for any number of threads. `num_queries`: none for one set that the batch shares, ids [M]; else a set for
// each query, ids [Q, M]. A shared set is drawn as that of query 0. A seed of shape [2] is a key and the number of the first query, for a part
// of a batch that is drawn as it would be in the whole.

namespace xsoftmax {

/// seed: int64 [], or [2] beside num_queries; num_queries and num_samples not negative.
void check_sampling(const char* op, const at::Tensor& seed, const std::optional<c10::SymInt>& num_queries, const c10::SymInt& num_samples);

/// An uninitialised int64 tensor [M] or [Q, M] on seed's device.
at::Tensor empty_samples(const at::Tensor& seed, const std::optional<c10::SymInt>& num_queries, const c10::SymInt& num_samples);

/// Classes that a constructor was given, sorted, each once: int64, one dimension, in [0, num_classes). None: an empty tensor.
at::Tensor checked_classes(const char* owner, const char* argument, const OptionalTensor& classes, int64_t num_classes);

/// A seed, to be read where the draws are made.
class DrawSeed {
 public:
  explicit DrawSeed(const at::Tensor& seed) : key_(seed.const_data_ptr<int64_t>()), first_(seed.dim() == 1 ? key_ + seed.stride(0) : nullptr) {}

  XS_HOST_DEVICE uint64_t key() const { return uint64_t(*key_); }
  /// What query q of the call is in the whole batch.
  XS_HOST_DEVICE uint64_t query(int64_t q) const { return uint64_t(first_ ? *first_ + q : q); }

 private:
  const int64_t *key_, *first_; // first_: of a seed of shape [2]
};

/// How many queries make a task of a parallel loop, where each costs about `work` draws.
inline int64_t query_grain(int64_t work) { return std::max<int64_t>(1, 2048 / std::max<int64_t>(1, work)); }

} // namespace xsoftmax
