#include "samplers/midx_sample.h"

#include "core/autocast.h"
#include "core/checks.h"
#include "core/dtypes.h"
#include "core/optional.h"
#include "samplers/adaptive.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

void check_mixture_log_prob(const Tensor& input, const MidxIndex& index, const Tensor& ids) {
  constexpr const char* op = "midx_mixture_log_prob";
  check_midx(op, input, index);
  check::dim(op, "ids", ids, 1);
  check::int64(op, "ids", ids);
  check::same_device(op, "ids", ids, "input", input);
}

Tensor midx_log_prob_meta(const Tensor& input, XS_MIDX_INDEX_PARAMS, const Tensor& ids) {
  check_midx_log_prob(input, {XS_MIDX_INDEX_ARGS}, ids);
  return at::empty_symint({input.sym_size(0), ids.sym_size(-1)}, ids.options().dtype(at::kFloat));
}

Tensor midx_mixture_log_prob_meta(const Tensor& input, XS_MIDX_INDEX_PARAMS, bool rms, const Tensor& ids) {
  check_mixture_log_prob(input, {XS_MIDX_INDEX_ARGS}, ids);
  return at::empty_symint(ids.sym_sizes(), ids.options().dtype(at::kFloat));
}

MidxDraws midx_sample_meta(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, c10::SymInt num_samples, bool distinct,
                           const Tensor& target) {
  check_midx_sample("midx_sample", seed, input, {XS_MIDX_INDEX_ARGS}, num_samples, false, distinct, target);
  return empty_private_draws(input, num_samples, target);
}

MidxDraws midx_sample_shared_meta(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, c10::SymInt num_samples, bool distinct,
                                  bool rms, const Tensor& target) {
  check_midx_sample("midx_sample_shared", seed, input, {XS_MIDX_INDEX_ARGS}, num_samples, true, distinct, target);
  const auto floats = target.options().dtype(at::kFloat);
  return {at::empty_symint({num_samples}, target.options()), at::empty_symint({num_samples}, floats),
          at::empty_symint(target.sym_sizes(), floats)};
}

// log of the weight of a class in its cell, -inf where it is never drawn; the cells of those.
std::tuple<Tensor, Tensor> log_weight_and_cell(const MidxIndex& index, const Tensor& ids) {
  const Tensor flat = ids.reshape({-1}), cell = index.cell.index_select(0, flat).to(at::kLong);
  const Tensor log_weight = given(index.log_weight) ? index.log_weight->index_select(0, flat).to(at::kDouble)
                                                    : at::zeros(cell.sizes(), cell.options().dtype(at::kDouble));
  return {log_weight.masked_fill(cell.lt(0), -std::numeric_limits<double>::infinity()).view(ids.sizes()),
          cell.clamp_min(0).view(ids.sizes())};
}

// The composites in ATen calls: any device, and the oracle of the tests.

Tensor midx_mixture_log_prob_reference(const Tensor& input, XS_MIDX_INDEX_PARAMS, bool rms, const Tensor& ids) {
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_mixture_log_prob(input, index, ids);
  const Tensor share = midx_mixture_shares(midx_density_sums(midx_queries(input, MidxCodewords(input, index), mass), rms), mass, rms);
  const Tensor log_density = share.log() - mass.log(); // of a unit of weight; NaN where a cell is empty
  const auto [log_weight_of, cell_of] = log_weight_and_cell(index, ids);
  const Tensor value = log_density.view({-1}).index_select(0, cell_of) + log_weight_of;
  return at::where(log_weight_of.isneginf(), log_weight_of, value).to(at::kFloat);
}

// A device without a kernel of its own gets the CPU's draws.

MidxDraws midx_sample_elsewhere(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, c10::SymInt num_samples, bool distinct,
                                const Tensor& target) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::midx_sample", "").typed<decltype(midx_sample_meta)>();
  const auto [ids, log_count, target_log_count] =
      op.call(seed.cpu(), input.cpu(), XS_MIDX_INDEX_ON_CPU, num_samples, distinct, target.cpu());
  return {ids.to(input.device()), log_count.to(input.device()), target_log_count.to(input.device())};
}

MidxDraws midx_sample_shared_elsewhere(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, c10::SymInt num_samples,
                                       bool distinct, bool rms, const Tensor& target) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::midx_sample_shared", "").typed<decltype(midx_sample_shared_meta)>();
  const auto [ids, log_count, target_log_count] =
      op.call(seed.cpu(), input.cpu(), XS_MIDX_INDEX_ON_CPU, num_samples, distinct, rms, target.cpu());
  return {ids.to(input.device()), log_count.to(input.device()), target_log_count.to(input.device())};
}

} // namespace

void check_midx_log_prob(const Tensor& input, const MidxIndex& index, const Tensor& ids) {
  check_midx("midx_log_prob", input, index);
  check_query_ids("midx_log_prob", input, ids);
}

Tensor midx_log_prob_reference(const Tensor& input, XS_MIDX_INDEX_PARAMS, const Tensor& ids) {
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_midx_log_prob(input, index, ids);
  const auto queries = midx_queries(input, MidxCodewords(input, index), mass);
  const Tensor of_query = ids.dim() == 2 ? ids : ids.unsqueeze(0).expand({input.size(0), ids.size(0)});
  const auto [log_weight_of, cell_of] = log_weight_and_cell(index, of_query);
  const int64_t codewords = codewords1.size(0);
  const Tensor score = queries.score.select(1, 0).gather(1, cell_of.floor_divide(codewords)) +
      queries.score.select(1, 1).gather(1, cell_of.remainder(codewords));
  return (score + log_weight_of - queries.log_z.unsqueeze(1)).to(at::kFloat);
}

void check_midx_sample(const char* op, const Tensor& seed, const Tensor& input, const MidxIndex& index, const c10::SymInt& num_samples,
                       bool shared, bool distinct, const Tensor& target) {
  check_midx(op, input, index);
  check_draws(op, seed, input, num_samples, shared, target, !shared && target.dim() == 2 ? 2 : 1);
  TORCH_CHECK_VALUE(!distinct || num_samples <= index.order.sym_size(0), op, ": expected num_samples of at most ",
                    index.order.sym_size(0), " (the classes, of which each is drawn once), got ", num_samples);
}

MidxCodewords::MidxCodewords(const Tensor& input, const MidxIndex& index)
    : dtype(opmath_dtype(input.scalar_type())),
      residual(index.codewords1.size(1) == input.size(1) && index.codewords2.size(1) == input.size(1)) {
  if (residual) {
    both = at::cat({index.codewords1, index.codewords2}).to(dtype);
  } else {
    first = index.codewords1.to(dtype);
    second = index.codewords2.to(dtype);
  }
}

Tensor midx_products(const Tensor& input, const MidxCodewords& codewords) {
  const Tensor x = input.to(codewords.dtype);
  if (codewords.residual) {
    return at::mm(x, codewords.both.t());
  }
  const int64_t width1 = codewords.first.size(1);
  return at::cat({at::mm(x.narrow(1, 0, width1), codewords.first.t()),
                  at::mm(x.narrow(1, width1, codewords.second.size(1)), codewords.second.t())}, 1);
}

MidxQueries midx_queries(const Tensor& input, const MidxCodewords& codewords, const Tensor& mass) {
  MidxQueries queries;
  queries.score = midx_products(input, codewords).to(at::kDouble).view({input.size(0), 2, mass.size(0)});
  const Tensor best = queries.score.amax(2, true);
  queries.score = at::maximum(queries.score, best - kMidxRange);
  queries.exp = (queries.score - best).exp_();
  const Tensor weight = at::mm(queries.exp.select(1, 1), mass.t()).mul_(queries.exp.select(1, 0));
  queries.z = weight.sum(1);
  queries.log_z = queries.z.log() + best.sum(1).squeeze(1);
  queries.first_probability = weight / queries.z.unsqueeze(1);
  return queries;
}

Tensor midx_density_sums(const MidxQueries& queries, bool rms) {
  if (queries.z.size(0) == 0) {
    const int64_t k = queries.exp.size(2);
    return at::ones({k, k}, queries.exp.options());
  }
  const Tensor first = queries.exp.select(1, 0) / queries.z.unsqueeze(1), second = queries.exp.select(1, 1);
  return rms ? at::mm(first.square().t(), second.square()) : at::mm(first.t(), second);
}

Tensor midx_mixture_shares(const Tensor& density_sums, const Tensor& mass, bool rms) {
  const Tensor share = (rms ? density_sums.sqrt() : density_sums) * mass;
  return share / share.sum();
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("midx_sample(Tensor seed, Tensor input, " XS_MIDX_INDEX_SCHEMA ", SymInt num_samples, bool distinct, Tensor target) -> "
        "(Tensor ids, Tensor log_count, Tensor target_log_count)");
  m.def("midx_sample_shared(Tensor seed, Tensor input, " XS_MIDX_INDEX_SCHEMA ", SymInt num_samples, bool distinct, bool rms, "
        "Tensor target) -> (Tensor ids, Tensor log_count, Tensor target_log_count)");
  m.def("midx_log_prob(Tensor input, " XS_MIDX_INDEX_SCHEMA ", Tensor ids) -> Tensor");
  m.def("midx_mixture_log_prob(Tensor input, " XS_MIDX_INDEX_SCHEMA ", bool rms, Tensor ids) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("midx_sample", midx_sample_elsewhere);
  m.impl("midx_sample_shared", midx_sample_shared_elsewhere);
  m.impl("midx_log_prob", midx_log_prob_reference);
  m.impl("midx_mixture_log_prob", midx_mixture_log_prob_reference);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("midx_sample", midx_sample_meta);
  m.impl("midx_sample_shared", midx_sample_shared_meta);
  m.impl("midx_log_prob", midx_log_prob_meta);
  m.impl("midx_mixture_log_prob", midx_mixture_log_prob_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) {
  below_autocast(m, {"midx_sample", "midx_sample_shared", "midx_log_prob", "midx_mixture_log_prob"});
}
TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) {
  below_autocast(m, {"midx_sample", "midx_sample_shared", "midx_log_prob", "midx_mixture_log_prob"});
}

} // namespace xsoftmax
