#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

// CUDA building blocks of candidate_scores and ragged_scores, the twins of gather_dot.h. All run on the current stream of the current
// device, none waits for it, and all give the same bits at every call. An id or an offset out of range stops the kernel (assert).

namespace xsoftmax {

/// (query, class) pairs laid out query by query: `ids` [Q, P], or `ids` [T] with `offsets` [Q + 1]. Contiguous CUDA tensors.
struct CudaPairs {
  at::Tensor ids;
  at::Tensor offsets; ///< undefined: every query has as many pairs
  int64_t queries = 0;

  int64_t total() const { return ids.numel(); }
};

/// out[q * out_stride + j] = <input[q], weight[id]> + bias[id] for the j-th pair of q; out_stride < 0: at the pair's position.
/// `input` [Q, D] contiguous, `weight` with unit column stride, `out` in opmath dtype.
void pair_scores_cuda(const at::Tensor& out, int64_t out_stride, const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const CudaPairs& pairs);

/// grad_input[q] += sum_j grad(q, j) * weight[id]; grad addressed as `out` above; grad_input [Q, D] contiguous, opmath dtype.
void add_pair_input_grad_cuda(const at::Tensor& grad_input, const at::Tensor& grad, int64_t grad_stride, const at::Tensor& weight,
                              const CudaPairs& pairs);

/// out = a @ b in out's dtype, float32 for the 16-bit types: their products are exact in float32, so tensor cores lose nothing.
void product_out_cuda(at::Tensor out, const at::Tensor& a, const at::Tensor& b);

/// Whether gradients of scores meet a table of this dtype rounded to it, as those of torch's own linear layers do: then the product runs on tensor
/// cores. bfloat16 has the range of float32, so that a coefficient loses no more than the result does; float16 could flush small ones to zero.
inline bool multiplies_rounded(at::ScalarType dtype) { return dtype == at::kBFloat16; }

/// The row-sparse gradient over R = pairs + shared ids: (rows [R], values [R, D], bias values [R]). Rows stand sorted; all of a
/// class's gradient is in its first row, and its other rows are zero. `shared_values` [S, D] (opmath dtype) and `shared_bias` [S] are
/// the gradients of the shared rows. `scale` [Q], where defined, multiplies the gradients of a query's pairs. Values are in `input`'s
/// dtype. `want_values`, `want_bias`: else [0, D] and [0].
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_gradient_cuda(const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale,
                                                                 const at::Tensor& input, const CudaPairs& pairs, const at::Tensor& shared_ids,
                                                                 const at::Tensor& shared_values, const at::Tensor& shared_bias,
                                                                 bool want_values, bool want_bias);

} // namespace xsoftmax
