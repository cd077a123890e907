#include "table/updates/pending_updates.h"

#include "op/host_state.h"
#include "op/operators.h"
#include "table/files/mapped_file.h"
#include "table/updates/deferred_flushes.h"
#include "table/updates/pending_steps.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <span>
#include <string>
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

// Returns the autograd version counter; 0 for inference tensors, which have none.
uint32_t version_of(const Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

struct PendingUpdates {
  WeakTensor param;
  std::vector<WeakTensor> state;
  FlushRows flush;
  uint32_t version; // version of the parameter after the optimizer's last write
  bool stepped = true; // whether a step ran since the last flush that the host has seen

  bool is(const Tensor& other_param, at::TensorList other_state) const {
    return param._unsafe_get_target() == other_param.unsafeGetTensorImpl() &&
        state.size() == other_state.size() &&
        std::equal(state.begin(), state.end(), other_state.begin(),
                   [](const WeakTensor& a, const Tensor& b) {
                     return a._unsafe_get_target() == b.unsafeGetTensorImpl();
                   });
  }
  /// Returns the parameter and its state; an undefined parameter if one of them is gone.
  std::pair<Tensor, std::vector<Tensor>> locked() const {
    std::vector<Tensor> tensors;
    std::transform(state.begin(), state.end(), std::back_inserter(tensors),
                   [](const WeakTensor& tensor) { return Tensor(tensor.lock()); });
    const bool alive = std::all_of(tensors.begin(), tensors.end(),
                                   [](const Tensor& tensor) { return tensor.defined(); });
    return {alive ? Tensor(param.lock()) : Tensor(), std::move(tensors)};
  }
  /// Returns whether updates may be pending. Always true for state on a device, where graph replays
  /// are not visible to the host.
  bool may_have_pending(at::TensorList tensors) const {
    return !tensors[0].is_cpu() ||
        tensors[0].const_data_ptr<int64_t>()[0] != PendingSteps::caught_up(tensors.back());
  }
  /// Discards the pending updates without applying them.
  void drop(at::TensorList tensors) {
    PendingSteps::clear(tensors.back(), tensors[0]);
    if (tensors[0].is_cpu() || stepped) {
      TORCH_WARN_ONCE(
          "a row optimizer's table was written to while it had pending updates, which are "
          "dropped: call the optimizer's flush() before a table is written to (or loaded) by other "
          "means than the methods of its loss");
    }
    stepped = false;
  }
  bool expired() const {
    return param.expired() || std::any_of(state.begin(), state.end(), [](const WeakTensor& tensor) {
             return tensor.expired();
           });
  }
};

// Keyed by storage. The weak reference keeps the address from being reused for another storage.
struct StorageEntry {
  WeakStorage storage;
  std::vector<PendingUpdates> pending;
};

class PendingRegistry {
 public:
  static PendingRegistry& all() {
    // Never freed: tensors of other static objects may outlive it.
    static PendingRegistry* pending = new PendingRegistry;
    return *pending;
  }

  void record(const Tensor& param, at::TensorList state, FlushRows flush) {
    const std::lock_guard lock(mutex_);
    for (PendingUpdates& known : pending_of(param)) {
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
    StorageEntry& entry =
        entries_
            .try_emplace(storage,
                         StorageEntry{WeakStorage(param.storage().getWeakStorageImpl()), {}})
            .first->second;
    PendingUpdates pending{weak(param), {}, flush, version_of(param)};
    std::transform(state.begin(), state.end(), std::back_inserter(pending.state), weak);
    entry.pending.push_back(std::move(pending));
  }

  void caught_up(const Tensor& param, at::TensorList state) {
    const std::lock_guard lock(mutex_);
    for (PendingUpdates& known : pending_of(param)) {
      known.stepped = known.stepped && !known.is(param, state);
    }
  }

  void forget(const Tensor& step) {
    const std::lock_guard lock(mutex_);
    for (auto& [storage, entry] : entries_) {
      std::erase_if(entry.pending, [&](const PendingUpdates& pending) {
        return pending.state[0]._unsafe_get_target() == step.unsafeGetTensorImpl();
      });
    }
  }

  // Drops pending updates if something else wrote since the last step: the version is then more
  // than one bump per table above the recorded one. The operator itself has bumped each of its
  // tables once, and tables that are views of one tensor share a version counter, so bumps are
  // counted per storage.
  void begin_write(at::TensorList params) {
    const std::lock_guard lock(mutex_);
    for (const Tensor& param : params) {
      const auto raised = std::count_if(params.begin(), params.end(), [&](const Tensor& other) {
        return storage_of(other) == storage_of(param);
      });
      for (PendingUpdates& pending : pending_of(param)) {
        const auto [table, state] = pending.locked();
        if (table.defined() && version_of(table) - pending.version > raised &&
            pending.may_have_pending(state)) {
          pending.drop(state);
        }
      }
    }
  }

  void end_write(at::TensorList params) {
    const std::lock_guard lock(mutex_);
    for (const Tensor& param : params) {
      for (PendingUpdates& pending : pending_of(param)) {
        if (const auto table = pending.param.lock()) {
          pending.version = version_of(Tensor(table));
        }
      }
    }
  }

  // Holds the lock throughout: if two threads read a table, the second must find it completely
  // caught up.
  void catch_up(const Tensor& table, bool raised) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(storage_of(table));
    if (found == entries_.end()) {
      return;
    }
    auto& pending = found->second.pending;
    std::erase_if(pending, [](const PendingUpdates& pending) { return pending.expired(); });
    for (PendingUpdates& pending : pending) {
      catch_up(pending, raised);
    }
    if (pending.empty()) {
      entries_.erase(found);
    }
  }

 private:
  static void catch_up(PendingUpdates& pending, bool raised) {
    const auto [param, state] = pending.locked();
    if (!param.defined() || !pending.may_have_pending(state)) {
      return;
    }
    if (version_of(param) - pending.version > uint32_t(raised)) {
      pending.drop(state);
      pending.version = version_of(param);
      return;
    }
    // Below ADInplaceOrView, so versions are not bumped: a pending backward pass still runs, with
    // the rows that have caught up.
    const at::AutoDispatchBelowADInplaceOrView guard;
    pending.flush(param, state);
    pending.version = version_of(param);
  }

  // Removes dead entries, each time the number of entries has doubled since the last sweep.
  void sweep() {
    if (entries_.size() < limit_) {
      return;
    }
    for (auto item = entries_.begin(); item != entries_.end();) {
      std::erase_if(item->second.pending,
                    [](const PendingUpdates& pending) { return pending.expired(); });
      item = item->second.pending.empty() ? entries_.erase(item) : std::next(item);
    }
    limit_ = 2 * entries_.size() + 16;
  }

  static const c10::StorageImpl* storage_of(const Tensor& tensor) {
    return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  }

  std::span<PendingUpdates> pending_of(const Tensor& table) {
    const auto found = entries_.find(storage_of(table));
    return found == entries_.end() ? std::span<PendingUpdates>()
                                   : std::span<PendingUpdates>(found->second.pending);
  }

  std::recursive_mutex mutex_; // recursive: a flush calls back into the registry
  std::unordered_map<const c10::StorageImpl*, StorageEntry> entries_;
  size_t limit_ = 16;
};

struct PendingRuleEntry {
  CheckState check;
  FlushRows flush;
};

// Registered by static objects, so it is created on first use.
std::map<std::string, PendingRuleEntry, std::less<>>& pending_rules() {
  static auto* rules = new std::map<std::string, PendingRuleEntry, std::less<>>;
  return *rules;
}

void catch_up_op(const Tensor& table, bool raised) { catch_up(table, raised); }
void catch_up_meta(const Tensor&, bool) {}

void register_pending(const Tensor& table, at::TensorList state, std::string_view optimizer) {
  const auto rule = pending_rules().find(optimizer);
  if (rule == pending_rules().end()) {
    std::string names;
    for (const auto& [name, known] : pending_rules()) {
      names += (names.empty() ? "" : " or ") + name;
    }
    TORCH_CHECK_VALUE(false, "register_pending: expected optimizer as ", names, ", got ",
                      optimizer);
  }
  rule->second.check("register_pending", table, state);
  record_pending(table, state, rule->second.flush);
}

void register_pending_meta(const Tensor&, at::TensorList, std::string_view) {}
void forget_pending_op(at::TensorList state) { forget_pending(state); }

} // namespace

RegisterPendingRule::RegisterPendingRule(std::string name, CheckState check, FlushRows flush) {
  pending_rules().emplace(std::move(name), PendingRuleEntry{check, flush});
}

void catch_up(const Tensor& table) { catch_up(table, false); }

void catch_up(const Tensor& table, bool raised) {
  catch_up_table(table, raised); // first, because `raised` refers to the current version
  run_deferred_flushes();
}

void catch_up_table(const Tensor& table, bool raised) {
  if (table.has_storage() && table.layout() == at::kStrided) {
    PendingRegistry::all().catch_up(table, raised);
  }
}

void record_pending(const Tensor& param, at::TensorList state, FlushRows flush) {
  PendingRegistry::all().record(param, state, flush);
}

void caught_up(const Tensor& param, at::TensorList state) {
  PendingRegistry::all().caught_up(param, state);
}

TableWriteGuard::TableWriteGuard(at::TensorList params) : params_(params) {
  PendingRegistry::all().begin_write(params_);
  for (const Tensor& param : params_) {
    if (MappedFile* const file = MappedFile::of(param)) {
      auto written = file->begin_write();
      std::move(written.begin(), written.end(), std::back_inserter(files_));
    }
  }
}

TableWriteGuard::~TableWriteGuard() {
  for (const auto& file : files_) {
    file->end_write();
  }
  PendingRegistry::all().end_write(params_);
}

void forget_pending(at::TensorList state) {
  if (!state.empty()) {
    PendingRegistry::all().forget(state[0]);
  }
}

// Bumps the version only of a table that it changes.
static constexpr OwnKernel kOwnKernels[] = {{"catch_up_", c10::DispatchKey::ADInplaceOrView}};

XSOFTMAX_OPERATORS(m, kOwnKernels) {
  m.def("catch_up_(Tensor(a!) table, bool raised=False) -> ()", kUsesHostState);
  m.def("register_pending(Tensor table, Tensor[] state, str optimizer) -> ()");
  m.def("forget_pending(Tensor[] state) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("catch_up_", catch_up_op);
  m.impl("register_pending", register_pending);
  m.impl("forget_pending", forget_pending_op);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("catch_up_", catch_up_meta);
  m.impl("register_pending", register_pending_meta);
}

// A table without pending updates is not changed, so autograd must not treat it as written to. If a
// table is changed, the flush marks it.
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("catch_up_", torch::CppFunction::makeFallthrough());
}

// Does not bump versions: a pending backward pass still runs.
TORCH_LIBRARY_IMPL(xsoftmax, ADInplaceOrView, m) {
  m.impl("catch_up_", torch::CppFunction::makeFallthrough());
}

} // namespace xsoftmax
