#pragma once

// Work that takes long (trees from vectors, training and prediction of XRLinear, refreshes of samplers, search indices) says how far it is, and can be stopped.

#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <string>

namespace xsoftmax {

/// What stopped work throws. What it would have changed is as it was.
class Interrupted : public c10::Error { using Error::Error; };

/// Stops the long work that runs now, on all threads, within a block of it. It does not wait. A handler of signals may call it:
///
///     std::signal(SIGINT, [](int) { xsoftmax::interrupt(); });
void interrupt() noexcept;

/// Called by long work of this thread, from this thread, at most ten times a second, with the operator's name and how much of the work is done: `done` of
/// `total`, in units of its own; 0 and 0 where it does not know. It may throw, which stops the work and reaches the caller.
using ProgressHandler = std::function<void(const std::string& work, int64_t done, int64_t total)>;

/// Sets the handler of this thread, null for none, and returns the one before.
ProgressHandler set_progress_handler(ProgressHandler handler);

} // namespace xsoftmax
