#include "samplers/kernel_sample.h"

#include "core/autocast.h"
#include "core/checks.h"
#include "core/options.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/triu_indices.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

std::vector<Tensor> kernel_index(std::string_view owner, int64_t num_classes, int64_t dim, const Tensor& exclude, std::string_view text) {
  const KernelOptions options = kernel_options(owner, text);
  const Tensor is_drawn = check_constructor(owner, num_classes, dim, 1, exclude), order = is_drawn.nonzero().squeeze(1);
  const auto longs = exclude.options(), floats = longs.dtype(at::kFloat);
  const int64_t classes = order.size(0), width = dim + options.bias, columns = options.sphere() ? width : 2 * options.features;
  const Tensor place = is_drawn.to(at::kLong).sub_(1);
  place.index_copy_(0, order, at::arange(classes, longs));
  // Leaves of the sphere: sums take twice the memory of the rows. Of the features: a leaf costs what five levels do.
  const int64_t leaf_size = options.sphere() ? width : 32;
  int64_t leaves = 1;
  while (leaves <= classes / leaf_size / 2) { // a product with a large dim would wrap round
    leaves *= 2;
  }
  const Tensor directions = options.sphere() ? at::empty({0}, floats)
                                             : at::randn({options.features, width}, floats).mul_(std::sqrt(options.tau));
  return {directions, at::zeros({classes, columns}, floats),
          at::zeros({2 * leaves, options.sphere() ? width * (width + 1) / 2 : columns}, floats), order, place, at::zeros({}, longs)};
}

PrivateDraws kernel_sample_meta(const Tensor& seed, const Tensor& queries, const OptionalTensor& target, at::TensorList tables,
                                std::string_view text) {
  const KernelOptions options = kernel_options("kernel_sample", text);
  check_kernel_sample(seed, queries, target, KernelIndex("kernel_sample", tables, options));
  return empty_private_draws(seed, queries, target, options.num_samples);
}

Tensor kernel_log_count_meta(const Tensor& queries, const Tensor& ids, at::TensorList tables, std::string_view text) {
  check_kernel_log_count(queries, ids, KernelIndex("kernel_log_count", tables, kernel_options("kernel_log_count", text)));
  return at::empty_symint({queries.sym_size(0), ids.sym_size(-1)}, ids.options().dtype(at::kFloat));
}

// A device without a kernel of its own gets the CPU's draws.
PrivateDraws kernel_sample_elsewhere(const Tensor& seed, const Tensor& queries, const OptionalTensor& target, at::TensorList tables,
                                     std::string_view text) {
  return sample_on_cpu("kernel_sample", seed, queries, target, tables, text);
}

Tensor kernel_log_count_elsewhere(const Tensor& queries, const Tensor& ids, at::TensorList tables, std::string_view text) {
  const KernelOptions options = kernel_options("kernel_log_count", text);
  return kernel_log_count_reference(queries, ids, KernelIndex("kernel_log_count", tables, options), options);
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

void refresh(const char* op, const ClassTable& table, const KernelIndex& index) {
  const at::AutoDispatchBelowADInplaceOrView guard; // an index has no gradient
  const auto& [weight, bias] = table;
  check_finite_rows(op, weight);
  check_finite_bias(op, bias);
  constexpr int64_t kRows = 1 << 16; // bounds the copies in memory
  for (int64_t begin = 0; begin < index.classes(); begin += kRows) {
    const int64_t size = std::min(kRows, index.classes() - begin);
    const Tensor ids = index.order.narrow(0, begin, size);
    const OptionalTensor some_bias = given(bias) ? OptionalTensor(bias->index_select(0, ids)) : std::nullopt;
    index.rows.narrow(0, begin, size).copy_(kernel_rows(weight.index_select(0, ids), some_bias, index));
  }
  const int64_t leaves = index.leaves();
  const Tensor of_leaves = index.sums.narrow(0, leaves, leaves);
  if (index.sphere()) {
    for (int64_t leaf = 0; leaf < leaves; ++leaf) {
      const int64_t begin = index.leaf_begin(leaf);
      of_leaves.select(0, leaf).copy_(pair_sums(index.rows.narrow(0, begin, index.leaf_begin(leaf + 1) - begin)));
    }
  } else {
    of_leaves.zero_().index_add_(0, leaf_of_rows(index), index.rows);
  }
  for (int64_t first = leaves / 2; first >= 1; first /= 2) {
    index.sums.narrow(0, first, first).copy_(index.sums.narrow(0, 2 * first, 2 * first).view({first, 2, -1}).sum(1));
  }
}

KernelIndex check_refresh(const char* op, const Tensor& weight, const OptionalTensor& bias, at::TensorList tables,
                          const KernelOptions& options) {
  KernelIndex index(op, tables, options);
  check_class_table(op, weight, bias, index.place.sym_size(0), index.dim, options.bias);
  check::same_device(op, "rows", index.rows, "weight", weight);
  return index;
}

Tensor kernel_refresh_(const Tensor& weight, const OptionalTensor& bias, const Tensor& step, at::TensorList others, std::string_view text,
                       std::optional<at::Generator>) {
  const auto tables = with_step(others, step);
  const KernelIndex index = check_refresh("kernel_refresh_", weight, bias, tables, kernel_options("kernel_refresh_", text));
  refresh("kernel_refresh_", ClassTable(weight, bias), index);
  index.step.clamp_min_(1);
  return at::empty({0}, weight.options().dtype(at::kDouble));
}

void kernel_step_(const Tensor& weight, const OptionalTensor& bias, const Tensor& step, at::TensorList others, std::string_view text,
                  std::optional<at::Generator>) {
  const auto tables = with_step(others, step);
  const KernelOptions options = kernel_options("kernel_step_", text);
  const KernelIndex index = check_refresh("kernel_step_", weight, bias, tables, options);
  if (refresh_is_due(index.step.item<int64_t>(), options.refresh_every)) {
    refresh("kernel_step_", ClassTable(weight, bias), index);
  }
  index.step.add_(1);
}

Tensor kernel_refresh_meta(const Tensor& weight, const OptionalTensor& bias, const Tensor& step, at::TensorList others, std::string_view text,
                           std::optional<at::Generator>) {
  const auto tables = with_step(others, step);
  check_refresh("kernel_refresh_", weight, bias, tables, kernel_options("kernel_refresh_", text));
  return at::empty({0}, weight.options().dtype(at::kDouble).requires_grad(false));
}

void kernel_step_meta(const Tensor& weight, const OptionalTensor& bias, const Tensor& step, at::TensorList others, std::string_view text,
                      std::optional<at::Generator>) {
  const auto tables = with_step(others, step);
  check_refresh("kernel_step_", weight, bias, tables, kernel_options("kernel_step_", text));
}

} // namespace

KernelOptions kernel_options(std::string_view op, std::string_view text) {
  const KernelOptions options = parse_options<KernelOptions>(std::string(op).c_str(), text);
  const auto positive = [&](const char* argument, double value) {
    TORCH_CHECK_VALUE(value > 0 && std::isfinite(value), op, ": expected ", argument, " as a finite number above 0, got ", value);
  };
  TORCH_CHECK_VALUE(options.sphere() || options.kernel == "rff", op, ": expected kernel as 'sphere' or 'rff', got '", options.kernel, "'");
  check_at_least(op, "num_samples", options.num_samples, 0);
  positive("alpha", options.alpha);
  check_at_least(op, "features", options.features, 1);
  positive("tau", options.tau);
  positive("floor", options.floor);
  check_at_least(op, "refresh_every", options.refresh_every, 0);
  check_private(op, options.shared);
  return options;
}

KernelIndex::KernelIndex(const char* op, at::TensorList index, const KernelOptions& options) {
  check_index_size(op, index, 6);
  directions = options.sphere() ? std::nullopt : OptionalTensor(index[0]);
  rows = index[1], sums = index[2], order = index[3], place = index[4], step = index[5];
  check::dim(op, "rows", rows, 2);
  check::dtype(op, "rows", rows, at::kFloat);
  check::dim(op, "sums", sums, 2);
  check::dtype(op, "sums", sums, at::kFloat);
  check::dim(op, "order", order, 1);
  check::int64(op, "order", order);
  check::size(op, "order", order, 0, rows.sym_size(0), "the rows of rows");
  check::dim(op, "place", place, 1);
  check::int64(op, "place", place);
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"sums", sums}, {"order", order}, {"place", place}}) {
    check::same_device(op, name, tensor, "rows", rows);
  }
  auto width = rows.sym_size(1);
  if (options.sphere()) {
    check::size(op, "sums", sums, 1, width * (width + 1) / 2, "the pairs of columns of rows");
  } else {
    check::dim(op, "directions", *directions, 2);
    check::dtype(op, "directions", *directions, at::kFloat);
    check::same_device(op, "directions", *directions, "rows", rows);
    check::size(op, "rows", rows, 1, directions->sym_size(0) * 2, "twice the directions");
    check::size(op, "sums", sums, 1, width, "the columns of rows");
    width = directions->sym_size(1);
  }
  dim = width - options.bias;
  const int64_t nodes = sums.sym_size(0).guard_int(__FILE__, __LINE__);
  TORCH_CHECK_VALUE(nodes >= 2 && (nodes & (nodes - 1)) == 0, op, ": expected sums of a power of two of nodes, 2 or more, got ", nodes);
  TORCH_CHECK_VALUE(rows.sym_size(0) * 2 >= nodes, op, ": expected a row or more in each of ", nodes / 2, " leaves, got ",
                    rows.sym_size(0), " rows");
  check_step(op, step);
}

void check_kernel_sample(const Tensor& seed, const Tensor& queries, const OptionalTensor& target, const KernelIndex& index) {
  check_queries("kernel_sample", queries, index.dim);
  check::same_device("kernel_sample", "rows", index.rows, "queries", queries);
  check_draws("kernel_sample", seed, queries, target);
}

void check_kernel_log_count(const Tensor& queries, const Tensor& ids, const KernelIndex& index) {
  check_queries("kernel_log_count", queries, index.dim);
  check::same_device("kernel_log_count", "rows", index.rows, "queries", queries);
  check_query_ids("kernel_log_count", queries, ids);
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

Tensor kernel_log_count_reference(const Tensor& queries, const Tensor& ids, const KernelIndex& index, const KernelOptions& options) {
  check_kernel_log_count(queries, ids, index);
  const double scale = options.scale();
  const int64_t leaves = index.leaves();
  const Tensor x = kernel_rows(queries, std::nullopt, index);
  // Rows of all nodes, [1, 2 L]: those of leaves, then the sums of two.
  const Tensor edges = leaf_edges(index), sizes = at::zeros({2 * leaves}, index.place.options());
  sizes.narrow(0, leaves, leaves).copy_(edges.narrow(0, 1, leaves) - edges.narrow(0, 0, leaves));
  for (int64_t first = leaves / 2; first >= 1; first /= 2) {
    sizes.narrow(0, first, first).copy_(sizes.narrow(0, 2 * first, 2 * first).view({first, 2}).sum(1));
  }
  const Tensor in_rows = at::mm(x, index.rows.t()).to(at::kDouble);
  const Tensor in_nodes = at::mm(index.sphere() ? pairs(x) : x, index.sums.t()).to(at::kDouble), size = sizes.to(at::kDouble);
  const Tensor value = index.sphere() ? in_rows.square() * scale + 1 : in_rows.clamp_min(scale);
  const Tensor mass = index.sphere() ? in_nodes.clamp_min(0) * scale + size : at::maximum(in_nodes, size * scale);

  const Tensor of_query = ids_of_queries(queries, ids);
  const Tensor found = index.place.index_select(0, of_query.reshape({-1})).view(of_query.sizes()), row = found.clamp_min(0);
  const Tensor leaf_of_row = leaf_of_rows(index);
  const Tensor leaf = leaf_of_row.index_select(0, row.reshape({-1})).view(row.sizes());
  const Tensor leaf_sums = at::zeros({queries.size(0), leaves}, value.options()).index_add_(1, leaf_of_row, value);
  Tensor log_q = value.gather(1, row).log() - leaf_sums.gather(1, leaf).log();
  for (Tensor node = leaf + leaves; leaves > 1; node = node.floor_divide(2)) {
    const Tensor share = mass.gather(1, node);
    log_q = log_q + share.log() - (share + mass.gather(1, node.bitwise_xor(1))).log();
    if (node.numel() == 0 || node.flatten()[0].lt(4).item<bool>()) {
      break; // all leaves are of one depth
    }
  }
  log_q = log_q + std::log(double(options.num_samples));
  return log_q.masked_fill(found.lt(0), -std::numeric_limits<double>::infinity()).to(at::kFloat);
}

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("kernel_index(str owner, int num_classes, int dim, Tensor exclude, str options) -> Tensor[]");
  m.def("kernel_sample(Tensor seed, Tensor queries, Tensor? target, Tensor[] index, str options) -> "
        "(Tensor ids, Tensor log_count, Tensor target_log_count)");
  m.def("kernel_log_count(Tensor queries, Tensor ids, Tensor[] index, str options) -> Tensor");
  m.def("kernel_refresh_(Tensor weight, Tensor? bias, Tensor(a!) step, Tensor(b!)[] index, str options, Generator? generator=None) -> Tensor");
  m.def("kernel_step_(Tensor weight, Tensor? bias, Tensor(a!) step, Tensor(b!)[] index, str options, Generator? generator=None) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("kernel_index", kernel_index);
  m.impl("kernel_sample", kernel_sample_elsewhere);
  m.impl("kernel_log_count", kernel_log_count_elsewhere);
  m.impl("kernel_refresh_", kernel_refresh_);
  m.impl("kernel_step_", kernel_step_);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("kernel_sample", kernel_sample_meta);
  m.impl("kernel_log_count", kernel_log_count_meta);
  m.impl("kernel_refresh_", kernel_refresh_meta);
  m.impl("kernel_step_", kernel_step_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) { below_autocast(m, {"kernel_sample", "kernel_log_count", "kernel_refresh_", "kernel_step_"}); }
TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) { below_autocast(m, {"kernel_sample", "kernel_log_count", "kernel_refresh_", "kernel_step_"}); }

} // namespace xsoftmax
