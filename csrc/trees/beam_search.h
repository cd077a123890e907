#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace xsoftmax {

// beam_search(input, weight, bias, first_child, node_class, width, transform) -> (scores, classes): the best classes of a tree that a beam of `width`
// nodes finds from the root, by falling score (Han et al., 2018, Algorithm 2).
//
// input [Q, D]; weight [E, D] and bias [E] or none: a row for each edge, edge e ends in node e + 1; first_child [E + 2] and node_class
// [E + 1] as in label_tree.h. The score of a class is the sum over the edges on its path of transform(input . weight[e] + bias[e]);
// transform: "identity", "log-sigmoid" or "log-l1-hinge" .. "log-l6-hinge" (scores/score_transform.h). The beam
// begins at the root; as long as it holds an inner node, its inner nodes give way to their children, and the `width` best of these and of
// the classes found already go on; of equal ones those of lower node.
//
// scores [Q, width] in float32 or float64, classes [Q, width] int64; behind the last class of a tree that holds fewer: -inf and -1. A beam
// as wide as the tree has classes finds all of them; a narrower one may lose the best class, where a node above it falls behind. NaN counts
// as the largest score. The search has no gradient.
using BeamSearchResult = std::tuple<at::Tensor, at::Tensor>;
BeamSearchResult beam_search(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                             const at::Tensor& node_class, c10::SymInt width, std::string_view transform = "identity");

/// Shared by every kernel of the op.
void check_beam_search(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                       const at::Tensor& node_class, const c10::SymInt& width, std::string_view transform);

/// The composite in ATen calls: any device, and the oracle of the tests.
BeamSearchResult beam_search_reference(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                                       const at::Tensor& node_class, c10::SymInt width, std::string_view transform);

} // namespace xsoftmax
