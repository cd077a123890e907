#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "proposal/adaptive_checks.h"
#include "proposal/static/static_sample.h"
#include "proposal/static/static_tail.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

// Another number of classes for a sampler with fixed weights: new classes join a tail with one
// weight, in time proportional to their number, until the tail is a quarter of the tables.

namespace xsoftmax {

using at::Tensor;

namespace {

// Returns the tail of num_classes classes, or an empty list if the tables must be rebuilt.
std::vector<Tensor> next_tail(const char* op, at::TensorList tables, int64_t num_classes,
                              std::string_view distribution, const StaticOptions& options) {
  const Tensor& probability = tables[kProbability];
  const StaticTail now = static_tail(op, tail_of(tables), probability.size(0));
  if (probability.is_meta() || num_classes < now.first || num_classes - now.first > now.first / 4) {
    return {};
  }
  // There is no tail, or it already has a weight.
  if (num_classes == now.first || now.weight > 0) {
    return tail_tables(now);
  }
  const Tensor drawn = probability.gt(0);
  if (options.distinct && options.num_samples > drawn.sum().item<int64_t>()) {
    return {}; // classes of the tail might be certain
  }
  if (distribution != "log_uniform") {
    return tail_tables(
        {.first = now.first,
         .weight = at::where(drawn, probability, std::numeric_limits<double>::infinity())
                       .min()
                       .item<double>()});
  }
  const int64_t id = drawn.to(at::kInt).argmax().item<int64_t>();
  return tail_tables({.first = now.first,
                      .weight = probability[id].item<double>() / std::log1p(1 / double(id + 1)),
                      .log_uniform = true});
}

} // namespace

void static_grow_(at::TensorList tables, at::TensorList tail, int64_t num_classes) {
  constexpr const char* op = "static_grow_";
  TORCH_CHECK_VALUE(tables.size() == kStaticTables, op, ": expected ", int(kStaticTables),
                    " tables, got ", tables.size());
  check::dim(op, "probability", tables[kProbability], 1);
  check::dtype(op, "probability", tables[kProbability], at::kDouble);
  TORCH_CHECK_VALUE(!tail.empty(), op, ": expected tail, got none");
  check_tail(op, tail_of(tables));
  const StaticTail new_tail = static_tail(op, tail, num_classes);
  const int64_t before = tables[kProbability].size(0),
                count = std::max<int64_t>(0, num_classes - before);
  const Tensor ids =
      at::arange(before, before + count, tables[kProbability].options().dtype(at::kLong));
  const Tensor weights = new_tail.log_uniform
      ? ids.to(at::kDouble).add_(1).reciprocal_().log1p_().mul_(new_tail.weight)
      : at::full({count}, new_tail.weight, tables[kProbability].options());
  const Tensor bins = at::stack({at::full_like(ids, int64_t(1) << 53), ids}, 1),
               zeros = at::zeros_like(weights);
  const Tensor* const rows[] = {&weights, &bins, &ids, &zeros};
  std::vector<Tensor> grown, gained;
  for (int table = 0; table < kLaidOut; ++table) {
    if (tables[table].numel() > 0) {
      check::dim(op, "tables", tables[table], rows[table]->dim());
      check::same_dtype(op, "tables", tables[table], "their rows", *rows[table]);
      check::size(op, "tables", tables[table], 0, before, "the size of probability");
      grown.push_back(tables[table]);
      gained.push_back(*rows[table]);
    }
  }
  static const auto resize =
      find_op<void(at::TensorList, at::TensorList, at::IntArrayRef)>("xsoftmax::resize_tables_");
  resize.call(grown, gained, std::vector<int64_t>(grown.size(), num_classes));
  for (size_t i = 0; i < tail.size(); ++i) {
    tables[kLaidOut + i].copy_(tail[i]);
  }
}

std::tuple<std::vector<Tensor>, std::string> static_resize(std::string owner, at::TensorList tables,
                                                           int64_t num_classes,
                                                           std::string_view distribution,
                                                           std::string_view text) {
  const char* const op = owner.c_str();
  StaticOptions options = static_options(op, tables, text);
  check_at_least(op, "num_classes", num_classes, 1);
  TORCH_CHECK_VALUE(distribution.empty() || distribution == "log_uniform", op,
                    ": expected distribution to be \"log_uniform\" or empty, got \"", distribution,
                    "\"");
  const int64_t before = options.num_classes, kept = std::min(before, num_classes);
  options.num_classes = num_classes;
  if (options.distribution == "fixed") {
    const Tensor& ids = tables[kOrder];
    check::dim(op, "order", ids, 1);
    check::int64(op, "order", ids);
    const int64_t last = ids.numel() > 0 ? ids.max().item<int64_t>() : -1;
    TORCH_CHECK_VALUE(last < num_classes, op, ": expected num_classes above ", last,
                      ", a class that is always drawn, got ", num_classes);
    return {tables.vec(), print_options(options)};
  }
  if (options.distribution != "table") {
    TORCH_CHECK_VALUE(options.low < num_classes, op, ": expected num_classes above ", options.low,
                      ", the classes that are excluded, got ", num_classes);
    return static_tables(owner, {}, {}, {}, print_options(options));
  }
  const Tensor& probability = tables[kProbability];
  check::dim(op, "probability", probability, 1);
  check::dtype(op, "probability", probability, at::kDouble);
  check::size(op, "probability", probability, 0, before, "num_classes");
  if (const std::vector<Tensor> tail = next_tail(op, tables, num_classes, distribution, options);
      !tail.empty()) {
    return {tail, print_options(options)};
  }
  const Tensor old = probability.narrow(0, 0, kept);
  TORCH_CHECK_VALUE(num_classes > kept || old.gt(0).any().item<bool>(), op,
                    ": expected num_classes that leave a class to draw, got ", num_classes);
  if (distribution == "log_uniform") {
    StaticOptions log_uniform_options = options;
    log_uniform_options.distribution = "log_uniform";
    return static_tables(owner, distribution_weights(log_uniform_options, old.device()), {},
                         old.eq(0).nonzero().squeeze(1), print_options(options));
  }
  const Tensor least =
      at::where(probability.gt(0), probability, std::numeric_limits<double>::infinity()).min();
  return static_tables(
      owner, num_classes > kept ? at::cat({old, least.expand({num_classes - kept})}) : old, {}, {},
      print_options(options));
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "static_resize(str owner, Tensor[] tables, int num_classes, str distribution, str options) "
      "-> (Tensor[] tables, str options)",
      static_resize);
  m.def("static_grow_(Tensor(a!)[] tables, Tensor[] tail, int num_classes) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) { m.impl("static_grow_", static_grow_); }

} // namespace xsoftmax
