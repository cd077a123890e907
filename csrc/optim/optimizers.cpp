#include "table/files/mapped_file.h"
#include "table/row_tables.h"
#include "op/options.h"
#include "table/updates/deferred_flushes.h"
#include "optim/mapped_state.h"
#include "optim/optimizer_options.h"
#include "table/updates/row_states.h"
#include "optim/row_step.h"
#include "table/updates/pending_updates.h"
#include "optim/sparse_gradient.h"
#include "op/find_op.h"

#include <torch/torch.h>
#include <xsoftmax/optim.h>

#include <algorithm>
#include <map>
#include <type_traits>

namespace xsoftmax::optim {

using at::Tensor;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
using AnyOptions = torch::optim::OptimizerOptions;

struct RowRule {
  const char *name, *op; // Its operators are op_state, op_step_ and op_flush_.
  std::vector<const char*> state; // names of the state tensors, in the operators' order
  void (*check)(const AnyOptions&);
  std::string (*text)(const AnyOptions&);
  double (*initial)(const AnyOptions&); // initial value of row state
  Tensor (*lr)(const AnyOptions&); // undefined: the learning rate is a number
  void (*set_lr)(AnyOptions&, const Tensor&);
  void (*save)(OutputArchive&, const torch::optim::Optimizer&);
  void (*load)(InputArchive&, torch::optim::Optimizer&);

  template <typename Signature>
  auto find(const char* suffix) const {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow((std::string("xsoftmax::") + op + suffix).c_str(), "")
        .typed<Signature>();
  }
};

namespace {

template <typename Options>
RowRule make_rule(const char* name, const char* op, std::vector<const char*> state) {
  return {
      name,
      op,
      std::move(state),
      [](const AnyOptions& options) { static_cast<const Options&>(options).check(); },
      [](const AnyOptions& options) { return print_options(static_cast<const Options&>(options)); },
      [](const AnyOptions& options) {
        if constexpr (std::is_same_v<Options, RowAdagradOptions>) {
          return static_cast<const Options&>(options).initial_accumulator_value();
        }
        return 0.0;
      },
      [](const AnyOptions& options) { return static_cast<const Options&>(options).lr_tensor(); },
      [](AnyOptions& options, const Tensor& lr) { static_cast<Options&>(options).lr_tensor(lr); },
      [](OutputArchive& archive, const torch::optim::Optimizer& optimizer) {
        torch::optim::serialize<RowParamState, Options>(archive, optimizer);
      },
      [](InputArchive& archive, torch::optim::Optimizer& optimizer) {
        torch::optim::serialize<RowParamState, Options>(archive, optimizer);
      }};
}

const RowRule sgd = make_rule<RowSGDOptions>("RowSGD", "row_sgd",
                                             {"step", "momentum_buffer", "last_step", "pending"});
const RowRule adagrad = make_rule<RowAdagradOptions>("RowAdagrad", "row_adagrad", {"step", "sum"});
const RowRule adam = make_rule<RowAdamOptions>(
    "RowAdam", "row_adam", {"step", "exp_avg", "exp_avg_sq", "last_step", "pending"});

// Returns the tensors in the operators' order. Dense state is a prefix of the row state.
std::vector<Tensor> tensors_of(const RowRule& rule,
                               const torch::optim::OptimizerParamState& state) {
  const auto& named = static_cast<const RowParamState&>(state).tensors;
  std::vector<Tensor> tensors;
  for (const char* name : rule.state) {
    if (const auto found = named.find(name); found != named.end()) {
      tensors.push_back(found->second);
    }
  }
  return tensors;
}

void flush_rows(const RowRule& rule, const Tensor& param, const std::vector<Tensor>& state) {
  const torch::NoGradGuard no_grad;
  rule.find<void(const Tensor&, at::TensorList)>("_flush_").call(param, state);
}

bool has_row_state(const RowParamState& state) {
  return state.tensors.at("step").scalar_type() == at::kLong;
}

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// Returns the learning rates of the groups, or nothing if all of them are numbers.
LearningRates learning_rates(const RowRule& rule, const ParamGroups& groups) {
  std::vector<Tensor> rates;
  bool any_tensor = false;
  for (const auto& group : groups) {
    rates.push_back(rule.lr(group.options()));
    any_tensor |= rates.back().defined();
  }
  if (!any_tensor) {
    return {};
  }
  for (size_t i = 0; i < rates.size(); ++i) {
    rates[i] = rates[i].defined() ? rates[i]
                                  : at::scalar_tensor(groups[i].options().get_lr(), at::kDouble);
  }
  return rates;
}

// Writes the loaded learning rates into the tensors of the groups before, in place, because a
// captured step reads them.
void keep_rate_tensors(const RowRule& rule, const ParamGroups& before, ParamGroups& loaded) {
  for (size_t i = 0; i < before.size(); ++i) {
    if (const Tensor lr = rule.lr(before[i].options()); lr.defined()) {
      lr.fill_(loaded[i].options().get_lr());
      rule.set_lr(loaded[i].options(), lr);
    }
  }
}

// Checks a parameter's loaded state as its next step would, and for a table in a file also that the
// state fits into the file of its state.
void check_loaded(const RowRule& rule, const Tensor& param, const std::string& text,
                  const RowParamState& state) {
  const auto names = [&] {
    std::string list;
    for (const auto& [name, tensor] : state.tensors) {
      list += (list.empty() ? "" : ", ") + name;
    }
    return list;
  };
  TORCH_CHECK_VALUE(state.tensors.contains("step"), rule.name,
                    ": expected a state with step, got one of ", names());
  for (const auto& [name, tensor] : state.tensors) {
    const bool known = std::find(rule.state.begin(), rule.state.end(), name) != rule.state.end();
    TORCH_CHECK_VALUE(known, rule.name, ": expected no ", name, " in its state, got one of ",
                      names(), ", which is that of another optimizer. ", kOtherArchive);
  }
  if (!has_row_state(state)) {
    return;
  }
  std::vector<Tensor> tensors;
  for (const char* name : rule.state) {
    TORCH_CHECK_VALUE(state.tensors.contains(name), rule.name, ": expected a state of rows with ",
                      name, ", got one of ", names());
    tensors.push_back(state.tensors.at(name).to(at::kMeta));
  }
  const Tensor like = param.to(at::kMeta);
  // On meta tensors the flush only checks.
  rule.find<void(const Tensor&, at::TensorList)>("_flush_").call(like, tensors);
  if (is_in_file(param)) {
    const auto in_file =
        rule.find<std::vector<Tensor>(const Tensor&, bool, std::string_view)>("_state").call(
            like, true, text);
    for (size_t i = 0; i < in_file.size(); ++i) {
      TORCH_CHECK_VALUE(tensors[i].sizes() == in_file[i].sizes() &&
                            tensors[i].scalar_type() == in_file[i].scalar_type(),
                        rule.name, ": expected ", rule.state[i], " of shape ", in_file[i].sizes(),
                        " and dtype ", in_file[i].scalar_type(),
                        " for a table in a file, got shape ", tensors[i].sizes(), " and dtype ",
                        tensors[i].scalar_type());
    }
  }
}

} // namespace

RowOptimizer::RowOptimizer(const RowRule& rule,
                           const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                           std::unique_ptr<AnyOptions> defaults)
    : Optimizer(param_groups, std::move(defaults)), rule_(rule) {
  rule_.check(*defaults_);
  for (const auto& group : param_groups_) {
    rule_.check(group.options());
  }
}

RowOptimizer::~RowOptimizer() {
  run_deferred_flushes();
  for_states([&](const Tensor& param, std::vector<Tensor> state) {
    try {
      if (is_capturing(param.device())) {
        defer_flush(param, std::move(state), [](const Tensor& table) { catch_up_table(table); });
      } else {
        flush_rows(rule_, param, state);
      }
    } catch (const c10::Error&) { // a table whose memory was moved
    }
  });
}

RowSGD::RowSGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
               RowSGDOptions defaults)
    : RowOptimizer(sgd, param_groups, std::make_unique<RowSGDOptions>(defaults)) {}
RowAdagrad::RowAdagrad(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                       RowAdagradOptions defaults)
    : RowOptimizer(adagrad, param_groups, std::make_unique<RowAdagradOptions>(defaults)) {}
RowAdam::RowAdam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 RowAdamOptions defaults)
    : RowOptimizer(adam, param_groups, std::make_unique<RowAdamOptions>(defaults)) {}

Tensor RowOptimizer::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  run_deferred_flushes();
  Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  std::vector<Tensor> params, values, state;
  c10::List<std::optional<Tensor>> rows;
  c10::List<std::string> options;
  std::vector<int64_t> counts;
  // Added to state_ once the step has passed all checks.
  std::vector<std::pair<void*, std::unique_ptr<RowParamState>>> fresh;
  const auto make_state =
      rule_.find<std::vector<Tensor>(const Tensor&, bool, std::string_view)>("_state");
  for (const auto& group : param_groups_) {
    const std::string text = rule_.text(group.options());
    options.push_back(text);
    counts.push_back(0);
    for (const Tensor& param : group.params()) {
      if (!param.grad().defined()) {
        continue;
      }
      ++counts.back();
      params.push_back(param);
      const bool is_sparse = param.grad().layout() != at::kStrided;
      rows.push_back(std::nullopt);
      values.push_back(param.grad());
      const auto found = state_.find(param.unsafeGetTensorImpl());
      std::vector<Tensor> tensors;
      if (found != state_.end()) {
        tensors = tensors_of(rule_, *found->second);
      } else {
        if (is_sparse) {
          // Checks the gradient before state is created.
          sparse_gradient(rule_.name, param.grad());
        }
        tensors = make_state.call(param, is_sparse || is_row_table(param), text);
        fresh.emplace_back(param.unsafeGetTensorImpl(), std::make_unique<RowParamState>());
        for (size_t i = 0; i < tensors.size(); ++i) {
          fresh.back().second->tensors[rule_.state[i]] = tensors[i];
        }
      }
      state.insert(state.end(), tensors.begin(), tensors.end());
    }
  }
  rule_.find<RowStep>("_step_").call(params, rows, values, state, options, counts,
                                     learning_rates(rule_, param_groups_));
  for (auto& [param, made] : fresh) {
    state_[param] = std::move(made);
  }
  return loss;
}

void RowOptimizer::flush() const {
  run_deferred_flushes();
  for_states([&](const Tensor& param, const std::vector<Tensor>& state) {
    flush_rows(rule_, param, state);
  });
}

template <typename Visit>
void RowOptimizer::for_states(const Visit& visit) const {
  for (const auto& group : param_groups_) {
    for (const Tensor& param : group.params()) {
      if (const auto found = state_.find(param.unsafeGetTensorImpl()); found != state_.end()) {
        visit(param, tensors_of(rule_, *found->second));
      }
    }
  }
}

void RowOptimizer::save(OutputArchive& archive) const {
  flush();
  rule_.save(archive, *this);
}

void RowOptimizer::check_shapes() const {
  int64_t number = 0;
  for (const auto& group : param_groups_) {
    for (const Tensor& param : group.params()) {
      const auto found = state_.find(param.unsafeGetTensorImpl());
      if (found != state_.end()) {
        for (const auto& [name, tensor] :
             static_cast<const RowParamState&>(*found->second).tensors) {
          // The size of `pending` does not follow from the number of rows, and an absent tensor has
          // size 0.
          const bool is_of_rows = name != "pending" && tensor.dim() > 0 && tensor.numel() > 0;
          TORCH_CHECK_VALUE(
              !is_of_rows || tensor.sizes() == param.sizes() ||
                  tensor.sizes() == param.sizes().slice(0, std::min<int64_t>(param.dim(), 1)),
              rule_.name, ": expected ", name, " of parameter ", number, " with the shape ",
              param.sizes(), " of the parameter or a number for each of its rows, got ",
              tensor.sizes(),
              ": a table loads the state of as many rows as it has (resize_classes)");
        }
      }
      ++number;
    }
  }
}

void RowOptimizer::load(InputArchive& archive) {
  const torch::NoGradGuard no_grad;
  auto replaced = std::move(state_);
  auto groups = param_groups_; // copies the options
  state_.clear();
  const auto for_loaded = [this](const auto& visit) {
    for (const auto& group : param_groups_) {
      for (const Tensor& param : group.params()) {
        if (const auto found = state_.find(param.unsafeGetTensorImpl()); found != state_.end()) {
          visit(param, group.options(), static_cast<RowParamState&>(*found->second));
        }
      }
    }
  };
  // By parameter: the tensors of the state file next to its table.
  std::map<const void*, std::vector<Tensor>> files;
  try {
    rule_.load(archive, *this);
    check_shapes();
    for_loaded([&](const Tensor& param, const AnyOptions& options, RowParamState& state) {
      for (auto& [name, tensor] : state.tensors) {
        tensor = tensor.to(param.device()); // The checkpoint may come from another device.
      }
      check_loaded(rule_, param, rule_.text(options), state);
    });
    const auto open =
        rule_.find<std::vector<Tensor>(const Tensor&, bool, std::string_view)>("_state");
    for_loaded([&](const Tensor& param, const AnyOptions& options, const RowParamState& state) {
      if (is_in_file(param) && has_row_state(state)) {
        files[param.unsafeGetTensorImpl()] = open.call(param, true, rule_.text(options));
        table_changes(param);
      }
    });
  } catch (...) { // an error changes nothing
    state_ = std::move(replaced);
    param_groups_.swap(groups);
    throw;
  }
  for (const auto& [param, state] : replaced) {
    forget_pending(tensors_of(rule_, *state));
  }
  keep_rate_tensors(rule_, groups, param_groups_);
  const auto register_pending =
      find_op<void(const Tensor&, at::TensorList, std::string_view)>("xsoftmax::register_pending");
  for_loaded([&](const Tensor& param, const AnyOptions& options, RowParamState& state) {
    if (const auto file = files.find(param.unsafeGetTensorImpl()); file != files.end()) {
      for (size_t i = 0; i < file->second.size(); ++i) {
        Tensor& loaded = state.tensors.at(rule_.state[i]);
        loaded = file->second[i].copy_(loaded);
      }
    }
    const std::vector<Tensor> tensors = tensors_of(rule_, state);
    record_row_state(param, tensors, rule_.initial(options));
    if (state.tensors.contains("pending")) {
      register_pending.call(param, tensors, rule_.op);
    }
  });
}

} // namespace xsoftmax::optim
