#pragma once

namespace xsoftmax {

/// Implementation of ops on CPU and CUDA tensors: the kernels, or the reference composites of ATen
/// calls that every op has. The composites are the oracle of the tests, and tell a kernel bug from
/// a user's. The setting is process-wide because backward runs on autograd's own threads.
enum class Impl { Kernel, Reference };

void set_impl(Impl impl);
Impl get_impl();
inline bool use_reference() { return get_impl() == Impl::Reference; }

} // namespace xsoftmax
