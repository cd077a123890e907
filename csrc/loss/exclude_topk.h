#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace xsoftmax {

// exclude_topk(values [Q, K], ids int64 [Q, K], exclude int64 [Q, E], num_classes, k) ->
// (values [Q, k], ids [Q, k])
//   Returns the first k entries of each row whose ids are not in the same row of `exclude`. exclude
//   holds ids in [0, num_classes) in any order, and -1 as padding. A row with fewer than k such
//   entries is padded with value -inf and id -1.
//
// Applied to the best k + E classes it returns exactly the best k that are not excluded, because at
// most E are excluded. Has no gradient.
//
// Errors: ValueError for shapes and k not in [0, K]; TypeError for dtypes and devices; on CPU
// IndexError for ids out of range.
std::tuple<at::Tensor, at::Tensor> exclude_topk(const at::Tensor& values, const at::Tensor& ids,
                                                const at::Tensor& exclude, c10::SymInt num_classes,
                                                c10::SymInt k);

/// Returns the number of best classes to search for, k + E, at most num_classes. exclude: [*, E] or
/// undefined (E = 0).
c10::SymInt with_excluded(const c10::SymInt& k, const at::Tensor& exclude,
                          const c10::SymInt& num_classes);
/// Applies exclude_topk to the classes `found` [Q, K] and returns [*, k] in the shape of input [*,
/// D]. Without `exclude` it returns the first k. owner: the operator or class that errors name.
std::tuple<at::Tensor, at::Tensor> without_excluded(const char* owner, const at::Tensor& input,
                                                    const std::tuple<at::Tensor, at::Tensor>& found,
                                                    const at::Tensor& exclude,
                                                    const c10::SymInt& num_classes,
                                                    const c10::SymInt& k);

} // namespace xsoftmax
