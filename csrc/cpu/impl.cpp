#include "cpu/impl.h"

#include "cpu/cpu_dispatch.h"
#include "cpu/products.h"
#include "op/operators.h"

#include <torch/library.h>

#include <atomic>
#include <string>

namespace xsoftmax {
namespace {

std::atomic<Impl> current_impl{Impl::Kernel};

void set_impl_by_name(const std::string& name) {
  TORCH_CHECK_VALUE(name == "kernel" || name == "reference",
                    "set_impl: expected \"kernel\" or \"reference\", got \"", name, "\"");
  set_impl(name == "kernel" ? Impl::Kernel : Impl::Reference);
}

std::string get_impl_name() { return get_impl() == Impl::Kernel ? "kernel" : "reference"; }

std::string cpu_capability() { return cpu_isa_name(cpu_isa()); }
std::string cpu_products() {
  use_float32_blocks(); // throws if its environment variable is invalid
  return use_bfloat16_products() ? "bfloat16" : "float32";
}

} // namespace

void set_impl(Impl impl) { current_impl.store(impl, std::memory_order_relaxed); }
Impl get_impl() { return current_impl.load(std::memory_order_relaxed); }

XSOFTMAX_OPERATORS(m) {
  m.def("set_impl(str impl) -> ()", set_impl_by_name);
  m.def("get_impl() -> str", get_impl_name);
  m.def("cpu_capability() -> str", cpu_capability);
  m.def("cpu_products() -> str", cpu_products);
}

} // namespace xsoftmax
