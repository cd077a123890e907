#include "tree/cluster_cuts.h"

#include "op/long_work.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

// Lays out the tree and shares its cuts among threads.

namespace xsoftmax {
namespace {

/// Replaces a segment of one node by the children of that node, as often as possible.
SiblingSegment below_single_nodes(SiblingSegment segment, const std::vector<ClusterNode>& nodes) {
  while (segment.high - segment.low == 1) {
    segment = {nodes[segment.low].first, nodes[segment.low].last, segment.cuts};
  }
  return segment;
}

/// Calls add() with the two halves of a segment.
template <typename Add>
void add_halves(const SiblingSegment& segment, const Add& add) {
  const int64_t middle = (segment.low + segment.high) / 2;
  add({segment.low, middle, segment.cuts + 1});
  add({middle, segment.high, segment.cuts + 1});
}

/// The segments that are still to be cut: a heap, largest first, so that threads finish together.
class OpenSegments {
 public:
  OpenSegments(const std::vector<ClusterNode>& nodes, std::span<const SiblingSegment> segments,
               int64_t max_cuts)
      : nodes_(nodes), most_cuts_(max_cuts) {
    for (const SiblingSegment& segment : segments) {
      add(segment);
    }
  }

  bool empty() const { return heap_.empty(); }
  int64_t count() const { return int64_t(heap_.size()); }
  /// Returns the number of classes of a segment.
  int64_t classes(const SiblingSegment& segment) const {
    return nodes_[segment.high - 1].end - nodes_[segment.low].begin;
  }

  SiblingSegment take() {
    std::pop_heap(heap_.begin(), heap_.end(), Smaller{*this});
    const SiblingSegment segment = heap_.back();
    heap_.pop_back();
    return segment;
  }
  void add_below(const SiblingSegment& segment) {
    add_halves(segment, [&](const SiblingSegment& half) { add(half); });
  }

 private:
  struct Smaller {
    const OpenSegments& open;
    bool operator()(const SiblingSegment& a, const SiblingSegment& b) const {
      return open.classes(a) < open.classes(b);
    }
  };
  void add(const SiblingSegment& within) {
    const SiblingSegment segment = below_single_nodes(within, nodes_);
    if (segment.high > segment.low && segment.cuts < most_cuts_) {
      heap_.push_back(segment);
      std::push_heap(heap_.begin(), heap_.end(), Smaller{*this});
    }
  }

  const std::vector<ClusterNode>& nodes_;
  int64_t most_cuts_;
  std::vector<SiblingSegment> heap_;
};

/// Returns the work of all cuts, for progress.
int64_t total_work(OpenSegments open) {
  int64_t total = 0;
  while (!open.empty()) {
    const SiblingSegment segment = open.take();
    total += open.classes(segment);
    open.add_below(segment);
  }
  return total;
}

} // namespace

std::vector<ClusterNode> cluster_nodes(int64_t classes, int64_t arity, int64_t max_leaf_size) {
  const int64_t leaves = (classes + max_leaf_size - 1) / max_leaf_size;
  std::vector<ClusterNode> nodes{{-1, 0, classes, leaves, 0, 0}};
  int64_t child_leaves = 1; // largest number of clusters below a node of the next layer
  while (child_leaves * arity < leaves) {
    child_leaves *= arity;
  }
  int64_t layer_begin = 0;
  for (; leaves > 1 && child_leaves >= 1; child_leaves /= arity) {
    const int64_t layer_end = int64_t(nodes.size());
    for (int64_t v = layer_begin; v < layer_end; ++v) {
      const ClusterNode node = nodes[v];
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

std::vector<SiblingSegment> segments_after(int64_t cuts, const std::vector<ClusterNode>& nodes) {
  std::vector<SiblingSegment> found;
  const auto add = [&](const SiblingSegment& within) {
    const SiblingSegment segment = below_single_nodes(within, nodes);
    if (segment.high > segment.low) {
      found.push_back(segment);
    }
  };
  add({nodes[0].first, nodes[0].last, 0});
  for (int64_t done = 0; done < cuts && !found.empty(); ++done) {
    for (const SiblingSegment& segment : std::exchange(found, {})) {
      add_halves(segment, add);
    }
  }
  return found;
}

void cut_segments(const char* op, const SparseRowsView& vectors,
                  const std::vector<ClusterNode>& nodes, const ClusterOptions& cluster_options,
                  std::span<const SiblingSegment> segments, int64_t max_cuts, int32_t* order) {
  OpenSegments open(nodes, segments, max_cuts);
  LongWork work(op, total_work(open));
  const auto cut = [&](Bisection& bisection, const SiblingSegment& segment) {
    if (work.stopped()) {
      return;
    }
    const int64_t begin = nodes[segment.low].begin,
                  middle = nodes[(segment.low + segment.high) / 2].begin;
    bisection.cut(order + begin, open.classes(segment), middle - begin, uint64_t(begin));
  };

  // While there are fewer segments than threads, all threads share one segment; after that, each
  // thread takes segments from the heap.
  const int64_t threads = at::get_num_threads();
  {
    Bisection bisection(vectors, cluster_options, work);
    while (!open.empty() && open.count() < threads) {
      const SiblingSegment segment = open.take();
      cut(bisection, segment);
      open.add_below(segment);
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  int64_t working = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    Bisection bisection(vectors, cluster_options, work);
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return !open.empty() || working == 0; });
      if (open.empty()) {
        return;
      }
      const SiblingSegment segment = open.take();
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
      changed.notify_all(); // before add_below, which may run out of memory
      open.add_below(segment);
    }
  });
  work.check();
}

} // namespace xsoftmax
