#pragma once

#include "cpu/impl.h"
#include "op/host_state.h"
#include "op/operators.h"
#include "optim/mapped_state.h"
#include "optim/row_step_plan.h"
#include "table/files/mapped_file.h"
#include "table/row_terms.h"
#include "table/updates/pending_updates.h"
#include "table/updates/row_states.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

// The operators of a row optimizer, made from its rule (optim/row_step_plan.h).

namespace xsoftmax {

/// Copies the state tensors listed in `which` to the CPU for the composites; write_back() copies
/// them back.
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
void row_rows_cpu(const at::Tensor& param, at::TensorList state, const at::Tensor& rows,
                  const at::Tensor& values, std::string_view text, const OptionalTensor& lr) {
  const auto options = rows_options<Rule>(text, lr, param, true);
  const auto step = plan_rows<Rule>(param, state, rows, values, options);
  Rule::step_rows(step, !use_reference() && Rule::fits_kernel(param, state));
}

template <typename Rule>
void row_rows_composite(const at::Tensor& param, at::TensorList state, const at::Tensor& rows,
                        const at::Tensor& values, std::string_view text, const OptionalTensor& lr) {
  const auto options = rows_options<Rule>(text, lr, param, true);
  auto step = plan_rows<Rule>(param, state, rows, values, options);
  const HostState host(state, Rule::kHostState);
  step.state = host;
  Rule::step_rows(step, false);
  host.write_back();
}

template <typename Rule>
void row_rows_meta(const at::Tensor& param, at::TensorList state, const at::Tensor& rows,
                   const at::Tensor& values, std::string_view text, const OptionalTensor& lr) {
  const auto options = rows_options<Rule>(text, lr, param, false);
  plan_rows<Rule>(param, state, rows, values, options);
}

/// Checks a row_adam_terms_ call and returns its options.
template <typename Rule>
typename Rule::Options check_terms(const at::Tensor& param, at::TensorList state,
                                   const RowTerms& terms, std::string_view text,
                                   const OptionalTensor& lr) {
  const char* const op = Rule::kTerms;
  const auto options = rows_options<Rule>(text, lr, param, false);
  check::dim(op, "input", terms.input, 2);
  check::dim(op, "coefficients", terms.coefficients, 1);
  check::dim(op, "sources", terms.sources, 1);
  check::size(op, "coefficients", terms.coefficients, 0, terms.rows.sym_size(0),
              "the length of rows");
  check::dtype(op, "coefficients", terms.coefficients, opmath_dtype(param.scalar_type()));
  check::same_device(op, "coefficients", terms.coefficients, "param", param);
  check::size(op, "sources", terms.sources, 0, terms.rows.sym_size(0), "the length of rows");
  check::dtype(op, "sources", terms.sources, at::kInt);
  check::same_device(op, "sources", terms.sources, "param", param);
  TORCH_CHECK_VALUE(terms.rows.sym_size(0) == 0 || terms.input.sym_size(0) != 0, op,
                    ": expected input of at least one row, got none for ", terms.rows.sym_size(0),
                    " terms");
  plan_rows<Rule>(param, state, terms.rows, shape_of_values(terms), options);
  return options;
}

/// Returns the initial value of row state.
template <typename Options>
double initial_of(const Options& options) {
  if constexpr (requires { options.initial_accumulator_value(); }) {
    return options.initial_accumulator_value();
  }
  return 0;
}

/// Calls row_adam_rows_ for the param's device. The caller has already bumped the version counters.
template <typename Rule>
void call_rows(const StepOf<Rule>& step, std::string_view text, const OptionalTensor& lr) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow((std::string("xsoftmax::") + Rule::kRows).c_str(), "")
          .template typed<void(const at::Tensor&, at::TensorList, const at::Tensor&,
                               const at::Tensor&, std::string_view, const OptionalTensor&)>();
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(step.param, step.state, is_defined(step.rows) ? *step.rows : all_rows(step.param),
          step.values, text, lr);
}

/// Takes a step of one table by terms: checks the arguments, calls take_step(options), and
/// registers the state and the pending updates.
template <typename Rule, typename TakeStep>
void terms_step(const at::Tensor& param, at::TensorList state, const RowTerms& terms,
                std::string_view text, const OptionalTensor& lr, const TakeStep& take_step) {
  const TableWriteGuard write(param);
  const auto options = check_terms<Rule>(param, state, terms, text, lr);
  table_changes(param);
  record_row_state(param, state, initial_of(options));
  take_step(options);
  Rule::record(param, state, options);
}

template <typename Rule>
void row_terms_any(const at::Tensor& param, at::TensorList state, const at::Tensor& rows,
                   const at::Tensor& sources, const at::Tensor& coefficients,
                   const at::Tensor& input, std::string_view text, const OptionalTensor& lr) {
  const RowTerms terms{rows, sources, coefficients, input};
  terms_step<Rule>(param, state, terms, text, lr, [&](const auto&) {
    call_rows<Rule>(StepOf<Rule>{param, rows, values_of(terms), state, nullptr}, text, lr);
  });
}

template <typename Rule>
void row_terms_meta(const at::Tensor& param, at::TensorList state, const at::Tensor& rows,
                    const at::Tensor& sources, const at::Tensor& coefficients,
                    const at::Tensor& input, std::string_view text, const OptionalTensor& lr) {
  check_terms<Rule>(param, state, {rows, sources, coefficients, input}, text, lr);
}

template <typename Rule>
void row_step(at::TensorList params, const c10::List<std::optional<at::Tensor>>& rows,
              at::TensorList values, at::TensorList state, const c10::List<std::string>& texts,
              at::IntArrayRef counts, const LearningRates& lrs) {
  const TableWriteGuard write(params);
  const auto options = group_options<Rule>(texts, lrs);
  const auto steps = plan_step<Rule>(params, rows, values, state, options, counts, lrs);
  // Parameters with dense state, by group, device, dtype and `fused`.
  std::map<std::tuple<const void*, int, int, bool>, std::vector<StepOf<Rule>>> dense;
  for (StepOf<Rule> step : steps) {
    table_changes(step.param);
    record_row_state(step.param, step.state, initial_of(*step.options));
    if (has_row_state(step.state)) {
      call_rows<Rule>(step, texts.get(step.group),
                      lrs.has_value() ? OptionalTensor((*lrs)[step.group]) : std::nullopt);
      Rule::record(step.param, step.state, *step.options);
      continue;
    }
    const bool fused = can_fuse_dense(step.param, step.state) && Rule::can_fuse(step.param);
    step.values = dense_gradient(step.param, step.rows, step.values);
    dense[{step.options, int(step.param.device().type()) * 256 + step.param.device().index(),
           int(step.param.scalar_type()), fused}]
        .push_back(std::move(step));
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
  if (!rows || !is_in_file(param)) {
    return make(param);
  }
  auto mapped = mapped_state(param, Rule::kRows, {Rule::kNames.begin(), Rule::kNames.end()},
                             make(param.detach().to(at::kMeta)), initial_of(options));
  if (mapped.existed) {
    Rule::record(param, mapped.tensors, options);
  }
  return mapped.tensors;
}

template <typename Rule>
bool check_flush(const at::Tensor& param, at::TensorList state) {
  check_row_param(Rule::kFlush, param, false);
  if (state.empty()) {
    report_wrong_state(Rule::kFlush, 0, Rule::kRowState, 0);
  }
  const bool rows = has_row_state(state);
  if (rows) {
    if (state.size() != Rule::kRowState) {
      report_wrong_state(Rule::kFlush, 0, Rule::kRowState, state.size());
    }
    check_row_param(Rule::kFlush, param, true);
    check_row_step(Rule::kFlush, state[0], param);
    Rule::check_rows(Rule::kFlush, param, state);
  }
  return rows;
}

template <typename Rule>
void row_flush_cpu(const at::Tensor& param, at::TensorList state) {
  const TableWriteGuard write(param);
  if (check_flush<Rule>(param, state)) {
    Rule::flush(param, state, !use_reference() && Rule::fits_kernel(param, state));
  }
}

template <typename Rule>
void row_flush_composite(const at::Tensor& param, at::TensorList state) {
  const TableWriteGuard write(param);
  if (check_flush<Rule>(param, state)) {
    const HostState host(state, Rule::kHostState);
    Rule::flush(param, host, false);
    host.write_back();
    caught_up(param, state);
  }
}

template <typename Rule>
void row_flush_meta(const at::Tensor& param, at::TensorList state) {
  check_flush<Rule>(param, state);
}

/// The step is the only operator that takes sparse tensors (gradients).
template <typename Rule>
inline constexpr OwnKernel kSparseStep[] = {{Rule::kStep, c10::DispatchKey::SparseCPU},
                                            {Rule::kStep, c10::DispatchKey::SparseCUDA},
                                            {Rule::kStep, c10::DispatchKey::SparseMeta}};

/// Defines the operators of a rule; the functions below implement them in TORCH_LIBRARY_IMPL
/// blocks.
template <typename Rule>
void define(torch::Library& m) {
  m.def((std::string(Rule::kState) + "(Tensor param, bool rows, str options) -> Tensor[]").c_str());
  m.def((std::string(Rule::kStep) +
         "(Tensor(a!)[] params, Tensor?[] rows, Tensor[] values, Tensor(b!)[] state, str[] "
         "options, int[] counts, "
         "Tensor[]? lrs=None) -> ()")
            .c_str(),
        kUsesHostState);
  m.def((std::string(Rule::kRows) +
         "(Tensor(a!) param, Tensor(b!)[] state, Tensor rows, Tensor values, str options, Tensor? "
         "lr=None) -> ()")
            .c_str(),
        kUsesHostState);
  m.def((std::string(Rule::kTerms) +
         "(Tensor(a!) param, Tensor(b!)[] state, Tensor rows, Tensor sources, Tensor coefficients, "
         "Tensor input, str options, Tensor? lr=None) -> ()")
            .c_str(),
        kUsesHostState);
  m.def((std::string(Rule::kCheckTerms) +
         "(Tensor param, Tensor[] state, Tensor rows, Tensor sources, Tensor coefficients, "
         "Tensor input, str options, Tensor? lr=None) -> ()")
            .c_str(),
        kUsesHostState);
  m.def((std::string(Rule::kFlush) + "(Tensor(a!) param, Tensor(b!)[] state) -> ()").c_str(),
        kUsesHostState);
}

template <typename Rule>
void on_any_device(torch::Library& m) {
  m.impl(Rule::kState, row_state<Rule>);
  m.impl(Rule::kStep, row_step<Rule>);
  m.impl(Rule::kRows, row_rows_composite<Rule>);
  m.impl(Rule::kTerms, row_terms_any<Rule>);
  m.impl(Rule::kCheckTerms, row_terms_meta<Rule>);
  m.impl(Rule::kFlush, row_flush_composite<Rule>);
}

/// Registers the step for sparse gradients, the only operator that takes sparse tensors. For the
/// SparseCPU and SparseCUDA blocks; SparseMeta uses on_sparse_meta.
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
  m.impl(Rule::kCheckTerms, row_terms_meta<Rule>);
  m.impl(Rule::kFlush, row_flush_meta<Rule>);
}

/// Collects one member of each step, as a list argument of a fused kernel.
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
