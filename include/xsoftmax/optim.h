#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// Optimizers for tables with row-sparse gradients: a step costs the rows that have a gradient, never all N rows. They are used
/// like torch::optim's, take dense gradients as well, and are saved and loaded by torch::save and torch::load.
///
/// Sparse gradients are COO in dimension 0 alone, with rows in any order; values of equal rows are summed, and a row whose sum is
/// exactly zero is not touched. The first gradient of a parameter decides what state it keeps: for rows, or as torch::optim's for
/// dense gradients. Parameters are float32, float64, bfloat16 or float16; state of 16-bit tables is float32.
///
/// Errors: ValueError for options out of range and for gradients that do not fit their parameter, IndexError for rows out of range,
/// Error for gradients that are sparse in another way.

namespace xsoftmax::optim {

struct RowSGDOptions : public torch::optim::OptimizerCloneableOptions<RowSGDOptions> {
  RowSGDOptions(double lr = 1e-3);
  TORCH_ARG(double, lr) = 1e-3;
  /// Rows without a gradient go on moving by their momentum; that is owed, and made up with the lr of the day at the next gradient
  /// of the row or by flush().
  TORCH_ARG(double, momentum) = 0;
  TORCH_ARG(double, dampening) = 0;
  /// Decoupled: param *= 1 - lr weight_decay at every step, owed alike. lr weight_decay must be below 1. For dense gradients as in
  /// torch::optim::SGD, a term of the gradient.
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, nesterov) = false;
  TORCH_ARG(bool, maximize) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

struct RowAdagradOptions : public torch::optim::OptimizerCloneableOptions<RowAdagradOptions> {
  RowAdagradOptions(double lr = 1e-2);
  TORCH_ARG(double, lr) = 1e-2;
  TORCH_ARG(double, lr_decay) = 0;
  /// A term of the gradient, in the steps in which a row has one.
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, initial_accumulator_value) = 0;
  TORCH_ARG(double, eps) = 1e-10;
  /// One accumulator a row, the mean of squares: [N] instead of [N, D] memory.
  TORCH_ARG(bool, row_wise) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

struct RowAdamOptions : public torch::optim::OptimizerCloneableOptions<RowAdamOptions> {
  RowAdamOptions(double lr = 1e-3);
  TORCH_ARG(double, lr) = 1e-3;
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled: param *= 1 - lr weight_decay at every step; what a row owes of it is applied at its next gradient or by flush(),
  /// exactly under any schedule. lr weight_decay must be below 1.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

/// State of one parameter. Tensors carry the names of the Python optimizers' state.
struct RowParamState : public torch::optim::OptimizerCloneableParamState<RowParamState> {
  bool rows = false;  ///< the first gradient was sparse
  int64_t step = 0;   ///< of the parameter, so far
  double decay = 0;   ///< sum of log(1 - lr weight_decay) over its steps
  std::map<std::string, torch::Tensor> tensors;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// What the three have in common.
class RowOptimizer : public torch::optim::Optimizer {
 public:
  using Optimizer::Optimizer;

  torch::Tensor step(LossClosure closure = nullptr) override;
  /// Brings every row of every table up to date: applies what rows without a gradient still owe. O(N): for the places where the
  /// whole table is read, before evaluating or saving weights.
  void flush();

 protected:
  using Options = torch::optim::OptimizerOptions;
  virtual void step_rows(const Options& options, const torch::Tensor& param, RowParamState& state, const torch::Tensor& rows,
                         const torch::Tensor& values) = 0;
  virtual void step_dense(const Options& options, const torch::Tensor& param, RowParamState& state, const torch::Tensor& grad) = 0;
  virtual void flush_rows(const Options& options, const torch::Tensor& param, RowParamState& state);
  virtual const char* name() const = 0;

 private:
  void step_param(const Options& options, const torch::Tensor& param);
};

/// Stochastic gradient descent with momentum. After flush(), rows are where dense torch::optim::SGD would have them, provided that
/// gradients did not depend on parameters and that lr was constant.
class RowSGD : public RowOptimizer {
 public:
  explicit RowSGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, RowSGDOptions defaults = {});
  explicit RowSGD(std::vector<torch::Tensor> params, RowSGDOptions defaults = {})
      : RowSGD(std::vector<torch::optim::OptimizerParamGroup>{std::move(params)}, std::move(defaults)) {}
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  void step_rows(const Options& options, const torch::Tensor& param, RowParamState& state, const torch::Tensor& rows,
                 const torch::Tensor& values) override;
  void step_dense(const Options& options, const torch::Tensor& param, RowParamState& state, const torch::Tensor& grad) override;
  void flush_rows(const Options& options, const torch::Tensor& param, RowParamState& state) override;
  const char* name() const override { return "RowSGD"; }
};

/// Adagrad: torch::optim::Adagrad on the rows that have a gradient.
class RowAdagrad : public RowOptimizer {
 public:
  explicit RowAdagrad(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, RowAdagradOptions defaults = {});
  explicit RowAdagrad(std::vector<torch::Tensor> params, RowAdagradOptions defaults = {})
      : RowAdagrad(std::vector<torch::optim::OptimizerParamGroup>{std::move(params)}, std::move(defaults)) {}
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  void step_rows(const Options& options, const torch::Tensor& param, RowParamState& state, const torch::Tensor& rows,
                 const torch::Tensor& values) override;
  void step_dense(const Options& options, const torch::Tensor& param, RowParamState& state, const torch::Tensor& grad) override;
  const char* name() const override { return "RowAdagrad"; }
};

/// Adam with decoupled weight decay. After flush(), rows are where dense torch::optim::AdamW would have them, provided that gradients did
/// not depend on parameters and that lr was constant.
class RowAdam : public RowOptimizer {
 public:
  explicit RowAdam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, RowAdamOptions defaults = {});
  explicit RowAdam(std::vector<torch::Tensor> params, RowAdamOptions defaults = {})
      : RowAdam(std::vector<torch::optim::OptimizerParamGroup>{std::move(params)}, std::move(defaults)) {}
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  void step_rows(const Options& options, const torch::Tensor& param, RowParamState& state, const torch::Tensor& rows,
                 const torch::Tensor& values) override;
  void step_dense(const Options& options, const torch::Tensor& param, RowParamState& state, const torch::Tensor& grad) override;
  void flush_rows(const Options& options, const torch::Tensor& param, RowParamState& state) override;
  const char* name() const override { return "RowAdam"; }
};

} // namespace xsoftmax::optim

namespace xsoftmax {

/// torch::nn::utils::clip_grad_norm_ for dense and row-sparse gradients together: scales them in place so that their norm is at
/// most max_norm, and returns the norm before. That of a sparse gradient is the norm of its sums over equal rows; nothing dense is
/// built. norm_type > 0, infinity included. Throws on a norm that is not finite if `error_if_nonfinite`.
double clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                       bool error_if_nonfinite = false);

} // namespace xsoftmax
