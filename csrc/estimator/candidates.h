#pragma once

#include "op/optional.h"
#include "estimator/estimators.h"

#include <xsoftmax/ops.h>
#include <xsoftmax/options.h>

#include <ATen/core/List.h>

#include <array>

// Concatenates the sets of a proposal, and derives what depends on the whole list: which columns
// were drawn with replacement, which expected count of the target an estimator needs, and whether
// the samples are renormalised.
//
// "Distinct" sets hold no class twice: they are deterministic or drawn without replacement. The
// columns of all other sets are called drawn; they are samples with replacement.

namespace xsoftmax {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

/// Schema of a proposal: four lists with one entry per set.
constexpr const char* kProposalSchema =
    "Tensor[] ids, Tensor[] log_count, Tensor?[] target_log_count, bool[] distinct";
Proposal make_proposal(const char* op, at::TensorList ids, at::TensorList log_count,
                       const OptionalTensors& target_log_count, const c10::List<bool>& distinct);

/// The candidates of a batch in the layout of the kernels: first the private candidates of each
/// query, then the shared ones; within each kind, distinct sets come first.
struct Candidates {
  OptionalTensor private_ids, shared_ids;             ///< int64 [Q, P], [S]
  OptionalTensor private_log_count, shared_log_count; ///< [Q, P]; [S] or [Q, S]
  /// [Q] log expected count of the target: in all sets if the estimator needs it, or in the drawn
  /// set if the samples are renormalised.
  OptionalTensor target_log_count;
  /// Number of leading columns of each kind that belong to distinct sets.
  int64_t distinct_private = 0, distinct_shared = 0;

  Candidates() = default;
  /// Rebuilds the struct from the results of tensors() and distinct().
  Candidates(const char* op, const OptionalTensors& tensors, at::IntArrayRef distinct);
  OptionalTensors tensors() const;
  std::array<int64_t, 2> distinct() const { return {distinct_private, distinct_shared}; }

  c10::SymInt private_width() const {
    return is_defined(private_ids) ? private_ids->sym_size(1) : c10::SymInt(0);
  }
  c10::SymInt shared_width() const {
    return is_defined(shared_ids) ? shared_ids->sym_size(0) : c10::SymInt(0);
  }
};
/// Schema of Candidates and EstimatorOptions in the operators below autograd.
constexpr const char* kCandidatesSchema = "Tensor?[] candidates, int[] distinct, str options";

/// Concatenates the sets of a proposal for `queries` queries.
Candidates arrange_columns(const Proposal& sets, const c10::SymInt& queries,
                           const EstimatorTraits& traits);
/// Whether the sets are in column order: private before shared sets, and within each kind distinct
/// sets first.
bool in_column_order(const Proposal& sets);

/// Checks shapes, dtypes and devices of candidates. `rows` has one row per query.
void check_columns(const char* op, const char* rows_name, const at::Tensor& rows,
                   const at::Tensor& target, const Candidates& candidates);
/// Calls check_columns and checks the requirements of the estimator. Every kernel and composite
/// calls it.
void check_candidates(const char* op, const char* rows_name, const at::Tensor& rows,
                      const at::Tensor& target, const Candidates& candidates,
                      const EstimatorOptions& options);

} // namespace xsoftmax
