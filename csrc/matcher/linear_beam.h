#pragma once

#include "matcher/linear_chunk.h"
#include "matcher/score_rows.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

// Beam search down the layers of a hierarchical linear model, for sparse queries. Plain C++: what answers a query neither allocates, once its
// workspace has grown, nor starts a thread.

namespace xsoftmax {

/// Sparse rows, and beside them a dense block, of the features from dense_begin on.
struct Queries {
  int64_t count;
  const int64_t* offset; ///< [count + 1]
  const int32_t* feature;
  const float* value;
  const float* dense; ///< [count][dense_width], or null
  int32_t dense_begin;
  int64_t dense_width;

  Queries part(int64_t begin, int64_t end) const {
    return {end - begin, offset + begin, feature, value, dense == nullptr ? dense : dense + begin * dense_width, dense_begin, dense_width};
  }
};

/// One layer as linear_layer.h has it, over memory that someone else holds; `wide`: more and child are int32; `half`: value is float16.
struct LinearLayerView {
  std::span<const int64_t> first_child, chunk;
  std::span<const int32_t> feature;
  const void *more, *child, *value;
  bool wide, half;

  /// How many weights a feature has.
  int64_t weights(int64_t row) const { return 1 + (wide ? int64_t(static_cast<const int32_t*>(more)[row]) : int64_t(static_cast<const uint8_t*>(more)[row])); }
};

/// One layer, and where to find a feature among a parent's.
class BeamLayer {
 public:
  /// The view has been checked. bias_feature: the feature that stands for the bias.
  BeamLayer(const LinearLayerView& view, int32_t bias_feature);
  BeamLayer(BeamLayer&&) = default; // a copy would look into the slots of the first

  int64_t parents() const { return int64_t(view_.first_child.size()) - 1; }
  int64_t children() const { return view_.first_child.back(); }
  int64_t most_children() const { return most_children_; }
  int64_t first_child(int64_t parent) const { return view_.first_child[parent]; }
  int64_t parent(int64_t child) const { return std::upper_bound(view_.first_child.begin(), view_.first_child.end(), child) - view_.first_child.begin() - 1; }
  int64_t children(int64_t parent) const { return view_.first_child[parent + 1] - view_.first_child[parent]; }

  /// scores [children(parent)] = w.x for one of the queries, and bias times the bias's weights.
  void score(int64_t parent, const Queries& queries, int64_t query, float bias, float* scores) const;

 private:
  struct Chunk {
    LinearChunk weights;
    int64_t entries, bias_entries; // of the latter, the last ones
  };

  LinearLayerView view_;
  int64_t most_children_ = 1;
  std::vector<FeatureSlot> slots_; // a power of two for each parent
  std::vector<Chunk> chunks_;
};

struct LinearBeamOptions {
  int64_t beam, topk;
  ScoreTransform transform;
  int power; ///< of a hinge
  ScoreCombiner combiner;
  bool logs; ///< Scores are logs: e^score is reported.
};

/// What a search needs beside the model; kept for the next one.
class BeamWorkspace {
 public:
  /// Finds the best topk leaves of each query, best first, equal scores by leaf: `leaf` and `score`
  /// [count][topk], -1 and 0 behind the last; `found` [count] how many. `allowed`, where not empty:
  /// of each layer's nodes those that may be entered.
  ///
  /// No reported score is 0, which sparse formats drop. Where scores are logs, e^score of the i-th
  /// leaf before the last one found is at least the i-th float after 2^-126, so that the smallest
  /// ones are in order, too. A score of 0 that is no log of this kind is reported as 2^-126.
  void search(const std::vector<BeamLayer>& layers, const Queries& queries, float bias, const LinearBeamOptions& options,
              std::span<const std::vector<bool>> allowed, int64_t* leaf, float* score, int64_t* found);

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
  void score_children(const BeamLayer& layer, const Queries& queries, float bias, const LinearBeamOptions& options);
  void select(const BeamLayer& layer, int64_t queries, int64_t keep, const std::vector<bool>* allowed);

  std::vector<Node> beam_, next_;       // of all queries, one after the other
  std::vector<int64_t> begin_, next_begin_;
  std::vector<Pair> pairs_;
  std::vector<int64_t> order_, count_;
  std::vector<float> scores_;
};

} // namespace xsoftmax
