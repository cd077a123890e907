#include "core/autocast.h"
#include "core/checks.h"
#include "core/dtypes.h"
#include "core/optional.h"
#include "samplers/adaptive.h"
#include "samplers/midx_sample.h"
#include "samplers/midx_sets.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

namespace xsoftmax {
namespace {

// Exact MIDX (Theorem 1): cells weigh the scores that quantisation leaves out as well, so that q is the softmax itself. O(N D) a query:
// for study, not for speed.
//
//     P1(k1) ~ psi_{k1} e^{z1.c1[k1]},  P2(k2 | k1) ~ omega_{k1,k2} e^{z2.c2[k2]},  P3(i | k1, k2) ~ e^{r_i},
//     omega_{k1,k2} = sum over the cell of e^{r_i},  psi_{k1} = sum_{k2} omega_{k1,k2} e^{z2.c2[k2]},
//     r_i = z.table[i] + bias[i] - z1.c1[k1] - z2.c2[k2]
//
// midx_exact_sample(seed, input, INDEX, table, bias, num_samples) -> (ids int64 [Q, M], log_q float32 [Q, M]): independent private draws.
// midx_exact_log_prob(input, INDEX, table, bias, ids) -> float32: as midx_log_prob.
// table [N, D] float32, bias [N] float32 or none: what the index was built from, or has become of it. Query q reads blocks (q, 0 ..).

using at::Tensor;
using Draws = std::tuple<Tensor, Tensor>;

void check_exact(const char* op, const Tensor& input, const MidxIndex& index, const Tensor& table, const OptionalTensor& bias) {
  check_midx(op, input, index);
  check::dim(op, "table", table, 2);
  check::dtype(op, "table", table, at::kFloat);
  check::size(op, "table", table, 0, index.cell.sym_size(0), "the size of cell");
  check::size(op, "table", table, 1, input.sym_size(1), "the columns of input");
  check::same_device(op, "table", table, "input", input);
  if (given(bias)) {
    check::dim(op, "bias", *bias, 1);
    check::dtype(op, "bias", *bias, at::kFloat);
    check::size(op, "bias", *bias, 0, table.sym_size(0), "the rows of table");
  }
}

Draws midx_exact_sample_meta(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, const Tensor& table,
                             const OptionalTensor& bias, c10::SymInt num_samples) {
  check_sampling("midx_exact_sample", seed, std::nullopt, num_samples);
  check_exact("midx_exact_sample", input, {XS_MIDX_INDEX_ARGS}, table, bias);
  return {at::empty_symint({input.sym_size(0), num_samples}, seed.options()),
          at::empty_symint({input.sym_size(0), num_samples}, seed.options().dtype(at::kFloat))};
}

Tensor midx_exact_log_prob_meta(const Tensor& input, XS_MIDX_INDEX_PARAMS, const Tensor& table, const OptionalTensor& bias,
                                const Tensor& ids) {
  check_exact("midx_exact_log_prob", input, {XS_MIDX_INDEX_ARGS}, table, bias);
  check_query_ids("midx_exact_log_prob", input, ids);
  return at::empty_symint({input.sym_size(0), ids.sym_size(-1)}, ids.options().dtype(at::kFloat));
}

// One query's three levels.
class Levels {
 public:
  Levels(const MidxCellTables& tables, int64_t codewords) : tables_(tables), k_(codewords), prefix_(tables.classes), cell_sum_(tables.cells),
                                                            sum_(codewords) {}

  /// score [N]: z.table + bias. omega e^{codeword scores} of a cell is the sum of e^score over it: codeword scores apart from the rest of
  /// a score may both be beyond any float.
  void fill(const double* score) {
    double most = -std::numeric_limits<double>::infinity();
    for_slots([&](int64_t slot, int64_t) { most = std::max(most, score[tables_.order[slot]]); });
    std::fill(cell_sum_.begin(), cell_sum_.end(), 0.0);
    for_slots([&](int64_t slot, int64_t cell) { prefix_[slot] = cell_sum_[cell] += std::exp(score[tables_.order[slot]] - most); });
    double total = 0;
    for (int64_t k1 = 0; k1 < k_; ++k1) {
      double psi = 0;
      for (int64_t k2 = 0; k2 < k_; ++k2) {
        psi += cell_sum_[k1 * k_ + k2];
      }
      sum_[k1] = total += psi;
    }
    log_z_ = std::log(total) + most;
  }

  double log_z() const { return log_z_; }

  int64_t draw(uint64_t seed, uint64_t query, uint64_t number) {
    const PhiloxBlock one = philox(seed, query, 2 * number), two = philox(seed, query, 2 * number + 1);
    const int64_t k1 = find(sum_.data(), k_, unit_double(one.low()) * sum_[k_ - 1]);
    inner_.resize(k_);
    double total = 0;
    for (int64_t k2 = 0; k2 < k_; ++k2) {
      inner_[k2] = total += cell_sum_[k1 * k_ + k2];
    }
    const int64_t cell = k1 * k_ + find(inner_.data(), k_, unit_double(one.high()) * total);
    const int64_t begin = tables_.start[cell];
    return tables_.order[begin + find(prefix_.data() + begin, tables_.size(cell), unit_double(two.low()) * cell_sum_[cell])];
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

  static int64_t find(const double* sum, int64_t n, double aim) {
    return std::min<int64_t>(std::upper_bound(sum, sum + n, aim) - sum, n - 1);
  }

  const MidxCellTables& tables_;
  const int64_t k_;
  std::vector<double> prefix_, cell_sum_, sum_, inner_;
  double log_z_ = 0;
};

// Calls visit(q, scores of all classes, levels) for each query, on several threads.
template <typename Visit>
void for_queries(const char* op, const Tensor& input, const MidxIndex& index, const Tensor& table, const OptionalTensor& bias,
                 const Visit& visit) {
  const int64_t k = index.codewords1.size(0);
  const Tensor order = index.order.contiguous(), start = index.start.contiguous();
  check::offsets(op, "start", start, order.size(0));
  check::class_ids(op, "the classes in order", order, table.size(0));
  const MidxCellTables tables{k, k * k, order.size(0), order.const_data_ptr<int64_t>(), start.const_data_ptr<int64_t>(), nullptr, nullptr,
                              nullptr};
  const Tensor x = input.to(at::kFloat);
  at::parallel_for(0, x.size(0), 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Levels levels(tables, k);
    for (int64_t q = begin; q < end; ++q) {
      Tensor score = at::mm(x.narrow(0, q, 1), table.t()).to(at::kDouble);
      score = (given(bias) ? score + bias->to(at::kDouble) : score).contiguous();
      levels.fill(score.const_data_ptr<double>());
      visit(q, score.const_data_ptr<double>(), levels);
    }
  });
}

Draws midx_exact_sample_cpu(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, const Tensor& table,
                            const OptionalTensor& bias, int64_t num_samples) {
  constexpr const char* op = "midx_exact_sample";
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_sampling(op, seed, std::nullopt, num_samples);
  check_exact(op, input, index, table, bias);
  const Tensor ids = at::empty({input.size(0), num_samples}, seed.options());
  const Tensor log_q = at::empty({input.size(0), num_samples}, seed.options().dtype(at::kFloat));
  const uint64_t key = seed_value(seed);
  for_queries(op, input, index, table, bias, [&](int64_t q, const double* score, Levels& levels) {
    for (int64_t j = 0; j < num_samples; ++j) {
      const int64_t id = levels.draw(key, q, j);
      ids.mutable_data_ptr<int64_t>()[q * num_samples + j] = id;
      log_q.mutable_data_ptr<float>()[q * num_samples + j] = float(score[id] - levels.log_z());
    }
  });
  return {ids, log_q};
}

Tensor midx_exact_log_prob_cpu(const Tensor& input, XS_MIDX_INDEX_PARAMS, const Tensor& table, const OptionalTensor& bias,
                               const Tensor& ids) {
  constexpr const char* op = "midx_exact_log_prob";
  const MidxIndex index{XS_MIDX_INDEX_ARGS};
  check_exact(op, input, index, table, bias);
  check_query_ids(op, input, ids);
  check::class_ids(op, "ids", ids, table.size(0));
  const Tensor flat = ids.contiguous(), cells = cell.contiguous();
  const int64_t width = ids.size(-1);
  const Tensor log_q = at::empty({input.size(0), width}, ids.options().dtype(at::kFloat));
  for_queries(op, input, index, table, bias, [&](int64_t q, const double* score, const Levels& levels) {
    for (int64_t j = 0; j < width; ++j) {
      const int64_t id = flat.const_data_ptr<int64_t>()[(ids.dim() == 2 ? q * width : 0) + j];
      log_q.mutable_data_ptr<float>()[q * width + j] = cells.const_data_ptr<int32_t>()[id] < 0
          ? -std::numeric_limits<float>::infinity() : float(score[id] - levels.log_z());
    }
  });
  return log_q;
}

// Another device gets the CPU's draws.

Draws midx_exact_sample_elsewhere(const Tensor& seed, const Tensor& input, XS_MIDX_INDEX_PARAMS, const Tensor& table,
                                  const OptionalTensor& bias, int64_t num_samples) {
  const auto [ids, log_q] =
      midx_exact_sample_cpu(seed.cpu(), input.cpu(), XS_MIDX_INDEX_ON_CPU, table.cpu(), to_cpu(bias), num_samples);
  return {ids.to(input.device()), log_q.to(input.device())};
}

Tensor midx_exact_log_prob_elsewhere(const Tensor& input, XS_MIDX_INDEX_PARAMS, const Tensor& table, const OptionalTensor& bias,
                                     const Tensor& ids) {
  return midx_exact_log_prob_cpu(input.cpu(), XS_MIDX_INDEX_ON_CPU, table.cpu(), to_cpu(bias), ids.cpu()).to(input.device());
}

} // namespace

TORCH_LIBRARY_FRAGMENT(xsoftmax, m) {
  m.def("midx_exact_sample(Tensor seed, Tensor input, " XS_MIDX_INDEX_SCHEMA ", Tensor table, Tensor? bias, SymInt num_samples) -> "
        "(Tensor ids, Tensor log_q)");
  m.def("midx_exact_log_prob(Tensor input, " XS_MIDX_INDEX_SCHEMA ", Tensor table, Tensor? bias, Tensor ids) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("midx_exact_sample", midx_exact_sample_elsewhere);
  m.impl("midx_exact_log_prob", midx_exact_log_prob_elsewhere);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("midx_exact_sample", midx_exact_sample_meta);
  m.impl("midx_exact_log_prob", midx_exact_log_prob_meta);
}

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("midx_exact_sample", midx_exact_sample_cpu);
  m.impl("midx_exact_log_prob", midx_exact_log_prob_cpu);
}

TORCH_LIBRARY_IMPL(xsoftmax, AutocastCPU, m) { below_autocast(m, {"midx_exact_sample", "midx_exact_log_prob"}); }
TORCH_LIBRARY_IMPL(xsoftmax, AutocastCUDA, m) { below_autocast(m, {"midx_exact_sample", "midx_exact_log_prob"}); }

} // namespace xsoftmax
