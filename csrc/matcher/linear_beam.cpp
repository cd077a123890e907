#include "matcher/linear_beam.h"

#include "cpu/simd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace xsoftmax {

BeamLayer::BeamLayer(const LinearLayerView& view, int32_t bias_feature)
    : view_(view), chunks_(parents()) {
  // At most two thirds of the slots are used.
  const auto bits = [&](int64_t p) {
    const int64_t rows = view.chunk[p + 1] - view.chunk[p];
    int found = 1;
    for (; (int64_t(1) << found) * 2 < rows * 3; ++found) {
    }
    return found;
  };
  std::vector<int64_t> slots_begin(parents() + 1, 0);
  for (int64_t p = 0; p < parents(); ++p) {
    slots_begin[p + 1] = slots_begin[p] + (int64_t(1) << bits(p));
  }
  slots_.assign(slots_begin.back(), {-1, 0, 0});
  const size_t child_size = view.wide ? sizeof(int32_t) : sizeof(uint8_t),
               value_size = view.half ? sizeof(F16) : sizeof(float);
  int64_t entry = 0;
  for (int64_t p = 0; p < parents(); ++p) {
    max_children_ = std::max(max_children_, children(p));
    FeatureSlot* slots = slots_.data() + slots_begin[p];
    Chunk& chunk = chunks_[p];
    chunk.weights = {slots,
                     uint32_t(slots_begin[p + 1] - slots_begin[p] - 1),
                     32 - bits(p),
                     static_cast<const char*>(view.child) + entry * child_size,
                     static_cast<const char*>(view.value) + entry * value_size,
                     view.wide,
                     view.half};
    chunk.bias_entries = 0;
    int64_t begin = 0;
    for (int64_t row = view.chunk[p]; row < view.chunk[p + 1]; ++row) {
      const int64_t count = view.weights(row);
      // The bias is the last feature of a parent, if it has one.
      if (view.feature[row] == bias_feature) {
        chunk.bias_entries = count;
      } else {
        uint32_t at = first_slot(view.feature[row], chunk.weights.shift);
        while (slots[at].feature >= 0) {
          at = (at + 1) & chunk.weights.mask;
        }
        slots[at] = {view.feature[row], uint32_t(begin), uint32_t(count)};
      }
      begin += count;
    }
    chunk.entries = begin;
    entry += begin;
  }
}

void BeamLayer::score(int64_t parent, const Queries& queries, int64_t query, float bias,
                      float* scores) const {
  const LinearChunkTable& loops = linear_chunk();
  const Chunk& chunk = chunks_[parent];
  std::fill_n(scores, children(parent), 0.0f);
  int64_t end = chunk.entries - chunk.bias_entries;
  loops.add_weights(chunk.weights, end, chunk.bias_entries, bias, scores);
  const int64_t begin = queries.offset[query];
  loops.add(chunk.weights, queries.feature + begin, queries.value + begin,
            queries.offset[query + 1] - begin, scores);
  // The dense features are the last ones of the parent, except for the bias.
  if (queries.dense != nullptr) {
    const float* dense = queries.dense + query * queries.dense_width;
    const int64_t last = view_.chunk[parent + 1] - (chunk.bias_entries > 0);
    for (int64_t row = last - 1;
         row >= view_.chunk[parent] && view_.feature[row] >= queries.dense_begin; --row) {
      const int64_t count = view_.weights(row);
      end -= count;
      // Rows of a dense block are often sparse.
      if (const float value = dense[view_.feature[row] - queries.dense_begin]; value != 0) {
        loops.add_weights(chunk.weights, end, count, value, scores);
      }
    }
  }
}

void BeamWorkspace::search(const std::vector<BeamLayer>& layers, const Queries& queries, float bias,
                           const LinearBeamOptions& options, std::span<const AllowedNodes> allowed,
                           int64_t* leaf, float* score, int64_t* found) {
  float start = 1.0f; // neutral element of the first combiner
  if (options.scoring[0].combiner == ScoreCombiner::Add) {
    start = 0.0f;
  } else if (options.scoring[0].combiner == ScoreCombiner::LogAdd) {
    start = -std::numeric_limits<float>::infinity();
  }
  beam_.assign(queries.count, {0, start});
  begin_.resize(queries.count + 1);
  std::iota(begin_.begin(), begin_.end(), int64_t(0));
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    score_children(layers[depth], queries, bias, options.scoring[depth]);
    select(layers[depth], queries, depth + 1 == layers.size() ? options.topk : options.beam,
           allowed.empty() ? nullptr : &allowed[depth]);
  }
  for (int64_t q = 0; q < queries.count; ++q) {
    found[q] = begin_[q + 1] - begin_[q];
    report(q, options, leaf + q * options.topk, score + q * options.topk);
  }
}

void BeamWorkspace::report(int64_t query, const LinearBeamOptions& options, int64_t* leaf,
                           float* score) const {
  constexpr float kMin = std::numeric_limits<float>::min(),
                  kStep = std::numeric_limits<float>::epsilon();
  const Node* best = beam_.data() + begin_[query];
  const int64_t found = begin_[query + 1] - begin_[query];
  std::fill(leaf + found, leaf + options.topk, -1);
  std::fill(score + found, score + options.topk, 0.0f);
  for (int64_t k = 0; k < found; ++k) {
    leaf[k] = best[k].node;
    if (options.logs) {
      // Scores below the smallest normal number are replaced by distinct values near it, in order.
      score[k] = std::max(std::exp(best[k].score), kMin * (1.0f + float(found - 1 - k) * kStep));
    } else {
      score[k] = best[k].score == 0.0f ? kMin : best[k].score;
    }
  }
}

// Scores parent by parent, so its weights are read once for all queries at that parent.
void BeamWorkspace::score_children(const BeamLayer& layer, const Queries& queries, float bias,
                                   const LayerScoring& scoring) {
  pairs_.clear();
  int64_t total = 0;
  for (int64_t q = 0; q < queries.count; ++q) {
    for (int64_t i = begin_[q]; i < begin_[q + 1]; ++i) {
      pairs_.push_back({q, beam_[i].node, total, beam_[i].score});
      total += layer.children(beam_[i].node);
    }
  }
  scores_.resize(std::max(scores_.size(), size_t(total)));
  order_.resize(pairs_.size());
  // A counting sort by parent.
  if (queries.count > 1) {
    count_.assign(layer.parents() + 1, 0);
    for (const Pair& pair : pairs_) {
      ++count_[pair.parent + 1];
    }
    std::partial_sum(count_.begin(), count_.end(), count_.begin());
    for (size_t i = 0; i < pairs_.size(); ++i) {
      order_[count_[pairs_[i].parent]++] = int64_t(i);
    }
  } else {
    std::iota(order_.begin(), order_.end(), int64_t(0));
  }
  const ScoreRowTable& rows = score_rows();
  for (const int64_t i : order_) {
    const Pair& pair = pairs_[i];
    float* scores = scores_.data() + pair.at;
    layer.score(pair.parent, queries, pair.query, bias, scores);
    rows.combine(scores, layer.children(pair.parent), pair.score, scoring.transform, scoring.power,
                 scoring.combiner);
  }
}

// Selects the best `keep` allowed children of each query, best first.
void BeamWorkspace::select(const BeamLayer& layer, const Queries& queries, int64_t keep,
                           const AllowedNodes* allowed) {
  const auto better = [](const Node& a, const Node& b) {
    return a.score > b.score || (a.score == b.score && a.node < b.node);
  };
  next_.clear();
  next_begin_.resize(queries.count + 1);
  size_t pair = 0;
  for (int64_t q = 0; q < queries.count; ++q) {
    const int64_t begin = int64_t(next_.size());
    next_begin_[q] = begin;
    for (; pair < pairs_.size() && pairs_[pair].query == q; ++pair) {
      const float* scores = scores_.data() + pairs_[pair].at;
      const int64_t first = layer.first_child(pairs_[pair].parent),
                    count = layer.children(pairs_[pair].parent);
      for (int64_t c = 0; c < count; ++c) {
        if (allowed != nullptr && !allowed->has(queries.first + q, first + c)) {
          continue;
        }
        // A NaN cannot be ordered, so it counts as the lowest float.
        const Node node{first + c, std::fmax(scores[c], std::numeric_limits<float>::lowest())};
        if (int64_t(next_.size()) - begin < keep) {
          next_.push_back(node);
          std::push_heap(next_.begin() + begin, next_.end(), better); // the worst is at the top
        } else if (keep > 0 && better(node, next_[begin])) {
          std::pop_heap(next_.begin() + begin, next_.end(), better);
          next_.back() = node;
          std::push_heap(next_.begin() + begin, next_.end(), better);
        }
      }
    }
    std::sort_heap(next_.begin() + begin, next_.end(), better);
  }
  next_begin_[queries.count] = int64_t(next_.size());
  beam_.swap(next_);
  begin_.swap(next_begin_);
}

} // namespace xsoftmax
