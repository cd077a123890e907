#include "xsoftmax/ops.h"

#include <torch/version.h>

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11, "xsoftmax needs torch 2.11 or later");

namespace xsoftmax {

// A call into the library is all it takes: with it the library is loaded, and its operators are registered.
void init() {}

} // namespace xsoftmax
