#include "losses/softmax_blocks.cuh"

#include "core/dtypes.h"
#include "core/impl.h"
#include "losses/linear_cross_entropy.h"
#include "losses/logit_transform.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

// The weights of the terms of the loss of a query (linear_cross_entropy_cpu.cpp has the formula).
template <typename A>
struct Terms {
  const int64_t* target;
  int64_t ignore_index, classes;
  const A* class_weight;    // nullptr: ones
  const double* weight_sum; // of all class weights, nullptr: their number
  A label_smoothing;
  double even; // label_smoothing / classes
  A z_loss;

  __device__ bool ignored(int64_t q) const {
    CUDA_KERNEL_ASSERT(target[q] == ignore_index || (target[q] >= 0 && target[q] < classes));
    return target[q] == ignore_index;
  }
  __device__ A target_weight(int64_t q) const { return (1 - label_smoothing) * class_weight_of(q); }
  __device__ A z_weight(int64_t q) const { return z_loss * class_weight_of(q); }
  __device__ A class_weight_of(int64_t q) const { return class_weight == nullptr ? A(1) : class_weight[target[q]]; }
  __device__ double all_weights() const { return weight_sum == nullptr ? double(classes) : *weight_sum; }
};

// The loss of a query whose largest logit is `max`. even: sum of class_weight * logit, where labels are smoothed.
template <typename A>
__device__ inline A loss_of(const Terms<A>& terms, int64_t q, A max, A log_sum, A target_logit, double even) {
  if (terms.ignored(q)) {
    return 0;
  }
  A value = terms.target_weight(q) * ((max - target_logit) + log_sum);
  if (terms.label_smoothing != 0) {
    value += A(terms.even * (terms.all_weights() * (double(max) + log_sum) - even));
  }
  if (terms.z_loss != 0) {
    const A log_normalizer = max + log_sum;
    value += terms.z_weight(q) * log_normalizer * log_normalizer;
  }
  return value;
}

// A thread a query: its loss, and the logarithm of its sum in the place of the sum.
template <typename A>
__global__ void finish_kernel(A* loss, SoftmaxState<A> state, Terms<A> terms, int64_t queries) {
  for (int64_t q = global_thread(); q < queries; q += grid_threads()) {
    const A log_sum = log(state.sum[q]);
    state.sum[q] = log_sum;
    loss[q] = loss_of(terms, q, state.max[q], log_sum, state.target_logit[q], state.even == nullptr ? 0.0 : state.even[q]);
  }
}

// The gradient of the logits of a query, (softmax - one-hot) times what reaches it, by a block of threads. kInPlace: `out` begins where the logits do.
template <bool kInPlace, int N, typename A, typename Out>
__device__ inline void slope_row(Out* out, const LogitBlock<A>& block, const Terms<A>& terms, int64_t q, A grad, A max, A log_sum) {
  const bool ignored = terms.ignored(q);
  const A target_grad = ignored ? A(0) : grad * terms.target_weight(q), even = ignored ? A(0) : A(grad * terms.even);
  const A z_grad = ignored || terms.z_loss == 0 ? A(0) : 2 * grad * terms.z_weight(q) * (max + log_sum);
  const A scale = ignored ? A(0) : A((target_grad + even * terms.all_weights() + z_grad) * exp(-log_sum));
  const int64_t place = ignored ? -1 : terms.target[q] - block.begin;
  const A* row = block.logits + q * block.stride;
  for (int64_t base = 0; base < block.size; base += int64_t(blockDim.x) * N) {
    const int64_t j = base + int64_t(threadIdx.x) * N;
    A slope[N];
    if (j < block.size) {
      const auto pack = load_pack<N>(row + j);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int64_t c = block.begin + j + i;
        const A x = pack.values[i] + (block.bias == nullptr ? A(0) : block.bias[c]);
        const A value = scale * on_device::exponential(x - max) - even * (block.class_weight == nullptr ? A(1) : block.class_weight[c]);
        slope[i] = ignored ? A(0) : value - (j + i == place ? target_grad : A(0)); // 0 even where logits are not finite
      }
    }
    if constexpr (kInPlace && sizeof(Out) < sizeof(A)) {
      __syncthreads(); // what is written lies over logits that other threads read in this round or before
    }
    if (j < block.size) {
      store_pack(out + j, slope);
    }
  }
}

// A block of threads a query.
template <typename A, typename Out, int N>
__global__ void slope_kernel(Out* out, LogitBlock<A> block, Terms<A> terms, const A* grad, const A* normalizer) {
  for (int64_t q = blockIdx.x; q < block.queries; q += gridDim.x) {
    slope_row<false, N>(out + q * block.size, block, terms, q, grad[q], normalizer[q], normalizer[block.queries + q]);
  }
}

// The same where the block is all classes, with the loss. The gradients, of type Out, take the place of the logits, row by row.
template <typename A, typename Out, int N>
__global__ void loss_and_slope_kernel(A* loss, A* logits, LogitBlock<A> block, Terms<A> terms, const A* grad) {
  for (int64_t q = blockIdx.x; q < block.queries; q += gridDim.x) {
    const RowFold<A> row = fold_row<N>(block, q, terms.label_smoothing != 0, nullptr);
    const A log_sum = log(row.sum);
    if (threadIdx.x == 0) {
      loss[q] = loss_of(terms, q, row.max, log_sum, target_logit(block, q, A(0)), row.even);
    }
    __syncthreads(); // the logit of the target has been read
    slope_row<true, N>(reinterpret_cast<Out*>(logits + q * block.stride), block, terms, q, grad[q], row.max, log_sum);
  }
}

template <typename Out, typename A>
void launch_loss_and_slope(A* loss, A* logits, const LogitBlock<A>& block, const Terms<A>& terms, const A* grad) {
  const bool wide = aligned(block.logits, block.stride, sizeof(A)) && aligned(nullptr, block.size, sizeof(A));
  dispatch_pack<A>(wide, [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    loss_and_slope_kernel<A, Out, N><<<grid_size(block.queries, 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(loss, logits, block, terms, grad);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

template <typename A, typename Out>
void launch_slope(Out* out, const LogitBlock<A>& block, const Terms<A>& terms, const A* grad, const A* normalizer) {
  const bool wide = aligned(block.logits, block.stride, sizeof(A)) && aligned(nullptr, block.size, sizeof(A));
  dispatch_pack<A>(wide, [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    slope_kernel<A, Out, N><<<grid_size(block.queries, 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(out, block, terms, grad, normalizer);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

// The tensors behind Terms and LogitBlock, contiguous, in opmath.
struct Operands {
  Tensor query, target, bias, class_weight, weight_sum;
  int64_t queries, classes;
  CrossEntropyOptions options;

  Operands(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Tensor& target, const OptionalTensor& class_weight,
           const CrossEntropyOptions& options)
      : query(input.contiguous()), target(target.contiguous()), queries(input.size(0)), classes(weight.size(0)), options(options) {
    const auto dtype = opmath_dtype(input.scalar_type());
    this->bias = given(bias) ? bias->to(dtype).contiguous() : Tensor();
    if (given(class_weight)) {
      this->class_weight = class_weight->to(dtype).contiguous();
      weight_sum = options.label_smoothing > 0 ? this->class_weight.sum(at::kDouble) : Tensor();
    }
  }

  template <typename A>
  static const A* pointer(const Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<A>() : nullptr;
  }
  template <typename A>
  Terms<A> terms() const {
    return {target.const_data_ptr<int64_t>(),
            options.ignore_index,
            classes,
            pointer<A>(class_weight),
            pointer<double>(weight_sum),
            A(options.label_smoothing),
            options.label_smoothing / double(classes),
            A(options.z_loss)};
  }
  template <typename A>
  LogitBlock<A> block(const Tensor& logits, int64_t begin) const {
    const A* remaining_bias = transforms(options) ? nullptr : pointer<A>(bias);
    const A* smoothed = options.label_smoothing > 0 ? pointer<A>(class_weight) : nullptr; // 0 times a weight may be no number
    return {logits.const_data_ptr<A>(), logits.stride(0), queries, begin, logits.size(1), remaining_bias, smoothed, target.const_data_ptr<int64_t>()};
  }
  // Those of `count` queries.
  Operands rows(int64_t first, int64_t count) const {
    Operands some = *this;
    some.query = query.narrow(0, first, count);
    some.target = target.narrow(0, first, count);
    some.queries = count;
    return some;
  }
  // The products of a block of classes, turned into logits with the bias where options transform them.
  void products(const Tensor& out, const Tensor& weight, int64_t begin, int64_t size) const {
    block_products(out, query, weight, begin, size);
    if (transforms(options)) {
      transform_products(out, bias.defined() ? OptionalTensor(bias.narrow(0, begin, size)) : std::nullopt, options);
    }
  }
};

// Calls visit(begin, size) for each block of classes; the first `saved` classes and the others are not in one block.
template <typename Visit>
void for_each_block(int64_t classes, int64_t saved, int64_t width, const Visit& visit) {
  for (int64_t begin = 0, size = 0; begin < classes; begin += size) {
    size = std::min(width, (begin < saved ? saved : classes) - begin);
    visit(begin, size);
  }
}

// Queries at once, whose logits of all classes, and the gradients of these, fit into the workspace. Products are the faster the more queries they have.
int64_t queries_at_once(int64_t queries, int64_t classes, int64_t bytes_per_logit, int64_t workspace_mb) {
  constexpr int64_t kStep = 128;
  const int64_t fitting = (std::min<int64_t>(workspace_mb, 1 << 20) << 20) / (classes * bytes_per_logit);
  return std::min(queries, std::max(kStep, fitting / kStep * kStep));
}

CrossEntropyState linear_cross_entropy_forward_cuda(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                                                    const OptionalTensor& class_weight, std::string_view text, bool save_logits) {
  const CrossEntropyOptions parsed = check_linear_cross_entropy(input, weight, bias, target, class_weight, text);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t queries = input.size(0), classes = weight.size(0);
  if (use_reference() || queries == 0 || classes == 0) {
    return linear_cross_entropy_forward_reference(input, weight, bias, target, class_weight, text, save_logits);
  }
  const Operands operands(input, weight, bias, target, class_weight, parsed);
  const auto options = input.options().dtype(opmath_dtype(input.scalar_type()));
  const int64_t saved = save_logits ? saved_classes(queries, classes, input.scalar_type()).expect_int() : 0;
  const int64_t width = class_block(queries, classes, options.dtype().itemsize());
  const int64_t step = queries_at_once(queries, classes, options.dtype().itemsize(), parsed.workspace_mb);
  const Tensor loss = at::empty({queries}, options), normalizer = at::empty({2, queries}, options), saved_logits = at::empty({queries, saved}, options);
  const Tensor target_logit = at::zeros({queries}, options), even = at::empty({parsed.label_smoothing > 0 ? queries : 0}, options.dtype(at::kDouble));
  const Tensor buffer = at::empty({!save_logits ? step * classes : saved < classes ? queries * width : 0}, options);
  AT_DISPATCH_FLOATING_TYPES(loss.scalar_type(), "linear_cross_entropy_forward_cuda", [&] {
    const SoftmaxState<scalar_t> state{normalizer.mutable_data_ptr<scalar_t>(), normalizer.mutable_data_ptr<scalar_t>() + queries,
                                       target_logit.mutable_data_ptr<scalar_t>(), parsed.label_smoothing > 0 ? even.mutable_data_ptr<double>() : nullptr};
    for (int64_t first = 0; !save_logits && first < queries; first += step) { // no backward pass follows: few launches, of all classes
      const Operands rows = operands.rows(first, std::min(step, queries - first));
      const Tensor logits = buffer.narrow(0, 0, rows.queries * classes).view({rows.queries, classes});
      rows.products(logits, weight, 0, classes);
      fold_logits(state.from(first), rows.block<scalar_t>(logits, 0), nullptr, /*first=*/true);
    }
    for_each_block(save_logits ? classes : 0, saved, width, [&](int64_t begin, int64_t size) {
      const Tensor logits = begin < saved ? saved_logits.narrow(1, begin, size) : buffer.narrow(0, 0, queries * size).view({queries, size});
      operands.products(logits, weight, begin, size);
      fold_logits(state, operands.block<scalar_t>(logits, begin), nullptr, begin == 0);
    });
    finish_kernel<scalar_t><<<grid_size(queries, kThreads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(loss.mutable_data_ptr<scalar_t>(), state,
                                                                                                              operands.terms<scalar_t>(), queries);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {loss, normalizer, saved_logits};
}

LinearGradients linear_cross_entropy_backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                                   const Tensor& target, const OptionalTensor& class_weight, const Tensor& normalizer,
                                                   const Tensor& saved_logits, std::string_view text, std::array<bool, 3> output_mask) {
  const CrossEntropyOptions parsed = check_linear_cross_entropy_backward(grad, input, weight, bias, target, class_weight, normalizer, saved_logits, text);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t queries = input.size(0), classes = weight.size(0), features = weight.size(1), saved = saved_logits.size(1);
  const auto [want_input, want_weight, want_bias] = output_mask;
  if (use_reference() || queries == 0 || classes == 0 || !(want_input || want_weight || want_bias)) {
    return linear_cross_entropy_backward_reference(grad, input, weight, bias, target, class_weight, normalizer, saved_logits, text, output_mask);
  }
  const Operands operands(input, weight, bias, target, class_weight, parsed);
  const auto options = grad.options();
  const bool rounded = multiplies_rounded(input.scalar_type());
  const int64_t width = class_block(queries, classes, options.dtype().itemsize());
  const Tensor loss_grad = grad.contiguous(), state = normalizer.contiguous(), kept = saved_logits.contiguous();
  const Tensor buffer = at::empty({queries * width}, options), narrow = at::empty({rounded ? queries * width : 0}, input.options());
  const Tensor query = rounded ? operands.query : operands.query.to(options.dtype());
  const Tensor ignored = transforms(parsed) ? target.eq(parsed.ignore_index).unsqueeze(1) : Tensor();
  Tensor grad_input = at::empty({want_input ? queries : 0, features}, options);
  const Tensor grad_weight = at::empty({want_weight ? classes : 0, features}, input.options());
  const Tensor grad_bias = at::empty({want_bias ? classes : 0}, options);
  for_each_block(classes, saved, width, [&](int64_t begin, int64_t size) {
    const auto place = [&](const Tensor& memory) { return memory.narrow(0, 0, queries * size).view({queries, size}); };
    const Tensor logits = begin < saved ? kept.narrow(1, begin, size) : place(buffer), slope = place(rounded ? narrow : buffer);
    if (begin >= saved) {
      operands.products(logits, weight, begin, size);
    }
    // Before slopes take the place of logits; 0 where an ignored query holds anything.
    const Tensor derivative = transforms(parsed) ? transform_derivative(logits, parsed).masked_fill(ignored, 0) : Tensor();
    AT_DISPATCH_FLOATING_TYPES(grad.scalar_type(), "linear_cross_entropy_backward_cuda", [&] {
      const auto launch = [&](auto* out) {
        launch_slope(out, operands.block<scalar_t>(logits, begin), operands.terms<scalar_t>(), loss_grad.const_data_ptr<scalar_t>(),
                     state.const_data_ptr<scalar_t>());
      };
      rounded ? launch(slope.mutable_data_ptr<at::BFloat16>()) : launch(slope.mutable_data_ptr<scalar_t>());
    });
    if (derivative.defined()) {
      slope.mul_(derivative);
    }
    if (want_input) {
      product_out_cuda(grad_input, slope, weight.narrow(0, begin, size), /*add=*/begin > 0);
    }
    if (want_weight) {
      Tensor out = grad_weight.narrow(0, begin, size);
      out.scalar_type() == slope.scalar_type() ? at::mm_out(out, slope.t(), query) : out.copy_(at::mm(slope.t(), query));
    }
    if (want_bias) {
      Tensor out = grad_bias.narrow(0, begin, size);
      at::sum_out(out, slope, {0}, /*keepdim=*/false, out.scalar_type());
    }
  });
  return {grad_input.to(input.scalar_type()), grad_weight, grad_bias.to(input.scalar_type())};
}

// By rows of queries: the gradients of the logits of some queries take their place, and two products make gradients of them, so that no product is taken
// twice. The gradient of the table is summed in opmath over the rows.
CrossEntropyWithGradients linear_cross_entropy_with_gradients_cuda(const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                                                   const Tensor& target, const OptionalTensor& class_weight, std::string_view text,
                                                                   std::array<bool, 3> output_mask) {
  const CrossEntropyOptions parsed = check_linear_cross_entropy_with_gradients(grad, input, weight, bias, target, class_weight, text);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t queries = input.size(0), classes = weight.size(0), features = weight.size(1);
  const auto [want_input, want_weight, want_bias] = output_mask;
  if (use_reference() || queries == 0 || classes == 0 || !(want_input || want_weight || want_bias)) {
    return linear_cross_entropy_with_gradients_composite(grad, input, weight, bias, target, class_weight, text, output_mask);
  }
  const Operands operands(input, weight, bias, target, class_weight, parsed);
  const auto floats = grad.options();
  const bool rounded = multiplies_rounded(input.scalar_type());
  const int64_t step = queries_at_once(queries, classes, floats.dtype().itemsize(), parsed.workspace_mb);
  const Tensor logits = at::empty({step, classes}, floats), slopes = rounded ? logits.view(input.scalar_type()).narrow(1, 0, classes) : logits;
  const Tensor loss = at::empty({queries}, floats), loss_grad = grad.contiguous();
  const Tensor table = rounded ? weight : weight.to(floats.dtype()), factors = rounded ? operands.query : operands.query.to(floats.dtype());
  const Tensor ignored = transforms(parsed) ? target.eq(parsed.ignore_index).unsqueeze(1) : Tensor();
  const Tensor grad_input = at::empty({want_input ? queries : 0, features}, floats), grad_weight = at::empty({want_weight ? classes : 0, features}, floats);
  Tensor grad_bias = at::empty({want_bias ? classes : 0}, floats);
  for (int64_t first = 0; first < queries; first += step) {
    const int64_t count = std::min(step, queries - first);
    const Operands rows = operands.rows(first, count);
    const Tensor products = logits.narrow(0, 0, count), slope = slopes.narrow(0, 0, count);
    rows.products(products, weight, 0, classes);
    const Tensor derivative = transforms(parsed) ? transform_derivative(products, parsed).masked_fill(ignored.narrow(0, first, count), 0) : Tensor();
    AT_DISPATCH_FLOATING_TYPES(loss.scalar_type(), "linear_cross_entropy_with_gradients_cuda", [&] {
      const auto launch = [&](auto zero) {
        launch_loss_and_slope<decltype(zero)>(loss.mutable_data_ptr<scalar_t>() + first, products.mutable_data_ptr<scalar_t>(),
                                              rows.block<scalar_t>(products, 0), rows.terms<scalar_t>(), loss_grad.const_data_ptr<scalar_t>() + first);
      };
      rounded ? launch(at::BFloat16()) : launch(scalar_t());
    });
    if (derivative.defined()) {
      Tensor(slope).mul_(derivative);
    }
    if (want_input) {
      product_out_cuda(grad_input.narrow(0, first, count), slope, table);
    }
    if (want_weight) {
      product_out_cuda(grad_weight, slope.t(), factors.narrow(0, first, count), /*add=*/first > 0);
    }
    if (want_bias) {
      first > 0 ? grad_bias.add_(slope.sum(0, /*keepdim=*/false, grad_bias.scalar_type()))
                : at::sum_out(grad_bias, slope, {0}, /*keepdim=*/false, grad_bias.scalar_type());
    }
  }
  const auto dtype = input.scalar_type();
  return {loss, grad_input.to(dtype), grad_weight.to(dtype), grad_bias.to(dtype)};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("linear_cross_entropy_with_gradients", linear_cross_entropy_with_gradients_cuda);
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_forward_cuda);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_cuda);
}

} // namespace xsoftmax
