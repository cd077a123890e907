#pragma once

// What the errors of the options and of the state of a row optimizer share.

namespace xsoftmax::optim {

/// Advice in errors about the archive of another optimizer.
inline constexpr const char* kOtherArchive =
    "Load what the same class of this library saved, or begin with fresh state (in Python, "
    "xs.optim takes checkpoints of torch.optim)";

} // namespace xsoftmax::optim
