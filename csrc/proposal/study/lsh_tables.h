#pragma once

// Draws and counts from the tables of an LSH index, as inline functions for host and CUDA code
// (lsh_sample.h defines the distribution).

#include "random/philox.h"

#include <cmath>
#include <cstdint>

namespace xsoftmax {

/// The tables as raw pointers. The argument hash [T] holds the codes of a query.
struct LshTables {
  int64_t tables, classes, num_classes, buckets; ///< T, A, N and 2^B
  const int32_t* code;
  const int64_t* order;
  const int64_t* start;
  double uniform;

  XS_HOST_DEVICE int64_t begin(int64_t table, int64_t hash) const {
    return start[table * (buckets + 1) + hash];
  }
  XS_HOST_DEVICE int64_t size(int64_t table, int64_t hash) const {
    return begin(table, hash + 1) - begin(table, hash);
  }

  /// Returns the number of tables in which the query's bucket is not empty.
  XS_HOST_DEVICE int64_t count_full(const int64_t* hash) const {
    int64_t full = 0;
    for (int64_t t = 0; t < tables; ++t) {
      full += size(t, hash[t]) > 0;
    }
    return full;
  }

  /// Returns log q of a class with the codes `code_of_class` [T]; all -1 if it is never drawn.
  XS_HOST_DEVICE double log_q(const int64_t* hash, const int32_t* code_of_class) const {
    if (code_of_class[0] < 0) {
      return -INFINITY;
    }
    double sum = 0;
    int64_t full = 0;
    for (int64_t t = 0; t < tables; ++t) {
      const int64_t n = size(t, hash[t]);
      full += n > 0;
      sum += code_of_class[t] == hash[t] && n > 0 ? 1.0 / double(n) : 0.0;
    }
    const double uniform_probability = 1.0 / double(classes);
    return std::log(full > 0 ? uniform * uniform_probability + (1 - uniform) * sum / double(full)
                             : uniform_probability);
  }

  /// Returns which of the `full` tables a draw uses, or -1 for a draw from all classes uniformly.
  XS_HOST_DEVICE int64_t table_of(const PhiloxBlock& block, int64_t full) const {
    const double u = unit_double(block.low());
    if (full == 0 || u < uniform) {
      return -1;
    }
    const int64_t turn = int64_t((u - uniform) / (1 - uniform) * double(full));
    return turn < full ? turn : full - 1;
  }

  /// Returns the place in `order` of a draw from `table`; -1 draws from all classes uniformly.
  XS_HOST_DEVICE int64_t place(const int64_t* hash, int64_t table, const PhiloxBlock& block) const {
    if (table < 0) {
      return int64_t(multiply_shift(block.high(), uint64_t(classes))) * tables;
    }
    return (begin(table, hash[table]) +
            int64_t(multiply_shift(block.high(), uint64_t(size(table, hash[table]))))) *
        tables +
        table;
  }
};

} // namespace xsoftmax
