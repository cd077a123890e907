#pragma once

// Figures of a ranking, the same as xsoftmax.metrics in Python.

#include <ATen/core/Tensor.h>

#include <cstdint>

/// All take predictions int64 [Q, at least k], the classes predicted for each query, best first and each at most once, -1 where there is none; and truth
/// int64 [Q], one right class for each query, or [Q, T], several, -1 where there are fewer. They return the mean over the queries for which a class is
/// right. With hit_i = 1 where prediction i (from 1) is right, else 0, and T right classes of a query. Errors: ValueError for shapes, k below 1, a class
/// twice in a row or below -1, and where nothing is right for any query; TypeError for dtypes.
namespace xsoftmax::metrics {

/// sum_{i <= k} hit_i / k
double precision_at_k(const at::Tensor& predictions, const at::Tensor& truth, int64_t k);
/// sum_{i <= k} hit_i / T
double recall_at_k(const at::Tensor& predictions, const at::Tensor& truth, int64_t k);
/// sum_{i <= k} hit_i / log2(i + 1)  /  sum_{i <= min(T, k)} 1 / log2(i + 1)
double ndcg_at_k(const at::Tensor& predictions, const at::Tensor& truth, int64_t k);
/// sum_q sum_{i <= k} hit_i / p_i  /  sum_q of the k largest 1 / p of its right classes (Jain et al., 2016). propensity: floating [N], in (0, 1].
double psp_at_k(const at::Tensor& predictions, const at::Tensor& truth, int64_t k, const at::Tensor& propensity);
/// Returns 1 / (1 + (log n - 1) (b + 1)^a (counts + b)^-a), float64 [N], of counts [N], finite and at least 0, and n = num_examples of at least 3.
at::Tensor propensity(const at::Tensor& counts, int64_t num_examples, double a = 0.55, double b = 1.5);
/// (candidates == target[..., None]).any(-1).mean(): candidates int64 [*, C], -1 where there is none, or [C]; target int64 [*], of at least one dimension.
/// Targets that are ignore_index or below 0 do not count.
double coverage(const at::Tensor& candidates, const at::Tensor& target, int64_t ignore_index = -100);

} // namespace xsoftmax::metrics
