#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace xsoftmax {

/// Of xsoftmax::nn::IdTable, and of xsoftmax.IdTable in Python.
struct IdTableOptions {
  std::optional<std::string> eviction = "lfu"; ///< who gives way in a full table: the id seen least often, "lru": longest ago, none: nobody
  int64_t admission = 1;                       ///< an id gets a row when it has been seen so often, in [1, 1,000,000]

  template <typename Visitor>
  void visit(Visitor& v) {
    v("eviction", eviction);
    v("admission", admission);
  }
};

} // namespace xsoftmax
