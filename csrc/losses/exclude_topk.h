#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace xsoftmax {

// exclude_topk(values [Q, K], ids int64 [Q, K], exclude int64 [Q, E], num_classes, k) -> (values [Q, k], ids [Q, k]): the first k of each row that are not
// among the row's `exclude`, ids in [0, num_classes) or -1 for none, in any order; behind the last of fewer than k: -inf and -1.
//
// So of the best k + E classes come the best k without those excluded, exactly: of k + E at most E are excluded. Has no gradient.
//
// Errors: ValueError for shapes and k not in [0, K]; TypeError for dtypes and devices; on CPU IndexError for ids out of range.
std::tuple<at::Tensor, at::Tensor> exclude_topk(const at::Tensor& values, const at::Tensor& ids, const at::Tensor& exclude, c10::SymInt num_classes,
                                                c10::SymInt k);

/// How many of the best to ask for, of num_classes. exclude: [*, E] or undefined.
c10::SymInt with_excluded(const c10::SymInt& k, const at::Tensor& exclude, const c10::SymInt& num_classes);
/// exclude_topk() of what was found [Q, K], as [*, k]; where nothing is excluded, its first k. owner: whose topk it is, input [*, D].
std::tuple<at::Tensor, at::Tensor> without_excluded(const char* owner, const at::Tensor& input, const std::tuple<at::Tensor, at::Tensor>& found,
                                                    const at::Tensor& exclude, const c10::SymInt& num_classes, const c10::SymInt& k);

} // namespace xsoftmax
