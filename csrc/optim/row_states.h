#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace xsoftmax {

// Which tensors row optimizers keep for a parameter, whatever language they live in: each step says so, and what is loaded or copied by
// register_row_state(Tensor table, Tensor[] state, float initial=0). References are weak: with the parameter or the state an entry is gone.

/// The tensors of state that one optimizer keeps for a parameter, in the order of its operators, and with what those of its rows begin (beside `last_step`).
struct RowState {
  std::vector<at::Tensor> tensors;
  double initial;

  /// The steps that rows may owe (optim/owed_steps.h); undefined: they owe none.
  at::Tensor owed() const;
  /// Those with a row for each of the table's. An int32 one is `last_step`: rows that begin owe nothing of the steps before, so it begins with the step.
  std::vector<at::Tensor> of_rows(const at::Tensor& table) const;
};

void record_row_state(const at::Tensor& param, at::TensorList state, double initial);
std::vector<RowState> row_states_of(const at::Tensor& param);

} // namespace xsoftmax
