#pragma once

// Base of the holders of the library's modules.

#include <torch/nn/pimpl.h>

#include <cstddef>
#include <memory>
#include <utility>

namespace xsoftmax {

/// Shares a module, as the classes of TORCH_MODULE do. A derived class lists its constructors, so a call with other arguments is an error in the line of that
/// call. TORCH_MODULE forwards any arguments: there the error is in torch's headers.
template <typename Contained>
class Holder : public torch::nn::ModuleHolder<Contained> {
 public:
  using Impl = Contained;

  /// Empty: a module is assigned later.
  Holder(std::nullptr_t) : torch::nn::ModuleHolder<Contained>(nullptr) {}
  Holder(std::shared_ptr<Contained> module) : torch::nn::ModuleHolder<Contained>(std::move(module)) {}
};

/// An argument of any type, for a holder that needs no arguments: `explicit Name(const Anything&, ...) = delete`.
struct Anything {
  template <typename Argument>
  Anything(const Argument&) {}
};

} // namespace xsoftmax
