#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace xsoftmax {

class MappedFile;

// catch_up_(Tensor(a!) table, bool raised=False): applies the pending updates of all rows of a
// class table. Everything that reads a whole table calls it first: eval(), exact losses, topk,
// predict, log_prob, refresh, balance, state dicts, and load_state_dict before it copies.
//
// Without pending updates it is one look-up, and changes neither the table nor its version. `table`
// may be any alias of the parameter (.data, .detach()): the registry is keyed by storage. The
// version is not bumped: a pending backward pass still runs, with the rows as they are then. On
// meta and fake tensors it does nothing. It is thread-safe. Call it with gradients disabled
// (Python: xs.optim.catch_up): otherwise torch.compile passes it a copy of the parameter, which has
// no pending updates.
//
// The step of a row optimizer registers an entry: the parameter, the state tensors, and a function
// that applies the updates. References are weak, so the entry disappears together with the
// parameter or its state. If something else has written to the parameter since (by its version),
// the pending updates no longer apply to its values: they are dropped with a warning. For state on
// a device, the host does not read whether updates are pending; the flush itself finds out. A
// parameter that moves to other memory (`module.to(...)`) is registered again by its next step.
//
// register_pending(Tensor table, Tensor[] state, str optimizer): registers an entry for state that
// was loaded or copied. optimizer: "row_adam", "row_sgd".
//
// forget_pending(Tensor[] state): removes the entry of state that is about to be replaced. Its
// pending updates are lost.

/// Applies the pending updates of all rows of `param`.
using FlushRows = void (*)(const at::Tensor& param, at::TensorList state);
/// Checks that `state` is the state of optimizer `op` for `param`.
using CheckState = void (*)(const char* op, const at::Tensor& param, at::TensorList state);

/// Registers an optimizer with pending updates for register_pending. Define one as a static object
/// in the optimizer's file.
struct RegisterPendingRule {
  RegisterPendingRule(std::string name, CheckState check, FlushRows flush);
};

void catch_up(const at::Tensor& table);
/// raised: the caller has bumped the version once, as torch.compile does for inputs that a graph
/// mutates.
void catch_up(const at::Tensor& table, bool raised);
/// Does the same without running deferred flushes (table/updates/deferred_flushes.h).
void catch_up_table(const at::Tensor& table, bool raised = false);
/// Registers a parameter whose rows may have pending updates. `state`: its first tensor counts the
/// steps (int64), its last is "pending" (table/updates/pending_steps.h).
void record_pending(const at::Tensor& param, at::TensorList state, FlushRows flush);
/// Records that a flush has applied all pending updates of `param`.
void caught_up(const at::Tensor& param, at::TensorList state);
void forget_pending(at::TensorList state);

/// Scope in which an optimizer's operator writes to its tables, whose versions it has already
/// bumped (op/guards.cpp), even if it then rejects the call. The constructor finds writes by others
/// since the last step and drops the pending updates that they invalidate; the destructor records
/// the versions with which the next step compares. Meanwhile no file of these tables is marked as
/// whole.
class TableWriteGuard {
 public:
  explicit TableWriteGuard(at::TensorList params);
  ~TableWriteGuard();
  TableWriteGuard(const TableWriteGuard&) = delete;
  TableWriteGuard& operator=(const TableWriteGuard&) = delete;

 private:
  at::TensorList params_;
  std::vector<std::shared_ptr<MappedFile>> files_;
};

} // namespace xsoftmax
