// The options of the row optimizers in C++: their checks and archives, and the archive of the
// state.

#include "optim/optimizer_options.h"

#include "op/options.h"

#include <torch/torch.h>
#include <xsoftmax/optim.h>

#include <cmath>

namespace xsoftmax::optim {

using at::Tensor;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

namespace {

// The class that errors name.
template <typename Options>
constexpr const char* kName = nullptr;
template <>
constexpr const char* kName<RowSGDOptions> = "RowSGD";
template <>
constexpr const char* kName<RowAdagradOptions> = "RowAdagrad";
template <>
constexpr const char* kName<RowAdamOptions> = "RowAdam";

void at_least_zero(const char* name, const char* option, double value) {
  TORCH_CHECK_VALUE(value >= 0, name, ": expected ", option, " of at least 0, got ", value);
}

void check_rates(const char* name, double lr, double weight_decay) {
  TORCH_CHECK_VALUE(lr >= 0 && std::isfinite(lr), name,
                    ": expected lr as a finite number of at least 0, got ", lr);
  at_least_zero(name, "weight_decay", weight_decay);
}

void check_state_dtype(const char* name, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_VALUE(!dtype.has_value() || *dtype == at::kFloat || *dtype == at::kBFloat16, name,
                    ": expected state_dtype float32 or bfloat16, got ", *dtype);
}

} // namespace

void RowSGDOptions::check() const {
  check_rates("RowSGD", lr(), weight_decay());
  check_state_dtype("RowSGD", state_dtype());
  at_least_zero("RowSGD", "momentum", momentum());
  TORCH_CHECK_VALUE(!nesterov() || (momentum() > 0 && dampening() == 0),
                    "RowSGD: expected a momentum and no dampening for nesterov, got momentum ",
                    momentum(), " and dampening ", dampening());
}

void RowAdagradOptions::check() const {
  check_rates("RowAdagrad", lr(), weight_decay());
  check_state_dtype("RowAdagrad", state_dtype());
  at_least_zero("RowAdagrad", "lr_decay", lr_decay());
  at_least_zero("RowAdagrad", "initial_accumulator_value", initial_accumulator_value());
  at_least_zero("RowAdagrad", "eps", eps());
}

void RowAdamOptions::check() const {
  check_rates("RowAdam", lr(), weight_decay());
  check_state_dtype("RowAdam", state_dtype());
  at_least_zero("RowAdam", "eps", eps());
  const auto [beta1, beta2] = betas();
  TORCH_CHECK_VALUE(beta1 >= 0 && beta1 < 1, "RowAdam: expected betas[0] in [0, 1), got ", beta1);
  TORCH_CHECK_VALUE(beta2 >= 0 && beta2 < 1, "RowAdam: expected betas[1] in [0, 1), got ", beta2);
  TORCH_CHECK_VALUE(beta1 == 0 || beta1 * beta1 < beta2,
                    "RowAdam: expected betas[0]^2 < betas[1], got ", beta1, " and ", beta2);
}

template <typename Options>
double RowOptimizerOptions<Options>::get_lr() const {
  const auto& options = static_cast<const Options&>(*this);
  return options.lr_tensor().defined() ? options.lr_tensor().item().toDouble() : options.lr();
}

template <typename Options>
void RowOptimizerOptions<Options>::set_lr(const double value) {
  auto& options = static_cast<Options&>(*this);
  if (options.lr_tensor().defined()) { // in place, because a captured step reads the tensor
    const torch::NoGradGuard no_grad;
    options.lr_tensor().fill_(value);
  }
  options.lr() = value;
}

template <typename Options>
void RowOptimizerOptions<Options>::serialize(OutputArchive& archive) const {
  Options saved = static_cast<const Options&>(*this);
  archive.write("options", c10::IValue(print_options(saved.lr(get_lr()))));
}

template <typename Options>
void RowOptimizerOptions<Options>::serialize(InputArchive& archive) {
  auto& options = static_cast<Options&>(*this);
  const char* name = kName<Options>;
  c10::IValue text;
  TORCH_CHECK_VALUE(archive.try_read("options", text) && text.isString(), name,
                    ": expected the archive of a ", name, ", got the options ", archive.keys(),
                    " of another optimizer, such as torch::optim's. ", kOtherArchive);
  options = parse_options<Options>(name, text.toStringRef());
  options.check();
}

template struct RowOptimizerOptions<RowSGDOptions>;
template struct RowOptimizerOptions<RowAdagradOptions>;
template struct RowOptimizerOptions<RowAdamOptions>;

void RowParamState::serialize(OutputArchive& archive) const {
  for (const auto& [name, tensor] : tensors) {
    archive.write(name, tensor, /*is_buffer=*/true);
  }
}

void RowParamState::serialize(InputArchive& archive) {
  for (const std::string& name : archive.keys()) {
    c10::IValue value;
    archive.read(name, value);
    TORCH_CHECK_VALUE(
        value.isTensor(), "load: expected the state of a row optimizer, all of it tensors, got a ",
        value.tagKind(), " as ", name,
        ", which is that of another optimizer, such as torch::optim's. ", kOtherArchive);
    archive.read(name, tensors[name], /*is_buffer=*/true);
  }
}

} // namespace xsoftmax::optim
