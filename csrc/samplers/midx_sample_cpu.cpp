#include "core/checks.h"
#include "core/impl.h"
#include "samplers/adaptive.h"
#include "samplers/midx_private_draws.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include <numeric>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kGroups = 16; // partial sums of the mixture

MidxDraws midx_sample_cpu(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, int64_t num_samples, bool distinct,
                          const Tensor& target) {
  constexpr const char* op = "midx_sample";
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_midx_sample(op, seed, input, index, num_samples, false, distinct, target);
  const CheckedMidxIndex checked(op, input, index);
  check::class_ids(op, "target", target, cell.size(0));
  const Tensor targets = target.contiguous();
  const auto [ids, log_count, target_log_count] = empty_private_draws(input, num_samples, targets);
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  float *count = log_count.mutable_data_ptr<float>(), *target_count = target_log_count.mutable_data_ptr<float>();
  const uint64_t key = seed_value(seed);
  const int64_t width = target.dim() == 2 ? target.size(1) : 1;
  for_midx_blocks(input, checked, 1, [&](int64_t begin, const MidxQueries& queries) {
    MidxPrivateDraws(checked, num_samples, distinct)
        .run(key, begin, queries, width, targets.const_data_ptr<int64_t>() + begin * width, id + begin * num_samples,
             count + begin * num_samples, target_count + begin * width);
  });
  return {ids, log_count, target_log_count};
}

Tensor midx_log_prob_cpu(const Tensor& input, XS_MIDX_INDEX_PARAMS, const Tensor& ids) {
  constexpr const char* op = "midx_log_prob";
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_midx_log_prob(input, index, ids);
  if (use_reference()) {
    return midx_log_prob_reference(input, XS_MIDX_INDEX_ARGS, ids);
  }
  const CheckedMidxIndex checked(op, input, index);
  check::class_ids(op, "ids", ids, cell.size(0));
  const Tensor flat = ids.contiguous(), log_prob = at::empty({input.size(0), ids.size(-1)}, flat.options().dtype(at::kFloat));
  const int64_t width = ids.size(-1), k = checked.codewords;
  const bool shared = ids.dim() == 1;
  const int64_t* id = flat.const_data_ptr<int64_t>();
  float* out = log_prob.mutable_data_ptr<float>();
  std::vector<int64_t> cells(shared ? width : 0); // of ids that all queries share: looked up once
  std::transform(id, id + cells.size(), cells.begin(), [&](int64_t i) { return checked.cell_of(i); });
  for_midx_blocks(input, checked, 1, [&](int64_t begin, const MidxQueries& queries) {
    for (int64_t i = 0; i < queries.log_z.size(0); ++i) {
      const MidxQueryRow row(queries, i, k);
      for (int64_t j = 0; j < width; ++j) {
        const int64_t class_id = id[shared ? j : (begin + i) * width + j], c = shared ? cells[j] : checked.cell_of(class_id);
        out[(begin + i) * width + j] = c < 0 ? -std::numeric_limits<float>::infinity()
                                             : float(row.log_density(c, k) + checked.log_weight_of(class_id));
      }
    }
  });
  return log_prob;
}

// The share of each cell [K, K] in the mixture of all queries, summed in groups that a function of the shape alone cuts.
Tensor mixture_shares(const Tensor& input, const CheckedMidxIndex& checked, bool rms) {
  const int64_t blocks = (input.size(0) + kMidxBlock - 1) / kMidxBlock, per_group = std::max<int64_t>(1, (blocks + kGroups - 1) / kGroups);
  std::vector<Tensor> partial((blocks + per_group - 1) / per_group);
  for_midx_blocks(input, checked, per_group, [&](int64_t begin, const MidxQueries& queries) {
    Tensor& sum = partial[begin / kMidxBlock / per_group];
    const Tensor densities = midx_density_sums(queries, rms);
    sum = sum.defined() ? sum.add_(densities) : densities;
  });
  Tensor sum = partial.empty() ? at::ones_like(checked.mass) : partial[0];
  for (size_t i = 1; i < partial.size(); ++i) {
    sum.add_(partial[i]);
  }
  return midx_mixture_shares(sum, checked.mass, rms);
}

MidxDraws midx_sample_shared_cpu(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, int64_t num_samples, bool distinct,
                                 bool rms, const Tensor& target) {
  constexpr const char* op = "midx_sample_shared";
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_midx_sample(op, seed, input, index, num_samples, true, distinct, target);
  const CheckedMidxIndex checked(op, input, index);
  const MidxCellTables& tables = checked.tables;
  check::class_ids(op, "target", target, cell.size(0));
  const Tensor shares = mixture_shares(input, checked, rms), targets = target.contiguous();
  const double* share = shares.const_data_ptr<double>();
  const bool number = std::isfinite(share[0]);
  const uint64_t key = seed_value(seed);
  std::vector<int64_t> slots(num_samples);
  MidxSystematicSet set(tables, num_samples);
  if (!number) { // queries that are no numbers: the loss will say so
    std::iota(slots.begin(), slots.end(), int64_t(0));
    std::for_each(slots.begin(), slots.end(), [&](int64_t& slot) { slot %= tables.classes; });
  } else if (distinct) {
    const int64_t k = tables.codewords;
    const Tensor row_share = shares.sum(1);
    const auto fill = [&](int64_t row, double* cells) { std::copy_n(share + row * k, k, cells); };
    set.plan(row_share.const_data_ptr<double>(), fill);
    set.draw(key, 0, fill, slots.data());
  } else {
    std::vector<double> sum(tables.cells);
    double total = 0;
    for (int64_t c = 0; c < tables.cells; ++c) {
      sum[c] = total += share[c];
    }
    for (int64_t j = 0; j < num_samples; ++j) {
      const PhiloxBlock block = philox(key, 0, j);
      int64_t c = std::upper_bound(sum.begin(), sum.end(), unit_double(block.low()) * total) - sum.begin();
      for (c = std::min(c, tables.cells - 1); tables.size(c) == 0; --c) { // rounding may leave the last point behind the end
      }
      slots[j] = tables.draw(c, block.high() >> 20);
    }
  }
  const Tensor ids = at::empty({num_samples}, targets.options());
  const auto floats = targets.options().dtype(at::kFloat);
  const Tensor log_count = at::empty({num_samples}, floats), target_log_count = at::empty({targets.size(0)}, floats);
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  for (int64_t j = 0; j < num_samples; ++j) {
    __builtin_prefetch(tables.order + slots[j]);
  }
  for (int64_t j = 0; j < num_samples; ++j) {
    id[j] = checked.class_at(slots[j]);
  }
  if (distinct) {
    std::sort(id, id + num_samples);
  }
  const auto prefetch_cells = [&](const int64_t* class_id, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      __builtin_prefetch(checked.cell.const_data_ptr<int32_t>() + class_id[i]);
    }
  };
  prefetch_cells(id, num_samples);
  prefetch_cells(targets.const_data_ptr<int64_t>(), targets.size(0));
  const auto count = [&](int64_t class_id) {
    const int64_t c = checked.cell_of(class_id);
    if (c < 0) {
      return -std::numeric_limits<float>::infinity();
    }
    const double log_weight = checked.log_weight_of(class_id), log_q = std::log(share[c] / tables.mass[c]) + log_weight;
    return float(distinct && number ? set.log_count_by_weight(std::exp(log_weight), c, log_q) : std::log(double(num_samples)) + log_q);
  };
  for (int64_t j = 0; j < num_samples; ++j) {
    log_count.mutable_data_ptr<float>()[j] = count(id[j]);
  }
  for (int64_t q = 0; q < targets.size(0); ++q) {
    target_log_count.mutable_data_ptr<float>()[q] = count(targets.const_data_ptr<int64_t>()[q]);
  }
  return {ids, log_count, target_log_count};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("midx_log_prob", midx_log_prob_cpu);
  m.impl("midx_sample", midx_sample_cpu);
  m.impl("midx_sample_shared", midx_sample_shared_cpu);
}

} // namespace xsoftmax
