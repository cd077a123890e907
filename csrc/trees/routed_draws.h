#pragma once

#include "core/permutation.h"

#include <cstdint>

namespace xsoftmax {

/// What a query draws of the children begin .. end - 1 of a node: `count` different ones, or all, in their order, where there are no more.
class RoutedDraws {
 public:
  XS_HOST_DEVICE RoutedDraws(uint64_t seed, uint64_t query, int64_t begin, int64_t end, int64_t count)
      : begin_(begin), all_(end - begin <= count), size_(all_ ? end - begin : count), place_(seed, query, uint64_t(end > begin ? end - begin : 1)) {}

  XS_HOST_DEVICE int64_t size() const { return size_; }
  /// The k-th of them, k < size().
  XS_HOST_DEVICE int64_t operator[](int64_t k) const { return begin_ + (all_ ? k : int64_t(place_(uint64_t(k)))); }

 private:
  int64_t begin_;
  bool all_;
  int64_t size_;
  RandomPermutation place_;
};

} // namespace xsoftmax
