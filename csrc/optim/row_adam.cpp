#include "optim/row_adam.h"

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "cpu/memory.h"
#include "op/operators.h"
#include "optim/pending_rule.h"
#include "optim/row_step.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <cmath>

namespace xsoftmax {
namespace {

using at::Tensor;
using at::TensorList;

double power(double beta, int64_t step) { return std::pow(beta, double(step)); }

// Returns first / root, or 0 where the root is 0 because a row has no moments yet.
Tensor divide_by_root(const Tensor& first, const Tensor& root) {
  return at::where(root.eq(0), 0.0, first / root);
}

struct AdamRule : PendingRule<AdamRule> {
  using Options = optim::RowAdamOptions;
  static constexpr const char* kName = "RowAdam";
  static constexpr const char *kStep = "row_adam_step_", *kRows = "row_adam_rows_",
                              *kTerms = "row_adam_terms_", *kCheckTerms = "row_adam_check_terms",
                              *kState = "row_adam_state", *kFlush = "row_adam_flush_";
  static constexpr size_t kRowState = 5, kDenseState = 3;
  static constexpr std::array<size_t, 2> kHostState{AdamState::kCount, AdamState::kPending};
  static constexpr std::array<const char*, kRowState> kNames{"step", "exp_avg", "exp_avg_sq",
                                                             "last_step", "pending"};

  static std::vector<Tensor> new_state(const Tensor& param, bool rows, const Options& options) {
    if (!rows) {
      return {at::zeros_like(param), at::zeros_like(param)};
    }
    const auto elements =
        param.options().dtype(element_state_dtype(kState, param, options.state_dtype()));
    const auto numbers = param.options().dtype(opmath_dtype(param.scalar_type()));
    return {table_zeros(param.sizes(), elements),
            options.row_wise() ? table_zeros({param.size(0)}, numbers)
                               : table_zeros(param.sizes(), elements),
            table_zeros({param.size(0)}, numbers.dtype(at::kInt)),
            PendingSteps::make(param.size(0), param.device())};
  }

  static void check_rows(const char* op, const Tensor& param, TensorList state) {
    check_row_adam_state(op, param, state);
  }

  static void check_dense(const char* op, const Tensor& param, TensorList state) {
    check_dense_state(op, "exp_avg", state[AdamState::kExpAvg], param);
    check_dense_state(op, "exp_avg_sq", state[AdamState::kExpAvgSq], param);
  }

  static void check_step(const ParamStep<Options>& step) {
    const Options& options = *step.options;
    TORCH_CHECK_VALUE(options.lr() * options.weight_decay() < 1,
                      "RowAdam: expected lr * weight_decay below 1, got ", options.lr(), " * ",
                      options.weight_decay());
  }

  static bool fits_kernel(const Tensor& param, TensorList state) {
    return has_row_view(param) && has_row_view(state[AdamState::kExpAvg]) &&
        has_row_view(state[AdamState::kExpAvgSq]);
  }

  static void step_rows(const ParamStep<Options>& item, bool kernel) {
    const TensorList state = item.state;
    const Options& options = *item.options;
    int64_t& step = *state[AdamState::kCount].mutable_data_ptr<int64_t>();
    const auto [beta1, beta2] = options.betas();
    const PendingSteps::Coefficients coefficients{beta1, beta2, options.eps()};
    PendingSteps pending = ready(item.param, state, coefficients, kernel);
    const RowAdamUpdate next{item.param,
                             state[AdamState::kExpAvg],
                             state[AdamState::kExpAvgSq],
                             state[AdamState::kLastStep],
                             pending,
                             step + 1,
                             beta1,
                             beta2,
                             options.eps(),
                             options.lr(),
                             1 - options.lr() * options.weight_decay(),
                             options.stochastic_rounding()};
    (kernel ? row_adam_rows_cpu : row_adam_rows_reference)(next, *item.rows,
                                                           descent_of(options, item.values));
    ++step;
    PendingSteps::set_rounds(state[AdamState::kPending], options.stochastic_rounding());
    pending.add(row_adam_pending_rate(options.lr(), power(beta1, step), power(beta2, step)),
                std::log1p(-options.lr() * options.weight_decay()));
  }

  static void record(const Tensor& param, TensorList state, const Options&) {
    record_pending(param, state, flush_row_adam);
  }

  static double ratio_of(const PendingSteps::Coefficients& c) { return row_adam_ratio(c[0], c[1]); }

  static void catch_up_rows(const Tensor& param, TensorList state, PendingSteps& pending,
                            int64_t step, bool rebase, bool kernel) {
    const auto [beta1, beta2, eps] = PendingSteps::coefficients(state[AdamState::kPending]);
    (kernel ? row_adam_flush_cpu : row_adam_flush_reference)(
        {param, state[AdamState::kExpAvg], state[AdamState::kExpAvgSq], state[AdamState::kLastStep],
         pending, step, beta1, beta2, eps, 0, 1, PendingSteps::rounds(state[AdamState::kPending]),
         rebase});
  }

  static bool can_fuse(const Tensor&) { return true; }

  static void step_dense(const std::vector<ParamStep<Options>>& items, bool fused) {
    const Options& options = *items[0].options;
    const auto [beta1, beta2] = options.betas();
    const std::vector<Tensor> steps = state_of(items, AdamState::kCount);
    at::_foreach_add_(steps, 1);
    const OptionalTensor& lr = items[0].lr;
    if (fused) {
      const auto step = [&](const auto& rate) {
        at::_fused_adamw_(params_of(items), values_of(items), state_of(items, AdamState::kExpAvg),
                          state_of(items, AdamState::kExpAvgSq), {}, steps, rate,
                          std::get<0>(options.betas()), std::get<1>(options.betas()),
                          options.weight_decay(), options.eps(),
                          /*amsgrad=*/false, options.maximize());
      };
      is_defined(lr) ? step(scalar_of(*lr).to(at::kFloat)) : step(options.lr());
      return;
    }
    for (const auto& item : items) {
      const Tensor step = item.state[AdamState::kCount].to(at::kDouble);
      const Tensor &first = item.state[AdamState::kExpAvg],
                   &second = item.state[AdamState::kExpAvgSq];
      if (is_defined(lr)) {
        item.param.mul_(1 - scalar_of(*lr) * options.weight_decay());
      } else {
        item.param.mul_(1 - options.lr() * options.weight_decay());
      }
      first.lerp_(descent_of(options, item.values), 1 - beta1);
      second.mul_(beta2).addcmul_(item.values, item.values, 1 - beta2);
      const Tensor root =
          second.sqrt().div_((1 - at::pow(at::Scalar(beta2), step)).sqrt_()).add_(options.eps());
      root.mul_(1 - at::pow(at::Scalar(beta1), step));
      if (is_defined(lr)) {
        item.param.sub_((first / root).mul_(scalar_of(*lr)));
      } else {
        item.param.addcdiv_(first, root, -options.lr());
      }
    }
  }
};

} // namespace

void check_row_adam_state(const char* op, const Tensor& param, TensorList state) {
  if (state.size() != AdamRule::kRowState) {
    report_wrong_state(op, 0, AdamRule::kRowState, state.size());
  }
  check_row_step(op, state[AdamState::kCount], param);
  const Tensor &first = state[AdamState::kExpAvg], &second = state[AdamState::kExpAvgSq];
  const auto wide = opmath_dtype(param.scalar_type());
  check_element_state(op, "exp_avg", first, param);
  const bool is_row_wise = second.dim() == 1 && (param.dim() != 1 || second.scalar_type() == wide);
  check_row_state(op, "exp_avg_sq", second, param, !is_row_wise,
                  is_row_wise ? wide : first.scalar_type());
  check_row_state(op, "last_step", state[AdamState::kLastStep], param, false, at::kInt);
  PendingSteps::check(op, state[AdamState::kPending], param);
}

void flush_row_adam(const Tensor& param, TensorList state) {
  static const auto op = find_op<decltype(flush_row_adam)>("xsoftmax::row_adam_flush_");
  op.call(param, state);
}

// Reshapes a single second moment per row so that it broadcasts over the first.
static Tensor broadcast_to(const Tensor& second, const Tensor& first) {
  return second.dim() < first.dim() ? second.unsqueeze(1) : second;
}

// Returns the pending movement of rows whose moments are those after step s.
static Tensor pending_movement(const RowAdamUpdate& u, const Tensor& s, const Tensor& movement,
                               const Tensor& first, const Tensor& second) {
  const Tensor scale = (1 - at::pow(at::Scalar(u.beta2), s.to(at::kDouble))).sqrt() * u.eps;
  return divide_by_root(first, broadcast_to(second, first).sqrt() + per_row(scale, first)) *
      per_row(movement, first);
}

void row_adam_rows_reference(const RowAdamUpdate& u, const Tensor& rows, const Tensor& values) {
  const auto [ids, g] = touched_rows(rows, values);
  const Tensor s = u.last_step.index_select(0, ids), count = s.neg().add(u.step).to(at::kDouble);
  const auto [movement, decay] = u.pending(s);
  u.last_step.index_fill_(0, ids, u.step);
  const Tensor old_first = u.exp_avg.index_select(0, ids).to(g.scalar_type()),
               old_second = u.exp_avg_sq.index_select(0, ids).to(g.scalar_type());
  const Tensor pending = pending_movement(u, s, movement * u.decay, old_first, old_second);
  const auto decayed = [&](const Tensor& moment, double beta) {
    return moment * per_row(at::pow(at::Scalar(beta), count), moment);
  };
  const Tensor squares = old_second.dim() < g.dim() ? g.square().mean(1) : g.square();
  const Tensor first = decayed(old_first, u.beta1) + g.mul(1 - u.beta1),
               second = decayed(old_second, u.beta2) + squares.mul(1 - u.beta2);
  const auto store_rounded = [&, &ids = ids](const Tensor& table, const Tensor& next,
                                             bool stochastic, RoundingTarget rounding_target) {
    table.index_copy_(
        0, ids,
        (stochastic ? rounded_rows(next, ids, u.step, table.scalar_type(), rounding_target) : next)
            .to(table.scalar_type()));
  };
  store_rounded(u.exp_avg, first, true, RoundingTarget::State);
  store_rounded(u.exp_avg_sq, second, true, RoundingTarget::SecondState);
  const Tensor root =
      broadcast_to(second, g).sqrt() / std::sqrt(1 - power(u.beta2, u.step)) + u.eps;
  const Tensor moved = divide_by_root(first, root) * (u.lr / (1 - power(u.beta1, u.step)));
  const Tensor old =
      u.param.index_select(0, ids).to(g.scalar_type()).mul(per_row(decay * u.decay, g));
  store_rounded(u.param, old - pending - moved, u.stochastic_rounding, RoundingTarget::Table);
}

void row_adam_flush_reference(const RowAdamUpdate& u) {
  const auto [movement, decay] = u.pending(u.last_step);
  const auto wide = opmath_dtype(u.param.scalar_type());
  const Tensor first = u.exp_avg.to(wide), second = u.exp_avg_sq.to(wide),
               pending = pending_movement(u, u.last_step, movement, first, second);
  const auto store_rounded = [&](const Tensor& table, const Tensor& next, bool stochastic,
                                 RoundingTarget rounding_target) {
    table.copy_(stochastic ? rounded_rows(next, all_rows(u.param), u.step, table.scalar_type(),
                                          rounding_target)
                           : next);
  };
  store_rounded(u.param, u.param.to(wide).mul(per_row(decay, first)) - pending,
                u.stochastic_rounding, RoundingTarget::Table);
  if (u.rebase) {
    const Tensor count = u.last_step.neg().add(u.step).to(at::kDouble);
    store_rounded(u.exp_avg, first.mul(per_row(at::pow(at::Scalar(u.beta1), count), first)), true,
                  RoundingTarget::State);
    store_rounded(u.exp_avg_sq, second.mul(per_row(at::pow(at::Scalar(u.beta2), count), second)),
                  true, RoundingTarget::SecondState);
    u.last_step.copy_(at::where(u.last_step.eq(0), u.last_step, u.step));
  }
}

static RowAdamNumbers numbers_of(const AdamRule::Options& options) {
  return {options.lr(),      std::get<0>(options.betas()), std::get<1>(options.betas()),
          options.eps(),     options.weight_decay(),       options.stochastic_rounding(),
          options.maximize()};
}

RowAdamNumbers check_row_adam_rows(const Tensor& param, TensorList state, const Tensor& rows,
                                   const Tensor& values, std::string_view text,
                                   const OptionalTensor& lr) {
  const auto options = rows_options<AdamRule>(text, lr, param, false);
  plan_rows<AdamRule>(param, state, rows, values, options);
  return numbers_of(options);
}

void row_adam_rows_composite(const Tensor& param, TensorList state, const Tensor& rows,
                             const Tensor& values, std::string_view text,
                             const OptionalTensor& lr) {
  row_rows_composite<AdamRule>(param, state, rows, values, text, lr);
}

void row_adam_terms(const Tensor& param, TensorList state, const RowTerms& terms,
                    std::string_view text, const OptionalTensor& lr,
                    const std::function<void(const RowAdamNumbers&)>& take_step) {
  terms_step<AdamRule>(param, state, terms, text, lr,
                       [&](const auto& options) { take_step(numbers_of(options)); });
}

bool check_row_adam_flush(const Tensor& param, TensorList state) {
  return check_flush<AdamRule>(param, state);
}
void row_adam_flush_composite(const Tensor& param, TensorList state) {
  row_flush_composite<AdamRule>(param, state);
}

static const RegisterPendingRule pending_rule("row_adam", check_row_adam_state, flush_row_adam);

XSOFTMAX_OPERATORS(m, kSparseStep<AdamRule>) { define<AdamRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { on_any_device<AdamRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { on_cpu<AdamRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { on_meta<AdamRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, SparseCPU, m) { on_sparse<AdamRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, SparseCUDA, m) { on_sparse<AdamRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, SparseMeta, m) { on_sparse_meta<AdamRule>(m); }

} // namespace xsoftmax
