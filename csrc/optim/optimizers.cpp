#include "core/checks.h"
#include "core/dtypes.h"
#include "core/memory.h"
#include "core/optional.h"
#include "optim/row_adagrad.h"
#include "optim/row_adam.h"
#include "optim/row_sgd.h"
#include "optim/sparse_gradient.h"

#include <torch/torch.h>
#include <xsoftmax/optim.h>

#include <cmath>

namespace xsoftmax::optim {
namespace {

using at::Tensor;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

template <typename Signature>
c10::TypedOperatorHandle<Signature> op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

OptionalTensor tensor_of(const RowParamState& state, const char* name) {
  const auto found = state.tensors.find(name);
  return found == state.tensors.end() ? OptionalTensor() : OptionalTensor(found->second);
}

const Tensor& zeros_once(RowParamState& state, const char* name, at::IntArrayRef shape, const at::TensorOptions& options) {
  Tensor& tensor = state.tensors[name];
  if (!tensor.defined()) {
    tensor = table_zeros(shape, options);
  }
  return tensor;
}

// State of a table's shape in the dtype of its sums.
const Tensor& moments_once(RowParamState& state, const char* name, const Tensor& param) {
  return zeros_once(state, name, param.sizes(), param.options().dtype(opmath_dtype(param.scalar_type())).requires_grad(false));
}

const Tensor& counts_once(RowParamState& state, const char* name, const Tensor& param, at::ScalarType dtype) {
  return zeros_once(state, name, {param.size(0)}, param.options().dtype(dtype).requires_grad(false));
}

void add_decay(const char* name, const Tensor& param, RowParamState& state, double lr, double weight_decay) {
  if (weight_decay != 0) {
    TORCH_CHECK_VALUE(lr * weight_decay < 1, name, ": expected lr * weight_decay below 1, got ", lr, " * ", weight_decay);
    counts_once(state, "last_decay", param, at::kDouble);
    state.decay += std::log1p(-lr * weight_decay);
  }
}

void at_least_zero(const char* name, const char* option, double value) {
  TORCH_CHECK_VALUE(value >= 0, name, ": expected ", option, " of at least 0, got ", value);
}

void check_options(const RowSGDOptions& options) {
  at_least_zero("RowSGD", "lr", options.lr());
  at_least_zero("RowSGD", "momentum", options.momentum());
  at_least_zero("RowSGD", "weight_decay", options.weight_decay());
  TORCH_CHECK_VALUE(!options.nesterov() || (options.momentum() > 0 && options.dampening() == 0),
                    "RowSGD: expected a momentum and no dampening for nesterov, got momentum ", options.momentum(),
                    " and dampening ", options.dampening());
}

void check_options(const RowAdagradOptions& options) {
  at_least_zero("RowAdagrad", "lr", options.lr());
  at_least_zero("RowAdagrad", "lr_decay", options.lr_decay());
  at_least_zero("RowAdagrad", "weight_decay", options.weight_decay());
  at_least_zero("RowAdagrad", "initial_accumulator_value", options.initial_accumulator_value());
  at_least_zero("RowAdagrad", "eps", options.eps());
}

void check_options(const RowAdamOptions& options) {
  at_least_zero("RowAdam", "lr", options.lr());
  at_least_zero("RowAdam", "weight_decay", options.weight_decay());
  at_least_zero("RowAdam", "eps", options.eps());
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK_VALUE(beta1 >= 0 && beta1 < 1, "RowAdam: expected betas[0] in [0, 1), got ", beta1);
  TORCH_CHECK_VALUE(beta2 >= 0 && beta2 < 1, "RowAdam: expected betas[1] in [0, 1), got ", beta2);
  TORCH_CHECK_VALUE(beta1 == 0 || beta1 * beta1 < beta2, "RowAdam: expected betas[0]^2 < betas[1], got ", beta1, " and ", beta2);
}

template <typename Options>
void check_groups(const Options& defaults, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  check_options(defaults);
  for (const auto& group : groups) {
    check_options(static_cast<const Options&>(group.options()));
  }
}

} // namespace

RowSGDOptions::RowSGDOptions(double lr) : lr_(lr) {}
RowAdagradOptions::RowAdagradOptions(double lr) : lr_(lr) {}
RowAdamOptions::RowAdamOptions(double lr) : lr_(lr) {}

void RowSGDOptions::serialize(OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(dampening);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
}

void RowSGDOptions::serialize(InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, dampening);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
}

void RowAdagradOptions::serialize(OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(initial_accumulator_value);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(row_wise);
}

void RowAdagradOptions::serialize(InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, initial_accumulator_value);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, row_wise);
}

void RowAdamOptions::serialize(OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

void RowAdamOptions::serialize(InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Betas, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

void RowParamState::serialize(OutputArchive& archive) const {
  archive.write("rows", c10::IValue(rows));
  archive.write("step", c10::IValue(step));
  archive.write("decay", c10::IValue(decay));
  OutputArchive named(archive.compilation_unit());
  for (const auto& [name, tensor] : tensors) {
    named.write(name, tensor);
  }
  archive.write("tensors", named);
}

void RowParamState::serialize(InputArchive& archive) {
  c10::IValue value;
  archive.read("rows", value);
  rows = value.toBool();
  archive.read("step", value);
  step = value.toInt();
  archive.read("decay", value);
  decay = value.toDouble();
  InputArchive named;
  archive.read("tensors", named);
  for (const std::string& name : named.keys()) {
    named.read(name, tensors[name]);
  }
}

Tensor RowOptimizer::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  for (auto& group : param_groups_) {
    for (const Tensor& param : group.params()) {
      if (param.grad().defined()) {
        step_param(group.options(), param);
      }
    }
  }
  return loss;
}

void RowOptimizer::step_param(const Options& options, const Tensor& param) {
  const Tensor grad = param.grad();
  const bool is_sparse = grad.layout() != at::kStrided;
  Tensor rows, values;
  if (is_sparse) {
    std::tie(rows, values) = sparse_gradient(name(), grad);
  }
  auto& slot = state_[param.unsafeGetTensorImpl()];
  if (slot == nullptr) {
    auto fresh = std::make_unique<RowParamState>();
    fresh->rows = is_sparse;
    slot = std::move(fresh);
  }
  auto& state = static_cast<RowParamState&>(*slot);
  ++state.step;
  if (!state.rows) {
    step_dense(options, param, state, (is_sparse ? grad.to_dense() : grad).contiguous());
  } else {
    step_rows(options, param, state, is_sparse ? rows : torch::arange(param.size(0), param.options().dtype(at::kLong)),
              is_sparse ? values : grad);
  }
}

void RowOptimizer::flush() {
  const torch::NoGradGuard no_grad;
  for (auto& group : param_groups_) {
    for (const Tensor& param : group.params()) {
      const auto found = state_.find(param.unsafeGetTensorImpl());
      if (found != state_.end() && static_cast<RowParamState&>(*found->second).rows) {
        flush_rows(group.options(), param, static_cast<RowParamState&>(*found->second));
      }
    }
  }
}

void RowOptimizer::flush_rows(const Options&, const Tensor& param, RowParamState& state) {
  if (const auto last_decay = tensor_of(state, "last_decay")) {
    op<decltype(row_decay_reference)>("xsoftmax::row_decay_").call(param, *last_decay, state.decay);
  }
}

RowSGD::RowSGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, RowSGDOptions defaults)
    : RowOptimizer(param_groups, std::make_unique<RowSGDOptions>(defaults)) {
  check_groups(defaults, param_groups_);
}

void RowSGD::step_rows(const Options& base, const Tensor& param, RowParamState& state, const Tensor& rows, const Tensor& values) {
  const auto& options = static_cast<const RowSGDOptions&>(base);
  const bool first = options.momentum() != 0 && !tensor_of(state, "momentum_buffer").has_value();
  if (first) {
    moments_once(state, "momentum_buffer", param);
    counts_once(state, "last_step", param, at::kInt);
  }
  add_decay(name(), param, state, options.lr(), options.weight_decay());
  op<decltype(row_sgd_reference)>("xsoftmax::row_sgd_")
      .call(param, rows, values, tensor_of(state, "momentum_buffer"), tensor_of(state, "last_step"), tensor_of(state, "last_decay"),
            state.step, options.lr(), options.momentum(), first ? 0 : options.dampening(), options.nesterov(), options.maximize(),
            state.decay);
}

void RowSGD::step_dense(const Options& base, const Tensor& param, RowParamState& state, const Tensor& grad) {
  const auto& options = static_cast<const RowSGDOptions&>(base);
  Tensor direction = options.maximize() ? grad.neg() : grad;
  if (options.weight_decay() != 0) {
    direction = direction.add(param, options.weight_decay());
  }
  if (options.momentum() != 0) {
    Tensor& buffer = state.tensors["momentum_buffer"];
    if (buffer.defined()) {
      buffer.mul_(options.momentum()).add_(direction, 1 - options.dampening());
    } else {
      buffer = direction.clone();
    }
    direction = options.nesterov() ? direction.add(buffer, options.momentum()) : buffer;
  }
  param.add_(direction, -options.lr());
}

void RowSGD::flush_rows(const Options& base, const Tensor& param, RowParamState& state) {
  const auto& options = static_cast<const RowSGDOptions&>(base);
  const auto buffer = tensor_of(state, "momentum_buffer");
  if (!buffer.has_value()) {
    return RowOptimizer::flush_rows(base, param, state);
  }
  op<decltype(row_sgd_flush_reference)>("xsoftmax::row_sgd_flush_")
      .call(param, *buffer, *tensor_of(state, "last_step"), tensor_of(state, "last_decay"), state.step, options.lr(),
            options.momentum(), options.nesterov(), state.decay);
}

RowAdagrad::RowAdagrad(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, RowAdagradOptions defaults)
    : RowOptimizer(param_groups, std::make_unique<RowAdagradOptions>(defaults)) {
  check_groups(defaults, param_groups_);
}

void RowAdagrad::step_rows(const Options& base, const Tensor& param, RowParamState& state, const Tensor& rows,
                           const Tensor& values) {
  const auto& options = static_cast<const RowAdagradOptions&>(base);
  Tensor& sum = state.tensors["sum"];
  if (!sum.defined()) {
    sum = table_empty(options.row_wise() ? param.sizes().slice(0, 1) : param.sizes(),
                      param.options().dtype(opmath_dtype(param.scalar_type())).requires_grad(false))
              .fill_(options.initial_accumulator_value());
  }
  op<decltype(row_adagrad_reference)>("xsoftmax::row_adagrad_")
      .call(param, rows, values, sum, options.lr() / (1 + double(state.step - 1) * options.lr_decay()), options.weight_decay(),
            options.eps());
}

void RowAdagrad::step_dense(const Options& base, const Tensor& param, RowParamState& state, const Tensor& grad) {
  const auto& options = static_cast<const RowAdagradOptions&>(base);
  Tensor& sum = state.tensors["sum"];
  if (!sum.defined()) {
    sum = torch::full(param.sizes(), options.initial_accumulator_value(), grad.options());
  }
  const Tensor gradient = options.weight_decay() != 0 ? grad.add(param, options.weight_decay()) : grad;
  sum.addcmul_(gradient, gradient);
  const double lr = options.lr() / (1 + double(state.step - 1) * options.lr_decay());
  param.addcdiv_(gradient, sum.sqrt().add_(options.eps()), -lr);
}

RowAdam::RowAdam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, RowAdamOptions defaults)
    : RowOptimizer(param_groups, std::make_unique<RowAdamOptions>(defaults)) {
  check_groups(defaults, param_groups_);
}

void RowAdam::step_rows(const Options& base, const Tensor& param, RowParamState& state, const Tensor& rows, const Tensor& values) {
  const auto& options = static_cast<const RowAdamOptions&>(base);
  add_decay(name(), param, state, options.lr(), options.weight_decay());
  const auto [beta1, beta2] = options.betas();
  op<decltype(row_adam_reference)>("xsoftmax::row_adam_")
      .call(param, rows, values, moments_once(state, "exp_avg", param), moments_once(state, "exp_avg_sq", param),
            counts_once(state, "last_step", param, at::kInt), tensor_of(state, "last_decay"), state.step, options.lr(), beta1, beta2,
            options.eps(), state.decay);
}

void RowAdam::flush_rows(const Options& base, const Tensor& param, RowParamState& state) {
  const auto& options = static_cast<const RowAdamOptions&>(base);
  const auto [beta1, beta2] = options.betas();
  op<decltype(row_adam_flush_reference)>("xsoftmax::row_adam_flush_")
      .call(param, *tensor_of(state, "exp_avg"), *tensor_of(state, "exp_avg_sq"), *tensor_of(state, "last_step"),
            tensor_of(state, "last_decay"), state.step, options.lr(), beta1, beta2, options.eps(), state.decay);
}

void RowAdam::step_dense(const Options& base, const Tensor& param, RowParamState& state, const Tensor& grad) {
  const auto& options = static_cast<const RowAdamOptions&>(base);
  const Tensor first = zeros_once(state, "exp_avg", param.sizes(), grad.options());
  const Tensor second = zeros_once(state, "exp_avg_sq", param.sizes(), grad.options());
  const Tensor steps = torch::full({}, double(state.step), grad.options().dtype(at::kFloat));
  const auto [beta1, beta2] = options.betas();
  const Tensor target = param.contiguous(); // the fused kernel walks the memory of its tensors
  at::_fused_adamw_({target}, {grad}, {first}, {second}, {}, {steps}, options.lr(), beta1, beta2, options.weight_decay(),
                    options.eps(), /*amsgrad=*/false, /*maximize=*/false);
  if (!target.is_same(param)) {
    param.copy_(target);
  }
}

void RowSGD::save(OutputArchive& archive) const { torch::optim::serialize<RowParamState, RowSGDOptions>(archive, *this); }
void RowSGD::load(InputArchive& archive) { torch::optim::serialize<RowParamState, RowSGDOptions>(archive, *this); }
void RowAdagrad::save(OutputArchive& archive) const { torch::optim::serialize<RowParamState, RowAdagradOptions>(archive, *this); }
void RowAdagrad::load(InputArchive& archive) { torch::optim::serialize<RowParamState, RowAdagradOptions>(archive, *this); }
void RowAdam::save(OutputArchive& archive) const { torch::optim::serialize<RowParamState, RowAdamOptions>(archive, *this); }
void RowAdam::load(InputArchive& archive) { torch::optim::serialize<RowParamState, RowAdamOptions>(archive, *this); }

} // namespace xsoftmax::optim
