#pragma once

#include "matcher/sibling_trainer.h"
#include "op/long_work.h"
#include "table/sparse_rows.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace xsoftmax {

/// The weights of one parent's children, by feature.
struct LayerChunk {
  std::vector<int32_t> feature, more, child; ///< as in linear_layer.h
  std::vector<float> value;
  std::vector<c10::Half> half_value; ///< instead of value, if the layer is float16

  size_t weights() const { return value.size() + half_value.size(); }
};

/// Trained parents of a layer: those from first_parent to last_parent - 1.
struct TrainedLayer {
  std::vector<LayerChunk> chunks;
  LayerStats stats;
};

/// Groups of a parent's children that one thread trains, and how long that took.
struct GroupTask {
  int32_t layer;
  int64_t parent, first_group, last_group;
  double seconds = 0;
};

/// Returns the number of siblings that are trained together in a layer. Depends only on the shape
/// of the layer: the group affects the bits of a classifier.
///
/// Wide groups share more work, but the first layers have few groups, each trained on all examples:
/// one wide group there could take longer than all other tasks together.
int64_t siblings_per_group(const LayerTask& layer);

/// Trains layers whose training rows are known. The groups of all layers form one queue. An idle
/// thread takes the next task, and no thread waits for a layer to finish.
class LayerPool {
 public:
  LayerPool(const char* op, const SparseRowsView& examples, const std::vector<LayerTask>& layers);

  std::vector<TrainedLayer> train();
  /// Returns the tasks in the order in which they began.
  const std::vector<GroupTask>& tasks() const { return tasks_; }

 private:
  using Groups = std::vector<std::vector<ChildWeight>>;

  /// Rows and weights of a parent whose groups are split over several tasks.
  struct SharedRows {
    std::mutex gathering; // std::call_once would need a newer glibc than manylinux_2_28 has
    bool gathered = false;
    ParentRows rows;
    Groups groups;
    std::atomic<int64_t> tasks_left = 0;
  };
  /// Buffers and statistics of one thread.
  struct Worker {
    explicit Worker(const LayerPool& pool)
        : place(pool.examples_.features, -1), trainer(pool.work_), stats(pool.layers_.size()) {}

    std::vector<int32_t> place; // scratch of ParentRows::gather
    ParentRows rows;
    Groups groups;
    SiblingTrainer trainer;
    std::vector<LayerStats> stats;
  };

  void make_tasks();
  void run(const GroupTask& task, Worker& worker);
  void train_groups(const GroupTask& task, const ParentRows& rows, Groups& groups, Worker& worker);
  int64_t groups(size_t layer, int64_t parent) const;
  /// Returns the index of a parent in `trained_` and `shared_`.
  int64_t place(const GroupTask& task) const {
    return task.parent - layers_[task.layer].training.first_parent;
  }

  const char* const op_;
  const SparseRowsView& examples_;
  const std::vector<LayerTask>& layers_;
  LongWork work_;
  std::vector<int64_t> group_size_; // of each layer
  std::vector<GroupTask> tasks_;
  std::vector<TrainedLayer> trained_;
  std::vector<std::vector<std::unique_ptr<SharedRows>>> shared_; // null for parents of one task
};

} // namespace xsoftmax
