#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace xsoftmax {

/// midx_search_index: a search index of a class table as it is now, whose cells are those of two codebooks, as MidxSampler has them.
///
/// weight [N, D], bias [N] or none: one of float32, float64, bfloat16, float16, finite. codewords1, codewords2: float32 [K, D] each (residual), or
/// [K, D1] and [K, D - D1] (product): those of a sampler; or none: a residual quantizer of `codewords` codewords, by K-means on 256 rows a codeword drawn
/// by `seed`, a 0-dim int64. codewords = 0: the root of N / 256, rounded up, and 256 at most. Rows are coded anew, so codewords may be stale.
/// Returns what search_topk takes, on weight's device (of a GPU: K-means and cells there, codes on the CPU): it knows this table, and whoever changes the table
/// makes another.
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

/// What SearchIndex found: of each query the scores [*, k] and ids int64 [*, k] of its best classes, how many cells were read, int64 [*], and whether
/// the classes are certified to be the best, bool [*].
struct SearchResult { at::Tensor scores, ids, cells_read, certified; };

/// How much SearchIndex::search reads; nothing set: until the best k are certain. At most one is set.
struct SearchLimits {
  std::optional<double> recall = std::nullopt;     ///< in (0, 1]: as many cells as 256 queries like these needed to find this share of their best k
  std::optional<int64_t> max_cells = std::nullopt; ///< at least 1
};

/// Searches a class table as it is now: the `search` of Python's losses. It knows the table that it was made of: make another one where that changes, after
/// xsoftmax::settle where a row optimizer trains it.
///
///     xsoftmax::SearchIndex index(loss->linear->weight, loss->linear->bias);
///     const auto found = index.search(queries, 10);
class SearchIndex {
 public:
  /// weight [N, D] and bias [N] or undefined. codewords: K in [1, 1024], of K x K cells; 0: sqrt(N / 256), at most 256.
  explicit SearchIndex(const at::Tensor& weight, const at::Tensor& bias = {}, int64_t codewords = 0);

  /// Returns the index on another device, with a copy of the table there, which it searches.
  SearchIndex to(at::Device device) const;

  /// Takes queries [*, D], at least 256 like those to come, as those that say how many cells a recall takes.
  void calibrate(const at::Tensor& queries);
  /// Returns the k best classes of input [*, D], k in [0, N]; equal scores: the lower id first. exclude: ids [*, E] that a query does not want, -1 for none.
  /// Has no gradient. Throws ValueError, TypeError and IndexError.
  SearchResult search(const at::Tensor& input, int64_t k, const SearchLimits& limits = {}, const at::Tensor& exclude = {});
  int64_t num_cells() const { return tensors_[2].size(0) - 1; }
  /// What search_topk takes.
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  std::optional<int64_t> cells_of(const at::Tensor& queries, int64_t k, double recall);

  at::Tensor weight_, bias_, queries_; ///< queries_: those that say how many cells a recall takes
  std::vector<at::Tensor> tensors_;
  std::map<std::pair<int64_t, double>, int64_t> budgets_;
};

} // namespace xsoftmax
