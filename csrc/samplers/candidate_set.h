#pragma once

#include "core/optional.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <string_view>
#include <tuple>

namespace xsoftmax {

// candidate_set(ids [*, C], num_classes) -> [*, C]: the different classes of each set, int64, in rising order with -1 in place of repeats and
// of what was -1, which stands for none. ids: int64 in [0, num_classes) or -1.
at::Tensor candidate_set(const at::Tensor& ids, int64_t num_classes);

// drawn_candidates(ids, distinct, num_queries, num_classes) -> [C] or [Q, C]: the same, of all sets of a proposal together.
at::Tensor drawn_candidates(at::TensorList ids, const c10::List<bool>& distinct, c10::SymInt num_queries, int64_t num_classes);

// present_set(ids) -> (ids, log_count float32 of ids' shape): classes that are always there, -1 where there is none, as a candidate set: an expected
// count of 1, or +inf, which takes no part.
std::tuple<at::Tensor, at::Tensor> present_set(const at::Tensor& ids);

// given_set(negatives [P] or [*, P], log_count or none, input [*, D], head [H], num_classes, owner) -> (ids, log_count), both [P] or [Q, P]: classes
// that a caller gives as a candidate set; -1 stands for none. Without log_count they are always there: a repeat, or a class of the head, which is
// there already, takes no part (+inf), others have an expected count of 1. With log_count, the shape of negatives, they stand as they are. Errors name
// owner: TypeError for dtypes, ValueError for shapes, IndexError for a class out of range.
std::tuple<at::Tensor, at::Tensor> given_set(const at::Tensor& negatives, const OptionalTensor& log_count, const at::Tensor& input, const at::Tensor& head,
                                             int64_t num_classes, std::string_view owner);

// present_log_count(present, log_count, ids [M] or [Q, M]) -> [M], or [Q, M] where one of them is of queries: what a set of classes that are always
// there, [C] or [Q, C], says of any ids: 0 for one of its classes, -inf for others and for -1. float32. A log_count of +inf: that one is not there.
at::Tensor present_log_count(const at::Tensor& present, const at::Tensor& log_count, const at::Tensor& ids);

// different_ids(ids [H], num_classes, owner, argument) -> [H]: a set of classes that never changes, int64 in [0, num_classes), sorted. Errors name
// owner and argument: TypeError, IndexError, or ValueError for a class that stands twice. For constructors: reads values.
at::Tensor different_ids(const at::Tensor& ids, int64_t num_classes, std::string_view owner, std::string_view argument);

/// Joins ids, or log counts, of sets along the last dimension: [sum M] of parts [M], [rows, sum M] where one of them is [rows, M]
/// or `by_rows`. All of one dtype. The part itself where it is the only one and has that shape.
at::Tensor side_by_side(at::TensorList parts, const c10::SymInt& rows, bool by_rows = false);

} // namespace xsoftmax
