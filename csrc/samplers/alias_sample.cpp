#include "samplers/alias_sample.h"

#include "core/checks.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;
using OptionalSize = std::optional<c10::SymInt>;

std::tuple<Tensor, Tensor> alias_table_meta(const Tensor& weights) {
  check_weights("alias_table", weights);
  return {at::empty_like(weights, at::MemoryFormat::Contiguous),
          at::empty_like(weights, weights.options().dtype(at::kLong), at::MemoryFormat::Contiguous)};
}

Tensor alias_sample_meta(const Tensor& seed, const Tensor& threshold, const Tensor& alias, OptionalSize num_queries,
                         c10::SymInt num_samples) {
  check_alias_sample(seed, threshold, alias, num_queries, num_samples);
  return empty_samples(seed, num_queries, num_samples);
}

// A device without kernels of its own gets the CPU's tables and draws.
std::tuple<Tensor, Tensor> alias_table_elsewhere(const Tensor& weights) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::alias_table", "").typed<decltype(alias_table_meta)>();
  const auto [threshold, alias] = op.call(weights.cpu());
  return {threshold.to(weights.device()), alias.to(weights.device())};
}

Tensor alias_sample_elsewhere(const Tensor& seed, const Tensor& threshold, const Tensor& alias, OptionalSize num_queries,
                              c10::SymInt num_samples) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::alias_sample", "").typed<decltype(alias_sample_meta)>();
  return op.call(seed.cpu(), threshold.cpu(), alias.cpu(), num_queries, num_samples).to(seed.device());
}

} // namespace

void check_weights(const char* op, const Tensor& weights) {
  check::dim(op, "weights", weights, 1);
  check::dtype(op, "weights", weights, at::kDouble);
  TORCH_CHECK_VALUE(weights.sym_size(0) >= 1, op, ": expected at least 1 weight, got none");
}

void check_alias_sample(const Tensor& seed, const Tensor& threshold, const Tensor& alias, const OptionalSize& num_queries,
                        const c10::SymInt& num_samples) {
  constexpr const char* op = "alias_sample";
  check_sampling(op, seed, num_queries, num_samples);
  check::dim(op, "threshold", threshold, 1);
  check::dtype(op, "threshold", threshold, at::kDouble);
  TORCH_CHECK_VALUE(threshold.sym_size(0) >= 1, op, ": expected threshold with at least 1 class, got none");
  check::same_device(op, "threshold", threshold, "seed", seed);
  check::dim(op, "alias", alias, 1);
  check::int64(op, "alias", alias);
  check::size(op, "alias", alias, 0, threshold.sym_size(0), "the size of threshold");
  check::same_device(op, "alias", alias, "seed", seed);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("alias_table(Tensor weights) -> (Tensor threshold, Tensor alias)");
  m.def("alias_sample(Tensor seed, Tensor threshold, Tensor alias, SymInt? num_queries, SymInt num_samples) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("alias_table", alias_table_elsewhere);
  m.impl("alias_sample", alias_sample_elsewhere);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("alias_table", alias_table_meta);
  m.impl("alias_sample", alias_sample_meta);
}

} // namespace xsoftmax
