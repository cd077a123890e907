#include "cpu/dtypes.h"
#include "cpu/impl.h"
#include "retrieval/perturbed_argmax.h"
#include "retrieval/search_cells_cpu.h"
#include "retrieval/search_topk.h"
#include "table/row_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kSearchTopkCpu = "search_topk";

/// A search of a class table of dtype T.
template <typename T>
class Search : public CellReader {
 public:
  Search(const Tensor& input, const Tensor& weight, const Tensor& bias,
         const SearchIndexView& index, int64_t k, const SearchOptions& options)
      : CellReader(index, weight.size(0), k, options), input_(const_data<T>(input)),
        weight_(const_data<T>(weight)), bias_(bias.defined() ? const_data<T>(bias) : nullptr),
        features_(weight.size(1)) {}

  using CellReader::perturb;

  void run(int64_t queries, opmath<T>* scores, int64_t* ids, int64_t* cells_read, bool* certified) {
    const int64_t wave = wave_size();
    for (int64_t first = 0; first < queries; first += wave) {
      read_wave(first, std::min(wave, queries - first));
      at::parallel_for(0, count_, 1, [&](int64_t begin, int64_t end) {
        ScanScratch scratch;
        for (int64_t q = begin; q < end; ++q) {
          const int64_t at = first_ + q;
          write(q, scratch, scores + at * k_, ids + at * k_, cells_read + at, certified + at);
        }
      });
    }
  }

 private:
  void widen(int64_t q, std::vector<double>& wide) const override {
    const T* input = input_ + (first_ + q) * features_;
    wide.resize(index_.width);
    if constexpr (std::is_same_v<T, double>) {
      std::copy_n(input, features_, wide.data());
    } else {
      std::vector<float> row(features_);
      row_kernels().of(input).widen_row(row.data(), input, features_);
      std::copy_n(row.data(), features_, wide.data());
    }
    if (bias_ != nullptr) {
      wide[features_] = index_.beta.const_data_ptr<float>()[0];
    }
  }

  void rescore(int64_t q, BestClasses& found, ScanScratch& scratch) const override {
    std::erase_if(found.candidates,
                  [&](const BestClasses::Candidate& one) { return one.upper < found.threshold; });
    widen(q, scratch.wide);
    for (double& z : scratch.wide) {
      z = queries_[q].scaled(z);
    }
    for (const BestClasses::Candidate& one : found.candidates) {
      TORCH_CHECK_INDEX(one.id < classes_, kSearchTopkCpu, ": expected classes in [-1, ", classes_,
                        ") in index[0], got ", one.id);
      for (int64_t byte = 0; byte < features_ * int64_t(sizeof(T)); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(weight_ + one.id * features_) + byte);
      }
    }
    for (const BestClasses::Candidate& one : found.candidates) {
      double score = cell_scan().dot(scratch.wide.data(), weight_ + one.id * features_, features_);
      if (bias_ != nullptr) {
        opmath<T> bias;
        row_kernels().of(bias_).widen_row(&bias, bias_ + one.id, 1);
        score += queries_[q].scaled(bias);
      }
      found.scored.push_back({score + noise(q, one.id), one.id});
    }
    found.candidates.clear();
    const int64_t kept = std::min<int64_t>(k_, int64_t(found.scored.size()));
    std::partial_sort(found.scored.begin(), found.scored.begin() + kept, found.scored.end());
    found.scored.resize(kept);
    if (kept == k_) {
      found.threshold = std::max(found.threshold, found.scored.back().score);
    }
  }

  // The best classes of a query of zeros, whose scores are the noise.
  void write_zero(int64_t q, opmath<T>* scores, int64_t* ids) const {
    for (int64_t i = 0; i < k_; ++i) {
      scores[i] = 0;
      ids[i] = i;
    }
    for (int64_t id = 0; id < classes_ && is_perturbed(); ++id) { // k_ is 1
      if (id == 0 || noise(q, id) > scores[0]) {
        scores[0] = opmath<T>(noise(q, id));
        ids[0] = id;
      }
    }
  }

  void write(int64_t q, ScanScratch& scratch, opmath<T>* scores, int64_t* ids, int64_t* cells_read,
             bool* certified) {
    const CodedQuery& query = queries_[q];
    BestClasses& found = found_[q];
    *cells_read = found.cells;
    *certified = true;
    if (!query.searched) {
      widen(q, scratch.wide);
      const bool zero =
          std::all_of(scratch.wide.begin(), scratch.wide.end(), [](double z) { return z == 0; });
      write_zero(q, scores, ids);
      if (!zero) {
        std::fill_n(scores, k_, std::numeric_limits<opmath<T>>::quiet_NaN());
        std::iota(ids, ids + k_, int64_t(0));
      }
      *certified = zero;
      return;
    }
    rescore(q, found, scratch);
    TORCH_CHECK_VALUE(int64_t(found.scored.size()) == k_, kSearchTopkCpu,
                      ": expected an index that holds every class, got one with ",
                      found.scored.size(), " of ", k_, " classes found");
    for (int64_t i = 0; i < k_; ++i) {
      scores[i] = opmath<T>(std::scalbn(found.scored[i].score, -query.exponent));
      ids[i] = found.scored[i].id;
    }
    for (int64_t block = 0; block < index_.blocks && *certified && !exact_; ++block) {
      *certified = remaining(q, block, found.threshold) == 0;
    }
  }

  const T *input_, *weight_, *bias_;
  const int64_t features_;
};

// noise: none, or [Q, N] to add to the scores, with a k of 1.
TopkResult search(const char* op, const Tensor& input, const Tensor& weight,
                  const OptionalTensor& bias, at::TensorList index, const Tensor& noise,
                  int64_t count, const SearchOptions& options) {
  const SearchIndexView view(op, index, weight, bias);
  view.check_starts(op);
  const int64_t queries = input.size(0);
  const Tensor scores =
      at::empty({queries, count}, input.options().dtype(opmath_dtype(input.scalar_type())));
  const Tensor ids = at::empty({queries, count}, input.options().dtype(at::kLong)),
               cells = at::zeros({queries}, input.options().dtype(at::kLong));
  const Tensor certified = at::ones({queries}, input.options().dtype(at::kBool));
  if (scores.numel() == 0) {
    return {scores, ids, cells, certified};
  }
  const Tensor queries_in = input.contiguous(), rows = weight.contiguous(),
               biases = is_defined(bias) ? bias->contiguous() : Tensor();
  dispatch_floating(input.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    Search<T> search(queries_in, rows, biases, view, count, options);
    if (noise.defined()) {
      search.perturb(noise.const_data_ptr<float>());
    }
    search.run(queries, data<opmath<T>>(scores), ids.mutable_data_ptr<int64_t>(),
               cells.mutable_data_ptr<int64_t>(), certified.mutable_data_ptr<bool>());
  });
  return {scores, ids, cells, certified};
}

TopkResult search_topk_cpu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           at::TensorList index, c10::SymInt k, c10::string_view text) {
  const SearchOptions options =
      check_search_topk(input, weight, bias, k, {text.data(), text.size()});
  if (use_reference()) {
    return search_topk_reference(input, weight, bias, index, k, text);
  }
  return search("search_topk", input, weight, bias, index, {}, k.expect_int(), options);
}

PerturbedArgmax perturbed_argmax_cpu(const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& bias, at::TensorList index,
                                     const Tensor& noise) {
  check_perturbed_argmax(input, weight, bias, noise);
  if (noise.numel() > 0) { // the maximum of numbers with NaN is NaN
    TORCH_CHECK_VALUE(!std::isnan(noise.max().item<float>()),
                      "perturbed_argmax: expected noise without NaN, got one with NaN");
  }
  if (use_reference()) {
    return perturbed_argmax_reference(input, weight, bias, index, noise);
  }
  auto [scores, ids, cells, certified] =
      search("perturbed_argmax", input, weight, bias, index, noise.contiguous(), 1, {});
  return {ids.squeeze(1), cells, certified};
}

} // namespace

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) {
  m.impl("search_topk", search_topk_cpu);
  m.impl("perturbed_argmax", perturbed_argmax_cpu);
}

} // namespace xsoftmax
