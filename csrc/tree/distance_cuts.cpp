#include "tree/distance_cuts.h"

#include "op/long_work.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace xsoftmax {
namespace {

/// Returns where the children of a node begin, and the end, after cutting its classes: the largest
/// part first, until there are `arity` parts or all are small.
std::vector<int64_t> cut_node(const ClusterNode& node, int64_t arity, int64_t max_leaf_size,
                              Bisection& bisection, int32_t* order) {
  std::vector<int64_t> ends{node.begin, node.end};
  while (int64_t(ends.size()) <= arity) {
    size_t largest = 0;
    for (size_t i = 0; i + 1 < ends.size(); ++i) {
      if (ends[i + 1] - ends[i] > ends[largest + 1] - ends[largest]) {
        largest = i;
      }
    }
    const int64_t begin = ends[largest], size = ends[largest + 1] - begin;
    if (size <= max_leaf_size) {
      break;
    }
    const int64_t left = bisection.cut_by_distance(order + begin, size, uint64_t(begin));
    ends.insert(ends.begin() + int64_t(largest) + 1, begin + left);
  }
  return ends;
}

} // namespace

std::vector<ClusterNode> cut_by_distance(const char* op, const SparseRowsView& vectors,
                                         const ClusterOptions& cluster_options, int64_t arity,
                                         int64_t max_leaf_size, int32_t* order) {
  std::vector<ClusterNode> nodes{{-1, 0, vectors.count, 1, 0, 0}};
  LongWork work(op, 0); // the number of cuts is known only afterwards
  const auto is_large = [&](const ClusterNode& node) {
    return node.end - node.begin > max_leaf_size;
  };
  for (size_t begin = 0; std::any_of(nodes.begin() + int64_t(begin), nodes.end(), is_large);) {
    const size_t end = nodes.size();
    std::vector<std::vector<int64_t>> ends(end - begin);
    const auto cut = [&](size_t i, Bisection& bisection) {
      if (!work.stopped()) {
        ends[i] = cut_node(nodes[begin + i], arity, max_leaf_size, bisection, order);
      }
    };
    // Few nodes are cut one after the other by all threads, many each by one thread.
    const int64_t threads = at::get_num_threads();
    if (int64_t(ends.size()) < threads) {
      Bisection bisection(vectors, cluster_options, work);
      for (size_t i = 0; i < ends.size(); ++i) {
        cut(i, bisection);
      }
    } else {
      std::atomic<size_t> next = 0;
      at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
        Bisection bisection(vectors, cluster_options, work);
        for (size_t i = next++; i < ends.size(); i = next++) {
          cut(i, bisection);
        }
      });
    }
    work.check();
    for (size_t i = 0; i < ends.size(); ++i) {
      nodes[begin + i].first = int64_t(nodes.size());
      for (size_t c = 0; c + 1 < ends[i].size(); ++c) {
        nodes.push_back({int64_t(begin + i), ends[i][c], ends[i][c + 1], 1, 0, 0});
      }
      nodes[begin + i].last = int64_t(nodes.size());
    }
    begin = end;
  }
  return nodes;
}

} // namespace xsoftmax
