#pragma once

#include <xsoftmax/streaming_options.h>

#include "core/optional.h"
#include "samplers/sampling.h"

#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace xsoftmax {

// Samplers whose law does not depend on the query: tables, draws, expected counts.
//
// Tables, where the law needs any; one that it does not need is of size 0. [probability float64 [N]; bins int64 [N, 2] of independent
// draws (alias_sample.h); order int64 [N], cumulative float64 [N] of distinct ones (systematic_sample.h); laid_out, late_weight, late_log_uniform, scalars on
// the CPU (static_tail.h)]. Law "fixed": order alone, the classes in rising order.
//
// The first laid_out classes are laid out, and their probabilities sum to 1. What stands of others in probability is their weight beside these, so that the
// law is probability over its sum; what stands of them elsewhere is not read, but for order, which has their ids. So classes that come cost no pass over the
// tables, until a quarter as many have come.

enum StaticTable { kProbability, kBins, kOrder, kCumulative, kLaidOut, kLateWeight, kLateLogUniform, kStaticTables };

/// The options of a static sampler, and of its ops.
struct StaticOptions {
  /// "uniform": the classes [low, num_classes) alike. "log_uniform": q_i in proportion to ln(1 + 1 / (i + 1)) over them. "table": in
  /// proportion to `probability`. "fixed": the classes of `order`, each of them once, always.
  std::string law = "uniform";
  int64_t low = 0;
  int64_t num_classes = 0;
  int64_t num_samples = 0; ///< draws for the batch, or for each query
  bool shared = true;      ///< one set for the batch
  bool distinct = true;    ///< no class twice in a set: inclusion probabilities min(1, c q_i) that sum to num_samples

  template <typename Visitor>
  void visit(Visitor& v) {
    v("law", law);
    v("low", low);
    v("num_classes", num_classes);
    v("num_samples", num_samples);
    v("shared", shared);
    v("distinct", distinct);
  }
};

/// Parses the options; raises ValueError for an unknown distribution or a wrong number of tables.
StaticOptions static_options(const char* op, at::TensorList tables, std::string_view text);

/// Returns log(num_samples / total weight), which plus the log of a class's weight is its log expected count. Weights are 1 for "uniform" and
/// ln(1 + 1 / (i + 1)) for "log_uniform".
double static_log_scale(const StaticOptions& options);

/// static_tables(owner, weights, power, classes, options) -> (tables, options)
///
/// What a sampler's constructor does. `owner`: the class that errors name. `weights` [N]: of law "table", any real dtype, finite, not
/// negative, not all zero; with `power` (finite, at least 0) they are counts, and counts^power the weights, 0^0 = 0. `classes` int64 [K]: those
/// that are never drawn, or, of law "fixed", those that always are. Returned options: a law whose classes are no range any more, and that of
/// distinct log-uniform draws, is "table"; num_classes is N where weights are given; num_samples is K of law "fixed". Reads values, so it is
/// not traced. Errors: ValueError, TypeError, IndexError.
std::tuple<std::vector<at::Tensor>, std::string> static_tables(std::string owner, const OptionalTensor& weights, std::optional<double> power,
                                                               const OptionalTensor& classes, std::string_view options);

/// static_resize(owner, tables, num_classes, law, options) -> (tables, options)
///
/// The tables of num_classes classes, or where they need not be laid out anew the next tail alone (three tables), for static_grow_. New ones of law "table"
/// have the smallest weight above 0 that there is; but with law="log_uniform" the weights are those of that law, of the classes that are drawn. Law "fixed"
/// keeps its classes. Where there are tables, O(N) when they are laid out anew: if classes go that are not in the tail, or a quarter as many as are laid out
/// have come; and when the first class comes after that. Errors: ValueError, before anything changes: no class left to draw, fewer than a set of different ones
/// needs, or a class of law "fixed" that is gone.
std::tuple<std::vector<at::Tensor>, std::string> static_resize(std::string owner, at::TensorList tables, int64_t num_classes, std::string_view law,
                                                               std::string_view options);

/// static_grow_(tables!, tail, num_classes) -> (): what static_resize plans by the next tail, in place, in amortised O(the classes that come or go).
void static_grow_(at::TensorList tables, at::TensorList tail, int64_t num_classes);

/// static_sample(seed, queries, target, tables, options) -> (ids, log_count, target_log_count)
///
/// Draws by uniform_sample, log_uniform_sample, alias_sample or systematic_sample. Of queries [Q, D] only the number of rows matters. target
/// int64, any shape, -1 where there is none. ids int64 [M] or [Q, M]; log_count float32 of their shape; target_log_count float32 of
/// target's shape, [0] without targets.
std::tuple<at::Tensor, at::Tensor, at::Tensor> static_sample(const at::Tensor& seed, const at::Tensor& queries, const OptionalTensor& target,
                                                             at::TensorList tables, std::string_view options);

/// static_log_count(ids, tables, options) -> float32 of ids' shape: log(c q_i), at most 0 of distinct draws; -inf for a class that is never
/// drawn and for -1. Another id outside [0, N) is an IndexError on the CPU.
at::Tensor static_log_count(const at::Tensor& ids, at::TensorList tables, std::string_view options);

/// Options of static_follow_, checked; `owner` is named in errors.
samplers::FollowOptions follow_options(const char* owner, std::string_view text);

/// static_follow_(target, counted, excluded, step!, count!, total!, last!, seen!, tables!, counts_options, options) -> ()
///
/// A training step of a sampler whose law follows counts of a stream (streaming_counts.h, of dense ids; counts_options are theirs, options
/// FollowOptions). First `counted` is counted, int64 [C] or [C, T], of which the first column counts: the targets, perhaps of other processes as well; none:
/// nothing is. Where refresh_is_due(step), the tables become those of the counts as they are then, in place: (1 - u) counts^power / sum + u / n over the n
/// classes that are not among excluded, int64 [K]. Then step, int64 on the CPU, rises by 1. `target`, int64 of any shape, is what static_sample is given
/// afterwards: it is checked. Errors, before anything changes: TypeError, ValueError, on the CPU IndexError.
void static_follow_(const at::Tensor& target, const OptionalTensor& counted, const at::Tensor& excluded, at::Tensor& step, at::Tensor& count, at::Tensor& total,
                    at::Tensor& last, at::Tensor& seen, at::TensorList tables, std::string_view counts_options, std::string_view options);

} // namespace xsoftmax
