#include "loss/soft_targets.h"

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/options.h"
#include "loss/linear_softmax.h"
#include "estimator/logit_transform.h"
#include "loss/reduction.h"
#include "loss/sampled_step.h"
#include "loss/several_positives.h"

#include <xsoftmax/ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kExact = "linear_soft_loss";
constexpr const char* kSampled = "sampled_softmax_loss";

Tensor is_padding(const Tensor& target, int64_t ignore_index) {
  return target.eq(ignore_index).logical_or(target.eq(-1));
}

// Reduces loss [Q] as ReductionOptions define.
Tensor reduced(const char* op, const Tensor& loss, const Tensor& target,
               const ReductionOptions& options) {
  switch (reduction_code(op, options.reduction)) {
    case at::Reduction::Mean:
      return loss.sum() / is_padding(target, options.ignore_index).logical_not().any(-1).sum();
    case at::Reduction::Sum: return loss.sum();
    default: return loss.reshape_symint(target.sym_sizes().slice(0, target.dim() - 1));
  }
}

// Returns probability times class weight of each entry [Q, T], in `dtype`. The share is 0 where
// `counts` is false, because the gradient of a left-out entry is 0 times its share, which must be
// finite.
Tensor shares_of(const Tensor& prob, const Tensor& ids, const Tensor& counts,
                 const OptionalTensor& class_weight, at::ScalarType dtype) {
  Tensor shares = prob.detach().to(dtype);
  if (is_defined(class_weight)) {
    const Tensor weights = class_weight->detach().to(dtype).index_select(0, ids.flatten());
    shares = shares * weights.reshape_symint(ids.sym_sizes());
  }
  return at::where(counts, shares, 0.0);
}

// Adds z_loss * (log normaliser)^2 to the loss of each entry [Q, T].
Tensor with_z_loss(const Tensor& loss, const Tensor& log_normalizer, double z_loss) {
  return z_loss == 0 ? loss : loss + log_normalizer.square() * z_loss;
}

// Returns the distinct classes of each query, [Q, T] in the format of distinct_positives(), and
// the summed probability of each, [Q, T].
std::tuple<Tensor, Tensor> joined(const Tensor& target, const Tensor& prob, int64_t ignore_index) {
  const auto [ids, order] =
      target.masked_fill(target.eq(ignore_index), -1).sort(1, /*descending=*/true);
  const Tensor last = ids.narrow_symint(1, 0, ids.sym_size(1) - 1);
  const Tensor is_new = ids.narrow_symint(1, 1, ids.sym_size(1) - 1).ne(last);
  const Tensor place = at::zeros_like(ids);
  place.narrow_symint(1, 1, ids.sym_size(1) - 1).copy_(is_new.cumsum(1));
  const Tensor sums = at::zeros_like(prob).scatter_add(1, place, prob.gather(1, order));
  return {at::full_like(ids, -1).scatter(1, place, ids), sums};
}

} // namespace

Tensor soft_targets(const char* op, const Tensor& input, const Tensor& target,
                    const Tensor& target_prob, int64_t ignore_index) {
  TORCH_CHECK_VALUE(target.dim() == input.dim() && target.dim() >= 1, op,
                    ": expected target of shape [*, T] with target_prob and input of shape ",
                    input.sym_sizes(), ", got ", target.sym_sizes());
  TORCH_CHECK_VALUE(target_prob.sym_sizes() == target.sym_sizes(), op,
                    ": expected target_prob of the shape of target, ", target.sym_sizes(), ", got ",
                    target_prob.sym_sizes());
  check::int64(op, "target", target);
  check::floating(op, "target_prob", target_prob);
  check::same_device(op, "target_prob", target_prob, "target", target);
  const Tensor adds_nothing = is_padding(target, ignore_index).logical_or(target_prob.eq(0));
  return target.masked_fill(adds_nothing, ignore_index);
}

Tensor linear_soft_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Tensor& target, const Tensor& target_prob,
                        const OptionalTensor& class_weight, const CrossEntropyOptions& options) {
  TORCH_CHECK_VALUE(options.label_smoothing == 0, kExact,
                    ": expected label_smoothing of 0 with target_prob, got ",
                    options.label_smoothing);
  check_logits(kExact, options);
  check_z_loss(kExact, options.z_loss);
  const Tensor listed_targets =
      soft_targets(kExact, input, target, target_prob, options.ignore_index);
  check_batch(kExact, input, listed_targets, weight, options.ignore_index, /*soft=*/true);
  check_class_weight(kExact, class_weight, weight.sym_size(0), target);
  const Tensor rows = listed_targets.unsqueeze(0).flatten(0, -2),
               counts = rows.ne(options.ignore_index);
  const Tensor ids = rows.masked_fill(counts.logical_not(), 0);
  const Tensor queries = input.unsqueeze(0).flatten(0, -2);
  const Tensor counted = mask_ignored_rows(queries, counts.any(1).to(at::kLong), 0);
  const auto [log_prob, log_normalizer, entropy] =
      linear_softmax(counted, weight, bias, ids, /*entropy=*/false, options);
  const Tensor prob = target_prob.reshape_symint(ids.sym_sizes());
  const Tensor shares = shares_of(prob, ids, counts, class_weight, log_prob.scalar_type());
  const Tensor each = with_z_loss(-log_prob, log_normalizer.unsqueeze(1), options.z_loss);
  return reduced(kExact, at::where(counts, each * shares, 0.0).sum(1), target, options);
}

Tensor sampled_soft_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         const Tensor& target, const Tensor& target_prob, const Proposal& sets,
                         const SampledSoftmaxOptions& options_argument,
                         const OptionalTensor& class_weight, const OptionalTensor& log_z) {
  SampledSoftmaxOptions options = options_argument;
  options.positives = "sum"; // the listed classes as one class, whose loss yields the normaliser
  options.z_loss = 0;        // added below
  const Tensor listed_targets =
      soft_targets(kSampled, input, target, target_prob, options.ignore_index);
  check_batch(kSampled, input, listed_targets, weight, options.ignore_index, /*soft=*/true);
  check_sampled_loss(input, weight, target, class_weight, log_z, /*soft=*/true, options_argument);
  const Tensor rows = listed_targets.unsqueeze(0).flatten(0, -2);
  // Without listed classes, empty scores connect the loss of 0 to its arguments.
  if (rows.sym_size(1) == 0) {
    const Tensor queries = input.unsqueeze(0).flatten(0, -2);
    const Tensor scores =
        candidate_scores(queries, weight, bias, rows, std::nullopt, options.sparse_grad);
    return reduced(kSampled, scores.sum(1), target, options);
  }
  Proposal target_sets = sets;
  for (CandidateSet& set : target_sets) { // samplers treat a single positive as a target [Q]
    if (set.target_log_count.defined() && set.target_log_count.dim() == 1) {
      set.target_log_count = set.target_log_count.unsqueeze(1);
    }
  }
  const auto [positives, prob] = joined(
      rows,
      target_prob.reshape_symint(rows.sym_sizes()).detach().to(opmath_dtype(weight.scalar_type())),
      options.ignore_index);
  const auto [loss, scores, score] =
      losses_of_positives(input, weight, bias, positives, target_sets, options, log_z);
  const Tensor counts = positives.ge(0);
  const Tensor shares =
      shares_of(prob, positives.clamp_min(0), counts, class_weight, scores.scalar_type());
  const Tensor each = with_z_loss(loss + (score - scores), loss + score, options_argument.z_loss);
  return reduced(kSampled, at::where(counts, each * shares, 0.0).sum(1), target, options);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "linear_soft_loss(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor "
      "target_prob, "
      "Tensor? class_weight=None, str options=\"\") -> Tensor",
      [](const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
         const Tensor& target, const Tensor& target_prob, const OptionalTensor& class_weight,
         std::string_view options) {
        return linear_soft_loss(input, weight, bias, target, target_prob, class_weight,
                                parse_options<CrossEntropyOptions>(kExact, options));
      });
  m.def(
      "soft_targets(Tensor input, Tensor target, Tensor target_prob, int ignore_index, str owner) "
      "-> Tensor",
      [](const Tensor& input, const Tensor& target, const Tensor& target_prob, int64_t ignore_index,
         std::string_view owner) {
        return soft_targets(std::string(owner).c_str(), input, target, target_prob, ignore_index);
      });
}

} // namespace xsoftmax
