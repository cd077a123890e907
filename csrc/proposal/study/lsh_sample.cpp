#include "proposal/study/lsh_sample.h"

#include "op/autocast.h"
#include "op/checks.h"
#include "op/long_work.h"
#include "op/operators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {

using at::Tensor;

void LshFamily::check_options(const char* op, const LshOptions& options) {
  check_at_least(op, "tables", options.tables, 1);
  check_at_least(op, "bits", options.bits, 1);
  TORCH_CHECK_VALUE(options.bits <= kMaxLshBits, op, ": expected bits of at most ", kMaxLshBits,
                    ", got ", options.bits);
  TORCH_CHECK_VALUE(options.uniform >= 0 && options.uniform <= 1, op,
                    ": expected uniform in [0, 1], got ", options.uniform);
  check_private(op, options.shared);
}

LshIndex::LshIndex(const char* op, at::TensorList index, const LshOptions& options) {
  check_index_size(op, index, 6);
  planes = index[0], code = index[1], order = index[2], start = index[3];
  places = code, num_classes = code.sym_size(0), recent = index[4], step = index[5];
  check::dim(op, "planes", planes, 2);
  check::dtype(op, "planes", planes, at::kFloat);
  check::dim(op, "code", code, 2);
  check::dtype(op, "code", code, at::kInt);
  check::dim(op, "order", order, 2);
  check::int64(op, "order", order);
  check::dim(op, "start", start, 2);
  check::int64(op, "start", start);
  for (const auto& [name, tensor] :
       {std::pair<const char*, const Tensor&>{"code", code}, {"order", order}, {"start", start}}) {
    check::same_device(op, name, tensor, "planes", planes);
  }
  check::size(op, "planes", planes, 0, options.tables * options.bits, "tables times bits");
  check::size(op, "code", code, 1, options.tables, "tables");
  check::size(op, "order", order, 1, options.tables, "tables");
  check::size(op, "start", start, 0, options.tables, "tables");
  check::size(op, "start", start, 1, (int64_t(1) << options.bits) + 1,
              "the codes of a table, and 1");
  dim = planes.sym_size(1) - options.bias;
  check_recent(op, recent);
  check_step(op, step);
}

namespace {

// Puts all rows in one bucket per table, as if they were on one side of all planes.
std::vector<Tensor> one_bucket(const Tensor& is_drawn, const Tensor& planes,
                               const LshOptions& options) {
  const Tensor drawn = is_drawn.nonzero().squeeze(1);
  const Tensor code = is_drawn.to(at::kInt).sub_(1).unsqueeze(1).repeat({1, options.tables});
  const Tensor start =
      at::full({options.tables, (int64_t(1) << options.bits) + 1}, drawn.size(0), drawn.options());
  start.select(1, 0).zero_();
  return {planes, code, drawn.unsqueeze(1).repeat({1, options.tables}), start};
}

// Computes `order` and `start` from `code`.
void lay_out(const Tensor& code, const Tensor& order, const Tensor& start) {
  const int64_t num_classes = code.size(0), num_drawn = order.size(0);
  const Tensor edges = at::arange(start.size(1), code.options());
  for (int64_t t = 0; t < code.size(1); ++t) {
    long_work::check(LongWork::current());
    // Classes that are never drawn sort first.
    const auto [sorted, places] = at::sort(code.select(1, t), /*stable=*/true, 0, false);
    order.select(1, t).copy_(places.narrow(0, num_classes - num_drawn, num_drawn));
    start.select(0, t).copy_(
        at::searchsorted(sorted.narrow(0, num_classes - num_drawn, num_drawn), edges));
  }
}

} // namespace

std::vector<Tensor> LshFamily::make(const Tensor& is_drawn, int64_t dim,
                                    const LshOptions& options) {
  const auto floats = is_drawn.options().dtype(at::kFloat);
  return one_bucket(
      is_drawn, at::randn({options.tables * options.bits, dim + options.bias}, floats), options);
}

std::vector<Tensor> LshFamily::resized(const Tensor& is_drawn, const OptionalTensor& rows,
                                       const OptionalTensor& bias, const LshIndex& index,
                                       const LshOptions& options) {
  const std::vector<Tensor> tables = one_bucket(is_drawn, index.planes.clone(), options);
  if (is_defined(rows)) {
    const Tensor &code = tables[1], &order = tables[2], &start = tables[3];
    const int64_t added = rows->size(0), kept = code.size(0) - added;
    const OptionalTensor bias_of_new_rows =
        is_defined(bias) ? OptionalTensor(bias->narrow(0, kept, added)) : std::nullopt;
    code.narrow(0, 0, kept).copy_(index.code.narrow(0, 0, kept));
    code.narrow(0, kept, added)
        .copy_(lsh_codes(*rows, bias_of_new_rows, index.planes, options.tables));
    lay_out(code, order, start);
  }
  return tables;
}

std::vector<Tensor> LshFamily::gained(const OptionalTensor& rows, const OptionalTensor& bias,
                                      int64_t added, const LshIndex& index,
                                      const LshOptions& options) {
  const int64_t count = std::max<int64_t>(0, added), before = index.code.size(0);
  const Tensor code = is_defined(rows)
      ? lsh_codes(*rows, bias, index.planes, options.tables).to(at::kInt)
      : at::zeros({count, options.tables}, index.code.options());
  return {{},
          code,
          at::arange(before, before + count, index.order.options())
              .unsqueeze(1)
              .expand({count, options.tables}),
          {}};
}

void LshFamily::exclude_last(LshIndex& index, int64_t count) {
  index.order = index.order.narrow(0, 0, index.order.size(0) - count);
}

Tensor LshFamily::refresh(const char* op, const ClassTable& table, const LshIndex& index,
                          const LshOptions&, const std::optional<at::Generator>&) {
  const auto& [weight, bias] = table;
  check_finite_rows(op, "weight", weight);
  check_finite_bias(op, bias);
  const int64_t num_drawn = index.order.size(0);
  if (index.code.is_cpu()) {
    const int64_t drawn = index.code.select(1, 0).ge(0).sum().item<int64_t>();
    TORCH_CHECK_VALUE(drawn == num_drawn, op, ": expected order with a place for each of ", drawn,
                      " classes that are drawn, got ", num_drawn);
  }
  const int64_t tables = index.code.size(1);
  constexpr int64_t kRows = 1 << 13; // bounds the memory of the products
  LongWork work(op, weight.size(0));
  // Copied to the index only once all of it is computed.
  const Tensor codes = at::empty_like(index.code);
  for (int64_t begin = 0; begin < weight.size(0); begin += kRows) {
    const int64_t n = std::min(kRows, weight.size(0) - begin);
    const OptionalTensor part =
        is_defined(bias) ? OptionalTensor(bias->narrow(0, begin, n)) : std::nullopt;
    const Tensor found = lsh_codes(weight.narrow(0, begin, n), part, index.planes, tables),
                 old = index.code.narrow(0, begin, n);
    codes.narrow(0, begin, n).copy_(at::where(old.lt(0), old, found.to(at::kInt)));
    work.add(n);
    work.check();
  }
  const Tensor order = at::empty_like(index.order), start = at::empty_like(index.start);
  lay_out(codes, order, start);
  index.code.copy_(codes);
  index.order.copy_(order);
  index.start.copy_(start);
  return (index.start.diff().max().to(at::kDouble) / double(num_drawn)).view({1});
}

Tensor lsh_codes(const Tensor& rows, const OptionalTensor& bias, const Tensor& planes,
                 int64_t tables) {
  const int64_t bits = planes.size(0) / tables;
  const Tensor side = at::mm(with_bias_column(rows, bias, planes.size(1)), planes.t())
                          .gt(0)
                          .view({rows.size(0), tables, bits});
  const Tensor place = at::arange(bits, planes.options().dtype(at::kLong));
  return side.to(at::kLong).bitwise_left_shift(place).sum(2);
}

Tensor LshFamily::log_count_reference(const Tensor& queries, const Tensor& ids,
                                      const LshIndex& index, const LshOptions& options) {
  const Tensor query_ids = ids_of_queries(queries, ids), start = index.start.t();
  const Tensor hash = lsh_codes(queries, std::nullopt, index.planes, options.tables); // [Q, T]
  const Tensor size = (start.gather(0, hash + 1) - start.gather(0, hash)).to(at::kDouble);
  const Tensor share = size.gt(0).to(at::kDouble).div_(size.clamp_min(1)); // [Q, T]
  const Tensor full = size.gt(0).sum(1, true).to(at::kDouble);             // [Q, 1]
  const Tensor codes = index.code.index_select(0, query_ids.reshape({-1}))
                           .view({query_ids.size(0), query_ids.size(1), index.code.size(1)});
  const Tensor found = (codes.eq(hash.unsqueeze(1)).to(at::kDouble) * share.unsqueeze(1)).sum(2);
  const double uniform_probability = 1.0 / double(index.order.size(0));
  const Tensor q = at::where(
      full.gt(0),
      found / full.clamp_min(1) * (1 - options.uniform) + options.uniform * uniform_probability,
      uniform_probability);
  const Tensor log_count = q.log() + std::log(double(options.num_samples));
  return log_count.masked_fill(codes.select(2, 0).lt(0), -std::numeric_limits<double>::infinity())
      .to(at::kFloat);
}

XSOFTMAX_OPERATORS(m) { AdaptiveFamily<LshFamily>::define(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  AdaptiveFamily<LshFamily>::on_any_device(m);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { AdaptiveFamily<LshFamily>::on_meta(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { AdaptiveFamily<LshFamily>::on_cpu(m); }
XSOFTMAX_AUTOCAST(m) { AdaptiveFamily<LshFamily>::under_autocast(m); }

} // namespace xsoftmax
