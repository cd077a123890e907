#include "loss/linear_topk.h"

#include "op/anomalies.h"
#include "op/autocast.h"
#include "op/checks.h"
#include "op/composite_block.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/optional.h"
#include "op/options.h"
#include "estimator/logit_transform.h"
#include "xsoftmax/ops.h"
#include "op/find_op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kLinearTopk = "linear_topk";

TopK call(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, c10::SymInt k,
          std::string_view text) {
  static const auto op = find_op<decltype(linear_topk_reference)>("xsoftmax::linear_topk");
  return op.call(input, weight, bias, std::move(k), text);
}

TopK linear_topk_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      c10::SymInt k, std::string_view text) {
  check_linear_topk(input, weight, bias, k, text);
  const auto options = input.options();
  return {
      at::empty_symint({input.sym_size(0), k}, options.dtype(opmath_dtype(input.scalar_type()))),
      at::empty_symint({input.sym_size(0), k}, options.dtype(at::kLong))};
}

TopK linear_topk_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          c10::SymInt k, std::string_view text) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call(input, weight, bias, k, text);
}

TopK linear_topk_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          c10::SymInt k, std::string_view text) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const CastOperands cast(input, weight, bias);
  return call(cast.input, cast.weight, cast.bias, k, text);
}

} // namespace

TopK linear_topk(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                 c10::SymInt k, const LogitOptions& options) {
  return call(input, weight, bias, std::move(k), transforms(options) ? text_of(options) : "");
}

LogitOptions check_linear_topk(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const c10::SymInt& k,
                               std::string_view text) {
  check::linear(kLinearTopk, input, weight, bias);
  check::finite_queries(kLinearTopk, "input", input);
  TORCH_CHECK_VALUE(k >= 0, kLinearTopk, ": expected k >= 0, got ", k);
  TORCH_CHECK_VALUE(weight.sym_size(0) >= k, kLinearTopk, ": expected k of at most ",
                    weight.sym_size(0), " (the rows of weight), got ", k);
  const auto options = parse_options<LogitOptions>(kLinearTopk, text);
  check_logits(kLinearTopk, options);
  return options;
}

TopK linear_topk_reference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           c10::SymInt k, std::string_view text) {
  const LogitOptions options = check_linear_topk(input, weight, bias, k, text);
  const int64_t queries = input.size(0), classes = weight.size(0), count = k.expect_int();
  const Tensor query = input.to(opmath_dtype(input.scalar_type()));
  const double infinity = std::numeric_limits<double>::infinity();
  Tensor largest = at::full({queries}, -infinity, query.options()),
         sum = at::zeros({queries}, query.options());
  Tensor values = query.new_empty({queries, 0}),
         indices = at::empty({queries, 0}, query.options().dtype(at::kLong));
  for (int64_t begin = 0; begin < classes; begin += kCompositeBlock) {
    const int64_t size = std::min(kCompositeBlock, classes - begin);
    Tensor logits = at::mm(query, weight.narrow(0, begin, size).to(query.scalar_type()).t());
    if (is_defined(bias)) {
      logits = logits + bias->narrow(0, begin, size).to(query.scalar_type());
    }
    // Ranks by scores, because a softcap may round different scores to equal logits.
    const Tensor scores = logits;
    logits = transform_logits(scores, options);
    const Tensor new_largest = at::maximum(largest, logits.amax(1));
    const Tensor shift = new_largest.masked_fill(new_largest.eq(-infinity), 0);
    sum = sum * (largest - shift).exp() + (logits - shift.unsqueeze(1)).exp().sum(1);
    largest = new_largest;
    // The best so far precede the block and are sorted, so a stable sort puts the lower class first
    // among equals.
    const Tensor ids = at::arange(begin, begin + size, indices.options()).expand({queries, size});
    auto [sorted, order] =
        at::cat({values, scores}, 1).sort(/*stable=*/true, /*dim=*/1, /*descending=*/true);
    const int64_t kept = std::min(count, sorted.size(1));
    values = sorted.narrow(1, 0, kept);
    indices = at::cat({indices, ids}, 1).gather(1, order.narrow(1, 0, kept));
  }
  values = (transform_logits(values, options) - largest.unsqueeze(1)) - sum.log().unsqueeze(1);
  const Tensor undefined = (largest + sum.log()).isnan().unsqueeze(1);
  return {values.masked_fill(undefined, std::numeric_limits<double>::quiet_NaN()),
          at::where(undefined, at::arange(count, indices.options()), indices)};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "linear_topk(Tensor input, Tensor weight, Tensor? bias, SymInt k, str options=\"\") -> "
      "(Tensor values, Tensor indices)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("linear_topk", linear_topk_reference);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("linear_topk", linear_topk_meta); }
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) { m.impl("linear_topk", linear_topk_autograd); }
XSOFTMAX_AUTOCAST(m) { m.impl("linear_topk", linear_topk_autocast); }

} // namespace xsoftmax
