#include "retrieval/search_topk.h"

#include "op/anomalies.h"
#include "op/autocast.h"
#include "op/checks.h"
#include "op/composite_block.h"
#include "cpu/dtypes.h"
#include "op/long_work.h"
#include "op/operators.h"
#include "op/options.h"
#include "xsoftmax/search.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kSearchTopk = "search_topk";

TopkResult search_topk_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            at::TensorList index, c10::SymInt k, c10::string_view options) {
  check_search_topk(input, weight, bias, k, {options.data(), options.size()});
  for (const Tensor& tensor : index) {
    check::same_device(kSearchTopk, "index", tensor, "weight", weight);
  }
  const auto as = input.options();
  const c10::SymInt queries = input.sym_size(0);
  return {at::empty_symint({queries, k}, as.dtype(opmath_dtype(input.scalar_type()))),
          at::empty_symint({queries, k}, as.dtype(at::kLong)),
          at::empty_symint({queries}, as.dtype(at::kLong)),
          at::empty_symint({queries}, as.dtype(at::kBool))};
}

TopkResult search_topk_autograd(const Tensor& input, const Tensor& weight,
                                const OptionalTensor& bias, at::TensorList index, c10::SymInt k,
                                c10::string_view options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return search_topk(input, weight, bias, index, std::move(k), options);
}

TopkResult search_topk_autocast(const Tensor& input, const Tensor& weight,
                                const OptionalTensor& bias, at::TensorList index, c10::SymInt k,
                                c10::string_view options) {
  // The query is cast, because the index was built from the table in its dtype.
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  return search_topk(input.to(weight.scalar_type()), weight, bias, index, std::move(k), options);
}

Tensor find_budget(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   at::TensorList index, c10::SymInt k, double recall) {
  constexpr const char* op = "search_budget";
  check_search_topk(input, weight, bias, k, "");
  TORCH_CHECK_VALUE(recall > 0 && recall <= 1, op, ": expected recall in (0, 1], got ", recall);
  const int64_t cells = SearchIndexView(op, index, weight, bias).cells;
  const auto result = [&](int64_t budget) {
    return at::full({}, budget, input.options().dtype(at::kLong).requires_grad(false));
  };
  // Finite queries only: the result of the others does not depend on the budget.
  const Tensor queries = input.index_select(0, input.isfinite().all(1).nonzero().squeeze(1));
  // Sorted for searchsorted, because comparing all pairs ([Q, k, k]) may take gigabytes.
  const Tensor best =
      std::get<0>(std::get<1>(search_topk(queries, weight, bias, index, k, "")).sort(1));
  if (best.numel() == 0) {
    return result(cells);
  }
  const LongWork work(op);
  const auto next = [](int64_t budget) {
    return budget == 1                          ? 2
        : std::has_single_bit(uint64_t(budget)) ? budget / 2 * 3
                                                : budget / 3 * 4;
  };
  for (int64_t budget = 1; budget < cells; budget = next(budget)) {
    work.check();
    const Tensor found = std::get<1>(
        search_topk(queries, weight, bias, index, k, "max_cells=" + std::to_string(budget)));
    const Tensor place = at::searchsorted(best, found).clamp_max(best.size(1) - 1);
    const Tensor share = best.gather(1, place).eq(found).to(at::kDouble).mean(1);
    const double error =
        share.size(0) > 1 ? share.std().item<double>() / std::sqrt(double(share.size(0))) : 0;
    if (share.mean().item<double>() - error >= recall) {
      return result(budget);
    }
  }
  return result(cells);
}

Tensor search_budget_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          at::TensorList, c10::SymInt k, double) {
  check_search_topk(input, weight, bias, k, "");
  return at::empty({}, input.options().dtype(at::kLong));
}

} // namespace

TopkResult search_topk(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       at::TensorList index, c10::SymInt k, std::string_view options) {
  static const auto op = find_op<decltype(search_topk_reference)>("xsoftmax::search_topk");
  return op.call(input, weight, bias, index, std::move(k), options);
}

Tensor search_budget(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     at::TensorList index, c10::SymInt k, double recall) {
  static const auto op = find_op<decltype(find_budget)>("xsoftmax::search_budget");
  return op.call(input, weight, bias, index, std::move(k), recall);
}

SearchOptions check_search_topk(const Tensor& input, const Tensor& weight,
                                const OptionalTensor& bias, const c10::SymInt& k,
                                std::string_view text) {
  check::linear(kSearchTopk, input, weight, bias);
  check::finite_queries(kSearchTopk, "input", input);
  TORCH_CHECK_VALUE(k >= 0 && k <= weight.sym_size(0), kSearchTopk, ": expected k in [0, ",
                    weight.sym_size(0), "] (the rows of weight), got ", k);
  const auto options = parse_options<SearchOptions>(kSearchTopk, text);
  TORCH_CHECK_VALUE(!options.max_cells.has_value() || *options.max_cells >= 1, kSearchTopk,
                    ": expected max_cells of at least 1, got ", options.max_cells.value_or(0));
  return options;
}

TopkResult search_topk_reference(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, at::TensorList index, c10::SymInt k,
                                 c10::string_view options) {
  check_search_topk(input, weight, bias, k, {options.data(), options.size()});
  const int64_t cells = SearchIndexView(kSearchTopk, index, weight, bias).cells,
                queries = input.size(0), classes = weight.size(0), count = k.expect_int();
  const Tensor query = input.to(at::kDouble);
  Tensor values = query.new_empty({queries, 0}),
         ids = at::empty({queries, 0}, query.options().dtype(at::kLong));
  for (int64_t begin = 0; begin < classes; begin += kCompositeBlock) {
    const int64_t size = std::min(kCompositeBlock, classes - begin);
    Tensor scores = at::mm(query, weight.narrow(0, begin, size).to(at::kDouble).t());
    if (is_defined(bias)) {
      scores = scores + bias->narrow(0, begin, size).to(at::kDouble);
    }
    // The best so far come before the block and are sorted, so a stable sort leaves the lower id of
    // equal scores first.
    const Tensor block = at::arange(begin, begin + size, ids.options()).expand({queries, size});
    auto [sorted, order] =
        at::cat({values, scores}, 1).sort(/*stable=*/true, /*dim=*/1, /*descending=*/true);
    const int64_t kept = std::min(count, sorted.size(1));
    values = sorted.narrow(1, 0, kept);
    ids = at::cat({ids, block}, 1).gather(1, order.narrow(1, 0, kept));
  }
  const Tensor finite = query.isfinite().all(1), undefined = finite.logical_not().unsqueeze(1);
  values = values.to(opmath_dtype(input.scalar_type()))
               .masked_fill(undefined, std::numeric_limits<double>::quiet_NaN());
  return {values, at::where(undefined, at::arange(count, ids.options()), ids),
          finite.to(at::kLong) * (count == 0 ? 0 : cells),
          count == 0 ? at::ones_like(finite) : finite};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "search_topk(Tensor input, Tensor weight, Tensor? bias, Tensor[] index, SymInt k, str "
      "options) -> "
      "(Tensor scores, Tensor ids, Tensor cells_read, Tensor certified)");
  m.def(
      "search_budget(Tensor input, Tensor weight, Tensor? bias, Tensor[] index, SymInt k, float "
      "recall) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("search_topk", search_topk_reference);
  m.impl("search_budget", find_budget);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("search_topk", search_topk_meta);
  m.impl("search_budget", search_budget_meta);
}
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) { m.impl("search_topk", search_topk_autograd); }
XSOFTMAX_AUTOCAST(m) { m.impl("search_topk", search_topk_autocast); }

} // namespace xsoftmax
