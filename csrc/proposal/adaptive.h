#pragma once

#include "op/optional.h"

#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

// Shared by the adaptive samplers, which follow the class table. Each family X (midx, lsh, kernel)
// has seven operators:
//
//   X_index(owner, num_classes, dim, exclude int64 [K], options) -> index
//     Creates an index without knowledge of the table: all classes except `exclude` are drawn
//     uniformly. Raises the errors of the sampler's constructor, in the name of its class `owner`.
//   X_resize(owner, num_classes, rows [A, D], bias [num_classes], index, options) -> index
//     Returns an index of the first num_classes classes and of A = num_classes - N new ones, all
//     drawable. Their rows are assigned to the existing codewords, planes or directions, like those
//     of the other classes. If the rows of new classes are missing, or if the index does not know
//     the table, the result does not know it either. O(N); reads no rows but the new ones (kernel:
//     sums over the indexed rows).
//   X_grow(owner, num_classes, rows [A, D], bias, index, options) -> tables
//     Returns for each table of the index, except `recent` and `step`, what adaptive_grow_ appends:
//     the rows of the new classes (none if classes are removed) for a table with one row per class,
//     a 0-dim placeholder for other tables. The new classes become `recent`. bias: of the new
//     classes [A] or of all. O(A). Returns an empty list if only X_resize can do it: draws are
//     distinct or use the exact form, classes are removed that are not recent, or there would be
//     more recent classes than a quarter of the others.
//   X_sample(seed, queries [Q, D], target, index, options)
//       -> (ids int64 [Q, M], log_count float32 of ids' shape, target_log_count)
//     Draws for one step. Shared sets, in families that support them, are [M]. target: int64 [Q],
//     or [Q, T] for several classes per query; -1: no class, log count -inf. A query whose first
//     target is -1 does not count: it does not influence what the batch shares. target_log_count:
//     float32 of target's shape, [0] without a target.
//   X_log_count(queries, ids, index, options) -> float32
//     Returns the log expected count of any ids in the draws of X_sample; -inf for a class that is
//     never drawn. Private draws: [Q, S] for ids [S], [Q, P] for ids [Q, P]. A shared set: ids'
//     shape.
//   X_step_(weight [N, D], bias [N], step!, index!, options, generator) -> ()
//     Runs once per training step: refreshes if refresh_is_due(step), then increments step.
//   X_refresh_(weight, bias, step!, index!, options, generator) -> float64 statistics
//     Refreshes the index from the class table now. A step of 0 becomes 1.
//
// `index` is a list of plain tensors, in the order given in the family's header; the last two are
// `recent` and `step`, int64 []. An absent table has size 0. All tensors are on one device except
// these two: modules keep them on the CPU, because draws and X_step_ read them and no step may wait
// for a device.
//
// `recent` T: the last T classes were added since the index was last rebuilt. Their places are
// recorded for the next rebuild, but until then they are drawn uniformly. With A drawable classes
// in all, and q0 the distribution over the others (the indexed part),
//
//     q(i | z) = 1 / A                  for a recent class
//                (A - T) / A q0(i | z)  for any other class
//
// A new class therefore costs no pass over the index; a rebuild is due after many of them. A
// refresh rebuilds the index. Operators that write to an index take `step` before the other tables,
// because TorchScript drops calls that only write to elements of a list. `options` is the text of a
// struct in xsoftmax/options.h. If X_step_ or X_refresh_ raise an error, index, step and generator
// are unchanged.
//
// The operators adaptive_index, adaptive_sample, ... take the name of a family followed by these
// arguments, detach the tensors and call the family's operator. Modules call these.

namespace xsoftmax {

using PrivateDraws = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

std::vector<at::Tensor> adaptive_index(std::string_view family, std::string_view owner,
                                       int64_t num_classes, int64_t dim, const at::Tensor& exclude,
                                       std::string_view options);
std::vector<at::Tensor> adaptive_resize(std::string_view family, std::string_view owner,
                                        int64_t num_classes, const OptionalTensor& rows,
                                        const OptionalTensor& bias, at::TensorList index,
                                        std::string_view options);
std::vector<at::Tensor> adaptive_grow(std::string_view family, std::string_view owner,
                                      int64_t num_classes, const OptionalTensor& rows,
                                      const OptionalTensor& bias, at::TensorList index,
                                      std::string_view options);
/// adaptive_grow_(recent!, index!, gained, before, num_classes) -> (): applies in place the growth
/// that X_grow returned as `gained`. `index`: without `recent` and `step`. The number of classes
/// was `before` and becomes num_classes.
void adaptive_grow_(const at::Tensor& recent, at::TensorList index, at::TensorList gained,
                    int64_t before, int64_t num_classes);
PrivateDraws adaptive_sample(std::string_view family, const at::Tensor& seed,
                             const at::Tensor& queries, const OptionalTensor& target,
                             at::TensorList index, std::string_view options);
at::Tensor adaptive_log_count(std::string_view family, const at::Tensor& queries,
                              const at::Tensor& ids, at::TensorList index,
                              std::string_view options);
at::Tensor adaptive_refresh_(std::string_view family, const at::Tensor& weight,
                             const OptionalTensor& bias, const at::Tensor& step,
                             at::TensorList index, std::string_view options,
                             std::optional<at::Generator> generator = std::nullopt);
void adaptive_step_(std::string_view family, const at::Tensor& weight, const OptionalTensor& bias,
                    const at::Tensor& step, at::TensorList index, std::string_view options,
                    std::optional<at::Generator> generator = std::nullopt);

/// Returns whether an index is refreshed before a step: at step 0, at multiples of `every` (0:
/// never again) and, because the table changes fastest at the start, also at every / 32, / 16, ...
/// / 2.
bool refresh_is_due(int64_t step, int64_t every);
/// next_refresh_is_due(step, every) -> bool: the same for the value of `step`; false if it has
/// none.
bool next_refresh_is_due(const at::Tensor& step, int64_t every);

} // namespace xsoftmax
