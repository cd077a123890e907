#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace xsoftmax {

// A registry of the state tensors that row optimizers keep for a parameter, in any language. Each
// step records them; register_row_state(Tensor table, Tensor[] state, float initial=0) records
// state that was loaded or copied. References are weak, so an entry disappears together with the
// parameter or the state.

/// The state tensors that one optimizer keeps for a parameter, in the order of its operators, and
/// the initial value of a new row's state (except `last_step`).
struct RowState {
  std::vector<at::Tensor> tensors;
  double initial;

  /// Returns the tensor of pending steps (table/updates/pending_steps.h); undefined if there is
  /// none.
  at::Tensor pending() const;
  /// Returns the tensors with one row per row of the table. An int32 tensor is `last_step`: new
  /// rows have no pending updates, so they start with the current step.
  std::vector<at::Tensor> row_tensors(const at::Tensor& table) const;
};

void record_row_state(const at::Tensor& param, at::TensorList state, double initial);
std::vector<RowState> row_states_of(const at::Tensor& param);

} // namespace xsoftmax
