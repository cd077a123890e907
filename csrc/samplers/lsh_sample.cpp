#include "samplers/lsh_sample.h"

#include "core/autocast.h"
#include "core/checks.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using Draws = std::tuple<Tensor, Tensor, Tensor>;

Draws lsh_sample_meta(const Tensor& seed, const Tensor& input, XS_LSH_INDEX_PARAMS, double uniform, c10::SymInt num_samples,
                      const Tensor& target) {
  check_lsh("lsh_sample", input, {XS_LSH_INDEX_ARGS}, uniform);
  check_draws("lsh_sample", seed, input, num_samples, false, target);
  return empty_private_draws(input, num_samples, target);
}

Tensor lsh_log_prob_meta(const Tensor& input, XS_LSH_INDEX_PARAMS, double uniform, const Tensor& ids) {
  check_lsh("lsh_log_prob", input, {XS_LSH_INDEX_ARGS}, uniform);
  check_query_ids("lsh_log_prob", input, ids);
  return at::empty_symint({input.sym_size(0), ids.sym_size(-1)}, ids.options().dtype(at::kFloat));
}

// A device without a kernel of its own gets the CPU's draws.
Draws lsh_sample_elsewhere(const Tensor& seed, const Tensor& input, XS_LSH_INDEX_PARAMS, double uniform, c10::SymInt num_samples,
                           const Tensor& target) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::lsh_sample", "").typed<decltype(lsh_sample_meta)>();
  const auto [ids, log_count, target_log_count] =
      op.call(seed.cpu(), input.cpu(), planes.cpu(), code.cpu(), order.cpu(), start.cpu(), uniform, num_samples, target.cpu());
  return {ids.to(input.device()), log_count.to(input.device()), target_log_count.to(input.device())};
}

void check_refresh(const Tensor& weight, const OptionalTensor& bias, const LshIndex& index, const OptionalTensor& step, int64_t refresh_every) {
  constexpr const char* op = "lsh_refresh_";
  check_class_table(op, weight, bias, index.code.sym_size(0));
  check_lsh(op, weight, index, 0.0);
  check::size(op, "planes", index.planes, 1, weight.sym_size(1) + (given(bias) ? 1 : 0), "the columns of weight, and the bias");
  check_schedule(op, step, refresh_every);
}

void lsh_refresh_(const Tensor& weight, const OptionalTensor& bias, XS_LSH_INDEX_PARAMS, const OptionalTensor& step, int64_t refresh_every) {
  check_refresh(weight, bias, {XS_LSH_INDEX_ARGS}, step, refresh_every);
  const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
  if (!take_step(step, refresh_every)) {
    return;
  }
  check_finite_rows("lsh_refresh_", weight);
  check_finite_bias("lsh_refresh_", bias);
  const int64_t tables = code.size(1), buckets = start.size(1) - 1;
  constexpr int64_t kRows = 1 << 16; // bounds the products in memory
  for (int64_t begin = 0; begin < weight.size(0); begin += kRows) {
    const int64_t n = std::min(kRows, weight.size(0) - begin);
    const OptionalTensor part = given(bias) ? OptionalTensor(bias->narrow(0, begin, n)) : std::nullopt;
    const Tensor codes = lsh_codes(weight.narrow(0, begin, n), part, planes, tables), old = code.narrow(0, begin, n);
    old.copy_(at::where(old.lt(0), old, codes.to(at::kInt)));
  }
  const Tensor drawn = code.select(1, 0).ge(0).nonzero().squeeze(1);
  TORCH_CHECK_VALUE(drawn.size(0) == order.size(1), "lsh_refresh_: expected order with a place for each of ", drawn.size(0),
                    " classes that are drawn, got ", order.size(1));
  for (int64_t t = 0; t < tables; ++t) {
    const auto [sorted, places] = at::sort(code.select(1, t).index_select(0, drawn), /*stable=*/true, 0, false);
    order.select(0, t).copy_(drawn.index_select(0, places));
    start.select(0, t).zero_();
    start.select(0, t).narrow(0, 1, buckets).copy_(sorted.to(at::kLong).bincount({}, buckets).cumsum(0));
  }
}

void lsh_refresh_meta(const Tensor& weight, const OptionalTensor& bias, XS_LSH_INDEX_PARAMS, const OptionalTensor& step, int64_t refresh_every) {
  check_refresh(weight, bias, {XS_LSH_INDEX_ARGS}, step, refresh_every);
}

} // namespace

int64_t check_lsh(const char* op, const Tensor& input, const LshIndex& index, double uniform) {
  check::dim(op, "input", input, 2);
  check::floating(op, "input", input);
  check::dim(op, "planes", index.planes, 2);
  check::dtype(op, "planes", index.planes, at::kFloat);
  check::dim(op, "code", index.code, 2);
  check::dtype(op, "code", index.code, at::kInt);
  check::dim(op, "order", index.order, 2);
  check::int64(op, "order", index.order);
  check::dim(op, "start", index.start, 2);
  check::int64(op, "start", index.start);
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"planes", index.planes}, {"code", index.code},
                                     {"order", index.order}, {"start", index.start}}) {
    check::same_device(op, name, tensor, "input", input);
  }
  const auto tables = index.code.sym_size(1), width = input.sym_size(1);
  check::size(op, "order", index.order, 0, tables, "the tables of code");
  check::size(op, "start", index.start, 0, tables, "the tables of code");
  TORCH_CHECK_VALUE(tables >= 1 && index.planes.sym_size(0) % tables == 0, op, ": expected as many planes for each of ", tables,
                    " tables, got ", index.planes.sym_size(0), " planes");
  TORCH_CHECK_VALUE(index.planes.sym_size(1) == width || index.planes.sym_size(1) == width + 1, op, ": expected input of width ",
                    index.planes.sym_size(1), ", that of planes, or one less, got ", width);
  const auto bits = index.planes.sym_size(0).guard_int(__FILE__, __LINE__) / tables.guard_int(__FILE__, __LINE__);
  TORCH_CHECK_VALUE(bits >= 1 && bits <= kLshMostBits, op, ": expected 1 to ", kLshMostBits, " planes a table, got ", bits);
  check::size(op, "start", index.start, 1, (int64_t(1) << bits) + 1, "the codes of a table, and 1");
  TORCH_CHECK_VALUE(uniform >= 0 && uniform <= 1, op, ": expected uniform in [0, 1], got ", uniform);
  return bits;
}

Tensor lsh_codes(const Tensor& rows, const OptionalTensor& bias, const Tensor& planes, int64_t tables) {
  const int64_t bits = planes.size(0) / tables;
  const Tensor side = at::mm(with_bias_column(rows, bias, planes.size(1)), planes.t()).gt(0).view({rows.size(0), tables, bits});
  const Tensor place = at::arange(bits, planes.options().dtype(at::kLong));
  return side.to(at::kLong).bitwise_left_shift(place).sum(2);
}

Tensor lsh_log_prob_reference(const Tensor& input, XS_LSH_INDEX_PARAMS, double uniform, const Tensor& ids) {
  check_lsh("lsh_log_prob", input, {XS_LSH_INDEX_ARGS}, uniform);
  check_query_ids("lsh_log_prob", input, ids);
  const Tensor of_query = ids.dim() == 2 ? ids : ids.unsqueeze(0).expand({input.size(0), ids.size(0)});
  const Tensor hash = lsh_codes(input, std::nullopt, planes, code.size(1)); // [Q, T]
  const Tensor size = (start.t().gather(0, hash + 1) - start.t().gather(0, hash)).to(at::kDouble);
  const Tensor share = size.gt(0).to(at::kDouble).div_(size.clamp_min(1)); // [Q, T]
  const Tensor full = size.gt(0).sum(1, true).to(at::kDouble);             // [Q, 1]
  const Tensor codes = code.index_select(0, of_query.reshape({-1})).view({of_query.size(0), of_query.size(1), -1});
  const Tensor found = (codes.eq(hash.unsqueeze(1)).to(at::kDouble) * share.unsqueeze(1)).sum(2);
  const double even = 1.0 / double(order.size(1));
  const Tensor q = at::where(full.gt(0), found / full.clamp_min(1) * (1 - uniform) + uniform * even, even);
  return q.log().masked_fill(codes.select(2, 0).lt(0), -std::numeric_limits<double>::infinity()).to(at::kFloat);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("lsh_sample(Tensor seed, Tensor input, " XS_LSH_INDEX_SCHEMA ", float uniform, SymInt num_samples, Tensor target) -> "
        "(Tensor ids, Tensor log_count, Tensor target_log_count)");
  m.def("lsh_log_prob(Tensor input, " XS_LSH_INDEX_SCHEMA ", float uniform, Tensor ids) -> Tensor");
  m.def("lsh_refresh_(Tensor weight, Tensor? bias, Tensor planes, Tensor(a!) code, Tensor(b!) order, Tensor(c!) start, "
        "Tensor(d!)? step, int refresh_every) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("lsh_sample", lsh_sample_elsewhere);
  m.impl("lsh_log_prob", lsh_log_prob_reference);
  m.impl("lsh_refresh_", lsh_refresh_);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("lsh_sample", lsh_sample_meta);
  m.impl("lsh_log_prob", lsh_log_prob_meta);
  m.impl("lsh_refresh_", lsh_refresh_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) { below_autocast(m, {"lsh_sample", "lsh_log_prob", "lsh_refresh_"}); }
TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) { below_autocast(m, {"lsh_sample", "lsh_log_prob", "lsh_refresh_"}); }

} // namespace xsoftmax
