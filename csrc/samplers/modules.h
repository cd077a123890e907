#pragma once

#include <xsoftmax/samplers.h>

#include <ATen/core/dispatch/Dispatcher.h>

// What the sampler modules share.

namespace xsoftmax::samplers {

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

/// One int64 from `generator`, or from the default one of input's device, 0-dim, on that device.
at::Tensor draw_seed(const at::Tensor& input, const std::optional<at::Generator>& generator);

int64_t check_num_classes(const char* name, int64_t num_classes);

/// Excluded classes: those below `low`, or, where they are no such prefix, those of `ids` alone.
struct Excluded {
  int64_t low = 0;
  std::optional<at::Tensor> ids;
};
Excluded check_exclude(const char* name, int64_t exclude_below, const std::optional<at::Tensor>& exclude, int64_t num_classes);

} // namespace xsoftmax::samplers
