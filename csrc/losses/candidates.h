#pragma once

#include "core/optional.h"
#include "losses/estimators.h"

#include <xsoftmax/candidates.h>
#include <xsoftmax/loss_options.h>

#include <ATen/core/List.h>

#include <array>

// The sets of a proposal side by side. All that follows from the list is found here: which columns are independent draws, which count of the
// target an estimator takes, whether draws are renormalised.

namespace xsoftmax {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

/// A proposal as operators take it: four lists with an entry for each set.
constexpr const char* kProposalSchema = "Tensor[] ids, Tensor[] log_count, Tensor?[] target_log_count, bool[] distinct";
Proposal make_proposal(const char* op, at::TensorList ids, at::TensorList log_count, const OptionalTensors& target_log_count, const c10::List<bool>& distinct);

/// The candidates of a batch as kernels take them: the private ones of each query, then those that all share; of both the distinct sets first.
struct Candidates {
  OptionalTensor private_ids, shared_ids;             ///< int64 [Q, P], [S]
  OptionalTensor private_log_count, shared_log_count; ///< [Q, P]; [S] or [Q, S]
  OptionalTensor target_log_count; ///< [Q], where the estimator asks for it: among all sets; or, to renormalise, among the independent draws
  int64_t distinct_private = 0, distinct_shared = 0;  ///< how many of the first columns of each kind are of distinct sets

  Candidates() = default;
  /// Back from what tensors() and distinct() gave.
  Candidates(const char* op, const OptionalTensors& tensors, at::IntArrayRef distinct);
  OptionalTensors tensors() const;
  std::array<int64_t, 2> distinct() const { return {distinct_private, distinct_shared}; }

  c10::SymInt private_width() const { return given(private_ids) ? private_ids->sym_size(1) : c10::SymInt(0); }
  c10::SymInt shared_width() const { return given(shared_ids) ? shared_ids->sym_size(0) : c10::SymInt(0); }
};
/// Candidates and what is done with them, as operators below autograd take them.
constexpr const char* kCandidatesSchema = "Tensor?[] candidates, int[] distinct, str options";

/// The columns of a proposal for `queries` queries.
Candidates lay_out(const Proposal& sets, const c10::SymInt& queries, const EstimatorTraits& traits);
/// Whether the sets stand in the order of their columns: private before shared ones, of both the distinct ones first.
bool in_column_order(const Proposal& sets);

/// Checks shapes, dtypes and devices of candidates. `rows` has a row for each query.
void check_columns(const char* op, const char* rows_name, const at::Tensor& rows, const at::Tensor& target, const Candidates& candidates);
/// The same, and what the estimator needs: every kernel and composite calls it.
void check_candidates(const char* op, const char* rows_name, const at::Tensor& rows, const at::Tensor& target, const Candidates& candidates,
                      const EstimatorOptions& options);

} // namespace xsoftmax
