#pragma once

#include "op/optional.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <string_view>
#include <tuple>

namespace xsoftmax {

// candidate_set(ids [*, C], num_classes) -> [*, C]: returns the unique classes of each set, int64,
// in ascending order. Repeats become -1, as does -1 itself, which means no class. ids: int64 in [0,
// num_classes) or -1.
at::Tensor candidate_set(const at::Tensor& ids, int64_t num_classes);

// drawn_candidates(ids, distinct, num_queries, num_classes) -> [C] or [Q, C]: the same for all sets
// of a proposal together.
at::Tensor drawn_candidates(at::TensorList ids, const c10::List<bool>& distinct,
                            c10::SymInt num_queries, int64_t num_classes);

// always_scored_set(ids) -> (ids, log_count float32 of ids' shape): turns classes that are always
// scored
// (-1: no class) into a candidate set. Classes have the expected count 1; -1 has +inf, which
// excludes it.
std::tuple<at::Tensor, at::Tensor> always_scored_set(const at::Tensor& ids);

// caller_set(negatives [P] or [*, P], log_count or none, input [*, D], head [H], num_classes,
// owner)
// -> (ids, log_count), both [P] or [Q, P]: turns the caller's negatives (-1: no class) into a
// candidate set. Without log_count, negatives are always scored and have the expected count 1;
// repeats, and classes that the head already scores, are excluded (+inf). A log_count, of the shape
// of negatives, is used unchanged. Errors name `owner`: TypeError for dtypes, ValueError for
// shapes, IndexError for a class out of range.
std::tuple<at::Tensor, at::Tensor> caller_set(const at::Tensor& negatives,
                                              const OptionalTensor& log_count,
                                              const at::Tensor& input, const at::Tensor& head,
                                              int64_t num_classes, std::string_view owner);

// always_scored_log_count(present, log_count, ids [M] or [Q, M]) -> float32 [M], or [Q, M] if any
// argument is per query: returns the log expected count of `ids` in the always-scored set
// `present`, [C] or [Q, C]: 0 for a class of the set, -inf for other classes and for -1. Classes
// whose log_count is +inf are not in the set.
at::Tensor always_scored_log_count(const at::Tensor& present, const at::Tensor& log_count,
                                   const at::Tensor& ids);

// distinct_ids(ids [H], num_classes, owner, argument) -> [H]: returns a fixed set of classes
// sorted, int64 in [0, num_classes). Errors name owner and argument: TypeError, IndexError, or
// ValueError for a repeated class. Reads values, so it is meant for constructors.
at::Tensor distinct_ids(const at::Tensor& ids, int64_t num_classes, std::string_view owner,
                        std::string_view argument);

/// Concatenates ids, or log counts, of sets along the last dimension: [sum M] for parts [M]; [rows,
/// sum M] if any part is [rows, M] or if `by_rows`. All parts have one dtype. Returns the part
/// itself if it is the only one and has that shape.
at::Tensor concat_columns(at::TensorList parts, const c10::SymInt& rows, bool by_rows = false);

} // namespace xsoftmax
