#include "core/sorted_ids.h"

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace xsoftmax {
namespace {

struct Note {
  c10::weak_intrusive_ptr<c10::StorageImpl> memory; // keeps the address; expired: memory that is gone
  const void* first;
  int64_t count, limit;
};

struct Notes {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Note> of_memory;
  size_t sweep_at = 16; // so many notes
};

Notes& notes() {
  static auto* const all = new Notes(); // tensors may outlive what the end of the process destroys
  return *all;
}

} // namespace

void note_sorted_ids(const at::Tensor& ids, int64_t limit) {
  Notes& all = notes();
  const std::lock_guard lock(all.mutex);
  if (all.of_memory.size() >= all.sweep_at) {
    std::erase_if(all.of_memory, [](const auto& note) { return note.second.memory.expired(); });
    all.sweep_at = std::max<size_t>(16, 2 * all.of_memory.size());
  }
  const c10::Storage& storage = ids.storage();
  const Note note{storage.getWeakStorageImpl(), ids.const_data_ptr(), ids.numel(), limit};
  all.of_memory.insert_or_assign(storage.unsafeGetStorageImpl(), note);
}

bool are_sorted_ids(const at::Tensor& ids, int64_t limit) {
  Notes& all = notes();
  const std::lock_guard lock(all.mutex);
  const auto found = all.of_memory.find(ids.storage().unsafeGetStorageImpl());
  if (found == all.of_memory.end() || found->second.memory.expired()) {
    return false;
  }
  const Note& note = found->second;
  return ids.is_contiguous() && ids.const_data_ptr() == note.first && ids.numel() == note.count && note.limit <= limit;
}

} // namespace xsoftmax
