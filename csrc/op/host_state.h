#pragma once

#include <ATen/core/enum_tag.h>

#include <vector>

namespace xsoftmax {

/// Tags for operators that read or write host state: CPU scalars passed together with device
/// tensors, step counts, a table's pending updates. A CUDA graph would replay the values seen
/// during capture, so torch.compile(mode="reduce-overhead") runs these operators between graphs.
inline const std::vector<at::Tag> kUsesHostState{at::Tag::cudagraph_unsafe};

} // namespace xsoftmax
