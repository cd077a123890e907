#pragma once

#include "op/optional.h"

#include <ATen/core/Tensor.h>

#include <string_view>

// Checks that adaptive samplers share (adaptive.h). `op` or `owner` begins the messages.

namespace xsoftmax {

/// Checks the constructor arguments common to all families. `exclude`: int64 [K] of ids, which must
/// leave at least `drawn` classes. Returns bool [N], on the CPU or on exclude's device: whether a
/// class is drawn.
at::Tensor check_constructor(std::string_view owner, int64_t num_classes, int64_t dim,
                             int64_t min_dim, const at::Tensor& exclude, int64_t drawn = 1);
void check_at_least(std::string_view owner, const char* argument, int64_t value, int64_t least);
/// Checks that there are at least as many drawable classes as samples without replacement.
void check_distinct(std::string_view owner, int64_t num_samples, int64_t drawable);

/// Checks that `shared` is false, for families without shared sets.
void check_private(std::string_view owner, bool shared);

/// Checks that an index has `count` tables.
void check_index_size(const char* op, at::TensorList index, size_t count);
/// Checks that `step` is int64, 0-dim.
void check_step(const char* op, const at::Tensor& step);
void check_recent(const char* op, const at::Tensor& recent);

/// Checks queries [Q, dim], floating-point.
void check_queries(const char* op, const at::Tensor& queries, const c10::SymInt& dim);
/// Checks rows [num_classes, dim], floating-point.
void check_rows(const char* op, const char* arg, const at::Tensor& rows,
                const c10::SymInt& num_classes, const c10::SymInt& dim);
/// Checks weight [N, dim], and that a bias [N] is given if and only if has_bias.
void check_class_table(const char* op, const at::Tensor& weight, const OptionalTensor& bias,
                       const c10::SymInt& num_classes, const c10::SymInt& dim, bool has_bias);

/// Raises an error that names the row if a row contains NaN or infinity, or if its squared norm
/// overflows float32. Reads the whole table.
void check_finite_rows(const char* op, const char* arg, const at::Tensor& rows);
/// Raises an error that names the position if a bias contains NaN or infinity.
void check_finite_bias(const char* op, const OptionalTensor& bias);

/// Checks `ids`, int64 [S] (the same for all queries) or [Q, P].
void check_query_ids(const char* op, const at::Tensor& queries, const at::Tensor& ids);
/// Checks the target of an op, int64 [Q] or [Q, T].
void check_targets(const char* op, const at::Tensor& queries, const OptionalTensor& target);
/// Checks seed and target of an op that draws per query, or one shared set.
void check_draws(const char* op, const at::Tensor& seed, const at::Tensor& queries, bool shared,
                 const OptionalTensor& target);

} // namespace xsoftmax
