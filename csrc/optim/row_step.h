#pragma once

#include "core/checks.h"
#include "core/dtypes.h"
#include "core/host_state.h"
#include "core/impl.h"
#include "core/mapped_file.h"
#include "core/optional.h"
#include "core/options.h"
#include "optim/mapped_state.h"
#include "optim/row_states.h"
#include "optim/row_update.h"
#include "optim/settle.h"
#include "optim/sparse_gradient.h"
#include "scores/row_terms.h"

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

// One operator is one step of an optimizer, over all its parameters:
//
//     row_adam_step_(Tensor(a!)[] params, Tensor?[] rows, Tensor[] values, Tensor(b!)[] state, str[] options, int[] counts,
//                    Tensor[]? lrs=None) -> ()
//
//     params     those that have a gradient, a group after the other
//     rows       int64 [R] of a row-sparse gradient; none for a dense one and for a sparse COO tensor
//     values     [R, D] or [R]; a dense gradient in param's shape; a gradient that is sparse COO in dimension 0 alone
//     state      the state of each parameter on end, as row_adam_state made it; changed in place
//     options    of each group (core/options.h; fields: RowAdamOptions in xsoftmax/optim.h), counts: its number of params
//     lrs        the learning rate of each group, floating, of one element, in the place of that of options: on the CPU, where it is
//                read at once, or on the device of the group's params, where kernels read it and nobody checks its value
//
// row_sgd_step_ and row_adagrad_step_ likewise. Everything is checked before the first parameter is changed: a step that is refused changes
// nothing. Errors as in xsoftmax/optim.h.
//
//     row_adam_state(Tensor param, bool rows, str options) -> Tensor[]
//
// makes the state of a parameter before its first step, for rows or for dense gradients, all of it on param's device. Its first tensor counts
// the steps: int64 [] for rows, float32 [] for dense gradients, as torch.optim has it. That tells the two kinds apart. Either kind takes
// both kinds of gradient afterwards.
//
//     row_adam_flush_(Tensor(a!) param, Tensor(b!)[] state) -> ()
//
// makes up all that rows owe, in O(N). Given the same gradients, training goes on as if it had not been called, up to rounding. Nothing happens for dense
// state, or where no step was taken since the last.
//
//     row_adam_rows_(Tensor(a!) param, Tensor(b!)[] state, Tensor rows, Tensor values, str options, Tensor? lr=None) -> ()
//
// is what row_adam_step_ does for each parameter with state for rows, when all are checked. By itself it leaves no debt for settle_ to find.
// It and the flush have a kernel for each device. That for CUDA reads no state on the host: a step that a graph has captured is the next step
// whenever it is replayed, under the options that it was captured with and the learning rate that its tensor then has.
//
//     row_adam_terms_(Tensor(a!) param, Tensor(b!)[] state, Tensor rows, Tensor sources, Tensor coefficients, Tensor input, str options,
//                     Tensor? lr=None) -> ()
//
// is a step of one table with state for rows, whose gradient is the terms of scores/row_terms.h. A CUDA kernel reads the terms; elsewhere they are written out
// first.

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
  OptionalTensor lr = std::nullopt; ///< in the place of the options', where it lies on the param's device and is not read on the host
};

/// Operators take the learning rates of groups so.
using LearningRates = std::optional<std::vector<at::Tensor>>;
using RowStep = void(at::TensorList, const c10::List<std::optional<at::Tensor>>&, at::TensorList, at::TensorList, const c10::List<std::string>&,
                     at::IntArrayRef, const LearningRates&);

/// What an optimizer is, by static members:
///     Options, kName, kStep, kRows, kState, kFlush (names of its class and ops), kRowState, kDenseState (numbers of state tensors)
///     new_state(param, rows, options)            the tensors
///     check_rows(op, param, state), check_dense  shapes and dtypes of state
///     check_step(step)                           what row steps ask of options beyond options.check()
///     fits_kernel(param, state)                  whether the kernels take tensors of these strides
///     kHostState                                 which state the two below read on the host
///     kNames                                     of the state for rows
///     step_rows(step, kernel), flush(param, state, kernel)   for state of rows: by the CPU's kernels or in ATen calls
///     record(param, state, options)              what a step of rows leaves behind
///     step_dense(op, steps, fused)               of one group, device and dtype, by torch's fused kernel or one by one
///     can_fuse(param)
template <typename Rule>
using StepOf = ParamStep<typename Rule::Options>;

inline bool keeps_rows(at::TensorList state) { return state[0].scalar_type() == at::kLong; }
/// int64 [] on param's device.
void check_row_step(const char* op, const at::Tensor& step, const at::Tensor& param);
void check_dense_step(const char* op, const at::Tensor& step);
/// A dense gradient fits its parameter.
void check_dense_gradient(const char* op, const at::Tensor& param, const at::Tensor& grad);
/// Dense state of param's shape and dtype.
void check_dense_state(const char* op, const char* arg, const at::Tensor& state, const at::Tensor& param);
/// Whether torch's fused kernels take the parameter: they walk the memory of their tensors, and in torch 2.13 that of SGD for the CPU is
/// wrong for 16-bit parameters of 16 elements and more.
bool can_fuse_dense(const at::Tensor& param, at::TensorList state);
/// [R, ...] values in rows as a dense gradient of param.
at::Tensor dense_gradient(const at::Tensor& param, const OptionalTensor& rows, const at::Tensor& values);
/// The step counter of new state.
at::Tensor new_step(const at::Tensor& param, bool rows);
at::Tensor all_rows(const at::Tensor& param);
/// A floating tensor of one element, on the CPU or on param's device.
void check_learning_rate(const char* op, const at::Tensor& lr, const at::Tensor& param);
/// Whether a learning rate lies on the CPU, and has a value: a fake tensor has none.
inline bool lies_on_host(const at::Tensor& lr) { return lr.is_cpu() && !lr.unsafeGetTensorImpl()->is_python_dispatch(); }
/// The value of a learning rate on the CPU.
double read_learning_rate(const at::Tensor& lr);
/// The learning rate as a 0-dim tensor, for ATen calls.
inline at::Tensor scalar_of(const at::Tensor& lr) { return lr.dim() == 0 ? lr : lr.reshape({}); }
void check_lengths(const char* op, size_t params, size_t rows, size_t values, size_t options, at::IntArrayRef counts);
[[noreturn]] void wrong_state(const char* op, size_t param, size_t expected, size_t got);

template <typename Rule>
void check_param(const char* op, const StepOf<Rule>& step) {
  const bool rows = keeps_rows(step.state);
  if (given(step.rows)) {
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

/// The gradient that a descent follows: its negative under "maximize".
template <typename Options>
at::Tensor descent_of(const Options& options, const at::Tensor& values) {
  return options.maximize() ? values.neg() : values;
}

/// A parameter's part of a step, whose gradient may be a sparse tensor.
template <typename Rule>
StepOf<Rule> part_of_step(const at::Tensor& param, OptionalTensor rows, const at::Tensor& values, at::TensorList state, const typename Rule::Options& options,
                          size_t group, const LearningRates& lrs) {
  StepOf<Rule> step{param, std::move(rows), values, state, &options, group};
  if (!given(step.rows) && values.layout() != at::kStrided) {
    TORCH_CHECK(param.dim() <= 2, Rule::kName, ": expected a parameter with 1 or 2 dimensions for a sparse gradient, got shape ", param.sym_sizes());
    std::tie(step.rows, step.values) = sparse_gradient(Rule::kName, values);
  }
  if (lrs.has_value()) {
    const at::Tensor& lr = (*lrs)[group];
    check_learning_rate(Rule::kStep, lr, param);
    step.lr = lr.is_cpu() ? std::nullopt : OptionalTensor(lr);
  }
  return step;
}

/// The step, cut into its parameters and checked.
template <typename Rule>
std::vector<StepOf<Rule>> plan_step(at::TensorList params, const c10::List<std::optional<at::Tensor>>& rows, at::TensorList values, at::TensorList state,
                                    const std::vector<typename Rule::Options>& options, at::IntArrayRef counts, const LearningRates& lrs) {
  check_lengths(Rule::kStep, params.size(), rows.size(), values.size(), options.size(), counts);
  std::vector<StepOf<Rule>> steps;
  steps.reserve(params.size());
  size_t at = 0;
  for (size_t group = 0; group < options.size(); ++group) {
    options[group].check();
    for (int64_t j = 0; j < counts[group]; ++j) {
      const size_t i = steps.size(), left = state.size() - at;
      const size_t size = left > 0 && keeps_rows(state.slice(at)) ? Rule::kRowState : Rule::kDenseState;
      if (size > left) {
        wrong_state(Rule::kStep, i, size, left);
      }
      steps.push_back(part_of_step<Rule>(params[i], rows.get(i), values[i], state.slice(at, size), options[group], group, lrs));
      check_param<Rule>(Rule::kStep, steps.back());
      at += size;
    }
  }
  if (at != state.size()) {
    wrong_state(Rule::kStep, params.size(), 0, state.size() - at);
  }
  return steps;
}

/// Returns the numbers of each group, with the learning rates that are on the CPU.
template <typename Rule>
std::vector<typename Rule::Options> group_options(const c10::List<std::string>& texts, const LearningRates& lrs) {
  TORCH_CHECK_VALUE(!lrs.has_value() || lrs->size() == texts.size(), Rule::kStep, ": expected lrs of each of ", texts.size(), " groups, got ",
                    lrs.has_value() ? lrs->size() : 0);
  std::vector<typename Rule::Options> options;
  for (size_t i = 0; i < texts.size(); ++i) {
    options.push_back(parse_options<typename Rule::Options>(Rule::kStep, texts.get(i)));
    if (lrs.has_value() && lies_on_host((*lrs)[i])) {
      check_learning_rate(Rule::kStep, (*lrs)[i], (*lrs)[i]);
      options.back().lr(read_learning_rate((*lrs)[i]));
    }
  }
  return options;
}

template <typename Rule>
void row_step_meta(at::TensorList params, const c10::List<std::optional<at::Tensor>>& rows, at::TensorList values, at::TensorList state,
                   const c10::List<std::string>& texts, at::IntArrayRef counts, const LearningRates& lrs) {
  const auto options = group_options<Rule>(texts, lrs);
  plan_step<Rule>(params, rows, values, state, options, counts, lrs);
}

/// The options of a call of row_adam_rows_, with a learning rate that lies on the CPU or, where `reads`, elsewhere.
template <typename Rule>
typename Rule::Options rows_options(std::string_view text, const OptionalTensor& lr, const at::Tensor& param, bool reads) {
  auto options = parse_options<typename Rule::Options>(Rule::kRows, text);
  if (given(lr)) {
    check_learning_rate(Rule::kRows, *lr, param);
    if (lies_on_host(*lr) || reads) {
      options.lr(read_learning_rate(lr->is_cpu() ? *lr : lr->cpu()));
    }
  }
  return options;
}

/// A call of row_adam_rows_, checked.
template <typename Rule>
StepOf<Rule> plan_rows(const at::Tensor& param, at::TensorList state, const at::Tensor& rows, const at::Tensor& values, const typename Rule::Options& options) {
  if (state.size() != Rule::kRowState) {
    wrong_state(Rule::kRows, 0, Rule::kRowState, state.size());
  }
  options.check();
  check_row_step(Rule::kRows, state[0], param);
  StepOf<Rule> step{param, rows, values, state, &options};
  check_param<Rule>(Rule::kRows, step);
  return step;
}

/// State of which some lies on the CPU, as the composites read it; written back by write_back().
class HostState {
 public:
  HostState(at::TensorList state, at::ArrayRef<size_t> which);
  operator at::TensorList() const { return tensors_; }
  void write_back() const;

 private:
  at::TensorList state_;
  at::ArrayRef<size_t> which_;
  std::vector<at::Tensor> tensors_;
};

template <typename Rule>
void row_rows_cpu(const at::Tensor& param, at::TensorList state, const at::Tensor& rows, const at::Tensor& values, std::string_view text,
                  const OptionalTensor& lr) {
  const auto options = rows_options<Rule>(text, lr, param, true);
  const auto step = plan_rows<Rule>(param, state, rows, values, options);
  Rule::step_rows(step, !use_reference() && Rule::fits_kernel(param, state));
}

template <typename Rule>
void row_rows_composite(const at::Tensor& param, at::TensorList state, const at::Tensor& rows, const at::Tensor& values, std::string_view text,
                        const OptionalTensor& lr) {
  const auto options = rows_options<Rule>(text, lr, param, true);
  auto step = plan_rows<Rule>(param, state, rows, values, options);
  const HostState host(state, Rule::kHostState);
  step.state = host;
  Rule::step_rows(step, false);
  host.write_back();
}

template <typename Rule>
void row_rows_meta(const at::Tensor& param, at::TensorList state, const at::Tensor& rows, const at::Tensor& values, std::string_view text,
                   const OptionalTensor& lr) {
  const auto options = rows_options<Rule>(text, lr, param, false);
  plan_rows<Rule>(param, state, rows, values, options);
}

/// A call of row_adam_terms_, checked; returns the options.
template <typename Rule>
typename Rule::Options check_terms(const at::Tensor& param, at::TensorList state, const RowTerms& terms, std::string_view text, const OptionalTensor& lr) {
  const char* const op = Rule::kTerms;
  const auto options = rows_options<Rule>(text, lr, param, false);
  check::dim(op, "input", terms.input, 2);
  check::dim(op, "coefficients", terms.coefficients, 1);
  check::dim(op, "sources", terms.sources, 1);
  check::size(op, "coefficients", terms.coefficients, 0, terms.rows.sym_size(0), "the length of rows");
  check::dtype(op, "coefficients", terms.coefficients, opmath_dtype(param.scalar_type()));
  check::same_device(op, "coefficients", terms.coefficients, "param", param);
  check::size(op, "sources", terms.sources, 0, terms.rows.sym_size(0), "the length of rows");
  check::dtype(op, "sources", terms.sources, at::kInt);
  check::same_device(op, "sources", terms.sources, "param", param);
  plan_rows<Rule>(param, state, terms.rows, shape_of_values(terms), options);
  return options;
}

/// With what the state of rows begins.
template <typename Options>
double initial_of(const Options& options) {
  if constexpr (requires { options.initial_accumulator_value(); }) {
    return options.initial_accumulator_value();
  }
  return 0;
}

/// row_adam_rows_ of the param's device. Versions were raised by the step.
template <typename Rule>
void call_rows(const StepOf<Rule>& step, std::string_view text, const OptionalTensor& lr) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow((std::string("xsoftmax::") + Rule::kRows).c_str(), "")
          .template typed<void(const at::Tensor&, at::TensorList, const at::Tensor&, const at::Tensor&, std::string_view, const OptionalTensor&)>();
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(step.param, step.state, given(step.rows) ? *step.rows : all_rows(step.param), step.values, text, lr);
}

/// Takes a step of one table by terms: checks, calls take_step(), and records what other reads of the table need.
template <typename Rule, typename TakeStep>
void terms_step(const at::Tensor& param, at::TensorList state, const RowTerms& terms, std::string_view text, const OptionalTensor& lr,
                const TakeStep& take_step) {
  const WriteToTables write(param);
  const auto options = check_terms<Rule>(param, state, terms, text, lr);
  table_changes(param);
  record_row_state(param, state, initial_of(options));
  take_step();
  Rule::record(param, state, options);
}

template <typename Rule>
void row_terms_any(const at::Tensor& param, at::TensorList state, const at::Tensor& rows, const at::Tensor& sources, const at::Tensor& coefficients,
                   const at::Tensor& input, std::string_view text, const OptionalTensor& lr) {
  const RowTerms terms{rows, sources, coefficients, input};
  terms_step<Rule>(param, state, terms, text, lr, [&] { call_rows<Rule>(StepOf<Rule>{param, rows, values_of(terms), state, nullptr}, text, lr); });
}

template <typename Rule>
void row_terms_meta(const at::Tensor& param, at::TensorList state, const at::Tensor& rows, const at::Tensor& sources, const at::Tensor& coefficients,
                    const at::Tensor& input, std::string_view text, const OptionalTensor& lr) {
  check_terms<Rule>(param, state, {rows, sources, coefficients, input}, text, lr);
}

template <typename Rule>
void row_step(at::TensorList params, const c10::List<std::optional<at::Tensor>>& rows, at::TensorList values, at::TensorList state,
              const c10::List<std::string>& texts, at::IntArrayRef counts, const LearningRates& lrs) {
  const WriteToTables write(params);
  const auto options = group_options<Rule>(texts, lrs);
  const auto steps = plan_step<Rule>(params, rows, values, state, options, counts, lrs);
  std::map<std::tuple<const void*, int, int, bool>, std::vector<StepOf<Rule>>> dense; // by group, device, dtype, whether fused
  for (StepOf<Rule> step : steps) {
    table_changes(step.param);
    record_row_state(step.param, step.state, initial_of(*step.options));
    if (keeps_rows(step.state)) {
      call_rows<Rule>(step, texts.get(step.group), lrs.has_value() ? OptionalTensor((*lrs)[step.group]) : std::nullopt);
      Rule::record(step.param, step.state, *step.options);
      continue;
    }
    const bool fused = can_fuse_dense(step.param, step.state) && Rule::can_fuse(step.param);
    step.values = dense_gradient(step.param, step.rows, step.values);
    dense[{step.options, int(step.param.device().type()) * 256 + step.param.device().index(), int(step.param.scalar_type()), fused}].push_back(std::move(step));
  }
  for (const auto& [key, items] : dense) {
    Rule::step_dense(items, std::get<bool>(key));
  }
}

template <typename Rule>
std::vector<at::Tensor> row_state(const at::Tensor& param, bool rows, std::string_view text) {
  check_row_param(Rule::kState, param, rows);
  const auto options = parse_options<typename Rule::Options>(Rule::kState, text);
  options.check();
  const auto make = [&](const at::Tensor& like) {
    std::vector<at::Tensor> state{new_step(like, rows)};
    for (at::Tensor& tensor : Rule::new_state(like, rows, options)) {
      state.push_back(std::move(tensor));
    }
    return state;
  };
  if (!rows || !lies_in_file(param)) {
    return make(param);
  }
  auto mapped = mapped_state(param, Rule::kRows, {Rule::kNames.begin(), Rule::kNames.end()}, make(param.detach().to(at::kMeta)), initial_of(options));
  if (mapped.existed) {
    Rule::record(param, mapped.tensors, options);
  }
  return mapped.tensors;
}

template <typename Rule>
bool check_flush(const at::Tensor& param, at::TensorList state) {
  check_row_param(Rule::kFlush, param, false);
  if (state.empty()) {
    wrong_state(Rule::kFlush, 0, Rule::kRowState, 0);
  }
  const bool rows = keeps_rows(state);
  if (rows) {
    if (state.size() != Rule::kRowState) {
      wrong_state(Rule::kFlush, 0, Rule::kRowState, state.size());
    }
    check_row_param(Rule::kFlush, param, true);
    check_row_step(Rule::kFlush, state[0], param);
    Rule::check_rows(Rule::kFlush, param, state);
  }
  return rows;
}

template <typename Rule>
void row_flush_cpu(const at::Tensor& param, at::TensorList state) {
  const WriteToTables write(param);
  if (check_flush<Rule>(param, state)) {
    Rule::flush(param, state, !use_reference() && Rule::fits_kernel(param, state));
  }
}

template <typename Rule>
void row_flush_composite(const at::Tensor& param, at::TensorList state) {
  const WriteToTables write(param);
  if (check_flush<Rule>(param, state)) {
    const HostState host(state, Rule::kHostState);
    Rule::flush(param, host, false);
    host.write_back();
    made_up(param, state);
  }
}

template <typename Rule>
void row_flush_meta(const at::Tensor& param, at::TensorList state) {
  check_flush<Rule>(param, state);
}

/// The five operators, in TORCH_LIBRARY blocks.
template <typename Rule>
void define(torch::Library& m) {
  m.def((std::string(Rule::kState) + "(Tensor param, bool rows, str options) -> Tensor[]").c_str());
  m.def((std::string(Rule::kStep) +
         "(Tensor(a!)[] params, Tensor?[] rows, Tensor[] values, Tensor(b!)[] state, str[] options, int[] counts, "
         "Tensor[]? lrs=None) -> ()")
            .c_str(),
        kUsesHostState);
  m.def((std::string(Rule::kRows) + "(Tensor(a!) param, Tensor(b!)[] state, Tensor rows, Tensor values, str options, Tensor? lr=None) -> ()").c_str(),
        kUsesHostState);
  m.def((std::string(Rule::kTerms) +
         "(Tensor(a!) param, Tensor(b!)[] state, Tensor rows, Tensor sources, Tensor coefficients, Tensor input, str options, Tensor? lr=None) -> ()")
            .c_str(),
        kUsesHostState);
  m.def((std::string(Rule::kFlush) + "(Tensor(a!) param, Tensor(b!)[] state) -> ()").c_str(), kUsesHostState);
}

template <typename Rule>
void on_any_device(torch::Library& m) {
  m.impl(Rule::kState, row_state<Rule>);
  m.impl(Rule::kStep, row_step<Rule>);
  m.impl(Rule::kRows, row_rows_composite<Rule>);
  m.impl(Rule::kTerms, row_terms_any<Rule>);
  m.impl(Rule::kFlush, row_flush_composite<Rule>);
}

/// The step alone takes sparse tensors: gradients. In blocks of SparseCPU and SparseCUDA; of SparseMeta: row_step_meta.
template <typename Rule>
void on_sparse(torch::Library& m) {
  m.impl(Rule::kStep, row_step<Rule>);
}

template <typename Rule>
void on_sparse_meta(torch::Library& m) {
  m.impl(Rule::kStep, row_step_meta<Rule>);
}

template <typename Rule>
void on_cpu(torch::Library& m) {
  m.impl(Rule::kRows, row_rows_cpu<Rule>);
  m.impl(Rule::kFlush, row_flush_cpu<Rule>);
}

template <typename Rule>
void on_meta(torch::Library& m) {
  m.impl(Rule::kState, row_state<Rule>);
  m.impl(Rule::kStep, row_step_meta<Rule>);
  m.impl(Rule::kRows, row_rows_meta<Rule>);
  m.impl(Rule::kTerms, row_terms_meta<Rule>);
  m.impl(Rule::kFlush, row_flush_meta<Rule>);
}

/// One member of a fused kernel's list, of each parameter.
template <typename Step, typename Member>
std::vector<at::Tensor> column(const std::vector<Step>& steps, const Member& member) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(steps.size());
  for (const Step& step : steps) {
    tensors.push_back(member(step));
  }
  return tensors;
}
template <typename Step>
std::vector<at::Tensor> params_of(const std::vector<Step>& steps) {
  return column(steps, [](const Step& step) { return step.param; });
}
template <typename Step>
std::vector<at::Tensor> values_of(const std::vector<Step>& steps) {
  return column(steps, [](const Step& step) { return step.values; });
}
template <typename Step>
std::vector<at::Tensor> state_of(const std::vector<Step>& steps, size_t i) {
  return column(steps, [i](const Step& step) { return step.state[i]; });
}

} // namespace xsoftmax
