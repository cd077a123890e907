#include "op/checks.h"
#include "random/philox.h"
#include "proposal/study/lsh_sample.h"
#include "proposal/study/lsh_tables.h"
#include "proposal/sampling.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;

/// The validated tables, and lookups in them.
class Tables {
 public:
  Tables(const char* op, const LshIndex& index, double uniform)
      : op_(op), code_(index.code.contiguous()), order_(index.order.contiguous()),
        start_(index.start.contiguous()), view_{code_.size(1),
                                                order_.size(0),
                                                code_.size(0),
                                                start_.size(1) - 1,
                                                code_.const_data_ptr<int32_t>(),
                                                order_.const_data_ptr<int64_t>(),
                                                start_.const_data_ptr<int64_t>(),
                                                uniform} {
    for (int64_t t = 0; t < tables(); ++t) {
      check::offsets(op, "start", start_[t], view_.classes);
    }
    TORCH_CHECK_VALUE(view_.classes > 0, op, ": expected order with a class to draw, got none");
  }

  int64_t tables() const { return view_.tables; }
  const LshTables* operator->() const { return &view_; }

  /// id may be -1 (no class).
  double log_q(const int64_t* hash, int64_t id) const {
    return id < 0 ? -std::numeric_limits<double>::infinity()
                  : view_.log_q(hash, view_.code + id * view_.tables);
  }

  /// Draws a class. `full` [T']: the tables whose bucket is not empty.
  int64_t draw(const int64_t* hash, const int64_t* full, int64_t num_full,
               const PhiloxBlock& block) const {
    const int64_t turn = view_.table_of(block, num_full),
                  id = view_.order[view_.place(hash, turn < 0 ? -1 : full[turn], block)];
    TORCH_CHECK_INDEX(id >= 0 && id < view_.num_classes, op_, ": expected order in [0, ",
                      view_.num_classes, "), got ", id);
    return id;
  }

 private:
  const char* op_;
  Tensor code_, order_, start_;
  LshTables view_;
};

} // namespace

PrivateDraws LshFamily::sample_cpu(const Tensor& seed, const Tensor& queries,
                                   const OptionalTensor& target, const Targets& targets,
                                   const LshIndex& index, const LshOptions& options) {
  const Tables tables("lsh_sample", index, options.uniform);
  const Tensor hashes =
      lsh_codes(queries, std::nullopt, index.planes, tables.tables()).contiguous();
  const auto draws = empty_private_draws(seed, queries, target, options.num_samples);
  const auto& [ids, log_count, target_log_count] = draws;
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  float *count = log_count.mutable_data_ptr<float>(),
        *target_count = target_log_count.mutable_data_ptr<float>();
  const int64_t samples = options.num_samples;
  const double log_samples = std::log(double(samples));
  const DrawSeed from(seed);
  at::parallel_for(0, queries.size(0), query_grain(samples), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> full;
    for (int64_t q = begin; q < end; ++q) {
      const int64_t* hash = hashes.const_data_ptr<int64_t>() + q * tables.tables();
      full.clear();
      for (int64_t t = 0; t < tables.tables(); ++t) {
        if (tables->size(t, hash[t]) > 0) {
          full.push_back(t);
        }
      }
      const auto count_of = [&](int64_t i) { return float(log_samples + tables.log_q(hash, i)); };
      for (int64_t j = q * samples; j < (q + 1) * samples; ++j) {
        id[j] = tables.draw(hash, full.data(), int64_t(full.size()),
                            philox(from.key(), from.query(q), j - q * samples));
        count[j] = count_of(id[j]);
      }
      std::transform(targets.of(q), targets.of(q + 1), target_count + q * targets.width, count_of);
    }
  });
  return draws;
}

Tensor LshFamily::log_count_cpu(const Tensor& queries, const Tensor& ids, const LshIndex& index,
                                const LshOptions& options) {
  const Tables tables("lsh_log_count", index, options.uniform);
  const Tensor hashes =
      lsh_codes(queries, std::nullopt, index.planes, tables.tables()).contiguous();
  const Tensor flat = ids_of_queries(queries, ids).contiguous();
  const int64_t width = ids.size(-1);
  const double log_samples = std::log(double(options.num_samples));
  const Tensor log_count = at::empty({queries.size(0), width}, flat.options().dtype(at::kFloat));
  at::parallel_for(0, queries.size(0), query_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t q = begin; q < end; ++q) {
      const int64_t *id = flat.const_data_ptr<int64_t>() + q * width,
                    *hash = hashes.const_data_ptr<int64_t>() + q * tables.tables();
      std::transform(id, id + width, log_count.mutable_data_ptr<float>() + q * width,
                     [&](int64_t i) { return float(log_samples + tables.log_q(hash, i)); });
    }
  });
  return log_count;
}

} // namespace xsoftmax
