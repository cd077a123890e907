#pragma once

// Free of LibTorch headers, for *.simd.cpp files. table/transform_names.h maps names to transforms.

namespace xsoftmax {

/// Transforms of the score z of a tree node, applied before it is combined with the score of the
/// parent (Yu et al., 2022, section 2.3): z; 1 / (1 + e^-z); e^-max(0, 1 - z)^power; and the logs
/// of the last two.
enum class ScoreTransform : int {
  Identity = 0,
  Sigmoid = 1,
  Hinge = 2,
  LogSigmoid = 3,
  LogHinge = 4
};

} // namespace xsoftmax
