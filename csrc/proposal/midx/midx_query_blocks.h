#pragma once

#include "op/checks.h"
#include "cpu/memory.h"
#include "cpu/prefetch.h"
#include "op/optional.h"
#include "cpu/products.h"
#include "proposal/midx/midx_query_rows.h"
#include "proposal/midx/midx_sample.h"
#include "proposal/midx/midx_sets.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <cmath>

// Scores queries against the codewords of a MIDX index on CPU, block by block.

namespace xsoftmax {

constexpr int64_t kMidxBlock = 128; // queries whose products are computed at once

// Validated contiguous tables of an index, and a view of them by pointers.
struct CheckedMidxIndex {
  const MidxIndex& index;
  at::Tensor order, start, mass, cell, log_weight, prefix, heaviest;
  int64_t codewords, classes;
  bool by_slot;
  MidxCodewords products;
  MidxCellTables tables;

  CheckedMidxIndex(const char* op, const at::Tensor& input, const MidxIndex& index)
      : index(index), order(index.order.contiguous()), start(index.start.contiguous()),
        mass(index.mass.contiguous()), cell(index.cell.contiguous()),
        codewords(index.codewords1.size(0)), products(input, index) {
    const bool weighted = is_defined(index.log_weight);
    if (weighted) {
      log_weight = index.log_weight->contiguous();
      prefix = index.prefix->contiguous();
      heaviest = index.heaviest->contiguous();
    }
    const int64_t cells = codewords * codewords;
    classes = index.num_classes.expect_int();
    by_slot = index.order.size(0) == 0; // an index has at least one class to draw
    tables = {codewords,
              cells,
              by_slot ? classes : order.size(0),
              by_slot ? nullptr : order.const_data_ptr<int64_t>(),
              start.const_data_ptr<int64_t>(),
              mass.const_data_ptr<double>(),
              weighted ? prefix.const_data_ptr<double>() : nullptr,
              weighted ? heaviest.const_data_ptr<double>() : nullptr};
    // Check the values, because the tables come from a state dict.
    check::offsets(op, "start", start, tables.classes);
    bool counts = true; // no branch per cell, because every call runs this check
    for (int64_t c = 0; c < cells; ++c) {
      counts &= tables.mass[c] == double(tables.start[c + 1] - tables.start[c]);
    }
    for (int64_t c = 0; (weighted || !counts) && c < cells; ++c) {
      const int64_t size = tables.size(c);
      if (!weighted || size == 0) {
        TORCH_CHECK_VALUE(tables.mass[c] == double(size), op,
                          ": expected mass to be the number of classes, got ", tables.mass[c],
                          " for ", size, " classes in cell ", c);
        continue;
      }
      const double whole = tables.prefix[tables.start[c + 1] - 1];
      TORCH_CHECK_VALUE(
          whole > 0 && std::isfinite(whole) && std::abs(tables.mass[c] - whole) <= 1e-9 * whole &&
              tables.heaviest[c] > 0 && tables.heaviest[c] <= whole * (1 + 1e-9),
          op,
          ": expected mass to be the sum of the weights in prefix, and heaviest within it, got ",
          tables.mass[c], ", ", whole, " and ", tables.heaviest[c], " in cell ", c);
    }
  }

  int64_t class_at(int64_t slot) const {
    const int64_t id = by_slot ? slot : tables.order[slot];
    TORCH_CHECK_INDEX(uint64_t(id) < uint64_t(classes), "MIDX: expected order in [0, ", classes,
                      "), got ", id);
    return id;
  }
  double log_weight_of(int64_t id) const {
    return log_weight.defined() ? double(log_weight.const_data_ptr<float>()[id]) : 0.0;
  }
  /// id may be -1 (no class).
  void prefetch_cell(int64_t id) const {
    if (!by_slot) {
      prefetch_line(cell.const_data_ptr<int32_t>() + std::max<int64_t>(id, 0));
    }
  }
  void prefetch_class(int64_t slot) const {
    if (!by_slot) {
      prefetch_line(tables.order + slot);
    }
  }
  /// Returns the cell of a class, or -1 if the class is never drawn.
  int64_t cell_of(int64_t id) const {
    if (by_slot) {
      return tables.cell_of_slot(id);
    }
    const int64_t c = cell.const_data_ptr<int32_t>()[id];
    TORCH_CHECK_INDEX(c >= -1 && c < tables.cells, "MIDX: expected cell in [-1, ", tables.cells,
                      "), got ", c, " for class ", id);
    return c;
  }
};

// midx_queries for one block, row by row.
inline MidxQueries midx_query_block(const at::Tensor& input, const CheckedMidxIndex& checked) {
  const int64_t n = input.size(0), k = checked.codewords;
  const at::Tensor product = midx_products(input, checked.products);
  const auto options = product.options().dtype(at::kDouble);
  const at::Tensor all = at::empty({n * (5 * k + 2)}, options);
  const auto part = [&](at::IntArrayRef sizes, at::IntArrayRef strides, int64_t first) {
    return strided_view(all, sizes, strides, n * first);
  };
  MidxQueries queries{part({n, 2, k}, {2 * k, k, 1}, 0), part({n, 2, k}, {2 * k, k, 1}, 2 * k),
                      part({n, k}, {k, 1}, 4 * k), part({n}, {1}, 5 * k),
                      part({n}, {1}, 5 * k + 1)};
  double *score = queries.score.mutable_data_ptr<double>(),
         *exp = queries.exp.mutable_data_ptr<double>();
  double *z = queries.z.mutable_data_ptr<double>(),
         *log_z = queries.log_z.mutable_data_ptr<double>();
  const MidxQueryTable& rows = midx_query_rows();
  for (int64_t q = 0; q < n; ++q) {
    const int64_t at = q * 2 * k;
    log_z[q] = product.scalar_type() == at::kFloat
        ? rows.f32.function(score + at, exp + at, product.const_data_ptr<float>() + at, k,
                            kMidxRange)
        : rows.f64.function(score + at, exp + at, product.const_data_ptr<double>() + at, k,
                            kMidxRange);
  }
  multiply_in_parts(queries.first_probability, strided_view(queries.exp, {n, k}, {2 * k, 1}, k),
                    transposed(checked.mass));
  double* probability = queries.first_probability.mutable_data_ptr<double>();
  for (int64_t q = 0; q < n; ++q) {
    z[q] = rows.normalize(probability + q * k, probability + q * k, exp + q * 2 * k, k);
    log_z[q] += std::log(z[q]);
  }
  return queries;
}

// Calls task(begin, queries) on blocks of queries, on several threads. Blocks and products do not
// depend on the number of threads.
template <typename Task>
void for_midx_blocks(const at::Tensor& input, const CheckedMidxIndex& checked, int64_t per_task,
                     const Task& task) {
  const int64_t blocks = (input.size(0) + kMidxBlock - 1) / kMidxBlock,
                tasks = (blocks + per_task - 1) / per_task;
  // At least two tasks: with one, parallel_for opens no parallel region, and the products inside
  // would use several threads.
  at::parallel_for(0, std::max<int64_t>(2, tasks), 1, [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (int64_t b = first * per_task; b < std::min(blocks, last * per_task); ++b) {
      const int64_t begin = b * kMidxBlock;
      const at::Tensor block =
          strided_view(input, {std::min(kMidxBlock, input.size(0) - begin), input.size(1)},
                       input.strides(), begin * input.stride(0));
      task(begin, midx_query_block(block, checked));
    }
  });
}

// The rows of MidxQueries for one query.
struct MidxQueryRow {
  const double *first, *second, *second_exp, *first_probability;
  double log_z;

  MidxQueryRow(const MidxQueries& queries, int64_t q, int64_t k)
      : first(queries.score.const_data_ptr<double>() + q * 2 * k), second(first + k),
        second_exp(queries.exp.const_data_ptr<double>() + q * 2 * k + k),
        first_probability(queries.first_probability.const_data_ptr<double>() + q * k),
        log_z(queries.log_z.const_data_ptr<double>()[q]) {}

  // At most 2^20 cells: 32-bit division is several times faster.
  double log_density(int64_t cell, int64_t k) const {
    const uint32_t c = uint32_t(cell), width = uint32_t(k);
    return first[c / width] + second[c % width] - log_z;
  }
};

} // namespace xsoftmax
