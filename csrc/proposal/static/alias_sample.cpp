#include "proposal/static/alias_sample.h"

#include "op/checks.h"
#include "op/host_state.h"
#include "op/operators.h"
#include "proposal/adaptive_tensors.h"
#include "proposal/static/static_tail.h"
#include "op/find_op.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;
using OptionalSize = std::optional<c10::SymInt>;

Tensor alias_table_meta(const Tensor& weights) {
  check_weights("alias_table", weights);
  return at::empty_symint({weights.sym_size(0), 2}, weights.options().dtype(at::kLong));
}

Tensor alias_sample_meta(const Tensor& seed, const Tensor& bins, OptionalSize num_queries,
                         c10::SymInt num_samples, at::TensorList tail) {
  check_alias_sample(seed, bins, num_queries, num_samples);
  check_tail("alias_sample", tail);
  return empty_samples(seed, num_queries, num_samples);
}

// Devices without kernels use the CPU's tables and draws.
Tensor alias_table_elsewhere(const Tensor& weights) {
  check_weights("alias_table", weights);
  static const auto op = find_op<decltype(alias_table_meta)>("xsoftmax::alias_table");
  return op.call(weights.cpu()).to(weights.device());
}

Tensor alias_sample_elsewhere(const Tensor& seed, const Tensor& bins, OptionalSize num_queries,
                              c10::SymInt num_samples, at::TensorList tail) {
  check_alias_sample(seed, bins, num_queries, num_samples);
  static const auto op = find_op<decltype(alias_sample_meta)>("xsoftmax::alias_sample");
  return op.call(seed.cpu(), bins.cpu(), num_queries, num_samples, to_cpu(tail)).to(seed.device());
}

} // namespace

void check_weights(const char* op, const Tensor& weights) {
  check::dim(op, "weights", weights, 1);
  check::dtype(op, "weights", weights, at::kDouble);
  TORCH_CHECK_VALUE(weights.sym_size(0) >= 1, op, ": expected at least 1 weight, got none");
}

void check_alias_sample(const Tensor& seed, const Tensor& bins, const OptionalSize& num_queries,
                        const c10::SymInt& num_samples) {
  constexpr const char* op = "alias_sample";
  check_sampling(op, seed, num_queries, num_samples);
  check::dim(op, "bins", bins, 2);
  check::int64(op, "bins", bins);
  check::size(op, "bins", bins, 1, 2, "a threshold and a class");
  TORCH_CHECK_VALUE(bins.sym_size(0) >= 1, op, ": expected at least 1 bin, got none");
  check::same_device(op, "bins", bins, "seed", seed);
}

XSOFTMAX_OPERATORS(m) {
  m.def("alias_table(Tensor weights) -> Tensor");
  m.def(
      "alias_sample(Tensor seed, Tensor bins, SymInt? num_queries, SymInt num_samples, Tensor[] "
      "tail) -> Tensor",
      kUsesHostState);
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
