#pragma once

#include "core/optional.h"

// What the sampling ops share. Each is a pure function of `seed`, a 0-dim int64 tensor whose 64 bits are the Philox key: the same
// seed gives the same draws for any number of threads. `num_queries`: none for one set that the batch shares, ids [M]; else a set for
// each query, ids [Q, M]. A shared set is drawn as that of query 0.

namespace xsoftmax {

/// seed: 0-dim int64; num_queries and num_samples not negative.
void check_sampling(const char* op, const at::Tensor& seed, const std::optional<c10::SymInt>& num_queries,
                    const c10::SymInt& num_samples);

/// An uninitialised int64 tensor [M] or [Q, M] on seed's device.
at::Tensor empty_samples(const at::Tensor& seed, const std::optional<c10::SymInt>& num_queries, const c10::SymInt& num_samples);

/// Classes that a constructor was given, sorted, each once: int64, one dimension, in [0, num_classes). None: an empty tensor.
at::Tensor checked_classes(const char* owner, const char* argument, const OptionalTensor& classes, int64_t num_classes);

/// The Philox key that a CPU tensor holds.
inline uint64_t seed_value(const at::Tensor& seed) { return uint64_t(*seed.const_data_ptr<int64_t>()); }

/// How many queries make a task of a parallel loop, where each costs about `work` draws.
inline int64_t query_grain(int64_t work) { return std::max<int64_t>(1, 2048 / std::max<int64_t>(1, work)); }

} // namespace xsoftmax
