#pragma once

#include <xsoftmax/options.h>

#include "op/optional.h"
#include "proposal/sampling.h"

#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace xsoftmax {

// Samplers whose distribution does not depend on the query: tables, draws, expected counts.
//
// Tables (size 0 where the distribution does not need them), in the order of StaticTable:
//
//     probability       float64 [N]
//     bins              int64 [N, 2], of draws with replacement (alias_sample.h)
//     order             int64 [N], of distinct draws (systematic_sample.h); for "fixed" the only
//                       table: the classes, ascending
//     cumulative        float64 [N], of distinct draws (systematic_sample.h)
//     laid_out, late_weight, late_log_uniform
//                       scalars on the CPU (static_tail.h)
//
// The tables are built for the first laid_out classes, whose probabilities sum to 1. For classes
// added since then, probability holds an unnormalised weight, relative to these, so the
// distribution is probability divided by its sum. Their entries in the other tables are not read,
// except for their ids in order. A new class therefore costs no pass over the tables, until a
// quarter as many classes have been added.

enum StaticTable {
  kProbability,
  kBins,
  kOrder,
  kCumulative,
  kLaidOut,
  kLateWeight,
  kLateLogUniform,
  kStaticTables
};

/// The options of a static sampler and its ops.
struct StaticOptions {
  /// "uniform": over the classes [low, num_classes). "log_uniform": q_i proportional to ln(1 + 1 /
  /// (i + 1)) over the same classes. "table": proportional to `probability`. "fixed": the classes
  /// of `order`, each exactly once in every set.
  std::string distribution = "uniform";
  int64_t low = 0;
  int64_t num_classes = 0;
  int64_t num_samples = 0; ///< draws per batch (shared) or per query
  bool shared = true;      ///< one set for the batch
  /// Draws without replacement, with inclusion probabilities min(1, c q_i) that sum to num_samples.
  bool distinct = true;

  template <typename Visitor>
  void visit(Visitor& v) {
    v("distribution", distribution);
    v("low", low);
    v("num_classes", num_classes);
    v("num_samples", num_samples);
    v("shared", shared);
    v("distinct", distinct);
  }
};

/// Parses the options; raises ValueError for an unknown distribution or a wrong number of tables.
StaticOptions static_options(const char* op, at::TensorList tables, std::string_view text);

/// Returns the tables of the tail (proposal/static/static_tail.h).
inline at::TensorList tail_of(at::TensorList tables) { return tables.slice(kLaidOut); }

/// Returns the weights [num_classes] of distribution "uniform" or "log_uniform", float64, without
/// the first `low` classes.
at::Tensor distribution_weights(const StaticOptions& options, at::Device device);

/// Returns log(num_samples / total weight). Added to the log weight of a class it gives the log
/// expected count. Weights are 1 for "uniform" and ln(1 + 1 / (i + 1)) for "log_uniform".
double static_log_scale(const StaticOptions& options);

/// static_tables(owner, weights, power, classes, options) -> (tables, options): builds the tables
/// for a sampler's constructor.
///
/// `owner`: the class named in errors. `weights` [N]: for distribution "table", of any real dtype,
/// finite, non-negative, not all zero. With `power` (finite, at least 0), `weights` are counts, and
/// the weights are counts^power with 0^0 = 0. `classes` int64 [K]: classes that are never drawn or,
/// for "fixed", always. In the returned options, distribution is "table" if the drawable classes
/// are no longer a range, or for distinct log-uniform draws; num_classes is N if weights are given;
/// num_samples is K for "fixed". Reads values, so it cannot be traced. Raises ValueError, TypeError
/// or IndexError.
std::tuple<std::vector<at::Tensor>, std::string> static_tables(std::string owner,
                                                               const OptionalTensor& weights,
                                                               std::optional<double> power,
                                                               const OptionalTensor& classes,
                                                               std::string_view options);

/// static_resize(owner, tables, num_classes, distribution, options) -> (tables, options): returns
/// the tables for num_classes classes or, if no rebuild is needed, only the next tail (three
/// tables) for static_grow_.
///
/// For distribution "table", a new class has the smallest positive weight in the table; with
/// distribution="log_uniform", drawable classes have log-uniform weights instead. "fixed" keeps its
/// classes. Tables are rebuilt in O(N) if classes are removed that are not in the tail, or once a
/// quarter as many classes have been added as the tables were built for; the first class added
/// after a rebuild also costs O(N). Raises ValueError before anything changes if no class is left
/// to draw, if fewer are left than distinct draws need, or if a class of "fixed" is removed.
std::tuple<std::vector<at::Tensor>, std::string> static_resize(std::string owner,
                                                               at::TensorList tables,
                                                               int64_t num_classes,
                                                               std::string_view distribution,
                                                               std::string_view options);

/// static_grow_(tables!, tail, num_classes) -> (): applies in place what static_resize returned as
/// the next tail, in amortised O(number of classes added or removed).
void static_grow_(at::TensorList tables, at::TensorList tail, int64_t num_classes);

/// static_sample(seed, queries, target, tables, options) -> (ids, log_count, target_log_count):
/// draws by uniform_sample, log_uniform_sample, alias_sample or systematic_sample.
///
/// Only the number of rows of queries [Q, D] matters. target: int64, any shape, -1 for no class.
/// ids: int64 [M] or [Q, M]. log_count: float32 in their shape. target_log_count: float32 in
/// target's shape, [0] without targets.
std::tuple<at::Tensor, at::Tensor, at::Tensor> static_sample(const at::Tensor& seed,
                                                             const at::Tensor& queries,
                                                             const OptionalTensor& target,
                                                             at::TensorList tables,
                                                             std::string_view options);

/// static_log_count(ids, tables, options) -> float32 of ids' shape: returns log(c q_i), at most 0
/// for distinct draws; -inf for -1 and for a class that is never drawn. Any other id outside [0, N)
/// raises IndexError on the CPU.
at::Tensor static_log_count(const at::Tensor& ids, at::TensorList tables, std::string_view options);

} // namespace xsoftmax
