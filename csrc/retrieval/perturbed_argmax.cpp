#include "retrieval/perturbed_argmax.h"

#include "op/anomalies.h"
#include "op/autocast.h"
#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"
#include "retrieval/search_index.h"

#include <xsoftmax/search.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kPerturbedArgmax = "perturbed_argmax";

PerturbedArgmax perturbed_argmax_meta(const Tensor& input, const Tensor& weight,
                                      const OptionalTensor& bias, at::TensorList,
                                      const Tensor& noise) {
  check_perturbed_argmax(input, weight, bias, noise);
  const Tensor ids = at::empty_symint({input.sym_size(0)}, input.options().dtype(at::kLong));
  return {ids, at::empty_like(ids), at::empty_like(ids, ids.options().dtype(at::kBool))};
}

PerturbedArgmax perturbed_argmax_autograd(const Tensor& input, const Tensor& weight,
                                          const OptionalTensor& bias, at::TensorList index,
                                          const Tensor& noise) {
  const at::AutoDispatchBelowADInplaceOrView guard; // ids have no gradient
  return perturbed_argmax(input, weight, bias, index, noise);
}

PerturbedArgmax perturbed_argmax_autocast(const Tensor& input, const Tensor& weight,
                                          const OptionalTensor& bias, at::TensorList index,
                                          const Tensor& noise) {
  // The query is cast, because the index was built from the table in its dtype.
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  return perturbed_argmax(input.to(weight.scalar_type()), weight, bias, index, noise);
}

} // namespace

PerturbedArgmax perturbed_argmax(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, at::TensorList index,
                                 const Tensor& noise) {
  static const auto op =
      find_op<decltype(perturbed_argmax_reference)>("xsoftmax::perturbed_argmax");
  return op.call(input, weight, bias, index, noise);
}

void check_perturbed_argmax(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const Tensor& noise) {
  check::linear(kPerturbedArgmax, input, weight, bias);
  check::finite_queries(kPerturbedArgmax, "input", input);
  TORCH_CHECK_VALUE(weight.sym_size(0) >= 1, kPerturbedArgmax,
                    ": expected at least one class, got none");
  check::dim(kPerturbedArgmax, "noise", noise, 2);
  check::dtype(kPerturbedArgmax, "noise", noise, at::kFloat);
  check::size(kPerturbedArgmax, "noise", noise, 0, input.sym_size(0), "input's rows");
  check::size(kPerturbedArgmax, "noise", noise, 1, weight.sym_size(0), "weight's rows");
  check::same_device(kPerturbedArgmax, "noise", noise, "weight", weight);
}

PerturbedArgmax perturbed_argmax_reference(const Tensor& input, const Tensor& weight,
                                           const OptionalTensor& bias, at::TensorList index,
                                           const Tensor& noise) {
  check_perturbed_argmax(input, weight, bias, noise);
  const int64_t cells = SearchIndexView(kPerturbedArgmax, index, weight, bias).cells;
  const Tensor query = input.to(at::kDouble), finite = query.isfinite().all(1);
  Tensor best = query.new_full({input.size(0)}, -std::numeric_limits<double>::infinity()),
         ids = at::zeros({input.size(0)}, query.options().dtype(at::kLong));
  constexpr int64_t block_size = 4096;
  for (int64_t begin = 0; begin < weight.size(0); begin += block_size) {
    const int64_t size = std::min(block_size, weight.size(0) - begin);
    Tensor scores = at::mm(query, weight.narrow(0, begin, size).to(at::kDouble).t()) +
        noise.narrow(1, begin, size);
    if (is_defined(bias)) {
      scores = scores + bias->narrow(0, begin, size).to(at::kDouble);
    }
    const auto [value, place] = scores.max(1);
    const Tensor better = value > best;
    best = at::where(better, value, best);
    ids = at::where(better, place + begin, ids);
  }
  return {at::where(finite, ids, at::zeros_like(ids)), finite.to(at::kLong) * cells, finite};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "perturbed_argmax(Tensor input, Tensor weight, Tensor? bias, Tensor[] index, Tensor noise) "
      "-> (Tensor ids, Tensor cells_read, Tensor certified)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("perturbed_argmax", perturbed_argmax_reference);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("perturbed_argmax", perturbed_argmax_meta); }
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) { m.impl("perturbed_argmax", perturbed_argmax_autograd); }
XSOFTMAX_AUTOCAST(m) { m.impl("perturbed_argmax", perturbed_argmax_autocast); }

} // namespace xsoftmax
