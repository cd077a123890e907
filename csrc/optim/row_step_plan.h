#pragma once

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/host_state.h"
#include "cpu/impl.h"
#include "table/files/mapped_file.h"
#include "op/operators.h"
#include "op/optional.h"
#include "op/options.h"
#include "optim/mapped_state.h"
#include "table/updates/row_states.h"
#include "optim/row_update.h"
#include "table/updates/pending_updates.h"
#include "optim/sparse_gradient.h"
#include "table/row_terms.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <xsoftmax/optim.h>

#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

// One operator performs one optimizer step over all parameters:
//
//     row_adam_step_(Tensor(a!)[] params, Tensor?[] rows, Tensor[] values, Tensor(b!)[] state,
//                    str[] options, int[] counts, Tensor[]? lrs=None) -> ()
//
//     params     the parameters that have a gradient, one group after the other
//     rows       int64 [R] for a row-sparse gradient; none for a dense or sparse COO gradient
//     values     [R, D] or [R] for a row-sparse gradient; otherwise a dense gradient in param's
//                shape, or a gradient that is sparse COO in dimension 0 only
//     state      the concatenated states of the parameters, as row_adam_state returned them;
//                updated in place
//     options    one text per group (op/options.h; fields: RowAdamOptions in xsoftmax/optim.h)
//     counts     the number of params in each group
//     lrs        one learning rate per group, a floating-point tensor with one element, which
//                replaces the one in options. It may be on the CPU, where it is read immediately,
//                or on the device of the group's params, where kernels read it and its value is
//                not checked
//
// row_sgd_step_ and row_adagrad_step_ have the same form. All arguments are checked before the
// first parameter is changed, so a step that raises an error changes nothing. Errors: see
// xsoftmax/optim.h.
//
//     row_adam_state(Tensor param, bool rows, str options) -> Tensor[]
//
// creates the state of a parameter before its first step, for row-sparse (`rows`) or dense
// gradients. All tensors are on param's device. The first tensor counts the steps: int64 [] for row
// state, float32 [] for dense state, as in torch.optim. Its dtype tells the two kinds of state
// apart. Afterwards, either kind accepts both kinds of gradient.
//
//     row_adam_flush_(Tensor(a!) param, Tensor(b!)[] state) -> ()
//
// applies the pending updates of all rows, in O(N). With the same gradients, training continues as
// if the flush had not been called, up to rounding. Does nothing for dense state, or if no step was
// taken since the last flush.
//
//     row_adam_rows_(Tensor(a!) param, Tensor(b!)[] state, Tensor rows, Tensor values,
//                    str options, Tensor? lr=None) -> ()
//
// is the part of row_adam_step_ that runs for each parameter with row state, after all have been
// checked. Called on its own, it does not register pending updates for catch_up_. This operator and
// the flush have a kernel per device. The CUDA kernel reads no state on the host: each replay of a
// captured CUDA graph takes the next step, with the options at capture and the current value of the
// learning rate tensor.
//
//     row_adam_terms_(Tensor(a!) param, Tensor(b!)[] state, Tensor rows, Tensor sources,
//                     Tensor coefficients, Tensor input, str options, Tensor? lr=None) -> ()
//
// takes a step for one table with row state, whose gradient is given as terms (table/row_terms.h).
// A CUDA kernel reads the terms directly; elsewhere they are expanded to values first.
//
//     row_adam_check_terms(Tensor param, Tensor[] state, Tensor rows, Tensor sources,
//                          Tensor coefficients, Tensor input, str options, Tensor? lr=None) -> ()
//
// raises what row_adam_terms_ would raise and changes nothing. A step over several tables checks
// all of them first.

namespace xsoftmax {

/// One parameter's part of a step.
template <typename Options>
struct ParamStep {
  at::Tensor param;
  OptionalTensor rows;
  at::Tensor values;
  at::TensorList state;
  const Options* options;
  size_t group = 0;
  /// Replaces the learning rate of the options if it is on the param's device; not read on the
  /// host.
  OptionalTensor lr = std::nullopt;
};

/// Learning rates of the groups, as operators receive them.
using LearningRates = std::optional<std::vector<at::Tensor>>;
using RowStep = void(at::TensorList, const c10::List<std::optional<at::Tensor>>&, at::TensorList,
                     at::TensorList, const c10::List<std::string>&, at::IntArrayRef,
                     const LearningRates&);

/// Requirements on the type Rule, which describes an optimizer by static members:
///
///     Options                              the options struct
///     kName, kStep, kRows, kState, kFlush  names of its class and its operators
///     kRowState, kDenseState               number of state tensors
///     new_state(param, rows, options)      returns the new state tensors
///     check_rows(op, param, state), check_dense(...)
///                                          check shapes and dtypes of the state
///     check_step(step)                     checks more options of row steps than options.check()
///     fits_kernel(param, state)            whether kernels support the tensors' strides
///     kHostState                           which state step_rows and flush read on the host
///     kNames                               names of the tensors of row state
///     step_rows(step, kernel), flush(param, state, kernel)
///                                          update row state, by CPU kernels or ATen calls
///     record(param, state, options)        registers the pending updates that a row step leaves
///     step_dense(steps, fused)             steps parameters of one group, device and dtype,
///                                          by torch's fused kernel or one by one
///     can_fuse(param)                      whether the fused kernel supports the parameter
template <typename Rule>
using StepOf = ParamStep<typename Rule::Options>;

inline bool has_row_state(at::TensorList state) { return state[0].scalar_type() == at::kLong; }
/// Checks that `step` is int64 [] on param's device.
void check_row_step(const char* op, const at::Tensor& step, const at::Tensor& param);
void check_dense_step(const char* op, const at::Tensor& step);
/// Checks that a dense gradient fits its parameter.
void check_dense_gradient(const char* op, const at::Tensor& param, const at::Tensor& grad);
/// Checks that dense state has param's shape and dtype.
void check_dense_state(const char* op, const char* arg, const at::Tensor& state,
                       const at::Tensor& param);
/// Returns whether torch's fused kernels support the parameter. They assume dense memory, and in
/// torch 2.13 the fused SGD kernel for the CPU is wrong for 16-bit parameters with 16 or more
/// elements.
bool can_fuse_dense(const at::Tensor& param, at::TensorList state);
/// Returns the gradient of param as a dense tensor, from values [R, ...] for rows.
at::Tensor dense_gradient(const at::Tensor& param, const OptionalTensor& rows,
                          const at::Tensor& values);
/// Returns the step counter of a new state.
at::Tensor new_step(const at::Tensor& param, bool rows);
at::Tensor all_rows(const at::Tensor& param);
/// Checks that `lr` is a floating-point tensor with one element, on the CPU or on param's device.
void check_learning_rate(const char* op, const at::Tensor& lr, const at::Tensor& param);
/// Returns whether a learning rate is on the CPU and has a value (a fake tensor has none).
inline bool is_on_host(const at::Tensor& lr) {
  return lr.is_cpu() && !lr.unsafeGetTensorImpl()->is_python_dispatch();
}
/// Returns the value of a learning rate on the CPU.
double read_learning_rate(const at::Tensor& lr);
/// Returns the learning rate as a 0-dim tensor, for ATen calls.
inline at::Tensor scalar_of(const at::Tensor& lr) { return lr.dim() == 0 ? lr : lr.reshape({}); }
void check_lengths(const char* op, size_t params, size_t rows, size_t values, size_t options,
                   at::IntArrayRef counts);
[[noreturn]] void report_wrong_state(const char* op, size_t param, size_t expected, size_t got);

template <typename Rule>
void check_param(const char* op, const StepOf<Rule>& step) {
  const bool rows = has_row_state(step.state);
  if (is_defined(step.rows)) {
    check_row_gradient(op, step.param, *step.rows, step.values);
  } else {
    check_row_param(op, step.param, rows);
    check_dense_gradient(op, step.param, step.values);
  }
  if (rows) {
    check_row_step(op, step.state[0], step.param);
    Rule::check_rows(op, step.param, step.state);
    Rule::check_step(step);
  } else {
    check_dense_step(op, step.state[0]);
    Rule::check_dense(op, step.param, step.state);
  }
}

/// Returns the gradient to descend: negated if "maximize" is set.
template <typename Options>
at::Tensor descent_of(const Options& options, const at::Tensor& values) {
  return options.maximize() ? values.neg() : values;
}

/// Returns one parameter's part of a step. Its gradient may be a sparse tensor.
template <typename Rule>
StepOf<Rule> part_of_step(const at::Tensor& param, OptionalTensor rows, const at::Tensor& values,
                          at::TensorList state, const typename Rule::Options& options, size_t group,
                          const LearningRates& lrs) {
  StepOf<Rule> step{param, std::move(rows), values, state, &options, group};
  if (!is_defined(step.rows) && values.layout() != at::kStrided) {
    TORCH_CHECK(param.dim() <= 2, Rule::kName,
                ": expected a parameter with 1 or 2 dimensions for a sparse gradient, got shape ",
                param.sym_sizes());
    std::tie(step.rows, step.values) = sparse_gradient(Rule::kName, values);
  }
  if (lrs.has_value()) {
    const at::Tensor& lr = (*lrs)[group];
    check_learning_rate(Rule::kStep, lr, param);
    step.lr = lr.is_cpu() ? std::nullopt : OptionalTensor(lr);
  }
  return step;
}

/// Splits a step into its parameters and checks them.
template <typename Rule>
std::vector<StepOf<Rule>> plan_step(at::TensorList params,
                                    const c10::List<std::optional<at::Tensor>>& rows,
                                    at::TensorList values, at::TensorList state,
                                    const std::vector<typename Rule::Options>& options,
                                    at::IntArrayRef counts, const LearningRates& lrs) {
  check_lengths(Rule::kStep, params.size(), rows.size(), values.size(), options.size(), counts);
  std::vector<StepOf<Rule>> steps;
  steps.reserve(params.size());
  size_t at = 0;
  for (size_t group = 0; group < options.size(); ++group) {
    options[group].check();
    for (int64_t j = 0; j < counts[group]; ++j) {
      const size_t i = steps.size(), left = state.size() - at;
      const size_t size =
          left > 0 && has_row_state(state.slice(at)) ? Rule::kRowState : Rule::kDenseState;
      if (size > left) {
        report_wrong_state(Rule::kStep, i, size, left);
      }
      steps.push_back(part_of_step<Rule>(params[i], rows.get(i), values[i], state.slice(at, size),
                                         options[group], group, lrs));
      check_param<Rule>(Rule::kStep, steps.back());
      at += size;
    }
  }
  if (at != state.size()) {
    report_wrong_state(Rule::kStep, params.size(), 0, state.size() - at);
  }
  return steps;
}

/// Parses the options of each group and fills in the learning rates that are on the CPU.
template <typename Rule>
std::vector<typename Rule::Options> group_options(const c10::List<std::string>& texts,
                                                  const LearningRates& lrs) {
  TORCH_CHECK_VALUE(!lrs.has_value() || lrs->size() == texts.size(), Rule::kStep,
                    ": expected lrs of each of ", texts.size(), " groups, got ",
                    lrs.has_value() ? lrs->size() : 0);
  std::vector<typename Rule::Options> options;
  for (size_t i = 0; i < texts.size(); ++i) {
    options.push_back(parse_options<typename Rule::Options>(Rule::kStep, texts.get(i)));
    if (lrs.has_value() && is_on_host((*lrs)[i])) {
      check_learning_rate(Rule::kStep, (*lrs)[i], (*lrs)[i]);
      options.back().lr(read_learning_rate((*lrs)[i]));
    }
  }
  return options;
}

template <typename Rule>
void row_step_meta(at::TensorList params, const c10::List<std::optional<at::Tensor>>& rows,
                   at::TensorList values, at::TensorList state, const c10::List<std::string>& texts,
                   at::IntArrayRef counts, const LearningRates& lrs) {
  const auto options = group_options<Rule>(texts, lrs);
  plan_step<Rule>(params, rows, values, state, options, counts, lrs);
}

/// Parses the options of a row_adam_rows_ call. Fills in the learning rate if it is on the CPU or,
/// with `reads`, on any device.
template <typename Rule>
typename Rule::Options rows_options(std::string_view text, const OptionalTensor& lr,
                                    const at::Tensor& param, bool reads) {
  auto options = parse_options<typename Rule::Options>(Rule::kRows, text);
  if (is_defined(lr)) {
    check_learning_rate(Rule::kRows, *lr, param);
    if (is_on_host(*lr) || reads) {
      options.lr(read_learning_rate(lr->is_cpu() ? *lr : lr->cpu()));
    }
  }
  return options;
}

/// Checks a row_adam_rows_ call and returns its step.
template <typename Rule>
StepOf<Rule> plan_rows(const at::Tensor& param, at::TensorList state, const at::Tensor& rows,
                       const at::Tensor& values, const typename Rule::Options& options) {
  if (state.size() != Rule::kRowState) {
    report_wrong_state(Rule::kRows, 0, Rule::kRowState, state.size());
  }
  options.check();
  check_row_step(Rule::kRows, state[0], param);
  StepOf<Rule> step{param, rows, values, state, &options};
  check_param<Rule>(Rule::kRows, step);
  return step;
}

} // namespace xsoftmax
