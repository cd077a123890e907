#include "loss/softmax_blocks.cuh"

#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "loss/linear_topk.h"
#include "estimator/logit_transform.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

constexpr int64_t kMaxClasses = int64_t(1) << 32; // ids must fit into the lower half of a key

// Writes the log-probability and the class of each key (softmax_blocks.cuh). If the normaliser of a
// query is NaN, writes NaN and the first k classes. One thread per value.
__global__ void read_keys_kernel(float* values, int64_t* indices, const int64_t* keys,
                                 SoftmaxState<float> state, int64_t queries, int64_t k) {
  for (int64_t i = global_thread(); i < queries * k; i += grid_threads()) {
    const int64_t q = i / k, key = keys[i];
    const float max = state.max[q], log_sum = logf(state.sum[q]), normalizer = max + log_sum;
    const bool undefined = normalizer != normalizer;
    values[i] =
        undefined ? normalizer : (on_device::from_ordered(int32_t(key >> 32)) - max) - log_sum;
    indices[i] = undefined ? i % k : 0xFFFFFFFFll - (key & 0xFFFFFFFFll);
  }
}

TopK linear_topk_cuda(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      c10::SymInt k, std::string_view text) {
  const LogitOptions options = check_linear_topk(input, weight, bias, k, text);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t queries = input.size(0), classes = weight.size(0), count = k.expect_int();
  // The kernels do not support float64, which does not fit into a key together with a class, nor
  // transformed logits: keys need the scores and sums need the logits.
  if (use_reference() || transforms(options) || input.scalar_type() == at::kDouble ||
      classes > kMaxClasses || queries == 0 || count == 0) {
    return linear_topk_reference(input, weight, bias, k, text);
  }
  const auto floats = input.options().dtype(at::kFloat), longs = input.options().dtype(at::kLong);
  const Tensor query = input.contiguous(),
               bias_row = is_defined(bias) ? bias->to(at::kFloat).contiguous() : Tensor();
  const int64_t width = class_block(queries, classes, sizeof(float));
  const Tensor buffer = at::empty({queries * width}, floats),
               seen = at::empty({2, queries}, floats),
               key_buffer = at::empty({queries * width}, longs);
  const SoftmaxState<float> state{seen.mutable_data_ptr<float>(),
                                  seen.mutable_data_ptr<float>() + queries};
  Tensor best;
  for (int64_t begin = 0; begin < classes; begin += width) {
    const int64_t size = std::min(width, classes - begin);
    const auto place = [&](const Tensor& memory) {
      return memory.narrow(0, 0, queries * size).view({queries, size});
    };
    const Tensor logits = place(buffer), keys = place(key_buffer);
    block_products(logits, query, weight, begin, size);
    fold_logits<float>(
        state,
        {logits.const_data_ptr<float>(), size, queries, begin, size,
         bias_row.defined() ? bias_row.const_data_ptr<float>() : nullptr, nullptr, nullptr},
        keys.mutable_data_ptr<int64_t>(), begin == 0);
    // All keys are different, so the result of topk is unique.
    const auto largest = [&](const Tensor& values) {
      return std::get<0>(values.topk(std::min(count, values.size(1)), /*dim=*/1));
    };
    best = best.defined() ? largest(at::cat({best, largest(keys)}, 1)) : largest(keys);
  }
  const Tensor values = at::empty({queries, count}, floats),
               indices = at::empty({queries, count}, longs), found = best.contiguous();
  read_keys_kernel<<<grid_size(values.numel(), kThreads), kThreads, 0,
                     c10::cuda::getCurrentCUDAStream()>>>(
      values.mutable_data_ptr<float>(), indices.mutable_data_ptr<int64_t>(),
      found.const_data_ptr<int64_t>(), state, queries, count);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {values, indices};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("linear_topk", linear_topk_cuda); }

} // namespace xsoftmax
