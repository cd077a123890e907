#include "xsoftmax/ops.h"

#include <torch/version.h>

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11,
              "xsoftmax needs torch 2.11 or later");

namespace xsoftmax {

// Empty: any call into the library makes the linker load it, and loading registers its operators.
void init() {}

} // namespace xsoftmax
