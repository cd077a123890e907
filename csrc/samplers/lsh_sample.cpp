#include "samplers/lsh_sample.h"

#include "core/autocast.h"
#include "core/checks.h"
#include "core/options.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

// As if all rows were on one side of all planes.
std::vector<Tensor> lsh_index(std::string_view owner, int64_t num_classes, int64_t dim, const Tensor& exclude, std::string_view text) {
  const LshOptions options = lsh_options(owner, text);
  const Tensor is_drawn = check_constructor(owner, num_classes, dim, 1, exclude), drawn = is_drawn.nonzero().squeeze(1);
  const auto longs = exclude.options();
  const Tensor code = is_drawn.to(at::kInt).sub_(1).unsqueeze(1).repeat({1, options.tables});
  const Tensor start = at::full({options.tables, (int64_t(1) << options.bits) + 1}, drawn.size(0), longs);
  start.select(1, 0).zero_();
  return {at::randn({options.tables * options.bits, dim + options.bias}, longs.dtype(at::kFloat)), code,
          drawn.repeat({options.tables, 1}), start, at::zeros({}, longs)};
}

PrivateDraws lsh_sample_meta(const Tensor& seed, const Tensor& queries, const OptionalTensor& target, at::TensorList tables,
                             std::string_view text) {
  const LshOptions options = lsh_options("lsh_sample", text);
  check_lsh_sample(seed, queries, target, LshIndex("lsh_sample", tables, options));
  return empty_private_draws(seed, queries, target, options.num_samples);
}

Tensor lsh_log_count_meta(const Tensor& queries, const Tensor& ids, at::TensorList tables, std::string_view text) {
  check_lsh_log_count(queries, ids, LshIndex("lsh_log_count", tables, lsh_options("lsh_log_count", text)));
  return at::empty_symint({queries.sym_size(0), ids.sym_size(-1)}, ids.options().dtype(at::kFloat));
}

// A device without a kernel of its own gets the CPU's draws.
PrivateDraws lsh_sample_elsewhere(const Tensor& seed, const Tensor& queries, const OptionalTensor& target, at::TensorList tables,
                                  std::string_view text) {
  return sample_on_cpu("lsh_sample", seed, queries, target, tables, text);
}

Tensor lsh_log_count_elsewhere(const Tensor& queries, const Tensor& ids, at::TensorList tables, std::string_view text) {
  const LshOptions options = lsh_options("lsh_log_count", text);
  return lsh_log_count_reference(queries, ids, LshIndex("lsh_log_count", tables, options), options);
}

void refresh(const char* op, const ClassTable& table, const LshIndex& index) {
  const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
  const auto& [weight, bias] = table;
  check_finite_rows(op, weight);
  check_finite_bias(op, bias);
  const Tensor drawn = index.code.select(1, 0).ge(0).nonzero().squeeze(1);
  TORCH_CHECK_VALUE(drawn.size(0) == index.order.size(1), op, ": expected order with a place for each of ", drawn.size(0),
                    " classes that are drawn, got ", index.order.size(1));
  const int64_t tables = index.code.size(1), buckets = index.start.size(1) - 1;
  constexpr int64_t kRows = 1 << 16; // bounds the products in memory
  for (int64_t begin = 0; begin < weight.size(0); begin += kRows) {
    const int64_t n = std::min(kRows, weight.size(0) - begin);
    const OptionalTensor part = given(bias) ? OptionalTensor(bias->narrow(0, begin, n)) : std::nullopt;
    const Tensor codes = lsh_codes(weight.narrow(0, begin, n), part, index.planes, tables), old = index.code.narrow(0, begin, n);
    old.copy_(at::where(old.lt(0), old, codes.to(at::kInt)));
  }
  for (int64_t t = 0; t < tables; ++t) {
    const auto [sorted, places] = at::sort(index.code.select(1, t).index_select(0, drawn), /*stable=*/true, 0, false);
    index.order.select(0, t).copy_(drawn.index_select(0, places));
    index.start.select(0, t).zero_();
    index.start.select(0, t).narrow(0, 1, buckets).copy_(sorted.to(at::kLong).bincount({}, buckets).cumsum(0));
  }
}

LshIndex check_refresh(const char* op, const Tensor& weight, const OptionalTensor& bias, at::TensorList tables, const LshOptions& options) {
  LshIndex index(op, tables, options);
  check_class_table(op, weight, bias, index.code.sym_size(0), index.dim, options.bias);
  check::same_device(op, "planes", index.planes, "weight", weight);
  return index;
}

Tensor lsh_refresh_(const Tensor& weight, const OptionalTensor& bias, const Tensor& step, at::TensorList others, std::string_view text,
                    std::optional<at::Generator>) {
  const auto tables = with_step(others, step);
  const LshIndex index = check_refresh("lsh_refresh_", weight, bias, tables, lsh_options("lsh_refresh_", text));
  refresh("lsh_refresh_", ClassTable(weight, bias), index);
  index.step.clamp_min_(1);
  return (index.start.diff().max().to(at::kDouble) / double(index.order.size(1))).view({1});
}

void lsh_step_(const Tensor& weight, const OptionalTensor& bias, const Tensor& step, at::TensorList others, std::string_view text,
               std::optional<at::Generator>) {
  const auto tables = with_step(others, step);
  const LshOptions options = lsh_options("lsh_step_", text);
  const LshIndex index = check_refresh("lsh_step_", weight, bias, tables, options);
  if (refresh_is_due(index.step.item<int64_t>(), options.refresh_every)) {
    refresh("lsh_step_", ClassTable(weight, bias), index);
  }
  index.step.add_(1);
}

Tensor lsh_refresh_meta(const Tensor& weight, const OptionalTensor& bias, const Tensor& step, at::TensorList others, std::string_view text,
                        std::optional<at::Generator>) {
  const auto tables = with_step(others, step);
  check_refresh("lsh_refresh_", weight, bias, tables, lsh_options("lsh_refresh_", text));
  return at::empty({1}, weight.options().dtype(at::kDouble).requires_grad(false));
}

void lsh_step_meta(const Tensor& weight, const OptionalTensor& bias, const Tensor& step, at::TensorList others, std::string_view text,
                   std::optional<at::Generator>) {
  const auto tables = with_step(others, step);
  check_refresh("lsh_step_", weight, bias, tables, lsh_options("lsh_step_", text));
}

} // namespace

LshOptions lsh_options(std::string_view op, std::string_view text) {
  const LshOptions options = parse_options<LshOptions>(std::string(op).c_str(), text);
  check_at_least(op, "num_samples", options.num_samples, 0);
  check_at_least(op, "tables", options.tables, 1);
  check_at_least(op, "bits", options.bits, 1);
  TORCH_CHECK_VALUE(options.bits <= kLshMostBits, op, ": expected bits of at most ", kLshMostBits, ", got ", options.bits);
  TORCH_CHECK_VALUE(options.uniform >= 0 && options.uniform <= 1, op, ": expected uniform in [0, 1], got ", options.uniform);
  check_at_least(op, "refresh_every", options.refresh_every, 0);
  check_private(op, options.shared);
  return options;
}

LshIndex::LshIndex(const char* op, at::TensorList index, const LshOptions& options) {
  check_index_size(op, index, 5);
  planes = index[0], code = index[1], order = index[2], start = index[3], step = index[4];
  check::dim(op, "planes", planes, 2);
  check::dtype(op, "planes", planes, at::kFloat);
  check::dim(op, "code", code, 2);
  check::dtype(op, "code", code, at::kInt);
  check::dim(op, "order", order, 2);
  check::int64(op, "order", order);
  check::dim(op, "start", start, 2);
  check::int64(op, "start", start);
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"code", code}, {"order", order}, {"start", start}}) {
    check::same_device(op, name, tensor, "planes", planes);
  }
  check::size(op, "planes", planes, 0, options.tables * options.bits, "tables times bits");
  check::size(op, "code", code, 1, options.tables, "tables");
  check::size(op, "order", order, 0, options.tables, "tables");
  check::size(op, "start", start, 0, options.tables, "tables");
  check::size(op, "start", start, 1, (int64_t(1) << options.bits) + 1, "the codes of a table, and 1");
  dim = planes.sym_size(1) - options.bias;
  check_step(op, step);
}

void check_lsh_sample(const Tensor& seed, const Tensor& queries, const OptionalTensor& target, const LshIndex& index) {
  check_queries("lsh_sample", queries, index.dim);
  check::same_device("lsh_sample", "planes", index.planes, "queries", queries);
  check_draws("lsh_sample", seed, queries, target);
}

void check_lsh_log_count(const Tensor& queries, const Tensor& ids, const LshIndex& index) {
  check_queries("lsh_log_count", queries, index.dim);
  check::same_device("lsh_log_count", "planes", index.planes, "queries", queries);
  check_query_ids("lsh_log_count", queries, ids);
}

Tensor lsh_codes(const Tensor& rows, const OptionalTensor& bias, const Tensor& planes, int64_t tables) {
  const int64_t bits = planes.size(0) / tables;
  const Tensor side = at::mm(with_bias_column(rows, bias, planes.size(1)), planes.t()).gt(0).view({rows.size(0), tables, bits});
  const Tensor place = at::arange(bits, planes.options().dtype(at::kLong));
  return side.to(at::kLong).bitwise_left_shift(place).sum(2);
}

Tensor lsh_log_count_reference(const Tensor& queries, const Tensor& ids, const LshIndex& index, const LshOptions& options) {
  check_lsh_log_count(queries, ids, index);
  const Tensor of_query = ids_of_queries(queries, ids), start = index.start.t();
  const Tensor hash = lsh_codes(queries, std::nullopt, index.planes, options.tables); // [Q, T]
  const Tensor size = (start.gather(0, hash + 1) - start.gather(0, hash)).to(at::kDouble);
  const Tensor share = size.gt(0).to(at::kDouble).div_(size.clamp_min(1)); // [Q, T]
  const Tensor full = size.gt(0).sum(1, true).to(at::kDouble);             // [Q, 1]
  const Tensor codes = index.code.index_select(0, of_query.reshape({-1})).view({of_query.size(0), of_query.size(1), -1});
  const Tensor found = (codes.eq(hash.unsqueeze(1)).to(at::kDouble) * share.unsqueeze(1)).sum(2);
  const double even = 1.0 / double(index.order.size(1));
  const Tensor q = at::where(full.gt(0), found / full.clamp_min(1) * (1 - options.uniform) + options.uniform * even, even);
  const Tensor log_count = q.log() + std::log(double(options.num_samples));
  return log_count.masked_fill(codes.select(2, 0).lt(0), -std::numeric_limits<double>::infinity()).to(at::kFloat);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("lsh_index(str owner, int num_classes, int dim, Tensor exclude, str options) -> Tensor[]");
  m.def("lsh_sample(Tensor seed, Tensor queries, Tensor? target, Tensor[] index, str options) -> "
        "(Tensor ids, Tensor log_count, Tensor target_log_count)");
  m.def("lsh_log_count(Tensor queries, Tensor ids, Tensor[] index, str options) -> Tensor");
  m.def("lsh_refresh_(Tensor weight, Tensor? bias, Tensor(a!) step, Tensor(b!)[] index, str options, Generator? generator=None) -> Tensor");
  m.def("lsh_step_(Tensor weight, Tensor? bias, Tensor(a!) step, Tensor(b!)[] index, str options, Generator? generator=None) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("lsh_index", lsh_index);
  m.impl("lsh_sample", lsh_sample_elsewhere);
  m.impl("lsh_log_count", lsh_log_count_elsewhere);
  m.impl("lsh_refresh_", lsh_refresh_);
  m.impl("lsh_step_", lsh_step_);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("lsh_sample", lsh_sample_meta);
  m.impl("lsh_log_count", lsh_log_count_meta);
  m.impl("lsh_refresh_", lsh_refresh_meta);
  m.impl("lsh_step_", lsh_step_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) { below_autocast(m, {"lsh_sample", "lsh_log_count", "lsh_refresh_", "lsh_step_"}); }
TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) { below_autocast(m, {"lsh_sample", "lsh_log_count", "lsh_refresh_", "lsh_step_"}); }

} // namespace xsoftmax
