#include "op/checks.h"
#include "op/long_work.h"
#include "op/operators.h"
#include "op/optional.h"
#include "retrieval/search_index.h"
#include "proposal/midx/midx_index.h"

#include <xsoftmax/search.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kMidxSearchIndex = "midx_search_index";
constexpr int64_t kRowsOfCell = 256, kRowsOfCodeword = 256, kMaxByDefault = 256, kIterations = 10;

template <typename Function>
auto typed(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

std::pair<Tensor, Tensor> trained(const Tensor& weight, int64_t codewords, const Tensor& seed) {
  static const auto slots =
      typed<Tensor(const Tensor&, int64_t, int64_t)>("xsoftmax::midx_training_slots");
  static const auto codebooks = typed<std::tuple<Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, bool)>(
      "xsoftmax::midx_codebooks");
  const Tensor chosen =
      slots.call(seed, weight.size(0), codewords * kRowsOfCodeword).to(weight.device());
  const Tensor rows = weight.index_select(0, chosen).to(at::kFloat);
  const Tensor empty = at::zeros({codewords, weight.size(1)}, rows.options());
  auto [first, second, inertia1, inertia2] =
      codebooks.call(seed, rows, empty, empty, kIterations, /*warm=*/false);
  return {first, second};
}

/// Checks the arguments and returns the number of codewords per codebook.
int64_t check_midx_search_index(const Tensor& weight, const OptionalTensor& codewords1,
                                const OptionalTensor& codewords2, int64_t codewords,
                                const Tensor& seed) {
  check::dim(kMidxSearchIndex, "weight", weight, 2);
  check::floating(kMidxSearchIndex, "weight", weight);
  TORCH_CHECK_VALUE(is_defined(codewords1) == is_defined(codewords2), kMidxSearchIndex,
                    ": expected both codewords1 and codewords2, or neither");
  TORCH_CHECK_VALUE(codewords >= 0 && codewords <= kMaxCodewords, kMidxSearchIndex,
                    ": expected codewords in [0, ", kMaxCodewords, "], got ", codewords);
  check::dim(kMidxSearchIndex, "seed", seed, 0);
  check::int64(kMidxSearchIndex, "seed", seed);
  if (is_defined(codewords1)) {
    check_codebooks(kMidxSearchIndex, *codewords1, *codewords2, weight.sym_size(1));
    check::same_device(kMidxSearchIndex, "codewords1", *codewords1, "weight", weight);
    return codewords1->size(0);
  }
  const double classes = double(weight.sym_size(0).guard_int(__FILE__, __LINE__));
  return codewords > 0
      ? codewords
      : std::clamp<int64_t>(int64_t(std::ceil(std::sqrt(classes / kRowsOfCell))), 1, kMaxByDefault);
}

std::vector<Tensor> search_index(const Tensor& weight, const OptionalTensor& bias,
                                 const Tensor& cell, int64_t cells, const OptionalTensor& queries) {
  static const auto op =
      typed<std::vector<Tensor>(const Tensor&, const OptionalTensor&, const Tensor&, int64_t,
                                const OptionalTensor&)>("xsoftmax::search_index");
  return op.call(weight, bias, cell, cells, queries);
}

std::vector<Tensor> midx_search_index_meta(const Tensor& weight, const OptionalTensor& bias,
                                           const OptionalTensor& codewords1,
                                           const OptionalTensor& codewords2, int64_t codewords,
                                           const Tensor& seed, const OptionalTensor& queries) {
  const int64_t k = check_midx_search_index(weight, codewords1, codewords2, codewords, seed);
  return search_index(weight, bias,
                      at::empty_symint({weight.sym_size(0)}, weight.options().dtype(at::kInt)),
                      k * k, queries);
}

std::vector<Tensor> build(const Tensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& codewords1, const OptionalTensor& codewords2,
                          int64_t codewords, const Tensor& seed, const OptionalTensor& queries) {
  const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
  const int64_t k = check_midx_search_index(weight, codewords1, codewords2, codewords, seed);
  const LongWork work(kMidxSearchIndex);
  const auto [first, second] =
      is_defined(codewords1) ? std::pair(*codewords1, *codewords2) : trained(weight, k, seed);
  return search_index(weight, bias, std::get<0>(midx_encode(weight, first, second)), k * k,
                      queries);
}

} // namespace

std::vector<Tensor> midx_search_index(const Tensor& weight, const OptionalTensor& bias,
                                      const OptionalTensor& codewords1,
                                      const OptionalTensor& codewords2, int64_t codewords,
                                      const Tensor& seed, const OptionalTensor& queries) {
  static const auto op = typed<decltype(build)>("xsoftmax::midx_search_index");
  return op.call(weight, bias, codewords1, codewords2, codewords, seed, queries);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "midx_search_index(Tensor weight, Tensor? bias, Tensor? codewords1, Tensor? codewords2, int "
      "codewords, Tensor seed, Tensor? queries=None) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("midx_search_index", build); }
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("midx_search_index", midx_search_index_meta); }

} // namespace xsoftmax
