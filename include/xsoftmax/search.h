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

/// midx_search_index: builds a search index of the current class table. Its cells are those of two
/// codebooks, as in MidxSampler.
///
/// - weight [N, D], bias [N] or none: the same dtype of float32, float64, bfloat16, float16;
///   finite.
/// - codewords1, codewords2: the codebooks of a sampler, both float32 [K, D] (residual), or [K, D1]
///   and [K, D - D1] (product). Rows are assigned to them again, so they may be stale. None: a
///   residual quantizer of `codewords` codewords, by K-means on 256 rows per codeword drawn with
///   `seed`.
/// - codewords: K; 0: sqrt(N / 256) rounded up, at most 256.
/// - seed: 0-dim int64.
/// - queries [Q, D]: queries like those to be searched, of weight's dtype. Wide rows are compared
///   first in the directions in which these are long; without queries, in those in which the rows
///   are long. The results of a search are the same.
///
/// Returns the tensors that search_topk takes, on the device of weight. For a CUDA table, K-means
/// and cells are computed there, and codes on the CPU. The index is valid for this table only:
/// build another one after the table changes.
std::vector<at::Tensor> midx_search_index(const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias,
                                          const std::optional<at::Tensor>& codewords1,
                                          const std::optional<at::Tensor>& codewords2,
                                          int64_t codewords, const at::Tensor& seed,
                                          const std::optional<at::Tensor>& queries = std::nullopt);

/// search_topk: finds the k classes with the largest scores through an index.
/// csrc/retrieval/search_topk.h explains how it certifies the result.
///
///     F.linear(input, weight, bias).topk(k)    # equal scores: the lower id first
///
/// - input [Q, D].
/// - weight, bias, index: of the same table.
/// - options: "" for an exact search, or for example "max_cells=20".
///
/// Returns (scores [Q, k] in float32, or float64 for float64 inputs; ids [Q, k] int64; cells read
/// [Q] int64; certified [Q] bool). `certified` is true if the k classes are guaranteed to be the
/// best, and false for a query with NaN or infinite values. Has no gradient.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> search_topk(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::TensorList index, c10::SymInt k, std::string_view options = "");

/// perturbed_argmax: finds the class with the largest score plus noise through an index.
///
///     (F.linear(input, weight, bias) + noise).argmax(1)
///
/// - input, weight, bias, index: as for search_topk.
/// - noise: float32 [Q, N], without NaN (checked on the CPU only). With Gumbel noise times T, the
///   class is a sample of softmax(scores / T).
///
/// Returns (ids [Q] int64, cells read [Q] int64, certified [Q] bool). Has no gradient.
std::tuple<at::Tensor, at::Tensor, at::Tensor> perturbed_argmax(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::TensorList index, const at::Tensor& noise);

/// search_budget: returns the smallest max_cells out of 1, 2, 3, 4, 6, 8, ... for which these
/// queries find the share `recall` of their best k, plus one standard error: int64 []. Similar
/// queries find about the same share.
at::Tensor search_budget(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, at::TensorList index, c10::SymInt k,
                         double recall);

/// The result of SearchIndex::search: per query, the scores [*, k] and ids int64 [*, k] of the best
/// classes, the number of cells read, int64 [*], and whether the classes are certified to be the
/// best, bool [*].
struct SearchResult { at::Tensor scores, ids, cells_read, certified; };

/// Limits how many cells SearchIndex::search reads. Set at most one. If none is set, the search
/// reads cells until the best k are certified.
struct SearchLimits {
  /// In (0, 1]: reads as many cells as 256 similar queries needed to find this share of their best
  /// k.
  std::optional<double> recall = std::nullopt;
  std::optional<int64_t> max_cells = std::nullopt; ///< at least 1
};

/// Searches the current class table, like the method `search` of the losses in Python. The index is
/// valid only for the table that it was built from. Build another one after the table changes; if a
/// row optimizer trains the table, call xsoftmax::catch_up first.
///
///     xsoftmax::SearchIndex index(loss->linear->weight, loss->linear->bias);
///     const auto found = index.search(queries, 10);
class SearchIndex {
 public:
  /// Builds the index.
  ///
  /// - weight: [N, D].
  /// - bias: [N] or undefined.
  /// - codewords: K in [1, 1024], for K x K cells; 0: sqrt(N / 256), at most 256.
  /// - queries: [*, D], some hundred queries like those to be searched, to search these faster, and
  ///   as by calibrate; or undefined.
  explicit SearchIndex(const at::Tensor& weight, const at::Tensor& bias = {}, int64_t codewords = 0,
                       const at::Tensor& queries = {});

  /// Returns the index on another device, with its own copy of the table.
  SearchIndex to(at::Device device) const;

  /// Sets the queries [*, D] from which the number of cells for a recall is estimated: at least
  /// 256, and similar to those of later searches.
  void calibrate(const at::Tensor& queries);
  /// Returns the k best classes of each query. Has no gradient. Throws ValueError, TypeError or
  /// IndexError.
  ///
  /// - input: [*, D].
  /// - k: in [0, N]. Among classes with equal scores, the lower id comes first.
  /// - exclude: ids [*, E] to exclude per query, -1 as padding.
  SearchResult search(const at::Tensor& input, int64_t k, const SearchLimits& limits = {},
                      const at::Tensor& exclude = {});
  int64_t num_cells() const { return tensors_[2].size(0) - 1; }
  /// Returns the tensors that search_topk takes.
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  std::optional<int64_t> cells_of(const at::Tensor& queries, int64_t k, double recall);

  /// queries_: those from which the number of cells for a recall is estimated
  at::Tensor weight_, bias_, queries_;
  std::vector<at::Tensor> tensors_;
  std::map<std::pair<int64_t, double>, int64_t> budgets_;
};

} // namespace xsoftmax
