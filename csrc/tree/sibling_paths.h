#pragma once

// Paths from the root of a tree to nodes, on the CPU.

#include "op/checks.h"
#include "tree/tree_scores.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace xsoftmax {

/// The path to one node. For each layer from the bottom up, one group: the node on the path and its
/// siblings.
struct SiblingPath {
  std::vector<int64_t> edges;   // of all groups, one after another
  std::vector<int64_t> columns; // for each edge, its column in grad_edges
  std::vector<int64_t> starts;  // [groups + 1]
  std::vector<int64_t> targets; // per group, the index of the edge that is on the path
};

/// Finds paths. Throws ValueError if the tables do not describe a tree at a node it visits.
class SiblingPaths {
 public:
  SiblingPaths(const char* op, const at::Tensor& first_child, const at::Tensor& parent,
               const at::Tensor& nodes, at::IntArrayRef layer_sizes, at::IntArrayRef group_sizes)
      : op_(op), first_child_(first_child.contiguous()), parent_(parent.contiguous()),
        nodes_(nodes.contiguous()), groups_(group_sizes) {
    check::class_ids(op, "nodes", nodes, parent.size(0));
    int64_t begin = 1, column = 0;
    for (size_t l = 0; l < layer_sizes.size(); ++l) {
      begins_.push_back(begin);
      columns_.push_back(column);
      begin += layer_sizes[l];
      column += group_sizes[l];
    }
    width_ = column;
  }

  int64_t width() const { return width_; }

  void find(int64_t query, SiblingPath& path) const {
    const int64_t *first = first_child_.const_data_ptr<int64_t>(),
                  *parent = parent_.const_data_ptr<int64_t>();
    path.edges.clear();
    path.columns.clear();
    path.targets.clear();
    path.starts.assign(1, 0);
    int64_t node = nodes_.const_data_ptr<int64_t>()[query];
    for (int64_t l = int64_t(begins_.size()) - 1; l >= 0 && node > 0; --l) {
      if (node < begins_[l]) {
        continue;
      }
      const int64_t above = parent_of(op_, parent, node);
      const int64_t begin = first[above], end = first[above + 1];
      TORCH_CHECK_VALUE(begin > 0 && begin <= node && node < end && end <= parent_.size(0) &&
                            end - begin <= groups_[l],
                        op_, ": expected node ", node, " among at most ", groups_[l],
                        " children of node ", above, ", got ", begin, " .. ", end - 1);
      path.targets.push_back(node - begin);
      for (int64_t child = begin; child < end; ++child) {
        path.edges.push_back(child - 1);
        path.columns.push_back(columns_[l] + child - begin);
      }
      path.starts.push_back(int64_t(path.edges.size()));
      node = above;
    }
    TORCH_CHECK_VALUE(node == 0, op_,
                      ": expected parents in layers above those of their children, got node ", node,
                      " without one");
  }

 private:
  const char* op_;
  const at::Tensor first_child_, parent_, nodes_;
  at::IntArrayRef groups_;
  std::vector<int64_t> begins_, columns_; // first node and first column of each layer
  int64_t width_;
};

} // namespace xsoftmax
