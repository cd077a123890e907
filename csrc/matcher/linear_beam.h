#pragma once

#include "matcher/linear_chunk.h"
#include "matcher/score_rows.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

// Beam search through the layers of a hierarchical linear model, for sparse queries. Plain C++:
// answering a query starts no thread, and allocates nothing once the workspace has grown.

namespace xsoftmax {

/// Sparse rows, optionally with a dense block for the features from dense_begin on.
struct Queries {
  int64_t count;
  const int64_t* offset; ///< [count + 1]
  const int32_t* feature;
  const float* value;
  const float* dense; ///< [count][dense_width], or null
  int32_t dense_begin;
  int64_t dense_width;
  int64_t first = 0; ///< the number of the first query, if these are part of others

  Queries part(int64_t begin, int64_t end) const {
    return {end - begin,
            offset + begin,
            feature,
            value,
            dense == nullptr ? dense : dense + begin * dense_width,
            dense_begin,
            dense_width,
            first + begin};
  }
};

/// The nodes of a layer that a search may enter: shared by all queries, or listed per query.
struct AllowedNodes {
  std::vector<bool> marked; ///< [nodes], or empty
  std::vector<int64_t> offset, node; ///< [queries + 1], and the increasing nodes of each query

  bool has(int64_t query, int64_t n) const {
    return offset.empty()
        ? bool(marked[n])
        : std::binary_search(node.begin() + offset[query], node.begin() + offset[query + 1], n);
  }
};

/// A non-owning view of one layer (linear_layer.h). `wide`: more and child are int32. `half`: value
/// is float16.
struct LinearLayerView {
  std::span<const int64_t> first_child, chunk;
  std::span<const int32_t> feature;
  const void *more, *child, *value;
  bool wide, half;

  /// Returns the number of weights of a feature row.
  int64_t weights(int64_t row) const {
    return 1 +
        (wide ? int64_t(static_cast<const int32_t*>(more)[row])
              : int64_t(static_cast<const uint8_t*>(more)[row]));
  }
};

/// One layer with a hash table per parent that finds the weights of a feature.
class BeamLayer {
 public:
  /// The view must be validated. bias_feature: the feature id of the bias.
  BeamLayer(const LinearLayerView& view, int32_t bias_feature);
  BeamLayer(BeamLayer&&) = default; // not copyable: chunks_ points into slots_

  int64_t parents() const { return int64_t(view_.first_child.size()) - 1; }
  int64_t children() const { return view_.first_child.back(); }
  int64_t max_children() const { return max_children_; }
  int64_t first_child(int64_t parent) const { return view_.first_child[parent]; }
  int64_t parent(int64_t child) const {
    return std::upper_bound(view_.first_child.begin(), view_.first_child.end(), child) -
        view_.first_child.begin() - 1;
  }
  int64_t children(int64_t parent) const {
    return view_.first_child[parent + 1] - view_.first_child[parent];
  }

  /// Writes scores [children(parent)]: w.x for one query, plus `bias` times the weights of the
  /// bias.
  void score(int64_t parent, const Queries& queries, int64_t query, float bias,
             float* scores) const;

 private:
  struct Chunk {
    LinearChunk weights;
    int64_t entries, bias_entries; // bias_entries are the last ones of the entries
  };

  LinearLayerView view_;
  int64_t max_children_ = 1;
  std::vector<FeatureSlot> slots_; // a power of two per parent
  std::vector<Chunk> chunks_;
};

/// How a layer computes its scores.
struct LayerScoring {
  ScoreTransform transform;
  int power; ///< exponent of a hinge
  ScoreCombiner combiner;
};

struct LinearBeamOptions {
  int64_t beam, topk;
  c10::SmallVector<LayerScoring, 8> scoring; ///< of each layer; few layers need no allocation
  bool logs; ///< scores are logs, and e^score is reported
};

/// Runs beam searches. Its buffers are reused by the next search.
class BeamWorkspace {
 public:
  /// Finds the best topk leaves of each query, best first, equal scores by leaf. Writes `leaf` and
  /// `score` [count][topk], filled up with -1 and 0, and the number of leaves `found` [count].
  /// `allowed` restricts the nodes of each layer; empty: no restriction.
  ///
  /// No reported score is 0, because sparse formats drop zeros. If scores are logs, the
  /// i-th leaf before the last is reported with at least the i-th float after 2^-126, so the
  /// smallest scores keep their order. Otherwise a score of 0 is reported as 2^-126.
  void search(const std::vector<BeamLayer>& layers, const Queries& queries, float bias,
              const LinearBeamOptions& options, std::span<const AllowedNodes> allowed,
              int64_t* leaf, float* score, int64_t* found);

 private:
  struct Node {
    int64_t node;
    float score;
  };
  struct Pair { // a query at a parent
    int64_t query, parent, at;
    float score;
  };

  void report(int64_t query, const LinearBeamOptions& options, int64_t* leaf, float* score) const;
  void score_children(const BeamLayer& layer, const Queries& queries, float bias,
                      const LayerScoring& scoring);
  void select(const BeamLayer& layer, const Queries& queries, int64_t keep,
              const AllowedNodes* allowed);

  std::vector<Node> beam_, next_;       // of all queries, concatenated
  std::vector<int64_t> begin_, next_begin_;
  std::vector<Pair> pairs_;
  std::vector<int64_t> order_, count_;
  std::vector<float> scores_;
};

} // namespace xsoftmax
