#include "proposal/midx/midx_sample.h"

#include "cpu/dtypes.h"
#include "cpu/memory.h"
#include "op/optional.h"
#include "cpu/products.h"
#include "op/shape_checks.h"

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

// Returns the log weight of each class (-inf if it is never drawn) and its cell (0 then).
std::tuple<Tensor, Tensor> log_weight_and_cell(const MidxIndex& index, const Tensor& ids) {
  const Tensor flat = ids.reshape({-1});
  const Tensor cell = index.order.size(0) == 0
      ? at::searchsorted(index.start, flat, false, true) - 1 // numbered by slots
      : index.cell.index_select(0, flat).to(at::kLong);
  const Tensor log_weight = is_defined(index.log_weight)
      ? index.log_weight->index_select(0, flat).to(at::kDouble)
      : at::zeros(cell.sizes(), cell.options().dtype(at::kDouble));
  return {log_weight.masked_fill(cell.lt(0), -std::numeric_limits<double>::infinity())
              .view(ids.sizes()),
          cell.clamp_min(0).view(ids.sizes())};
}

// Returns the log probability of each id in the mixture: density of its cell times its weight.
Tensor mixture_log_q(const MidxQueries& queries, const Tensor& ids, const MidxIndex& index,
                     bool rms) {
  const Tensor share = midx_mixture_shares(midx_density_sums(queries, rms), index.mass, rms);
  const Tensor log_density = share.log() - index.mass.log(); // NaN if a cell is empty
  const auto [log_weight, cell] = log_weight_and_cell(index, ids);
  const Tensor value =
      log_density.view({-1}).index_select(0, cell.reshape({-1})).view(ids.sizes()) + log_weight;
  return at::where(log_weight.isneginf(), log_weight, value);
}

Tensor private_log_q(const MidxQueries& queries, const Tensor& ids, const MidxIndex& index) {
  const auto [log_weight, cell] = log_weight_and_cell(index, ids);
  const int64_t codewords = index.codewords1.size(0);
  const Tensor score = queries.score.select(1, 0).gather(1, cell.floor_divide(codewords)) +
      queries.score.select(1, 1).gather(1, cell.remainder(codewords));
  return score + log_weight - queries.log_z.unsqueeze(1);
}

} // namespace

Tensor MidxFamily::log_count_reference(const Tensor& queries, const Tensor& ids,
                                       const MidxIndex& index, const MidxOptions& options) {
  const auto products = midx_queries(options.shared ? nonzero_queries(queries) : queries,
                                     MidxCodewords(queries, index), index.mass);
  const Tensor log_q = options.shared
      ? mixture_log_q(products, ids, index, options.mixture == "rms")
      : private_log_q(products, ids_of_queries(queries, ids), index);
  return (log_q + std::log(double(options.num_samples))).to(at::kFloat);
}

MidxCodewords::MidxCodewords(const Tensor& queries, const MidxIndex& index)
    : dtype(opmath_dtype(queries.scalar_type())), residual(index.residual) {
  const auto cast = [&](const Tensor& codewords) {
    return codewords.scalar_type() == dtype ? codewords : codewords.to(dtype);
  };
  first = cast(index.codewords1);
  second = cast(index.codewords2);
}

namespace {

Tensor products_on_cpu(const Tensor& x, const MidxCodewords& codewords) {
  const int64_t n = x.size(0), k = codewords.first.size(0), width1 = codewords.first.size(1);
  const Tensor products = at::empty({n, 2 * k}, x.options());
  const Tensor second_input = codewords.residual
      ? x
      : strided_view(x, {n, codewords.second.size(1)}, x.strides(), width1 * x.stride(1));
  const Tensor first_input = codewords.residual ? x : strided_view(x, {n, width1}, x.strides());
  multiply_in_parts(strided_view(products, {n, k}, {2 * k, 1}), first_input,
                    transposed(codewords.first));
  multiply_in_parts(strided_view(products, {n, k}, {2 * k, 1}, k), second_input,
                    transposed(codewords.second));
  return products;
}

} // namespace

Tensor midx_products(const Tensor& input, const MidxCodewords& codewords) {
  const auto& [dtype, residual, first, second] = codewords;
  const Tensor x = input.scalar_type() == dtype ? input : input.to(dtype);
  if (check::can_read(x)) {
    return products_on_cpu(x, codewords);
  }
  if (residual) {
    return product(x, at::cat({first, second}).t());
  }
  const int64_t width1 = first.size(1);
  return at::cat({product(x.narrow(1, 0, width1), first.t()),
                  product(x.narrow(1, width1, second.size(1)), second.t())},
                 1);
}

MidxQueries midx_queries(const Tensor& input, const MidxCodewords& codewords, const Tensor& mass) {
  MidxQueries queries;
  queries.score =
      midx_products(input, codewords).to(at::kDouble).view({input.size(0), 2, mass.size(0)});
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
  const Tensor first = queries.exp.select(1, 0) / queries.z.unsqueeze(1),
               second = queries.exp.select(1, 1);
  return rms ? at::mm(first.square().t(), second.square()) : at::mm(first.t(), second);
}

namespace {

// Returns bool [Q]: whether a query has a non-zero element. On CPU the first element nearly always
// decides.
Tensor is_not_zero(const Tensor& queries) {
  if (!queries.is_cpu()) {
    return queries.ne(0).any(1);
  }
  const Tensor rows = queries.contiguous(),
               found = at::empty({queries.size(0)}, queries.options().dtype(at::kBool));
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, rows.scalar_type(), "nonzero_queries", [&] {
        const scalar_t* row = rows.const_data_ptr<scalar_t>();
        for (int64_t q = 0; q < rows.size(0); ++q, row += rows.size(1)) {
          found.mutable_data_ptr<bool>()[q] =
              std::any_of(row, row + rows.size(1), [](scalar_t x) { return x != scalar_t(0); });
        }
      });
  return found;
}

} // namespace

Tensor nonzero_queries(const Tensor& queries) {
  const Tensor rows = is_not_zero(queries).nonzero().squeeze(1);
  return rows.size(0) == 0 || rows.size(0) == queries.size(0) ? queries
                                                              : queries.index_select(0, rows);
}

Tensor midx_mixture_shares(const Tensor& density_sums, const Tensor& mass, bool rms) {
  const Tensor share = (rms ? density_sums.sqrt() : density_sums) * mass;
  return share / share.sum();
}

} // namespace xsoftmax
