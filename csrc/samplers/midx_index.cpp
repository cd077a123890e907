#include "samplers/midx_index.h"

#include "core/autocast.h"
#include "core/checks.h"
#include "core/optional.h"

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

namespace xsoftmax {
namespace {

using at::Tensor;

MidxCodes midx_encode_meta(const Tensor& rows, const Tensor& codewords1, const Tensor& codewords2) {
  check::dim("midx_encode", "rows", rows, 2);
  check_codebooks("midx_encode", codewords1, codewords2, rows.sym_size(1));
  const auto options = rows.options().requires_grad(false);
  return {at::empty_symint({rows.sym_size(0)}, options.dtype(at::kInt)), at::empty_symint({rows.sym_size(0)}, options.dtype(at::kFloat))};
}

MidxCells midx_cells_meta(const Tensor& cell, const OptionalTensor& log_weight, int64_t codewords, c10::SymInt num_drawn) {
  check_midx_cells(cell, log_weight, codewords, num_drawn);
  const auto longs = cell.options().dtype(at::kLong), doubles = cell.options().dtype(at::kDouble);
  const int64_t cells = codewords * codewords;
  return {at::empty_symint({num_drawn}, longs), at::empty({cells + 1}, longs), at::empty({codewords, codewords}, doubles),
          at::empty_symint({given(log_weight) ? num_drawn : c10::SymInt(0)}, doubles),
          at::empty({given(log_weight) ? cells : 0}, doubles)};
}

} // namespace

bool check_codebooks(const char* op, const Tensor& codewords1, const Tensor& codewords2, const c10::SymInt& features) {
  const auto codebook = [&](const char* arg, const Tensor& codewords) {
    check::dim(op, arg, codewords, 2);
    check::dtype(op, arg, codewords, at::kFloat);
  };
  codebook("codewords1", codewords1);
  codebook("codewords2", codewords2);
  TORCH_CHECK_VALUE(codewords1.sym_size(0) >= 1 && codewords1.sym_size(0) <= kMidxMostCodewords, op, ": expected 1 to ",
                    kMidxMostCodewords, " codewords, got ", codewords1.sym_size(0));
  check::size(op, "codewords2", codewords2, 0, codewords1.sym_size(0), "as many as codewords1");
  check::same_device(op, "codewords2", codewords2, "codewords1", codewords1);
  const auto width1 = codewords1.sym_size(1), width2 = codewords2.sym_size(1);
  const bool residual = width1 == features && width2 == features;
  TORCH_CHECK_VALUE(residual || width1 + width2 == features, op, ": expected codewords of the width ", features,
                    " (residual) or of widths that sum up to it (product), got ", width1, " and ", width2);
  return residual;
}

void check_midx(const char* op, const Tensor& input, const MidxIndex& index) {
  check::dim(op, "input", input, 2);
  check::floating(op, "input", input);
  check_codebooks(op, index.codewords1, index.codewords2, input.sym_size(1));
  check::same_device(op, "codewords1", index.codewords1, "input", input);
  const int64_t codewords = index.codewords1.size(0), cells = codewords * codewords;
  const auto table = [&](const char* arg, const Tensor& tensor, int64_t dim, at::ScalarType dtype) {
    check::dim(op, arg, tensor, dim);
    check::dtype(op, arg, tensor, dtype);
    check::same_device(op, arg, tensor, "input", input);
  };
  table("cell", index.cell, 1, at::kInt);
  table("order", index.order, 1, at::kLong);
  TORCH_CHECK_VALUE(index.order.sym_size(0) >= 1 && index.order.sym_size(0) <= index.cell.sym_size(0), op,
                    ": expected order of 1 to ", index.cell.sym_size(0), " classes, got ", index.order.sym_size(0));
  table("start", index.start, 1, at::kLong);
  check::size(op, "start", index.start, 0, cells + 1, "the cells and one");
  table("mass", index.mass, 2, at::kDouble);
  check::size(op, "mass", index.mass, 0, codewords, "the codewords");
  check::size(op, "mass", index.mass, 1, codewords, "the codewords");
  const bool weighted = given(index.log_weight);
  TORCH_CHECK_VALUE(given(index.prefix) == weighted && given(index.heaviest) == weighted, op,
                    ": expected log_weight, prefix and heaviest together or none of them");
  if (weighted) {
    table("log_weight", *index.log_weight, 1, at::kFloat);
    check::size(op, "log_weight", *index.log_weight, 0, index.cell.sym_size(0), "the size of cell");
    table("prefix", *index.prefix, 1, at::kDouble);
    check::size(op, "prefix", *index.prefix, 0, index.order.sym_size(0), "the size of order");
    table("heaviest", *index.heaviest, 1, at::kDouble);
    check::size(op, "heaviest", *index.heaviest, 0, cells, "the cells");
  }
}

void check_midx_cells(const Tensor& cell, const OptionalTensor& log_weight, int64_t codewords, const c10::SymInt& num_drawn) {
  constexpr const char* op = "midx_cells";
  check::dim(op, "cell", cell, 1);
  check::dtype(op, "cell", cell, at::kInt);
  TORCH_CHECK_VALUE(codewords >= 1 && codewords <= kMidxMostCodewords, op, ": expected codewords in [1, ", kMidxMostCodewords, "], got ",
                    codewords);
  TORCH_CHECK_VALUE(num_drawn >= 0 && num_drawn <= cell.sym_size(0), op, ": expected num_drawn in [0, ", cell.sym_size(0), "], got ",
                    num_drawn);
  if (given(log_weight)) {
    check::dim(op, "log_weight", *log_weight, 1);
    check::size(op, "log_weight", *log_weight, 0, cell.sym_size(0), "the size of cell");
    check::dtype(op, "log_weight", *log_weight, at::kFloat);
    check::same_device(op, "log_weight", *log_weight, "cell", cell);
  }
}

MidxCodes midx_encode_reference(const Tensor& rows, const Tensor& codewords1, const Tensor& codewords2) {
  check::dim("midx_encode", "rows", rows, 2);
  const bool residual = check_codebooks("midx_encode", codewords1, codewords2, rows.size(1));
  constexpr int64_t kChunk = 16384;
  std::vector<Tensor> cells{at::empty({0}, rows.options().dtype(at::kInt))}, errors{at::empty({0}, rows.options().dtype(at::kFloat))};
  for (int64_t begin = 0; begin < rows.size(0); begin += kChunk) {
    const Tensor x = rows.narrow(0, begin, std::min(kChunk, rows.size(0) - begin)).to(at::kFloat);
    const auto nearest = [](const Tensor& part, const Tensor& codewords) {
      return (at::mm(part, codewords.t()) - 0.5 * codewords.square().sum(1)).argmax(1);
    };
    const Tensor part1 = residual ? x : x.narrow(1, 0, codewords1.size(1));
    const Tensor k1 = nearest(part1, codewords1), rest1 = part1 - codewords1.index_select(0, k1);
    const Tensor part2 = residual ? rest1 : x.narrow(1, codewords1.size(1), codewords2.size(1));
    const Tensor k2 = nearest(part2, codewords2), rest2 = part2 - codewords2.index_select(0, k2);
    cells.push_back((k1 * codewords1.size(0) + k2).to(at::kInt));
    errors.push_back(residual ? rest2.square().sum(1) : rest1.square().sum(1) + rest2.square().sum(1));
  }
  return {at::cat(cells), at::cat(errors)};
}

MidxCells midx_cells_reference(const Tensor& cell, const OptionalTensor& log_weight, int64_t codewords, c10::SymInt num_drawn) {
  check_midx_cells(cell, log_weight, codewords, num_drawn);
  const int64_t cells = codewords * codewords;
  const auto doubles = cell.options().dtype(at::kDouble);
  const Tensor drawn = cell.ge(0).nonzero().squeeze(1), cell_of = cell.index_select(0, drawn).to(at::kLong);
  TORCH_CHECK_VALUE(drawn.size(0) == num_drawn.expect_int(), "midx_cells: expected num_drawn of ", drawn.size(0),
                    ", the cells that are not -1, got ", num_drawn);
  TORCH_CHECK_INDEX(cell_of.numel() == 0 || cell_of.max().item<int64_t>() < cells, "midx_cells: expected cell below ", cells,
                    ", codewords squared, got ", cell_of.max().item<int64_t>());
  const Tensor by_cell = cell_of.argsort(true, 0), order = drawn.index_select(0, by_cell);
  const Tensor count = at::zeros({cells}, cell_of.options()).index_add(0, cell_of, at::ones_like(cell_of));
  const Tensor start = at::cat({at::zeros({1}, count.options()), count.cumsum(0)});
  if (!given(log_weight)) {
    return {order, start, count.to(at::kDouble).view({codewords, codewords}), at::empty({0}, doubles), at::empty({0}, doubles)};
  }
  const Tensor weight = log_weight->to(at::kDouble).exp().index_select(0, order), sorted_cell = cell_of.index_select(0, by_cell);
  const Tensor mass = at::zeros({cells}, doubles).index_add(0, sorted_cell, weight);
  const Tensor heaviest = at::zeros({cells}, doubles).scatter_reduce(0, sorted_cell, weight, "amax");
  // Summed cell by cell: a cell may be lighter than the rounding of a sum over all.
  const Tensor prefix = at::empty({order.size(0)}, doubles);
  const Tensor first = start.cpu();
  for (int64_t c = 0; c < cells; ++c) {
    const int64_t begin = first[c].item<int64_t>(), end = first[c + 1].item<int64_t>();
    prefix.slice(0, begin, end).copy_(weight.slice(0, begin, end).cumsum(0));
  }
  return {order, start, mass.view({codewords, codewords}), prefix, heaviest};
}

MidxCodes midx_encode(const Tensor& rows, const Tensor& codewords1, const Tensor& codewords2) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::midx_encode", "").typed<decltype(midx_encode_reference)>();
  return op.call(rows, codewords1, codewords2);
}

MidxCells midx_cells(const Tensor& cell, const OptionalTensor& log_weight, int64_t codewords, c10::SymInt num_drawn) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::midx_cells", "").typed<decltype(midx_cells_reference)>();
  return op.call(cell, log_weight, codewords, std::move(num_drawn));
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("midx_encode(Tensor rows, Tensor codewords1, Tensor codewords2) -> (Tensor cell, Tensor error)");
  m.def("midx_cells(Tensor cell, Tensor? log_weight, int codewords, SymInt num_drawn) -> (Tensor order, Tensor start, Tensor mass, "
        "Tensor prefix, Tensor heaviest)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("midx_encode", midx_encode_reference);
  m.impl("midx_cells", midx_cells_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("midx_encode", midx_encode_meta);
  m.impl("midx_cells", midx_cells_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) { below_autocast(m, {"midx_encode", "midx_cells"}); }
TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) { below_autocast(m, {"midx_encode", "midx_cells"}); }

} // namespace xsoftmax
