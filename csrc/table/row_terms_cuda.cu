#include "table/cuda_sorted_ids.cuh"
#include "cpu/impl.h"
#include "op/optional.h"
#include "table/sorted_ids.h"
#include "table/gather_dot.h"
#include "table/row_terms.h"

#include <ATen/Dispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

template <typename A>
struct Pairs {
  const A* grad;
  int64_t stride, width, count;
  const A* scale; // nullptr: all ones
  int64_t scale_stride;
};

// One thread per pair, in the order of the sorted classes.
template <typename A>
__global__ void row_terms_kernel(int64_t* rows, int32_t* sources, A* coefficients,
                                 SortedIdsView ids, Pairs<A> pairs) {
  for (int64_t i = global_thread(); i < pairs.count; i += grid_threads()) {
    const int64_t position = ids.order[i], query = position / pairs.width;
    const A gradient = pairs.grad[query * pairs.stride + position % pairs.width],
            factor = pairs.scale == nullptr ? A(1) : pairs.scale[query * pairs.scale_stride];
    rows[i] = ids[i];
    sources[i] = int32_t(query);
    // Not a plain product: 0 * inf is NaN, and ignored queries may hold anything.
    coefficients[i] = gradient == A(0) || factor == A(0) ? A(0) : gradient * factor;
  }
}

std::tuple<Tensor, Tensor, Tensor> row_terms_cuda(const Tensor& grad_argument, const Tensor& ids,
                                                  const OptionalTensor& scale,
                                                  int64_t num_classes) {
  check_row_terms(grad_argument, ids, scale, num_classes);
  const c10::cuda::CUDAGuard guard(grad_argument.device());
  const auto dtype = grad_argument.scalar_type();
  if (use_reference()) {
    return row_terms_composite(grad_argument, ids, scale, num_classes);
  }
  const int64_t count = ids.numel();
  const Tensor grad = with_unit_column_stride(grad_argument),
               factor = is_defined(scale) ? scale->contiguous() : Tensor();
  const SortedIds sorted(ids, num_classes - 1);
  const Tensor rows = at::empty({count}, ids.options()),
               sources = at::empty({count}, ids.options().dtype(at::kInt));
  const Tensor coefficients = at::empty({count}, grad.options());
  if (count > 0) {
    AT_DISPATCH_FLOATING_TYPES(dtype, "row_terms_cuda", [&] {
      const Pairs<scalar_t> pairs{grad.const_data_ptr<scalar_t>(),
                                  grad.stride(0),
                                  ids.size(1),
                                  count,
                                  factor.defined() ? factor.const_data_ptr<scalar_t>() : nullptr,
                                  factor.defined() && factor.dim() == 1 ? 1 : 0};
      row_terms_kernel<<<grid_size(count, kThreads), kThreads, 0,
                         c10::cuda::getCurrentCUDAStream()>>>(
          rows.mutable_data_ptr<int64_t>(), sources.mutable_data_ptr<int32_t>(),
          coefficients.mutable_data_ptr<scalar_t>(), sorted.view(), pairs);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  note_sorted_ids(rows, num_classes);
  return {rows, sources, coefficients};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("row_terms", row_terms_cuda); }

} // namespace xsoftmax
