#include "core/checks.h"
#include "core/impl.h"
#include "core/shape_checks.h"
#include "samplers/log_uniform_sample.h"
#include "samplers/static_draws.cuh"
#include "samplers/static_sample.h"
#include "samplers/uniform_sample.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

struct CountedDraws {
  DrawSeed seed;
  int64_t* ids;
  float* log_count;
  int64_t total, num_samples;
  const int64_t* target;
  float* target_log_count;
  int64_t targets;
};

// A thread a draw, with its count; the threads behind these take the counts of targets.
template <typename Draw, typename Count>
__global__ void counted_draws_kernel(CountedDraws d, Draw draw, Count count) {
  for (int64_t i = global_thread(); i < d.total + d.targets; i += grid_threads()) {
    if (i < d.total) {
      const int64_t id = draw(d.seed.key(), d.seed.query(i / d.num_samples), uint64_t(i % d.num_samples));
      d.ids[i] = id;
      d.log_count[i] = count(id);
    } else {
      d.target_log_count[i - d.total] = count(d.target[i - d.total]);
    }
  }
}

// As static_sample.cpp; uniform and log-uniform draws and all their counts in one launch.
std::tuple<Tensor, Tensor, Tensor> static_sample_cuda(const Tensor& seed, const Tensor& queries, const OptionalTensor& target, at::TensorList tables,
                                                      std::string_view text) {
  constexpr const char* op = "static_sample";
  const StaticOptions options = static_options(op, tables, text);
  const bool uniform = options.law == "uniform";
  if (use_reference() || !(uniform || options.law == "log_uniform")) {
    return static_sample(seed, queries, target, tables, text);
  }
  check::dim(op, "queries", queries, 2);
  const int64_t low = options.low, high = options.num_classes;
  const std::optional<int64_t> rows = options.shared ? std::nullopt : std::optional(queries.size(0));
  if (uniform) {
    check_uniform_sample(seed, low, high, rows, options.num_samples, options.distinct);
  } else {
    check_log_uniform_sample(seed, low, high, rows, options.num_samples);
  }
  Tensor targets;
  if (given(target)) {
    check::int64(op, "target", *target);
    check::same_device(op, "target", *target, "seed", seed);
    targets = target->contiguous();
  }
  const c10::cuda::CUDAGuard guard(seed.device());
  const Tensor ids = empty_samples(seed, rows, options.num_samples), log_count = at::empty(ids.sizes(), ids.options().dtype(at::kFloat));
  const Tensor of_target = targets.defined() ? at::empty(targets.sizes(), log_count.options()) : at::empty({0}, log_count.options());
  const CountedDraws draws{DrawSeed(seed),
                           ids.mutable_data_ptr<int64_t>(),
                           log_count.mutable_data_ptr<float>(),
                           ids.numel(),
                           options.num_samples,
                           targets.defined() ? targets.const_data_ptr<int64_t>() : nullptr,
                           of_target.mutable_data_ptr<float>(),
                           of_target.numel()};
  const auto launch = [&](const auto& draw, const auto& count) {
    if (const int64_t threads = draws.total + draws.targets; threads > 0) {
      counted_draws_kernel<<<grid_size(threads, kThreads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(draws, draw, count);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  };
  const double scale = static_log_scale(options);
  if (!uniform) {
    launch(LogUniformDraw(low, high), LogUniformCount{low, high, scale});
    return {ids, log_count, of_target};
  }
  const UniformCount count{low, high, float(scale)};
  const uint64_t classes = uint64_t(high - low);
  options.distinct ? launch(DistinctUniformDraw{low, classes}, count) : launch(UniformDraw{low, classes}, count);
  return {options.distinct && options.shared ? std::get<0>(ids.sort()) : ids, log_count, of_target}; // the counts are all the same
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("static_sample", static_sample_cuda); }

} // namespace xsoftmax
