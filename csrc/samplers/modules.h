#pragma once

#include <xsoftmax/samplers.h>

#include "core/optional.h"

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
/// The same as ids on the CPU, whichever way they were given.
at::Tensor excluded_ids(const char* name, int64_t exclude_below, const std::optional<at::Tensor>& exclude, int64_t num_classes);

/// Options like these, of a sampler that never draws `excluded`, for a class table with or without a bias.
template <typename Options>
Options for_another(Options options, const at::Tensor& excluded, bool bias) {
  options.bias = bias;
  options.exclude_below = 0;
  options.exclude = excluded;
  return options;
}

inline std::optional<at::Tensor> detached(const std::optional<at::Tensor>& tensor) {
  return given(tensor) ? std::optional<at::Tensor>(tensor->detach()) : std::nullopt;
}

/// The ops look up the counts of targets: without any, those of class 0.
at::Tensor target_or_first(const std::optional<at::Tensor>& target, const at::Tensor& input);
/// What such an op returned (ids, log_count, target_log_count), the counts of targets where there are any.
Proposal make_proposal(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& draws, const std::optional<at::Tensor>& target, bool distinct);

} // namespace xsoftmax::samplers
