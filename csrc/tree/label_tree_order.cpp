#include "op/operators.h"
#include "tree/label_tree.h"

#include "cpu/products.h"
#include "op/checks.h"
#include "op/long_work.h"
#include "random/philox.h"
#include "cluster/kmeans.h"
#include "table/gather_dot.h"
#include "table/row_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kLabelTreeOrder = "label_tree_kmeans_order";
constexpr int64_t kSmall = 4096; // a part of at most this many rows is ordered by a single thread
// Maximal recursion depth. Limits the work if K-means splits off only a few rows at a time.
constexpr int64_t kDeepest = 64;

struct Part { int64_t begin, end, layer; };

// Sorts order[begin .. end) by cluster; returns where each cluster ends. If one cluster holds all
// rows, K-means could not separate them.
std::vector<int64_t> sort_by_cluster(int64_t* order, const int64_t* cluster, int64_t n,
                                     int64_t clusters) {
  std::vector<int64_t> end(clusters), sorted(n);
  for (int64_t i = 0; i < n; ++i) {
    ++end[cluster[i]];
  }
  std::partial_sum(end.begin(), end.end(), end.begin());
  for (int64_t i = n; i-- > 0;) {
    sorted[--end[cluster[i]]] = order[i];
  }
  std::copy(sorted.begin(), sorted.end(), order);
  std::rotate(end.begin(), end.begin() + 1, end.end()); // `end` holds the begins here
  end.back() = n;
  return end;
}

// Single-threaded kmeans(), for parts so small that a call of kmeans() costs more than the work.
class SmallKmeans {
 public:
  SmallKmeans(const float* rows, int64_t width, int64_t clusters, int64_t iterations)
      : rows_(rows), width_(width), clusters_(clusters), iterations_(iterations),
        centroid_(clusters * width), half_square_(clusters), score_(clusters), count_(clusters),
        every_(clusters) {
    std::iota(every_.begin(), every_.end(), int64_t(0));
  }

  /// Returns the cluster of each of the n rows `id`.
  const std::vector<int64_t>& run(uint64_t seed, const int64_t* id, int64_t n) {
    cluster_.assign(n, 0);
    start(seed, id, n);
    for (int64_t i = 0; i < iterations_; ++i) {
      assign(id, n);
      if (!move(id, n)) {
        break;
      }
    }
    assign(id, n);
    return cluster_;
  }

 private:
  const float* row(int64_t id) const { return rows_ + id * width_; }
  float* centroid(int64_t k) { return centroid_.data() + k * width_; }

  void set_half_square(int64_t k) {
    float square;
    const int64_t first = 0;
    row_kernels().of(rows_).dot_rows(&square, centroid(k), centroid(k), width_, &first, 1, 1,
                                     width_);
    half_square_[k] = 0.5f * square;
  }

  // Draws initial centroids: rows with probability proportional to the squared distance from the
  // previous ones.
  void start(uint64_t seed, const int64_t* id, int64_t n) {
    std::vector<double> distance(n, 1.0);
    for (int64_t k = 0; k < clusters_; ++k) {
      const double total = std::accumulate(distance.begin(), distance.end(), 0.0);
      const double aim =
          unit_double(philox(seed, uint64_t(k), 0).low()) * (total > 0 ? total : double(n));
      int64_t drawn = 0;
      double sum = 0;
      for (; drawn + 1 < n; ++drawn) {
        sum += total > 0 ? distance[drawn] : 1.0;
        if (sum > aim) {
          break;
        }
      }
      std::copy_n(row(id[drawn]), width_, centroid(k));
      set_half_square(k);
      for (int64_t i = 0; i < n; ++i) {
        const double d = squared_distance(id[i], k);
        distance[i] = k == 0 ? d : std::min(distance[i], d);
      }
    }
  }

  double squared_distance(int64_t id, int64_t k) {
    const float *x = row(id), *c = centroid(k);
    double sum = 0;
    for (int64_t d = 0; d < width_; ++d) {
      sum += double(x[d] - c[d]) * double(x[d] - c[d]);
    }
    return sum;
  }

  void assign(const int64_t* id, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      row_kernels().of(rows_).dot_rows(score_.data(), row(id[i]), centroid_.data(), width_,
                                       every_.data(), clusters_, clusters_, width_);
      int64_t best = 0;
      for (int64_t k = 1; k < clusters_; ++k) {
        best = score_[k] - half_square_[k] > score_[best] - half_square_[best] ? k : best;
      }
      cluster_[i] = best;
    }
  }

  // Moves centroids to the means of their rows; returns whether any moved. A centroid without rows
  // moves to the row farthest from its own centroid.
  bool move(const int64_t* id, int64_t n) {
    before_ = centroid_;
    std::fill(centroid_.begin(), centroid_.end(), 0.0f);
    std::fill(count_.begin(), count_.end(), 0);
    for (int64_t i = 0; i < n; ++i) {
      float* sum = centroid(cluster_[i]);
      const float* x = row(id[i]);
      for (int64_t d = 0; d < width_; ++d) {
        sum[d] += x[d];
      }
      ++count_[cluster_[i]];
    }
    for (int64_t k = 0; k < clusters_; ++k) {
      for (int64_t d = 0; count_[k] > 0 && d < width_; ++d) {
        centroid(k)[d] /= float(count_[k]);
      }
    }
    for (int64_t k = 0; k < clusters_; ++k) {
      if (count_[k] == 0) {
        int64_t farthest = 0;
        double largest = -1;
        for (int64_t i = 0; i < n; ++i) {
          const double d = squared_distance(id[i], cluster_[i]);
          farthest = d > largest ? i : farthest;
          largest = std::max(d, largest);
        }
        std::copy_n(row(id[farthest]), width_, centroid(k));
        cluster_[farthest] = k; // so that it is not taken again
      }
      set_half_square(k);
    }
    return before_ != centroid_;
  }

  const float* rows_;
  const int64_t width_, clusters_, iterations_;
  std::vector<float> centroid_, before_, half_square_, score_;
  std::vector<int64_t> count_, every_, cluster_;
};

uint64_t seed_of(uint64_t seed, const Part& part) {
  return philox(seed, uint64_t(part.begin), uint64_t(part.layer)).low();
}

// Appends the clusters of a part that need further splitting.
void push_parts(std::vector<Part>& parts, const Part& part, int64_t* order, const int64_t* cluster,
                int64_t arity) {
  const std::vector<int64_t> ends =
      sort_by_cluster(order + part.begin, cluster, part.end - part.begin, arity);
  int64_t begin = 0;
  for (const int64_t end : ends) {
    if (end - begin > arity && end - begin < part.end - part.begin && part.layer + 1 < kDeepest) {
      parts.push_back({part.begin + begin, part.begin + end, part.layer + 1});
    }
    begin = end;
  }
}

} // namespace

Tensor label_tree_kmeans_order(const Tensor& seed, const Tensor& rows, int64_t arity,
                               int64_t iterations) {
  check::dim(kLabelTreeOrder, "seed", seed, 0);
  check::int64(kLabelTreeOrder, "seed", seed);
  check::dim(kLabelTreeOrder, "rows", rows, 2);
  check::floating(kLabelTreeOrder, "rows", rows);
  TORCH_CHECK_VALUE(rows.size(0) >= 1, kLabelTreeOrder,
                    ": expected rows of at least one class, got none");
  TORCH_CHECK_VALUE(arity >= 2, kLabelTreeOrder, ": expected arity of at least 2, got ", arity);
  TORCH_CHECK_VALUE(iterations >= 1, kLabelTreeOrder, ": expected iterations of at least 1, got ",
                    iterations);
  const Tensor x = rows.detach().cpu().to(at::kFloat).contiguous();
  TORCH_CHECK_VALUE(x.isfinite().all().item<bool>(), kLabelTreeOrder,
                    ": expected rows that are finite, got an infinity or NaN");
  const uint64_t key = uint64_t(seed.item<int64_t>());
  const int64_t n = x.size(0), width = x.size(1);
  const Tensor result = at::arange(n, at::TensorOptions(at::kLong));
  int64_t* order = result.mutable_data_ptr<int64_t>();
  const float* data = x.const_data_ptr<float>();

  std::vector<Part> large, small;
  const auto sort_in = [&](std::vector<Part> parts) {
    for (const Part& part : parts) {
      (part.end - part.begin > kSmall ? large : small).push_back(part);
    }
  };
  LongWork progress(kLabelTreeOrder, n); // counts the rows that are in their final position
  sort_in(n > arity ? std::vector<Part>{{0, n, 0}} : std::vector<Part>{});
  while (!large.empty()) { // one part at a time, on all threads
    const Part part = large.back();
    large.pop_back();
    const Tensor members = result.slice(0, part.begin, part.end),
                 member_rows = x.index_select(0, members);
    const Tensor part_seed =
        at::full({}, int64_t(seed_of(key, part)), at::TensorOptions(at::kLong));
    const Tensor centroids =
        std::get<0>(kmeans(part_seed, member_rows, arity, iterations, std::nullopt));
    const Tensor cluster =
        (product_in_parts(member_rows, centroids.t()) - 0.5 * centroids.square().sum(1)).argmax(1);
    std::vector<Part> parts;
    push_parts(parts, part, order, cluster.const_data_ptr<int64_t>(), arity);
    const int64_t left =
        std::accumulate(parts.begin(), parts.end(), int64_t(0),
                        [](int64_t sum, const Part& p) { return sum + p.end - p.begin; });
    progress.add(part.end - part.begin - left);
    progress.check();
    sort_in(std::move(parts));
  }
  at::parallel_for(0, int64_t(small.size()), 1, [&](int64_t first, int64_t last) {
    SmallKmeans kmeans_of(data, width, arity, iterations);
    for (int64_t i = first; i < last; ++i) {
      std::vector<Part> parts{small[i]};
      while (!parts.empty() && !progress.stopped()) {
        const Part part = parts.back();
        parts.pop_back();
        const auto& cluster =
            kmeans_of.run(seed_of(key, part), order + part.begin, part.end - part.begin);
        push_parts(parts, part, order, cluster.data(), arity);
      }
      progress.add(small[i].end - small[i].begin);
    }
  });
  progress.check();
  return result;
}

XSOFTMAX_OPERATORS(m) {
  m.def("label_tree_kmeans_order(Tensor seed, Tensor rows, int arity, int iterations) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("label_tree_kmeans_order", label_tree_kmeans_order);
}

} // namespace xsoftmax
