#include "proposal/static/systematic_sample.h"

#include "op/checks.h"
#include "op/host_state.h"
#include "op/operators.h"
#include "proposal/adaptive_tensors.h"
#include "proposal/static/static_tail.h"
#include "proposal/static/alias_sample.h"
#include "op/find_op.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using at::Tensor;
using OptionalSize = std::optional<c10::SymInt>;

std::tuple<Tensor, Tensor> systematic_table_meta(const Tensor& weights) {
  check_weights("systematic_table", weights);
  return {at::empty_like(weights, weights.options().dtype(at::kLong), at::MemoryFormat::Contiguous),
          at::empty_like(weights, at::MemoryFormat::Contiguous)};
}

std::tuple<Tensor, Tensor> systematic_sample_meta(const Tensor& seed, const Tensor& probability,
                                                  const Tensor& order, const Tensor& cumulative,
                                                  OptionalSize num_queries, c10::SymInt num_samples,
                                                  at::TensorList tail) {
  check_systematic_sample(seed, probability, order, cumulative, num_queries, num_samples);
  check_tail("systematic_sample", tail);
  return {empty_samples(seed, num_queries, num_samples), at::empty({}, probability.options())};
}

// Devices without kernels use the CPU's tables and draws.
std::tuple<Tensor, Tensor> systematic_table_elsewhere(const Tensor& weights) {
  check_weights("systematic_table", weights);
  static const auto op = find_op<decltype(systematic_table_meta)>("xsoftmax::systematic_table");
  const auto [order, cumulative] = op.call(weights.cpu());
  return {order.to(weights.device()), cumulative.to(weights.device())};
}

std::tuple<Tensor, Tensor> systematic_sample_elsewhere(
    const Tensor& seed, const Tensor& probability, const Tensor& order, const Tensor& cumulative,
    OptionalSize num_queries, c10::SymInt num_samples, at::TensorList tail) {
  check_systematic_sample(seed, probability, order, cumulative, num_queries, num_samples);
  static const auto op = find_op<decltype(systematic_sample_meta)>("xsoftmax::systematic_sample");
  const auto [ids, log_scale] = op.call(seed.cpu(), probability.cpu(), order.cpu(),
                                        cumulative.cpu(), num_queries, num_samples, to_cpu(tail));
  return {ids.to(seed.device()), log_scale.to(seed.device())};
}

} // namespace

void check_systematic_sample(const Tensor& seed, const Tensor& probability, const Tensor& order,
                             const Tensor& cumulative, const OptionalSize& num_queries,
                             const c10::SymInt& num_samples) {
  constexpr const char* op = "systematic_sample";
  check_sampling(op, seed, num_queries, num_samples);
  check::dim(op, "probability", probability, 1);
  check::dtype(op, "probability", probability, at::kDouble);
  TORCH_CHECK_VALUE(probability.sym_size(0) >= 1, op,
                    ": expected probability with at least 1 class, got none");
  check::same_device(op, "probability", probability, "seed", seed);
  check::dim(op, "order", order, 1);
  check::int64(op, "order", order);
  check::size(op, "order", order, 0, probability.sym_size(0), "the size of probability");
  check::same_device(op, "order", order, "seed", seed);
  check::dim(op, "cumulative", cumulative, 1);
  check::same_dtype(op, "cumulative", cumulative, "probability", probability);
  check::size(op, "cumulative", cumulative, 0, probability.sym_size(0), "the size of probability");
  check::same_device(op, "cumulative", cumulative, "seed", seed);
  TORCH_CHECK_VALUE(num_samples <= probability.sym_size(0), op,
                    ": expected num_samples of at most ", probability.sym_size(0),
                    " (the classes, of which each is drawn once), got ", num_samples);
}

XSOFTMAX_OPERATORS(m) {
  m.def("systematic_table(Tensor weights) -> (Tensor order, Tensor cumulative)");
  m.def(
      "systematic_sample(Tensor seed, Tensor probability, Tensor order, Tensor cumulative, SymInt? "
      "num_queries, "
      "SymInt num_samples, Tensor[] tail) -> (Tensor ids, Tensor log_scale)",
      kUsesHostState);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("systematic_table", systematic_table_elsewhere);
  m.impl("systematic_sample", systematic_sample_elsewhere);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("systematic_table", systematic_table_meta);
  m.impl("systematic_sample", systematic_sample_meta);
}

} // namespace xsoftmax
