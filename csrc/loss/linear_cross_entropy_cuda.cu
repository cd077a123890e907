#include "loss/softmax_blocks.cuh"

#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "loss/linear_cross_entropy.h"
#include "estimator/logit_transform.h"
#include "table/gather_dot_cuda.h"

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

// The weights of the terms of the loss of a query. linear_cross_entropy_cpu.cpp has the formula.
template <typename A>
struct Terms {
  const int64_t* target;
  int64_t ignore_index, classes;
  const A* class_weight;    // nullptr: ones
  const double* weight_sum; // sum of all class weights; nullptr: the number of classes
  A label_smoothing;
  double smoothing_weight; // label_smoothing / classes
  A z_loss;

  __device__ bool ignored(int64_t q) const {
    CUDA_KERNEL_ASSERT(target[q] == ignore_index || (target[q] >= 0 && target[q] < classes));
    return target[q] == ignore_index;
  }
  __device__ A target_weight(int64_t q) const { return (1 - label_smoothing) * class_weight_of(q); }
  __device__ A z_weight(int64_t q) const { return z_loss * class_weight_of(q); }
  __device__ A class_weight_of(int64_t q) const {
    return class_weight == nullptr ? A(1) : class_weight[target[q]];
  }
  __device__ double all_weights() const {
    return weight_sum == nullptr ? double(classes) : *weight_sum;
  }

  // Returns the loss of a query.
  __device__ A loss(const LogitBlock<A>& block, int64_t q, const RowFold<A>& row, A log_sum) const {
    if (ignored(q)) {
      return 0;
    }
    A value = target_weight(q) * ((row.max - block.target_logit(q)) + log_sum);
    if (label_smoothing != 0) {
      value +=
          A(smoothing_weight * (all_weights() * (double(row.max) + log_sum) - row.weighted_sum));
    }
    if (z_loss != 0) {
      const A log_normalizer = row.max + log_sum;
      value += z_weight(q) * log_normalizer * log_normalizer;
    }
    return value;
  }
};

// The logsumexp of each query [Q] in two parts: the largest logit, and the log of the sum of
// e^(logit - largest). nullptr if not known yet.
template <typename A>
struct Normalizer {
  A *max, *log_sum;
};

// Writes loss and normalizer from `block`, the products with all classes. One thread block per
// query.
template <typename A, int N>
__global__ void loss_kernel(A* loss, Normalizer<A> normalizer, LogitBlock<A> block,
                            Terms<A> terms) {
  for (int64_t q = blockIdx.x; q < block.queries; q += gridDim.x) {
    const RowFold<A> row = fold_row<N>(block, q, terms.label_smoothing != 0, nullptr);
    if (threadIdx.x == 0) {
      const A log_sum = log(row.sum);
      normalizer.max[q] = row.max;
      normalizer.log_sum[q] = log_sum;
      loss[q] = terms.loss(block, q, row, log_sum);
    }
  }
}

// Overwrites the products of a query with their gradients, with all threads of a block. `out`
// begins at the same address as the products.
template <int N, typename A, typename Out>
__device__ inline void slope_row(Out* out, const LogitBlock<A>& block, const Terms<A>& terms,
                                 int64_t q, A grad, A max, A log_sum) {
  const bool ignored = terms.ignored(q);
  const A target_grad = ignored ? A(0) : grad * terms.target_weight(q),
          smoothing_weight = ignored ? A(0) : A(grad * terms.smoothing_weight);
  const A z_grad =
      ignored || terms.z_loss == 0 ? A(0) : 2 * grad * terms.z_weight(q) * (max + log_sum);
  const A scale = ignored
      ? A(0)
      : A((target_grad + smoothing_weight * terms.all_weights() + z_grad) * exp(-log_sum));
  const int64_t place = ignored ? -1 : terms.target[q] - block.begin;
  const A* row = block.products + q * block.stride;
  for (int64_t base = 0; base < block.size; base += int64_t(blockDim.x) * N) {
    const int64_t j = base + int64_t(threadIdx.x) * N;
    A slope[N] = {};
    if (j < block.size) {
      const auto pack = load_pack<N>(row + j);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (j + i < block.size && !ignored) { // ignored queries get 0 even if a logit is not finite
          const A x = block.logit(pack.values[i], j + i);
          const A value = scale * exponential_below(x - max) -
              (smoothing_weight == A(0) ? A(0) : smoothing_weight * block.weight_of(j + i));
          slope[i] = (value - (j + i == place ? target_grad : A(0))) * block.form.derivative(x);
        }
      }
    }
    if constexpr (sizeof(Out) < sizeof(A)) {
      // The narrower outputs overwrite products that other threads read in this or an earlier
      // round.
      __syncthreads();
    }
    if (j < block.size) {
      store_pack(out + j, slope);
    }
  }
}

// Overwrites `block`, the products with all classes, with their gradients of type Out. Writes the
// loss if the normalizer is not known. One thread block per query.
template <typename A, typename Out, int N>
__global__ void slope_kernel(A* loss, A* products, LogitBlock<A> block, Terms<A> terms,
                             const A* grad, Normalizer<A> normalizer) {
  for (int64_t q = blockIdx.x; q < block.queries; q += gridDim.x) {
    A max, log_sum;
    if (normalizer.max == nullptr) {
      const RowFold<A> row = fold_row<N>(block, q, terms.label_smoothing != 0, nullptr);
      max = row.max;
      log_sum = log(row.sum);
      if (threadIdx.x == 0) {
        loss[q] = terms.loss(block, q, row, log_sum);
      }
      __syncthreads(); // the product of the target must be read before it is overwritten
    } else {
      max = normalizer.max[q];
      log_sum = normalizer.log_sum[q];
    }
    slope_row<N>(reinterpret_cast<Out*>(products + q * block.stride), block, terms, q, grad[q], max,
                 log_sum);
  }
}

// Owns the tensors of Terms and LogitBlock, contiguous and in opmath_type.
struct Operands {
  Tensor query, target, bias, class_weight, weight_sum;
  int64_t queries, classes;
  CrossEntropyOptions options;

  Operands(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
           const Tensor& target, const OptionalTensor& class_weight,
           const CrossEntropyOptions& options)
      : query(input.contiguous()), target(target.contiguous()), queries(input.size(0)),
        classes(weight.size(0)), options(options) {
    const auto dtype = opmath_dtype(input.scalar_type());
    this->bias = is_defined(bias) ? bias->to(dtype).contiguous() : Tensor();
    if (is_defined(class_weight)) {
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
  LogitBlock<A> block(const Tensor& products) const {
    // Without smoothing the weights are not used, because 0 times an infinite one would be NaN.
    const A* smoothed = options.label_smoothing > 0 ? pointer<A>(class_weight) : nullptr;
    return {products.const_data_ptr<A>(),
            products.stride(0),
            queries,
            0,
            classes,
            pointer<A>(bias),
            smoothed,
            target.const_data_ptr<int64_t>(),
            {A(options.logit_scale), A(options.softcap)}};
  }
  // Returns the operands of queries [first, first + count).
  Operands rows(int64_t first, int64_t count) const {
    Operands part = *this;
    part.query = query.narrow(0, first, count);
    part.target = target.narrow(0, first, count);
    part.queries = count;
    return part;
  }
};

// A workspace for the products of a chunk of queries with all classes, in opmath_type. Rows
// begin at multiples of 16 bytes, because matrix products and loads are slow otherwise. A chunk has
// as many queries as fit into the workspace, because larger products are faster. Gradients of
// `gradient_bytes` count as part of the workspace, unless they take more than half of it.
class ProductRows {
 public:
  ProductRows(const Operands& operands, const Tensor& weight, at::TensorOptions options,
              int64_t gradient_bytes = 0)
      : weight_(weight), operands_(operands) {
    constexpr int64_t kColumns = 8;
    const int64_t width = (operands.classes + kColumns - 1) / kColumns * kColumns,
                  bytes = std::min<int64_t>(operands.options.workspace_mb, 1 << 20) << 20;
    const int64_t fitting =
        std::clamp<int64_t>((gradient_bytes <= bytes / 2 ? bytes - gradient_bytes : bytes) /
                                (width * int64_t(options.dtype().itemsize())),
                            1, operands.queries);
    const int64_t chunks = (operands.queries + fitting - 1) / fitting;
    step_ = (operands.queries + chunks - 1) / chunks;
    for (const int64_t tile : {128, 64, 8}) { // products fill whole tiles if that fits
      if (const int64_t whole = (step_ + tile - 1) / tile * tile; whole <= fitting) {
        step_ = whole;
        break;
      }
    }
    memory_ = at::empty({step_, width}, options);
  }

  // Calls visit(operands, products, first) for each chunk of queries, which begins at query
  // `first`.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (int64_t first = 0; first < operands_.queries; first += step_) {
      const Operands rows = operands_.rows(first, std::min(step_, operands_.queries - first));
      const Tensor products = memory_.narrow(0, 0, rows.queries).narrow(1, 0, operands_.classes);
      product_out_cuda(products, rows.query, weight_.t());
      visit(rows, products, first);
    }
  }
  // Returns the memory of the products as a 16-bit dtype.
  Tensor rounded(const Tensor& products, at::ScalarType dtype) const {
    return memory_.view(dtype).narrow(0, 0, products.size(0)).narrow(1, 0, operands_.classes);
  }

 private:
  Tensor memory_, weight_;
  const Operands& operands_;
  int64_t step_;
};

// Writes *factor = unit / headroom and scaled = grad / *factor [queries], where unit is the largest
// |grad|, times the largest |class weight| if that is above 1; 1 if it is 0 or not finite. One
// block.
template <typename A>
__global__ void half_scale_kernel(A* scaled, A* factor, const A* grad, int64_t queries,
                                  const A* class_weight, int64_t classes, A headroom) {
  __shared__ A storage[kWarp];
  A largest = 0, heaviest = 1;
  bool finite = true;
  for (int64_t q = threadIdx.x; q < queries; q += blockDim.x) {
    largest = std::max(largest, std::abs(grad[q]));
    finite = finite && std::isfinite(grad[q]);
  }
  for (int64_t j = threadIdx.x; class_weight != nullptr && j < classes; j += blockDim.x) {
    heaviest = std::max(heaviest, std::abs(class_weight[j]));
    finite = finite && std::isfinite(class_weight[j]);
  }
  largest = block_max(largest, A(0), storage);
  const A product = largest * block_max(heaviest, A(1), storage);
  const bool valid = __syncthreads_or(!finite) == 0 && std::isfinite(product) && product != A(0);
  const A unit = valid ? product : A(1);
  for (int64_t q = threadIdx.x; q < queries; q += blockDim.x) {
    scaled[q] = grad[q] * (headroom / unit);
  }
  if (threadIdx.x == 0) {
    *factor = unit / headroom;
  }
}

// Scales the gradient of the loss to at most about kMax before gradients of products are rounded
// to float16, and divides the results by the same factor. Otherwise the gradients of a mean over
// thousands of queries would underflow. No gradient overflows float16; with a z-loss this holds for
// log normalizers below 10,000.
struct HalfScale {
  Tensor loss_grad, result_factor; // scaled gradient of the loss [Q], factor of the results []

  HalfScale(const Tensor& grad_argument, const Operands& operands)
      : loss_grad(at::empty({operands.queries}, grad_argument.options())),
        result_factor(at::empty({}, grad_argument.options())) {
    constexpr double kMax = 512, kLargestLogit = 100;
    const CrossEntropyOptions& options = operands.options;
    const double growth =
        std::max(1.0, options.logit_scale) * (1 + 2 * options.z_loss * kLargestLogit);
    const double headroom = std::exp2(std::floor(std::log2(kMax / growth)));
    const Tensor grad = grad_argument.contiguous();
    AT_DISPATCH_FLOATING_TYPES(grad.scalar_type(), "half_scale_cuda", [&] {
      half_scale_kernel<scalar_t><<<1, 1024, 0, c10::cuda::getCurrentCUDAStream()>>>(
          loss_grad.mutable_data_ptr<scalar_t>(), result_factor.mutable_data_ptr<scalar_t>(),
          grad.const_data_ptr<scalar_t>(), operands.queries,
          Operands::pointer<scalar_t>(operands.class_weight), operands.classes, scalar_t(headroom));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
};

// Returns the gradients in opmath_type. Processes chunks of queries: gradients overwrite the
// products and are multiplied with the table and with the queries. Writes loss [Q] if `normalizer`
// is not defined.
LinearGradients gradients_by_rows(const Operands& operands, const Tensor& weight,
                                  const Tensor& grad_argument, const Tensor& loss,
                                  const Tensor& normalizer, std::array<bool, 3> wanted) {
  const auto [want_input, want_weight, want_bias] = wanted;
  const auto dtype = operands.query.scalar_type();
  const auto floats = grad_argument.options();
  const std::optional<HalfScale> half = dtype == at::kHalf
      ? std::optional<HalfScale>(std::in_place, grad_argument, operands)
      : std::nullopt;
  const Tensor grad = (half ? half->loss_grad : grad_argument).contiguous(),
               known = normalizer.defined() ? normalizer.contiguous() : normalizer;
  const Tensor grad_input = at::empty({want_input ? operands.queries : 0, weight.size(1)}, floats);
  const Tensor grad_weight =
      at::empty({want_weight ? operands.classes : 0, weight.size(1)}, floats);
  Tensor grad_bias = at::empty({want_bias ? operands.classes : 0}, floats);
  const ProductRows products_of(operands, weight, floats,
                                int64_t(grad_input.nbytes() + grad_weight.nbytes()));
  products_of.for_each([&](const Operands& rows, const Tensor& products, int64_t first) {
    AT_DISPATCH_FLOATING_TYPES(grad.scalar_type(), "linear_cross_entropy_gradients_cuda", [&] {
      const auto launch = [&](auto zero) {
        using Out = decltype(zero);
        scalar_t* const maxima = known.defined() ? known.mutable_data_ptr<scalar_t>() : nullptr;
        const Normalizer<scalar_t> state{
            maxima == nullptr ? nullptr : maxima + first,
            maxima == nullptr ? nullptr : maxima + operands.queries + first};
        const LogitBlock<scalar_t> block = rows.block<scalar_t>(products);
        dispatch_pack<scalar_t>(block.wide(), [&](auto pack) {
          constexpr int N = decltype(pack)::value;
          slope_kernel<scalar_t, Out, N>
              <<<grid_size(rows.queries, 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                  loss.defined() ? loss.mutable_data_ptr<scalar_t>() + first : nullptr,
                  products.mutable_data_ptr<scalar_t>(), block, rows.terms<scalar_t>(),
                  grad.const_data_ptr<scalar_t>() + first, state);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        });
      };
      dtype == at::kHalf           ? launch(at::Half())
          : dtype == at::kBFloat16 ? launch(at::BFloat16())
                                   : launch(scalar_t());
    });
    const Tensor slope =
        dtype == floats.dtype().toScalarType() ? products : products_of.rounded(products, dtype);
    if (want_input) {
      product_out_cuda(grad_input.narrow(0, first, rows.queries), slope, weight);
    }
    if (want_weight) {
      product_out_cuda(grad_weight, slope.t(), rows.query, /*add=*/first > 0);
    }
    if (want_bias) {
      first > 0 ? grad_bias.add_(slope.sum(0, /*keepdim=*/false, grad_bias.scalar_type()))
                : at::sum_out(grad_bias, slope, {0}, /*keepdim=*/false, grad_bias.scalar_type());
    }
  });
  for (const Tensor& gradient : {grad_input, grad_weight, grad_bias}) {
    if (half && gradient.numel() > 0) {
      gradient.mul_(half->result_factor);
    }
  }
  return {grad_input, grad_weight, grad_bias};
}

LinearGradients as_dtype(const LinearGradients& gradients, at::ScalarType dtype) {
  const auto cast = [&](const Tensor& gradient) { // without a launch for an empty gradient
    return gradient.numel() > 0 ? gradient.to(dtype)
                                : at::empty(gradient.sizes(), gradient.options().dtype(dtype));
  };
  return std::apply([&](const auto&... each) { return LinearGradients(cast(each)...); }, gradients);
}

CrossEntropyState linear_cross_entropy_forward_cuda(const Tensor& input, const Tensor& weight,
                                                    const OptionalTensor& bias,
                                                    const Tensor& target,
                                                    const OptionalTensor& class_weight,
                                                    std::string_view text, bool save_logits) {
  const CrossEntropyOptions parsed =
      check_linear_cross_entropy(input, weight, bias, target, class_weight, text);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t queries = input.size(0), classes = weight.size(0);
  if (use_reference() || queries == 0 || classes == 0) {
    return linear_cross_entropy_forward_reference(input, weight, bias, target, class_weight, text,
                                                  save_logits);
  }
  const Operands operands(input, weight, bias, target, class_weight, parsed);
  const auto floats = input.options().dtype(opmath_dtype(input.scalar_type()));
  const int64_t saved =
      save_logits ? saved_classes(queries, classes, input.scalar_type()).expect_int() : 0;
  const Tensor loss = at::empty({queries}, floats), normalizer = at::empty({2, queries}, floats),
               saved_logits = at::empty({queries, saved}, floats);
  ProductRows(operands, weight, floats)
      .for_each([&](const Operands& rows, const Tensor& products, int64_t first) {
        AT_DISPATCH_FLOATING_TYPES(loss.scalar_type(), "linear_cross_entropy_forward_cuda", [&] {
          scalar_t* const maxima = normalizer.mutable_data_ptr<scalar_t>() + first;
          const LogitBlock<scalar_t> block = rows.block<scalar_t>(products);
          dispatch_pack<scalar_t>(block.wide(), [&](auto pack) {
            constexpr int N = decltype(pack)::value;
            loss_kernel<scalar_t, N>
                <<<grid_size(rows.queries, 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                    loss.mutable_data_ptr<scalar_t>() + first,
                    Normalizer<scalar_t>{maxima, maxima + queries}, block, rows.terms<scalar_t>());
            C10_CUDA_KERNEL_LAUNCH_CHECK();
          });
        });
        if (saved > 0) {
          const Tensor saved_part = saved_logits.narrow(0, first, rows.queries);
          saved_part.copy_(products.narrow(1, 0, saved));
          if (transforms(parsed)) {
            transform_products(
                saved_part,
                is_defined(bias) ? OptionalTensor(operands.bias.narrow(0, 0, saved)) : std::nullopt,
                parsed);
          }
        }
      });
  return {loss, normalizer, saved_logits};
}

LinearGradients linear_cross_entropy_backward_cuda(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const Tensor& target, const OptionalTensor& class_weight, const Tensor& normalizer,
    const Tensor& saved_logits, std::string_view text, std::array<bool, 3> output_mask) {
  const CrossEntropyOptions parsed = check_linear_cross_entropy_backward(
      grad, input, weight, bias, target, class_weight, normalizer, saved_logits, text);
  const c10::cuda::CUDAGuard guard(input.device());
  const auto [want_input, want_weight, want_bias] = output_mask;
  if (use_reference() || input.size(0) == 0 || weight.size(0) == 0 ||
      !(want_input || want_weight || want_bias)) {
    return linear_cross_entropy_backward_reference(grad, input, weight, bias, target, class_weight,
                                                   normalizer, saved_logits, text, output_mask);
  }
  const Operands operands(input, weight, bias, target, class_weight, parsed);
  return as_dtype(gradients_by_rows(operands, weight, grad, Tensor(), normalizer, output_mask),
                  input.scalar_type());
}

CrossEntropyWithGradients linear_cross_entropy_with_gradients_cuda(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const Tensor& target, const OptionalTensor& class_weight, std::string_view text,
    std::array<bool, 3> output_mask) {
  const CrossEntropyOptions parsed = check_linear_cross_entropy_with_gradients(
      grad, input, weight, bias, target, class_weight, text);
  const c10::cuda::CUDAGuard guard(input.device());
  const auto [want_input, want_weight, want_bias] = output_mask;
  if (use_reference() || input.size(0) == 0 || weight.size(0) == 0 ||
      !(want_input || want_weight || want_bias)) {
    return linear_cross_entropy_with_gradients_composite(grad, input, weight, bias, target,
                                                         class_weight, text, output_mask);
  }
  const Operands operands(input, weight, bias, target, class_weight, parsed);
  const Tensor loss = at::empty({input.size(0)}, grad.options());
  return std::tuple_cat(std::tuple(loss),
                        gradients_by_rows(operands, weight, grad, loss, Tensor(), output_mask));
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) {
  m.impl("linear_cross_entropy_with_gradients", linear_cross_entropy_with_gradients_cuda);
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_forward_cuda);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_cuda);
}

} // namespace xsoftmax
