#pragma once

#include "core/mapped_file.h"
#include "optim/owed_steps.h"
#include "optim/settle.h"

namespace xsoftmax {

/// What optimizers share whose rows owe the steps in which they have no gradient. State: the count of steps first, "owed" last. Rule has
///     ratio_of(coefficients)                          r of OwedSteps
///     make_up_rows(param, state, owed, step, rebase, kernel)  all rows; rebase: their state as well
template <typename Rule>
struct OwingRule {
  /// What rows owe by, before a step under these coefficients.
  static OwedSteps ready(const at::Tensor& param, at::TensorList state, const OwedSteps::Coefficients& coefficients, bool kernel) {
    if (OwedSteps::coefficients(state.back()) != coefficients) {
      make_up(param, state, coefficients, /*rebase=*/true, kernel);
    } else if (OwedSteps::full(state.back(), step_of(state))) {
      flush(param, state, kernel);
    }
    return OwedSteps(state.back(), step_of(state), Rule::ratio_of(coefficients));
  }

  static void flush(const at::Tensor& param, at::TensorList state, bool kernel) {
    make_up(param, state, OwedSteps::coefficients(state.back()), /*rebase=*/false, kernel);
  }

 private:
  static int64_t step_of(at::TensorList state) { return state[0].const_data_ptr<int64_t>()[0]; }

  // next: of the steps to come.
  static void make_up(const at::Tensor& param, at::TensorList state, const OwedSteps::Coefficients& next, bool rebase, bool kernel) {
    const int64_t step = step_of(state);
    OwedSteps owed(state.back(), step, Rule::ratio_of(OwedSteps::coefficients(state.back())));
    if (!owed.empty() || (rebase && step > 0)) {
      table_changes(param);
      Rule::make_up_rows(param, state, owed, step, rebase, kernel);
    }
    owed.settle(step, next);
  }
};

} // namespace xsoftmax
