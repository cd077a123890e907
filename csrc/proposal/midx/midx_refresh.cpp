#include "proposal/midx/midx_refresh.h"

#include "op/autocast.h"
#include "op/checks.h"
#include "op/host_state.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "cpu/impl.h"
#include "op/optional.h"
#include "random/uniform_draws.h"
#include "cluster/kmeans.h"
#include "proposal/midx/midx_index_cpu.h"
#include "proposal/midx/midx_sample.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

// Returns the log weights from bias and spread, float32 [N].
Tensor raw_log_weights(const ClassTable& table, const MidxIndex& index,
                       const OptionalTensor& spread) {
  const Tensor value =
      is_defined(table.bias) ? table.bias->to(at::kFloat) : at::zeros_like(*index.log_weight);
  return is_defined(spread) ? value +
          *spread * (*index.query_square / (2.0 * double(table.weight.size(1)))).to(at::kFloat)
                            : value;
}

OptionalTensor finite_class_weights(const char* op, const ClassTable& table, const MidxIndex& index,
                                    const OptionalTensor& spread) {
  if (is_defined(index.log_weight)) {
    TORCH_CHECK_VALUE(raw_log_weights(table, index, spread).isfinite().all().item<bool>(), op,
                      ": expected spread with finite values, got an infinity or NaN");
  }
  return midx_class_weights(table, index, spread);
}

Tensor midx_training_slots(const Tensor& seed, int64_t drawn, int64_t points) {
  constexpr const char* op = "midx_training_slots";
  check::dim(op, "seed", seed, 0);
  check::int64(op, "seed", seed);
  check_at_least(op, "drawn", drawn, 0);
  check_at_least(op, "points", points, 1);
  return drawn <= points ? at::arange(drawn, seed.options())
                         : uniform_draws(seed, 2, drawn, points, true);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> midx_codebooks(const Tensor& seed, const Tensor& rows,
                                                          const Tensor& codewords1,
                                                          const Tensor& codewords2,
                                                          int64_t iterations, bool warm) {
  constexpr const char* op = "midx_codebooks";
  check::dim(op, "rows", rows, 2);
  check::dtype(op, "rows", rows, at::kFloat);
  check_at_least(op, "iterations", iterations, 0);
  const bool residual = check_codebooks(op, codewords1, codewords2, rows.size(1));
  const int64_t k = codewords1.size(0), width1 = codewords1.size(1), width2 = codewords2.size(1);
  const auto init = [&](const Tensor& codewords) {
    return warm ? OptionalTensor(codewords) : std::nullopt;
  };
  const auto [first, inertia1] =
      kmeans(seed, residual ? rows : rows.narrow(1, 0, width1), k, iterations, init(codewords1));
  Tensor remainder;
  if (residual) { // midx_encode with an empty second codebook assigns rows to the first one
    const Tensor empty_codebook = first.new_empty({k, 0});
    const Tensor nearest =
        std::get<0>(midx_encode(rows, first, empty_codebook)).to(at::kLong).div_(k, "floor");
    remainder = rows - first.index_select(0, nearest);
  } else {
    remainder = rows.narrow(1, width1, width2);
  }
  const auto [second, inertia2] = kmeans(seed, remainder, k, iterations, init(codewords2));
  return {first, second, inertia1[iterations], inertia2[iterations]};
}

// Checks rows and codewords by the finiteness of `squares`, which derive from them. Reads the whole
// table only to report an error.
void check_finite(const char* op, const Tensor& squares, const ClassTable& table) {
  if (!squares.sum(at::kDouble).isfinite().item<bool>()) {
    check_finite_rows(op, "weight", table.weight);
    TORCH_CHECK_VALUE(false, op, ": expected codewords with finite values, got an infinity or NaN");
  }
}

// Runs K-means from the present codewords if `warm`, otherwise from new ones, then encodes every
// class. Writes nothing before all of it has succeeded.
Tensor refresh(const char* op, const Tensor& seed, const ClassTable& table, const MidxIndex& index,
               const MidxOptions& options, bool warm) {
  const Tensor& weight = table.weight;
  check_finite_bias(op, table.bias);
  const int64_t iterations =
      warm && options.form == "learnable" ? 0 : options.iterations; // learnt codewords are kept
  const Tensor slots = midx_training_slots(seed, index.order.size(0),
                                           options.train_points.value_or(256 * options.codewords));
  const Tensor rows = weight.index_select(0, index.order.index_select(0, slots)).to(at::kFloat),
               squares = rows.square().sum(1);
  check_finite(op, squares, table);
  const auto [first, second, inertia1, inertia2] =
      midx_codebooks(seed, rows, index.codewords1, index.codewords2, iterations, warm);
  const auto [cell, error] = midx_encode(weight, first, second);
  check_finite(op, error, table);
  const OptionalTensor log_weight = finite_class_weights(
      op, table, index, is_defined(index.spread) ? OptionalTensor(error) : std::nullopt);

  const Tensor cells =
      index.order.size(0) == cell.size(0) ? cell : at::where(index.cell.lt(0), index.cell, cell);
  rebuild_midx_layout(index, cells, log_weight);
  index.codewords1.copy_(first);
  index.codewords2.copy_(second);
  index.cell.copy_(cells);
  if (is_defined(index.spread)) {
    index.spread->copy_(error);
  }
  if (is_defined(index.touched)) {
    index.touched->zero_();
  }
  return at::stack({error.index_select(0, index.order).to(at::kDouble).mean(),
                    squares.to(at::kDouble).mean(), inertia1, inertia2,
                    index.mass.gt(0).sum().to(at::kDouble)});
}

void update(const char* op, const ClassTable& table, const MidxIndex& index, const Tensor& rows) {
  const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
  check_finite_bias(op, table.bias);
  const Tensor drawn =
      rows.index_select(0, index.cell.index_select(0, rows).ge(0).nonzero().squeeze(1));
  const auto [cell, error] =
      midx_encode(table.weight.index_select(0, drawn), index.codewords1, index.codewords2);
  check_finite(op, error, table);
  const OptionalTensor spread = is_defined(index.spread)
      ? OptionalTensor(index.spread->index_copy(0, drawn, error))
      : std::nullopt;
  const OptionalTensor log_weight = finite_class_weights(op, table, index, spread);

  const Tensor old_cells = index.cell.index_select(0, drawn);
  index.cell.index_copy_(0, drawn, cell);
  try {
    rebuild_midx_layout(index, index.cell, log_weight);
  } catch (...) {
    // Raised if cells of other rows are out of range. Undoing the writes is cheaper than copying
    // all cells beforehand.
    index.cell.index_copy_(0, drawn, old_cells);
    throw;
  }
  if (is_defined(spread)) {
    index.spread->copy_(*spread);
  }
}

} // namespace

MidxIndex checked_midx_update(const Tensor& weight, const OptionalTensor& bias, const Tensor& rows,
                              const Tensor& step, at::TensorList others, std::string_view text) {
  constexpr const char* op = "midx_update_";
  const MidxOptions options = AdaptiveFamily<MidxFamily>::options(op, text);
  const MidxIndex index(op, with_step(others, step), options);
  check_class_table(op, weight, bias, index.cell.sym_size(0), index.dim, options.bias);
  check::same_device(op, "index", index.cell, "weight", weight);
  check::dim(op, "rows", rows, 1);
  check::int64(op, "rows", rows);
  check::same_device(op, "rows", rows, "weight", weight);
  return index;
}

OptionalTensor midx_class_weights(const ClassTable& table, const MidxIndex& index,
                                  const OptionalTensor& spread) {
  if (!is_defined(index.log_weight)) {
    return std::nullopt;
  }
  constexpr double kMin = std::numeric_limits<float>::lowest();
  const Tensor value = at::nan_to_num(raw_log_weights(table, index, spread), kMin, kMin, kMin);
  return (value - value.index_select(0, index.order).max()).clamp_(-kMidxWeightRange, 0);
}

void rebuild_midx_layout(const MidxIndex& index, const Tensor& cell,
                         const OptionalTensor& log_weight) {
  const std::array<OptionalTensor, 5> tables{index.order, index.start, index.mass, index.prefix,
                                             index.heaviest};
  const bool in_place = index.cell.is_cpu() && !use_reference() &&
      std::all_of(tables.begin(), tables.end(),
                  [](const auto& table) { return !is_defined(table) || table->is_contiguous(); });
  if (in_place) {
    fill_cells_cpu(cell, log_weight,
                   {index.order, index.start, index.mass, index.prefix.value_or(Tensor()),
                    index.heaviest.value_or(Tensor())});
  } else {
    const auto [order, start, mass, prefix, heaviest] =
        midx_cells(cell, log_weight, index.codewords1.size(0), index.order.size(0));
    index.order.copy_(order);
    index.start.copy_(start);
    index.mass.copy_(mass);
    if (is_defined(log_weight)) {
      index.prefix->copy_(prefix);
      index.heaviest->copy_(heaviest);
    }
  }
  if (is_defined(log_weight) && !log_weight->is_same(*index.log_weight)) {
    index.log_weight->copy_(*log_weight);
  }
  index.recent.zero_();
}

void rebuild_midx_layout(const MidxIndex& index) {
  rebuild_midx_layout(index, index.cell, index.log_weight);
}

void midx_copy_table(const ClassTable& table, const MidxIndex& index) {
  if (is_defined(index.table)) {
    index.table->copy_(table.weight);
  }
  if (is_defined(index.table_bias)) {
    index.table_bias->copy_(*table.bias);
  }
}

Tensor midx_next_query_square(const Tensor& query_square, const Tensor& mean, const Tensor& step) {
  const double weight = 1.0 / double(std::clamp<int64_t>(step.item<int64_t>(), 1, 100));
  const Tensor next = query_square.lerp(mean, weight);
  return at::where(next.isfinite(), next, query_square);
}

namespace {

void midx_update_meta(const Tensor& weight, const OptionalTensor& bias, const Tensor& rows,
                      const Tensor& step, at::TensorList others, std::string_view text) {
  checked_midx_update(weight, bias, rows, step, others, text);
}

void midx_update_(const Tensor& weight, const OptionalTensor& bias, const Tensor& rows,
                  const Tensor& step, at::TensorList others, std::string_view text) {
  const MidxIndex index = checked_midx_update(weight, bias, rows, step, others, text);
  if (rows.is_cpu()) {
    check::class_ids("midx_update_", "rows", rows, weight.size(0));
  }
  const ClassTable table(weight, bias, is_defined(index.table));
  update("midx_update_", table, index, rows);
  midx_copy_table(table, index);
}

// midx_note_: see the header.

void midx_note_(const Tensor& touched, const OptionalTensor& query_square, const Tensor& step,
                const Tensor& queries, const OptionalTensor& target, const Tensor& ids) {
  check_midx_note(touched, query_square, step, queries, target, ids);
  const at::AutoDispatchBelowADInplaceOrView guard;
  // All that may fail comes before the first write.
  const Tensor counted = is_defined(query_square) ? counted_queries(queries, target) : Tensor();
  Tensor square;
  if (counted.defined() && counted.size(0) > 0) {
    square =
        midx_next_query_square(*query_square, counted.to(at::kDouble).square().sum(1).mean(), step);
  }
  if (touched.numel() > 0) {
    if (touched.is_cpu()) {
      check::class_ids("midx_note_", "ids", ids, touched.size(0));
      Targets("midx_note_", target, queries, touched.size(0));
    }
    const Tensor drawn = (ids.dim() == 2 ? counted_queries(ids, target) : ids).flatten();
    const Tensor counted_targets =
        is_defined(target) ? counted_queries(*target, target).flatten() : drawn.new_empty({0});
    const Tensor targets =
        counted_targets.index_select(0, counted_targets.ge(0).nonzero().squeeze(1));
    touched.index_fill_(0, drawn, true);
    touched.index_fill_(0, targets, true);
  }
  if (square.defined()) {
    query_square->copy_(square);
  }
}

} // namespace

void check_midx_note(const Tensor& touched, const OptionalTensor& query_square, const Tensor& step,
                     const Tensor& queries, const OptionalTensor& target, const Tensor& ids) {
  constexpr const char* op = "midx_note_";
  check::dim(op, "touched", touched, 1);
  check::dtype(op, "touched", touched, at::kBool);
  if (is_defined(query_square)) {
    check::dim(op, "query_square", *query_square, 0);
    check::dtype(op, "query_square", *query_square, at::kDouble);
  }
  check_step(op, step);
  check::dim(op, "queries", queries, 2);
  check_targets(op, queries, target);
  check_query_ids(op, queries, ids);
}

std::vector<Tensor> MidxFamily::resized(const Tensor& is_drawn, const OptionalTensor& rows,
                                        const OptionalTensor& bias, const MidxIndex& index,
                                        const MidxOptions& options) {
  std::vector<Tensor> tables = make(is_drawn, index.dim.expect_int(), options);
  tables[0] = index.codewords1.clone(), tables[1] = index.codewords2.clone();
  if (!is_defined(rows)) {
    return tables;
  }
  const MidxIndex resized_index("midx_resize", new_index(tables, index.step), options);
  const int64_t added = rows->size(0), kept = is_drawn.size(0) - added;
  const auto [cell, error] = midx_encode(*rows, index.codewords1, index.codewords2);
  const auto fill = [&](const Tensor& table, const Tensor& old, const OptionalTensor& new_rows) {
    table.narrow(0, 0, kept).copy_(old.narrow(0, 0, kept));
    if (is_defined(new_rows)) {
      table.narrow(0, kept, added).copy_(*new_rows);
    }
  };
  fill(resized_index.cell, index.cell, cell);
  if (is_defined(resized_index.touched)) {
    fill(*resized_index.touched, *index.touched, std::nullopt);
  }
  if (is_defined(resized_index.spread)) {
    fill(*resized_index.spread, *index.spread, error);
    resized_index.query_square->copy_(*index.query_square);
  }
  if (is_defined(resized_index.table)) {
    fill(*resized_index.table, *index.table, *rows);
  }
  if (is_defined(resized_index.table_bias)) {
    fill(*resized_index.table_bias, *index.table_bias,
         is_defined(bias) ? OptionalTensor(bias->narrow(0, kept, added)) : std::nullopt);
  }
  if (is_defined(resized_index.log_weight)) {
    if (is_defined(bias) || !options.bias) {
      resized_index.log_weight->copy_(
          *midx_class_weights(ClassTable(*rows, bias, false), resized_index, resized_index.spread));
    } else {
      fill(*resized_index.log_weight, *index.log_weight, std::nullopt);
    }
  }
  rebuild_midx_layout(resized_index);
  return tables;
}

std::vector<Tensor> MidxFamily::gained(const OptionalTensor& rows, const OptionalTensor&,
                                       int64_t added, const MidxIndex& index,
                                       const MidxOptions& options) {
  if (options.form == "exact") {
    return {};
  }
  const int64_t count = std::max<int64_t>(0, added), before = index.cell.size(0);
  const auto zeros = [&](const OptionalTensor& table) {
    return is_defined(table) ? at::zeros({count}, table->options()) : Tensor();
  };
  auto [cell, error] = is_defined(rows) ? midx_encode(*rows, index.codewords1, index.codewords2)
                                        : std::tuple(zeros(index.cell), zeros(index.spread));
  // Weights and running sums are 0 until the next layout computes them.
  std::vector<Tensor> gained{{},
                             {},
                             cell,
                             at::arange(before, before + count, index.order.options()),
                             {},
                             {},
                             zeros(index.log_weight),
                             zeros(index.prefix),
                             {},
                             zeros(index.touched)};
  if (options.form == "spread") {
    gained.insert(gained.end(), {error, Tensor()});
  }
  return gained;
}

void MidxFamily::exclude_last(MidxIndex& index, int64_t count) {
  const int64_t left = index.order.size(0) - count;
  index.order = index.order.narrow(0, 0, left);
  if (is_defined(index.prefix)) {
    index.prefix = index.prefix->narrow(0, 0, left);
  }
}

Tensor MidxFamily::refresh(const char* op, const ClassTable& table, const MidxIndex& index,
                           const MidxOptions& options,
                           const std::optional<at::Generator>& generator) {
  const Tensor statistics = with_seed(table.weight.device(), generator, [&](const Tensor& seed) {
    return xsoftmax::refresh(op, seed, table, index, options, check::int64_item(index.step) > 0);
  });
  midx_copy_table(table, index);
  return statistics;
}

void MidxFamily::update_between_refreshes(const char* op, const Tensor& weight,
                                          const OptionalTensor& bias, const MidxIndex& index,
                                          const MidxOptions& options) {
  const bool whole = is_defined(index.table),
             due = is_defined(index.touched) &&
      check::int64_item(index.step) % options.update_every == 0;
  if (!whole && !due) {
    return;
  }
  const ClassTable table(weight, bias, whole);
  if (whole) {
    check_finite_rows(op, "weight", table.weight);
    check_finite_bias(op, table.bias);
  }
  if (due) {
    update(op, table, index, index.touched->nonzero().squeeze(1));
    index.touched->zero_();
  }
  midx_copy_table(table, index);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "midx_update_(Tensor weight, Tensor? bias, Tensor rows, Tensor(a!) step, Tensor(b!)[] index, "
      "str options) -> ()",
      kUsesHostState);
  m.def(
      "midx_codebooks(Tensor seed, Tensor rows, Tensor codewords1, Tensor codewords2, int "
      "iterations, bool warm) -> "
      "(Tensor codewords1, Tensor codewords2, Tensor inertia1, Tensor inertia2)");
  m.def("midx_training_slots(Tensor seed, int drawn, int points) -> Tensor");
  m.def(
      "midx_note_(Tensor(a!) touched, Tensor(b!)? query_square, Tensor step, Tensor queries, "
      "Tensor? target, Tensor ids) -> ()",
      kUsesHostState);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("midx_update_", midx_update_);
  m.impl("midx_note_", midx_note_);
  m.impl("midx_codebooks", midx_codebooks);
  m.impl("midx_training_slots", midx_training_slots);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("midx_update_", midx_update_meta);
  m.impl("midx_note_", check_midx_note);
}

XSOFTMAX_AUTOCAST(m) { disable_autocast(m, {"midx_update_", "midx_note_"}); }

} // namespace xsoftmax
