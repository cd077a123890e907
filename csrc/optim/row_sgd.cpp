#include "optim/row_sgd.h"

#include "core/checks.h"
#include "core/dtypes.h"
#include "core/impl.h"
#include "core/memory.h"
#include "optim/owing_rule.h"
#include "optim/row_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

namespace xsoftmax {
namespace {

using at::Tensor;
using at::TensorList;

enum State { kCount, kBuffer, kLastStep, kOwed };

// A buffer that was not needed yet is [0].
bool has_buffer(const Tensor& param, TensorList state) { return state[kBuffer].sizes() == param.sizes(); }

bool has_kernel(const Tensor& param, TensorList state) {
  return param.is_cpu() && !use_reference() && has_row_view(param) && has_row_view(state[kBuffer]);
}

struct SgdRule : OwingRule<SgdRule> {
  using Options = optim::RowSGDOptions;
  static constexpr const char *kStep = "row_sgd_step_", *kState = "row_sgd_state", *kFlush = "row_sgd_flush_";
  static constexpr size_t kRowState = 4, kDenseState = 2;

  static std::vector<Tensor> new_state(const Tensor& param, bool rows, const Options& options) {
    const auto dtype = param.options().dtype(rows ? opmath_dtype(param.scalar_type()) : param.scalar_type());
    const bool buffer = options.momentum() != 0;
    if (!rows) {
      return {buffer ? at::zeros_like(param) : at::empty({0}, dtype)};
    }
    return {buffer ? table_zeros(param.sizes(), dtype) : at::empty({0}, dtype), table_zeros({param.size(0)}, dtype.dtype(at::kInt)),
            OwedSteps::make(param.size(0), host_of(param))};
  }

  static void check_rows(const char* op, const Tensor& param, TensorList state) { check_row_sgd_state(op, param, state); }

  static void check_dense(const char* op, const Tensor& param, TensorList state) {
    if (state[kBuffer].dim() != 1 || state[kBuffer].sym_size(0) != 0) {
      check_dense_state(op, "momentum_buffer", state[kBuffer], param);
    }
  }

  static void check_step(const Options& options) {
    TORCH_CHECK_VALUE(options.lr() * options.weight_decay() < 1, "RowSGD: expected lr * weight_decay below 1, got ", options.lr(), " * ",
                      options.weight_decay());
  }

  static void step_rows(const ParamStep<Options>& item) {
    const TensorList state = item.state;
    const Options& options = *item.options;
    int64_t& step = *state[kCount].mutable_data_ptr<int64_t>();
    const double momentum = options.momentum();
    const OwedSteps::Coefficients coefficients{momentum, double(options.nesterov()), 0};
    OwedSteps owed = ready(item.param, state, coefficients);
    const bool first = step == 0 || !has_buffer(item.param, state);
    if (momentum != 0 && !has_buffer(item.param, state)) {
      state[kBuffer].set_(table_zeros(item.param.sizes(), state[kBuffer].options()));
    }
    const bool owes = momentum != 0 || options.weight_decay() != 0 || !owed.empty();
    const RowSGDUpdate update{item.param,
                              momentum != 0 ? OptionalTensor(state[kBuffer]) : std::nullopt,
                              owes ? OptionalTensor(state[kLastStep]) : std::nullopt,
                              owed,
                              step + 1,
                              momentum,
                              options.lr(),
                              1 - options.lr() * options.weight_decay(),
                              first ? 1 : 1 - options.dampening(),
                              options.nesterov(),
                              options.maximize()};
    (has_kernel(item.param, state) ? row_sgd_rows_cpu : row_sgd_rows_reference)(update, *item.rows, item.values);
    ++step;
    if (owes) {
      owed.add(options.lr() * (options.nesterov() ? momentum : 1), std::log1p(-options.lr() * options.weight_decay()));
      record_debt(item.param, state, flush_row_sgd);
    } else {
      owed.settle(step, coefficients);
    }
  }

  static double ratio_of(const OwedSteps::Coefficients& c) { return c[0]; } // the momentum

  static void make_up_rows(const Tensor& param, TensorList state, OwedSteps& owed, int64_t step, bool rebase) {
    const double momentum = ratio_of(OwedSteps::coefficients(state[kOwed]));
    RowSGDUpdate update{param, std::nullopt, state[kLastStep], owed, step, momentum};
    update.rebase = rebase;
    if (momentum != 0 && has_buffer(param, state)) { // steps without momentum left the buffer alone
      update.momentum_buffer = state[kBuffer];
    }
    (has_kernel(param, state) ? row_sgd_flush_cpu : row_sgd_flush_reference)(update);
  }

  static bool can_fuse(const Tensor&) { return true; }

  static void step_dense(const std::vector<ParamStep<Options>>& items, bool fused) {
    const Options& options = *items[0].options;
    std::vector<ParamStep<Options>> first, later; // the fused kernel takes all buffers as new or none
    for (const auto& item : items) {
      const bool fresh = item.state[kCount].item<double>() == 0 || !has_buffer(item.param, item.state);
      if (options.momentum() != 0 && !has_buffer(item.param, item.state)) {
        item.state[kBuffer].set_(at::zeros_like(item.param));
      }
      (fresh ? first : later).push_back(item);
    }
    for (const auto* part : {&first, &later}) {
      if (!part->empty()) {
        at::_foreach_add_(state_of(*part, kCount), 1);
        (fused ? step_fused : step_each)(*part, options, part == &first);
      }
    }
  }

  static void step_fused(const std::vector<ParamStep<Options>>& items, const Options& options, bool first) {
    const auto buffers = options.momentum() != 0 ? state_of(items, kBuffer) : std::vector<Tensor>();
    at::_fused_sgd_(params_of(items), values_of(items), buffers, options.weight_decay(), options.momentum(), options.lr(), options.dampening(),
                    options.nesterov(), options.maximize(), first);
  }

  static void step_each(const std::vector<ParamStep<Options>>& items, const Options& options, bool first) {
    for (const auto& item : items) {
      Tensor direction = options.maximize() ? item.values.neg() : item.values;
      if (options.weight_decay() != 0) {
        direction = direction.add(item.param, options.weight_decay());
      }
      if (options.momentum() != 0) {
        const Tensor& buffer = item.state[kBuffer];
        buffer.mul_(first ? 0 : options.momentum()).add_(direction, first ? 1 : 1 - options.dampening());
        direction = options.nesterov() ? direction.add(buffer, options.momentum()) : buffer;
      }
      item.param.add_(direction, -options.lr());
    }
  }
};

} // namespace

void check_row_sgd_state(const char* op, const Tensor& param, TensorList state) {
  if (state.size() != SgdRule::kRowState) {
    wrong_state(op, 0, SgdRule::kRowState, state.size());
  }
  check_row_step(op, state[kCount]);
  const auto dtype = opmath_dtype(param.scalar_type());
  if (state[kBuffer].dim() != 1 || state[kBuffer].sym_size(0) != 0) {
    check_row_state(op, "momentum_buffer", state[kBuffer], param, true, dtype);
  }
  check::dtype(op, "momentum_buffer", state[kBuffer], dtype);
  check_row_state(op, "last_step", state[kLastStep], param, false, at::kInt);
  OwedSteps::check(op, state[kOwed]);
}

void flush_row_sgd(const Tensor& param, TensorList state) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::row_sgd_flush_", "").typed<decltype(flush_row_sgd)>();
  op.call(param, state);
}

// momentum^(step - s), what is left of the buffer of rows whose last gradient was in step s.
static Tensor kept(const RowSGDUpdate& u, const Tensor& s) {
  return at::where(s.eq(0), 1.0, at::pow(at::Scalar(u.momentum), s.neg().add(u.step).to(at::kDouble)));
}

void row_sgd_rows_reference(const RowSGDUpdate& u, const Tensor& rows, const Tensor& values) {
  auto [ids, g] = touched_rows(rows, values);
  g = u.maximize ? g.neg() : g;
  Tensor next = u.param.index_select(0, ids).to(g.scalar_type());
  if (given(u.last_step)) {
    const Tensor s = u.last_step->index_select(0, ids);
    const auto [movement, decay] = u.owed(s);
    next = next.mul(per_row(decay * u.decay, g));
    u.last_step->index_fill_(0, ids, u.step);
    if (given(u.momentum_buffer)) {
      const Tensor old = u.momentum_buffer->index_select(0, ids);
      const Tensor buffer = per_row(kept(u, s), g).mul(old) + g.mul(u.take);
      next = next - per_row(movement * u.decay, g).mul(old);
      u.momentum_buffer->index_copy_(0, ids, buffer);
      g = u.nesterov ? g + buffer.mul(u.momentum) : buffer;
    }
  }
  u.param.index_copy_(0, ids, (next - g.mul(u.lr)).to(u.param.scalar_type()));
}

void row_sgd_flush_reference(const RowSGDUpdate& u) {
  const auto [movement, decay] = u.owed(*u.last_step);
  const Tensor old = u.param.to(opmath_dtype(u.param.scalar_type()));
  Tensor next = old.mul(per_row(decay, old));
  if (given(u.momentum_buffer)) {
    next = next - per_row(movement, old).mul(*u.momentum_buffer);
  }
  u.param.copy_(next);
  if (u.rebase) {
    if (given(u.momentum_buffer)) {
      u.momentum_buffer->mul_(per_row(kept(u, *u.last_step), *u.momentum_buffer));
    }
    u.last_step->copy_(at::where(u.last_step->eq(0), *u.last_step, u.step));
  }
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) { define<SgdRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { on_any_device<SgdRule>(m); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { on_meta<SgdRule>(m); }

} // namespace xsoftmax
