#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

// CUDA building blocks of scores and their gradients, the counterparts of gather_dot.h. All run on
// the current stream of the current device, never synchronise with it, and are deterministic: every
// call gives the same bits. An id or an offset out of range fails a device assertion.

namespace xsoftmax {

/// (query, class) pairs stored query by query: `ids` [Q, P], or `ids` [T] with `offsets` [Q + 1].
/// Contiguous CUDA tensors.
struct CudaPairs {
  at::Tensor ids;
  at::Tensor offsets; ///< undefined if every query has the same number of pairs
  int64_t queries = 0;
  int64_t num_classes = 0; ///< upper bound (exclusive) of the ids

  int64_t total() const { return ids.numel(); }
};

/// Writes out[q * out_stride + j] = <input[q], weight[id]> + bias[id] for the j-th pair of q; if
/// out_stride < 0, to the position of the pair. `input` [Q, D] must be contiguous, `weight` have
/// unit column stride, and `out` be in opmath dtype.
void pair_scores_cuda(const at::Tensor& out, int64_t out_stride, const at::Tensor& input,
                      const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      const CudaPairs& pairs);

/// Returns sum_j grad(q, j) * weight[id], [Q, D] in opmath dtype. `grad` is addressed like `out`
/// above. Where a gradient is 0, the row is not read and the id may have any value.
at::Tensor pair_input_grad_cuda(const at::Tensor& grad, int64_t grad_stride,
                                const at::Tensor& weight, const CudaPairs& pairs);

/// Computes out = a @ b in the dtype of `out`, or out += a @ b. If a and b share a 16-bit dtype
/// they are multiplied as they are: the products are exact in float32, so tensor cores lose
/// nothing. Otherwise both are converted to the dtype of `out`.
void product_out_cuda(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add = false);

/// Returns whether score gradients are rounded to the dtype of the table before they are multiplied
/// with it, as torch's linear layers do, so that the product runs on tensor cores. bfloat16 only:
/// it has the range of float32, so a coefficient loses no more than the result does. float16 could
/// flush small coefficients to zero.
inline bool rounds_coefficients(at::ScalarType dtype) { return dtype == at::kBFloat16; }

/// Returns the row-sparse gradient over R = pairs + shared ids: (rows [R], values [R, D], bias
/// values [R]) in the dtype of `input`.
///
/// Rows are sorted. The gradient of a class is summed into its first row; its other rows are zero.
/// `shared_values` [S, D] (opmath dtype) and `shared_bias` [S] are the gradients of the shared
/// rows. `scale`, if defined: [Q] multiplies the gradients of the pairs of each query, []
/// multiplies all gradients; a gradient of 0 stays 0. `wanted`: values, bias; what is not wanted
/// has size [0, D] or [0].
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_gradient_cuda(
    const at::Tensor& grad, int64_t grad_stride, const at::Tensor& scale, const at::Tensor& input,
    const CudaPairs& pairs, const at::Tensor& shared_ids, const at::Tensor& shared_values,
    const at::Tensor& shared_bias, std::array<bool, 2> wanted);

/// Returns the same gradient without scale and shared ids, over R = `rows` rows: one row per
/// distinct id. There must be at most R distinct ids; unused rows repeat the last id with zero
/// values. An id equal to num_classes marks a position without a pair.
std::tuple<at::Tensor, at::Tensor, at::Tensor> compact_row_gradient_cuda(
    const at::Tensor& grad, int64_t grad_stride, const at::Tensor& input, const CudaPairs& pairs,
    int64_t rows, std::array<bool, 2> wanted);

} // namespace xsoftmax
