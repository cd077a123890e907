#include "op/checks.h"
#include "op/cuda_launch.cuh"
#include "cpu/impl.h"
#include "op/optional.h"
#include "proposal/midx/midx_refresh.h"

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using namespace cuda;

constexpr int64_t kProducts = int64_t(1) << 24; // of rows with codewords, computed at once

// -------------------------------------------------------------------------------------------------
// codes

struct Nearest {
  float value;
  int32_t place;
};

/// Returns the largest value(i), i < n, and its first place, in every lane. NaN counts as largest.
template <typename Value>
__device__ inline Nearest warp_best(int64_t n, const Value& value) {
  const auto better = [](const Nearest& one, const Nearest& other) {
    const bool none = !(one.value == one.value), other_none = !(other.value == other.value);
    return none != other_none ? none
                              : one.value > other.value ||
            ((none || one.value == other.value) && one.place < other.place);
  };
  Nearest best{-std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()};
  for (int64_t i = lane(); i < n; i += kWarp) {
    const Nearest mine{value(i), int32_t(i)};
    best = better(mine, best) ? mine : best;
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const Nearest other{__shfl_xor_sync(kAllLanes, best.value, distance),
                        __shfl_xor_sync(kAllLanes, best.place, distance)};
    best = better(other, best) ? other : best;
  }
  return best;
}

// Encodes rows, one warp per row: |x - c|^2 = |x|^2 - 2 (x.c - |c|^2 / 2). For the remainder x -
// c1, the product with c2 is x.c2 - c1.c2, so the remainder is never computed.
__global__ void encode_kernel(int32_t* cell, float* error, const float* product1,
                              const float* product2, int64_t stride, const float* x,
                              const float* half1, const float* penalty2, int64_t rows,
                              int64_t width, int64_t k) {
  for (int64_t row = global_thread() / kWarp; row < rows; row += grid_threads() / kWarp) {
    float square = 0;
    for (int64_t d = lane(); d < width; d += kWarp) {
      square += x[row * width + d] * x[row * width + d];
    }
    square = warp_sum(square);
    const Nearest first =
        warp_best(k, [&](int64_t i) { return product1[row * stride + i] - half1[i]; });
    const Nearest second = warp_best(
        k, [&](int64_t i) { return product2[row * stride + i] - penalty2[first.place * k + i]; });
    if (lane() == 0) {
      const float remainder = square - 2 * (first.value + second.value);
      cell[row] = int32_t(first.place * k + second.place);
      error[row] = remainder < 0 ? 0.0f : remainder; // keeps a NaN
    }
  }
}

MidxCodes midx_encode_cuda(const Tensor& rows, const Tensor& codewords1, const Tensor& codewords2) {
  check::dim("midx_encode", "rows", rows, 2);
  check::floating("midx_encode", "rows", rows);
  const bool residual = check_codebooks("midx_encode", codewords1, codewords2, rows.size(1));
  check::same_device("midx_encode", "codewords1", codewords1, "rows", rows);
  if (use_reference()) {
    return midx_encode_reference(rows, codewords1, codewords2);
  }
  const c10::cuda::CUDAGuard guard(rows.device());
  const int64_t n = rows.size(0), k = codewords1.size(0), width1 = codewords1.size(1),
                width = rows.size(1);
  const auto floats = rows.options().dtype(at::kFloat);
  const Tensor cell = at::empty({n}, rows.options().dtype(at::kInt)),
               error = at::empty({n}, floats);
  const Tensor half1 = 0.5 * codewords1.square().sum(1), half2 = 0.5 * codewords2.square().sum(1);
  const Tensor penalty2 =
      ((residual ? at::mm(codewords1, codewords2.t()) : at::zeros({k, k}, floats)) + half2)
          .contiguous();
  const Tensor both = residual ? at::cat({codewords1, codewords2}) : Tensor();
  const int64_t block = std::max<int64_t>(1, kProducts / (2 * k));
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t size = std::min(block, n - begin);
    const Tensor x = rows.narrow(0, begin, size).to(at::kFloat).contiguous();
    const Tensor first =
        residual ? at::mm(x, both.t()) : at::mm(x.narrow(1, 0, width1), codewords1.t());
    const Tensor second =
        residual ? first : at::mm(x.narrow(1, width1, width - width1), codewords2.t());
    encode_kernel<<<grid_size(size, kThreads / kWarp), kThreads, 0,
                    c10::cuda::getCurrentCUDAStream()>>>(
        cell.mutable_data_ptr<int32_t>() + begin, error.mutable_data_ptr<float>() + begin,
        first.const_data_ptr<float>(), second.const_data_ptr<float>() + (residual ? k : 0),
        first.size(1), x.const_data_ptr<float>(), half1.const_data_ptr<float>(),
        penalty2.const_data_ptr<float>(), size, width, k);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {cell, error};
}

// Encodes the rows of the touched classes again, one warp per class. Reads the codewords directly
// instead of using matrix products, because few rows are touched. A row that is not finite keeps
// its code.
template <typename T>
__global__ void recode_kernel(int32_t* cell, float* spread, const bool* touched, const T* weight,
                              int64_t stride, const float* codewords1, const float* codewords2,
                              const float* half1, const float* half2, int64_t classes,
                              int64_t width1, int64_t width2, bool residual, int64_t k) {
  for (int64_t base = global_thread() / kWarp * kWarp; base < classes; base += grid_threads()) {
    const int64_t mine = base + lane();
    const unsigned found =
        __ballot_sync(kAllLanes, mine < classes && touched[mine] && cell[mine] >= 0);
    for (unsigned left = found; left != 0; left &= left - 1) {
      const int64_t id = base + __ffs(int(left)) - 1;
      const T *part1 = weight + id * stride, *part2 = residual ? part1 : part1 + width1;
      // Returns the best codeword of a codebook; the lanes share each product.
      const auto nearest = [&](const float* codewords, const float* half, const auto& element,
                               int64_t width) {
        Nearest best{-std::numeric_limits<float>::infinity(), 0};
        for (int64_t i = 0; i < k; ++i) {
          float sum = 0;
          for (int64_t d = lane(); d < width; d += kWarp) {
            sum += element(d) * codewords[i * width + d];
          }
          const float value = warp_sum(sum) - half[i];
          best = value > best.value ? Nearest{value, int32_t(i)} : best;
        }
        return best.place;
      };
      const int32_t k1 =
          nearest(codewords1, half1, [&](int64_t d) { return float(part1[d]); }, width1);
      const float* c1 = codewords1 + k1 * width1;
      const auto remainder = [&](int64_t d) {
        return residual ? float(part2[d]) - c1[d] : float(part2[d]);
      };
      const int32_t k2 = nearest(codewords2, half2, remainder, width2);
      float square = 0;
      for (int64_t d = lane(); d < width2; d += kWarp) {
        const float difference = remainder(d) - codewords2[k2 * width2 + d];
        square += difference * difference;
      }
      for (int64_t d = lane(); !residual && d < width1; d += kWarp) {
        const float difference = float(part1[d]) - c1[d];
        square += difference * difference;
      }
      square = warp_sum(square);
      if (lane() == 0 && std::isfinite(square)) {
        cell[id] = int32_t(k1 * k + k2);
        if (spread != nullptr) {
          spread[id] = square;
        }
      }
    }
  }
}

// Encodes the touched classes again and rebuilds the layout.
void recode(const Tensor& touched, const ClassTable& table, const MidxIndex& index) {
  const at::AutoDispatchBelowADInplaceOrView below; // an index has no gradient
  const Tensor weight = table.weight.stride(1) == 1 || table.weight.size(1) == 1
      ? table.weight
      : table.weight.contiguous();
  const Tensor first = index.codewords1.contiguous(), second = index.codewords2.contiguous();
  const Tensor half1 = 0.5 * first.square().sum(1), half2 = 0.5 * second.square().sum(1);
  const Tensor cell = index.cell.contiguous(),
               spread = is_defined(index.spread) ? index.spread->contiguous() : Tensor();
  const int64_t classes = cell.size(0);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, weight.scalar_type(), "midx_update_", [&] {
        recode_kernel<scalar_t>
            <<<grid_size(classes, kThreads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                cell.mutable_data_ptr<int32_t>(),
                spread.defined() ? spread.mutable_data_ptr<float>() : nullptr,
                touched.const_data_ptr<bool>(), weight.const_data_ptr<scalar_t>(), weight.stride(0),
                first.const_data_ptr<float>(), second.const_data_ptr<float>(),
                half1.const_data_ptr<float>(), half2.const_data_ptr<float>(), classes,
                first.size(1), second.size(1), index.residual, first.size(0));
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      });
  const auto write_back = [](const Tensor& to, const Tensor& from) {
    if (!to.is_same(from)) {
      to.copy_(from);
    }
  };
  write_back(index.cell, cell);
  if (spread.defined()) {
    write_back(*index.spread, spread);
  }
  const OptionalTensor log_weight = midx_class_weights(table, index, index.spread);
  if (is_defined(log_weight)) {
    index.log_weight->copy_(*log_weight);
  }
  rebuild_midx_layout(index);
}

void midx_update_cuda_(const Tensor& weight, const OptionalTensor& bias, const Tensor& rows,
                       const Tensor& step, at::TensorList others, std::string_view text) {
  const MidxIndex index = checked_midx_update(weight, bias, rows, step, others, text);
  const c10::cuda::CUDAGuard guard(weight.device());
  const ClassTable table(weight, bias, is_defined(index.table));
  recode(at::zeros({weight.size(0)}, rows.options().dtype(at::kBool)).index_fill_(0, rows, true),
         table, index);
  midx_copy_table(table, index);
}

// -------------------------------------------------------------------------------------------------
// cells

/// Returns the position of the first of n increasing values that is at least `least`.
__device__ inline int64_t first_at_least(const int32_t* values, int64_t n, int64_t least) {
  int64_t first = 0;
  while (n > 0) {
    const int64_t half = n / 2;
    const bool less = values[first + half] < least;
    first += less ? half + 1 : 0;
    n = less ? n - half - 1 : half;
  }
  return first;
}

// Finds where the classes of each cell begin among the sorted cells, one thread per cell. The last
// `drawn` entries are those that are not -1.
__global__ void start_kernel(int64_t* start, double* mass, const int32_t* sorted, int64_t classes,
                             int64_t drawn, int64_t cells) {
  const int32_t* first = sorted + (classes - drawn);
  for (int64_t c = global_thread(); c <= cells; c += grid_threads()) {
    CUDA_KERNEL_ASSERT(drawn == classes || first[-1] < 0);
    CUDA_KERNEL_ASSERT(drawn == 0 || (first[0] >= 0 && first[drawn - 1] < cells));
    const int64_t begin = first_at_least(first, drawn, c);
    start[c] = begin;
    if (c < cells) {
      mass[c] = double(first_at_least(first, drawn, c + 1) - begin);
    }
  }
}

// Sums the weights of each cell, one block per cell. Cells are summed separately, because a cell
// may weigh less than the rounding error of a global sum.
__global__ void weigh_kernel(double* prefix, double* mass, double* heaviest, const int64_t* order,
                             const int64_t* start, const float* log_weight, int64_t cells) {
  __shared__ double storage[kWarp];
  for (int64_t c = blockIdx.x; c < cells; c += gridDim.x) {
    const int64_t last = start[c + 1];
    double sum = 0, most = 0;
    for (int64_t begin = start[c]; begin < last; begin += blockDim.x) {
      const int64_t slot = begin + threadIdx.x;
      const double weight = slot < last ? exp(double(log_weight[order[slot]])) : 0.0;
      double total;
      const double end = sum + block_inclusive_sum(weight, &total, storage);
      if (slot < last) {
        prefix[slot] = end;
      }
      most = weight > most ? weight : most;
      sum += total;
    }
    most = block_max(most, 0.0, storage);
    if (threadIdx.x == 0) {
      mass[c] = sum;
      heaviest[c] = most;
    }
  }
}

MidxCells midx_cells_cuda(const Tensor& cell, const OptionalTensor& log_weight, int64_t codewords,
                          int64_t num_drawn) {
  check_midx_cells(cell, log_weight, codewords, num_drawn);
  if (use_reference()) {
    return midx_cells_reference(cell, log_weight, codewords, num_drawn);
  }
  const c10::cuda::CUDAGuard guard(cell.device());
  const int64_t cells = codewords * codewords, classes = cell.size(0);
  const auto longs = cell.options().dtype(at::kLong), doubles = cell.options().dtype(at::kDouble);
  const auto [sorted, by_cell] =
      cell.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false); // -1 sorts first
  const Tensor order = by_cell.narrow(0, classes - num_drawn, num_drawn).clone();
  const Tensor start = at::empty({cells + 1}, longs),
               mass = at::empty({codewords, codewords}, doubles);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  start_kernel<<<grid_size(cells + 1, kThreads), kThreads, 0, stream>>>(
      start.mutable_data_ptr<int64_t>(), mass.mutable_data_ptr<double>(),
      sorted.const_data_ptr<int32_t>(), classes, num_drawn, cells);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  const bool weighted = is_defined(log_weight);
  const Tensor prefix = at::empty({weighted ? num_drawn : 0}, doubles),
               heaviest = at::empty({weighted ? cells : 0}, doubles);
  if (weighted) {
    const Tensor log_weights = log_weight->contiguous();
    weigh_kernel<<<grid_size(cells, 1), kThreads, 0, stream>>>(
        prefix.mutable_data_ptr<double>(), mass.mutable_data_ptr<double>(),
        heaviest.mutable_data_ptr<double>(), order.const_data_ptr<int64_t>(),
        start.const_data_ptr<int64_t>(), log_weights.const_data_ptr<float>(), cells);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {order, start, mass, prefix, heaviest};
}

// -------------------------------------------------------------------------------------------------
// notes of training steps

// Marks the ids of [rows, width], one thread per id, except -1 and those of ignored queries.
__global__ void mark_kernel(bool* touched, const int64_t* ids, const int64_t* target,
                            int64_t target_width, int64_t total, int64_t width, int64_t classes) {
  for (int64_t i = global_thread(); i < total; i += grid_threads()) {
    const int64_t id = ids[i];
    CUDA_KERNEL_ASSERT(id >= -1 && id < classes);
    if (id >= 0 && (target == nullptr || target[i / width * target_width] >= 0)) {
      touched[id] = true;
    }
  }
}

// `target` undefined: no query is ignored.
void mark(const Tensor& touched, const Tensor& ids, const Tensor& target) {
  if (ids.numel() == 0) {
    return;
  }
  const Tensor flat = ids.contiguous();
  mark_kernel<<<grid_size(flat.numel(), kThreads), kThreads, 0,
                c10::cuda::getCurrentCUDAStream()>>>(
      touched.mutable_data_ptr<bool>(), flat.const_data_ptr<int64_t>(),
      target.defined() ? target.const_data_ptr<int64_t>() : nullptr,
      target.defined() && target.dim() == 2 ? target.size(1) : 1, flat.numel(),
      flat.dim() == 1 && target.defined() ? 1 : flat.size(-1), touched.size(0));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void midx_note_cuda_(const Tensor& touched, const OptionalTensor& query_square, const Tensor& step,
                     const Tensor& queries, const OptionalTensor& target, const Tensor& ids) {
  check_midx_note(touched, query_square, step, queries, target, ids);
  const c10::cuda::CUDAGuard guard(queries.device());
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor targets = is_defined(target) ? target->contiguous() : Tensor();
  const bool has_targets = targets.defined() && !(targets.dim() == 2 && targets.size(1) == 0);
  if (is_defined(query_square) && queries.size(0) > 0) {
    const Tensor square = queries.to(at::kDouble).square().sum(1);
    Tensor mean = square.mean();
    if (has_targets) { // NaN if all queries are ignored, which leaves query_square unchanged
      const Tensor counts = (targets.dim() == 2 ? targets.select(1, 0) : targets).ge(0);
      mean = at::where(counts, square, 0.0).sum() / counts.sum();
    }
    query_square->copy_(midx_next_query_square(*query_square, mean, step));
  }
  if (touched.numel() > 0) {
    const Tensor marks = touched.contiguous(), query_targets = has_targets ? targets : Tensor();
    mark(marks, ids, ids.dim() == 2 ? query_targets : Tensor());
    if (has_targets) {
      mark(marks, targets, query_targets);
    }
    if (!marks.is_same(touched)) {
      touched.copy_(marks);
    }
  }
}

} // namespace

void MidxFamily::update_between_refreshes_cuda(const char*, const Tensor& weight,
                                               const OptionalTensor& bias, const MidxIndex& index,
                                               const MidxOptions& options) {
  const c10::cuda::CUDAGuard guard(weight.device());
  if (is_defined(index.touched) && index.step.item<int64_t>() % options.update_every == 0) {
    recode(index.touched->contiguous(), ClassTable(weight, bias, false), index);
    index.touched->zero_();
  }
  if (is_defined(index.table)) {
    midx_copy_table(ClassTable(weight, bias), index);
  }
}

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("midx_encode", midx_encode_cuda);
  m.impl("midx_cells", midx_cells_cuda);
  m.impl("midx_update_", midx_update_cuda_);
  m.impl("midx_note_", midx_note_cuda_);
}

} // namespace xsoftmax
