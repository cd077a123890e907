#include "proposal/midx/midx_index.h"

#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/memory.h"
#include "op/operators.h"
#include "op/optional.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

MidxCodes midx_encode_meta(const Tensor& rows, const Tensor& codewords1, const Tensor& codewords2) {
  check::dim("midx_encode", "rows", rows, 2);
  check_codebooks("midx_encode", codewords1, codewords2, rows.sym_size(1));
  const auto options = rows.options().requires_grad(false);
  return {at::empty_symint({rows.sym_size(0)}, options.dtype(at::kInt)),
          at::empty_symint({rows.sym_size(0)}, options.dtype(at::kFloat))};
}

MidxCells midx_cells_meta(const Tensor& cell, const OptionalTensor& log_weight, int64_t codewords,
                          c10::SymInt num_drawn) {
  check_midx_cells(cell, log_weight, codewords, num_drawn);
  const auto longs = cell.options().dtype(at::kLong), doubles = cell.options().dtype(at::kDouble);
  const int64_t cells = codewords * codewords;
  return {at::empty_symint({num_drawn}, longs), at::empty({cells + 1}, longs),
          at::empty({codewords, codewords}, doubles),
          at::empty_symint({is_defined(log_weight) ? num_drawn : c10::SymInt(0)}, doubles),
          at::empty({is_defined(log_weight) ? cells : 0}, doubles)};
}

} // namespace

// Builds an index with all classes in one cell.
std::vector<Tensor> MidxFamily::make(const Tensor& is_drawn, int64_t dim,
                                     const MidxOptions& options) {
  const int64_t num_classes = is_drawn.size(0);
  const auto floats = is_drawn.options().dtype(at::kFloat), doubles = floats.dtype(at::kDouble);
  const bool residual = options.kind == "rq", weighted = options.weighted();
  const int64_t k = options.codewords;
  const auto table = [&](bool exists, at::IntArrayRef size, const at::TensorOptions& dtype) {
    return exists ? table_zeros(size, dtype) : at::empty({0}, dtype);
  };
  const Tensor cell = table_zeros({num_classes}, floats.dtype(at::kInt)).copy_(is_drawn).sub_(1);
  const Tensor log_weight = table(weighted, {num_classes}, floats);
  const auto [order, start, mass, prefix, heaviest] =
      midx_cells(cell, weighted ? OptionalTensor(log_weight) : std::nullopt, k,
                 is_drawn.sum().item<int64_t>());
  std::vector<Tensor> index{
      at::zeros({k, residual ? dim : (dim + 1) / 2}, floats),
      at::zeros({k, residual ? dim : dim / 2}, floats),
      cell,
      order,
      start,
      mass,
      log_weight,
      prefix,
      heaviest,
      table(options.update_every > 0, {num_classes}, floats.dtype(at::kBool))};
  if (options.form == "spread") {
    index.push_back(table(true, {num_classes}, floats));
    index.push_back(at::zeros({}, doubles));
  } else if (options.form == "exact") {
    index.push_back(table(true, {num_classes, dim}, floats));
    index.push_back(table(options.bias, {num_classes}, floats));
  }
  return index;
}

bool check_codebooks(const char* op, const Tensor& codewords1, const Tensor& codewords2,
                     const c10::SymInt& features) {
  const auto codebook = [&](const char* arg, const Tensor& codewords) {
    check::dim(op, arg, codewords, 2);
    check::dtype(op, arg, codewords, at::kFloat);
  };
  codebook("codewords1", codewords1);
  codebook("codewords2", codewords2);
  TORCH_CHECK_VALUE(codewords1.sym_size(0) >= 1 && codewords1.sym_size(0) <= kMaxCodewords, op,
                    ": expected 1 to ", kMaxCodewords, " codewords, got ", codewords1.sym_size(0));
  check::size(op, "codewords2", codewords2, 0, codewords1.sym_size(0), "as many as codewords1");
  check::same_device(op, "codewords2", codewords2, "codewords1", codewords1);
  const auto width1 = codewords1.sym_size(1), width2 = codewords2.sym_size(1);
  const bool residual = width1 == features && width2 == features;
  TORCH_CHECK_VALUE(
      residual || width1 + width2 == features, op, ": expected codewords of the width ", features,
      " (residual) or of widths that sum up to it (product), got ", width1, " and ", width2);
  return residual;
}

void MidxFamily::check_options(const char* op, const MidxOptions& options) {
  const auto one_of = [&](const char* argument, const std::string& value,
                          std::initializer_list<const char*> names, const char* list) {
    TORCH_CHECK_VALUE(std::find(names.begin(), names.end(), value) != names.end(), op,
                      ": expected ", argument, " as ", list, ", got '", value, "'");
  };
  one_of("kind", options.kind, {"rq", "pq"}, "'rq' or 'pq'");
  one_of("mixture", options.mixture, {"mean", "rms"}, "'mean' or 'rms'");
  one_of("form", options.form, {"plain", "exact", "spread", "learnable"},
         "'plain', 'exact', 'spread' or 'learnable'");
  check_at_least(op, "codewords", options.codewords, 1);
  TORCH_CHECK_VALUE(options.codewords <= kMaxCodewords, op, ": expected codewords of at most ",
                    kMaxCodewords, ", got ", options.codewords);
  check_at_least(op, "update_every", options.update_every, 0);
  check_at_least(op, "iterations", options.iterations, 0);
  check_at_least(op, "train_points", options.train_points.value_or(1), 1);
  TORCH_CHECK_VALUE(options.form != "exact" || (!options.shared && !options.is_distinct()), op,
                    ": expected shared=False and distinct=False, since its draws are private and "
                    "independent, got shared=",
                    options.shared ? "True" : "False",
                    ", distinct=", options.is_distinct() ? "True" : "False");
  if (options.slots.has_value()) {
    check_at_least(op, "slots", *options.slots, 1);
    TORCH_CHECK_VALUE(!options.weighted() && options.form != "exact" && options.update_every == 0,
                      op,
                      ": expected classes that weigh alike and "
                      "update_every=0 where classes are numbered by slots, got form '",
                      options.form, "', bias=", options.bias ? "True" : "False",
                      " and update_every=", options.update_every);
  }
}

MidxIndex::MidxIndex(const char* op, at::TensorList index, const MidxOptions& options)
    : residual(options.kind == "rq") {
  const bool two_more = options.form == "spread" || options.form == "exact";
  check_index_size(op, index, two_more ? 14 : 12);
  const auto where = [](bool exists, const Tensor& table) {
    return exists ? OptionalTensor(table) : std::nullopt;
  };
  const bool weighted = options.weighted(), exact = options.form == "exact";
  codewords1 = index[0], codewords2 = index[1], cell = index[2], order = index[3], start = index[4],
  mass = index[5];
  log_weight = where(weighted, index[6]), prefix = where(weighted, index[7]),
  heaviest = where(weighted, index[8]);
  touched = where(options.update_every > 0, index[9]);
  places = cell, recent = index[index.size() - 2], step = index.back();
  if (two_more) {
    (exact ? table : spread) = index[10];
    (exact ? table_bias : query_square) = where(!exact || options.bias, index[11]);
  }
  const auto check_table = [&](const char* arg, const Tensor& tensor, at::ScalarType dtype,
                               std::initializer_list<c10::SymInt> sizes) {
    check::dim(op, arg, tensor, int64_t(sizes.size()));
    check::dtype(op, arg, tensor, dtype);
    check::same_device(op, arg, tensor, "codewords1", codewords1);
    TORCH_CHECK_VALUE(std::equal(sizes.begin(), sizes.end(), tensor.sym_sizes().begin()), op,
                      ": expected ", arg, " of shape ", c10::SymIntArrayRef(sizes), ", got ",
                      tensor.sym_sizes());
  };
  const int64_t k = options.codewords;
  check::dim(op, "codewords1", codewords1, 2);
  check::dim(op, "codewords2", codewords2, 2);
  check_table("codewords1", codewords1, at::kFloat, {k, codewords1.sym_size(1)});
  check_table("codewords2", codewords2, at::kFloat,
              {k, residual ? codewords1.sym_size(1) : codewords2.sym_size(1)});
  dim = codewords1.sym_size(1) + (residual ? 0 : codewords2.sym_size(1));
  check::dim(op, "cell", cell, 1);
  check::dim(op, "order", order, 1);
  const bool by_slot = options.slots.has_value();
  const c10::SymInt classes = by_slot ? c10::SymInt(0) : cell.sym_size(0),
                    drawn = by_slot ? c10::SymInt(*options.slots) : order.sym_size(0);
  num_classes = by_slot ? drawn : classes;
  check_table("cell", cell, at::kInt, {classes});
  check_table("order", order, at::kLong, {by_slot ? classes : drawn});
  TORCH_CHECK_VALUE(drawn >= 1 && drawn <= num_classes, op, ": expected order with 1 to ", classes,
                    " classes, the size of cell, got ", drawn);
  TORCH_CHECK_VALUE(!options.is_distinct() || options.num_samples <= drawn, op,
                    ": expected num_samples of at most ", drawn,
                    " (the classes, of which each is drawn once), got ", options.num_samples);
  check_table("start", start, at::kLong, {k * k + 1});
  check_table("mass", mass, at::kDouble, {k, k});
  if (weighted) {
    check_table("log_weight", *log_weight, at::kFloat, {classes});
    check_table("prefix", *prefix, at::kDouble, {drawn});
    check_table("heaviest", *heaviest, at::kDouble, {k * k});
  }
  if (is_defined(touched)) {
    check_table("touched", *touched, at::kBool, {classes});
  }
  if (is_defined(spread)) {
    check_table("spread", *spread, at::kFloat, {classes});
    check_table("query_square", *query_square, at::kDouble, {});
  }
  if (is_defined(table)) {
    check_table("table", *table, at::kFloat, {classes, dim});
  }
  if (is_defined(table_bias)) {
    check_table("table_bias", *table_bias, at::kFloat, {classes});
  }
  check_recent(op, recent);
  check_step(op, step);
}

void check_midx_cells(const Tensor& cell, const OptionalTensor& log_weight, int64_t codewords,
                      const c10::SymInt& num_drawn) {
  constexpr const char* op = "midx_cells";
  check::dim(op, "cell", cell, 1);
  check::dtype(op, "cell", cell, at::kInt);
  TORCH_CHECK_VALUE(codewords >= 1 && codewords <= kMaxCodewords, op,
                    ": expected codewords in [1, ", kMaxCodewords, "], got ", codewords);
  TORCH_CHECK_VALUE(num_drawn >= 0 && num_drawn <= cell.sym_size(0), op,
                    ": expected num_drawn in [0, ", cell.sym_size(0), "], got ", num_drawn);
  if (is_defined(log_weight)) {
    check::dim(op, "log_weight", *log_weight, 1);
    check::size(op, "log_weight", *log_weight, 0, cell.sym_size(0), "the size of cell");
    check::dtype(op, "log_weight", *log_weight, at::kFloat);
    check::same_device(op, "log_weight", *log_weight, "cell", cell);
  }
}

MidxCodes midx_encode_reference(const Tensor& rows, const Tensor& codewords1,
                                const Tensor& codewords2) {
  check::dim("midx_encode", "rows", rows, 2);
  const bool residual = check_codebooks("midx_encode", codewords1, codewords2, rows.size(1));
  constexpr int64_t kChunk = 16384;
  std::vector<Tensor> cells{at::empty({0}, rows.options().dtype(at::kInt))},
      errors{at::empty({0}, rows.options().dtype(at::kFloat))};
  for (int64_t begin = 0; begin < rows.size(0); begin += kChunk) {
    const Tensor x = rows.narrow(0, begin, std::min(kChunk, rows.size(0) - begin)).to(at::kFloat);
    const auto nearest = [](const Tensor& part, const Tensor& codewords) {
      return (at::mm(part, codewords.t()) - 0.5 * codewords.square().sum(1)).argmax(1);
    };
    const Tensor part1 = residual ? x : x.narrow(1, 0, codewords1.size(1));
    const Tensor k1 = nearest(part1, codewords1),
                 remainder1 = part1 - codewords1.index_select(0, k1);
    const Tensor part2 =
        residual ? remainder1 : x.narrow(1, codewords1.size(1), codewords2.size(1));
    const Tensor k2 = nearest(part2, codewords2),
                 remainder2 = part2 - codewords2.index_select(0, k2);
    cells.push_back((k1 * codewords1.size(0) + k2).to(at::kInt));
    errors.push_back(residual ? remainder2.square().sum(1)
                              : remainder1.square().sum(1) + remainder2.square().sum(1));
  }
  return {at::cat(cells), at::cat(errors)};
}

MidxCells midx_cells_reference(const Tensor& cell, const OptionalTensor& log_weight,
                               int64_t codewords, c10::SymInt num_drawn) {
  check_midx_cells(cell, log_weight, codewords, num_drawn);
  const int64_t cells = codewords * codewords;
  const auto doubles = cell.options().dtype(at::kDouble);
  const Tensor drawn = cell.ge(0).nonzero().squeeze(1),
               cell_of = cell.index_select(0, drawn).to(at::kLong);
  TORCH_CHECK_VALUE(drawn.size(0) == num_drawn.expect_int(), "midx_cells: expected num_drawn of ",
                    drawn.size(0), ", the cells that are not -1, got ", num_drawn);
  TORCH_CHECK_INDEX(cell_of.numel() == 0 || cell_of.max().item<int64_t>() < cells,
                    "midx_cells: expected cell below ", cells, ", codewords squared, got ",
                    cell_of.max().item<int64_t>());
  const Tensor by_cell = cell_of.argsort(true, 0), order = drawn.index_select(0, by_cell);
  const Tensor count =
      at::zeros({cells}, cell_of.options()).index_add(0, cell_of, at::ones_like(cell_of));
  const Tensor start = at::cat({at::zeros({1}, count.options()), count.cumsum(0)});
  if (!is_defined(log_weight)) {
    return {order, start, count.to(at::kDouble).view({codewords, codewords}),
            at::empty({0}, doubles), at::empty({0}, doubles)};
  }
  const Tensor weight = log_weight->to(at::kDouble).exp().index_select(0, order),
               sorted_cell = cell_of.index_select(0, by_cell);
  const Tensor mass = at::zeros({cells}, doubles).index_add(0, sorted_cell, weight);
  const Tensor heaviest =
      at::zeros({cells}, doubles).scatter_reduce(0, sorted_cell, weight, "amax");
  // Summed cell by cell, because a cell may weigh less than the rounding error of a global sum.
  const Tensor prefix = at::empty({order.size(0)}, doubles);
  // In most tables, few cells contain classes.
  const Tensor first = start.cpu(), used = first.diff().nonzero().squeeze(1);
  const int64_t *offset = first.const_data_ptr<int64_t>(),
                *cell_at = used.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < used.numel(); ++i) {
    const int64_t begin = offset[cell_at[i]], end = offset[cell_at[i] + 1];
    prefix.slice(0, begin, end).copy_(weight.slice(0, begin, end).cumsum(0));
  }
  return {order, start, mass.view({codewords, codewords}), prefix, heaviest};
}

MidxCodes midx_encode(const Tensor& rows, const Tensor& codewords1, const Tensor& codewords2) {
  static const auto op = find_op<decltype(midx_encode_reference)>("xsoftmax::midx_encode");
  return op.call(rows, codewords1, codewords2);
}

MidxCells midx_cells(const Tensor& cell, const OptionalTensor& log_weight, int64_t codewords,
                     c10::SymInt num_drawn) {
  static const auto op = find_op<decltype(midx_cells_reference)>("xsoftmax::midx_cells");
  return op.call(cell, log_weight, codewords, std::move(num_drawn));
}

XSOFTMAX_OPERATORS(m) {
  AdaptiveFamily<MidxFamily>::define(m);
  m.def(
      "midx_encode(Tensor rows, Tensor codewords1, Tensor codewords2) -> (Tensor cell, Tensor "
      "error)");
  m.def(
      "midx_cells(Tensor cell, Tensor? log_weight, int codewords, SymInt num_drawn) -> (Tensor "
      "order, Tensor start, Tensor mass, "
      "Tensor prefix, Tensor heaviest)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  AdaptiveFamily<MidxFamily>::on_any_device(m);
  m.impl("midx_encode", midx_encode_reference);
  m.impl("midx_cells", midx_cells_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { AdaptiveFamily<MidxFamily>::on_cpu(m); }

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  AdaptiveFamily<MidxFamily>::on_meta(m);
  m.impl("midx_encode", midx_encode_meta);
  m.impl("midx_cells", midx_cells_meta);
}

XSOFTMAX_AUTOCAST(m) {
  AdaptiveFamily<MidxFamily>::under_autocast(m);
  disable_autocast(m, {"midx_encode", "midx_cells"});
}

} // namespace xsoftmax
