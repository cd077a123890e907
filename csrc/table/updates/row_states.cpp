#include "table/updates/row_states.h"

#include "op/checks.h"
#include "op/operators.h"
#include "table/updates/pending_table.h"

#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <unordered_map>

namespace xsoftmax {
namespace {

using at::Tensor;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct WeakState {
  std::vector<WeakTensor> state;
  double initial;

  bool is(at::TensorList other) const {
    return state.size() == other.size() &&
        std::equal(state.begin(), state.end(), other.begin(),
                   [](const WeakTensor& a, const Tensor& b) {
                     return a._unsafe_get_target() == b.unsafeGetTensorImpl();
                   });
  }
  bool expired() const {
    return std::any_of(state.begin(), state.end(),
                       [](const WeakTensor& tensor) { return tensor.expired(); });
  }
};

/// Keyed by parameter. The weak reference keeps the address from being reused for another.
struct ParamEntry {
  WeakTensor param;
  std::vector<WeakState> weak_states;
};

class States {
 public:
  static States& all() {
    static States* const states =
        new States; // never freed: tensors of static objects may outlive it
    return *states;
  }

  void record(const Tensor& param, at::TensorList state, double initial) {
    const std::lock_guard lock(mutex_);
    auto found = entries_.find(param.unsafeGetTensorImpl());
    if (found == entries_.end()) {
      sweep();
      found = entries_
                  .try_emplace(param.unsafeGetTensorImpl(),
                               ParamEntry{WeakTensor(param.getIntrusivePtr()), {}})
                  .first;
    }
    auto& weak_states = found->second.weak_states;
    const auto known = std::find_if(weak_states.begin(), weak_states.end(),
                                    [&](const WeakState& each) { return each.is(state); });
    if (known != weak_states.end()) {
      known->initial = initial;
      return;
    }
    std::erase_if(weak_states, [](const WeakState& each) { return each.expired(); });
    weak_states.push_back({{}, initial});
    std::transform(state.begin(), state.end(), std::back_inserter(weak_states.back().state),
                   [](const Tensor& tensor) { return WeakTensor(tensor.getIntrusivePtr()); });
  }

  std::vector<RowState> of(const Tensor& param) {
    const std::lock_guard lock(mutex_);
    std::vector<RowState> states;
    if (const auto found = entries_.find(param.unsafeGetTensorImpl()); found != entries_.end()) {
      for (const WeakState& weak_state : found->second.weak_states) {
        RowState state{{}, weak_state.initial};
        std::transform(weak_state.state.begin(), weak_state.state.end(),
                       std::back_inserter(state.tensors),
                       [](const WeakTensor& tensor) { return Tensor(tensor.lock()); });
        if (std::all_of(state.tensors.begin(), state.tensors.end(),
                        [](const Tensor& tensor) { return tensor.defined(); })) {
          states.push_back(std::move(state));
        }
      }
    }
    return states;
  }

 private:
  // Removes dead entries, each time the number of entries has doubled since the last sweep.
  void sweep() {
    if (entries_.size() >= limit_) {
      for (auto item = entries_.begin(); item != entries_.end();) {
        auto& [param, weak_states] = item->second;
        std::erase_if(weak_states, [](const WeakState& each) { return each.expired(); });
        item = weak_states.empty() || param.expired() ? entries_.erase(item) : std::next(item);
      }
      limit_ = 2 * entries_.size() + 16;
    }
  }

  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, ParamEntry> entries_;
  size_t limit_ = 16;
};

void check_register(at::TensorList state) {
  TORCH_CHECK_VALUE(
      !state.empty() && state[0].dim() == 0,
      "register_row_state: expected the tensors of an optimizer's state, the first of which counts "
      "its steps, got ",
      state.size(), " tensors");
}

void register_row_state(const Tensor& table, at::TensorList state, double initial) {
  check_register(state);
  record_row_state(table, state, initial);
}

} // namespace

Tensor RowState::pending() const {
  const Tensor& last = tensors.back();
  const bool counts = std::any_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) {
    return tensor.scalar_type() == at::kInt;
  });
  return counts && last.scalar_type() == at::kDouble && last.dim() == 1 &&
          last.numel() > PendingTable::kHeader
      ? last
      : Tensor();
}

std::vector<Tensor> RowState::row_tensors(const Tensor& table) const {
  std::vector<Tensor> rows;
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(rows),
               [&, pending = pending()](const Tensor& tensor) {
                 return tensor.dim() >= 1 && tensor.size(0) == table.size(0) &&
                     (tensor.dim() == 1 || tensor.sizes() == table.sizes()) &&
                     !tensor.is_same(pending);
               });
  return rows;
}

void record_row_state(const Tensor& param, at::TensorList state, double initial) {
  States::all().record(param, state, initial);
}

std::vector<RowState> row_states_of(const Tensor& param) { return States::all().of(param); }

XSOFTMAX_OPERATORS(m) {
  m.def("register_row_state(Tensor table, Tensor[] state, float initial=0) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("register_row_state", register_row_state);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("register_row_state",
         [](const Tensor&, at::TensorList state, double) { check_register(state); });
}

} // namespace xsoftmax
