#include "core/checks.h"
#include "core/impl.h"
#include "core/philox.h"
#include "samplers/lsh_sample.h"
#include "samplers/sampling.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace xsoftmax {
namespace {

using at::Tensor;
using Draws = std::tuple<Tensor, Tensor, Tensor>;

/// The tables, checked once, and what a query meets in them.
class Tables {
 public:
  Tables(const char* op, const LshIndex& index, double uniform)
      : op_(op), code_(index.code.contiguous()), order_(index.order.contiguous()), start_(index.start.contiguous()), uniform_(uniform) {
    for (int64_t t = 0; t < tables(); ++t) {
      check::offsets(op, "start", start_[t], classes());
    }
    TORCH_CHECK_VALUE(classes() > 0, op, ": expected order with a class to draw, got none");
  }

  int64_t tables() const { return code_.size(1); }
  int64_t classes() const { return order_.size(1); }

  /// First place and size of the bucket of `hash`.
  std::pair<int64_t, int64_t> bucket(int64_t table, int64_t hash) const {
    const int64_t* start = start_.const_data_ptr<int64_t>() + table * start_.size(1) + hash;
    return {start[0], start[1] - start[0]};
  }

  int64_t class_at(int64_t table, int64_t place) const {
    const int64_t id = order_.const_data_ptr<int64_t>()[table * classes() + place];
    TORCH_CHECK_INDEX(id >= 0 && id < code_.size(0), op_, ": expected order in [0, ", code_.size(0), "), got ", id);
    return id;
  }

  double log_q(const int64_t* hash, int64_t id) const {
    const int32_t* code = code_.const_data_ptr<int32_t>() + id * tables();
    if (code[0] < 0) {
      return -std::numeric_limits<double>::infinity();
    }
    double sum = 0;
    int64_t full = 0;
    for (int64_t t = 0; t < tables(); ++t) {
      const int64_t size = bucket(t, hash[t]).second;
      full += size > 0;
      sum += code[t] == hash[t] && size > 0 ? 1.0 / double(size) : 0.0;
    }
    const double even = 1.0 / double(classes());
    return std::log(full > 0 ? uniform_ * even + (1 - uniform_) * sum / double(full) : even);
  }

  /// `full` [T']: the tables whose bucket is not empty.
  int64_t draw(const int64_t* hash, const int64_t* full, int64_t num_full, const PhiloxBlock& block) const {
    const double u = unit_double(block.low());
    if (num_full == 0 || u < uniform_) {
      return class_at(0, int64_t(multiply_shift(block.high(), uint64_t(classes()))));
    }
    const int64_t table = full[std::min(num_full - 1, int64_t((u - uniform_) / (1 - uniform_) * double(num_full)))];
    const auto [begin, size] = bucket(table, hash[table]);
    return class_at(table, begin + int64_t(multiply_shift(block.high(), uint64_t(size))));
  }

 private:
  const char* op_;
  Tensor code_, order_, start_;
  double uniform_;
};

Draws lsh_sample_cpu(const Tensor& seed, const Tensor& input, XS_LSH_INDEX_PARAMS, double uniform, int64_t num_samples, const Tensor& target) {
  constexpr const char* op = "lsh_sample";
  const LshIndex index{XS_LSH_INDEX_ARGS};
  check_lsh(op, input, index, uniform);
  check_draws(op, seed, input, num_samples, false, target);
  check::class_ids(op, "target", target, code.size(0));
  const Tables tables(op, index, uniform);
  const Tensor hashes = lsh_codes(input, std::nullopt, planes, tables.tables()).contiguous(), targets = target.contiguous();
  const auto [ids, log_count, target_log_count] = empty_private_draws(input, num_samples, targets);
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  float *count = log_count.mutable_data_ptr<float>(), *of_target = target_log_count.mutable_data_ptr<float>();
  const double log_samples = std::log(double(num_samples));
  const uint64_t key = seed_value(seed);
  at::parallel_for(0, input.size(0), query_grain(num_samples), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> full;
    for (int64_t q = begin; q < end; ++q) {
      const int64_t* hash = hashes.const_data_ptr<int64_t>() + q * tables.tables();
      full.clear();
      for (int64_t t = 0; t < tables.tables(); ++t) {
        if (tables.bucket(t, hash[t]).second > 0) {
          full.push_back(t);
        }
      }
      for (int64_t j = q * num_samples; j < (q + 1) * num_samples; ++j) {
        id[j] = tables.draw(hash, full.data(), int64_t(full.size()), philox(key, q, j - q * num_samples));
        count[j] = float(log_samples + tables.log_q(hash, id[j]));
      }
      of_target[q] = float(log_samples + tables.log_q(hash, targets.const_data_ptr<int64_t>()[q]));
    }
  });
  return {ids, log_count, target_log_count};
}

Tensor lsh_log_prob_cpu(const Tensor& input, XS_LSH_INDEX_PARAMS, double uniform, const Tensor& ids) {
  constexpr const char* op = "lsh_log_prob";
  if (use_reference()) {
    return lsh_log_prob_reference(input, XS_LSH_INDEX_ARGS, uniform, ids);
  }
  const LshIndex index{XS_LSH_INDEX_ARGS};
  check_lsh(op, input, index, uniform);
  check_query_ids(op, input, ids);
  check::class_ids(op, "ids", ids, code.size(0));
  const Tables tables(op, index, uniform);
  const Tensor hashes = lsh_codes(input, std::nullopt, planes, tables.tables()).contiguous(), flat = ids.contiguous();
  const int64_t width = ids.size(-1);
  const Tensor log_q = at::empty({input.size(0), width}, flat.options().dtype(at::kFloat));
  at::parallel_for(0, input.size(0), query_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t q = begin; q < end; ++q) {
      const int64_t* id = flat.const_data_ptr<int64_t>() + (ids.dim() == 2 ? q * width : 0);
      for (int64_t j = 0; j < width; ++j) {
        log_q.mutable_data_ptr<float>()[q * width + j] =
            float(tables.log_q(hashes.const_data_ptr<int64_t>() + q * tables.tables(), id[j]));
      }
    }
  });
  return log_q;
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("lsh_sample", lsh_sample_cpu);
  m.impl("lsh_log_prob", lsh_log_prob_cpu);
}

} // namespace xsoftmax
