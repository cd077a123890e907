#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace xsoftmax {

class MappedFile;

// settle_(Tensor(a!) table, bool raised=False): brings every row of a class table up to date if a row optimizer owes it steps. Anything that reads a whole
// table calls it first: eval(), exact losses, topk, predict, log_prob, refresh, balance, state dicts, and load_state_dict before it copies.
// Where nothing is owed it is one look-up, and neither the table nor its version changes. `table` may be any alias of the parameter (.data,
// .detach()): debts are found by storage. Versions stay: a loss that waits for its backward pass goes on, with the rows as they are then. On meta and fake
// tensors it does nothing. Safe to call from several threads at a time. Call it where no gradients are recorded (Python: xs.optim.settle): torch.compile
// otherwise gives it a copy of a parameter, which owes nothing.
//
// A debt is what a row optimizer's step leaves behind: which parameter, the state tensors, how to make it up. It holds weak references: with
// the parameter or its state it is gone. Where others have written to the parameter since (its version tells), what is owed would move values that
// it does not belong to: it is dropped, with a warning. What state on a device says of debts is not read on the host: there it is the flush
// that finds whether anything is owed. A parameter that moves to other memory (`module.to(...)`) is found again from its next step on.
//
// register_debt(Tensor table, Tensor[] state, str optimizer): the same for state that was loaded or copied. optimizer: "row_adam", "row_sgd".
// forget_debt(Tensor[] state): what this state owed is owed no more; for state that is about to be replaced.

/// Makes up what `param` owes by `state`.
using FlushRows = void (*)(const at::Tensor& param, at::TensorList state);

void settle(const at::Tensor& table);
/// raised: the caller has raised the version by one, as torch.compile does for what a graph writes to.
void settle(const at::Tensor& table, bool raised);
/// The same without a look at flushes that were deferred (optim/deferred_flushes.h).
void settle_table(const at::Tensor& table, bool raised = false);
/// `state`: its first tensor counts the steps (int64), its last is "owed" (optim/owed_steps.h).
void record_debt(const at::Tensor& param, at::TensorList state, FlushRows flush);
/// Rows were made up by a flush of `param`.
void made_up(const at::Tensor& param, at::TensorList state);
void forget_debt(at::TensorList state);

/// While an optimizer's operator writes to its tables, whose versions it has raised (core/guards.cpp), also where it then refuses the call. What others
/// have written before is found at its begin; at its end the versions are those that the next one begins with. Meanwhile no file of theirs becomes whole.
class WriteToTables {
 public:
  explicit WriteToTables(at::TensorList params);
  ~WriteToTables();
  WriteToTables(const WriteToTables&) = delete;
  WriteToTables& operator=(const WriteToTables&) = delete;

 private:
  at::TensorList params_;
  std::vector<std::shared_ptr<MappedFile>> files_;
};

} // namespace xsoftmax
