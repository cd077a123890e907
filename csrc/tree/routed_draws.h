#pragma once

#include "random/permutation.h"

#include <cstdint>

namespace xsoftmax {

/// Draws `count` of the children begin .. end - 1 of a node without replacement for a query. If
/// there are at most `count` children, returns all of them in order.
class RoutedSample {
 public:
  XS_HOST_DEVICE RoutedSample(uint64_t seed, uint64_t query, int64_t begin, int64_t end,
                              int64_t count)
      : begin_(begin), all_(end - begin <= count), size_(all_ ? end - begin : count),
        place_(seed, query, uint64_t(end > begin ? end - begin : 1)) {}

  XS_HOST_DEVICE int64_t size() const { return size_; }
  /// Returns draw k, k < size().
  XS_HOST_DEVICE int64_t operator[](int64_t k) const {
    return begin_ + (all_ ? k : int64_t(place_(uint64_t(k))));
  }

 private:
  int64_t begin_;
  bool all_;
  int64_t size_;
  RandomPermutation place_;
};

} // namespace xsoftmax
