#include "matcher/linear_layer.h"

#include "op/checks.h"
#include "op/long_work.h"
#include "op/operators.h"
#include "random/philox.h"
#include "table/sparse_rows.h"
#include "matcher/linear_layer_input.h"
#include "matcher/sibling_solver.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr const char* kOp = kLinearLayerTrain;

/// The layer of a warm start.
struct InitialLayer {
  LinearLayerView view;
  std::vector<int64_t> entry; // offset of each parent's weights

  explicit InitialLayer(const LinearLayerView& layer) : view(layer), entry{0} {
    for (size_t p = 0; p + 1 < view.chunk.size(); ++p) {
      int64_t end = entry.back();
      for (int64_t row = view.chunk[p]; row < view.chunk[p + 1]; ++row) {
        end += view.weights(row);
      }
      entry.push_back(end);
    }
  }

  int64_t child(int64_t e) const {
    return view.wide ? int64_t(static_cast<const int32_t*>(view.child)[e])
                     : int64_t(static_cast<const uint8_t*>(view.child)[e]);
  }
  float value(int64_t e) const {
    return view.half ? float(static_cast<const at::Half*>(view.value)[e])
                     : static_cast<const float*>(view.value)[e];
  }
};

/// A weight that is kept. `column` numbers the columns of the parent, `child` its children.
struct Weight {
  int32_t column, child;
  float value;
};

struct Stats {
  int64_t sweeps = 0, unconverged = 0, weights = 0;

  void operator+=(const Stats& other) {
    sweeps += other.sweeps;
    unconverged += other.unconverged;
    weights += other.weights;
  }
};

/// The rows of one parent with renumbered columns, so that the weights of siblings are close in
/// memory.
class ParentRows {
 public:
  explicit ParentRows(const SparseRowsView& examples)
      : examples_(examples), place_(examples.features, -1) {}

  void gather(const int32_t* rows, int64_t count, float bias) {
    rows_ = rows;
    count_ = count;
    feature_.clear();
    start_.resize(count + 1);
    square_.resize(count);
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
      start_[i] = total;
      for (int64_t t = examples_.offset[rows[i]]; t < examples_.offset[rows[i] + 1]; ++t) {
        if (place_[examples_.column[t]] < 0) {
          place_[examples_.column[t]] = 0;
          feature_.push_back(examples_.column[t]);
        }
      }
      total += examples_.offset[rows[i] + 1] - examples_.offset[rows[i]] + (bias != 0);
    }
    start_[count] = total;
    std::sort(feature_.begin(), feature_.end());
    for (size_t j = 0; j < feature_.size(); ++j) {
      place_[feature_[j]] = int32_t(j);
    }
    column_.resize(total);
    value_.resize(total);
    for (int64_t i = 0; i < count; ++i) {
      int64_t to = start_[i];
      float square = bias * bias;
      for (int64_t t = examples_.offset[rows[i]]; t < examples_.offset[rows[i] + 1]; ++t, ++to) {
        column_[to] = place_[examples_.column[t]];
        value_[to] = examples_.value[t];
        square += examples_.value[t] * examples_.value[t];
      }
      if (bias != 0) {
        column_[to] = int32_t(feature_.size());
        value_[to] = bias;
      }
      square_[i] = square;
    }
    for (const int32_t feature : feature_) {
      place_[feature] = -1;
    }
    if (bias != 0) {
      feature_.push_back(int32_t(examples_.features));
    }
  }

  int64_t count() const { return count_; }
  int64_t columns() const { return int64_t(feature_.size()); }
  /// Returns the feature id of a column.
  int32_t feature(int64_t column) const { return feature_[column]; }

  /// Calls found(position among the rows, position in the list) for each element of an increasing
  /// list that is one of the rows.
  template <typename Found>
  void match(const int32_t* list, int64_t size, const Found& found) const {
    const int32_t *at = rows_, *end = rows_ + count_;
    for (int64_t t = 0; t < size && at < end; ++t) {
      at = std::lower_bound(at, end, list[t]);
      if (at < end && *at == list[t]) {
        found(at - rows_, t);
      }
    }
  }

  void fill(SiblingProblem& problem) const {
    problem.rows = count_;
    problem.columns = columns();
    problem.start = start_.data();
    problem.column = column_.data();
    problem.value = value_.data();
    problem.square = square_.data();
  }

 private:
  const SparseRowsView& examples_;
  const int32_t* rows_ = nullptr;
  int64_t count_ = 0;
  std::vector<int32_t> place_; // of a feature among the columns
  std::vector<int32_t> feature_, column_;
  std::vector<int64_t> start_;
  std::vector<float> value_, square_;
};

/// Trains groups of siblings on one thread.
class GroupTrainer {
 public:
  GroupTrainer(const LinearTraining& training, const RowLists& labels, const float* costs,
               const InitialLayer* initial, const LongWork& work)
      : training_(training), labels_(labels), costs_(costs), initial_(initial), work_(work) {}

  /// Trains the labels first .. first + count - 1, which are the children of `parent` from `child`
  /// on, and appends their weights, column by column.
  void train(const ParentRows& rows, int64_t parent, int64_t first, int64_t child, int64_t count,
             std::vector<Weight>& weights, Stats& stats) {
    const int64_t lanes = sibling_lanes(count), n = rows.count(), columns = rows.columns();
    SiblingProblem problem{};
    rows.fill(problem);
    positive_.assign(n, 0);
    if (costs_ != nullptr) {
      cost_.assign(n * lanes, training_.negative_cost);
    }
    for (int64_t c = 0; c < count; ++c) {
      const int64_t begin = labels_.offset[first + c];
      rows.match(labels_.row + begin, labels_.size(first + c), [&](int64_t row, int64_t t) {
        positive_[row] |= uint16_t(1u << c);
        if (costs_ != nullptr) {
          cost_[row * lanes + c] = training_.positive_cost * costs_[begin + t];
        }
      });
    }
    problem.positive = positive_.data();
    problem.cost = costs_ == nullptr ? nullptr : cost_.data();
    problem.positive_cost = training_.positive_cost;
    problem.negative_cost = training_.negative_cost;
    problem.labels = count;
    problem.loss = training_.loss;
    problem.tolerance = training_.tolerance;
    problem.sweeps = training_.sweeps;
    problem.seed = philox(training_.seed, uint64_t(first), 0).low();
    const SiblingSolverTable& solver = sibling_solver();
    weight_.assign(columns * lanes, 0.0f);
    problem.warm = initial_ != nullptr && load_initial(rows, parent, child, count);
    problem.stopped = [](const void* work) {
      return static_cast<const LongWork*>(work)->stopped();
    };
    problem.work = &work_;
    state_.resize(n * lanes);
    order_.resize(n);
    SiblingStats group_stats;
    solver.solve(problem, weight_.data(), state_.data(), order_.data(), &group_stats);
    stats.sweeps += group_stats.sweeps;
    stats.unconverged += group_stats.unconverged;
    keep_largest(columns, lanes, count, child, weights, stats);
  }

 private:
  void keep_largest(int64_t columns, int64_t lanes, int64_t count, int64_t child,
                    std::vector<Weight>& weights, Stats& stats) {
    float lowest_kept[kSiblingLanes];
    int64_t equals[kSiblingLanes]; // how many weights of size `lowest_kept` may stay
    for (int64_t c = 0; c < count; ++c) {
      equals[c] = columns;
      lowest_kept[c] = std::max(training_.threshold, std::numeric_limits<float>::min());
      if (training_.max_weights > 0 && training_.max_weights < columns) {
        size_.resize(columns);
        for (int64_t j = 0; j < columns; ++j) {
          size_[j] = std::abs(weight_[j * lanes + c]);
        }
        std::nth_element(size_.begin(), size_.begin() + training_.max_weights - 1, size_.end(),
                         std::greater<>());
        const float last = size_[training_.max_weights - 1];
        if (last >= lowest_kept[c]) {
          lowest_kept[c] = last;
          equals[c] = std::count(size_.begin(), size_.begin() + training_.max_weights, last);
        }
      }
    }
    for (int64_t j = 0; j < columns; ++j) {
      const float* w = weight_.data() + j * lanes;
      for (int64_t c = 0; c < count; ++c) {
        stats.weights += w[c] != 0.0f;
        const float size = std::abs(w[c]);
        if (size > lowest_kept[c] || (size == lowest_kept[c] && equals[c]-- > 0)) {
          weights.push_back({int32_t(j), int32_t(child + c), w[c]});
        }
      }
    }
  }

  // Loads the initial weights and returns whether there are any.
  bool load_initial(const ParentRows& rows, int64_t parent, int64_t child, int64_t count) {
    const LinearLayerView& view = initial_->view;
    const int64_t lanes = sibling_lanes(count);
    int64_t column = 0, entry = initial_->entry[parent];
    bool any = false;
    for (int64_t row = view.chunk[parent]; row < view.chunk[parent + 1]; ++row) {
      const int64_t end = entry + view.weights(row);
      for (; column < rows.columns() && rows.feature(column) < view.feature[row]; ++column) {
      }
      const bool is_column = column < rows.columns() && rows.feature(column) == view.feature[row];
      for (; entry < end; ++entry) {
        const int64_t c = initial_->child(entry) - child;
        if (is_column && c >= 0 && c < count) {
          weight_[column * lanes + c] = initial_->value(entry);
          any = true;
        }
      }
    }
    return any;
  }

  const LinearTraining& training_;
  const RowLists& labels_;
  const float* costs_;
  const InitialLayer* initial_;
  const LongWork& work_;
  std::vector<uint16_t> positive_;
  std::vector<float> cost_, weight_, state_, size_;
  std::vector<int32_t> order_;
};

/// The weights of one parent's children.
struct Chunk {
  std::vector<int32_t> feature, more, child;
  std::vector<float> value;
};

/// Merges groups of siblings, each in the order of columns, into one chunk.
Chunk merge(const std::vector<std::vector<Weight>>& groups, const ParentRows& rows) {
  Chunk chunk;
  std::vector<size_t> at(groups.size(), 0);
  size_t total = 0;
  for (const auto& group : groups) {
    total += group.size();
  }
  chunk.child.reserve(total);
  chunk.value.reserve(total);
  for (int64_t j = 0; j < rows.columns(); ++j) {
    const size_t before = chunk.value.size();
    for (size_t g = 0; g < groups.size(); ++g) {
      for (; at[g] < groups[g].size() && groups[g][at[g]].column == j; ++at[g]) {
        chunk.child.push_back(groups[g][at[g]].child);
        chunk.value.push_back(groups[g][at[g]].value);
      }
    }
    if (chunk.value.size() > before) {
      chunk.feature.push_back(rows.feature(j));
      chunk.more.push_back(int32_t(chunk.value.size() - before - 1));
    }
  }
  return chunk;
}

/// The groups of a parent's children to train: all of them in one task, or, if there are few
/// parents, one per task.
struct Task { int64_t parent, first_group, last_group; };

class LayerTrainer {
 public:
  LayerTrainer(const SparseRowsView& examples, const int64_t* first_child, const RowLists& parents,
               const RowLists& labels, const float* costs, const LinearTraining& training,
               const InitialLayer* initial)
      : examples_(examples), first_child_(first_child), parents_(parents), labels_(labels),
        costs_(costs), training_(training), initial_(initial), work_(kOp, total_work()),
        group_(trained()), chunks_(trained()), left_(trained()) {}

  std::vector<Chunk> train(Stats& stats) {
    const int64_t threads = at::get_num_threads();
    const bool one_group_per_task = trained() < 4 * threads;
    std::vector<Task> tasks;
    for (int64_t p = training_.first_parent; p < training_.last_parent; ++p) {
      const int64_t groups = (children(p) + kSiblingLanes - 1) / kSiblingLanes;
      group_[place(p)].resize(groups);
      left_[place(p)] = groups;
      for (int64_t g = 0; g < groups; g += one_group_per_task ? 1 : groups) {
        tasks.push_back({p, g, one_group_per_task ? g + 1 : groups});
      }
    }
    // Longest tasks first; each idle thread takes the next one.
    std::stable_sort(tasks.begin(), tasks.end(),
                     [&](const Task& a, const Task& b) { return work(a) > work(b); });
    std::atomic<size_t> next = 0;
    std::mutex adding;
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      ParentRows rows(examples_);
      GroupTrainer trainer(training_, labels_, costs_, initial_, work_);
      Stats thread_stats;
      int64_t gathered_parent = -1;
      for (size_t t = next++; t < tasks.size() && !work_.stopped(); t = next++) {
        run(tasks[t], rows, gathered_parent, trainer, thread_stats);
      }
      const std::lock_guard lock(adding);
      stats += thread_stats;
    });
    work_.check();
    return std::move(chunks_);
  }

 private:
  int64_t trained() const { return training_.last_parent - training_.first_parent; }
  /// Returns the index of a parent among those that are trained.
  int64_t place(int64_t parent) const { return parent - training_.first_parent; }
  int64_t children(int64_t parent) const { return first_child_[parent + 1] - first_child_[parent]; }
  int64_t total_work() const {
    int64_t total = 0;
    for (int64_t p = training_.first_parent; p < training_.last_parent; ++p) {
      total += parents_.size(p) * children(p);
    }
    return total;
  }
  int64_t work(const Task& task) const {
    return parents_.size(task.parent) * (task.last_group - task.first_group);
  }

  void run(const Task& task, ParentRows& rows, int64_t& gathered_parent, GroupTrainer& trainer,
           Stats& stats) {
    const int64_t p = task.parent;
    if (gathered_parent != p) {
      rows.gather(parents_.row + parents_.offset[p], parents_.size(p), training_.bias);
      gathered_parent = p;
    }
    for (int64_t g = task.first_group; g < task.last_group; ++g) {
      const int64_t child = g * kSiblingLanes;
      const int64_t count = std::min(kSiblingLanes, children(p) - child);
      trainer.train(rows, p, first_child_[p] + child, child, count, group_[place(p)][g], stats);
      work_.add(parents_.size(p) * count);
    }
    const int64_t done = task.last_group - task.first_group;
    if (left_[place(p)].fetch_sub(done) == done) { // the last groups of this parent
      chunks_[place(p)] = merge(group_[place(p)], rows);
      group_[place(p)] = {};
    }
  }

  const SparseRowsView& examples_;
  const int64_t* first_child_;
  const RowLists &parents_, &labels_;
  const float* costs_;
  const LinearTraining& training_;
  const InitialLayer* initial_;
  LongWork work_;
  std::vector<std::vector<std::vector<Weight>>> group_;
  std::vector<Chunk> chunks_;
  std::vector<std::atomic<int64_t>> left_;
};

/// Concatenates the chunks. Narrow: the dtype of `child` and `more`.
template <typename Narrow>
LinearLayer concat_chunks(const std::vector<Chunk>& chunks, const Stats& stats) {
  const int64_t parents = int64_t(chunks.size());
  const auto longs = at::TensorOptions(at::kLong), ints = at::TensorOptions(at::kInt);
  const Tensor chunk = at::empty({parents + 1}, longs);
  std::vector<int64_t> first_entry(parents + 1, 0);
  int64_t* begin = chunk.mutable_data_ptr<int64_t>();
  begin[0] = 0;
  for (int64_t p = 0; p < parents; ++p) {
    begin[p + 1] = begin[p] + int64_t(chunks[p].feature.size());
    first_entry[p + 1] = first_entry[p] + int64_t(chunks[p].value.size());
  }
  const auto narrow = ints.dtype(c10::CppTypeToScalarType<Narrow>());
  const Tensor feature = at::empty({begin[parents]}, ints),
               more = at::empty({begin[parents]}, narrow);
  const Tensor child = at::empty({first_entry[parents]}, narrow),
               value = at::empty({first_entry[parents]}, ints.dtype(at::kFloat));
  at::parallel_for(0, parents, 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      const Chunk& from = chunks[p];
      std::copy(from.feature.begin(), from.feature.end(),
                feature.mutable_data_ptr<int32_t>() + begin[p]);
      std::copy(from.more.begin(), from.more.end(), more.mutable_data_ptr<Narrow>() + begin[p]);
      std::copy(from.child.begin(), from.child.end(),
                child.mutable_data_ptr<Narrow>() + first_entry[p]);
      std::copy(from.value.begin(), from.value.end(),
                value.mutable_data_ptr<float>() + first_entry[p]);
    }
  });
  return {chunk,
          feature,
          more,
          child,
          value,
          at::tensor({double(stats.sweeps), double(stats.unconverged), double(stats.weights)},
                     at::kDouble)};
}

} // namespace

LinearLayer linear_layer_train(at::TensorList rows, int64_t features, const Tensor& first_child,
                               at::TensorList parents, at::TensorList labels,
                               const OptionalTensor& label_costs, at::TensorList initial,
                               std::string_view options) {
  const LinearLayerInput input(rows, features, first_child, parents, labels, label_costs);
  const LinearTraining training = linear_training(options, input.parents().count);
  check_lengths(input.examples(), training.bias);

  std::vector<Tensor> initial_parts;
  std::optional<InitialLayer> begin;
  if (!initial.empty()) {
    initial_parts = contiguous_parts("initial", initial, kLinearLayerParts, "the parts of a layer");
    TORCH_CHECK_VALUE(
        initial_parts[0].equal(input.first_child_tensor()), kOp,
        ": expected initial as the parts of a layer with this first_child, got another one");
    begin.emplace(linear_layer_view(kOp, input.parents().count, features, initial_parts));
  }

  Stats stats;
  const RowLists parent_lists = input.parents(), label_lists = input.labels();
  LayerTrainer trainer(input.examples(), input.first_child().data(), parent_lists, label_lists,
                       input.costs(), training, begin.has_value() ? &*begin : nullptr);
  const std::vector<Chunk> chunks = trainer.train(stats);
  return input.max_children() > kMaxByteChildren ? concat_chunks<int32_t>(chunks, stats)
                                                 : concat_chunks<uint8_t>(chunks, stats);
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "linear_layer_train(Tensor[] rows, int features, Tensor first_child, Tensor[] parents, "
      "Tensor[] labels, Tensor? label_costs, "
      "Tensor[] initial, str options=\"\") -> "
      "(Tensor chunk, Tensor feature, Tensor more, Tensor child, Tensor value, Tensor stats)");
}

TORCH_LIBRARY_IMPL(xsoftmax, CPU, m) { m.impl("linear_layer_train", linear_layer_train); }

} // namespace xsoftmax
