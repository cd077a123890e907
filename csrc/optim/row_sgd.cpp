#include "optim/row_sgd.h"

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "table/files/mapped_file.h"
#include "cpu/memory.h"
#include "optim/pending_rule.h"
#include "optim/row_step.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <cmath>

namespace xsoftmax {
namespace {

using at::Tensor;
using at::TensorList;

// The buffer is [0] until a step needs it.
bool has_buffer(const Tensor& param, TensorList state) {
  return state[SgdState::kBuffer].sizes() == param.sizes();
}

// Allocates the buffer for steps with momentum. Returns true if it did not exist before.
bool make_buffer(const Tensor& param, TensorList state) {
  const bool missing = !has_buffer(param, state);
  if (missing) {
    state[SgdState::kBuffer].set_(table_zeros(param.sizes(), state[SgdState::kBuffer].options()));
  }
  return missing;
}

struct SgdRule : PendingRule<SgdRule> {
  using Options = optim::RowSGDOptions;
  static constexpr const char* kName = "RowSGD";
  static constexpr const char *kStep = "row_sgd_step_", *kRows = "row_sgd_rows_",
                              *kTerms = "row_sgd_terms_", *kCheckTerms = "row_sgd_check_terms",
                              *kState = "row_sgd_state", *kFlush = "row_sgd_flush_";
  static constexpr size_t kRowState = 4, kDenseState = 2;
  static constexpr std::array<size_t, 2> kHostState{SgdState::kCount, SgdState::kPending};
  static constexpr std::array<const char*, kRowState> kNames{"step", "momentum_buffer", "last_step",
                                                             "pending"};

  static std::vector<Tensor> new_state(const Tensor& param, bool rows, const Options& options) {
    const auto dtype = param.options().dtype(
        rows ? element_state_dtype(kState, param, options.state_dtype()) : param.scalar_type());
    const bool buffer = options.momentum() != 0;
    if (!rows) {
      return {buffer ? at::zeros_like(param) : at::empty({0}, dtype)};
    }
    return {buffer ? table_zeros(param.sizes(), dtype) : at::empty({0}, dtype),
            table_zeros({param.size(0)}, dtype.dtype(at::kInt)),
            PendingSteps::make(param.size(0), param.device())};
  }

  static void check_rows(const char* op, const Tensor& param, TensorList state) {
    check_row_sgd_state(op, param, state);
  }

  static void check_dense(const char* op, const Tensor& param, TensorList state) {
    if (state[SgdState::kBuffer].dim() != 1 || state[SgdState::kBuffer].sym_size(0) != 0) {
      check_dense_state(op, "momentum_buffer", state[SgdState::kBuffer], param);
    }
  }

  static void check_step(const ParamStep<Options>& step) {
    const Options& options = *step.options;
    TORCH_CHECK_VALUE(options.lr() * options.weight_decay() < 1,
                      "RowSGD: expected lr * weight_decay below 1, got ", options.lr(), " * ",
                      options.weight_decay());
    TORCH_CHECK_VALUE(
        options.momentum() == 0 || has_buffer(step.param, step.state) ||
            MappedFile::of(step.state[SgdState::kLastStep]) == nullptr,
        "RowSGD: expected the momentum of a mapped table from its first step on, got ",
        options.momentum(),
        " later: its state has no room for a buffer. Delete the file of the state to begin anew");
  }

  static bool fits_kernel(const Tensor& param, TensorList state) {
    return has_row_view(param) && has_row_view(state[SgdState::kBuffer]);
  }

  static void step_rows(const ParamStep<Options>& item, bool kernel) {
    const TensorList state = item.state;
    const Options& options = *item.options;
    int64_t& step = *state[SgdState::kCount].mutable_data_ptr<int64_t>();
    const double momentum = options.momentum();
    const PendingSteps::Coefficients coefficients{momentum, double(options.nesterov()), 0};
    PendingSteps pending = ready(item.param, state, coefficients, kernel);
    const bool first = step == 0 || !has_buffer(item.param, state);
    if (momentum != 0) {
      make_buffer(item.param, state);
    }
    const bool defers = momentum != 0 || options.weight_decay() != 0 || !pending.empty();
    const RowSGDUpdate update{
        item.param,
        momentum != 0 ? OptionalTensor(state[SgdState::kBuffer]) : std::nullopt,
        defers ? OptionalTensor(state[SgdState::kLastStep]) : std::nullopt,
        pending,
        step + 1,
        momentum,
        options.lr(),
        1 - options.lr() * options.weight_decay(),
        first ? 1 : 1 - options.dampening(),
        options.nesterov(),
        options.maximize(),
        options.stochastic_rounding()};
    (kernel ? row_sgd_rows_cpu : row_sgd_rows_reference)(update, *item.rows, item.values);
    ++step;
    PendingSteps::set_rounds(state[SgdState::kPending], options.stochastic_rounding());
    if (defers) {
      pending.add(options.lr() * (options.nesterov() ? momentum : 1),
                  std::log1p(-options.lr() * options.weight_decay()));
    } else {
      pending.clear(step, coefficients);
    }
  }

  // A step without pending updates may follow one that has registered them, so nothing is
  // unregistered.
  static void record(const Tensor& param, TensorList state, const Options& options) {
    if (options.momentum() != 0 || options.weight_decay() != 0) {
      record_pending(param, state, flush_row_sgd);
    }
  }

  static double ratio_of(const PendingSteps::Coefficients& c) { return c[0]; } // the momentum

  static void catch_up_rows(const Tensor& param, TensorList state, PendingSteps& pending,
                            int64_t step, bool rebase, bool kernel) {
    const double momentum = ratio_of(PendingSteps::coefficients(state[SgdState::kPending]));
    RowSGDUpdate update{param, std::nullopt, state[SgdState::kLastStep], pending, step, momentum};
    update.rebase = rebase;
    update.stochastic_rounding = PendingSteps::rounds(state[SgdState::kPending]);
    // Steps without momentum leave the buffer unchanged.
    if (momentum != 0 && has_buffer(param, state)) {
      update.momentum_buffer = state[SgdState::kBuffer];
    }
    (kernel ? row_sgd_flush_cpu : row_sgd_flush_reference)(update);
  }

  static bool can_fuse(const Tensor&) { return true; }

  static void step_dense(const std::vector<ParamStep<Options>>& items, bool fused) {
    const Options& options = *items[0].options;
    const bool dampened = options.momentum() != 0 && options.dampening() != 0;
    std::vector<ParamStep<Options>> fusing;
    for (const auto& item : items) {
      const bool buffer_is_new = options.momentum() != 0 && !has_buffer(item.param, item.state);
      if (buffer_is_new) {
        item.state[SgdState::kBuffer].set_(at::zeros_like(item.param));
      }
      // The host has to tell the fused kernel whether a step is the first, which matters if the
      // gradient is dampened.
      if (fused && !dampened) {
        fusing.push_back(item);
      } else {
        step_one(item, options, buffer_is_new);
      }
    }
    if (!fusing.empty()) {
      const auto buffers =
          options.momentum() != 0 ? state_of(fusing, SgdState::kBuffer) : std::vector<Tensor>();
      const auto step = [&](const auto& rate) {
        at::_fused_sgd_(params_of(fusing), values_of(fusing), buffers, options.weight_decay(),
                        options.momentum(), rate, options.dampening(), options.nesterov(),
                        options.maximize(), /*is_first_step=*/false);
      };
      const OptionalTensor& lr = fusing[0].lr;
      is_defined(lr) ? step(scalar_of(*lr).to(at::kFloat)) : step(options.lr());
    }
    at::_foreach_add_(state_of(items, SgdState::kCount), 1);
  }

  static void step_one(const ParamStep<Options>& item, const Options& options, bool buffer_is_new) {
    Tensor direction = options.maximize() ? item.values.neg() : item.values;
    if (options.weight_decay() != 0) {
      direction = direction.add(item.param, options.weight_decay());
    }
    if (options.momentum() != 0) {
      const Tensor& buffer = item.state[SgdState::kBuffer];
      const bool whole = buffer_is_new || options.dampening() == 0;
      // The first step takes all of the gradient.
      const auto gradient_factor = [&] {
        return 1 - item.state[SgdState::kCount].ne(0).to(at::kDouble) * options.dampening();
      };
      buffer.mul_(options.momentum()).add_(whole ? direction : direction.mul(gradient_factor()));
      direction = options.nesterov() ? direction.add(buffer, options.momentum()) : buffer;
    }
    if (is_defined(item.lr)) {
      item.param.sub_(direction.mul(scalar_of(*item.lr)));
    } else {
      item.param.add_(direction, -options.lr());
    }
  }
};

} // namespace

void check_row_sgd_state(const char* op, const Tensor& param, TensorList state) {
  if (state.size() != SgdRule::kRowState) {
    report_wrong_state(op, 0, SgdRule::kRowState, state.size());
  }
  check_row_step(op, state[SgdState::kCount], param);
  const Tensor& buffer = state[SgdState::kBuffer];
  if (buffer.dim() != 1 || buffer.sym_size(0) != 0) {
    check_element_state(op, "momentum_buffer", buffer, param);
  }
  const auto dtype = opmath_dtype(param.scalar_type());
  check::dtype(
      op, "momentum_buffer", buffer,
      dtype == at::kFloat && buffer.scalar_type() == at::kBFloat16 ? at::kBFloat16 : dtype);
  check_row_state(op, "last_step", state[SgdState::kLastStep], param, false, at::kInt);
  PendingSteps::check(op, state[SgdState::kPending], param);
}

void flush_row_sgd(const Tensor& param, TensorList state) {
  static const auto op = find_op<decltype(flush_row_sgd)>("xsoftmax::row_sgd_flush_");
  op.call(param, state);
}

// Returns momentum^(step - s), the factor of the buffer of rows whose last gradient was in step s.
static Tensor kept(const RowSGDUpdate& u, const Tensor& s) {
  return at::where(s.eq(0), 1.0,
                   at::pow(at::Scalar(u.momentum), s.neg().add(u.step).to(at::kDouble)));
}

void row_sgd_rows_reference(const RowSGDUpdate& u, const Tensor& rows, const Tensor& values) {
  auto [ids, g] = touched_rows(rows, values);
  g = u.maximize ? g.neg() : g;
  Tensor next = u.param.index_select(0, ids).to(g.scalar_type());
  if (is_defined(u.last_step)) {
    const Tensor s = u.last_step->index_select(0, ids);
    const auto [movement, decay] = u.pending(s);
    next = next.mul(per_row(decay * u.decay, g));
    u.last_step->index_fill_(0, ids, u.step);
    if (is_defined(u.momentum_buffer)) {
      const Tensor old = u.momentum_buffer->index_select(0, ids);
      const Tensor buffer = per_row(kept(u, s), g).mul(old) + g.mul(u.gradient_factor);
      next = next - per_row(movement * u.decay, g).mul(old);
      u.momentum_buffer->index_copy_(
          0, ids,
          rounded_rows(buffer, ids, u.step, u.momentum_buffer->scalar_type(), RoundingTarget::State)
              .to(u.momentum_buffer->scalar_type()));
      g = u.nesterov ? g + buffer.mul(u.momentum) : buffer;
    }
  }
  next = next - g.mul(u.lr);
  if (u.stochastic_rounding) {
    next = rounded_rows(next, ids, u.step, u.param.scalar_type(), RoundingTarget::Table);
  }
  u.param.index_copy_(0, ids, next.to(u.param.scalar_type()));
}

void row_sgd_flush_reference(const RowSGDUpdate& u) {
  const auto [movement, decay] = u.pending(*u.last_step);
  const Tensor old = u.param.to(opmath_dtype(u.param.scalar_type()));
  Tensor next = old.mul(per_row(decay, old));
  if (is_defined(u.momentum_buffer)) {
    next = next - per_row(movement, old).mul(*u.momentum_buffer);
  }
  const auto rounded = [&](const Tensor& all, const Tensor& stored,
                           RoundingTarget rounding_target) {
    return rounded_rows(all, all_rows(u.param), u.step, stored.scalar_type(), rounding_target);
  };
  u.param.copy_(u.stochastic_rounding ? rounded(next, u.param, RoundingTarget::Table) : next);
  if (u.rebase) {
    if (is_defined(u.momentum_buffer)) {
      const Tensor& buffer = *u.momentum_buffer;
      buffer.copy_(rounded(buffer.to(old.scalar_type()).mul(per_row(kept(u, *u.last_step), old)),
                           buffer, RoundingTarget::State));
    }
    u.last_step->copy_(at::where(u.last_step->eq(0), *u.last_step, u.step));
  }
}

static RowSGDNumbers numbers_of(const SgdRule::Options& options) {
  return {
      options.lr(),       options.momentum(), options.dampening(),          options.weight_decay(),
      options.nesterov(), options.maximize(), options.stochastic_rounding()};
}

RowSGDNumbers check_row_sgd_rows(const Tensor& param, TensorList state, const Tensor& rows,
                                 const Tensor& values, std::string_view text,
                                 const OptionalTensor& lr) {
  const auto options = rows_options<SgdRule>(text, lr, param, false);
  plan_rows<SgdRule>(param, state, rows, values, options);
  return numbers_of(options);
}

bool make_row_sgd_buffer(const Tensor& param, TensorList state) {
  return make_buffer(param, state);
}

void row_sgd_rows_composite(const Tensor& param, TensorList state, const Tensor& rows,
                            const Tensor& values, std::string_view text, const OptionalTensor& lr) {
  row_rows_composite<SgdRule>(param, state, rows, values, text, lr);
}

void row_sgd_terms(const Tensor& param, TensorList state, const RowTerms& terms,
                   std::string_view text, const OptionalTensor& lr,
                   const std::function<void(const RowSGDNumbers&)>& take_step) {
  terms_step<SgdRule>(param, state, terms, text, lr,
                      [&](const auto& options) { take_step(numbers_of(options)); });
}

bool check_row_sgd_flush(const Tensor& param, TensorList state) {
  return check_flush<SgdRule>(param, state);
}
void row_sgd_flush_composite(const Tensor& param, TensorList state) {
  row_flush_composite<SgdRule>(param, state);
}

static const RegisterPendingRule pending_rule("row_sgd", check_row_sgd_state, flush_row_sgd);

XSOFTMAX_OPERATORS(m, kSparseStep<SgdRule>) { define<SgdRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { on_any_device<SgdRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { on_cpu<SgdRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { on_meta<SgdRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, SparseCPU, m) { on_sparse<SgdRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, SparseCUDA, m) { on_sparse<SgdRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, SparseMeta, m) { on_sparse_meta<SgdRule>(m); }

} // namespace xsoftmax
