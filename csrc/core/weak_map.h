#pragma once

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <utility>

namespace xsoftmax {

/// A map from objects of torch, such as tensors and their memory, that keeps none of them alive. Not safe for threads by itself.
///
/// It holds the address of each object by a weak pointer, so that no later object takes its place, and drops what has gone when it has doubled.
template <typename Weak, typename Value>
class WeakMap {
 public:
  /// The value of an object that is alive; nullptr: there is none.
  Value* find(const void* object) {
    const auto found = entries_.find(object);
    return found == entries_.end() || found->second.first.expired() ? nullptr : &found->second.second;
  }

  Value& insert_or_assign(const void* object, Weak weak, Value value) {
    if (entries_.size() >= sweep_at_) {
      std::erase_if(entries_, [](const auto& entry) { return entry.second.first.expired(); });
      sweep_at_ = std::max<size_t>(16, 2 * entries_.size());
    }
    return entries_.insert_or_assign(object, std::pair<Weak, Value>(std::move(weak), std::move(value))).first->second.second;
  }

 private:
  std::unordered_map<const void*, std::pair<Weak, Value>> entries_;
  size_t sweep_at_ = 16; // so many entries
};

} // namespace xsoftmax
