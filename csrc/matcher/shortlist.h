#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace xsoftmax {

// shortlist(parents, targets, first_child, parent, most) -> (nodes [P], offsets [Q + 1], right [P]): the children of the nodes that a beam has
// reached and of those above the right ones (Yu et al., 2022, section 4), as ragged_scores takes them.
//
// parents [Q, W] int64: nodes of a tree, -1 where there is none. targets [Q, T] int64: the right nodes of the layer below, -1 where there is
// none; their parents are taken as well. first_child [V + 1], parent [V] as in label_tree.h. nodes: of each query, each once, rising. right,
// float32: 1 for those that are targets, else 0. A node of parents or targets may stand several times.
//
// most: none, or no fewer children than any of these parents has. A kernel that would have to wait for P then gives each query (W + T) most places:
// behind its nodes stands the last again (node 1 where there is none), with a right of -1.
using Shortlist = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
Shortlist shortlist(const at::Tensor& parents, const at::Tensor& targets, const at::Tensor& first_child, const at::Tensor& parent,
                    std::optional<int64_t> most = std::nullopt);

/// Shared by every kernel.
void check_shortlist(const at::Tensor& parents, const at::Tensor& targets, const at::Tensor& first_child, const at::Tensor& parent,
                     std::optional<int64_t> most);

/// In ATen calls: any device, and the oracle of the tests.
Shortlist shortlist_reference(const at::Tensor& parents, const at::Tensor& targets, const at::Tensor& first_child, const at::Tensor& parent,
                              std::optional<int64_t> most);

} // namespace xsoftmax
