#pragma once

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <utility>

namespace xsoftmax {

/// A map keyed by PyTorch objects, such as tensors and storages, that does not keep them alive. Not
/// thread-safe.
///
/// Each entry holds a weak pointer, so the address of its object is not reused. Entries of dead
/// objects are removed whenever the map has doubled in size.
template <typename Weak, typename Value>
class WeakMap {
 public:
  /// Returns the value of an object, or nullptr if it has none or is no longer alive.
  Value* find(const void* object) {
    const auto found = entries_.find(object);
    return found == entries_.end() || found->second.first.expired() ? nullptr
                                                                    : &found->second.second;
  }

  Value& insert_or_assign(const void* object, Weak weak, Value value) {
    if (entries_.size() >= sweep_at_) {
      std::erase_if(entries_, [](const auto& entry) { return entry.second.first.expired(); });
      sweep_at_ = std::max<size_t>(16, 2 * entries_.size());
    }
    return entries_
        .insert_or_assign(object, std::pair<Weak, Value>(std::move(weak), std::move(value)))
        .first->second.second;
  }

 private:
  std::unordered_map<const void*, std::pair<Weak, Value>> entries_;
  size_t sweep_at_ = 16; // number of entries at which dead ones are removed
};

} // namespace xsoftmax
