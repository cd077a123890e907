#pragma once

#include "table/files/mapped_file.h"
#include "table/updates/pending_steps.h"
#include "table/updates/pending_updates.h"

namespace xsoftmax {

/// Shared by optimizers with pending updates, those of the steps in which a row had no gradient.
/// The first tensor of their state counts the steps, the last is `pending`. Rule has
///
///     ratio_of(coefficients)     r of PendingSteps
///     catch_up_rows(param, state, pending, step, rebase, kernel)
///                                updates all rows and, if `rebase`, also their state
template <typename Rule>
struct PendingRule {
  /// Returns the pending steps, ready for a step under these coefficients. Catches up all rows
  /// first if the coefficients change or the table of steps is full.
  static PendingSteps ready(const at::Tensor& param, at::TensorList state,
                            const PendingSteps::Coefficients& coefficients, bool kernel) {
    if (PendingSteps::coefficients(state.back()) != coefficients) {
      catch_up(param, state, coefficients, /*rebase=*/true, kernel);
    } else if (PendingSteps::is_full(state.back(), step_of(state))) {
      flush(param, state, kernel);
    }
    return PendingSteps(state.back(), step_of(state), Rule::ratio_of(coefficients));
  }

  static void flush(const at::Tensor& param, at::TensorList state, bool kernel) {
    catch_up(param, state, PendingSteps::coefficients(state.back()), /*rebase=*/false, kernel);
  }

 private:
  static int64_t step_of(at::TensorList state) { return state[0].const_data_ptr<int64_t>()[0]; }

  // next: coefficients of the following steps
  static void catch_up(const at::Tensor& param, at::TensorList state,
                       const PendingSteps::Coefficients& next, bool rebase, bool kernel) {
    const int64_t step = step_of(state);
    PendingSteps pending(state.back(), step,
                         Rule::ratio_of(PendingSteps::coefficients(state.back())));
    if (!pending.empty() || (rebase && step > 0)) {
      table_changes(param);
      Rule::catch_up_rows(param, state, pending, step, rebase, kernel);
    }
    pending.clear(step, next);
  }
};

} // namespace xsoftmax
