#include "samplers/midx_refresh.h"

#include "core/autocast.h"
#include "core/checks.h"
#include "core/impl.h"
#include "core/optional.h"
#include "core/permutation.h"
#include "samplers/adaptive.h"
#include "clusters/kmeans.h"
#include "samplers/midx_index_cpu.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

// What an index is made from; `spread` is overwritten.
struct ClassTable {
  const Tensor& weight;
  const OptionalTensor& bias;
  const OptionalTensor& spread;
  const OptionalTensor& query_square;
};

#define XS_TABLE_PARAMS \
  const Tensor &weight, const OptionalTensor &bias, const OptionalTensor &spread, const OptionalTensor &query_square
#define XS_TABLE_ARGS {weight, bias, spread, query_square}
#define XS_TABLE_SCHEMA "Tensor weight, Tensor? bias, Tensor(l!)? spread, Tensor? query_square"

void check_table(const char* op, const ClassTable& table, const MidxIndex& index) {
  const auto& [weight, bias, spread, query_square] = table;
  check_midx(op, weight, index);
  check_class_table(op, weight, bias, index.cell.sym_size(0));
  TORCH_CHECK_VALUE(given(spread) == given(query_square), op, ": expected spread and query_square, or neither, got one");
  if (given(spread)) {
    check::dim(op, "spread", *spread, 1);
    check::size(op, "spread", *spread, 0, weight.sym_size(0), "the rows of weight");
    check::dtype(op, "spread", *spread, at::kFloat);
    check::dim(op, "query_square", *query_square, 0);
    check::dtype(op, "query_square", *query_square, at::kDouble);
    TORCH_CHECK_VALUE(given(index.log_weight), op, ": expected spread just where the index has weights, got one without");
    return;
  }
  TORCH_CHECK_VALUE(given(bias) == given(index.log_weight), op, ": expected bias just where the index has weights, got ",
                    given(bias) ? "a bias" : "none");
}

void check_refresh(const char* op, const Tensor& seed, const ClassTable& table, const MidxIndex& index,
                   bool residual, int64_t iterations, int64_t points) {
  check::dim(op, "seed", seed, 0);
  check::int64(op, "seed", seed);
  check_table(op, table, index);
  const Tensor& weight = table.weight;
  const auto width1 = index.codewords1.sym_size(1), width2 = index.codewords2.sym_size(1);
  TORCH_CHECK_VALUE(residual ? width1 == weight.sym_size(1) && width2 == weight.sym_size(1) : width1 + width2 == weight.sym_size(1), op,
                    ": expected codewords of a ", residual ? "residual" : "product", " quantizer of rows of width ", weight.sym_size(1),
                    ", got widths ", width1, " and ", width2);
  TORCH_CHECK_VALUE(iterations >= 0, op, ": expected iterations of at least 0, got ", iterations);
  TORCH_CHECK_VALUE(points >= 1, op, ": expected points of at least 1, got ", points);
}

// Cells and weights after `cell` or the bias has changed.
void lay_out(const ClassTable& table, const MidxIndex& index) {
  const bool weighted = given(index.log_weight);
  if (weighted) {
    Tensor value = given(table.bias) ? table.bias->to(at::kFloat) : at::zeros_like(*index.log_weight);
    if (given(table.spread)) {
      value = value + *table.spread * (*table.query_square / (2.0 * double(table.weight.size(1)))).to(at::kFloat);
    }
    TORCH_CHECK_VALUE(value.isfinite().all().item<bool>(), "MIDX: expected spread with finite values, got an infinity or NaN");
    index.log_weight->copy_((value - value.index_select(0, index.order).max()).clamp_(-kMidxWeightRange, 0));
  }
  const std::array<Tensor, 3> tables{index.order, index.start, index.mass};
  const bool in_place = index.cell.is_cpu() && !use_reference() &&
                        std::all_of(tables.begin(), tables.end(), [](const Tensor& table) { return table.is_contiguous(); }) &&
                        (!weighted || (index.prefix->is_contiguous() && index.heaviest->is_contiguous()));
  if (in_place) {
    fill_cells_cpu(index.cell, index.log_weight,
                   {index.order, index.start, index.mass, weighted ? *index.prefix : Tensor(), weighted ? *index.heaviest : Tensor()});
    return;
  }
  const auto [order, start, mass, prefix, heaviest] =
      midx_cells(index.cell, index.log_weight, index.codewords1.size(0), index.order.size(0));
  index.order.copy_(order);
  index.start.copy_(start);
  index.mass.copy_(mass);
  if (weighted) {
    index.prefix->copy_(prefix);
    index.heaviest->copy_(heaviest);
  }
}

// Rows of classes that are drawn, at most `points`, picked at random.
Tensor training_rows(const Tensor& seed, const Tensor& weight, const Tensor& order, int64_t points) {
  const int64_t drawn = order.size(0);
  if (drawn <= points) {
    return weight.index_select(0, order).to(at::kFloat);
  }
  const RandomPermutation place(uint64_t(seed.item<int64_t>()), 2, uint64_t(drawn));
  std::vector<int64_t> picked(points);
  for (int64_t i = 0; i < points; ++i) {
    picked[i] = int64_t(place(uint64_t(i)));
  }
  return weight.index_select(0, order.index_select(0, at::tensor(picked, at::kLong).to(order.device()))).to(at::kFloat);
}

// `squares` come of rows and codewords, which the whole table need not be read again to trust: only where they are not finite.
void check_finite(const char* op, const Tensor& squares, const ClassTable& table) {
  if (!squares.sum(at::kDouble).isfinite().item<bool>()) {
    check_finite_rows(op, table.weight);
    TORCH_CHECK_VALUE(false, op, ": expected codewords with finite values, got an infinity or NaN");
  }
}

Tensor refresh(const char* op, const Tensor& seed, const ClassTable& table, const MidxIndex& index, bool residual,
               int64_t iterations, int64_t points, bool warm) {
  const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
  const Tensor& weight = table.weight;
  check_finite_bias(op, table.bias);
  const int64_t k = index.codewords1.size(0), width1 = index.codewords1.size(1), width2 = index.codewords2.size(1);
  const Tensor rows = training_rows(seed, weight, index.order, points), squares = rows.square().sum(1);
  check_finite(op, squares, table);
  const auto init = [&](const Tensor& codewords) { return warm ? OptionalTensor(codewords) : std::nullopt; };
  const auto [first, inertia1] = kmeans(seed, residual ? rows : rows.narrow(1, 0, width1), k, iterations, init(index.codewords1));
  Tensor rest;
  if (residual) { // one codebook is coded as a product with a second one of no width
    const Tensor nothing = first.new_empty({k, 0});
    const Tensor nearest = std::get<0>(midx_encode(rows, first, nothing)).to(at::kLong).div_(k, "floor");
    rest = rows - first.index_select(0, nearest);
  } else {
    rest = rows.narrow(1, width1, width2);
  }
  const auto [second, inertia2] = kmeans(seed, rest, k, iterations, init(index.codewords2));
  const auto [cell, error] = midx_encode(weight, first, second);
  check_finite(op, error, table);
  index.codewords1.copy_(first);
  index.codewords2.copy_(second);
  index.cell.copy_(index.order.size(0) == cell.size(0) ? cell : at::where(index.cell.lt(0), index.cell, cell));
  if (given(table.spread)) {
    table.spread->copy_(error);
  }
  lay_out(table, index);
  return at::stack({error.index_select(0, index.order).to(at::kDouble).mean(), squares.to(at::kDouble).mean(),
                    inertia1[iterations], inertia2[iterations], index.mass.gt(0).sum().to(at::kDouble)});
}

void update(const char* op, const ClassTable& table, const MidxIndex& index, const Tensor& rows) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_finite_bias(op, table.bias);
  const Tensor drawn = rows.index_select(0, index.cell.index_select(0, rows).ge(0).nonzero().squeeze(1));
  const auto [cell, error] = midx_encode(table.weight.index_select(0, drawn), index.codewords1, index.codewords2);
  check_finite(op, error, table);
  index.cell.index_copy_(0, drawn, cell);
  if (given(table.spread)) {
    table.spread->index_copy_(0, drawn, error);
  }
  lay_out(table, index);
}

Tensor midx_refresh_(const Tensor& seed, XS_TABLE_PARAMS, XS_MIDX_INDEX_PARAMS, bool residual,
                     int64_t iterations, int64_t points, bool warm) {
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_refresh("midx_refresh_", seed, XS_TABLE_ARGS, index, residual, iterations, points);
  return refresh("midx_refresh_", seed, XS_TABLE_ARGS, index, residual, iterations, points, warm);
}

Tensor midx_refresh_meta(const Tensor& seed, XS_TABLE_PARAMS, XS_MIDX_INDEX_PARAMS, bool residual,
                         int64_t iterations, int64_t points, bool warm) {
  check_refresh("midx_refresh_", seed, XS_TABLE_ARGS, {XS_MIDX_INDEX_ARGS}, residual, iterations, points);
  return at::empty({int64_t(std::size(kMidxStatNames))}, weight.options().dtype(at::kDouble).requires_grad(false));
}

void check_update(const ClassTable& table, const MidxIndex& index, const Tensor& rows) {
  check_table("midx_update_", table, index);
  check::dim("midx_update_", "rows", rows, 1);
  check::int64("midx_update_", "rows", rows);
  check::same_device("midx_update_", "rows", rows, "weight", table.weight);
}

void midx_update_(XS_TABLE_PARAMS, XS_MIDX_INDEX_PARAMS, const Tensor& rows) {
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_update(XS_TABLE_ARGS, index, rows);
  if (rows.is_cpu()) {
    check::class_ids("midx_update_", "rows", rows, weight.size(0));
  }
  update("midx_update_", XS_TABLE_ARGS, index, rows);
}

void midx_update_meta(XS_TABLE_PARAMS, XS_MIDX_INDEX_PARAMS, const Tensor& rows) {
  check_update(XS_TABLE_ARGS, {XS_MIDX_INDEX_ARGS}, rows);
}

void check_step(const Tensor& seed, const ClassTable& table, const Tensor& step, const OptionalTensor& touched,
                const MidxIndex& index, bool residual, int64_t iterations, int64_t warm_iterations, int64_t points, int64_t refresh_every,
                int64_t update_every) {
  constexpr const char* op = "midx_step_";
  check_refresh(op, seed, table, index, residual, std::min(iterations, warm_iterations), points);
  check::dim(op, "step", step, 0);
  check::int64(op, "step", step);
  if (given(touched)) {
    check::dim(op, "touched", *touched, 1);
    check::size(op, "touched", *touched, 0, table.weight.sym_size(0), "the rows of weight");
    check::dtype(op, "touched", *touched, at::kBool);
  }
  TORCH_CHECK_VALUE(refresh_every >= 0 && update_every >= 0, op, ": expected refresh_every and update_every of at least 0, got ",
                    refresh_every, " and ", update_every);
}

void midx_step_(const Tensor& seed, XS_TABLE_PARAMS, const Tensor& step, const OptionalTensor& touched,
                XS_MIDX_INDEX_PARAMS, bool residual, int64_t iterations, int64_t warm_iterations, int64_t points, int64_t refresh_every,
                int64_t update_every) {
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_step(seed, XS_TABLE_ARGS, step, touched, index, residual, iterations, warm_iterations, points, refresh_every, update_every);
  const int64_t done = step.item<int64_t>();
  if (refresh_is_due(done, refresh_every)) {
    refresh("midx_step_", seed, XS_TABLE_ARGS, index, residual, done > 0 ? warm_iterations : iterations, points, done > 0);
    if (given(touched)) {
      touched->zero_();
    }
  } else if (given(touched) && update_every > 0 && done % update_every == 0) {
    update("midx_step_", XS_TABLE_ARGS, index, touched->nonzero().squeeze(1));
    touched->zero_();
  }
  step.add_(1);
}

void midx_step_meta(const Tensor& seed, XS_TABLE_PARAMS, const Tensor& step, const OptionalTensor& touched,
                    XS_MIDX_INDEX_PARAMS, bool residual, int64_t iterations, int64_t warm_iterations, int64_t points, int64_t refresh_every,
                    int64_t update_every) {
  check_step(seed, XS_TABLE_ARGS, step, touched, {XS_MIDX_INDEX_ARGS}, residual, iterations, warm_iterations, points, refresh_every,
             update_every);
}

} // namespace

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("midx_refresh_(Tensor seed, " XS_TABLE_SCHEMA ", " XS_MIDX_INDEX_MUTABLE_SCHEMA
        ", bool residual, int iterations, int points, bool warm) -> Tensor");
  m.def("midx_update_(" XS_TABLE_SCHEMA ", " XS_MIDX_INDEX_MUTABLE_SCHEMA ", Tensor rows) -> ()");
  m.def("midx_step_(Tensor seed, " XS_TABLE_SCHEMA ", Tensor(j!) step, Tensor(k!)? touched, " XS_MIDX_INDEX_MUTABLE_SCHEMA
        ", bool residual, int iterations, int warm_iterations, int points, int refresh_every, int update_every) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("midx_refresh_", midx_refresh_);
  m.impl("midx_update_", midx_update_);
  m.impl("midx_step_", midx_step_);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("midx_refresh_", midx_refresh_meta);
  m.impl("midx_update_", midx_update_meta);
  m.impl("midx_step_", midx_step_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) { below_autocast(m, {"midx_refresh_", "midx_update_", "midx_step_"}); }
TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) { below_autocast(m, {"midx_refresh_", "midx_update_", "midx_step_"}); }

} // namespace xsoftmax
