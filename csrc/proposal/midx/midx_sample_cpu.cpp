#include "proposal/midx/midx_private_draws.h"
#include "proposal/midx/midx_shared_draws.h"
#include "proposal/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

PrivateDraws sample_private(const Tensor& seed, const Tensor& queries, const OptionalTensor& target,
                            const CheckedMidxIndex& checked, const MidxOptions& options,
                            const Targets& targets) {
  const auto draws = empty_private_draws(seed, queries, target, options.num_samples);
  const auto& [ids, log_count, target_log_count] = draws;
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  float *count = log_count.mutable_data_ptr<float>(),
        *target_count = target_log_count.mutable_data_ptr<float>();
  const DrawSeed from(seed);
  const int64_t samples = options.num_samples;
  for_midx_blocks(queries, checked, 1, [&](int64_t begin, const MidxQueries& block) {
    MidxPrivateDraws(checked, samples, options.is_distinct())
        .run(from.key(), from.query(begin), block, targets.width, targets.of(begin),
             id + begin * samples, count + begin * samples, target_count + begin * targets.width);
  });
  return draws;
}

PrivateDraws sample_shared(const Tensor& seed, const Tensor& queries, const OptionalTensor& target,
                           const CheckedMidxIndex& checked, const MidxOptions& options,
                           const Targets& targets) {
  const Tensor shares = midx_mixture(nonzero_queries(counted_queries(queries, target)), checked,
                                     options.mixture == "rms");
  MidxSharedDraws draws(checked, shares, options.num_samples, options.is_distinct());
  const Tensor ids = at::empty({options.num_samples}, seed.options()),
               log_count = at::empty({options.num_samples}, seed.options().dtype(at::kFloat));
  const Tensor target_log_count = empty_target_count(seed, target);
  draws.draw(DrawSeed(seed).key(), ids.mutable_data_ptr<int64_t>());
  draws.count(ids.const_data_ptr<int64_t>(), options.num_samples,
              log_count.mutable_data_ptr<float>());
  draws.count(targets.of(0), targets.ids.numel(), target_log_count.mutable_data_ptr<float>());
  return {ids, log_count, target_log_count};
}

Tensor private_log_count(const Tensor& queries, const Tensor& ids, const CheckedMidxIndex& checked,
                         double log_samples) {
  const Tensor flat = ids.contiguous(),
               log_count =
                   at::empty({queries.size(0), ids.size(-1)}, flat.options().dtype(at::kFloat));
  const int64_t width = ids.size(-1), k = checked.codewords;
  const bool same = ids.dim() == 1; // for all queries
  const int64_t* id = flat.const_data_ptr<int64_t>();
  float* out = log_count.mutable_data_ptr<float>();
  std::vector<int64_t> cells(same ? width : 0); // looked up once
  std::transform(id, id + cells.size(), cells.begin(),
                 [&](int64_t i) { return checked.cell_of(i); });
  for_midx_blocks(queries, checked, 1, [&](int64_t begin, const MidxQueries& block) {
    for (int64_t i = 0; i < block.log_z.size(0); ++i) {
      const MidxQueryRow row(block, i, k);
      for (int64_t j = 0; j < width; ++j) {
        const int64_t class_id = id[same ? j : (begin + i) * width + j],
                      c = same ? cells[j] : checked.cell_of(class_id);
        out[(begin + i) * width + j] = c < 0
            ? -std::numeric_limits<float>::infinity()
            : float(log_samples + row.log_density(c, k) + checked.log_weight_of(class_id));
      }
    }
  });
  return log_count;
}

Tensor shared_log_count(const Tensor& queries, const Tensor& ids, const CheckedMidxIndex& checked,
                        const MidxOptions& options) {
  const Tensor flat = ids.contiguous(),
               log_count = at::empty(ids.sizes(), flat.options().dtype(at::kFloat));
  const Tensor shares = midx_mixture(nonzero_queries(queries), checked, options.mixture == "rms");
  MidxSharedDraws(checked, shares, options.num_samples, options.is_distinct())
      .count(flat.const_data_ptr<int64_t>(), flat.numel(), log_count.mutable_data_ptr<float>());
  return log_count;
}

} // namespace

PrivateDraws MidxFamily::sample_cpu(const Tensor& seed, const Tensor& queries,
                                    const OptionalTensor& target, const Targets& targets,
                                    const MidxIndex& index, const MidxOptions& options) {
  if (options.form == "exact") {
    return midx_exact_sample(seed, queries, target, targets, index, options.num_samples);
  }
  const CheckedMidxIndex checked("midx_sample", queries, index);
  return options.shared ? sample_shared(seed, queries, target, checked, options, targets)
                        : sample_private(seed, queries, target, checked, options, targets);
}

Tensor MidxFamily::log_count_cpu(const Tensor& queries, const Tensor& ids, const MidxIndex& index,
                                 const MidxOptions& options) {
  if (options.form == "exact") {
    return midx_exact_log_count(queries, ids, index, options.num_samples);
  }
  const CheckedMidxIndex checked("midx_log_count", queries, index);
  return options.shared
      ? shared_log_count(queries, ids, checked, options)
      : private_log_count(queries, ids, checked, std::log(double(options.num_samples)));
}

} // namespace xsoftmax
