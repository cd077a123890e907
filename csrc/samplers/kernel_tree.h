#pragma once

// The tree of a kernel sampler, as inline functions for host and CUDA code (kernel_sample.h has the law).

#include "core/philox.h"

#include <cstdint>

namespace xsoftmax {

struct KernelTree {
  bool sphere;
  double scale;
  int64_t classes, leaves, width, features; ///< A, L, and the columns of rows and sums
  const float* rows;
  const float* sums;

  XS_HOST_DEVICE int64_t leaf_begin(int64_t leaf) const { return leaf * classes / leaves; }
  XS_HOST_DEVICE int64_t leaf_of(int64_t row) const {
    const int64_t leaf = row * leaves / classes; // or the one behind it, as leaf_begin rounds down
    return leaf + (leaf + 1 < leaves && leaf_begin(leaf + 1) <= row ? 1 : 0);
  }
  /// The kernel of a row, from its product with the query.
  XS_HOST_DEVICE double value(double product) const { return sphere ? scale * product * product + 1 : (product < scale ? scale : product); }
  /// What a node over `size` rows weighs, from the product with its sums.
  XS_HOST_DEVICE double mass(double sum, int64_t size) const {
    const double least = scale * double(size);
    return sphere ? scale * (sum < 0 ? 0.0 : sum) + double(size) : (sum < least ? least : sum);
  }
};

} // namespace xsoftmax
