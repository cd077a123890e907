#include "samplers/kernel_sample.h"

#include "core/autocast.h"
#include "core/checks.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/triu_indices.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using Draws = std::tuple<Tensor, Tensor, Tensor>;

Draws kernel_sample_meta(const Tensor& seed, const Tensor& input, XS_KERNEL_INDEX_PARAMS, double scale, c10::SymInt num_samples,
                         const Tensor& target) {
  check_kernel("kernel_sample", input, {XS_KERNEL_INDEX_ARGS}, scale);
  check_draws("kernel_sample", seed, input, num_samples, false, target);
  return empty_private_draws(input, num_samples, target);
}

Tensor kernel_log_prob_meta(const Tensor& input, XS_KERNEL_INDEX_PARAMS, double scale, const Tensor& ids) {
  check_kernel("kernel_log_prob", input, {XS_KERNEL_INDEX_ARGS}, scale);
  check_query_ids("kernel_log_prob", input, ids);
  return at::empty_symint({input.sym_size(0), ids.sym_size(-1)}, ids.options().dtype(at::kFloat));
}

// A device without a kernel of its own gets the CPU's draws.
Draws kernel_sample_elsewhere(const Tensor& seed, const Tensor& input, XS_KERNEL_INDEX_PARAMS, double scale, c10::SymInt num_samples,
                              const Tensor& target) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("xsoftmax::kernel_sample", "").typed<decltype(kernel_sample_meta)>();
  const OptionalTensor directions_on_cpu = given(directions) ? OptionalTensor(directions->cpu()) : std::nullopt;
  const auto [ids, log_count, target_log_count] = op.call(seed.cpu(), input.cpu(), directions_on_cpu, rows.cpu(), sums.cpu(), order.cpu(),
                                                          place.cpu(), scale, num_samples, target.cpu());
  return {ids.to(input.device()), log_count.to(input.device()), target_log_count.to(input.device())};
}

// Products of two elements [n, E (E + 1) / 2] in the order of triu_indices.
Tensor pairs(const Tensor& rows) {
  const Tensor at = at::triu_indices(rows.size(1), rows.size(1), 0, rows.options().dtype(at::kLong));
  return rows.index_select(1, at[0]) * rows.index_select(1, at[1]);
}

// The sum of pairs() over some rows, twice where the elements differ: what multiplies pairs(z) to sum (z.w)^2.
Tensor pair_sums(const Tensor& rows) {
  const Tensor at = at::triu_indices(rows.size(1), rows.size(1), 0, rows.options().dtype(at::kLong));
  const Tensor all = at::mm(rows.t(), rows).view({-1}).index_select(0, at[0] * rows.size(1) + at[1]);
  return all * (at[0].ne(at[1]).to(all.scalar_type()) + 1);
}

// The first row of each leaf and, last, the number of rows [L + 1].
Tensor leaf_edges(const KernelIndex& index) {
  return (at::arange(index.leaves() + 1, index.order.options()) * index.classes()).floor_divide_(index.leaves());
}

// The leaf of each row [A].
Tensor leaf_of_rows(const KernelIndex& index) {
  return at::searchsorted(leaf_edges(index), at::arange(index.classes(), index.order.options()), false, true) - 1;
}

void check_refresh(const Tensor& weight, const OptionalTensor& bias, const KernelIndex& index, const OptionalTensor& step,
                   int64_t refresh_every) {
  constexpr const char* op = "kernel_refresh_";
  check_class_table(op, weight, bias, index.place.sym_size(0));
  check_kernel(op, weight, index, 1.0);
  const Tensor& compared = index.sphere() ? index.rows : *index.directions;
  check::size(op, index.sphere() ? "rows" : "directions", compared, 1, weight.sym_size(1) + (given(bias) ? 1 : 0),
              "the columns of weight, and the bias");
  check_schedule(op, step, refresh_every);
}

void kernel_refresh_(const Tensor& weight, const OptionalTensor& bias, XS_KERNEL_INDEX_PARAMS, const OptionalTensor& step,
                     int64_t refresh_every) {
  const KernelIndex index{XS_KERNEL_INDEX_ARGS};
  check_refresh(weight, bias, index, step, refresh_every);
  const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
  if (!take_step(step, refresh_every)) {
    return;
  }
  check_finite_rows("kernel_refresh_", weight);
  check_finite_bias("kernel_refresh_", bias);
  constexpr int64_t kRows = 1 << 16; // bounds the copies in memory
  for (int64_t begin = 0; begin < index.classes(); begin += kRows) {
    const int64_t size = std::min(kRows, index.classes() - begin);
    const Tensor ids = order.narrow(0, begin, size);
    const OptionalTensor some_bias = given(bias) ? OptionalTensor(bias->index_select(0, ids)) : std::nullopt;
    rows.narrow(0, begin, size).copy_(kernel_rows(weight.index_select(0, ids), some_bias, index));
  }
  const int64_t leaves = index.leaves();
  const Tensor of_leaves = sums.narrow(0, leaves, leaves);
  if (index.sphere()) {
    for (int64_t leaf = 0; leaf < leaves; ++leaf) {
      const int64_t begin = index.leaf_begin(leaf);
      of_leaves.select(0, leaf).copy_(pair_sums(rows.narrow(0, begin, index.leaf_begin(leaf + 1) - begin)));
    }
  } else {
    of_leaves.zero_().index_add_(0, leaf_of_rows(index), rows);
  }
  for (int64_t first = leaves / 2; first >= 1; first /= 2) {
    sums.narrow(0, first, first).copy_(sums.narrow(0, 2 * first, 2 * first).view({first, 2, -1}).sum(1));
  }
}

void kernel_refresh_meta(const Tensor& weight, const OptionalTensor& bias, XS_KERNEL_INDEX_PARAMS, const OptionalTensor& step,
                         int64_t refresh_every) {
  check_refresh(weight, bias, {XS_KERNEL_INDEX_ARGS}, step, refresh_every);
}

} // namespace

void check_kernel(const char* op, const Tensor& input, const KernelIndex& index, double scale) {
  check::dim(op, "input", input, 2);
  check::floating(op, "input", input);
  check::dim(op, "rows", index.rows, 2);
  check::dtype(op, "rows", index.rows, at::kFloat);
  check::dim(op, "sums", index.sums, 2);
  check::dtype(op, "sums", index.sums, at::kFloat);
  check::dim(op, "order", index.order, 1);
  check::int64(op, "order", index.order);
  check::size(op, "order", index.order, 0, index.rows.sym_size(0), "the rows of rows");
  check::dim(op, "place", index.place, 1);
  check::int64(op, "place", index.place);
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"rows", index.rows}, {"sums", index.sums},
                                     {"order", index.order}, {"place", index.place}}) {
    check::same_device(op, name, tensor, "input", input);
  }
  auto width = index.rows.sym_size(1);
  if (index.sphere()) {
    check::size(op, "sums", index.sums, 1, width * (width + 1) / 2, "the pairs of columns of rows");
  } else {
    check::dim(op, "directions", *index.directions, 2);
    check::dtype(op, "directions", *index.directions, at::kFloat);
    check::same_device(op, "directions", *index.directions, "input", input);
    check::size(op, "rows", index.rows, 1, index.directions->sym_size(0) * 2, "twice the directions");
    check::size(op, "sums", index.sums, 1, width, "the columns of rows");
    width = index.directions->sym_size(1);
  }
  TORCH_CHECK_VALUE(input.sym_size(1) == width || input.sym_size(1) + 1 == width, op, ": expected input of width ", width,
                    ", that of the index, or one less, got ", input.sym_size(1));
  const int64_t nodes = index.sums.sym_size(0).guard_int(__FILE__, __LINE__);
  TORCH_CHECK_VALUE(nodes >= 2 && (nodes & (nodes - 1)) == 0, op, ": expected sums of a power of two of nodes, 2 or more, got ", nodes);
  TORCH_CHECK_VALUE(index.rows.sym_size(0) * 2 >= nodes, op, ": expected a row or more in each of ", nodes / 2, " leaves, got ",
                    index.rows.sym_size(0), " rows");
  TORCH_CHECK_VALUE(scale > 0 && std::isfinite(scale), op, ": expected scale as a finite number above 0, got ", scale);
}

Tensor kernel_rows(const Tensor& rows, const OptionalTensor& bias, const KernelIndex& index) {
  if (index.sphere()) {
    return with_bias_column(rows, bias, index.rows.size(1));
  }
  const Tensor wide = with_bias_column(rows, bias, index.directions->size(1));
  const Tensor unit = wide / at::linalg_vector_norm(wide, 2, at::IntArrayRef{1}, true).clamp_min_(std::numeric_limits<float>::min());
  const Tensor angle = at::mm(unit, index.directions->t());
  return at::cat({angle.cos(), angle.sin()}, 1).div_(std::sqrt(double(index.directions->size(0))));
}

Tensor kernel_log_prob_reference(const Tensor& input, XS_KERNEL_INDEX_PARAMS, double scale, const Tensor& ids) {
  const KernelIndex index{XS_KERNEL_INDEX_ARGS};
  check_kernel("kernel_log_prob", input, index, scale);
  check_query_ids("kernel_log_prob", input, ids);
  const int64_t leaves = index.leaves();
  const Tensor x = kernel_rows(input, std::nullopt, index);
  // Rows of all nodes, [1, 2 L]: those of leaves, then the sums of two.
  const Tensor edges = leaf_edges(index), sizes = at::zeros({2 * leaves}, place.options());
  sizes.narrow(0, leaves, leaves).copy_(edges.narrow(0, 1, leaves) - edges.narrow(0, 0, leaves));
  for (int64_t first = leaves / 2; first >= 1; first /= 2) {
    sizes.narrow(0, first, first).copy_(sizes.narrow(0, 2 * first, 2 * first).view({first, 2}).sum(1));
  }
  const Tensor in_rows = at::mm(x, rows.t()).to(at::kDouble);
  const Tensor in_nodes = at::mm(index.sphere() ? pairs(x) : x, sums.t()).to(at::kDouble), size = sizes.to(at::kDouble);
  const Tensor value = index.sphere() ? in_rows.square() * scale + 1 : in_rows.clamp_min(scale);
  const Tensor mass = index.sphere() ? in_nodes.clamp_min(0) * scale + size : at::maximum(in_nodes, size * scale);

  const Tensor of_query = ids.dim() == 2 ? ids : ids.unsqueeze(0).expand({input.size(0), ids.size(0)});
  const Tensor found = place.index_select(0, of_query.reshape({-1})).view(of_query.sizes()), row = found.clamp_min(0);
  const Tensor leaf_of_row = leaf_of_rows(index);
  const Tensor leaf = leaf_of_row.index_select(0, row.reshape({-1})).view(row.sizes());
  const Tensor leaf_sums = at::zeros({input.size(0), leaves}, value.options()).index_add_(1, leaf_of_row, value);
  Tensor log_q = value.gather(1, row).log() - leaf_sums.gather(1, leaf).log();
  for (Tensor node = leaf + leaves; leaves > 1; node = node.floor_divide(2)) {
    const Tensor share = mass.gather(1, node);
    log_q = log_q + share.log() - (share + mass.gather(1, node.bitwise_xor(1))).log();
    if (node.numel() == 0 || node.flatten()[0].lt(4).item<bool>()) {
      break; // all leaves are of one depth
    }
  }
  return log_q.masked_fill(found.lt(0), -std::numeric_limits<double>::infinity()).to(at::kFloat);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("kernel_sample(Tensor seed, Tensor input, " XS_KERNEL_INDEX_SCHEMA ", float scale, SymInt num_samples, Tensor target) -> "
        "(Tensor ids, Tensor log_count, Tensor target_log_count)");
  m.def("kernel_log_prob(Tensor input, " XS_KERNEL_INDEX_SCHEMA ", float scale, Tensor ids) -> Tensor");
  m.def("kernel_refresh_(Tensor weight, Tensor? bias, Tensor? directions, Tensor(a!) rows, Tensor(b!) sums, Tensor order, Tensor place, "
        "Tensor(c!)? step, int refresh_every) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("kernel_sample", kernel_sample_elsewhere);
  m.impl("kernel_log_prob", kernel_log_prob_reference);
  m.impl("kernel_refresh_", kernel_refresh_);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("kernel_sample", kernel_sample_meta);
  m.impl("kernel_log_prob", kernel_log_prob_meta);
  m.impl("kernel_refresh_", kernel_refresh_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) { below_autocast(m, {"kernel_sample", "kernel_log_prob", "kernel_refresh_"}); }
TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) { below_autocast(m, {"kernel_sample", "kernel_log_prob", "kernel_refresh_"}); }

} // namespace xsoftmax
