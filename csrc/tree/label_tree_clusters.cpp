#include "tree/label_tree_clusters.h"

#include "op/checks.h"
#include "op/long_work.h"
#include "op/operators.h"
#include "op/options.h"
#include "random/philox.h"
#include "table/sparse_rows.h"

#include <xsoftmax/trees.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <queue>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

/// How nodes are split.
struct Cutting {
  uint64_t seed;
  int64_t iterations;
  bool spherical;
};

/// An inner node. Its classes are order[begin .. end), in `leaves` clusters. Its children are the
/// nodes first .. last - 1; a cluster has none, and its children are the classes.
struct Node { int64_t parent, begin, end, leaves, first, last; };

/// Returns the nodes of the tree, whose shape depends only on the counts: all clusters are on one
/// layer, no node has more than `arity` children.
std::vector<Node> shape(int64_t classes, int64_t arity, int64_t max_leaf_size) {
  const int64_t leaves = (classes + max_leaf_size - 1) / max_leaf_size;
  std::vector<Node> nodes{{-1, 0, classes, leaves, 0, 0}};
  int64_t child_leaves = 1; // largest number of clusters below a node of the next layer
  while (child_leaves * arity < leaves) {
    child_leaves *= arity;
  }
  int64_t layer_begin = 0;
  for (; leaves > 1 && child_leaves >= 1; child_leaves /= arity) {
    const int64_t layer_end = int64_t(nodes.size());
    for (int64_t v = layer_begin; v < layer_end; ++v) {
      const Node node = nodes[v];
      const int64_t children = (node.leaves + child_leaves - 1) / child_leaves,
                    first = int64_t(nodes.size());
      for (int64_t c = 0, leaf = 0; c < children; ++c) {
        const int64_t next = node.leaves * (c + 1) / children; // divide clusters and classes evenly
        const auto at = [&](int64_t clusters) {
          return node.begin +
              int64_t(static_cast<__int128>(node.end - node.begin) * clusters / node.leaves);
        };
        nodes.push_back({v, at(leaf), at(next), next - leaf, 0, 0});
        leaf = next;
      }
      nodes[v].first = first;
      nodes[v].last = int64_t(nodes.size());
    }
    layer_begin = layer_end;
  }
  return nodes;
}

// Blocks of a sum over many rows, added in order, so that the sum does not depend on the number of
// threads.
constexpr int64_t kSumBlocks = 8;

/// Bisects a segment. Runs on all threads, unless it is called from a parallel region.
class Bisection {
 public:
  Bisection(const SparseRowsView& vectors, const Cutting& cutting, LongWork& work)
      : vectors_(vectors), work_(work), seed_(cutting.seed), iterations_(cutting.iterations),
        spherical_(cutting.spherical), total_(vectors.features, 0.0), sum_(vectors.features, 0.0),
        direction_(vectors.features, 0.0f), seen_(vectors.features, false) {}

  /// Bisects rows [size], sorted ascending: on return the first `left` are the first half. Both
  /// halves are sorted ascending.
  void cut(int32_t* rows, int64_t size, int64_t left, uint64_t key) {
    if (left == 0 || left == size) {
      return;
    }
    side_.assign(size, 1);
    score_.resize(size);
    order_.resize(size);
    for (int64_t i = 0; i < size && !stopped_at(i); ++i) {
      for (int64_t t = vectors_.offset[rows[i]]; t < vectors_.offset[rows[i] + 1]; ++t) {
        if (!seen_[vectors_.column[t]]) {
          seen_[vectors_.column[t]] = true;
          touched_.push_back(vectors_.column[t]);
        }
      }
    }
    changes_.clear();
    for (int64_t i = 0; i < size; ++i) {
      changes_.push_back({rows[i], 1});
    }
    add_changes(total_);
    // Start from two random rows as centres.
    const PhiloxBlock block = philox(seed_, key, uint64_t(size));
    const int64_t one = int64_t(multiply_shift(block.low(), uint64_t(size)));
    const int64_t other =
        (one + 1 + int64_t(multiply_shift(block.high(), uint64_t(size - 1)))) % size;
    add_direction(rows[one], 1.0);
    add_direction(rows[other], -1.0);
    for (int64_t iteration = 0; iteration < iterations_ && !work_.stopped(); ++iteration) {
      if (iteration > 0) {
        make_direction(left, size);
      }
      score(rows, size);
      assign(rows, size, left);
      if (changes_.empty()) {
        break;
      }
      if (iteration + 1 < iterations_) {
        add_changes(sum_);
      }
    }
    for (const int32_t j : touched_) {
      total_[j] = sum_[j] = 0;
      direction_[j] = 0;
      seen_[j] = false;
    }
    touched_.clear();
    move(rows, size);
    work_.add(size);
  }

 private:
  struct Change {
    int32_t row;
    int32_t sign; // +1: joins the first half, -1: leaves it
  };

  // The result of a stopped bisection is discarded, so it may stop anywhere.
  bool stopped_at(int64_t i) const { return i % 1024 == 0 && work_.stopped(); }

  void add_rows(int64_t begin, int64_t end, double* sum) const {
    for (int64_t i = begin; i < end && !stopped_at(i); ++i) {
      const double sign = changes_[i].sign;
      for (int64_t t = vectors_.offset[changes_[i].row]; t < vectors_.offset[changes_[i].row + 1];
           ++t) {
        sum[vectors_.column[t]] += sign * vectors_.value[t];
      }
    }
  }

  void add_changes(std::vector<double>& sum) {
    const int64_t count = int64_t(changes_.size());
    int64_t numbers = 0;
    for (const Change& change : changes_) {
      numbers += vectors_.offset[change.row + 1] - vectors_.offset[change.row];
    }
    if (numbers < 4 * kSumBlocks * vectors_.features) { // too few values for blocks to pay off
      add_rows(0, count, sum.data());
      return;
    }
    blocks_.resize(kSumBlocks);
    at::parallel_for(0, kSumBlocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        blocks_[b].assign(vectors_.features, 0.0);
        add_rows(count * b / kSumBlocks, count * (b + 1) / kSumBlocks, blocks_[b].data());
      }
    });
    for (const auto& block : blocks_) {
      for (int64_t j = 0; j < vectors_.features; ++j) {
        sum[j] += block[j];
      }
    }
  }

  void add_direction(int32_t row, double sign) {
    double square = 0;
    for (int64_t t = vectors_.offset[row]; t < vectors_.offset[row + 1]; ++t) {
      square += double(vectors_.value[t]) * vectors_.value[t];
    }
    const double scale = !spherical_ ? sign : square > 0 ? sign / std::sqrt(square) : 0.0;
    for (int64_t t = vectors_.offset[row]; t < vectors_.offset[row + 1]; ++t) {
      direction_[vectors_.column[t]] += float(scale * vectors_.value[t]);
    }
  }

  // Sets direction_ to the difference of the centres: first half minus second half.
  void make_direction(int64_t left, int64_t size) {
    double scale[2] = {1.0 / double(left), 1.0 / double(size - left)};
    if (spherical_) {
      double square[2] = {0, 0};
      for (const int32_t j : touched_) {
        square[0] += sum_[j] * sum_[j];
        square[1] += (total_[j] - sum_[j]) * (total_[j] - sum_[j]);
      }
      for (int half = 0; half < 2; ++half) {
        scale[half] = square[half] > 0 ? 1.0 / std::sqrt(square[half]) : 0.0;
      }
    }
    for (const int32_t j : touched_) {
      direction_[j] = float(scale[0] * sum_[j] - scale[1] * (total_[j] - sum_[j]));
    }
  }

  void score(const int32_t* rows, int64_t size) {
    at::parallel_for(0, size, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end && !stopped_at(i); ++i) {
        float even = 0, odd = 0;
        int64_t t = vectors_.offset[rows[i]];
        const int64_t last = vectors_.offset[rows[i] + 1];
        for (; t + 1 < last; t += 2) {
          even += vectors_.value[t] * direction_[vectors_.column[t]];
          odd += vectors_.value[t + 1] * direction_[vectors_.column[t + 1]];
        }
        score_[i] =
            even + odd + (t < last ? vectors_.value[t] * direction_[vectors_.column[t]] : 0.0f);
      }
    });
  }

  // Puts the `left` rows with the highest scores in the first half; among equal scores, earlier
  // rows. Sets changes_ to the rows that changed sides.
  void assign(const int32_t* rows, int64_t size, int64_t left) {
    std::iota(order_.begin(), order_.end(), int32_t(0));
    std::nth_element(order_.begin(), order_.begin() + left, order_.end(),
                     [&](int32_t a, int32_t b) {
                       return score_[a] > score_[b] || (score_[a] == score_[b] && a < b);
                     });
    next_side_.assign(size, 1);
    for (int64_t k = 0; k < left; ++k) {
      next_side_[order_[k]] = 0;
    }
    changes_.clear();
    for (int64_t i = 0; i < size; ++i) {
      if (next_side_[i] != side_[i]) {
        changes_.push_back({rows[i], next_side_[i] == 0 ? 1 : -1});
      }
    }
    side_.swap(next_side_);
  }

  void move(int32_t* rows, int64_t size) {
    moved_.clear();
    int64_t to = 0;
    for (int64_t i = 0; i < size; ++i) {
      if (side_[i] == 0) {
        rows[to++] = rows[i];
      } else {
        moved_.push_back(rows[i]);
      }
    }
    std::copy(moved_.begin(), moved_.end(), rows + to);
  }

  const SparseRowsView& vectors_;
  LongWork& work_;
  uint64_t seed_;
  int64_t iterations_;
  bool spherical_;
  // Sums per feature over all rows and over the first half, updated with the rows that change
  // sides.
  std::vector<double> total_, sum_;
  std::vector<float> direction_, score_;
  std::vector<bool> seen_;
  std::vector<int32_t> touched_, order_, moved_; // touched_: features that occur in the segment
  std::vector<int8_t> side_, next_side_;
  std::vector<Change> changes_;
  std::vector<std::vector<double>> blocks_;
};

constexpr int64_t kAllCuts = std::numeric_limits<int64_t>::max();
// label_tree_cuts lets each process finish alone if no process has more than kEven times the mean
// work, or if there are at least kSegmentsOfPart segments per process.
constexpr double kEven = 1.1;
constexpr int64_t kSegmentsOfPart = 4;

/// A run of siblings, the nodes low .. high - 1, whose classes are still mixed after `cuts` cuts
/// above.
struct Segment { int64_t low, high, cuts; };

/// Returns the segments left after `cuts` cuts, from left to right.
std::vector<Segment> segments_after(int64_t cuts, const std::vector<Node>& nodes) {
  std::vector<Segment> found;
  const auto descend = [&](Segment segment) {
    for (; segment.high - segment.low == 1;
         segment = {nodes[segment.low].first, nodes[segment.low].last, segment.cuts}) {
    }
    if (segment.high > segment.low) {
      found.push_back(segment);
    }
  };
  descend({nodes[0].first, nodes[0].last, 0});
  for (int64_t done = 0; done < cuts && !found.empty(); ++done) {
    for (const Segment& segment : std::exchange(found, {})) {
      const int64_t middle = (segment.low + segment.high) / 2;
      descend({segment.low, middle, done + 1});
      descend({middle, segment.high, done + 1});
    }
  }
  return found;
}

/// Makes all cuts below the given segments that have fewer than `most_cuts` cuts above them. Each
/// segment is a contiguous range of `order`, which is rearranged in place. Throws if interrupted.
void lay_out(const char* op, const SparseRowsView& vectors, const std::vector<Node>& nodes,
             const Cutting& cutting, std::span<const Segment> segments, int64_t most_cuts,
             int32_t* order) {
  const auto size = [&](const Segment& segment) {
    return nodes[segment.high - 1].end - nodes[segment.low].begin;
  };
  const auto smaller = [&](const Segment& a, const Segment& b) { return size(a) < size(b); };
  std::vector<Segment> open; // a heap, largest first, so that threads finish together
  const auto descend = [&](Segment segment) {
    for (; segment.high - segment.low == 1;
         segment = {nodes[segment.low].first, nodes[segment.low].last, segment.cuts}) {
    }
    if (segment.high > segment.low && segment.cuts < most_cuts) {
      open.push_back(segment);
      std::push_heap(open.begin(), open.end(), smaller);
    }
  };
  const auto take = [&] {
    std::pop_heap(open.begin(), open.end(), smaller);
    const Segment segment = open.back();
    open.pop_back();
    return segment;
  };
  const auto go_on_below = [&](const Segment& segment) {
    const int64_t middle = (segment.low + segment.high) / 2;
    descend({segment.low, middle, segment.cuts + 1});
    descend({middle, segment.high, segment.cuts + 1});
  };

  for (const Segment& segment : segments) { // count the work of all cuts, for progress
    descend(segment);
  }
  int64_t total = 0;
  while (!open.empty()) {
    const Segment segment = open.back();
    open.pop_back();
    total += size(segment);
    go_on_below(segment);
  }
  LongWork work(op, total);
  const auto cut = [&](Bisection& bisection, const Segment& segment) {
    if (work.stopped()) {
      return;
    }
    const int64_t begin = nodes[segment.low].begin,
                  middle = nodes[(segment.low + segment.high) / 2].begin;
    bisection.cut(order + begin, size(segment), middle - begin, uint64_t(begin));
  };

  // While there are fewer segments than threads, all threads share one segment; after that, each
  // thread takes segments from the heap.
  for (const Segment& segment : segments) {
    descend(segment);
  }
  const int64_t threads = at::get_num_threads();
  {
    Bisection bisection(vectors, cutting, work);
    while (!open.empty() && int64_t(open.size()) < threads) {
      const Segment segment = take();
      cut(bisection, segment);
      go_on_below(segment);
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  int64_t working = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    Bisection bisection(vectors, cutting, work);
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return !open.empty() || working == 0; });
      if (open.empty()) {
        return;
      }
      const Segment segment = take();
      ++working;
      lock.unlock();
      try {
        cut(bisection, segment);
      } catch (...) { // out of memory: let the threads that wait for this segment finish
        lock.lock();
        --working;
        changed.notify_all();
        throw;
      }
      lock.lock();
      --working;
      go_on_below(segment);
      changed.notify_all();
    }
  });
  work.check();
}

/// Returns the tree with classes in the given order.
LabelTreeNodes tree_of(const std::vector<Node>& nodes, std::span<const int32_t> order) {
  const int64_t inner = int64_t(nodes.size()), all = inner + int64_t(order.size());
  const Tensor parents = at::empty({all}, at::kLong), classes = at::empty({all}, at::kLong);
  int64_t *parent = parents.mutable_data_ptr<int64_t>(),
          *known = classes.mutable_data_ptr<int64_t>();
  for (int64_t v = 0; v < inner; ++v) {
    parent[v] = nodes[v].parent;
    known[v] = -1;
    // Only clusters have leaves.
    for (int64_t i = nodes[v].begin; i < nodes[v].end && nodes[v].first == nodes[v].last; ++i) {
      parent[inner + i] = v;
      known[inner + i] = order[i];
    }
  }
  return {parents, classes};
}

/// The segments of one process: the most expensive segment first goes to the process with the least
/// work so far.
struct Deal {
  std::vector<Segment> mine;
  bool even; // whether all processes have about the same work
};

Deal dealt(std::span<const Segment> segments, const std::vector<Node>& nodes,
           const SparseRowsView& vectors, const int32_t* order, int64_t part, int64_t parts) {
  std::vector<std::pair<int64_t, const Segment*>> tasks;
  int64_t total = 0;
  for (const Segment& segment : segments) {
    int64_t work = 0;
    for (int64_t i = nodes[segment.low].begin; i < nodes[segment.high - 1].end; ++i) {
      work += vectors.offset[order[i] + 1] - vectors.offset[order[i]] + 1;
    }
    tasks.push_back({work, &segment});
    total += work;
  }
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const auto& one, const auto& other) { return one.first > other.first; });
  using Load = std::pair<int64_t, int64_t>; // (work, process)
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int64_t p = 0; p < std::min(parts, int64_t(segments.size())); ++p) {
    loads.push({0, p});
  }
  Deal deal;
  int64_t largest = 0;
  for (const auto& [work, segment] : tasks) {
    const auto [load, of] = loads.top();
    loads.pop();
    loads.push({load + work, of});
    largest = std::max(largest, load + work);
    if (of == part) {
      deal.mine.push_back(*segment);
    }
  }
  deal.even = double(largest) * double(parts) <= kEven * double(total);
  return deal;
}

Cutting checked_cutting(const char* op, const Tensor& seed, int64_t iterations, bool spherical) {
  check::dim(op, "seed", seed, 0);
  check::int64(op, "seed", seed);
  TORCH_CHECK_VALUE(iterations >= 1, op, ": expected iterations of at least 1, got ", iterations);
  return {uint64_t(seed.item<int64_t>()), iterations, spherical};
}

std::vector<Node> checked_shape(const char* op, const char* arg, int64_t classes, int64_t arity,
                                int64_t max_leaf_size) {
  TORCH_CHECK_VALUE(arity >= 2, op, ": expected arity of at least 2, got ", arity);
  TORCH_CHECK_VALUE(max_leaf_size >= 1, op, ": expected max_leaf_size of at least 1, got ",
                    max_leaf_size);
  TORCH_CHECK_VALUE(classes >= 1 && classes < std::numeric_limits<int32_t>::max(), op,
                    ": expected ", arg, " of 1 to 2^31 - 2 classes, got ", classes);
  return shape(classes, arity, max_leaf_size);
}

/// Checks that order is int32 and holds ids below its size.
void check_order(const char* op, const Tensor& order) {
  check::numbers(op, "order", order, at::kInt);
  const Tensor ids = order.contiguous();
  for (const int32_t id : span_of<int32_t>(ids)) {
    TORCH_CHECK_INDEX(id >= 0 && id < ids.numel(), op, ": expected order as class ids in [0, ",
                      ids.numel(), "), got ", id);
  }
}

void check_features(const char* op, int64_t features) {
  TORCH_CHECK_VALUE(features >= 0 && features <= std::numeric_limits<int32_t>::max(), op,
                    ": expected features in [0, 2^31), got ", features);
}

/// Returns a view of sparse rows after checking offsets and lengths. Columns and values are checked
/// later, for the rows that are used.
SparseRowsView checked_lists(const char* op, const Tensor& offset, const Tensor& column,
                             const Tensor& value, int64_t features) {
  check_features(op, features);
  check::numbers(op, "offsets", offset, at::kLong);
  check::numbers(op, "columns", column, at::kInt);
  check::numbers(op, "values", value, at::kFloat);
  TORCH_CHECK_VALUE(offset.size(0) >= 1, op,
                    ": expected offsets with a number for each list and one, got none");
  check::offsets(op, "offsets", offset, column.size(0));
  check::size(op, "values", value, 0, column.size(0), "one for each number of its lists");
  return {offset.size(0) - 1, features, offset.const_data_ptr<int64_t>(),
          column.const_data_ptr<int32_t>(), value.const_data_ptr<float>()};
}

void check_rows(const char* op, const SparseRowsView& vectors, std::span<const int32_t> rows) {
  for (const int32_t row : rows) {
    for (int64_t t = vectors.offset[row]; t < vectors.offset[row + 1]; ++t) {
      TORCH_CHECK_INDEX(vectors.column[t] >= 0 && vectors.column[t] < vectors.features, op,
                        ": expected columns in [0, ", vectors.features, "), got ",
                        vectors.column[t], " at [", t, "]");
      TORCH_CHECK_VALUE(std::isfinite(vectors.value[t]), op,
                        ": expected values that are finite, got ", vectors.value[t], " at [", t,
                        "]");
    }
  }
}

} // namespace

LabelTreeNodes label_tree_clusters(const Tensor& seed, const Tensor& offsets, const Tensor& columns,
                                   const Tensor& values, int64_t features, int64_t arity,
                                   int64_t max_leaf_size, int64_t iterations, bool spherical) {
  constexpr const char* op = "label_tree_clusters";
  const Cutting cutting = checked_cutting(op, seed, iterations, spherical);
  const Tensor offset = offsets.contiguous(), column = columns.contiguous(),
               value = values.contiguous();
  check_features(op, features);
  const SparseRowsView vectors =
      check::sparse_rows(op, offset, column, value, features, /*rising=*/false);
  const std::vector<Node> nodes = checked_shape(op, "vectors", vectors.count, arity, max_leaf_size);
  std::vector<int32_t> order(vectors.count);
  std::iota(order.begin(), order.end(), int32_t(0));
  lay_out(op, vectors, nodes, cutting, segments_after(0, nodes), kAllCuts, order.data());
  return tree_of(nodes, order);
}

std::tuple<Tensor, Tensor> label_tree_cuts(const Tensor& seed, at::TensorList vectors,
                                           int64_t features, const Tensor& order, int64_t cuts,
                                           int64_t part, int64_t parts, std::string_view options) {
  constexpr const char* op = "label_tree_cuts";
  const auto [arity, iterations, max_leaf_size, spherical] =
      parse_options<TreeFromVectors>(op, options);
  const Cutting cutting = checked_cutting(op, seed, iterations, spherical);
  TORCH_CHECK_VALUE(vectors.size() == 3, op,
                    ": expected vectors as 3 tensors, offsets, columns and values, got ",
                    vectors.size());
  const Tensor offset = vectors[0].contiguous(), column = vectors[1].contiguous(),
               value = vectors[2].contiguous();
  const SparseRowsView rows = checked_lists(op, offset, column, value, features);
  const std::vector<Node> nodes = checked_shape(op, "vectors", rows.count, arity, max_leaf_size);
  check_order(op, order);
  check::size(op, "order", order, 0, rows.count, "one for each vector");
  TORCH_CHECK_VALUE(parts >= 1 && 0 <= part && part < parts, op,
                    ": expected 0 <= part < parts, got ", part, " and ", parts);
  TORCH_CHECK_VALUE(cuts >= 0, op, ": expected cuts of at least 0, got ", cuts);

  const std::vector<Segment> segments = segments_after(cuts, nodes);
  const Tensor made = order.contiguous().clone();
  int32_t* ids = made.mutable_data_ptr<int32_t>();
  const Deal deal = dealt(segments, nodes, rows, ids, part, parts);
  for (const Segment& segment : deal.mine) {
    check_rows(op, rows, {ids + nodes[segment.low].begin, ids + nodes[segment.high - 1].end});
  }
  const bool to_the_end = deal.even || int64_t(segments.size()) / kSegmentsOfPart >= parts;
  lay_out(op, rows, nodes, cutting, deal.mine, to_the_end ? kAllCuts : cuts + 1, ids);
  // Part 0 also returns the classes that need no more cuts.
  const Tensor share = part == 0 ? made.clone() : at::zeros_like(made);
  const auto places = [&](const Tensor& of, const Segment& segment) {
    return of.slice(0, nodes[segment.low].begin, nodes[segment.high - 1].end);
  };
  if (part == 0) {
    for (const Segment& segment : segments) {
      places(share, segment).zero_();
    }
  }
  for (const Segment& segment : deal.mine) {
    places(share, segment).copy_(places(made, segment));
  }
  return {share, at::scalar_tensor(to_the_end ? -1 : cuts + 1, at::kLong)};
}

LabelTreeNodes label_tree_of_clusters(const Tensor& order, int64_t arity, int64_t max_leaf_size) {
  constexpr const char* op = "label_tree_of_clusters";
  check_order(op, order);
  const Tensor ids = order.contiguous();
  return tree_of(checked_shape(op, "order", ids.numel(), arity, max_leaf_size),
                 span_of<int32_t>(ids));
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "label_tree_clusters(Tensor seed, Tensor offsets, Tensor columns, Tensor values, int "
      "features, int arity, int max_leaf_size, "
      "int iterations, bool spherical) -> (Tensor parents, Tensor classes)");
  m.def(
      "label_tree_cuts(Tensor seed, Tensor[] vectors, int features, Tensor order, int cuts, int "
      "part, int parts, str options=\"\") -> "
      "(Tensor order, Tensor cuts)");
  m.def(
      "label_tree_of_clusters(Tensor order, int arity, int max_leaf_size) -> (Tensor parents, "
      "Tensor classes)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("label_tree_clusters", label_tree_clusters);
  m.impl("label_tree_cuts", label_tree_cuts);
  m.impl("label_tree_of_clusters", label_tree_of_clusters);
}

} // namespace xsoftmax
