#include "loss/exclude_topk.h"

#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using TopK = std::tuple<Tensor, Tensor>;

constexpr const char* kExcludeTopk = "exclude_topk";

void check_exclude_topk(const Tensor& values, const Tensor& ids, const Tensor& exclude,
                        const c10::SymInt& num_classes, const c10::SymInt& k) {
  check::dim(kExcludeTopk, "values", values, 2);
  check::floating(kExcludeTopk, "values", values);
  check::dim(kExcludeTopk, "ids", ids, 2);
  check::int64(kExcludeTopk, "ids", ids);
  check::same_device(kExcludeTopk, "ids", ids, "values", values);
  check::size(kExcludeTopk, "ids", ids, 0, values.sym_size(0), "the rows of values");
  check::size(kExcludeTopk, "ids", ids, 1, values.sym_size(1), "the columns of values");
  check::dim(kExcludeTopk, "exclude", exclude, 2);
  check::int64(kExcludeTopk, "exclude", exclude);
  check::same_device(kExcludeTopk, "exclude", exclude, "values", values);
  check::size(kExcludeTopk, "exclude", exclude, 0, values.sym_size(0), "the rows of values");
  TORCH_CHECK_VALUE(num_classes >= 0, kExcludeTopk, ": expected num_classes of at least 0, got ",
                    num_classes);
  TORCH_CHECK_VALUE(k >= 0 && k <= values.sym_size(1), kExcludeTopk, ": expected k in [0, ",
                    values.sym_size(1), "] (the columns of values), got ", k);
}

TopK exclude_topk_composite(const Tensor& values, const Tensor& ids, const Tensor& exclude,
                            c10::SymInt num_classes, c10::SymInt k) {
  check_exclude_topk(values, ids, exclude, num_classes, k);
  if (exclude.is_cpu()) {
    check::class_ids(kExcludeTopk, "exclude", exclude, num_classes.expect_int(), -1);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  const int64_t kept = k.expect_int();
  if (exclude.size(1) == 0) {
    return {values.narrow(1, 0, kept).clone(), ids.narrow(1, 0, kept).clone()};
  }
  const Tensor sorted = std::get<0>(exclude.sort(1)), found = ids.contiguous();
  const Tensor is_excluded =
      sorted.gather(1, at::searchsorted(sorted, found).clamp_max(exclude.size(1) - 1)).eq(found);
  const auto [last, order] =
      is_excluded.to(at::kByte).sort(/*stable=*/true, /*dim=*/1, /*descending=*/false);
  const Tensor none = last.narrow(1, 0, kept).to(at::kBool), first = order.narrow(1, 0, kept);
  return {values.gather(1, first).masked_fill(none, -std::numeric_limits<double>::infinity()),
          ids.gather(1, first).masked_fill(none, -1)};
}

TopK exclude_topk_meta(const Tensor& values, const Tensor& ids, const Tensor& exclude,
                       c10::SymInt num_classes, c10::SymInt k) {
  check_exclude_topk(values, ids, exclude, num_classes, k);
  const auto made = [&](const Tensor& like) {
    return at::empty_symint({like.sym_size(0), k}, like.options().requires_grad(false));
  };
  return {made(values), made(ids)};
}

TopK exclude_topk_autograd(const Tensor& values, const Tensor& ids, const Tensor& exclude,
                           c10::SymInt num_classes, c10::SymInt k) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return exclude_topk(values, ids, exclude, std::move(num_classes), std::move(k));
}

} // namespace

TopK exclude_topk(const Tensor& values, const Tensor& ids, const Tensor& exclude,
                  c10::SymInt num_classes, c10::SymInt k) {
  static const auto op = find_op<decltype(exclude_topk_composite)>("xsoftmax::exclude_topk");
  return op.call(values, ids, exclude, std::move(num_classes), std::move(k));
}

c10::SymInt with_excluded(const c10::SymInt& k, const Tensor& exclude,
                          const c10::SymInt& num_classes) {
  return exclude.defined() && exclude.dim() > 0 ? (k + exclude.sym_size(-1)).min(num_classes) : k;
}

TopK without_excluded(const char* owner, const Tensor& input, const TopK& found,
                      const Tensor& exclude, const c10::SymInt& num_classes, const c10::SymInt& k) {
  std::vector<c10::SymInt> shape = input.sym_sizes().vec();
  shape.back() = k;
  const auto& [values, ids] = found;
  if (!exclude.defined()) {
    return {values.narrow_symint(1, 0, k).reshape_symint(shape),
            ids.narrow_symint(1, 0, k).reshape_symint(shape)};
  }
  const bool fits = exclude.dim() == input.dim() &&
      exclude.sym_sizes().slice(0, input.dim() - 1) == input.sym_sizes().slice(0, input.dim() - 1);
  TORCH_CHECK_VALUE(fits, owner,
                    ": expected exclude of shape [*, E], input's but for its last dimension, got ",
                    exclude.sym_sizes());
  const Tensor lists = exclude.reshape_symint({values.sym_size(0), exclude.sym_size(-1)});
  const auto [kept, kept_ids] = exclude_topk(values, ids, lists, num_classes, k);
  return {kept.reshape_symint(shape), kept_ids.reshape_symint(shape)};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "exclude_topk(Tensor values, Tensor ids, Tensor exclude, SymInt num_classes, SymInt k) -> "
      "(Tensor values, Tensor ids)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("exclude_topk", exclude_topk_composite);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("exclude_topk", exclude_topk_meta); }
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) { m.impl("exclude_topk", exclude_topk_autograd); }

} // namespace xsoftmax
