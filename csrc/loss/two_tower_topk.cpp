#include "loss/two_tower_topk.h"

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/shape_checks.h"
#include "loss/exclude_topk.h"
#include "loss/linear_topk.h"
#include "loss/two_tower_checks.h"
#include "xsoftmax/ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;

void check_topk(const char* op, const Tensor& query, const Tensor& item_vectors,
                const Tensor& temperature, const c10::SymInt& k, const OptionalTensor& exclude) {
  check::floating(op, "query", query);
  TORCH_CHECK_VALUE(query.dim() >= 1, op, ": expected query of shape [*, D], got ",
                    query.sym_sizes());
  check::dim(op, "item_vectors", item_vectors, 2);
  check::floating(op, "item_vectors", item_vectors);
  check::same_device(op, "item_vectors", item_vectors, "query", query);
  check::size(op, "item_vectors", item_vectors, 1, query.sym_size(-1), "the width of query");
  check_temperature(op, temperature, query);
  TORCH_CHECK_VALUE(k >= 0 && k <= item_vectors.sym_size(0), op, ": expected k in [0, ",
                    item_vectors.sym_size(0), "] (the rows of item_vectors), got ", k);
  if (is_defined(exclude)) {
    check::int64(op, "exclude", *exclude);
    check::same_device(op, "exclude", *exclude, "query", query);
  }
}

} // namespace

TopK two_tower_topk(const Tensor& query, const Tensor& item_vectors, const Tensor& temperature,
                    c10::SymInt k, const OptionalTensor& exclude, std::string_view text) {
  constexpr const char* op = "two_tower_topk";
  const TwoTowerOptions options = two_tower_options(op, text);
  check_topk(op, query, item_vectors, temperature, k, exclude);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType dtype =
      opmath_dtype(at::promote_types(query.scalar_type(), item_vectors.scalar_type()));
  const c10::SymInt items = item_vectors.sym_size(0);
  const Tensor excluded = is_defined(exclude) ? *exclude : Tensor();
  const Tensor rows = (normalize_vectors(query.to(dtype), options) / temperature)
                          .reshape_symint({-1, query.sym_size(-1)});
  const TopK found = linear_topk(rows, normalize_vectors(item_vectors.to(dtype), options),
                                 std::nullopt, with_excluded(k, excluded, items));
  return without_excluded(op, query, found, excluded, items, k);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "two_tower_topk(Tensor query, Tensor item_vectors, Tensor temperature, SymInt k, Tensor? "
      "exclude=None, str options=\"\") -> "
      "(Tensor values, Tensor ids)",
      two_tower_topk);
}

} // namespace xsoftmax
