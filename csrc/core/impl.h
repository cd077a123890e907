#pragma once

namespace xsoftmax {

/// Which implementation CPU and CUDA tensors run: the kernels, or the ATen composites that stand behind every op. The composites
/// are the oracle of the tests and a way to tell a bug of a kernel from one of the user. Process-wide, since backward runs on
/// threads of autograd's own.
enum class Impl { Kernel, Reference };

void set_impl(Impl impl);
Impl get_impl();
inline bool use_reference() { return get_impl() == Impl::Reference; }

} // namespace xsoftmax
