#pragma once

#include <ATen/core/Tensor.h>

namespace xsoftmax {

/// Asks the system to back a large, still unwritten CPU tensor with huge pages where it can: the first write to a table's gradient
/// otherwise costs a page fault every 4 KB, which measured a twentieth of a training step. Small tensors and other systems than
/// Linux: nothing happens.
void advise_huge_pages(const at::Tensor& tensor);

} // namespace xsoftmax
