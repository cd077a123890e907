#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace xsoftmax {

// shortlist(parents, targets, first_child, parent, most)
//     -> (nodes [P], offsets [Q + 1], right [P])
//   Returns, per query, the children of the nodes that a beam has reached and of the parents of the
//   targets (Yu et al., 2022, section 4), in the form that ragged_scores takes.
//
//   parents      int64 [Q, W]: nodes of a tree; -1 means none
//   targets      int64 [Q, T]: the target nodes of the layer below; -1 means none
//   first_child  [V + 1], parent [V]: as in label_tree.h
//   nodes        the children for each query, without duplicates and increasing
//   right        float32: 1 for targets, else 0
//
//   A node may occur several times in parents or targets.
//
//   most: none, or an upper bound on the children of any of these parents. It lets a device kernel
//   avoid waiting for P: each query then gets (W + T) most places, filled up with its last node
//   (node 1 if it has none) with a `right` of -1.
using Shortlist = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
Shortlist shortlist(const at::Tensor& parents, const at::Tensor& targets,
                    const at::Tensor& first_child, const at::Tensor& parent,
                    std::optional<int64_t> most = std::nullopt);

/// Checks the arguments, for all kernels.
void check_shortlist(const at::Tensor& parents, const at::Tensor& targets,
                     const at::Tensor& first_child, const at::Tensor& parent,
                     std::optional<int64_t> most);

/// The composite in ATen calls: for any device, and the test oracle.
Shortlist shortlist_reference(const at::Tensor& parents, const at::Tensor& targets,
                              const at::Tensor& first_child, const at::Tensor& parent,
                              std::optional<int64_t> most);

} // namespace xsoftmax
