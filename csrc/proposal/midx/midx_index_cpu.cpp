#include "cluster/nearest.h"
#include "cluster/nearest_rows.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "cpu/memory.h"
#include "op/optional.h"
#include "cpu/products.h"
#include "proposal/midx/midx_index_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

MidxCodes midx_encode_cpu(const Tensor& rows, const Tensor& codewords1, const Tensor& codewords2) {
  check::dim("midx_encode", "rows", rows, 2);
  check::floating("midx_encode", "rows", rows);
  const bool residual = check_codebooks("midx_encode", codewords1, codewords2, rows.size(1));
  if (use_reference()) {
    return midx_encode_reference(rows, codewords1, codewords2);
  }
  const int64_t n = rows.size(0), k = codewords1.size(0), width1 = codewords1.size(1),
                features = rows.size(1);
  const Tensor cell = table_empty({n}, rows.options().dtype(at::kInt)),
               error = at::empty({n}, rows.options().dtype(at::kFloat));

  // |x - c|^2 = |x|^2 - 2 (x.c - |c|^2 / 2). For the remainder x - c1, the product with c2 is
  // x.c2 - c1.c2, so the remainder is never computed.
  const Tensor half1 = (0.5 * codewords1.square().sum(1)).contiguous(),
               half2 = 0.5 * codewords2.square().sum(1);
  const Tensor cross =
      residual ? product_in_parts(codewords1, codewords2.t()) : at::zeros({k, k}, half1.options());
  const Tensor penalty2 = (cross + half2).contiguous();
  const Tensor both = residual ? at::cat({codewords1, codewords2}).t().contiguous() : Tensor();
  const Tensor first = codewords1.t().contiguous(), second = codewords2.t().contiguous();
  const float *fine1 = half1.const_data_ptr<float>(), *fine2 = penalty2.const_data_ptr<float>();
  int32_t* cells = cell.mutable_data_ptr<int32_t>();
  float* errors = error.mutable_data_ptr<float>();

  for_row_blocks(rows, 2 * k, [&](int64_t begin, const Tensor& x) {
    Tensor product = at::empty({x.size(0), 2 * k}, x.options());
    if (residual) {
      multiply_in_parts(product, x, both);
    } else {
      Tensor left = product.narrow(1, 0, k), right = product.narrow(1, k, k);
      multiply_in_parts(left, x.narrow(1, 0, width1), first);
      multiply_in_parts(right, x.narrow(1, width1, features - width1), second);
    }
    const float *p = product.const_data_ptr<float>(), *row = x.const_data_ptr<float>();
    const NearestRowTable& kernels = nearest_rows();
    for (int64_t i = 0; i < x.size(0); ++i) {
      float near1, near2;
      const int64_t k1 = kernels.best(p + i * 2 * k, fine1, k, &near1);
      const int64_t k2 = kernels.best(p + i * 2 * k + k, fine2 + k1 * k, k, &near2);
      cells[begin + i] = int32_t(k1 * k + k2);
      errors[begin + i] =
          std::max(kernels.square_sum(row + i * features, features) - 2 * (near1 + near2),
                   0.0f); // keeps a NaN
    }
  });
  return {cell, error};
}

MidxCells midx_cells_cpu(const Tensor& cell, const OptionalTensor& log_weight, int64_t codewords,
                         int64_t num_drawn) {
  check_midx_cells(cell, log_weight, codewords, num_drawn);
  if (use_reference()) {
    return midx_cells_reference(cell, log_weight, codewords, num_drawn);
  }
  const auto longs = cell.options().dtype(at::kLong), doubles = cell.options().dtype(at::kDouble);
  const int64_t cells = codewords * codewords;
  const MidxCells tables{table_empty({num_drawn}, longs), at::empty({cells + 1}, longs),
                         at::empty({codewords, codewords}, doubles),
                         table_empty({is_defined(log_weight) ? num_drawn : 0}, doubles),
                         at::empty({is_defined(log_weight) ? cells : 0}, doubles)};
  fill_cells_cpu(cell, log_weight, tables);
  return tables;
}

} // namespace

// A stable counting sort by cell. Classes are counted in chunks, then placed, one thread per chunk.
void fill_cells_cpu(const Tensor& cell, const OptionalTensor& log_weight, const MidxCells& tables) {
  const auto& [order, start, mass, prefix, heaviest] = tables;
  const int64_t n = cell.size(0), cells = mass.numel(),
                chunks =
                    n < (1 << 16) ? 1 : std::clamp<int64_t>(n / cells, 1, at::get_num_threads());
  const Tensor flat = cell.contiguous();
  const int32_t* cell_of = flat.const_data_ptr<int32_t>();
  // The count of each cell in each chunk, then where its next class goes.
  std::vector<int64_t> places(chunks * cells, 0);
  std::vector<int64_t> highest(chunks, -1);
  const auto for_chunks = [&](const auto& task) {
    at::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) {
        task(c, n * c / chunks, n * (c + 1) / chunks);
      }
    });
  };
  for_chunks([&](int64_t c, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      highest[c] = std::max<int64_t>(highest[c], cell_of[i]);
      if (cell_of[i] >= 0 && cell_of[i] < cells) {
        ++places[c * cells + cell_of[i]];
      }
    }
  });
  const int64_t top = *std::max_element(highest.begin(), highest.end());
  TORCH_CHECK_INDEX(top < cells, "midx_cells: expected cell below ", cells,
                    ", codewords squared, got ", top);
  const int64_t drawn = std::accumulate(places.begin(), places.end(), int64_t(0));
  TORCH_CHECK_VALUE(drawn == order.size(0), "midx_cells: expected num_drawn of ", drawn,
                    ", the cells that are not -1, got ", order.size(0));
  int64_t* first_of = start.mutable_data_ptr<int64_t>();
  double* mass_of = mass.mutable_data_ptr<double>();
  int64_t place = 0;
  for (int64_t k = 0; k < cells; ++k) {
    first_of[k] = place;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t count = places[c * cells + k];
      places[c * cells + k] = place;
      place += count;
    }
    mass_of[k] = double(place - first_of[k]);
  }
  first_of[cells] = place;
  int64_t* class_at = order.mutable_data_ptr<int64_t>();
  for_chunks([&](int64_t c, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (cell_of[i] >= 0) {
        class_at[places[c * cells + cell_of[i]]++] = i;
      }
    }
  });
  if (!is_defined(log_weight)) {
    return;
  }
  const Tensor log_weights = log_weight->contiguous();
  const float* log_weight_of = log_weights.const_data_ptr<float>();
  double *sum_at = prefix.mutable_data_ptr<double>(),
         *heaviest_of = heaviest.mutable_data_ptr<double>();
  at::parallel_for(0, cells, 64, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      double sum = 0, heaviest = 0;
      for (int64_t slot = first_of[k]; slot < first_of[k + 1]; ++slot) {
        const double weight = std::exp(double(log_weight_of[class_at[slot]]));
        heaviest = std::max(heaviest, weight);
        sum_at[slot] = sum += weight;
      }
      mass_of[k] = sum;
      heaviest_of[k] = heaviest;
    }
  });
}

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("midx_encode", midx_encode_cpu);
  m.impl("midx_cells", midx_cells_cpu);
}

} // namespace xsoftmax
