#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

// CUDA building blocks of scores and their gradients, the twins of gather_dot.h. All run on the current stream of the current device, none waits
// for it, and all give the same bits at every call. An id or an offset out of range stops the kernel (assert).

namespace xsoftmax {

/// (query, class) pairs laid out query by query: `ids` [Q, P], or `ids` [T] with `offsets` [Q + 1]. Contiguous CUDA tensors.
struct CudaPairs {
  at::Tensor ids;
  at::Tensor offsets; ///< undefined: every query has as many pairs
  int64_t queries = 0;
  int64_t num_classes = 0; ///< which ids are below

  int64_t total() const { return ids.numel(); }
};

/// out[q * out_stride + j] = <input[q], weight[id]> + bias[id] for the j-th pair of q; out_stride < 0: at the pair's position.
/// `input` [Q, D] contiguous, `weight` with unit column stride, `out` in opmath dtype.
void pair_scores_cuda(const at::Tensor& out, int64_t out_stride, const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      const CudaPairs& pairs);

/// sum_j grad(q, j) * weight[id], [Q, D] in opmath dtype; grad addressed as `out` above. Where it is 0, no row is read, whatever the id.
at::Tensor pair_input_grad_cuda(const at::Tensor& grad, int64_t grad_stride, const at::Tensor& weight, const CudaPairs& pairs);

/// out = a @ b in out's dtype, or out += a @ b. a and b of one 16-bit type stay so, since their products are exact in float32 and tensor cores lose
/// nothing; else both are taken in out's dtype.
void product_out_cuda(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add = false);

/// Whether gradients of scores meet a table of this dtype rounded to it, as those of torch's own linear layers do: then the product runs on tensor
/// cores. bfloat16 has the range of float32, so that a coefficient loses no more than the result does; float16 could flush small ones to zero.
inline bool multiplies_rounded(at::ScalarType dtype) { return dtype == at::kBFloat16; }

/// The row-sparse gradient over R = pairs + shared ids: (rows [R], values [R, D], bias values [R]). Rows stand sorted; all of a
/// class's gradient is in its first row, and its other rows are zero. `shared_values` [S, D] (opmath dtype) and `shared_bias` [S] are
/// the gradients of the shared rows. `scale`, where defined, multiplies the gradients of a query's pairs, [Q], or all gradients, []; what is 0 stays so.
/// Values are in `input`'s dtype. `wanted`: values, bias; else [0, D] and [0].
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_gradient_cuda(const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
                                                                 const CudaPairs& pairs, const at::Tensor& shared_ids, const at::Tensor& shared_values,
                                                                 const at::Tensor& shared_bias, std::array<bool, 2> wanted);

/// The same without scale and shared ids, over R = `rows` whatever the pairs are: a row for each different id, of which there are no more than R;
/// behind them the last again, with zeros. Here an id of num_classes says that there is no pair.
std::tuple<at::Tensor, at::Tensor, at::Tensor> compact_row_gradient_cuda(const at::Tensor& grad, int64_t grad_stride, const at::Tensor& input,
                                                                         const CudaPairs& pairs, int64_t rows, std::array<bool, 2> wanted);

} // namespace xsoftmax
