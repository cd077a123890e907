#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

/// Optimizers for tables with row-sparse gradients: a step costs the rows that have a gradient, never all N rows. They are used
/// like torch::optim's, take dense gradients as well, and are saved and loaded by torch::save and torch::load.
///
/// Sparse gradients are COO in dimension 0 alone, with rows in any order; values of equal rows are summed, and a row whose sum is
/// exactly zero is not touched. The first gradient of a parameter decides what state it keeps: for rows, or as torch::optim's for
/// dense gradients. Parameters are float32, float64, bfloat16 or float16.
///
/// - state_dtype: dtype of the state that has an element for each of the table's, read at the parameter's first gradient. None: float32, and float64 for
///   float64 tables. bfloat16 state always uses stochastic rounding: rounded to nearest, sums would stop growing and means would lag.
/// - stochastic_rounding: updates of 16-bit tables use stochastic rounding, seeded by step, row and element, so that every device gives the same. Dense
///   gradients round to nearest.
///
/// In the steps in which a row has no gradient, a dense optimizer goes on moving it by its momentum and decaying it. RowSGD and RowAdam apply these
/// updates later, each at the rate of its step: when the row next has a gradient, in flush(), in save(), when the optimizer is destroyed, and where the
/// library reads the table (xsoftmax::settle).
///
/// The learning rate may be a floating tensor of one element, `lr_tensor`: on the CPU, or on the parameters' device, where no step reads it
/// on the host, nor checks it, and a step that a CUDA graph has captured follows it. set_lr (of schedulers) writes to it in place; an
/// archive holds its value, as `lr`.
///
/// Errors: ValueError for options out of range and for gradients that do not fit their parameter, IndexError for rows out of range,
/// TypeError for dtypes, Error for gradients that are sparse in another way. A step that is refused changes no parameter and no state.

namespace xsoftmax::optim {

struct RowSGDOptions : public torch::optim::OptimizerCloneableOptions<RowSGDOptions> {
  RowSGDOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(torch::Tensor, lr_tensor); ///< in the place of lr, as described above
  TORCH_ARG(double, momentum) = 0;
  /// Of the gradient's share in the momentum buffer; none at a parameter's first step.
  TORCH_ARG(double, dampening) = 0;
  /// Decoupled: param *= 1 - lr weight_decay at every step. lr weight_decay must be below 1. For dense gradients as in
  /// torch::optim::SGD, a term of the gradient.
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, nesterov) = false;
  TORCH_ARG(bool, maximize) = false;
  TORCH_ARG(bool, stochastic_rounding) = false;
  TORCH_ARG(std::optional<torch::Dtype>, state_dtype) = std::nullopt;

 public:
  template <typename Visitor>
  void visit(Visitor& v) {
    v("lr", lr_), v("momentum", momentum_), v("dampening", dampening_), v("weight_decay", weight_decay_), v("nesterov", nesterov_);
    v("maximize", maximize_), v("stochastic_rounding", stochastic_rounding_), v("state_dtype", state_dtype_);
  }
  void check() const; ///< ValueError for what is out of range
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(const double value) override;
};

struct RowAdagradOptions : public torch::optim::OptimizerCloneableOptions<RowAdagradOptions> {
  RowAdagradOptions(double lr = 1e-2) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-2;
  TORCH_ARG(torch::Tensor, lr_tensor); ///< in the place of lr, as described above
  TORCH_ARG(double, lr_decay) = 0;
  /// A term of the gradient, in the steps in which a row has one.
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, initial_accumulator_value) = 0;
  TORCH_ARG(double, eps) = 1e-10;
  TORCH_ARG(bool, maximize) = false;
  /// One accumulator a row, the mean of squares: [N] instead of [N, D] memory, in float32. Read at a parameter's first gradient.
  TORCH_ARG(bool, row_wise) = false;
  TORCH_ARG(bool, stochastic_rounding) = false;
  TORCH_ARG(std::optional<torch::Dtype>, state_dtype) = std::nullopt;

 public:
  template <typename Visitor>
  void visit(Visitor& v) {
    v("lr", lr_), v("lr_decay", lr_decay_), v("weight_decay", weight_decay_);
    v("initial_accumulator_value", initial_accumulator_value_), v("eps", eps_), v("maximize", maximize_);
    v("row_wise", row_wise_), v("stochastic_rounding", stochastic_rounding_), v("state_dtype", state_dtype_);
  }
  void check() const;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(const double value) override;
};

struct RowAdamOptions : public torch::optim::OptimizerCloneableOptions<RowAdamOptions> {
  RowAdamOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(torch::Tensor, lr_tensor); ///< in the place of lr, as described above
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled: param *= 1 - lr weight_decay at every step. lr weight_decay must be below 1 for row-sparse gradients.
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, maximize) = false;
  /// One second moment a row, of the mean of squares (partial row-wise Adam): [N] instead of [N, D] memory, in float32. Read at a parameter's first gradient.
  TORCH_ARG(bool, row_wise) = false;
  TORCH_ARG(bool, stochastic_rounding) = false;
  TORCH_ARG(std::optional<torch::Dtype>, state_dtype) = std::nullopt;

 public:
  template <typename Visitor>
  void visit(Visitor& v) {
    v("lr", lr_), v("beta1", std::get<0>(betas_)), v("beta2", std::get<1>(betas_)), v("eps", eps_), v("weight_decay", weight_decay_);
    v("maximize", maximize_), v("row_wise", row_wise_), v("stochastic_rounding", stochastic_rounding_), v("state_dtype", state_dtype_);
  }
  void check() const;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(const double value) override;
};

/// State of one parameter, by the names of the Python optimizers' state.
struct RowParamState : public torch::optim::OptimizerCloneableParamState<RowParamState> {
  std::map<std::string, torch::Tensor> tensors;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

struct RowRule; // which operators an optimizer calls

/// What the three have in common.
class RowOptimizer : public torch::optim::Optimizer {
 public:
  RowOptimizer(RowOptimizer&&) = default;
  /// Calls flush(): pending updates would be lost with the state. While the stream captures a CUDA graph, of
  /// which the flush would become a part, it is deferred to the next step or flush of a row optimizer,
  /// or settle(), outside of the capture; the parameter and its state stay alive until then. (Of torch 2.12
  /// and later, whose streams say that they capture; before, no optimizer may go while one does.)
  ~RowOptimizer() override;
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// Brings every row of every table up to date: applies what rows without a gradient still owe. O(N).
  void flush() const;
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads what save() of the same class wrote. ValueError for the archive of another optimizer, torch::optim's included,
  /// and for state that does not fit the parameters; nothing is loaded then.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  RowOptimizer(const RowRule& rule, const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
               std::unique_ptr<torch::optim::OptimizerOptions> defaults);

 private:
  void check_shapes() const; // of state that was loaded
  template <typename Visit>
  void for_states(const Visit& visit) const; // visit(param, tensors of its state)

  const RowRule& rule_;
};

/// Stochastic gradient descent with momentum. After flush(), rows are where dense torch::optim::SGD would have them, under any schedule,
/// provided that gradients did not depend on the rows that owed steps. Weight decay is decoupled.
class RowSGD : public RowOptimizer {
 public:
  explicit RowSGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, RowSGDOptions defaults = {});
  explicit RowSGD(std::vector<torch::Tensor> params, RowSGDOptions defaults = {})
      : RowSGD(std::vector<torch::optim::OptimizerParamGroup>{std::move(params)}, std::move(defaults)) {}
};

/// Adagrad: torch::optim::Adagrad on the rows that have a gradient.
class RowAdagrad : public RowOptimizer {
 public:
  explicit RowAdagrad(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, RowAdagradOptions defaults = {});
  explicit RowAdagrad(std::vector<torch::Tensor> params, RowAdagradOptions defaults = {})
      : RowAdagrad(std::vector<torch::optim::OptimizerParamGroup>{std::move(params)}, std::move(defaults)) {}
};

/// Adam with decoupled weight decay. After flush(), rows are where dense torch::optim::AdamW would have them, under any schedule, provided
/// that gradients did not depend on the rows that owed steps, and but for eps: a movement that was owed is larger than the dense one by
/// the factor 1 + eps / root at most, root being the bias-corrected root of exp_avg_sq in that step.
class RowAdam : public RowOptimizer {
 public:
  explicit RowAdam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, RowAdamOptions defaults = {});
  explicit RowAdam(std::vector<torch::Tensor> params, RowAdamOptions defaults = {})
      : RowAdam(std::vector<torch::optim::OptimizerParamGroup>{std::move(params)}, std::move(defaults)) {}
};

} // namespace xsoftmax::optim

namespace xsoftmax {

/// Brings the rows of `table` up to date if a row optimizer owes them steps; a look-up otherwise. Works on aliases of the parameter
/// (detach(), variable_data()). The modules call it before they read a whole table.
void settle(const torch::Tensor& table);

/// Rows int64 [R] of a parameter [N, ...] that stand for something else from now on: they become `values` [R, ...], and what row optimizers keep for them, of
/// Python as well, is as before their first gradient. What other rows owe stays. IndexError for a row that the table does not have; an error changes nothing.
void reset_rows(const torch::Tensor& table, const torch::Tensor& rows, const torch::Tensor& values);

/// torch::nn::utils::clip_grad_norm_ for dense and row-sparse gradients together: scales them in place so that their norm is at
/// most max_norm, and returns the norm before. That of a sparse gradient is the norm of its sums over equal rows; nothing dense is
/// built. norm_type > 0, infinity included. Throws on a norm that is not finite if `error_if_nonfinite`. Do not use
/// torch::nn::utils::clip_grad_norm_ for row-sparse gradients: it returns their norm and leaves them unclipped.
double clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

} // namespace xsoftmax
