#include "optim/settle.h"

#include "core/host_state.h"
#include "core/mapped_file.h"
#include "optim/deferred_flushes.h"
#include "optim/owed_steps.h"
#include "optim/row_adam.h"
#include "optim/row_sgd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

WeakTensor weak(const Tensor& tensor) { return WeakTensor(tensor.getIntrusivePtr()); }

// How often a tensor was written to, by whoever; 0 where nobody counts (inference tensors).
uint32_t version_of(const Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

struct Debt {
  WeakTensor param;
  std::vector<WeakTensor> state;
  FlushRows flush;
  uint32_t version; // of the parameter when its optimizer was done
  bool stepped = true; // since the last flush, as far as the host has seen

  bool is(const Tensor& other_param, at::TensorList other_state) const {
    return param._unsafe_get_target() == other_param.unsafeGetTensorImpl() && state.size() == other_state.size() &&
        std::equal(state.begin(), state.end(), other_state.begin(),
                   [](const WeakTensor& a, const Tensor& b) { return a._unsafe_get_target() == b.unsafeGetTensorImpl(); });
  }
  /// Parameter and state, or an undefined parameter where one of them is gone.
  std::pair<Tensor, std::vector<Tensor>> locked() const {
    std::vector<Tensor> tensors;
    std::transform(state.begin(), state.end(), std::back_inserter(tensors), [](const WeakTensor& tensor) { return Tensor(tensor.lock()); });
    const bool alive = std::all_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) { return tensor.defined(); });
    return {alive ? Tensor(param.lock()) : Tensor(), std::move(tensors)};
  }
  /// Whether rows may owe steps; of state on a device, where graphs are replayed unseen, nothing is known.
  bool may_owe(at::TensorList tensors) const { return !tensors[0].is_cpu() || tensors[0].const_data_ptr<int64_t>()[0] != OwedSteps::settled(tensors.back()); }
  /// Nothing is owed any more, and nothing is made up.
  void drop(at::TensorList tensors) {
    OwedSteps::settle(tensors.back(), tensors[0]);
    if (tensors[0].is_cpu() || stepped) {
      TORCH_WARN_ONCE(
          "a row optimizer's table was written to while rows owed steps, which are dropped: call the optimizer's flush() before a table "
          "is written to (or loaded) by other means than the methods of its loss");
    }
    stepped = false;
  }
  bool dead() const {
    return param.expired() || std::any_of(state.begin(), state.end(), [](const WeakTensor& tensor) { return tensor.expired(); });
  }
};

// By storage. The weak reference keeps the address from being given to another storage.
struct Entry {
  WeakStorage storage;
  std::vector<Debt> debts;
};

class Debts {
 public:
  static Debts& all() {
    static Debts* debts = new Debts; // outlives the tensors of other static objects
    return *debts;
  }

  void record(const Tensor& param, at::TensorList state, FlushRows flush) {
    const std::lock_guard lock(mutex_);
    for (Debt& known : debts_of(param)) {
      if (known.is(param, state)) {
        known.version = version_of(param);
        known.stepped = true;
        return;
      }
    }
    const auto* storage = storage_of(param);
    if (!entries_.contains(storage)) {
      sweep();
    }
    Entry& entry = entries_.try_emplace(storage, Entry{WeakStorage(param.storage().getWeakStorageImpl()), {}}).first->second;
    Debt debt{weak(param), {}, flush, version_of(param)};
    std::transform(state.begin(), state.end(), std::back_inserter(debt.state), weak);
    entry.debts.push_back(std::move(debt));
  }

  void made_up(const Tensor& param, at::TensorList state) {
    const std::lock_guard lock(mutex_);
    for (Debt& known : debts_of(param)) {
      known.stepped = known.stepped && !known.is(param, state);
    }
  }

  void forget(const Tensor& step) {
    const std::lock_guard lock(mutex_);
    for (auto& [storage, entry] : entries_) {
      std::erase_if(entry.debts, [&](const Debt& debt) { return debt.state[0]._unsafe_get_target() == step.unsafeGetTensorImpl(); });
    }
  }

  // What others wrote since an optimizer was done, beyond what the operator itself has raised: once for each of its tables. Tables that are views
  // of one tensor count their versions together, so those of a storage are looked at together.
  void begin_write(at::TensorList params) {
    const std::lock_guard lock(mutex_);
    for (const Tensor& param : params) {
      const auto raised = std::count_if(params.begin(), params.end(), [&](const Tensor& other) { return storage_of(other) == storage_of(param); });
      for (Debt& debt : debts_of(param)) {
        const auto [table, state] = debt.locked();
        if (table.defined() && version_of(table) - debt.version > raised && debt.may_owe(state)) {
          debt.drop(state);
        }
      }
    }
  }

  void end_write(at::TensorList params) {
    const std::lock_guard lock(mutex_);
    for (const Tensor& param : params) {
      for (Debt& debt : debts_of(param)) {
        if (const auto table = debt.param.lock()) {
          debt.version = version_of(Tensor(table));
        }
      }
    }
  }

  // Under the lock throughout: of two threads that read a table, the second must find it made up, not half.
  void settle(const Tensor& table, bool raised) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(storage_of(table));
    if (found == entries_.end()) {
      return;
    }
    auto& debts = found->second.debts;
    std::erase_if(debts, [](const Debt& debt) { return debt.dead(); });
    for (Debt& debt : debts) {
      make_up(debt, raised);
    }
    if (debts.empty()) {
      entries_.erase(found);
    }
  }

 private:
  static void make_up(Debt& debt, bool raised) {
    const auto [param, state] = debt.locked();
    if (!param.defined() || !debt.may_owe(state)) {
      return;
    }
    if (version_of(param) - debt.version > uint32_t(raised)) {
      debt.drop(state);
      debt.version = version_of(param);
      return;
    }
    // Below the key that raises versions: a loss that waits for its backward pass goes on, with the rows as they are brought up to date.
    const at::AutoDispatchBelowADInplaceOrView guard;
    debt.flush(param, state);
    debt.version = version_of(param);
  }

  // Removes what is gone whenever as many entries have come as had been left.
  void sweep() {
    if (entries_.size() < limit_) {
      return;
    }
    for (auto item = entries_.begin(); item != entries_.end();) {
      std::erase_if(item->second.debts, [](const Debt& debt) { return debt.dead(); });
      item = item->second.debts.empty() ? entries_.erase(item) : std::next(item);
    }
    limit_ = 2 * entries_.size() + 16;
  }

  static const c10::StorageImpl* storage_of(const Tensor& tensor) { return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr; }

  std::span<Debt> debts_of(const Tensor& table) {
    const auto found = entries_.find(storage_of(table));
    return found == entries_.end() ? std::span<Debt>() : std::span<Debt>(found->second.debts);
  }

  std::recursive_mutex mutex_; // what makes rows up comes back here
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
  size_t limit_ = 16;
};

void settle_op(const Tensor& table, bool raised) { settle(table, raised); }
void settle_meta(const Tensor&, bool) {}

void register_debt(const Tensor& table, at::TensorList state, std::string_view optimizer) {
  const bool adam = optimizer == "row_adam";
  TORCH_CHECK_VALUE(adam || optimizer == "row_sgd", "register_debt: expected optimizer as row_adam or row_sgd, got ", optimizer);
  if (adam) {
    check_row_adam_state("register_debt", table, state);
  } else {
    check_row_sgd_state("register_debt", table, state);
  }
  record_debt(table, state, adam ? flush_row_adam : flush_row_sgd);
}

void register_debt_meta(const Tensor&, at::TensorList, std::string_view) {}
void forget_debt_op(at::TensorList state) { forget_debt(state); }

} // namespace

void settle(const Tensor& table) { settle(table, false); }

void settle(const Tensor& table, bool raised) {
  settle_table(table, raised); // first: `raised` is of its version
  settle_deferred();
}

void settle_table(const Tensor& table, bool raised) {
  if (table.has_storage() && table.layout() == at::kStrided) {
    Debts::all().settle(table, raised);
  }
}

void record_debt(const Tensor& param, at::TensorList state, FlushRows flush) { Debts::all().record(param, state, flush); }

void made_up(const Tensor& param, at::TensorList state) { Debts::all().made_up(param, state); }

WriteToTables::WriteToTables(at::TensorList params) : params_(params) {
  Debts::all().begin_write(params_);
  for (const Tensor& param : params_) {
    if (MappedFile* const file = MappedFile::of(param)) {
      auto written = file->begin_write();
      std::move(written.begin(), written.end(), std::back_inserter(files_));
    }
  }
}

WriteToTables::~WriteToTables() {
  for (const auto& file : files_) {
    file->end_write();
  }
  Debts::all().end_write(params_);
}

void forget_debt(at::TensorList state) {
  if (!state.empty()) {
    Debts::all().forget(state[0]);
  }
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("settle_(Tensor(a!) table, bool raised=False) -> ()", kUsesHostState);
  m.def("register_debt(Tensor table, Tensor[] state, str optimizer) -> ()");
  m.def("forget_debt(Tensor[] state) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("settle_", settle_op);
  m.impl("register_debt", register_debt);
  m.impl("forget_debt", forget_debt_op);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("settle_", settle_meta);
  m.impl("register_debt", register_debt_meta);
}

// A table that owes nothing is not changed, so autograd must not take it for written. Where it is changed, the flush says so.
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) { m.impl("settle_", torch::CppFunction::makeFallthrough()); }

// Nor does it raise versions: a waiting backward pass goes on.
TORCH_LIBRARY_IMPL(xsoftmax, ADInplaceOrView, m) { m.impl("settle_", torch::CppFunction::makeFallthrough()); }

} // namespace xsoftmax
