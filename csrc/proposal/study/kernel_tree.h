#pragma once

// The tree of a kernel sampler, as inline functions for host and CUDA code (kernel_sample.h defines
// the distribution).

#include "random/philox.h"

#include <cstdint>

namespace xsoftmax {

struct KernelTree {
  bool sphere;
  double scale;
  int64_t classes, leaves, width, features; ///< A, L, the columns of rows and of sums
  const float* rows;
  const float* sums;

  XS_HOST_DEVICE int64_t leaf_begin(int64_t leaf) const { return leaf * classes / leaves; }
  XS_HOST_DEVICE int64_t leaf_of(int64_t row) const {
    const int64_t leaf = row * leaves / classes; // or the next one, because leaf_begin rounds down
    return leaf + (leaf + 1 < leaves && leaf_begin(leaf + 1) <= row ? 1 : 0);
  }
  /// Returns the kernel of a row, from its product with the query.
  XS_HOST_DEVICE double value(double product) const {
    return sphere ? scale * product * product + 1 : (product < scale ? scale : product);
  }
  /// Returns the mass of a node over `size` rows, from the product of its sums with the query.
  XS_HOST_DEVICE double mass(double sum, int64_t size) const {
    const double least = scale * double(size);
    return sphere ? scale * (sum < 0 ? 0.0 : sum) + double(size) : (sum < least ? least : sum);
  }
};

} // namespace xsoftmax
