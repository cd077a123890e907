#include "core/row_tables.h"

#include "core/shape_checks.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace xsoftmax {
namespace {

using at::Tensor;

struct Form { // of the gradient of a table; true: row-sparse
  bool last = false;
  std::optional<bool> fixed = std::nullopt;
};

struct Entry {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> table; // keeps the address; expired: a table that is gone
  Form form;
};

class Tables {
 public:
  void add(const Tensor& table) {
    const std::lock_guard lock(mutex_);
    if (find(table) == nullptr) {
      insert(table);
    }
  }

  void fix(const Tensor& table, std::optional<bool> row_sparse) {
    const std::lock_guard lock(mutex_);
    if (find(table) == nullptr) {
      insert(table);
    }
    find(table)->form.fixed = row_sparse;
  }

  void set(const Tensor& table, bool row_gradient) {
    const std::lock_guard lock(mutex_);
    if (Entry* const entry = find(table)) {
      entry->form.last = row_gradient;
    }
  }

  std::optional<Form> get(const Tensor& table) {
    const std::lock_guard lock(mutex_);
    const Entry* const entry = find(table);
    return entry == nullptr ? std::nullopt : std::optional(entry->form);
  }

 private:
  void insert(const Tensor& table) {
    if (tables_.size() >= sweep_at_) {
      std::erase_if(tables_, [](const auto& entry) { return entry.second.table.expired(); });
      sweep_at_ = std::max<size_t>(16, 2 * tables_.size());
    }
    tables_.insert_or_assign(table.unsafeGetTensorImpl(), Entry{decltype(Entry::table)(table.getIntrusivePtr()), {}});
  }

  Entry* find(const Tensor& table) {
    const auto entry = tables_.find(table.unsafeGetTensorImpl());
    return entry == tables_.end() || entry->second.table.expired() ? nullptr : &entry->second;
  }

  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> tables_;
  size_t sweep_at_ = 16; // so many entries
};

Tables& tables() {
  static auto* const all = new Tables(); // tensors may outlive what the end of the process destroys
  return *all;
}

} // namespace

void register_row_tables(std::optional<bool> sparse_grad, const Tensor& weight, const OptionalTensor& bias) {
  if (!sparse_grad.value_or(true) || !at::GradMode::is_enabled()) {
    return;
  }
  for (const Tensor* table : {&weight, given(bias) ? &*bias : nullptr}) {
    if (table != nullptr && table->requires_grad() && table->is_leaf() && check::is_plain(*table)) {
      tables().add(*table);
    }
  }
}

void set_row_gradient(const Tensor& table, bool row_sparse) { tables().set(table, row_sparse); }
bool is_row_table(const Tensor& table) { return tables().get(table).has_value(); }
bool has_row_gradient(const Tensor& table) { return tables().get(table).value_or(Form{}).last; }
std::optional<bool> fixed_row_gradient(const Tensor& table) { return tables().get(table).value_or(Form{}).fixed; }

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("is_row_table(Tensor table) -> bool", is_row_table);
  m.def("fix_row_gradient(Tensor table, bool? row_sparse) -> ()", [](const Tensor& table, std::optional<bool> row_sparse) { tables().fix(table, row_sparse); });
  m.def("has_row_gradient(Tensor table) -> bool", has_row_gradient);
}

} // namespace xsoftmax
