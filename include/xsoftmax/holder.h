#pragma once

// Base class of the module holders in this library.

#include <torch/nn/pimpl.h>

#include <cstddef>
#include <memory>
#include <utility>

namespace xsoftmax {

/// Shares ownership of a module, like the classes that TORCH_MODULE defines. Derived classes list
/// their constructors explicitly, so a call with wrong arguments is a compile error on the line of
/// the call. TORCH_MODULE forwards any arguments, and the error appears inside torch's headers.
template <typename Contained>
class Holder : public torch::nn::ModuleHolder<Contained> {
 public:
  using Impl = Contained;

  /// Constructs an empty holder, to which a module is assigned later.
  Holder(std::nullptr_t) : torch::nn::ModuleHolder<Contained>(nullptr) {}
  Holder(std::shared_ptr<Contained> module)
      : torch::nn::ModuleHolder<Contained>(std::move(module)) {}
};

/// Accepts an argument of any type. Holders that need no arguments use it to delete the other
/// constructors: `explicit Name(const Anything&, ...) = delete`.
struct Anything {
  template <typename Argument>
  Anything(const Argument&) {}
};

} // namespace xsoftmax
