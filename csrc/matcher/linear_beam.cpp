#include "matcher/linear_beam.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace xsoftmax {

BeamLayer::BeamLayer(const Views& views, int32_t bias_feature) : views_(views) {
  const int64_t parents = this->parents();
  slots_begin_.resize(parents + 1);
  shift_.resize(parents);
  int64_t total = 0;
  for (int64_t p = 0; p < parents; ++p) {
    slots_begin_[p] = total;
    const int64_t rows = views.chunk[p + 1] - views.chunk[p];
    int bits = 1;
    while ((int64_t(1) << bits) * 2 < rows * 3) { // at most two thirds full
      ++bits;
    }
    shift_[p] = uint8_t(32 - bits);
    total += int64_t(1) << bits;
  }
  slots_begin_[parents] = total;
  slots_.assign(total, {-1, -1});
  for (int64_t p = 0; p < parents; ++p) {
    Slot* slots = slots_.data() + slots_begin_[p];
    const uint64_t mask = uint64_t(slots_begin_[p + 1] - slots_begin_[p]) - 1;
    for (int64_t row = views.chunk[p]; row < views.chunk[p + 1]; ++row) {
      if (views.feature[row] == bias_feature) {
        continue; // the last of the parent's rows, where it has one
      }
      uint64_t at = slot(p, views.feature[row]);
      while (slots[at].feature >= 0) {
        at = (at + 1) & mask;
      }
      slots[at] = {views.feature[row], int32_t(row - views.chunk[p])};
    }
  }
  bias_row_.resize(parents);
  for (int64_t p = 0; p < parents; ++p) {
    const int64_t last = views.chunk[p + 1] - 1;
    bias_row_[p] = last >= views.chunk[p] && views.feature[last] == bias_feature ? last : -1;
  }
}

void BeamLayer::add_row(int64_t row, float x, float* scores) const {
  const int64_t begin = views_.entry[row], end = views_.entry[row + 1];
  const float* value = views_.value.data();
  if (!views_.child.empty()) {
    const uint8_t* child = views_.child.data();
    for (int64_t e = begin; e < end; ++e) {
      scores[child[e]] += x * value[e];
    }
  } else {
    const int32_t* child = views_.wide_child.data();
    for (int64_t e = begin; e < end; ++e) {
      scores[child[e]] += x * value[e];
    }
  }
}

void BeamLayer::score(int64_t parent, const Queries& queries, int64_t query, float bias, float* scores) const {
  std::fill_n(scores, children(parent), 0.0f);
  if (bias_row_[parent] >= 0) {
    add_row(bias_row_[parent], bias, scores);
  }
  const Slot* slots = slots_.data() + slots_begin_[parent];
  const uint64_t mask = uint64_t(slots_begin_[parent + 1] - slots_begin_[parent]) - 1;
  const int64_t first = views_.chunk[parent];
  for (int64_t t = queries.offset[query]; t < queries.offset[query + 1]; ++t) {
    const int32_t feature = queries.feature[t];
    for (uint64_t at = slot(parent, feature); slots[at].feature >= 0; at = (at + 1) & mask) {
      if (slots[at].feature == feature) {
        add_row(first + slots[at].row, queries.value[t], scores);
        break;
      }
    }
  }
  if (queries.dense != nullptr) { // its features are the last of the parent's, but for the bias
    const float* dense = queries.dense + query * queries.dense_width;
    const auto all = views_.feature.subspan(first, views_.chunk[parent + 1] - first);
    for (int64_t row = first + (std::lower_bound(all.begin(), all.end(), queries.dense_begin) - all.begin());
         row < views_.chunk[parent + 1] && row != bias_row_[parent]; ++row) {
      add_row(row, dense[views_.feature[row] - queries.dense_begin], scores);
    }
  }
}

void BeamWorkspace::search(const std::vector<BeamLayer>& layers, const Queries& queries, float bias, const BeamOptions& options,
                           std::span<const std::vector<bool>> allowed, int64_t* leaf, float* score, int64_t* found) {
  const float start = options.combiner == ScoreCombiner::Add ? 0.0f : 1.0f;
  beam_.assign(queries.count, {0, start});
  begin_.resize(queries.count + 1);
  std::iota(begin_.begin(), begin_.end(), int64_t(0));
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    score_children(layers[depth], queries, bias, options, allowed, depth);
    select(layers[depth], queries.count, depth + 1 == layers.size() ? options.topk : options.beam);
  }
  for (int64_t q = 0; q < queries.count; ++q) {
    found[q] = begin_[q + 1] - begin_[q];
    for (int64_t k = 0; k < options.topk; ++k) {
      const bool there = k < found[q];
      leaf[q * options.topk + k] = there ? beam_[begin_[q] + k].node : -1;
      score[q * options.topk + k] = there ? beam_[begin_[q] + k].score : 0.0f;
    }
  }
}

// Parent after parent, so that its weights are read once for all the queries that are there.
void BeamWorkspace::score_children(const BeamLayer& layer, const Queries& queries, float bias, const BeamOptions& options,
                                   std::span<const std::vector<bool>> allowed, size_t depth) {
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
  if (queries.count > 1) { // a counting sort
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
    rows.combine(scores, layer.children(pair.parent), pair.score, options.transform, options.power, options.combiner);
  }
  if (!allowed.empty()) {
    const std::vector<bool>& may = allowed[depth];
    for (const Pair& pair : pairs_) {
      for (int64_t c = 0; c < layer.children(pair.parent); ++c) {
        if (!may[layer.first_child(pair.parent) + c]) {
          scores_[pair.at + c] = -std::numeric_limits<float>::infinity();
        }
      }
    }
  }
}

// The best `keep` children of each query, best first.
void BeamWorkspace::select(const BeamLayer& layer, int64_t queries, int64_t keep) {
  const auto better = [](const Node& a, const Node& b) { return a.score > b.score || (a.score == b.score && a.node < b.node); };
  next_.clear();
  next_begin_.resize(queries + 1);
  size_t pair = 0;
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t begin = int64_t(next_.size());
    next_begin_[q] = begin;
    for (; pair < pairs_.size() && pairs_[pair].query == q; ++pair) {
      const float* scores = scores_.data() + pairs_[pair].at;
      const int64_t first = layer.first_child(pairs_[pair].parent), count = layer.children(pairs_[pair].parent);
      for (int64_t c = 0; c < count; ++c) {
        const Node node{first + c, scores[c]};
        if (int64_t(next_.size()) - begin < keep) {
          if (scores[c] != -std::numeric_limits<float>::infinity()) {
            next_.push_back(node);
            std::push_heap(next_.begin() + begin, next_.end(), better); // the worst on top
          }
        } else if (keep > 0 && better(node, next_[begin])) {
          std::pop_heap(next_.begin() + begin, next_.end(), better);
          next_.back() = node;
          std::push_heap(next_.begin() + begin, next_.end(), better);
        }
      }
    }
    std::sort_heap(next_.begin() + begin, next_.end(), better);
  }
  next_begin_[queries] = int64_t(next_.size());
  beam_.swap(next_);
  begin_.swap(next_begin_);
}

} // namespace xsoftmax
