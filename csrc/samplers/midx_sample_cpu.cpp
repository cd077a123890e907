#include "core/checks.h"
#include "core/impl.h"
#include "core/optional.h"
#include "samplers/adaptive.h"
#include "samplers/midx_sample.h"
#include "samplers/midx_sets.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <numeric>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kBlock = 128; // queries whose products are made at once
constexpr int64_t kGroups = 16; // partial sums of the mixture

// Contiguous tables that have passed their checks, and what points into them.
struct CheckedIndex {
  const MidxIndex& index;
  Tensor order, start, mass, cell, log_weight, prefix, heaviest;
  int64_t codewords;
  MidxCodewords products;
  MidxCellTables tables;

  CheckedIndex(const char* op, const Tensor& input, const MidxIndex& index)
      : index(index),
        order(index.order.contiguous()),
        start(index.start.contiguous()),
        mass(index.mass.contiguous()),
        cell(index.cell.contiguous()),
        codewords(index.codewords1.size(0)),
        products(input, index) {
    const bool weighted = given(index.log_weight);
    if (weighted) {
      log_weight = index.log_weight->contiguous();
      prefix = index.prefix->contiguous();
      heaviest = index.heaviest->contiguous();
    }
    const int64_t cells = codewords * codewords;
    tables = {cells, order.size(0), order.const_data_ptr<int64_t>(), start.const_data_ptr<int64_t>(), mass.const_data_ptr<double>(),
              weighted ? prefix.const_data_ptr<double>() : nullptr, weighted ? heaviest.const_data_ptr<double>() : nullptr};
    // They come from a state dict, which may be anybody's.
    check::offsets(op, "start", start, tables.classes);
    for (int64_t c = 0; c < cells; ++c) {
      TORCH_CHECK_VALUE((tables.mass[c] > 0) == (tables.size(c) > 0), op, ": expected mass above 0 just where start has classes, got ",
                        tables.mass[c], " for ", tables.size(c), " classes in cell ", c);
    }
  }

  int64_t class_at(int64_t slot) const {
    const int64_t id = tables.order[slot];
    TORCH_CHECK_INDEX(uint64_t(id) < uint64_t(cell.size(0)), "MIDX: expected order in [0, ", cell.size(0), "), got ", id);
    return id;
  }
  double log_weight_of(int64_t id) const { return log_weight.defined() ? double(log_weight.const_data_ptr<float>()[id]) : 0.0; }
  /// -1: never drawn.
  int64_t cell_of(int64_t id) const {
    const int64_t c = cell.const_data_ptr<int32_t>()[id];
    TORCH_CHECK_INDEX(c >= -1 && c < tables.cells, "MIDX: expected cell in [-1, ", tables.cells, "), got ", c, " for class ", id);
    return c;
  }
};

// Calls task(begin, queries) with blocks of queries, on several threads. Each product runs on one thread, so that rounding does not
// depend on how many there are.
template <typename Task>
void for_query_blocks(const Tensor& input, const CheckedIndex& checked, int64_t per_task, const Task& task) {
  const int64_t blocks = (input.size(0) + kBlock - 1) / kBlock, tasks = (blocks + per_task - 1) / per_task;
  // A loop of one task would not be a parallel region, whose products run on one thread.
  at::parallel_for(0, std::max<int64_t>(2, tasks), 1, [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (int64_t b = first * per_task; b < std::min(blocks, last * per_task); ++b) {
      const int64_t begin = b * kBlock;
      task(begin, midx_queries(input.narrow(0, begin, std::min(kBlock, input.size(0) - begin)), checked.products, checked.mass));
    }
  });
}

// One query's rows of MidxQueries.
struct QueryRow {
  const double *first, *second, *second_exp, *first_probability;
  double log_z;

  QueryRow(const MidxQueries& queries, int64_t q, int64_t k)
      : first(queries.score.const_data_ptr<double>() + q * 2 * k),
        second(first + k),
        second_exp(queries.exp.const_data_ptr<double>() + q * 2 * k + k),
        first_probability(queries.first_probability.const_data_ptr<double>() + q * k),
        log_z(queries.log_z.const_data_ptr<double>()[q]) {}

  double log_density(int64_t cell, int64_t k) const { return first[cell / k] + second[cell % k] - log_z; }
};

// Draws for one query after another; what it holds is for reuse.
class PrivateDraws {
 public:
  PrivateDraws(const CheckedIndex& checked, int64_t samples, bool distinct)
      : checked_(checked),
        tables_(checked.tables),
        k_(checked.codewords),
        samples_(samples),
        distinct_(distinct),
        set_(tables_, samples),
        sum_(k_),
        heads_(k_ + 1),
        slot_(samples),
        cell_(samples),
        draw_(samples),
        block_(samples),
        share_(distinct ? tables_.cells : 0) {}

  void run(uint64_t seed, uint64_t query, const QueryRow& row, int64_t* ids, float* log_count) {
    number_ = std::isfinite(row.log_z);
    if (!number_) {
      // A query that is no number: its loss will say so. Any classes do.
      for (int64_t j = 0; j < samples_; ++j) {
        ids[j] = checked_.class_at(distinct_ ? j : int64_t(multiply_shift(philox(seed, query, j).low(), uint64_t(tables_.classes))));
        log_count[j] = std::numeric_limits<float>::quiet_NaN();
      }
      return;
    }
    if (distinct_) {
      draw_distinct(seed, query, row);
    } else {
      draw_independent(seed, query, row);
    }
    const double log_samples = std::log(double(samples_));
    for (int64_t j = 0; j < samples_; ++j) {
      ids[j] = checked_.class_at(slot_[j]);
    }
    for (int64_t j = 0; j < samples_; ++j) {
      const double log_q = row.log_density(cell_[j], k_) + (tables_.prefix ? checked_.log_weight_of(ids[j]) : 0.0);
      log_count[j] = float(distinct_ ? set_.log_count(slot_[j], cell_[j], log_q) : log_samples + log_q);
    }
  }

  // Of a class that may not have been drawn, for the query of the last run.
  float log_count_of(const QueryRow& row, int64_t id) const {
    if (!number_) {
      return std::numeric_limits<float>::quiet_NaN();
    }
    const int64_t cell = checked_.cell_of(id);
    if (cell < 0) {
      return -std::numeric_limits<float>::infinity();
    }
    const double log_weight = checked_.log_weight_of(id), log_q = row.log_density(cell, k_) + log_weight;
    return float(distinct_ ? set_.log_count_by_weight(std::exp(log_weight), cell, log_q) : std::log(double(samples_)) + log_q);
  }

 private:
  // The first k whose running sum exceeds `aim`.
  int64_t search(double aim) const {
    const double* sum = sum_.data();
    int64_t n = k_;
    while (n > 1) {
      const int64_t half = n / 2;
      sum += sum[half - 1] > aim ? 0 : half;
      n -= half;
    }
    return sum - sum_.data();
  }

  void draw_independent(uint64_t seed, uint64_t query, const QueryRow& row) {
    double total = 0;
    for (int64_t k = 0; k < k_; ++k) {
      sum_[k] = total += row.first_probability[k];
    }
    std::fill(heads_.begin(), heads_.end(), 0);
    for (int64_t j = 0; j < samples_; ++j) { // 42 bits for each codeword, 44 for the class
      block_[j] = philox(seed, query, j);
      cell_[j] = search(double(block_[j].low() >> 22) * 0x1p-42 * total);
      ++heads_[cell_[j] + 1];
    }
    // The draws of one first codeword together: they share the sums over the second.
    for (int64_t k = 0; k < k_; ++k) {
      heads_[k + 1] += heads_[k];
    }
    for (int64_t j = 0; j < samples_; ++j) {
      draw_[heads_[cell_[j]]++] = j;
    }
    for (int64_t at = 0; at < samples_;) {
      const int64_t k1 = cell_[draw_[at]], end = heads_[k1];
      const double* mass = tables_.mass + k1 * k_;
      total = 0;
      for (int64_t k = 0; k < k_; ++k) {
        sum_[k] = total += mass[k] * row.second_exp[k];
      }
      for (; at < end; ++at) {
        const int64_t j = draw_[at];
        const uint64_t bits = (block_[j].low() & 0x3FFFFF) << 20 | block_[j].high() >> 44;
        cell_[j] = k1 * k_ + search(double(bits) * 0x1p-42 * total);
        slot_[j] = tables_.draw(cell_[j], block_[j].high() & 0xFFFFFFFFFFF);
        __builtin_prefetch(tables_.order + slot_[j]);
      }
    }
  }

  void draw_distinct(uint64_t seed, uint64_t query, const QueryRow& row) {
    for (int64_t k1 = 0; k1 < k_; ++k1) {
      const double* mass = tables_.mass + k1 * k_;
      double total = 0;
      for (int64_t k = 0; k < k_; ++k) {
        total += share_[k1 * k_ + k] = mass[k] * row.second_exp[k];
      }
      const double scale = total > 0 ? row.first_probability[k1] / total : 0.0;
      for (int64_t k = 0; k < k_; ++k) {
        share_[k1 * k_ + k] *= scale;
      }
    }
    set_.plan(share_.data());
    set_.draw(seed, query, slot_.data());
    for (int64_t j = 0; j < samples_; ++j) {
      cell_[j] = checked_.cell_of(checked_.class_at(slot_[j]));
    }
  }

  const CheckedIndex& checked_;
  const MidxCellTables& tables_;
  const int64_t k_, samples_;
  const bool distinct_;
  bool number_ = false; // whether the query of the last run is one
  MidxSystematicSet set_;
  std::vector<double> sum_;
  std::vector<int64_t> heads_, slot_, cell_, draw_;
  std::vector<PhiloxBlock> block_;
  std::vector<double> share_;
};

MidxDraws midx_sample_cpu(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, int64_t num_samples, bool distinct,
                          const Tensor& target) {
  constexpr const char* op = "midx_sample";
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_midx_sample(op, seed, input, index, num_samples, false, distinct, target);
  const CheckedIndex checked(op, input, index);
  check::class_ids(op, "target", target, cell.size(0));
  const Tensor targets = target.contiguous();
  const auto [ids, log_count, target_log_count] = empty_private_draws(input, num_samples, targets);
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  float *count = log_count.mutable_data_ptr<float>(), *target_count = target_log_count.mutable_data_ptr<float>();
  const uint64_t key = seed_value(seed);
  for_query_blocks(input, checked, 1, [&](int64_t begin, const MidxQueries& queries) {
    PrivateDraws draws(checked, num_samples, distinct);
    for (int64_t i = 0; i < queries.log_z.size(0); ++i) {
      const int64_t q = begin + i;
      const QueryRow row(queries, i, checked.codewords);
      draws.run(key, q, row, id + q * num_samples, count + q * num_samples);
      target_count[q] = draws.log_count_of(row, targets.const_data_ptr<int64_t>()[q]);
    }
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
  const CheckedIndex checked(op, input, index);
  check::class_ids(op, "ids", ids, cell.size(0));
  const Tensor flat = ids.contiguous(), log_prob = at::empty({input.size(0), ids.size(-1)}, flat.options().dtype(at::kFloat));
  const int64_t width = ids.size(-1), k = checked.codewords;
  const bool shared = ids.dim() == 1;
  const int64_t* id = flat.const_data_ptr<int64_t>();
  float* out = log_prob.mutable_data_ptr<float>();
  std::vector<int64_t> cells(shared ? width : 0); // of ids that all queries share: looked up once
  std::transform(id, id + cells.size(), cells.begin(), [&](int64_t i) { return checked.cell_of(i); });
  for_query_blocks(input, checked, 1, [&](int64_t begin, const MidxQueries& queries) {
    for (int64_t i = 0; i < queries.log_z.size(0); ++i) {
      const QueryRow row(queries, i, k);
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
Tensor mixture_shares(const Tensor& input, const CheckedIndex& checked, bool rms) {
  const int64_t blocks = (input.size(0) + kBlock - 1) / kBlock, per_group = std::max<int64_t>(1, (blocks + kGroups - 1) / kGroups);
  std::vector<Tensor> partial((blocks + per_group - 1) / per_group);
  for_query_blocks(input, checked, per_group, [&](int64_t begin, const MidxQueries& queries) {
    Tensor& sum = partial[begin / kBlock / per_group];
    const Tensor cells = midx_cell_sums(queries, checked.mass, rms);
    sum = sum.defined() ? sum.add_(cells) : cells;
  });
  Tensor share = partial.empty() ? checked.mass.clone() : partial[0];
  for (size_t i = 1; i < partial.size(); ++i) {
    share.add_(partial[i]);
  }
  if (rms && !partial.empty()) {
    share.sqrt_();
  }
  return share.div_(share.sum());
}

MidxDraws midx_sample_shared_cpu(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, int64_t num_samples, bool distinct,
                                 bool rms, const Tensor& target) {
  constexpr const char* op = "midx_sample_shared";
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_midx_sample(op, seed, input, index, num_samples, true, distinct, target);
  const CheckedIndex checked(op, input, index);
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
    set.plan(share);
    set.draw(key, 0, slots.data());
  } else {
    std::vector<double> sum(tables.cells);
    double total = 0;
    for (int64_t c = 0; c < tables.cells; ++c) {
      sum[c] = total += share[c];
    }
    for (int64_t j = 0; j < num_samples; ++j) {
      const PhiloxBlock block = philox(key, 0, j);
      const int64_t c = std::upper_bound(sum.begin(), sum.end(), unit_double(block.low()) * total) - sum.begin();
      slots[j] = tables.draw(c, block.high() >> 20);
    }
  }
  const Tensor ids = at::empty({num_samples}, targets.options());
  const auto floats = targets.options().dtype(at::kFloat);
  const Tensor log_count = at::empty({num_samples}, floats), target_log_count = at::empty({targets.size(0)}, floats);
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  for (int64_t j = 0; j < num_samples; ++j) {
    id[j] = checked.class_at(slots[j]);
  }
  if (distinct) {
    std::sort(id, id + num_samples);
  }
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
