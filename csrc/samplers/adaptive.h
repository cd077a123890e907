#pragma once

#include "core/optional.h"
#include "core/shape_checks.h"

#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <tuple>
#include <vector>

// What the samplers that follow the class table share. Each family X of them (midx, lsh, kernel) is seven operators:
//
//   X_index(owner, num_classes, dim, exclude int64 [K], options) -> index: one that knows nothing of the table yet; all classes that are
//     not in `exclude` are drawn alike. Refuses what no sampler may be built with, in the name of the class `owner`.
//   X_resize(owner, num_classes, rows [A, D], bias [num_classes], index, options) -> index: one of the first num_classes classes, and of A = num_classes - N
//     further ones, which are drawn and have these rows: they are placed under the codewords, planes or directions that the index has, as those of the others
//     are. Without the rows of classes that are new, or of an index that knows nothing of the table: one that knows nothing of it. O(N), no pass over rows
//     but the new ones (kernel: sums over those in the index).
//   X_grow(owner, num_classes, rows [A, D], bias, index, options) -> what each table of the index but `recent` and `step` gains, for adaptive_grow_: a table
//     with a row for each class the rows of the new ones (none where classes go), another one a scalar. They are `recent` then. bias of the new classes [A], or
//     of all. O(A). Nothing at all where only X_resize does: draws are distinct or of the exact form, classes go that are not recent, or more than a quarter
//     as many as were laid out would be recent.
//   X_sample(seed, queries [Q, D], target, index, options) -> (ids int64 [Q, M], log_count float32 of ids' shape, target_log_count):
//     what a step proposes; shared sets, where a family has them, are [M]. target int64 [Q], or [Q, T], several classes of each query;
//     -1: none, whose count is -inf. A query whose first target is -1 does not count: it is no part of what a batch shares.
//     target_log_count float32 of target's shape, [0] without a target.
//   X_log_count(queries, ids, index, options) -> float32: log expected count of any ids in what X_sample proposes, -inf of a class that is
//     never drawn. Private draws: of ids [S], [Q, S]; of ids [Q, P], [Q, P]. A shared set: of ids' shape.
//   X_step_(weight [N, D], bias [N], step!, index!, options, generator) -> (): a training step. Refreshes where refresh_is_due(step), then
//     counts the step.
//   X_refresh_(weight, bias, step!, index!, options, generator) -> float64 statistics: follows the class table now. A step that is 0 becomes 1.
//
// `index` is a list of plain tensors, in the order of the family's header; its last two are `recent` and `step`, int64 []. An absent table has size 0.
// All are on one device but those two, which modules keep on the CPU: draws and X_step_ look at them, and no step is to wait for a device.
//
// `recent` T: the last T classes have come since the index was laid out. It knows their places, which a layout takes in, and draws them evenly: with A classes
// that are drawn in all, and q0 the law of the others,
//
//     q(i | z) = 1 / A of a recent class, (A - T) / A q0(i | z) of another
//
// So a class that comes costs no pass over the index, and laying out anew is due after many of them. A refresh lays out all.
// What writes to an index takes `step` before the others: TorchScript drops calls that write to nothing but elements of a list.
// `options` is the text of a struct of xsoftmax/adaptive_options.h. Where X_step_ or X_refresh_ refuses a table, index, step and generator
// are what they were.

// The operators adaptive_index, adaptive_sample, ... take the name of a family before these arguments and call its operator, of detached
// tensors: what modules call.

namespace xsoftmax {

using PrivateDraws = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

std::vector<at::Tensor> adaptive_index(std::string_view family, std::string_view owner, int64_t num_classes, int64_t dim, const at::Tensor& exclude,
                                       std::string_view options);
std::vector<at::Tensor> adaptive_resize(std::string_view family, std::string_view owner, int64_t num_classes, const OptionalTensor& rows,
                                        const OptionalTensor& bias, at::TensorList index, std::string_view options);
std::vector<at::Tensor> adaptive_grow(std::string_view family, std::string_view owner, int64_t num_classes, const OptionalTensor& rows,
                                      const OptionalTensor& bias, at::TensorList index, std::string_view options);
/// adaptive_grow_(recent!, index!, gained, before, num_classes) -> (): what X_grow plans, in place. `index`: without `recent` and `step`. `gained`: what X_grow
/// returned. before, num_classes: how many classes there were and are.
void adaptive_grow_(const at::Tensor& recent, at::TensorList index, at::TensorList gained, int64_t before, int64_t num_classes);
PrivateDraws adaptive_sample(std::string_view family, const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target, at::TensorList index,
                             std::string_view options);
at::Tensor adaptive_log_count(std::string_view family, const at::Tensor& queries, const at::Tensor& ids, at::TensorList index, std::string_view options);
at::Tensor adaptive_refresh_(std::string_view family, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& step, at::TensorList index,
                             std::string_view options, std::optional<at::Generator> generator = std::nullopt);
void adaptive_step_(std::string_view family, const at::Tensor& weight, const OptionalTensor& bias, const at::Tensor& step, at::TensorList index,
                    std::string_view options, std::optional<at::Generator> generator = std::nullopt);

/// Whether an index is rebuilt before a step: at step 0, at multiples of `every` (0: never again), and before that at every / 32, / 16, ...
/// / 2, since the table changes fastest at the start.
bool refresh_is_due(int64_t step, int64_t every);
/// next_refresh_is_due(step, every) -> bool: the same of the number that `step` is; false where it has no value.
bool next_refresh_is_due(const at::Tensor& step, int64_t every);

/// A class table as an index reads it: weight and bias, detached, after what row optimizers owe them is made up (optim/settle.h). `whole`: all
/// rows of the weight will be read; without it they are left as they are.
struct ClassTable {
  ClassTable(const at::Tensor& weight, const OptionalTensor& bias, bool whole = true);
  at::Tensor weight;
  OptionalTensor bias;
};

/// Calls refresh(seed) with an int64 [] from `generator`, or from the default one of that device. Where it throws, the generator is what
/// it was.
at::Tensor with_seed(const at::Device& device, const std::optional<at::Generator>& generator, const std::function<at::Tensor(const at::Tensor&)>& refresh);

/// What all families ask of a constructor. `exclude` int64 [K] of ids, which leave `drawn` classes or more. Returns bool [N], on the CPU or
/// where exclude is: whether a class is drawn.
at::Tensor check_constructor(std::string_view owner, int64_t num_classes, int64_t dim, int64_t least_dim, const at::Tensor& exclude, int64_t drawn = 1);
void check_at_least(std::string_view owner, const char* argument, int64_t value, int64_t least);
/// Samples without replacement are no more than the classes that can be drawn.
void check_distinct(std::string_view owner, int64_t num_samples, int64_t drawable);

/// Of a family without shared sets.
void check_private(std::string_view owner, bool shared);

/// An index, from its other tables and its last one.
std::vector<at::Tensor> with_step(at::TensorList tables, const at::Tensor& step);
/// An index in which no class is recent, from its other tables.
std::vector<at::Tensor> laid_out(at::TensorList tables, const at::Tensor& step);
/// An index of `count` tables.
void check_index_size(const char* op, at::TensorList index, size_t count);
/// int64, 0-dim.
void check_step(const char* op, const at::Tensor& step);
void check_recent(const char* op, const at::Tensor& recent);

/// queries [Q, dim], floating.
void check_queries(const char* op, const at::Tensor& queries, const c10::SymInt& dim);
/// weight [N, dim], with a bias [N] just where has_bias says so.
void check_class_table(const char* op, const at::Tensor& weight, const OptionalTensor& bias, const c10::SymInt& num_classes, const c10::SymInt& dim,
                       bool has_bias);

/// Refuses a table that holds a NaN, an infinity, or a row too long for the square of its norm in float32, and names the row. Reads it all.
void check_finite_rows(const char* op, const at::Tensor& weight);
/// Refuses a bias that holds a NaN or an infinity, and names its place.
void check_finite_bias(const char* op, const OptionalTensor& bias);

/// `ids` int64 [S], the same for all queries, or [Q, P].
void check_query_ids(const char* op, const at::Tensor& queries, const at::Tensor& ids);
/// `ids` [Q, P] of ids [S] or [Q, P].
at::Tensor ids_of_queries(const at::Tensor& queries, const at::Tensor& ids);

/// target of an op, int64 [Q] or [Q, T].
void check_targets(const char* op, const at::Tensor& queries, const OptionalTensor& target);
/// seed and target of an op that draws by its queries, for each of them or one set that they share.
void check_draws(const char* op, const at::Tensor& seed, const at::Tensor& queries, bool shared, const OptionalTensor& target);

/// Classes [Q, width] whose counts a draw reports, contiguous, -1 for none; width 0 without a target.
struct Targets {
  Targets(const char* op, const OptionalTensor& target, const at::Tensor& queries, int64_t num_classes);
  const int64_t* of(int64_t query) const { return ids.const_data_ptr<int64_t>() + query * width; }
  at::Tensor ids;
  int64_t width;
};
/// target_log_count, empty.
at::Tensor empty_target_count(const at::Tensor& seed, const OptionalTensor& target);
/// ids int64 [Q, M], log_count float32 [Q, M], target_log_count, empty.
PrivateDraws empty_private_draws(const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target, int64_t num_samples);

/// The rows of queries that count: all without a target.
at::Tensor counted_queries(const at::Tensor& queries, const OptionalTensor& target);

/// The recent classes of an index over `drawn` classes that are drawn.
class RecentClasses {
 public:
  RecentClasses(const char* op, const at::Tensor& recent, int64_t drawn, int64_t num_classes);

  int64_t count() const { return count_; }
  /// ids with others in the place of recent ones: such as the laid-out part of an index can be asked for.
  at::Tensor others(const at::Tensor& ids) const;
  OptionalTensor others(const OptionalTensor& ids) const { return given(ids) ? OptionalTensor(others(*ids)) : ids; }
  /// log_count of `ids` in all `num_samples` draws, from that of others(ids) in as many draws from the laid-out part.
  at::Tensor log_count(const at::Tensor& ids, const at::Tensor& of_others, int64_t num_samples) const;
  /// Draws from all classes, from those from the laid-out part by the same seed. `num_queries`: none for a shared set.
  PrivateDraws join(const at::Tensor& seed, const std::optional<c10::SymInt>& num_queries, const OptionalTensor& target, const PrivateDraws& of_others,
                    int64_t num_samples) const;

 private:
  int64_t count_, first_, drawn_;
};

/// For the CPU, where a device has no kernels of its own.
std::vector<at::Tensor> to_cpu(at::TensorList tensors);
inline OptionalTensor to_cpu(const OptionalTensor& tensor) { return given(tensor) ? OptionalTensor(tensor->cpu()) : tensor; }

/// What an index is written with and read by has no gradient.
std::vector<at::Tensor> detached(at::TensorList tensors);
inline at::Tensor detached(const at::Tensor& tensor) { return check::has_gradient(tensor) ? tensor.detach() : tensor; }
inline OptionalTensor detached(const OptionalTensor& tensor) { return given(tensor) ? OptionalTensor(detached(*tensor)) : tensor; }

/// Rows in float32 as `width` asks: as they are, or with one more column, the bias or 1 where none is given.
at::Tensor with_bias_column(const at::Tensor& rows, const OptionalTensor& bias, int64_t width);

} // namespace xsoftmax
