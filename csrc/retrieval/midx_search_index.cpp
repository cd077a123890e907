#include "core/checks.h"
#include "core/optional.h"
#include "retrieval/search_index.h"
#include "samplers/midx_index.h"

#include <xsoftmax/search.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kOp = "midx_search_index";
constexpr int64_t kRowsOfCell = 256, kRowsOfCodeword = 256, kMostByDefault = 256, kIterations = 10;

template <typename Function>
auto typed(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

std::pair<Tensor, Tensor> trained(const Tensor& weight, int64_t codewords, const Tensor& seed) {
  static const auto slots = typed<Tensor(const Tensor&, int64_t, int64_t)>("xsoftmax::midx_training_slots");
  static const auto codebooks =
      typed<std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, bool)>("xsoftmax::midx_codebooks");
  const int64_t classes = weight.size(0);
  const Tensor rows = weight.index_select(0, slots.call(seed, classes, codewords * kRowsOfCodeword)).to(at::kFloat);
  const Tensor empty = at::zeros({codewords, weight.size(1)}, rows.options());
  auto [first, second, inertia1, inertia2] = codebooks.call(seed, rows, empty, empty, kIterations, /*warm=*/false);
  return {first, second};
}

} // namespace

std::vector<Tensor> midx_search_index(const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& codewords1, const OptionalTensor& codewords2,
                                      int64_t codewords, const Tensor& seed) {
  static const auto build = typed<std::vector<Tensor>(const Tensor&, const OptionalTensor&, const Tensor&, int64_t)>("xsoftmax::search_index");
  const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
  check::dim(kOp, "weight", weight, 2);
  check::floating(kOp, "weight", weight);
  TORCH_CHECK_VALUE(given(codewords1) == given(codewords2), kOp, ": expected both codewords1 and codewords2, or neither");
  TORCH_CHECK_VALUE(codewords >= 0 && codewords <= kMidxMostCodewords, kOp, ": expected codewords in [0, ", kMidxMostCodewords, "], got ", codewords);
  TORCH_CHECK_TYPE(weight.device().is_cpu(), kOp, ": expected weight on CPU, got ", weight.device());
  Tensor first, second;
  if (given(codewords1)) {
    check_codebooks(kOp, *codewords1, *codewords2, weight.sym_size(1));
    first = *codewords1, second = *codewords2;
  } else {
    check::dim(kOp, "seed", seed, 0);
    check::int64(kOp, "seed", seed);
    if (codewords == 0) {
      codewords = std::clamp<int64_t>(int64_t(std::ceil(std::sqrt(double(weight.size(0)) / kRowsOfCell))), 1, kMostByDefault);
    }
    std::tie(first, second) = trained(weight, codewords, seed);
  }
  const Tensor cell = std::get<0>(midx_encode(weight, first, second));
  return build.call(weight, bias, cell, first.size(0) * first.size(0));
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("midx_search_index(Tensor weight, Tensor? bias, Tensor? codewords1, Tensor? codewords2, int codewords, Tensor seed) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("midx_search_index", midx_search_index); }

} // namespace xsoftmax
