#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

// A row optimizer flushes its tables when it is destroyed. During a CUDA graph capture, the flush
// would become part of the graph and run at each replay. So the state is kept alive here, and its
// updates stay pending (table/updates/pending_updates.h) until the table is flushed outside of a
// capture.

namespace xsoftmax {

/// Returns whether the current stream of the tensor's device is capturing a graph.
bool is_capturing(const at::Tensor& tensor);

/// Applies the pending updates of a table. May throw c10::Error.
using FlushTable = void (*)(const at::Tensor& param);

/// Keeps the state of a parameter whose optimizer is being destroyed until run_deferred_flushes()
/// can call flush(param).
void defer_flush(const at::Tensor& param, std::vector<at::Tensor> state, FlushTable flush);

/// Runs the deferred flushes, except those of devices whose stream is still capturing. Costs one
/// atomic load when nothing is deferred. Called by steps and flushes of row optimizers, and by
/// catch_up().
void run_deferred_flushes();

} // namespace xsoftmax
