#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

// A row optimizer that is destroyed flushes its tables. While a stream captures a CUDA graph, the flush
// would be part of the graph, and of each of its replays. The state then stays alive here, so that updates
// stay pending (optim/settle.h) until the table is settled outside of a capture.

namespace xsoftmax {

/// Returns whether the current stream of the tensor's device captures a graph.
bool is_capturing(const at::Tensor& tensor);

/// Keeps the state of a parameter, whose optimizer is going, for the next settle_deferred().
void defer_flush(const at::Tensor& param, std::vector<at::Tensor> state);

/// Settles the tables whose flushes were deferred, except where a stream still captures. Costs one atomic load when nothing
/// is deferred. Steps and flushes of row optimizers, and settle(), call it.
void settle_deferred();

} // namespace xsoftmax
