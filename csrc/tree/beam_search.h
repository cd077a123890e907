#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace xsoftmax {

// beam_search(input, weight, bias, first_child, node_class, width, transform) -> (scores, classes):
// returns the best classes of a tree by beam search from the root, best first (Han et al., 2018,
// Algorithm 2).
//
// input [Q, D]; weight [E, D] and bias [E] or none: one row per edge, edge e ends in node e + 1;
// first_child [E + 2] and node_class [E + 1] as in label_tree.h. The score of a class is the sum of
// transform(input . weight[e] + bias[e]) over the edges on its path; transform: "identity",
// "log-sigmoid" or "log-l1-hinge" .. "log-l6-hinge" (table/score_transform.h). The beam starts with
// the root only. Each round replaces the inner nodes of the beam by their children and keeps the
// `width` best nodes, leaves included, until only leaves are left; among equal scores the lower
// node wins.
//
// scores [Q, width] in float32 or float64, classes [Q, width] int64; if the tree has fewer classes
// than `width`, the row is padded with -inf and -1. A beam as wide as the number of classes finds
// all of them; a narrower one loses a class if a node above it drops out of the beam. NaN counts as
// the largest score. Not differentiable.
using BeamSearchResult = std::tuple<at::Tensor, at::Tensor>;
BeamSearchResult beam_search(const at::Tensor& input, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                             const at::Tensor& node_class, c10::SymInt width,
                             std::string_view transform = "identity");

/// Checks the arguments; shared by all kernels of the operator.
void check_beam_search(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, const at::Tensor& first_child,
                       const at::Tensor& node_class, const c10::SymInt& width,
                       std::string_view transform);

/// Composite in ATen calls: runs on any device, test oracle.
BeamSearchResult beam_search_reference(const at::Tensor& input, const at::Tensor& weight,
                                       const std::optional<at::Tensor>& bias,
                                       const at::Tensor& first_child, const at::Tensor& node_class,
                                       c10::SymInt width, std::string_view transform);

} // namespace xsoftmax
