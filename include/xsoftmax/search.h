#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace xsoftmax {

/// midx_search_index: a search index of a class table as it is now, whose cells are those of two codebooks, as MidxSampler has them.
///
/// weight [N, D], bias [N] or none: one of float32, float64, bfloat16, float16, on CPU, finite. codewords1, codewords2: float32 [K, D] each (residual), or
/// [K, D1] and [K, D - D1] (product): those of a sampler; or none: a residual quantizer of `codewords` codewords, by K-means on 256 rows a codeword drawn
/// by `seed`, a 0-dim int64. codewords = 0: the root of N / 256, rounded up, and 256 at most. Rows are coded anew, so codewords may be stale.
/// Returns what search_topk takes: it knows this table, and whoever changes the table makes another.
std::vector<at::Tensor> midx_search_index(const at::Tensor& weight, const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& codewords1,
                                          const std::optional<at::Tensor>& codewords2, int64_t codewords, const at::Tensor& seed);

/// search_topk: the k classes of largest score, by an index; see csrc/retrieval/search_topk.h for how it is certain.
///
///     F.linear(input, weight, bias).topk(k)                    # equal scores: the lower id first
///
/// input [Q, D]; weight, bias and index: one table. options: "" (exact), or "max_cells=20". Returns (scores [Q, k] in float32, or
/// float64 for float64 inputs; ids [Q, k] int64; cells read [Q] int64; certified [Q] bool: the k classes are surely the best, which those of a NaN or
/// an infinity never are). Has no gradient.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> search_topk(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                                                       at::TensorList index, c10::SymInt k, std::string_view options = "");

/// search_budget: the least max_cells, out of 1, 2, 3, 4, 6, 8, ..., by which these queries find the share `recall` of their best k, and one standard error
/// more: int64 []. Queries like them find about as much.
at::Tensor search_budget(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::TensorList index, c10::SymInt k,
                         double recall);

} // namespace xsoftmax
