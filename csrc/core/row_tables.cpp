#include "core/row_tables.h"

#include "core/shape_checks.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace xsoftmax {
namespace {

using at::Tensor;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// By address. One that was freed may be taken by another tensor, so the entry says whether it still lives.
class Tables {
 public:
  void add(const Tensor& table) {
    const std::lock_guard lock(mutex_);
    if (found(table)) {
      return;
    }
    if (tables_.size() >= 2 * living_) {
      std::erase_if(tables_, [](const auto& entry) { return entry.second.expired(); });
      living_ = std::max<size_t>(8, tables_.size());
    }
    tables_.insert_or_assign(table.unsafeGetTensorImpl(), WeakTensor(table.getIntrusivePtr()));
  }

  bool contains(const Tensor& table) {
    const std::lock_guard lock(mutex_);
    return found(table);
  }

 private:
  bool found(const Tensor& table) const {
    const auto entry = tables_.find(table.unsafeGetTensorImpl());
    return entry != tables_.end() && !entry->second.expired();
  }

  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, WeakTensor> tables_;
  size_t living_ = 8; // after the last of them that are gone were taken out
};

Tables& tables() {
  static auto* const all = new Tables(); // tensors may outlive what the end of the process destroys
  return *all;
}

} // namespace

void note_row_tables(std::optional<bool> sparse_grad, const Tensor& weight, const OptionalTensor& bias) {
  if (!sparse_grad.value_or(true)) {
    return;
  }
  for (const Tensor* table : {&weight, given(bias) ? &*bias : nullptr}) {
    if (table != nullptr && table->requires_grad() && table->is_leaf() && check::is_plain(*table)) {
      tables().add(*table);
    }
  }
}

bool is_row_table(const Tensor& table) { return tables().contains(table); }

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) { m.def("is_row_table(Tensor table) -> bool", is_row_table); }

} // namespace xsoftmax
