// Scores, log-probabilities and entropy of the softmax over all classes (contract: xsoftmax/ops.h).

#include "loss/linear_softmax.h"

#include "op/anomalies.h"
#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/options.h"
#include "cpu/products.h"
#include "op/shape_checks.h"
#include "estimator/logit_transform.h"

#include <xsoftmax/ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

namespace xsoftmax {
namespace {

using at::Tensor;

// Returns F.linear of 16-bit operands with float32 accumulation, without a float32 copy of the
// table.
Tensor wide_scores(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  constexpr int64_t kRows = 4096;
  const auto dtype = opmath_dtype(input.scalar_type());
  const Tensor queries = input.unsqueeze(0).flatten(0, -2);
  const int64_t classes = weight.size(0);
  const Tensor scores = at::empty({queries.size(0), classes}, input.options().dtype(dtype));
  for (int64_t begin = 0; begin < classes; begin += kRows) {
    const int64_t size = std::min(kRows, classes - begin);
    scores.narrow(1, begin, size)
        .copy_(wide_product(queries, weight.narrow(0, begin, size).t(), dtype));
  }
  if (is_defined(bias)) {
    scores.add_(*bias);
  }
  c10::DimVector shape(input.sizes().begin(), input.sizes().end());
  shape.back() = classes;
  return scores.view(shape);
}

Tensor scores_of_all(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  constexpr const char* op = "linear_scores";
  check::strided(op, "input", input);
  TORCH_CHECK_VALUE(input.dim() >= 1, op,
                    ": expected input of shape [*, D], got a tensor without dimensions");
  check::linear(op, input.unsqueeze(0).flatten(0, -2), weight, bias);
  const auto dtype = opmath_dtype(input.scalar_type());
  const bool differentiates = at::GradMode::is_enabled() &&
      (input.requires_grad() || weight.requires_grad() ||
       (is_defined(bias) && bias->requires_grad()));
  if (dtype == input.scalar_type() || differentiates || at::isTensorSubclassLike(input) ||
      at::isTensorSubclassLike(weight)) {
    return at::linear(input.to(dtype), weight.to(dtype),
                      is_defined(bias) ? OptionalTensor(bias->to(dtype)) : bias);
  }
  return wide_scores(input, weight, bias);
}

void check_ids(const char* op, const Tensor& input, const Tensor& weight, const Tensor& ids) {
  check::int64(op, "ids", ids);
  const c10::SymIntArrayRef queries = input.sym_sizes().slice(0, input.dim() - 1);
  const bool has_multiple =
      ids.dim() == input.dim() && ids.sym_sizes().slice(0, queries.size()) == queries;
  TORCH_CHECK_VALUE(
      has_multiple || ids.sym_sizes() == queries, op, ": expected ids of shape ", queries,
      ", input's without its last dimension, or with a number of ids in its place, got ",
      ids.sym_sizes());
  if (check::can_read(ids)) {
    check::class_ids(op, "ids", ids, weight.size(0));
  }
}

Tensor as_queries(const char* op, const Tensor& input, const Tensor& weight) {
  check::strided_tensors(op, {{"input", &input}, {"weight", &weight}});
  check::dim(op, "weight", weight, 2);
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.sym_size(-1) == weight.sym_size(1), op,
                    ": expected input of shape [*, ", weight.sym_size(1), "], got ",
                    input.sym_sizes());
  return input.unsqueeze(0).flatten(0, -2);
}

} // namespace

Tensor linear_log_prob(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& ids, const LogitOptions& options) {
  constexpr const char* op = "linear_log_prob";
  const Tensor queries = as_queries(op, input, weight);
  check_logits(op, options);
  check::finite_queries(op, "input", input);
  if (!is_defined(ids)) {
    return at::log_softmax(transform_logits(linear_scores(input, weight, bias), options), -1);
  }
  check_ids(op, input, weight, *ids);
  const c10::SymInt each = ids->dim() == input.dim() ? ids->sym_size(-1) : c10::SymInt(1);
  const Tensor rows = ids->reshape_symint({queries.sym_size(0), each});
  return std::get<0>(linear_softmax(queries, weight, bias, rows, false, options))
      .reshape_symint(ids->sym_sizes());
}

Tensor linear_entropy(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const LogitOptions& options) {
  constexpr const char* op = "linear_entropy";
  const Tensor queries = as_queries(op, input, weight);
  check_logits(op, options);
  check::finite_queries(op, "input", input);
  const Tensor none =
      at::empty_symint({queries.sym_size(0), c10::SymInt(0)}, input.options().dtype(at::kLong));
  return std::get<2>(linear_softmax(queries, weight, bias, none, true, options))
      .reshape_symint(input.sym_sizes().slice(0, input.dim() - 1));
}

Tensor linear_scores(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  constexpr const char* op = "linear_scores";
  check::strided_tensors(op, {{"input", &input}, {"weight", &weight}});
  check::finite_queries(op, "input", input);
  const auto device = input.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) {
    return scores_of_all(input, weight, bias);
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const CastOperands cast(input, weight, bias);
  return scores_of_all(cast.input, cast.weight, cast.bias);
}

XSOFTMAX_OPERATORS(m) {
  m.def("linear_scores(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", linear_scores);
  m.def(
      "linear_entropy(Tensor input, Tensor weight, Tensor? bias=None, str options=\"\") -> Tensor",
      [](const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
         std::string_view text) {
        return linear_entropy(input, weight, bias,
                              parse_options<LogitOptions>("linear_entropy", text));
      });
  m.def(
      "linear_log_prob(Tensor input, Tensor weight, Tensor? bias=None, Tensor? ids=None, "
      "str options=\"\") -> Tensor",
      [](const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
         const OptionalTensor& ids, std::string_view text) {
        return linear_log_prob(input, weight, bias, ids,
                               parse_options<LogitOptions>("linear_log_prob", text));
      });
}

} // namespace xsoftmax
