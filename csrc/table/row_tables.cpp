#include "table/row_tables.h"

#include "op/operators.h"
#include "op/shape_checks.h"
#include "op/weak_map.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>

#include <mutex>

namespace xsoftmax {
namespace {

using at::Tensor;

struct Form { // form of the gradient of a table; true: row-sparse
  bool last = false;
  std::optional<bool> fixed = std::nullopt;
};

class Tables {
 public:
  void add(const Tensor& table) {
    const std::lock_guard lock(mutex_);
    entry(table);
  }

  void fix(const Tensor& table, std::optional<bool> row_sparse) {
    const std::lock_guard lock(mutex_);
    entry(table).fixed = row_sparse;
  }

  void set(const Tensor& table, bool row_gradient) {
    const std::lock_guard lock(mutex_);
    if (Form* const form = forms_.find(table.unsafeGetTensorImpl())) {
      form->last = row_gradient;
    }
  }

  std::optional<Form> get(const Tensor& table) {
    const std::lock_guard lock(mutex_);
    const Form* const form = forms_.find(table.unsafeGetTensorImpl());
    return form == nullptr ? std::nullopt : std::optional(*form);
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  Form& entry(const Tensor& table) {
    Form* const form = forms_.find(table.unsafeGetTensorImpl());
    return form != nullptr
        ? *form
        : forms_.insert_or_assign(table.unsafeGetTensorImpl(), Weak(table.getIntrusivePtr()), {});
  }

  std::mutex mutex_;
  WeakMap<Weak, Form> forms_;
};

Tables& tables() {
  static auto* const all = new Tables(); // never freed: tensors may outlive static destructors
  return *all;
}

} // namespace

void register_row_tables(std::optional<bool> sparse_grad, const Tensor& weight,
                         const OptionalTensor& bias) {
  if (!sparse_grad.value_or(true) || !at::GradMode::is_enabled()) {
    return;
  }
  for (const Tensor* table : {&weight, is_defined(bias) ? &*bias : nullptr}) {
    if (table != nullptr && table->requires_grad() && table->is_leaf() && check::is_plain(*table)) {
      tables().add(*table);
    }
  }
}

void set_row_gradient(const Tensor& table, bool row_sparse) { tables().set(table, row_sparse); }
bool is_row_table(const Tensor& table) { return tables().get(table).has_value(); }
bool has_row_gradient(const Tensor& table) { return tables().get(table).value_or(Form{}).last; }
std::optional<bool> fixed_row_gradient(const Tensor& table) {
  return tables().get(table).value_or(Form{}).fixed;
}

XSOFTMAX_OPERATORS(m) {
  m.def("is_row_table(Tensor table) -> bool", is_row_table);
  m.def(
      "fix_row_gradient(Tensor table, bool? row_sparse) -> ()",
      [](const Tensor& table, std::optional<bool> row_sparse) { tables().fix(table, row_sparse); });
  m.def("has_row_gradient(Tensor table) -> bool", has_row_gradient);
}

} // namespace xsoftmax
