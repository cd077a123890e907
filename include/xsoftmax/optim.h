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

/// Optimizers for tables with row-sparse gradients. A step processes only the rows that have a
/// gradient, never all N rows. They are used like those of torch::optim, also accept dense
/// gradients, and are saved and loaded by torch::save and torch::load.
///
/// Sparse gradients are COO tensors that are sparse in dimension 0 only, with rows in any order.
/// Values of equal rows are summed, and a row whose sum is exactly zero is not updated. The first
/// gradient of a parameter determines its state: per row for sparse gradients, or as in
/// torch::optim for dense gradients. Parameters are float32, float64, bfloat16 or float16.
///
/// - state_dtype: dtype of the state tensors with one element per element of the table, read at the
///   parameter's first gradient. nullopt: float32, or float64 for float64 tables. bfloat16 state
///   always uses stochastic rounding, because with rounding to nearest, sums would stop growing and
///   means would lag behind.
/// - stochastic_rounding: updates 16-bit tables with stochastic rounding. It is seeded by step, row
///   and element, so every device gives the same result. Updates from dense gradients round to
///   nearest.
///
/// A dense optimizer also moves a row by its momentum, and decays it, in steps in which the row has
/// no gradient. RowSGD and RowAdam apply these updates later, each with the learning rate of its
/// step: when the row next has a gradient, in flush(), in save(), when the optimizer is destroyed,
/// and before the library reads the whole table (xsoftmax::catch_up).
///
/// The learning rate may be a floating tensor with one element, `lr_tensor`, on the CPU or on the
/// device of the parameters. On a device, steps neither read it on the host nor check it, so a step
/// captured in a CUDA graph uses its current value. set_lr (called by schedulers) writes to it in
/// place. Archives store its value as `lr`.
///
/// Throws ValueError for options out of range and for gradients that do not fit their parameter,
/// IndexError for rows out of range, TypeError for dtypes, and Error for other kinds of sparse
/// gradients. A step that throws changes no parameter and no state.

namespace xsoftmax::optim {

/// Base class of the options of the row optimizers.
template <typename Options>
struct RowOptimizerOptions : public torch::optim::OptimizerCloneableOptions<Options> {
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(const double value) override;
};

struct RowSGDOptions : public RowOptimizerOptions<RowSGDOptions> {
  RowSGDOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(torch::Tensor, lr_tensor); ///< replaces lr, as described above
  TORCH_ARG(double, momentum) = 0;
  /// Fraction of the gradient that is left out of the momentum buffer, except in a parameter's
  /// first step.
  TORCH_ARG(double, dampening) = 0;
  /// Decoupled weight decay: param *= 1 - lr weight_decay in every step. lr weight_decay must be
  /// below 1. For dense gradients it is added to the gradient, as in torch::optim::SGD.
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, nesterov) = false;
  TORCH_ARG(bool, maximize) = false;
  TORCH_ARG(bool, stochastic_rounding) = false;
  TORCH_ARG(std::optional<torch::Dtype>, state_dtype) = std::nullopt;

 public:
  template <typename Visitor>
  void visit(Visitor& v) {
    v("lr", lr_), v("momentum", momentum_), v("dampening", dampening_),
        v("weight_decay", weight_decay_), v("nesterov", nesterov_);
    v("maximize", maximize_), v("stochastic_rounding", stochastic_rounding_),
        v("state_dtype", state_dtype_);
  }
  void check() const; ///< Throws ValueError for options out of range.
};

struct RowAdagradOptions : public RowOptimizerOptions<RowAdagradOptions> {
  RowAdagradOptions(double lr = 1e-2) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-2;
  TORCH_ARG(torch::Tensor, lr_tensor); ///< replaces lr, as described above
  TORCH_ARG(double, lr_decay) = 0;
  /// Added to the gradient, in the steps in which a row has one.
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, initial_accumulator_value) = 0;
  TORCH_ARG(double, eps) = 1e-10;
  TORCH_ARG(bool, maximize) = false;
  /// Keeps one accumulator per row, the mean of squares: [N] instead of [N, D] memory, in float32.
  /// Read at a parameter's first gradient.
  TORCH_ARG(bool, row_wise) = false;
  TORCH_ARG(bool, stochastic_rounding) = false;
  TORCH_ARG(std::optional<torch::Dtype>, state_dtype) = std::nullopt;

 public:
  template <typename Visitor>
  void visit(Visitor& v) {
    v("lr", lr_), v("lr_decay", lr_decay_), v("weight_decay", weight_decay_);
    v("initial_accumulator_value", initial_accumulator_value_), v("eps", eps_),
        v("maximize", maximize_);
    v("row_wise", row_wise_), v("stochastic_rounding", stochastic_rounding_),
        v("state_dtype", state_dtype_);
  }
  void check() const;
};

struct RowAdamOptions : public RowOptimizerOptions<RowAdamOptions> {
  RowAdamOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(torch::Tensor, lr_tensor); ///< replaces lr, as described above
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled weight decay: param *= 1 - lr weight_decay in every step. For row-sparse gradients,
  /// lr weight_decay must be below 1.
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, maximize) = false;
  /// Keeps one second moment per row, of the mean of squares (partial row-wise Adam): [N] instead
  /// of [N, D] memory, in float32. Read at a parameter's first gradient.
  TORCH_ARG(bool, row_wise) = false;
  TORCH_ARG(bool, stochastic_rounding) = false;
  TORCH_ARG(std::optional<torch::Dtype>, state_dtype) = std::nullopt;

 public:
  template <typename Visitor>
  void visit(Visitor& v) {
    v("lr", lr_), v("beta1", std::get<0>(betas_)), v("beta2", std::get<1>(betas_)), v("eps", eps_),
        v("weight_decay", weight_decay_);
    v("maximize", maximize_), v("row_wise", row_wise_),
        v("stochastic_rounding", stochastic_rounding_), v("state_dtype", state_dtype_);
  }
  void check() const;
};

extern template struct RowOptimizerOptions<RowSGDOptions>;
extern template struct RowOptimizerOptions<RowAdagradOptions>;
extern template struct RowOptimizerOptions<RowAdamOptions>;

/// The state of one parameter, with the names of the Python optimizers' state.
struct RowParamState : public torch::optim::OptimizerCloneableParamState<RowParamState> {
  std::map<std::string, torch::Tensor> tensors;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

struct RowRule; // the operators that an optimizer calls

/// Base class of the row optimizers.
class RowOptimizer : public torch::optim::Optimizer {
 public:
  RowOptimizer(RowOptimizer&&) = default;
  /// Calls flush(), because pending updates would be lost with the state. If the stream is
  /// capturing a CUDA graph, the flush would become part of the graph, so it is deferred to the
  /// next step or flush of a row optimizer, or catch_up(), outside of a capture. The parameter and
  /// its state stay alive until then. Deferring needs torch 2.12 or later, which can tell whether a
  /// stream is capturing; with earlier versions, do not destroy an optimizer during a capture.
  ~RowOptimizer() override;
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// Brings every row of every table up to date: applies the pending updates of rows without a
  /// gradient. O(N).
  void flush() const;
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Loads what save() of the same class wrote. Throws ValueError, and loads nothing, for the
  /// archive of another optimizer (including torch::optim's) and for state that does not fit the
  /// parameters.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  RowOptimizer(const RowRule& rule,
               const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
               std::unique_ptr<torch::optim::OptimizerOptions> defaults);

 private:
  void check_shapes() const; // checks state that was loaded
  // calls visit(param, state tensors of param)
  template <typename Visit>
  void for_states(const Visit& visit) const;

  const RowRule& rule_;
};

/// Stochastic gradient descent with momentum and decoupled weight decay. After flush(), rows equal
/// those of dense torch::optim::SGD under any schedule, provided that gradients did not depend on
/// rows with pending updates.
class RowSGD : public RowOptimizer {
 public:
  explicit RowSGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                  RowSGDOptions defaults = {});
  explicit RowSGD(std::vector<torch::Tensor> params, RowSGDOptions defaults = {})
      : RowSGD(std::vector<torch::optim::OptimizerParamGroup>{std::move(params)},
               std::move(defaults)) {}
};

/// Adagrad: applies torch::optim::Adagrad to the rows that have a gradient.
class RowAdagrad : public RowOptimizer {
 public:
  explicit RowAdagrad(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                      RowAdagradOptions defaults = {});
  explicit RowAdagrad(std::vector<torch::Tensor> params, RowAdagradOptions defaults = {})
      : RowAdagrad(std::vector<torch::optim::OptimizerParamGroup>{std::move(params)},
                   std::move(defaults)) {}
};

/// Adam with decoupled weight decay. After flush(), rows equal those of dense torch::optim::AdamW
/// under any schedule, provided that gradients did not depend on rows with pending updates, and
/// except for eps. A deferred update is larger than the dense one by a factor of at most 1 + eps /
/// root, where root is the bias-corrected square root of exp_avg_sq in that step.
class RowAdam : public RowOptimizer {
 public:
  explicit RowAdam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   RowAdamOptions defaults = {});
  explicit RowAdam(std::vector<torch::Tensor> params, RowAdamOptions defaults = {})
      : RowAdam(std::vector<torch::optim::OptimizerParamGroup>{std::move(params)},
                std::move(defaults)) {}
};

} // namespace xsoftmax::optim

namespace xsoftmax {

/// Applies the pending updates of row optimizers to `table`. Only a look-up if there are none. Also
/// works on aliases of the parameter (detach(), variable_data()). Modules call it before they read
/// a whole table.
void catch_up(const torch::Tensor& table);

/// Resets rows that are reassigned. rows: int64 [R], rows of a parameter [N, ...]. They are set to
/// `values` [R, ...], and their state in row optimizers, including those of Python, to that before
/// their first gradient. Pending updates of other rows stay pending. Throws IndexError for a row
/// that the table does not have. An error changes nothing.
void reset_rows(const torch::Tensor& table, const torch::Tensor& rows, const torch::Tensor& values);

/// Clips the norm of dense and row-sparse gradients together: scales them in place so that their
/// norm is at most max_norm, and returns the norm before clipping. The norm of a sparse gradient is
/// that of its sums over equal rows, and no dense tensor is built.
///
/// - norm_type: above 0, including infinity.
/// - error_if_nonfinite: throws if the norm is not finite.
///
/// Do not use torch::nn::utils::clip_grad_norm_ for row-sparse gradients, because it returns their
/// norm without clipping them.
double clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm,
                       double norm_type = 2.0, bool error_if_nonfinite = false);

} // namespace xsoftmax
