#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

// A row optimizer flushes its tables when it is destroyed. During a CUDA graph capture, the flush
// would become part of the graph and run at each replay. So the state is kept alive here, and its
// updates stay pending (table/updates/pending_updates.h) until the table is flushed outside of a
// capture. Work that CUDA does not allow during a capture, such as freeing memory of the host,
// waits here too.

namespace xsoftmax {

/// Returns whether the current stream of the device is capturing a graph.
bool is_capturing(c10::Device device);

/// Registers how CUDA streams are asked whether they capture, which torch 2.11 cannot tell a build
/// without CUDA. Registered by deferred_flushes_cuda.cu.
struct RegisterCaptureQuery {
  using CaptureQuery = bool (*)(c10::Device device);
  explicit RegisterCaptureQuery(CaptureQuery query);
};

/// Keeps `work` until run_deferred_flushes() is called while the device's current stream is not
/// capturing.
void defer_work(c10::Device device, std::function<void()> work);

/// Applies the pending updates of a table. May throw c10::Error.
using FlushTable = void (*)(const at::Tensor& param);

/// Keeps the state of a parameter whose optimizer is being destroyed until run_deferred_flushes()
/// can call flush(param).
void defer_flush(const at::Tensor& param, std::vector<at::Tensor> state, FlushTable flush);

/// Runs the deferred flushes and other work, except those of devices whose stream is still
/// capturing. Costs one atomic load when nothing is deferred. Called by steps and flushes of row
/// optimizers, by catch_up(), and when a pinned table is allocated.
void run_deferred_flushes();

} // namespace xsoftmax
