#include "core/memory.h"
#include "core/optional.h"
#include "samplers/midx_index.h"
#include "samplers/midx_refresh.h"
#include "samplers/modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cmath>

namespace xsoftmax::samplers {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;
using Draws = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kName = "MidxSampler";

Draws sample_shared(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, int64_t num_samples, bool distinct, bool rms,
                    const Tensor& target) {
  static const auto op =
      find_op<Draws(const Tensor&, const Tensor&, XS_MIDX_INDEX_PARAMS, c10::SymInt, bool, bool, const Tensor&)>(
          "xsoftmax::midx_sample_shared");
  return op.call(seed, input, XS_MIDX_INDEX_ARGS, num_samples, distinct, rms, target);
}

} // namespace

// The index as the ops take it.
#define XS_MIDX_BUFFERS \
  codewords1.detach(), codewords2.detach(), cell, order, start, mass, optional(log_weight), optional(prefix), optional(heaviest)

// What it is made from.
#define XS_MIDX_TABLE weight.detach(), detached(bias), optional(spread), optional(query_square)

MidxSamplerImpl::MidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options)
    : AdaptiveSamplerImpl(kName, num_classes, dim, options.bias), options_(options) {
  TORCH_CHECK_VALUE(options.kind == "rq" || options.kind == "pq", kName, ": expected kind as \"rq\" or \"pq\", got \"", options.kind, "\"");
  TORCH_CHECK_VALUE(options.mixture == "mean" || options.mixture == "rms", kName, ": expected mixture as \"mean\" or \"rms\", got \"",
                    options.mixture, "\"");
  const auto at_least = [](const char* argument, int64_t value, int64_t least) {
    TORCH_CHECK_VALUE(value >= least, kName, ": expected ", argument, " of at least ", least, ", got ", value);
  };
  const bool residual = options.kind == "rq";
  at_least("dim", dim, residual ? 1 : 2); // a product quantizer cuts it in two
  at_least("codewords", options.codewords, 1);
  TORCH_CHECK_VALUE(options.codewords <= kMidxMostCodewords, kName, ": expected codewords of at most ", kMidxMostCodewords, ", got ",
                    options.codewords);
  at_least("refresh_every", options.refresh_every, 0);
  at_least("update_every", options.update_every, 0);
  at_least("iterations", options.iterations, 0);
  options_.train_points = options.train_points.value_or(256 * options.codewords);
  at_least("train_points", *options_.train_points, 1);
  at_least("learn_rows", options.learn_rows, 1);
  TORCH_CHECK_VALUE(!(options.exact && options.distinct.value_or(false)), kName,
                    ": expected distinct to be false or none where exact is set, whose draws are independent");
  TORCH_CHECK_VALUE(!(options.exact && options.spread), kName, ": expected spread to be false where exact is set, which needs none");
  TORCH_CHECK_VALUE(!(options.exact && options.learnable), kName,
                    ": expected learnable to be false where exact is set, whose q does not depend on the codewords");

  // An index that knows nothing yet: all classes in one cell.
  const Tensor ids = excluded_ids(kName, options.exclude_below, options.exclude, num_classes);
  const int64_t k = options.codewords;
  cell = register_buffer("cell", table_zeros({num_classes}, at::TensorOptions(at::kInt)).index_fill_(0, ids, -1));
  const auto codebook = [&](const char* name, int64_t width) {
    return options.learnable ? register_parameter(name, at::zeros({k, width})) : register_buffer(name, at::zeros({k, width}));
  };
  codewords1 = codebook("codewords1", residual ? dim : (dim + 1) / 2);
  codewords2 = codebook("codewords2", residual ? dim : dim / 2);
  if (options.exact) {
    table = register_buffer("table", table_zeros({num_classes, dim}, at::TensorOptions(at::kFloat)));
    table_bias = options.bias ? register_buffer("table_bias", at::zeros({num_classes})) : Tensor();
  }
  const bool weighted = options.bias || options.spread;
  if (weighted) {
    log_weight = register_buffer("log_weight", table_zeros({num_classes}, at::TensorOptions(at::kFloat)));
  }
  const auto [slots, begins, masses, sums, most] = midx_cells(cell, optional(log_weight), k, num_classes - ids.numel());
  order = register_buffer("order", slots);
  start = register_buffer("start", begins);
  mass = register_buffer("mass", masses);
  if (weighted) {
    prefix = register_buffer("prefix", sums);
    heaviest = register_buffer("heaviest", most);
  }
  if (options.spread) {
    spread = register_buffer("spread", table_zeros({num_classes}, at::TensorOptions(at::kFloat)));
    query_square = register_buffer("query_square", at::zeros({}, at::kDouble));
  }
  if (options.update_every > 0) {
    touched = register_buffer("touched", at::zeros({num_classes}, at::kBool));
  }
}

Proposal MidxSamplerImpl::sample(const Tensor& input, int64_t num_samples, bool shared, const Optional& target,
                                 std::optional<at::Generator> generator) {
  check_input(input);
  static const auto of_queries =
      find_op<Draws(const Tensor&, const Tensor&, XS_MIDX_INDEX_PARAMS, c10::SymInt, bool, const Tensor&)>("xsoftmax::midx_sample");
  const bool distinct = draws_distinct(shared);
  if (query_square.defined() && is_training() && input.size(0) > 0) {
    const at::NoGradGuard guard;
    const Tensor squares = input.detach().to(at::kDouble).square().sum(1);
    const Tensor square = squares.sum() / squares.ne(0).sum().clamp_min(1); // a loss makes ignored queries 0
    const Tensor mean = query_square.lerp(square, step.to(at::kDouble).clamp(1, 100).reciprocal());
    query_square.copy_(at::where(mean.isfinite(), mean, query_square));
  }
  const Tensor seed = draw_seed(input, generator);
  if (table.defined()) {
    static const auto exact =
        find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, XS_MIDX_INDEX_PARAMS, const Tensor&, const Optional&, c10::SymInt)>(
            "xsoftmax::midx_exact_sample");
    TORCH_CHECK_VALUE(!shared && !distinct, kName, ": expected private independent draws where exact is set, got shared or distinct ones");
    const auto [ids, log_q] = exact.call(seed, input, XS_MIDX_BUFFERS, table, optional(table_bias), num_samples);
    const double log_samples = std::log(double(num_samples));
    const Tensor of_target = given(target) ? log_prob(input, target->unsqueeze(1)).squeeze(1) + log_samples : Tensor();
    return {ids, log_q + log_samples, of_target, false, {}, {}, 0, {}};
  }
  const Tensor some = target_or_first(target, input);
  return make_proposal(shared ? sample_shared(seed, input, XS_MIDX_BUFFERS, num_samples, distinct, options_.mixture == "rms", some)
                              : of_queries.call(seed, input, XS_MIDX_BUFFERS, num_samples, distinct, some),
                       target, distinct);
}

Tensor MidxSamplerImpl::log_prob(const Tensor& input, const Tensor& ids) {
  check_input(input);
  if (table.defined()) {
    static const auto exact = find_op<Tensor(const Tensor&, XS_MIDX_INDEX_PARAMS, const Tensor&, const Optional&, const Tensor&)>(
        "xsoftmax::midx_exact_log_prob");
    return exact.call(input, XS_MIDX_BUFFERS, table, optional(table_bias), ids);
  }
  static const auto op = find_op<Tensor(const Tensor&, XS_MIDX_INDEX_PARAMS, const Tensor&)>("xsoftmax::midx_log_prob");
  return op.call(input, XS_MIDX_BUFFERS, ids);
}

Tensor MidxSamplerImpl::mixture_log_prob(const Tensor& input, const Tensor& ids) {
  check_input(input);
  static const auto op = find_op<Tensor(const Tensor&, XS_MIDX_INDEX_PARAMS, bool, const Tensor&)>("xsoftmax::midx_mixture_log_prob");
  return op.call(input, XS_MIDX_BUFFERS, options_.mixture == "rms", ids);
}

Tensor MidxSamplerImpl::log_count(const Tensor& input, int64_t num_samples, bool shared, const Tensor& ids) {
  if (!draws_distinct(shared)) {
    const Tensor log_q = shared ? mixture_log_prob(input, ids.flatten()).view_as(ids) : log_prob(input, ids);
    return log_q + std::log(double(num_samples));
  }
  TORCH_CHECK_VALUE(shared, kName, ": expected independent private draws, got distinct ones, whose counts only a draw knows");
  const Tensor seed = at::zeros({}, ids.options());
  return std::get<2>(sample_shared(seed, input, XS_MIDX_BUFFERS, num_samples, true, options_.mixture == "rms", ids.flatten())).view_as(ids);
}

std::map<std::string, double> MidxSamplerImpl::refresh(const Tensor& weight, const Optional& bias) {
  check_table(weight, bias);
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Optional&, const Optional&, const Optional&, XS_MIDX_INDEX_PARAMS, bool, int64_t,
                     int64_t, bool)>("xsoftmax::midx_refresh_");
  const bool refreshed = step.item<int64_t>() > 0;
  const Tensor stats = op.call(draw_seed(weight, std::nullopt), XS_MIDX_TABLE, XS_MIDX_BUFFERS, options_.kind == "rq",
                               options_.learnable && refreshed ? 0 : options_.iterations, *options_.train_points, refreshed).cpu();
  step.clamp_min_(1);
  copy_table(weight, bias);
  std::map<std::string, double> named;
  for (int64_t i = 0; i < stats.size(0); ++i) {
    named[kMidxStatNames[i]] = stats[i].item<double>();
  }
  return named;
}

void MidxSamplerImpl::update(const Tensor& weight, const Optional& bias, const Tensor& rows) {
  check_table(weight, bias);
  static const auto op =
      find_op<void(const Tensor&, const Optional&, const Optional&, const Optional&, XS_MIDX_INDEX_PARAMS, const Tensor&)>(
          "xsoftmax::midx_update_");
  op.call(XS_MIDX_TABLE, XS_MIDX_BUFFERS, rows);
}

void MidxSamplerImpl::prepare(const Tensor& weight, const Optional& bias, std::optional<at::Generator> generator) {
  check_table(weight, bias);
  static const auto op = find_op<void(const Tensor&, const Tensor&, const Optional&, const Optional&, const Optional&, const Tensor&,
                                      const Optional&, XS_MIDX_INDEX_PARAMS, bool, int64_t, int64_t, int64_t, int64_t, int64_t)>(
      "xsoftmax::midx_step_");
  op.call(draw_seed(weight, generator), XS_MIDX_TABLE, step, optional(touched), XS_MIDX_BUFFERS,
          options_.kind == "rq", options_.iterations, options_.learnable ? 0 : options_.iterations, *options_.train_points,
          options_.refresh_every, options_.update_every);
  copy_table(weight, bias);
}

void MidxSamplerImpl::copy_table(const Tensor& weight, const Optional& bias) {
  if (table.defined()) {
    table.copy_(weight.detach());
  }
  if (table_bias.defined() && given(bias)) {
    table_bias.copy_(bias->detach());
  }
}

Tensor MidxSamplerImpl::auxiliary_loss(const Tensor& input, const Tensor& weight, const Optional& bias,
                                       std::optional<at::Generator> generator) {
  if (!options_.learnable) {
    return {};
  }
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const Optional&, const Tensor&)>("xsoftmax::midx_codebook_loss");
  const Tensor slots = at::randint(order.size(0), {std::min(options_.learn_rows, order.size(0))}, generator, order.options());
  const Tensor ids = order.index_select(0, slots);
  const Optional some_bias = given(bias) ? Optional(bias->detach().index_select(0, ids).to(at::kFloat)) : std::nullopt;
  return op.call(codewords1, codewords2, weight.detach().index_select(0, ids).to(at::kFloat), some_bias,
                 input.detach().to(at::kFloat));
}

void MidxSamplerImpl::note(const Tensor& ids) {
  if (touched.defined()) {
    touched.index_fill_(0, ids.flatten(), true);
  }
}

Tensor MidxSamplerImpl::excluded() const { return cell.lt(0).nonzero().squeeze(1); }

std::shared_ptr<SamplerImpl> MidxSamplerImpl::like(const Tensor& excluded, bool bias) const {
  return std::make_shared<MidxSamplerImpl>(num_classes_, dim_, for_another(options_, excluded, bias));
}

} // namespace xsoftmax::samplers
