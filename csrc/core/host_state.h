#pragma once

#include <ATen/core/enum_tag.h>

#include <vector>

namespace xsoftmax {

/// The tags of operators that read or write what the host keeps: scalars on the CPU beside tensors
/// of a device, counts of steps, pending updates of tables. A CUDA graph would replay them with the
/// numbers of the capture, so torch.compile(mode="reduce-overhead") runs them between its graphs.
inline const std::vector<at::Tag> kUsesHostState{at::Tag::cudagraph_unsafe};

} // namespace xsoftmax
