#pragma once

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <string_view>
#include <tuple>

// The best items of each query under the scores of xsoftmax.TwoTowerLoss (two_tower_loss.h).

namespace xsoftmax {

/// two_tower_topk(query, item_vectors, temperature, k, exclude, options) -> (values [*, k], ids
/// int64 [*, k])
///
///     scores = similar(query) @ similar(item_vectors).T / temperature
///     values, ids = log_softmax(scores, -1).topk(k)    # equal scores: lower id first
///
/// query [*, D], item_vectors [N, D], floating; 0 <= k <= N; exclude int64 [*, E] or none, as in
/// exclude_topk. Computes and returns float32, or float64 if a tensor is float64, also under
/// autocast. [*, N] is never in memory; a copy of item_vectors is, if they are normalised or cast.
/// Has no gradient. Errors: TypeError, ValueError, on the CPU IndexError.
std::tuple<at::Tensor, at::Tensor> two_tower_topk(const at::Tensor& query,
                                                  const at::Tensor& item_vectors,
                                                  const at::Tensor& temperature, c10::SymInt k,
                                                  const OptionalTensor& exclude,
                                                  std::string_view options);

} // namespace xsoftmax
