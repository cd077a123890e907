#include "tree/beam_search.h"

#include "op/anomalies.h"
#include "op/autocast.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/optional.h"
#include "table/transform_names.h"
#include "tree/tree_scores.h"
#include "op/find_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kBeamSearch = "beam_search";

BeamSearchResult beam_search_meta(const Tensor& input, const Tensor& weight,
                                  const OptionalTensor& bias, const Tensor& first_child,
                                  const Tensor& node_class, c10::SymInt width,
                                  std::string_view transform) {
  check_beam_search(input, weight, bias, first_child, node_class, width, transform);
  const auto options = input.options();
  return {at::empty_symint({input.sym_size(0), width},
                           options.dtype(opmath_dtype(input.scalar_type()))),
          at::empty_symint({input.sym_size(0), width}, options.dtype(at::kLong))};
}

BeamSearchResult beam_search_autograd(const Tensor& input, const Tensor& weight,
                                      const OptionalTensor& bias, const Tensor& first_child,
                                      const Tensor& node_class, c10::SymInt width,
                                      std::string_view transform) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return beam_search(input, weight, bias, first_child, node_class, width, transform);
}

BeamSearchResult beam_search_autocast(const Tensor& input, const Tensor& weight,
                                      const OptionalTensor& bias, const Tensor& first_child,
                                      const Tensor& node_class, c10::SymInt width,
                                      std::string_view transform) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const OptionalTensor same =
      is_defined(bias) ? OptionalTensor(bias->to(weight.scalar_type())) : bias;
  return beam_search(input.to(weight.scalar_type()), weight, same, first_child, node_class, width,
                     transform);
}

// Returns the scores of all nodes, [Q, V], computed layer by layer.
Tensor node_scores(const Tensor& edges, const Tensor& first_child, const Tensor& parent) {
  const Tensor scores = at::zeros({edges.size(0), edges.size(1) + 1}, edges.options());
  for (int64_t end = 1; end < scores.size(1);) { // end of the layers done so far
    const int64_t next = first_child[end].item<int64_t>();
    const Tensor above = scores.index_select(1, parent.narrow(0, end, next - end));
    scores.narrow(1, end, next - end).copy_(above + edges.narrow(1, end - 1, next - end));
    end = next;
  }
  return scores;
}

} // namespace

BeamSearchResult beam_search(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const Tensor& first_child, const Tensor& node_class, c10::SymInt width,
                             std::string_view transform) {
  static const auto op = find_op<decltype(beam_search_reference)>("xsoftmax::beam_search");
  return op.call(input, weight, bias, first_child, node_class, width, transform);
}

void check_beam_search(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const Tensor& first_child, const Tensor& node_class,
                       const c10::SymInt& width, std::string_view transform) {
  check::linear(kBeamSearch, input, weight, bias);
  check::finite_queries(kBeamSearch, "input", input);
  check_nodes(kBeamSearch, "first_child", first_child, input, weight.sym_size(0) + 2);
  check_nodes(kBeamSearch, "node_class", node_class, input, weight.sym_size(0) + 1);
  TORCH_CHECK_VALUE(width >= 1, kBeamSearch, ": expected width of at least 1, got ", width);
  additive_transform_named(kBeamSearch, transform);
}

BeamSearchResult beam_search_reference(const Tensor& input, const Tensor& weight,
                                       const OptionalTensor& bias, const Tensor& first_child,
                                       const Tensor& node_class, c10::SymInt width,
                                       std::string_view transform) {
  check_beam_search(input, weight, bias, first_child, node_class, width, transform);
  check_all_children(kBeamSearch, first_child);
  const Tensor edges =
      additive_transform_named(kBeamSearch, transform)(all_edge_scores(input, weight, bias));
  const int64_t nodes = node_class.size(0), beam = width.expect_int();
  const Tensor children = first_child.diff(), leaf = children.eq(0),
               parent = parents_of(first_child);
  const Tensor scores = node_scores(edges, first_child, parent),
               order = at::arange(nodes, children.options());
  Tensor in_beam = order.eq(0).expand({input.size(0), nodes}), best;
  for (bool open = true; open;) {
    const Tensor inner = in_beam.logical_and(leaf.logical_not());
    open = inner.any().item<bool>();
    const Tensor candidates = in_beam.logical_and(leaf).logical_or(
        inner.index_select(1, parent).logical_and(order.gt(0)));
    // Candidates first, by descending score. The sorts are stable, so among equal scores lower
    // nodes come first.
    const Tensor by_score =
        std::get<1>(scores.sort(/*stable=*/true, /*dim=*/1, /*descending=*/true));
    const Tensor last = candidates.logical_not().gather(1, by_score).to(at::kByte);
    best =
        by_score.gather(1, std::get<1>(last.sort(/*stable=*/true, /*dim=*/1, /*descending=*/false)))
            .narrow(1, 0, std::min(beam, nodes));
    in_beam = at::zeros_like(candidates).scatter_(1, best, candidates.gather(1, best));
  }
  const Tensor found = in_beam.gather(1, best);
  const Tensor values = at::full({input.size(0), beam}, -kInfinite, scores.options());
  const Tensor classes = at::full({input.size(0), beam}, -1, node_class.options());
  values.narrow(1, 0, best.size(1))
      .copy_(scores.gather(1, best).masked_fill(found.logical_not(), -kInfinite));
  classes.narrow(1, 0, best.size(1))
      .copy_(at::where(found, node_class.index_select(0, best.flatten()).view_as(best), -1));
  return {values, classes};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "beam_search(Tensor input, Tensor weight, Tensor? bias, Tensor first_child, Tensor "
      "node_class, SymInt width, str transform=\"identity\") -> "
      "(Tensor scores, Tensor classes)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("beam_search", beam_search_reference);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { m.impl("beam_search", beam_search_meta); }
TORCH_LIBRARY_IMPL(xsoftmax, Autograd, m) { m.impl("beam_search", beam_search_autograd); }
XSOFTMAX_AUTOCAST(m) { m.impl("beam_search", beam_search_autocast); }

} // namespace xsoftmax
