#include "op/checks.h"
#include "cpu/impl.h"
#include "op/shape_checks.h"
#include "proposal/static/alias_sample.h"
#include "proposal/static/log_uniform_sample.h"
#include "proposal/modules.h"
#include "proposal/sorted_set_cuda.h"
#include "proposal/static/static_draws.cuh"
#include "proposal/static/static_sample.h"
#include "proposal/static/uniform_sample.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <type_traits>

namespace xsoftmax {
namespace {

using namespace cuda;
using at::Tensor;

constexpr const char* kOp = "static_sample";

struct CountedDraws {
  DrawSeed seed;
  int64_t* ids;
  float* log_count;
  int64_t total, num_samples;
  const int64_t* target;
  float* target_log_count;
  int64_t targets;
};

// Ids that were drawn by another kernel.
struct DrawnBefore { const int64_t* ids; };

// One thread per draw and its count; the remaining threads compute the counts of targets.
template <typename Draw, typename Count>
__global__ void counted_draws_kernel(CountedDraws d, Draw draw, Count count) {
  for (int64_t i = global_thread(); i < d.total + d.targets; i += grid_threads()) {
    if (i >= d.total) {
      d.target_log_count[i - d.total] = count(d.target[i - d.total]);
    } else if constexpr (std::is_same_v<Draw, DrawnBefore>) {
      d.log_count[i] = count(draw.ids[i]);
    } else {
      const int64_t id =
          draw(d.seed.key(), d.seed.query(i / d.num_samples), uint64_t(i % d.num_samples));
      d.ids[i] = id;
      d.log_count[i] = count(id);
    }
  }
}

// The results of static_sample, filled by one launch.
class CountedSample {
 public:
  CountedSample(const Tensor& seed, const OptionalTensor& target, const Tensor& ids,
                int64_t num_samples)
      : ids_(ids), log_count_(at::empty(ids.sizes(), ids.options().dtype(at::kFloat))),
        target_(is_defined(target) ? target->contiguous() : Tensor()),
        target_log_count_(target_.defined() ? at::empty(target_.sizes(), log_count_.options())
                                            : at::empty({0}, log_count_.options())),
        draws_{DrawSeed(seed),
               ids_.mutable_data_ptr<int64_t>(),
               log_count_.mutable_data_ptr<float>(),
               ids_.numel(),
               num_samples,
               target_.defined() ? target_.const_data_ptr<int64_t>() : nullptr,
               target_log_count_.mutable_data_ptr<float>(),
               target_log_count_.numel()} {}

  template <typename Draw, typename Count>
  void fill(const Draw& draw, const Count& count) const {
    if (const int64_t threads = draws_.total + draws_.targets; threads > 0) {
      counted_draws_kernel<<<grid_size(threads, kThreads), kThreads, 0,
                             c10::cuda::getCurrentCUDAStream()>>>(draws_, draw, count);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }
  template <typename Count>
  void count(const Count& count) const {
    fill(DrawnBefore{ids_.const_data_ptr<int64_t>()}, count);
  }
  // sorted: for a set whose counts are all equal.
  std::tuple<Tensor, Tensor, Tensor> result(bool sorted = false) const {
    return {sorted ? sorted_set_cuda(ids_) : ids_, log_count_, target_log_count_};
  }

 private:
  Tensor ids_, log_count_, target_, target_log_count_;
  CountedDraws draws_;
};

using OptionalRows = std::optional<int64_t>;

std::tuple<Tensor, Tensor, Tensor> range_sample(const Tensor& seed, const OptionalTensor& target,
                                                const OptionalRows& rows,
                                                const StaticOptions& options) {
  const int64_t low = options.low, high = options.num_classes;
  const bool uniform = options.distribution == "uniform";
  if (uniform) {
    check_uniform_sample(seed, low, high, rows, options.num_samples, options.distinct);
  } else {
    check_log_uniform_sample(seed, low, high, rows, options.num_samples);
  }
  const CountedSample sample(seed, target, empty_samples(seed, rows, options.num_samples),
                             options.num_samples);
  const double scale = static_log_scale(options);
  if (!uniform) {
    sample.fill(LogUniformDraw(low, high), LogUniformCount{low, high, scale});
    return sample.result();
  }
  const UniformCount count{low, high, float(scale)};
  const uint64_t classes = uint64_t(high - low);
  options.distinct ? sample.fill(DistinctUniformDraw{low, classes}, count)
                   : sample.fill(UniformDraw{low, classes}, count);
  return sample.result(options.distinct && options.shared);
}

std::tuple<Tensor, Tensor, Tensor> table_sample(const Tensor& seed, const OptionalTensor& target,
                                                const OptionalRows& rows,
                                                const StaticOptions& options,
                                                at::TensorList tables) {
  check::dim(kOp, "probability", tables[kProbability], 1);
  check::dtype(kOp, "probability", tables[kProbability], at::kDouble);
  check::size(kOp, "probability", tables[kProbability], 0, options.num_classes, "num_classes");
  check::same_device(kOp, "probability", tables[kProbability], "seed", seed);
  const Tensor probability = tables[kProbability].contiguous();
  TableCount count{probability.const_data_ptr<double>(), options.num_classes, nullptr, 0,
                   std::numeric_limits<double>::infinity()};
  if (options.distinct) {
    using Systematic =
        std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   std::optional<c10::SymInt>, c10::SymInt, at::TensorList);
    static const auto systematic = find_op<Systematic>("xsoftmax::systematic_sample");
    const std::optional<c10::SymInt> sets =
        rows.has_value() ? std::optional<c10::SymInt>(*rows) : std::nullopt;
    const auto [ids, log_scale] =
        systematic.call(seed, probability, tables[kOrder], tables[kCumulative], sets,
                        options.num_samples, tables.slice(kLaidOut));
    count.scale_on_device = log_scale.const_data_ptr<double>();
    count.most = 0;
    const CountedSample sample(seed, target, ids, options.num_samples);
    sample.count(count);
    return sample.result();
  }
  check_alias_sample(seed, tables[kBins], rows, options.num_samples);
  check::size(kOp, "bins", tables[kBins], 0, options.num_classes, "num_classes");
  const StaticTail tail = static_tail(kOp, tables.slice(kLaidOut), options.num_classes);
  count.log_scale = std::log(double(options.num_samples)) - std::log(tail.total());
  const Tensor bins = tables[kBins].contiguous();
  const CountedSample sample(seed, target, empty_samples(seed, rows, options.num_samples),
                             options.num_samples);
  sample.fill(AliasDraw(bins, tail), count);
  return sample.result();
}

// Like static_sample in static_sample.cpp. One launch computes draws and all counts; for sets drawn
// without replacement by table it follows the launch that draws them.
std::tuple<Tensor, Tensor, Tensor> static_sample_cuda(const Tensor& seed, const Tensor& queries,
                                                      const OptionalTensor& target,
                                                      at::TensorList tables,
                                                      std::string_view text) {
  const StaticOptions options = static_options(kOp, tables, text);
  if (use_reference() || options.distribution == "fixed") {
    return static_sample(seed, queries, target, tables, text);
  }
  check::dim(kOp, "queries", queries, 2);
  if (is_defined(target)) {
    check::int64(kOp, "target", *target);
    check::same_device(kOp, "target", *target, "seed", seed);
  }
  const c10::cuda::CUDAGuard guard(seed.device());
  const OptionalRows rows = options.shared ? std::nullopt : OptionalRows(queries.size(0));
  return options.distribution == "table" ? table_sample(seed, target, rows, options, tables)
                                         : range_sample(seed, target, rows, options);
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CUDA, m) { m.impl("static_sample", static_sample_cuda); }

} // namespace xsoftmax
