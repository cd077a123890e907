#include "proposal/study/kernel_sample.h"

#include "op/autocast.h"
#include "op/checks.h"
#include "op/long_work.h"
#include "op/operators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
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

// The number of elements of the leaves that are summed in one batch.
constexpr int64_t kLeafElements = int64_t(1) << 22;

// Returns the sum of kernel_pairs() over the rows of each leaf, rows [L, R, E], with pairs of
// different elements doubled. The product with kernel_pairs(z) is then the sum of (z.w)^2.
Tensor pair_sums(const Tensor& rows) {
  const int64_t width = rows.size(2);
  const Tensor at = at::triu_indices(width, width, 0, rows.options().dtype(at::kLong));
  const Tensor all = at::bmm(rows.transpose(1, 2), rows)
                         .view({rows.size(0), width * width})
                         .index_select(1, at[0] * width + at[1]);
  return all * (at[0].ne(at[1]).to(all.scalar_type()) + 1);
}

// Returns the first row of each leaf, followed by the number of rows [L + 1].
Tensor leaf_edges(const KernelIndex& index) {
  return (at::arange(index.leaves() + 1, index.order.options()) * index.classes())
      .floor_divide_(index.leaves());
}

// Returns the rows of leaves first .. first + count - 1, [count, R, E], padded with zeros.
Tensor rows_of_leaves(const KernelIndex& index, int64_t first, int64_t count) {
  const Tensor edges = leaf_edges(index).narrow(0, first, count + 1),
               begin = edges.narrow(0, 0, count).unsqueeze(1);
  const Tensor row =
      begin + at::arange((index.classes() + index.leaves() - 1) / index.leaves(), edges.options());
  const Tensor rows = index.rows.index_select(0, row.clamp_max(index.classes() - 1).view({-1}))
                          .view({count, row.size(1), -1});
  return rows.masked_fill(row.ge(edges.narrow(0, 1, count).unsqueeze(1)).unsqueeze(2), 0.0);
}

// Returns the leaf of each row [A].
Tensor leaf_of_rows(const KernelIndex& index) {
  return at::searchsorted(leaf_edges(index), at::arange(index.classes(), index.order.options()),
                          false, true) -
      1;
}

} // namespace

void KernelFamily::check_options(const char* op, const KernelOptions& options) {
  const auto positive = [&](const char* argument, double value) {
    TORCH_CHECK_VALUE(value > 0 && std::isfinite(value), op, ": expected ", argument,
                      " as a finite number above 0, got ", value);
  };
  TORCH_CHECK_VALUE(options.sphere() || options.kernel == "rff", op,
                    ": expected kernel as 'sphere' or 'rff', got '", options.kernel, "'");
  positive("alpha", options.alpha);
  check_at_least(op, "features", options.features, 1);
  positive("tau", options.tau);
  positive("floor", options.floor);
  check_private(op, options.shared);
}

KernelIndex::KernelIndex(const char* op, at::TensorList index, const KernelOptions& options) {
  check_index_size(op, index, 7);
  directions = options.sphere() ? std::nullopt : OptionalTensor(index[0]);
  rows = index[1], sums = index[2], order = index[3], place = index[4];
  places = place, num_classes = place.sym_size(0), recent = index[5], step = index[6];
  check::dim(op, "rows", rows, 2);
  check::dtype(op, "rows", rows, at::kFloat);
  check::dim(op, "sums", sums, 2);
  check::dtype(op, "sums", sums, at::kFloat);
  check::dim(op, "order", order, 1);
  check::int64(op, "order", order);
  check::size(op, "order", order, 0, rows.sym_size(0), "the rows of rows");
  check::dim(op, "place", place, 1);
  check::int64(op, "place", place);
  for (const auto& [name, tensor] :
       {std::pair<const char*, const Tensor&>{"sums", sums}, {"order", order}, {"place", place}}) {
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
  TORCH_CHECK_VALUE(nodes >= 2 && (nodes & (nodes - 1)) == 0, op,
                    ": expected sums of a power of two of nodes, 2 or more, got ", nodes);
  TORCH_CHECK_VALUE(rows.sym_size(0) * 2 >= nodes, op, ": expected a row or more in each of ",
                    nodes / 2, " leaves, got ", rows.sym_size(0), " rows");
  check_recent(op, recent);
  check_step(op, step);
}

namespace {

// Returns the number of leaves of a tree over that many classes. Sphere: sums take twice the memory
// of the rows. Random Fourier features: a leaf costs as much as five levels.
int64_t leaves_of(int64_t classes, int64_t dim, const KernelOptions& options) {
  const int64_t leaf_size = options.sphere() ? dim + options.bias : 32;
  int64_t leaves = 1;
  // Dividing cannot overflow, unlike a product with a large dim.
  while (leaves <= classes / leaf_size / 2) {
    leaves *= 2;
  }
  return leaves;
}

// Builds the index as if all rows were 0.
std::vector<Tensor> zero_tables(const Tensor& is_drawn, const Tensor& directions, int64_t dim,
                                const KernelOptions& options) {
  const Tensor order = is_drawn.nonzero().squeeze(1);
  const auto longs = order.options(), floats = longs.dtype(at::kFloat);
  const int64_t classes = order.size(0), width = dim + options.bias,
                columns = options.sphere() ? width : 2 * options.features;
  const Tensor place = is_drawn.to(at::kLong).sub_(1);
  place.index_copy_(0, order, at::arange(classes, longs));
  const int64_t leaves = leaves_of(classes, dim, options);
  return {directions, at::zeros({classes, columns}, floats),
          at::zeros({2 * leaves, options.sphere() ? width * (width + 1) / 2 : columns}, floats),
          order, place};
}

// Computes `sums` from `rows`. Calls made(classes) after each part.
template <typename Made>
void sum_up(const KernelIndex& index, const Made& made) {
  const int64_t leaves = index.leaves();
  const Tensor leaf_sums = index.sums.narrow(0, leaves, leaves);
  // Batched products and sums over leaves add in a fixed order on any device.
  const int64_t width = index.rows.size(1),
                of_leaf =
                    (index.sphere() ? width : 1) * width + (index.classes() / leaves + 1) * width;
  const int64_t block = std::max<int64_t>(1, kLeafElements / of_leaf);
  for (int64_t first = 0; first < leaves; first += block) {
    const int64_t count = std::min(block, leaves - first);
    const Tensor rows = rows_of_leaves(index, first, count);
    leaf_sums.narrow(0, first, count).copy_(index.sphere() ? pair_sums(rows) : rows.sum(1));
    made(index.classes() * count / leaves);
  }
  for (int64_t first = leaves / 2; first >= 1; first /= 2) {
    index.sums.narrow(0, first, first)
        .copy_(index.sums.narrow(0, 2 * first, 2 * first).view({first, 2, -1}).sum(1));
  }
}

} // namespace

std::vector<Tensor> KernelFamily::make(const Tensor& is_drawn, int64_t dim,
                                       const KernelOptions& options) {
  const auto floats = is_drawn.options().dtype(at::kFloat);
  const Tensor directions = options.sphere()
      ? at::empty({0}, floats)
      : at::randn({options.features, dim + options.bias}, floats).mul_(std::sqrt(options.tau));
  return zero_tables(is_drawn, directions, dim, options);
}

std::vector<Tensor> KernelFamily::resized(const Tensor& is_drawn, const OptionalTensor& rows,
                                          const OptionalTensor& bias, const KernelIndex& index,
                                          const KernelOptions& options) {
  const Tensor directions =
      index.sphere() ? at::empty({0}, index.rows.options()) : index.directions->clone();
  std::vector<Tensor> tables = zero_tables(is_drawn, directions, index.dim.expect_int(), options);
  if (is_defined(rows)) {
    // Rows are in the order of class ids.
    const int64_t added = rows->size(0), kept = tables[1].size(0) - added;
    const OptionalTensor bias_of_new_rows = is_defined(bias)
        ? OptionalTensor(bias->narrow(0, is_drawn.size(0) - added, added))
        : std::nullopt;
    const KernelIndex resized_index("kernel_resize", new_index(tables, index.step), options);
    resized_index.rows.narrow(0, 0, kept).copy_(index.rows.narrow(0, 0, kept));
    resized_index.rows.narrow(0, kept, added)
        .copy_(kernel_rows(*rows, bias_of_new_rows, resized_index));
    sum_up(resized_index, [](int64_t) {});
  }
  return tables;
}

std::vector<Tensor> KernelFamily::gained(const OptionalTensor& rows, const OptionalTensor& bias,
                                         int64_t added, const KernelIndex& index,
                                         const KernelOptions& options) {
  const int64_t count = std::max<int64_t>(0, added), drawn = index.classes(),
                before = index.place.size(0);
  if (leaves_of(drawn + added, index.dim.expect_int(), options) != index.leaves()) {
    return {};
  }
  return {{},
          is_defined(rows) ? kernel_rows(*rows, bias, index)
                           : at::zeros({count, index.rows.size(1)}, index.rows.options()),
          {},
          at::arange(before, before + count, index.order.options()),
          at::arange(drawn, drawn + count, index.place.options())};
}

void KernelFamily::exclude_last(KernelIndex& index, int64_t count) {
  const int64_t left = index.classes() - count;
  index.rows = index.rows.narrow(0, 0, left);
  index.order = index.order.narrow(0, 0, left);
}

Tensor KernelFamily::refresh(const char* op, const ClassTable& table, const KernelIndex& index,
                             const KernelOptions&, const std::optional<at::Generator>&) {
  const auto& [weight, bias] = table;
  check_finite_rows(op, "weight", weight);
  check_finite_bias(op, bias);
  constexpr int64_t kRows = 1 << 13; // bounds the copies in memory
  LongWork work(op, 2 * index.classes());
  const auto made = [&](int64_t classes) {
    work.add(classes);
    work.check();
  };
  bool is_changed = false;
  try {
    for (int64_t begin = 0; begin < index.classes(); begin += kRows) {
      const int64_t size = std::min(kRows, index.classes() - begin);
      const Tensor ids = index.order.narrow(0, begin, size);
      const OptionalTensor bias_of_rows =
          is_defined(bias) ? OptionalTensor(bias->index_select(0, ids)) : std::nullopt;
      const Tensor rows = kernel_rows(weight.index_select(0, ids), bias_of_rows, index);
      is_changed = true;
      index.rows.narrow(0, begin, size).copy_(rows);
      made(size);
    }
    sum_up(index, made);
  } catch (...) {
    // A backup of all rows would be too large for so rare a case: sums and step become those of an
    // index that was never refreshed.
    if (is_changed) {
      index.sums.zero_();
      index.step.zero_();
    }
    throw;
  }
  return at::empty({0}, weight.options().dtype(at::kDouble));
}

Tensor kernel_pairs(const Tensor& rows) {
  const Tensor at =
      at::triu_indices(rows.size(1), rows.size(1), 0, rows.options().dtype(at::kLong));
  return rows.index_select(1, at[0]) * rows.index_select(1, at[1]);
}

Tensor kernel_rows(const Tensor& rows, const OptionalTensor& bias, const KernelIndex& index) {
  if (index.sphere()) {
    return with_bias_column(rows, bias, index.rows.size(1));
  }
  const Tensor wide = with_bias_column(rows, bias, index.directions->size(1));
  const Tensor unit = wide /
      at::linalg_vector_norm(wide, 2, at::IntArrayRef{1}, true)
          .clamp_min_(std::numeric_limits<float>::min());
  const Tensor angle = at::mm(unit, index.directions->t());
  return at::cat({angle.cos(), angle.sin()}, 1).div_(std::sqrt(double(index.directions->size(0))));
}

Tensor KernelFamily::log_count_reference(const Tensor& queries, const Tensor& ids,
                                         const KernelIndex& index, const KernelOptions& options) {
  const double scale = options.scale();
  const int64_t leaves = index.leaves();
  const Tensor x = kernel_rows(queries, std::nullopt, index);
  // Sizes of all nodes [2 L]: those of the leaves, then sums of pairs.
  const Tensor edges = leaf_edges(index), sizes = at::zeros({2 * leaves}, index.place.options());
  sizes.narrow(0, leaves, leaves).copy_(edges.narrow(0, 1, leaves) - edges.narrow(0, 0, leaves));
  for (int64_t first = leaves / 2; first >= 1; first /= 2) {
    sizes.narrow(0, first, first)
        .copy_(sizes.narrow(0, 2 * first, 2 * first).view({first, 2}).sum(1));
  }
  const Tensor in_rows = at::mm(x, index.rows.t()).to(at::kDouble);
  const Tensor in_nodes =
                   at::mm(index.sphere() ? kernel_pairs(x) : x, index.sums.t()).to(at::kDouble),
               size = sizes.to(at::kDouble);
  const Tensor value = index.sphere() ? in_rows.square() * scale + 1 : in_rows.clamp_min(scale);
  const Tensor mass =
      index.sphere() ? in_nodes.clamp_min(0) * scale + size : at::maximum(in_nodes, size * scale);

  const Tensor query_ids = ids_of_queries(queries, ids);
  const Tensor found = index.place.index_select(0, query_ids.reshape({-1})).view(query_ids.sizes()),
               row = found.clamp_min(0);
  const Tensor leaf_of_row = leaf_of_rows(index);
  const Tensor leaf = leaf_of_row.index_select(0, row.reshape({-1})).view(row.sizes());
  const Tensor leaf_sums =
      at::zeros({queries.size(0), leaves}, value.options()).index_add_(1, leaf_of_row, value);
  Tensor log_q = value.gather(1, row).log() - leaf_sums.gather(1, leaf).log();
  Tensor node = leaf + leaves;
  // All leaves have the same depth.
  for (int64_t level = leaves; level > 1; level /= 2, node = node.floor_divide(2)) {
    const Tensor share = mass.gather(1, node);
    log_q = log_q + share.log() - (share + mass.gather(1, node.bitwise_xor(1))).log();
  }
  log_q = log_q + std::log(double(options.num_samples));
  return log_q.masked_fill(found.lt(0), -std::numeric_limits<double>::infinity()).to(at::kFloat);
}

XSOFTMAX_OPERATORS(m) { AdaptiveFamily<KernelFamily>::define(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  AdaptiveFamily<KernelFamily>::on_any_device(m);
}
TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) { AdaptiveFamily<KernelFamily>::on_meta(m); }
TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { AdaptiveFamily<KernelFamily>::on_cpu(m); }
XSOFTMAX_AUTOCAST(m) { AdaptiveFamily<KernelFamily>::under_autocast(m); }

} // namespace xsoftmax
