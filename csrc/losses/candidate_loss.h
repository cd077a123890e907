#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

// The contract of the op is in xsoftmax/ops.h.

namespace xsoftmax {

// The op's parameters: each kernel takes them as the schema gives them and works on the struct. Those behind the scores are also
// linear_candidate_loss's.
#define XS_CANDIDATES_PARAMS                                                                                                       \
  const at::Tensor &target, const std::optional<at::Tensor>&private_ids, const std::optional<at::Tensor>&shared_ids,               \
      const std::optional<at::Tensor>&private_log_count, const std::optional<at::Tensor>&shared_log_count,                         \
      const std::optional<at::Tensor>&target_log_count, std::string_view estimator, bool remove_accidental_hits,                   \
      int64_t fixed_private, int64_t fixed_shared, double label_smoothing
#define XS_CANDIDATES_ARGS                                                                                                         \
  target, private_ids, shared_ids, private_log_count, shared_log_count, target_log_count, estimator, remove_accidental_hits,       \
      fixed_private, fixed_shared, label_smoothing
#define XS_CANDIDATES_SCHEMA                                                                                                       \
  "Tensor target, Tensor? private_ids, Tensor? shared_ids, Tensor? private_log_count=None, Tensor? shared_log_count=None, "        \
  "Tensor? target_log_count=None, str estimator=\"sampled_softmax\", bool remove_accidental_hits=True, int fixed_private=0, "      \
  "int fixed_shared=0, float label_smoothing=0.0"
#define XS_CANDIDATE_LOSS_PARAMS const at::Tensor &scores, XS_CANDIDATES_PARAMS
#define XS_CANDIDATE_LOSS_ARGS scores, XS_CANDIDATES_ARGS

struct CandidateLossArgs {
  const at::Tensor& scores;
  const at::Tensor& target;
  const std::optional<at::Tensor>& private_ids;
  const std::optional<at::Tensor>& shared_ids;
  const std::optional<at::Tensor>& private_log_count;
  const std::optional<at::Tensor>& shared_log_count;
  const std::optional<at::Tensor>& target_log_count;
  std::string_view estimator;
  bool remove_accidental_hits;
  int64_t fixed_private, fixed_shared;
  double label_smoothing;
};

/// What candidate_loss and linear_candidate_loss check alike. `rows` has a row for each query.
void check_candidates(const char* op, const char* rows_arg, const at::Tensor& rows, XS_CANDIDATES_PARAMS);
/// Shared by every kernel of the op, and of its backward.
void check_candidate_loss(const CandidateLossArgs& args);
void check_candidate_loss_backward(const at::Tensor& grad, const CandidateLossArgs& args);

/// The gradient of the scores [Q, 1 + P + S], by the dispatcher. grad [Q].
at::Tensor candidate_loss_backward(const at::Tensor& grad, XS_CANDIDATE_LOSS_PARAMS);

/// The composites in ATen calls: any device, and the oracle of the tests.
at::Tensor candidate_loss_reference(XS_CANDIDATE_LOSS_PARAMS);
at::Tensor candidate_loss_backward_reference(const at::Tensor& grad, XS_CANDIDATE_LOSS_PARAMS);

} // namespace xsoftmax
