#include "optim/row_adagrad.h"

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "cpu/memory.h"
#include "op/operators.h"
#include "optim/row_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/full_like.h>

#include <array>

namespace xsoftmax {
namespace {

using at::Tensor;
using at::TensorList;

struct AdagradRule {
  using Options = optim::RowAdagradOptions;
  static constexpr const char* kName = "RowAdagrad";
  static constexpr const char *kStep = "row_adagrad_step_", *kRows = "row_adagrad_rows_",
                              *kTerms = "row_adagrad_terms_",
                              *kCheckTerms = "row_adagrad_check_terms",
                              *kState = "row_adagrad_state", *kFlush = "row_adagrad_flush_";
  static constexpr size_t kRowState = 2, kDenseState = 2;
  static constexpr std::array<size_t, 1> kHostState{AdagradState::kCount};
  static constexpr std::array<const char*, kRowState> kNames{"step", "sum"};

  static std::vector<Tensor> new_state(const Tensor& param, bool rows, const Options& options) {
    if (!rows) {
      return {at::full_like(param, options.initial_accumulator_value())};
    }
    const auto elements = element_state_dtype(kState, param, options.state_dtype());
    return {table_empty(options.row_wise() ? param.sizes().slice(0, 1) : param.sizes(),
                        param.options().dtype(options.row_wise() ? opmath_dtype(param.scalar_type())
                                                                 : elements))
                .fill_(options.initial_accumulator_value())};
  }

  static void check_rows(const char* op, const Tensor& param, TensorList state) {
    const Tensor& sum = state[AdagradState::kSum];
    TORCH_CHECK_VALUE(sum.dim() == 1 || sum.dim() == param.dim(), op,
                      ": expected sum of param's shape or [N], got shape ", sum.sym_sizes());
    if (sum.dim() == param.dim()) {
      check_element_state(op, "sum", sum, param);
    } else {
      check_row_state(op, "sum", sum, param, false, opmath_dtype(param.scalar_type()));
    }
  }

  static void check_dense(const char* op, const Tensor& param, TensorList state) {
    check_dense_state(op, "sum", state[AdagradState::kSum], param);
  }
  static void check_step(const ParamStep<Options>&) {}

  static bool fits_kernel(const Tensor& param, TensorList state) {
    return has_row_view(param) && has_row_view(state[AdagradState::kSum]);
  }

  static void step_rows(const ParamStep<Options>& item, bool kernel) {
    const Options& options = *item.options;
    const Tensor& sum = item.state[AdagradState::kSum];
    int64_t& step = *item.state[AdagradState::kCount].mutable_data_ptr<int64_t>();
    const double rate = row_adagrad_rate(options.lr(), options.lr_decay(), step + 1);
    (kernel ? row_adagrad_rows_cpu : row_adagrad_rows_reference)(
        {item.param, sum, rate, options.weight_decay(), options.eps(),
         options.stochastic_rounding(), step + 1},
        *item.rows, descent_of(options, item.values));
    ++step;
  }

  static void flush(const Tensor&, TensorList, bool) {}
  static void record(const Tensor&, TensorList, const Options&) {}

  // All supported releases of torch have a fused Adagrad for the CPU, only a few for other devices.
  static bool can_fuse(const Tensor& param) { return param.is_cpu(); }

  static void step_dense(const std::vector<ParamStep<Options>>& items, bool fused) {
    const Options& options = *items[0].options;
    const std::vector<Tensor> steps = state_of(items, AdagradState::kCount);
    at::_foreach_add_(steps, 1);
    if (fused) {
      at::_fused_adagrad_(params_of(items), values_of(items), state_of(items, AdagradState::kSum),
                          steps, options.lr(), options.lr_decay(), options.weight_decay(),
                          options.eps(), options.maximize());
      return;
    }
    for (const auto& item : items) {
      const Tensor descent = descent_of(options, item.values);
      const Tensor g =
          options.weight_decay() != 0 ? descent.add(item.param, options.weight_decay()) : descent;
      item.state[AdagradState::kSum].addcmul_(g, g);
      const Tensor slower =
          (item.state[AdagradState::kCount].to(at::kDouble) - 1) * options.lr_decay() + 1;
      const Tensor divisor = item.state[AdagradState::kSum].sqrt().add_(options.eps()).mul_(slower);
      if (is_defined(item.lr)) {
        item.param.sub_(g.div(divisor).mul_(scalar_of(*item.lr)));
      } else {
        item.param.addcdiv_(g, divisor, -options.lr());
      }
    }
  }
};

} // namespace

void row_adagrad_rows_reference(const RowAdagradUpdate& u, const Tensor& rows,
                                const Tensor& values) {
  auto [ids, g] = touched_rows(rows, values);
  const Tensor old = u.param.index_select(0, ids).to(g.scalar_type());
  if (u.weight_decay != 0) {
    g = g + old.mul(u.weight_decay);
  }
  const Tensor squares = g.square();
  const Tensor next =
      u.sum.index_select(0, ids) + (u.sum.dim() < u.param.dim() ? squares.mean(1) : squares);
  u.sum.index_copy_(0, ids,
                    rounded_rows(next, ids, u.step, u.sum.scalar_type(), RoundingTarget::State)
                        .to(u.sum.scalar_type()));
  const Tensor root = next.sqrt().add(u.eps);
  Tensor moved = old - g.div(root.dim() < g.dim() ? root.unsqueeze(1) : root).mul(u.lr);
  if (u.stochastic_rounding) {
    moved = rounded_rows(moved, ids, u.step, u.param.scalar_type(), RoundingTarget::Table);
  }
  u.param.index_copy_(0, ids, moved.to(u.param.scalar_type()));
}

static RowAdagradNumbers numbers_of(const AdagradRule::Options& options) {
  return {options.lr(),
          options.lr_decay(),
          options.weight_decay(),
          options.eps(),
          options.stochastic_rounding(),
          options.maximize()};
}

RowAdagradNumbers check_row_adagrad_rows(const Tensor& param, TensorList state, const Tensor& rows,
                                         const Tensor& values, std::string_view text,
                                         const OptionalTensor& lr) {
  const auto options = rows_options<AdagradRule>(text, lr, param, false);
  plan_rows<AdagradRule>(param, state, rows, values, options);
  return numbers_of(options);
}

void row_adagrad_rows_composite(const Tensor& param, TensorList state, const Tensor& rows,
                                const Tensor& values, std::string_view text,
                                const OptionalTensor& lr) {
  row_rows_composite<AdagradRule>(param, state, rows, values, text, lr);
}

void row_adagrad_terms(const Tensor& param, TensorList state, const RowTerms& terms,
                       std::string_view text, const OptionalTensor& lr,
                       const std::function<void(const RowAdagradNumbers&)>& take_step) {
  terms_step<AdagradRule>(param, state, terms, text, lr,
                          [&](const auto& options) { take_step(numbers_of(options)); });
}

XSOFTMAX_OPERATORS(m, kSparseStep<AdagradRule>) { define<AdagradRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { on_any_device<AdagradRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { on_cpu<AdagradRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { on_meta<AdagradRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, SparseCPU, m) { on_sparse<AdagradRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, SparseCUDA, m) { on_sparse<AdagradRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, SparseMeta, m) { on_sparse_meta<AdagradRule>(m); }

} // namespace xsoftmax
