#pragma once

#include <cstdint>

namespace xsoftmax {

/// Number of classes that a composite scores at a time. It bounds the memory of the logits, [Q,
/// 8192] instead of [Q, N].
inline constexpr int64_t kCompositeBlock = 8192;

} // namespace xsoftmax
