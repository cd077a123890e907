#pragma once

#include <ATen/core/Tensor.h>

#include <string>

// The ids of the candidates of two towers: which are valid, repeated or listed, and how often an id
// is among them.

namespace xsoftmax {

// known_ids(ids, num_ids, owner, argument, has_num_items) -> ids
//   Returns a copy of ids after checking that all are in [0, num_ids); only on the CPU, and any id
//   is valid if num_ids is 0. A step that changes state calls it first, so that an error changes
//   nothing. It has a result because compilers would remove an operator without one. owner and
//   argument: names for errors. has_num_items: whether num_items of the loss limits the ids, or
//   only its counts; the error says how to allow more. Errors: TypeError, IndexError.
at::Tensor known_ids(const at::Tensor& ids, int64_t num_ids, std::string owner,
                     std::string argument, bool has_num_items);

// first_occurrences(ids [*, S]) -> bool [*, S]: whether an id does not occur earlier in its row.
at::Tensor first_occurrences(const at::Tensor& ids);

// listed(ids [M] or [Q, M], lists [Q, P]) -> bool [Q, M]: whether an id is in the list of the
// query.
at::Tensor listed(const at::Tensor& ids, const at::Tensor& lists);

// inclusion_log_count(log_prob, draws, uniform_draws, num_ids) -> float32
//   Returns log(1 - (1 - p)^draws (1 - 1 / num_ids)^uniform_draws), p = exp(log_prob): the log
//   probability that an id is among `draws` samples from p and `uniform_draws` uniform samples, all
//   with replacement. draws: a 0-dim tensor. num_ids is not used if uniform_draws is 0.
at::Tensor inclusion_log_count(const at::Tensor& log_prob, const at::Tensor& draws,
                               int64_t uniform_draws, int64_t num_ids);

} // namespace xsoftmax
