#pragma once

// Plain, for *.simd.cpp files too: the transforms by name are in scores/transform_names.h.

namespace xsoftmax {

/// What the score z of a node of a tree becomes before it meets its parent's (Yu et al., 2022, section 2.3): z; 1 / (1 + e^-z); e^-max(0, 1 - z)^power;
/// the logs of these two.
enum class ScoreTransform : int { Identity = 0, Sigmoid = 1, Hinge = 2, LogSigmoid = 3, LogHinge = 4 };

} // namespace xsoftmax
