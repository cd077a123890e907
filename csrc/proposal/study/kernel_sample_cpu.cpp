#include "op/checks.h"
#include "random/philox.h"
#include "cpu/products.h"
#include "proposal/study/kernel_sample.h"
#include "proposal/study/kernel_tree.h"
#include "proposal/sampling.h"
#include "table/row_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

/// The validated index as raw pointers.
struct Tree : KernelTree {
  Tree(const char* op, const KernelIndex& index, double scale)
      : op(op), rows_(index.rows.contiguous()), sums_(index.sums.contiguous()),
        order_(index.order.contiguous()), place_(index.place.contiguous()) {
    static_cast<KernelTree&>(*this) = {index.sphere(),
                                       scale,
                                       index.classes(),
                                       index.leaves(),
                                       rows_.size(1),
                                       sums_.size(1),
                                       rows_.const_data_ptr<float>(),
                                       sums_.const_data_ptr<float>()};
    largest_leaf = (classes + leaves - 1) / leaves;
  }

  int64_t class_at(int64_t row) const {
    const int64_t id = order_.const_data_ptr<int64_t>()[row];
    TORCH_CHECK_INDEX(id >= 0 && id < place_.size(0), op, ": expected order in [0, ",
                      place_.size(0), "), got ", id);
    return id;
  }

  /// Returns the row of a class, or -1 if it is never drawn or the id is -1.
  int64_t row_of(int64_t id) const {
    if (id < 0) {
      return -1;
    }
    const int64_t row = place_.const_data_ptr<int64_t>()[id];
    TORCH_CHECK_INDEX(row >= -1 && row < classes, op, ": expected place in [-1, ", classes,
                      "), got ", row);
    return row;
  }

  const char* op;
  int64_t largest_leaf;

 private:
  Tensor rows_, sums_, order_, place_;
};

/// Chooses what a block of queries is multiplied with: one level of the tree, or all rows. In a
/// matrix product a node or a row costs about a tenth of a visit by one path, so the product may
/// include many that no path visits.
struct Plan {
  /// paths: the draws and targets of a query.
  Plan(const Tree& tree, int64_t paths) {
    constexpr int64_t kVisit = 10;
    while (known < tree.leaves && known < 2 * kVisit * paths) {
      known *= 2;
    }
    int64_t levels = 0; // of nodes that paths visit
    for (int64_t level = known; level < tree.leaves; level *= 2) {
      ++levels;
    }
    // Costs per query, in multiply-adds; adding up the products of a leaf's rows costs about 16 a
    // row.
    const int64_t by_paths = known * tree.features +
        kVisit * paths * (2 * levels * tree.features + tree.largest_leaf * tree.width),
                  by_rows = tree.classes * (tree.width + 16);
    all_rows = tree.classes <= kMaxRows && by_rows < by_paths;
    if (all_rows) {
      known = tree.leaves;
    }
  }

  static constexpr int64_t kQueries = 64; // of a block, whatever the number of threads
  static constexpr int64_t kMaxRows = int64_t(1) << 17; // so that a block takes at most 32 MiB

  int64_t known = 1; ///< nodes known .. 2 known - 1 are a level, whose sums give those above
  bool all_rows; ///< multiplies with all rows, whose products give the sums of the leaves
};

/// Descends the tree for one query. Results for the nodes below the known ones are cached until the
/// next query.
class Descent {
 public:
  Descent(const Tree& tree, const Plan& plan)
      : tree_(tree), kernels_(row_kernels().of(static_cast<const float*>(nullptr))), plan_(plan),
        sums_(2 * plan.known), first_(tree.leaves), second_(tree.leaves), seen_(tree.leaves, -1),
        index_(tree.largest_leaf), ones_(tree.largest_leaf, 1.f), product_(tree.largest_leaf),
        value_(tree.largest_leaf) {
    std::iota(index_.begin(), index_.end(), int64_t(0));
  }

  /// Sets x [width], its features [features], and its products with the known nodes [known], or
  /// with all rows [classes].
  void start(int64_t query, const float* x, const float* features, const float* products) {
    query_ = query;
    x_ = x;
    features_ = features;
    products_ = products;
    float* const level = sums_.data() + plan_.known;
    if (plan_.all_rows) {
      for (int64_t leaf = 0; leaf < tree_.leaves; ++leaf) {
        const int64_t begin = tree_.leaf_begin(leaf), size = tree_.leaf_begin(leaf + 1) - begin;
        const float* const of_leaf = products + begin;
        kernels_.dot_rows(level + leaf, tree_.sphere ? of_leaf : ones_.data(), of_leaf, size,
                          index_.data(), 1, 1, size);
      }
    } else {
      std::copy_n(products, plan_.known, level);
    }
    for (int64_t node = plan_.known - 1; node > 0; --node) {
      sums_[node] = sums_[2 * node] + sums_[2 * node + 1];
    }
  }

  /// Returns the drawn row and its log q.
  std::pair<int64_t, double> draw(const PhiloxBlock& block) {
    double u = unit_double(block.low());
    const auto [leaf, share_of_leaf] = descend([&](int64_t, double share) {
      const bool left = u < share;
      u = left ? u / share : (u - share) / (1 - share);
      return left;
    });
    const int64_t begin = tree_.leaf_begin(leaf), size = tree_.leaf_begin(leaf + 1) - begin;
    const double total = values(begin, size), point = unit_double(block.high()) * total;
    int64_t i = 0;
    for (double sum = value_[0]; i + 1 < size && sum <= point; sum += value_[i]) {
      ++i;
    }
    return {begin + i, std::log(share_of_leaf * (value_[i] / total))};
  }

  double log_q(int64_t row) {
    if (row < 0) {
      return -std::numeric_limits<double>::infinity();
    }
    const int64_t leaf = tree_.leaf_of(row);
    const double share_of_leaf =
        descend([&](int64_t middle, double) { return leaf < middle; }).second;
    const int64_t begin = tree_.leaf_begin(leaf);
    const double total = values(begin, tree_.leaf_begin(leaf + 1) - begin);
    return std::log(share_of_leaf * (value_[row - begin] / total));
  }

 private:
  /// Descends from the root to a leaf and returns the leaf and its probability. left(middle leaf,
  /// probability of the left child) returns whether to go left.
  template <typename Left>
  std::pair<int64_t, double> descend(const Left& left) {
    double q = 1;
    int64_t node = 1, low = 0, high = tree_.leaves;
    while (node < tree_.leaves) {
      const auto [first, second] = children(node, low, high);
      const int64_t middle = (low + high) / 2;
      const double share = first / (first + second);
      const bool goes_left = left(middle, share);
      q *= goes_left ? share : 1 - share;
      node = 2 * node + !goes_left;
      (goes_left ? high : low) = middle;
    }
    return {node - tree_.leaves, q};
  }

  /// Returns the masses of the children of an inner node over the leaves [low, high).
  std::pair<double, double> children(int64_t node, int64_t low, int64_t high) {
    if (seen_[node] != query_) {
      const int64_t child[2] = {2 * node, 2 * node + 1},
                    middle = tree_.leaf_begin((low + high) / 2);
      float sum[2];
      if (node < plan_.known) {
        std::copy_n(sums_.data() + child[0], 2, sum);
      } else {
        kernels_.dot_rows(sum, features_, tree_.sums, tree_.features, child, 2, 2, tree_.features);
      }
      first_[node] = tree_.mass(sum[0], middle - tree_.leaf_begin(low));
      second_[node] = tree_.mass(sum[1], tree_.leaf_begin(high) - middle);
      seen_[node] = query_;
    }
    return {first_[node], second_[node]};
  }

  /// Writes the kernel of `size` rows to value_ and returns their sum.
  double values(int64_t begin, int64_t size) {
    if (!plan_.all_rows) {
      kernels_.dot_rows(product_.data(), x_, tree_.rows + begin * tree_.width, tree_.width,
                        index_.data(), size, size, tree_.width);
    }
    const float* const product = plan_.all_rows ? products_ + begin : product_.data();
    double total = 0;
    for (int64_t i = 0; i < size; ++i) {
      total += value_[i] = tree_.value(product[i]);
    }
    return total;
  }

  const Tree& tree_;
  const RowKernels<float>& kernels_;
  Plan plan_;
  std::vector<float> sums_; // of the known nodes and those above
  std::vector<double> first_, second_; // of inner nodes, valid if seen_ is the query
  std::vector<int64_t> seen_, index_;
  std::vector<float> ones_, product_;
  std::vector<double> value_;
  int64_t query_ = -1;
  const float *x_ = nullptr, *features_ = nullptr, *products_ = nullptr;
};

// Computes the products of pairs of elements for each row of x [n, E], in the order of
// sums [n, E (E + 1) / 2].
void write_pairs(const Tensor& x, const Tensor& pairs) {
  const int64_t width = x.size(1);
  float* pair = pairs.mutable_data_ptr<float>();
  for (int64_t q = 0; q < x.size(0); ++q) {
    const float* row = x.const_data_ptr<float>() + q * width;
    for (int64_t i = 0; i < width; ++i) {
      pair =
          std::transform(row + i, row + width, pair, [&](float other) { return row[i] * other; });
    }
  }
}

// Calls visit(query, descent) for each query, with the descent started; each query takes about
// `paths` paths. The matrix products of a block of queries read each node or row once per block.
template <typename Visit>
void for_queries(const Tensor& queries, const KernelIndex& index, const Tree& tree, int64_t paths,
                 const Visit& visit) {
  const Plan plan(tree, paths);
  const Tensor rows = kernel_rows(queries, std::nullopt, index).contiguous(),
               others = plan.all_rows ? index.rows : index.sums.narrow(0, plan.known, plan.known);
  const int64_t num_queries = queries.size(0), num_products = others.size(0);
  at::parallel_for(
      0, (num_queries + Plan::kQueries - 1) / Plan::kQueries, 1, [&](int64_t begin, int64_t end) {
        const at::AutoDispatchBelowADInplaceOrView guard; // thread-local
        Descent descent(tree, plan);
        const bool makes_pairs = tree.sphere && !plan.all_rows;
        const Tensor pairs =
            makes_pairs ? at::empty({Plan::kQueries, tree.features}, rows.options()) : Tensor();
        const Tensor all_products = at::empty({Plan::kQueries, num_products}, rows.options());
        for (int64_t block = begin; block < end; ++block) {
          const int64_t first = block * Plan::kQueries,
                        size = std::min(Plan::kQueries, num_queries - first);
          const Tensor x = rows.narrow(0, first, size),
                       features = makes_pairs ? pairs.narrow(0, 0, size) : x,
                       products = all_products.narrow(0, 0, size);
          if (makes_pairs) {
            write_pairs(x, features);
          }
          multiply_in_parts(products, features, others.t());
          for (int64_t i = 0; i < size; ++i) {
            descent.start(first + i, x.const_data_ptr<float>() + i * tree.width,
                          features.const_data_ptr<float>() + i * features.size(1),
                          products.const_data_ptr<float>() + i * num_products);
            visit(first + i, descent);
          }
        }
      });
}

} // namespace

PrivateDraws KernelFamily::sample_cpu(const Tensor& seed, const Tensor& queries,
                                      const OptionalTensor& target, const Targets& targets,
                                      const KernelIndex& index, const KernelOptions& options) {
  const Tree tree("kernel_sample", index, options.scale());
  const int64_t samples = options.num_samples;
  const auto draws = empty_private_draws(seed, queries, target, samples);
  const auto& [ids, log_count, target_log_count] = draws;
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  float *count = log_count.mutable_data_ptr<float>(),
        *target_count = target_log_count.mutable_data_ptr<float>();
  const double log_samples = std::log(double(samples));
  const DrawSeed from(seed);
  for_queries(queries, index, tree, samples + targets.width, [&](int64_t q, Descent& descent) {
    for (int64_t j = 0; j < samples; ++j) {
      const auto [row, log_q] = descent.draw(philox(from.key(), from.query(q), j));
      id[q * samples + j] = tree.class_at(row);
      count[q * samples + j] = float(log_samples + log_q);
    }
    std::transform(targets.of(q), targets.of(q + 1), target_count + q * targets.width,
                   [&](int64_t i) { return float(log_samples + descent.log_q(tree.row_of(i))); });
  });
  return draws;
}

Tensor KernelFamily::log_count_cpu(const Tensor& queries, const Tensor& ids,
                                   const KernelIndex& index, const KernelOptions& options) {
  const Tree tree("kernel_log_count", index, options.scale());
  const Tensor flat = ids_of_queries(queries, ids).contiguous();
  const int64_t width = ids.size(-1);
  const double log_samples = std::log(double(options.num_samples));
  const Tensor log_count = at::empty({queries.size(0), width}, flat.options().dtype(at::kFloat));
  for_queries(queries, index, tree, width, [&](int64_t q, Descent& descent) {
    const int64_t* id = flat.const_data_ptr<int64_t>() + q * width;
    std::transform(id, id + width, log_count.mutable_data_ptr<float>() + q * width,
                   [&](int64_t i) { return float(log_samples + descent.log_q(tree.row_of(i))); });
  });
  return log_count;
}

} // namespace xsoftmax
