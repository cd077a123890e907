#include "loss/tower_loss.h"

#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/options.h"
#include "table/scale_gradient.h"
#include "op/shape_checks.h"
#include "estimator/candidate_loss.h"
#include "loss/reduction.h"
#include "xsoftmax/ops.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kTowerLoss = "tower_loss"; // the operator that users call

void check_vectors(const char* name, const Tensor& vectors, int64_t dim, const Tensor& query) {
  check::dim(kTowerLoss, name, vectors, dim);
  check::same_dtype(kTowerLoss, name, vectors, "query", query);
  check::same_device(kTowerLoss, name, vectors, "query", query);
  check::size(kTowerLoss, name, vectors, dim - 1, query.sym_size(1), "the width of query");
  if (dim == 3 || std::string_view(name) == "target_vector") {
    check::size(kTowerLoss, name, vectors, 0, query.sym_size(0), "the queries");
  }
}

TowerState forward_any(const Tensor& query, const Tensor& target_vector, const Tensor& target,
                       const OptionalTensor& vectors, const OptionalTensor& private_vectors,
                       const OptionalTensors& candidates, at::IntArrayRef distinct,
                       const Tensor& grad, std::string_view options, GradientMask wanted) {
  return tower_loss_forward_reference(
      {query, target_vector, target, vectors, private_vectors, candidates, distinct, options}, grad,
      wanted);
}

TowerState forward_meta(const Tensor& query, const Tensor& target_vector, const Tensor& target,
                        const OptionalTensor& vectors, const OptionalTensor& private_vectors,
                        const OptionalTensors& candidates, at::IntArrayRef distinct,
                        const Tensor& grad, std::string_view options, GradientMask wanted) {
  const TowerArguments checked(query, target_vector, target, vectors, private_vectors, candidates,
                               distinct, options);
  check_tower_grad(grad, query);
  const auto gradient = [&](const OptionalTensor& tensor, bool is_wanted) {
    std::vector<c10::SymInt> shape = is_defined(tensor)
        ? tensor->sym_sizes().vec()
        : std::vector<c10::SymInt>{0, query.sym_size(1)};
    shape[0] = is_wanted && is_defined(tensor) ? shape[0] : c10::SymInt(0);
    return at::empty_symint(shape, query.options());
  };
  return {at::empty_symint({query.sym_size(0)},
                           query.options().dtype(opmath_dtype(query.scalar_type()))),
          gradient(query, wanted[0]), gradient(target_vector, wanted[1]),
          gradient(vectors, wanted[2]), gradient(private_vectors, wanted[3])};
}

TowerState call_forward(const Tensor& query, const Tensor& target_vector, const Tensor& target,
                        const OptionalTensor& vectors, const OptionalTensor& private_vectors,
                        const OptionalTensors& candidates, at::IntArrayRef distinct,
                        const Tensor& grad, std::string_view options, GradientMask wanted) {
  static const auto op = find_op<decltype(forward_any)>("xsoftmax::tower_loss_forward");
  return op.call(query, target_vector, target, vectors, private_vectors, candidates, distinct, grad,
                 options, wanted);
}

// Returns the losses of the queries [Q].
Tensor losses_any(const Tensor& query, const Tensor& target_vector, const Tensor& target,
                  const OptionalTensor& vectors, const OptionalTensor& private_vectors,
                  const OptionalTensors& candidates, at::IntArrayRef distinct,
                  std::string_view options) {
  check::dim(kTowerLoss, "query", query, 2);
  return std::get<0>(
      call_forward(query, target_vector, target, vectors, private_vectors, candidates, distinct,
                   at::ones_symint({query.sym_size(0)},
                                   query.options().dtype(opmath_dtype(query.scalar_type()))),
                   options, {}));
}

// Returns (loss * factor).sum(). factor has no gradient.
Tensor weighted_any(const Tensor& query, const Tensor& target_vector, const Tensor& target,
                    const OptionalTensor& vectors, const OptionalTensor& private_vectors,
                    const OptionalTensors& candidates, at::IntArrayRef distinct,
                    const Tensor& factor, std::string_view options) {
  return std::get<0>(call_forward(query, target_vector, target, vectors, private_vectors,
                                  candidates, distinct, factor, options, {}))
      .sum();
}

GradientMask gradient_mask(const Tensor& query, const Tensor& target_vector,
                           const OptionalTensor& vectors, const OptionalTensor& private_vectors) {
  const auto needs_grad = [](const OptionalTensor& tensor) {
    return is_defined(tensor) && tensor->requires_grad();
  };
  return {query.requires_grad(), target_vector.requires_grad(), needs_grad(vectors),
          needs_grad(private_vectors)};
}

OptionalTensors columns_from(const torch::autograd::variable_list& saved, size_t first) {
  OptionalTensors columns;
  for (size_t i = first; i < saved.size(); ++i) {
    columns.push_back(optional(saved[i]));
  }
  return columns;
}

// Returns whether a backward pass needs the gradients of query, target_vector, vectors and
// private_vectors. Autograd numbers only the tensors that are present, including targets.
GradientMask gradient_mask(const torch::autograd::AutogradContext& ctx, bool has_vectors,
                           bool has_private) {
  return {ctx.needs_input_grad(0), ctx.needs_input_grad(1), has_vectors && ctx.needs_input_grad(3),
          has_private && ctx.needs_input_grad(has_vectors ? 4 : 3)};
}

class WeightedTowerLoss : public torch::autograd::Function<WeightedTowerLoss> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& query,
                        const Tensor& target_vector, const Tensor& target,
                        const OptionalTensor& vectors, const OptionalTensor& private_vectors,
                        const OptionalTensors& candidates, at::IntArrayRef distinct,
                        const Tensor& factor, std::string_view options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, grad_query, grad_target_vector, grad_vectors, grad_private_vectors] = call_forward(
        query, target_vector, target, vectors, private_vectors, candidates, distinct, factor,
        options, gradient_mask(query, target_vector, vectors, private_vectors));
    ctx->save_for_backward({grad_query, grad_target_vector, grad_vectors, grad_private_vectors,
                            query, target_vector, vectors.value_or(Tensor()),
                            private_vectors.value_or(Tensor())});
    return loss.sum();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    torch::autograd::variable_list result(9);
    constexpr std::array<size_t, 4> input_positions{0, 1, 3, 4};
    const GradientMask wanted = gradient_mask(*ctx, saved[6].defined(), saved[7].defined());
    for (size_t i = 0; i < 4; ++i) {
      if (wanted[i]) {
        result[input_positions[i]] = scale_gradient(saved[i], grads[0], saved[4 + i]);
      }
    }
    return result;
  }
};

class TowerLosses : public torch::autograd::Function<TowerLosses> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& query,
                        const Tensor& target_vector, const Tensor& target,
                        const OptionalTensor& vectors, const OptionalTensor& private_vectors,
                        const OptionalTensors& candidates, at::IntArrayRef distinct,
                        std::string_view options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    torch::autograd::variable_list saved{query, target_vector, target, vectors.value_or(Tensor()),
                                         private_vectors.value_or(Tensor())};
    for (size_t i = 0; i < candidates.size(); ++i) {
      saved.push_back(std::optional<Tensor>(candidates.get(i)).value_or(Tensor()));
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["distinct"] = distinct.vec();
    ctx->saved_data["options"] = std::string(options);
    return losses_any(query, target_vector, target, vectors, private_vectors, candidates, distinct,
                      options);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const GradientMask wanted = gradient_mask(*ctx, saved[3].defined(), saved[4].defined());
    const auto [loss, grad_query, grad_target_vector, grad_vectors, grad_private_vectors] =
        call_forward(saved[0], saved[1], saved[2], optional(saved[3]), optional(saved[4]),
                     columns_from(saved, 5), ctx->saved_data["distinct"].toIntVector(), grads[0],
                     ctx->saved_data["options"].toStringRef(), wanted);
    return {wanted[0] ? grad_query : Tensor(),
            wanted[1] ? grad_target_vector : Tensor(),
            Tensor(),
            wanted[2] ? grad_vectors : Tensor(),
            wanted[3] ? grad_private_vectors : Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

Tensor losses_autograd(const Tensor& query, const Tensor& target_vector, const Tensor& target,
                       const OptionalTensor& vectors, const OptionalTensor& private_vectors,
                       const OptionalTensors& candidates, at::IntArrayRef distinct,
                       std::string_view options) {
  check::strided_tensors(
      kTowerLoss, {{"query", &query}, {"target_vector", &target_vector}, {"target", &target}});
  return TowerLosses::apply(query, target_vector, target, vectors, private_vectors, candidates,
                            distinct, options);
}

Tensor weighted_autograd(const Tensor& query, const Tensor& target_vector, const Tensor& target,
                         const OptionalTensor& vectors, const OptionalTensor& private_vectors,
                         const OptionalTensors& candidates, at::IntArrayRef distinct,
                         const Tensor& factor, std::string_view options) {
  check::strided_tensors(kTowerLoss,
                         {{"query", &query},
                          {"target_vector", &target_vector},
                          {"target", &target},
                          {"factor", &factor}});
  return WeightedTowerLoss::apply(query, target_vector, target, vectors, private_vectors,
                                  candidates, distinct, factor, options);
}

// Concatenates the vectors of the sets of one kind in column order. Casts them, because the dtypes
// of towers and memory may differ.
OptionalTensor joined_vectors(const Proposal& sets, at::TensorList vectors, int64_t dim,
                              at::ScalarType dtype) {
  std::vector<Tensor> parts;
  for (const bool distinct : {true, false}) {
    for (size_t k = 0; k < sets.size(); ++k) {
      if (sets[k].ids.dim() == dim - 1 && sets[k].distinct == distinct) {
        check::dim(kTowerLoss, "vectors of a set", vectors[k], dim);
        parts.push_back(vectors[k].to(dtype));
      }
    }
  }
  return parts.empty() ? std::nullopt
                       : OptionalTensor(parts.size() == 1 ? parts[0] : at::cat(parts, dim - 2));
}

Tensor tower_loss_op(const Tensor& query, const Tensor& target_vector, const Tensor& target,
                     at::TensorList vectors, at::TensorList ids, at::TensorList log_count,
                     const OptionalTensors& target_log_count, const c10::List<bool>& distinct,
                     const OptionalTensor& weight, std::string_view options) {
  return tower_loss(query, target_vector, target, vectors,
                    make_proposal(kTowerLoss, ids, log_count, target_log_count, distinct),
                    parse_options<TowerOptions>(kTowerLoss, options), weight);
}

} // namespace

Tensor tower_loss(const Tensor& query, const Tensor& target_vector, const Tensor& target,
                  at::TensorList set_vectors, const Proposal& sets, const TowerOptions& options,
                  const OptionalTensor& weight) {
  check::strided_tensors(
      kTowerLoss, {{"query", &query}, {"target_vector", &target_vector}, {"target", &target}});
  const int64_t reduction = reduction_code(kTowerLoss, options.reduction);
  const EstimatorOptions& estimator = options;
  const std::string inner = text_of(estimator);
  check::dim(kTowerLoss, "query", query, 2);
  check::floating(kTowerLoss, "query", query);
  TORCH_CHECK_VALUE(set_vectors.size() == sets.size(), kTowerLoss, ": expected vectors of each of ",
                    sets.size(), " sets, got ", set_vectors.size());
  const Candidates columns = arrange_columns(sets, query.sym_size(0),
                                             find_estimator(kTowerLoss, options.estimator).traits);
  const OptionalTensors candidates = columns.tensors();
  const auto distinct = columns.distinct();
  const Tensor cast_target_vector = target_vector.to(query.scalar_type());
  const OptionalTensor shared_set_vectors =
                           joined_vectors(sets, set_vectors, 2, query.scalar_type()),
                       private_set_vectors =
                           joined_vectors(sets, set_vectors, 3, query.scalar_type());
  const auto dtype = opmath_dtype(query.scalar_type());
  check_tower_weight(kTowerLoss, weight, query);
  const Tensor shares = is_defined(weight)
      ? weight->detach().to(dtype)
      : at::ones_symint({query.sym_size(0)}, query.options().dtype(dtype).requires_grad(false));
  // For a mean over an empty batch the weighted sum below would be 0 instead of NaN.
  if (reduction == at::Reduction::None || dtype != query.scalar_type() ||
      (reduction == at::Reduction::Mean && query.sym_size(0) == 0)) {
    static const auto op = find_op<decltype(losses_any)>("xsoftmax::tower_losses");
    const Tensor loss = op.call(query, cast_target_vector, target, shared_set_vectors,
                                private_set_vectors, candidates, distinct, inner) *
        shares;
    return reduction == at::Reduction::None ? loss
        : reduction == at::Reduction::Sum   ? loss.sum()
                                            : loss.sum() / shares.sum();
  }
  const Tensor factor = reduction == at::Reduction::Mean ? shares / shares.sum() : shares;
  static const auto op = find_op<decltype(weighted_any)>("xsoftmax::weighted_tower_loss");
  return op.call(query, cast_target_vector, target, shared_set_vectors, private_set_vectors,
                 candidates, distinct, factor, inner);
}

void check_tower_weight(const char* op, const OptionalTensor& weight, const Tensor& query) {
  if (is_defined(weight)) {
    check::floating(op, "weight", *weight);
    check::dim(op, "weight", *weight, 1);
    check::size(op, "weight", *weight, 0, query.sym_size(0), "the queries");
    check::same_device(op, "weight", *weight, "query", query);
  }
}

TowerArguments::TowerArguments(const Tensor& query, const Tensor& target_vector,
                               const Tensor& target, const OptionalTensor& vectors,
                               const OptionalTensor& private_vectors,
                               const OptionalTensors& columns, at::IntArrayRef distinct,
                               std::string_view text)
    : query(query), target_vector(target_vector), target(target), vectors(vectors),
      private_vectors(private_vectors), candidates(kTowerLoss, columns, distinct),
      options(parse_options<EstimatorOptions>(kTowerLoss, text)),
      estimator(find_estimator(kTowerLoss, options.estimator)) {
  check::dim(kTowerLoss, "query", query, 2);
  check::floating(kTowerLoss, "query", query);
  check_vectors("target_vector", target_vector, 2, query);
  const auto check_candidate_vectors = [&](const char* name, const OptionalTensor& tensor,
                                           const char* ids_name, const OptionalTensor& ids,
                                           int64_t dim) {
    TORCH_CHECK_VALUE(is_defined(tensor) == is_defined(ids), kTowerLoss, ": expected ", name,
                      " and ", ids_name, ", or neither, got one");
    if (is_defined(tensor)) {
      check_vectors(name, *tensor, dim, query);
      check::size(kTowerLoss, name, *tensor, dim - 2, ids->sym_size(-1), ids_name);
    }
  };
  check_candidates(kTowerLoss, "query", query, target, candidates, options);
  check_candidate_vectors("vectors", vectors, "shared_ids", candidates.shared_ids, 2);
  check_candidate_vectors("private_vectors", private_vectors, "private_ids", candidates.private_ids,
                          3);
  TORCH_CHECK_VALUE(estimator.has_kernels(), kTowerLoss,
                    ": expected an estimator of the library, got \"", estimator.name, "\"");
}

void check_tower_grad(const Tensor& grad, const Tensor& query) {
  check::dim(kTowerLoss, "grad", grad, 1);
  check::dtype(kTowerLoss, "grad", grad, opmath_dtype(query.scalar_type()));
  check::size(kTowerLoss, "grad", grad, 0, query.sym_size(0), "the queries");
  check::same_device(kTowerLoss, "grad", grad, "query", query);
}

TowerState tower_loss_forward_reference(const TowerArguments& arguments, const Tensor& grad,
                                        GradientMask wanted) {
  const auto& [query, target_vector, target, vectors, private_vectors, candidates, options,
               estimator] = arguments;
  check_tower_grad(grad, query);
  const auto dtype = opmath_dtype(query.scalar_type());
  const Tensor q = query.to(dtype), t = target_vector.to(dtype);
  const Tensor v = is_defined(vectors) ? vectors->to(dtype) : q.new_empty({0, q.size(1)});
  const Tensor p = is_defined(private_vectors) ? private_vectors->to(dtype)
                                               : q.new_empty({q.size(0), 0, q.size(1)});
  const Tensor scores =
      at::cat({(q * t).sum(1, true), at::bmm(p, q.unsqueeze(2)).squeeze(2), at::mm(q, v.t())}, 1);
  const Tensor losses = estimator_loss(scores, target, candidates, options),
               shares = grad.to(losses.scalar_type());
  // A query of weight 0 may have a loss of NaN.
  const Tensor loss = at::where(shares.eq(0), 0.0, losses * shares);
  const auto none = [&](const OptionalTensor& tensor) {
    std::vector<int64_t> shape =
        is_defined(tensor) ? tensor->sizes().vec() : std::vector<int64_t>{0, q.size(1)};
    shape[0] = 0;
    return at::empty(shape, query.options());
  };
  TowerState result{loss, none(query), none(target_vector), none(vectors), none(private_vectors)};
  if (wanted == GradientMask{}) {
    return result;
  }
  const Tensor gradient = estimator_loss_backward(grad, scores, target, candidates, options);
  const Tensor grad_target_score = gradient.narrow(1, 0, 1),
               grad_private_scores = gradient.narrow(1, 1, p.size(1)),
               grad_shared_scores = gradient.narrow(1, 1 + p.size(1), v.size(0));
  const auto as_query = [&](const Tensor& tensor) { return tensor.to(query.scalar_type()); };
  if (wanted[0]) {
    std::get<1>(result) =
        as_query(grad_target_score * t + at::bmm(grad_private_scores.unsqueeze(1), p).squeeze(1) +
                 at::mm(grad_shared_scores, v));
  }
  if (wanted[1]) {
    std::get<2>(result) = as_query(grad_target_score * q);
  }
  if (wanted[2]) {
    std::get<3>(result) = as_query(at::mm(grad_shared_scores.t(), q));
  }
  if (wanted[3]) {
    std::get<4>(result) = as_query(grad_private_scores.unsqueeze(2) * q.unsqueeze(1));
  }
  return result;
}

XSOFTMAX_OPERATORS(m) {
  const std::string arguments =
      "Tensor query, Tensor target_vector, Tensor target, Tensor? vectors, Tensor? "
      "private_vectors, Tensor?[] candidates, "
      "int[] distinct";
  m.def((std::string(
             "tower_loss(Tensor query, Tensor target_vector, Tensor target, Tensor[] vectors, ") +
         kProposalSchema + ", Tensor? weight=None, str options=\"\") -> Tensor")
            .c_str(),
        tower_loss_op);
  m.def(("tower_losses(" + arguments + ", str options=\"\") -> Tensor").c_str());
  m.def(("weighted_tower_loss(" + arguments + ", Tensor factor, str options=\"\") -> Tensor")
            .c_str());
  m.def(("tower_loss_forward(" + arguments +
         ", Tensor grad, str options, bool[4] wanted) -> "
         "(Tensor loss, Tensor grad_query, Tensor grad_target_vector, Tensor grad_vectors, Tensor "
         "grad_private_vectors)")
            .c_str());
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("tower_losses", losses_any);
  m.impl("weighted_tower_loss", weighted_any);
  m.impl("tower_loss_forward", forward_any);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("tower_loss_forward", forward_meta); }

TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) {
  m.impl("tower_losses", losses_autograd);
  m.impl("weighted_tower_loss", weighted_autograd);
  m.impl("tower_loss_forward", torch::autograd::autogradNotImplementedFallback());
}

// Autocast is not applied: the towers already return its dtypes, and the products here are few.
XSOFTMAX_AUTOCAST(m) {
  disable_autocast(m, {"tower_losses", "weighted_tower_loss", "tower_loss_forward"});
}

} // namespace xsoftmax
