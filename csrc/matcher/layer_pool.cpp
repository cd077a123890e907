#include "matcher/layer_pool.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

namespace xsoftmax {
namespace {

// A parent with more than 1 / 1024 of the work is split into several tasks.
constexpr int64_t kWorkDivisor = 1024;

/// Returns the work of all trained parents, in units of rows times children.
int64_t total_work(const std::vector<LayerTask>& layers) {
  int64_t total = 0;
  for (const LayerTask& layer : layers) {
    for (int64_t p = layer.training.first_parent; p < layer.training.last_parent; ++p) {
      total += layer.parents.size(p) * layer.children(p);
    }
  }
  return total;
}

/// Returns a weight as float16. Throws if it is not in the range of normal numbers.
c10::Half narrow(const char* op, float weight) {
  using Limits = std::numeric_limits<c10::Half>;
  TORCH_CHECK_VALUE(
      std::abs(weight) >= float(Limits::min()) && std::abs(weight) <= float(Limits::max()), op,
      ": expected weights of absolute value in [6.1e-05, 65504] for float16, got ", weight,
      "; raise threshold or use float32");
  return {weight};
}

/// Merges groups of siblings, each in the order of columns, into one chunk.
LayerChunk merge(const char* op, const std::vector<std::vector<ChildWeight>>& groups,
                 const ParentRows& rows, bool half) {
  LayerChunk chunk;
  std::vector<size_t> at(groups.size(), 0);
  size_t total = 0;
  for (const auto& group : groups) {
    total += group.size();
  }
  chunk.child.reserve(total);
  half ? chunk.half_value.reserve(total) : chunk.value.reserve(total);
  for (int64_t j = 0; j < rows.columns(); ++j) {
    const size_t before = chunk.child.size();
    for (size_t g = 0; g < groups.size(); ++g) {
      for (; at[g] < groups[g].size() && groups[g][at[g]].column == j; ++at[g]) {
        const ChildWeight& weight = groups[g][at[g]];
        chunk.child.push_back(weight.child);
        if (half) {
          chunk.half_value.push_back(narrow(op, weight.value));
        } else {
          chunk.value.push_back(weight.value);
        }
      }
    }
    if (chunk.child.size() > before) {
      chunk.feature.push_back(rows.feature(j));
      chunk.more.push_back(int32_t(chunk.child.size() - before - 1));
    }
  }
  chunk.feature.shrink_to_fit(); // chunks are kept until all layers are trained
  chunk.more.shrink_to_fit();
  return chunk;
}

} // namespace

int64_t siblings_per_group(const LayerTask& layer) {
  constexpr int64_t kFewGroups = 4;
  int64_t groups = 0;
  for (int64_t p = 0; p < layer.parents.count && groups <= kFewGroups; ++p) {
    groups += at::divup(layer.children(p), kSiblingLanes);
  }
  return groups <= kFewGroups ? 4 : kSiblingLanes;
}

LayerPool::LayerPool(const char* op, const SparseRowsView& examples,
                     const std::vector<LayerTask>& layers)
    : op_(op), examples_(examples), layers_(layers), work_(op, total_work(layers)),
      trained_(layers.size()), shared_(layers.size()) {
  for (const LayerTask& layer : layers) {
    group_size_.push_back(siblings_per_group(layer));
  }
}

int64_t LayerPool::groups(size_t layer, int64_t parent) const {
  return at::divup(layers_[layer].children(parent), group_size_[layer]);
}

void LayerPool::make_tasks() {
  struct Parent {
    GroupTask all;
    int64_t per_task, work;
  };
  std::vector<GroupTask> whole; // all groups of each parent
  int64_t total = 0;
  for (size_t d = 0; d < layers_.size(); ++d) {
    const LinearTraining& training = layers_[d].training;
    trained_[d].chunks.resize(training.last_parent - training.first_parent);
    shared_[d].resize(training.last_parent - training.first_parent);
    for (int64_t p = training.first_parent; p < training.last_parent; ++p) {
      whole.push_back({int32_t(d), p, 0, groups(d, p)});
      total += layers_[d].parents.size(p) * groups(d, p);
    }
  }
  // Splits the groups of a parent evenly over tasks.
  std::vector<Parent> parents;
  for (const GroupTask& all : whole) {
    const int64_t rows = layers_[all.layer].parents.size(all.parent),
                  most = std::max<int64_t>(1, total / kWorkDivisor / std::max<int64_t>(1, rows)),
                  tasks = std::max<int64_t>(1, at::divup(all.last_group, most)),
                  per_task = at::divup(all.last_group, tasks);
    parents.push_back({all, per_task, rows * per_task});
  }
  // In the order of layers, because progress is reported per layer; within a layer, the longest
  // tasks first. Those of one parent are consecutive, so that few parents' rows are in memory.
  std::stable_sort(parents.begin(), parents.end(), [](const Parent& a, const Parent& b) {
    return a.all.layer != b.all.layer ? a.all.layer < b.all.layer : a.work > b.work;
  });
  for (const auto& [parent, per_task, work] : parents) {
    const int64_t count = parent.last_group;
    if (per_task < count) {
      auto& shared = shared_[parent.layer][place(parent)];
      shared = std::make_unique<SharedRows>();
      shared->groups.resize(count);
      shared->tasks_left = at::divup(count, per_task);
    }
    int64_t g = 0;
    do { // a parent without children has one task, which leaves an empty chunk
      const int64_t end = std::min(g + per_task, count);
      tasks_.push_back({parent.layer, parent.parent, g, end});
      g = end;
    } while (g < count);
  }
}

std::vector<TrainedLayer> LayerPool::train() {
  make_tasks();
  std::atomic<size_t> next = 0;
  std::atomic<bool> failed = false;
  std::mutex adding;
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    Worker worker(*this);
    for (size_t t = next++; t < tasks_.size() && !failed && !work_.stopped(); t = next++) {
      const auto begin = std::chrono::steady_clock::now();
      try {
        run(tasks_[t], worker);
      } catch (...) { // stops the other threads
        failed = true;
        throw;
      }
      tasks_[t].seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    const std::lock_guard lock(adding);
    for (size_t d = 0; d < layers_.size(); ++d) {
      trained_[d].stats += worker.stats[d];
    }
  });
  work_.check();
  return std::move(trained_);
}

void LayerPool::run(const GroupTask& task, Worker& worker) {
  const LayerTask& layer = layers_[task.layer];
  const auto gather = [&](ParentRows& rows) {
    rows.gather(examples_, layer.parents.row + layer.parents.offset[task.parent],
                layer.parents.size(task.parent), layer.training.bias, worker.place);
  };
  LayerChunk& chunk = trained_[task.layer].chunks[place(task)];
  auto& shared = shared_[task.layer][place(task)];
  if (shared == nullptr) {
    gather(worker.rows);
    worker.groups.resize(task.last_group);
    train_groups(task, worker.rows, worker.groups, worker);
    if (work_.stopped()) {
      return; // groups are incomplete
    }
    chunk = merge(op_, worker.groups, worker.rows, layer.training.half);
    return;
  }
  {
    const std::lock_guard lock(shared->gathering);
    if (!shared->gathered) {
      gather(shared->rows);
      shared->gathered = true;
    }
  }
  train_groups(task, shared->rows, shared->groups, worker);
  if (shared->tasks_left.fetch_sub(1) == 1 && !work_.stopped()) {
    chunk = merge(op_, shared->groups, shared->rows, layer.training.half);
    shared.reset();
  }
}

void LayerPool::train_groups(const GroupTask& task, const ParentRows& rows, Groups& groups,
                             Worker& worker) {
  const LayerTask& layer = layers_[task.layer];
  const int64_t size = group_size_[task.layer];
  for (int64_t g = task.first_group; g < task.last_group; ++g) {
    const int64_t child = g * size, count = std::min(size, layer.children(task.parent) - child);
    groups[g].clear();
    worker.trainer.train(layer, rows, task.parent, child, count, groups[g],
                         worker.stats[task.layer]);
    work_.add(rows.count() * count);
  }
}

} // namespace xsoftmax
