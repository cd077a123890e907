#include "op/checks.h"
#include "cpu/dtypes.h"
#include "proposal/midx/midx_sample.h"
#include "proposal/midx/midx_sets.h"
#include "proposal/sampling.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

// Exact MIDX (Theorem 1): the weights of cells include the scores that quantisation omits, so q is
// the softmax itself. O(N D) per query: for study, not for speed.
//
//     P1(k1) ~ psi_{k1} e^{z1.c1[k1]}
//     P2(k2 | k1) ~ omega_{k1,k2} e^{z2.c2[k2]}
//     P3(i | k1, k2) ~ e^{r_i}
//     omega_{k1,k2} = sum over the cell of e^{r_i}
//     psi_{k1} = sum_{k2} omega_{k1,k2} e^{z2.c2[k2]}
//     r_i = z.table[i] + table_bias[i] - z1.c1[k1] - z2.c2[k2]
//
// Query q reads Philox blocks (q, 0 ...).

using at::Tensor;

// The three levels of probabilities for one query.
class Levels {
 public:
  Levels(const MidxCellTables& tables, int64_t codewords)
      : tables_(tables), k_(codewords), prefix_(tables.classes), cell_sum_(tables.cells),
        sum_(codewords) {}

  /// Computes the levels from score [N], which is z.table + bias. omega e^{codeword scores} of a
  /// cell is computed as the sum of e^score over the cell, because codeword scores and remainders
  /// may each overflow.
  void fill(const double* score) {
    double best = -std::numeric_limits<double>::infinity();
    for_slots([&](int64_t slot, int64_t) { best = std::max(best, score[tables_.order[slot]]); });
    std::fill(cell_sum_.begin(), cell_sum_.end(), 0.0);
    for_slots([&](int64_t slot, int64_t cell) {
      prefix_[slot] = cell_sum_[cell] += std::exp(score[tables_.order[slot]] - best);
    });
    double total = 0;
    for (int64_t k1 = 0; k1 < k_; ++k1) {
      double psi = 0;
      for (int64_t k2 = 0; k2 < k_; ++k2) {
        psi += cell_sum_[k1 * k_ + k2];
      }
      sum_[k1] = total += psi;
    }
    log_z_ = std::log(total) + best;
  }

  double log_z() const { return log_z_; }

  int64_t draw(uint64_t seed, uint64_t query, uint64_t number) {
    const PhiloxBlock one = philox(seed, query, 2 * number),
                      two = philox(seed, query, 2 * number + 1);
    const int64_t k1 = find(sum_.data(), k_, unit_double(one.low()) * sum_[k_ - 1]);
    inner_.resize(k_);
    double total = 0;
    for (int64_t k2 = 0; k2 < k_; ++k2) {
      inner_[k2] = total += cell_sum_[k1 * k_ + k2];
    }
    const int64_t cell = k1 * k_ + find(inner_.data(), k_, unit_double(one.high()) * total);
    const int64_t begin = tables_.start[cell];
    return tables_.order[begin +
                         find(prefix_.data() + begin, tables_.size(cell),
                              unit_double(two.low()) * cell_sum_[cell])];
  }

 private:
  template <typename Visit>
  void for_slots(const Visit& visit) {
    for (int64_t cell = 0; cell < tables_.cells; ++cell) {
      for (int64_t slot = tables_.start[cell]; slot < tables_.start[cell + 1]; ++slot) {
        visit(slot, cell);
      }
    }
  }

  static int64_t find(const double* sum, int64_t n, double target_sum) {
    return std::min<int64_t>(std::upper_bound(sum, sum + n, target_sum) - sum, n - 1);
  }

  const MidxCellTables& tables_;
  const int64_t k_;
  std::vector<double> prefix_, cell_sum_, sum_, inner_;
  double log_z_ = 0;
};

// Calls visit(q, scores of all classes, levels) for each query, on several threads.
template <typename Visit>
void for_queries(const char* op, const Tensor& queries, const MidxIndex& index,
                 const Visit& visit) {
  const int64_t k = index.codewords1.size(0);
  const Tensor order = index.order.contiguous(), start = index.start.contiguous();
  check::offsets(op, "start", start, order.size(0));
  check::class_ids(op, "the classes in order", order, index.table->size(0));
  const MidxCellTables tables{k,
                              k * k,
                              order.size(0),
                              order.const_data_ptr<int64_t>(),
                              start.const_data_ptr<int64_t>(),
                              nullptr,
                              nullptr,
                              nullptr};
  const Tensor x = queries.to(at::kFloat);
  at::parallel_for(0, x.size(0), 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Levels levels(tables, k);
    for (int64_t q = begin; q < end; ++q) {
      Tensor score = at::mm(x.narrow(0, q, 1), index.table->t()).to(at::kDouble);
      score = (is_defined(index.table_bias) ? score + index.table_bias->to(at::kDouble) : score)
                  .contiguous();
      levels.fill(score.const_data_ptr<double>());
      visit(q, score.const_data_ptr<double>(), levels);
    }
  });
}

} // namespace

PrivateDraws midx_exact_sample(const Tensor& seed, const Tensor& queries,
                               const OptionalTensor& target, const Targets& targets,
                               const MidxIndex& index, int64_t num_samples) {
  const auto draws = empty_private_draws(seed, queries, target, num_samples);
  const auto& [ids, log_count, target_log_count] = draws;
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  float *count = log_count.mutable_data_ptr<float>(),
        *target_count = target_log_count.mutable_data_ptr<float>();
  const Tensor cells = index.cell.contiguous();
  const int32_t* cell = cells.const_data_ptr<int32_t>();
  const double log_samples = std::log(double(num_samples));
  const DrawSeed from(seed);
  for_queries("midx_sample", queries, index, [&](int64_t q, const double* score, Levels& levels) {
    const auto count_of = [&](int64_t i) {
      return i < 0 || cell[i] < 0 ? -std::numeric_limits<float>::infinity()
                                  : float(log_samples + (score[i] - levels.log_z()));
    };
    for (int64_t j = 0; j < num_samples; ++j) {
      id[q * num_samples + j] = levels.draw(from.key(), from.query(q), j);
      count[q * num_samples + j] = count_of(id[q * num_samples + j]);
    }
    std::transform(targets.of(q), targets.of(q + 1), target_count + q * targets.width, count_of);
  });
  return draws;
}

Tensor midx_exact_log_count(const Tensor& queries, const Tensor& ids, const MidxIndex& index,
                            int64_t num_samples) {
  const Tensor flat = ids_of_queries(queries, ids).contiguous(), cells = index.cell.contiguous();
  const int64_t width = ids.size(-1);
  const double log_samples = std::log(double(num_samples));
  const Tensor log_count = at::empty({queries.size(0), width}, ids.options().dtype(at::kFloat));
  for_queries("midx_log_count", queries, index,
              [&](int64_t q, const double* score, const Levels& levels) {
                const int64_t* id = flat.const_data_ptr<int64_t>() + q * width;
                std::transform(id, id + width, log_count.mutable_data_ptr<float>() + q * width,
                               [&](int64_t i) {
                                 return cells.const_data_ptr<int32_t>()[i] < 0
                                     ? -std::numeric_limits<float>::infinity()
                                     : float(log_samples + (score[i] - levels.log_z()));
                               });
              });
  return log_count;
}

} // namespace xsoftmax
