#include "matcher/parent_rows.h"

namespace xsoftmax {

void ParentRows::gather(const SparseRowsView& examples, const int32_t* rows, int64_t count,
                        float bias, std::vector<int32_t>& place) {
  rows_ = rows;
  count_ = count;
  feature_.clear();
  start_.resize(count + 1);
  square_.resize(count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    start_[i] = total;
    for (int64_t t = examples.offset[rows[i]]; t < examples.offset[rows[i] + 1]; ++t) {
      if (place[examples.column[t]] < 0) {
        place[examples.column[t]] = 0;
        feature_.push_back(examples.column[t]);
      }
    }
    total += examples.offset[rows[i] + 1] - examples.offset[rows[i]] + (bias != 0);
  }
  start_[count] = total;
  std::sort(feature_.begin(), feature_.end());
  for (size_t j = 0; j < feature_.size(); ++j) {
    place[feature_[j]] = int32_t(j);
  }
  column_.resize(total);
  value_.resize(total);
  for (int64_t i = 0; i < count; ++i) {
    int64_t to = start_[i];
    float square = bias * bias;
    for (int64_t t = examples.offset[rows[i]]; t < examples.offset[rows[i] + 1]; ++t, ++to) {
      column_[to] = place[examples.column[t]];
      value_[to] = examples.value[t];
      square += examples.value[t] * examples.value[t];
    }
    if (bias != 0) {
      column_[to] = int32_t(feature_.size());
      value_[to] = bias;
    }
    square_[i] = square;
  }
  for (const int32_t feature : feature_) {
    place[feature] = -1;
  }
  if (bias != 0) {
    feature_.push_back(int32_t(examples.features));
  }
}

} // namespace xsoftmax
