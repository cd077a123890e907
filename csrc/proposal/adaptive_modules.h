#pragma once

#include <xsoftmax/adaptive_samplers.h>

#include "proposal/adaptive.h"
#include "proposal/adaptive_tensors.h"
#include "proposal/modules.h"

// Shared by the modules of adaptive samplers, which follow the class table.

namespace xsoftmax::samplers {

/// Returns the options of a sampler that is requested by name.
template <typename Options>
Options asked(const SamplerRequest& request) {
  Options options{
      .bias = request.bias, .shared = request.shared.value_or(false), .exclude = request.exclude};
  options.num_samples = request.num_samples.value_or(options.num_samples);
  return options;
}

template <typename Sampler, typename Options>
void register_adaptive(const char* name) {
  register_sampler(name, [](const SamplerRequest& request) {
    return std::make_shared<Sampler>(request.num_classes, request.dim, asked<Options>(request));
  });
}

} // namespace xsoftmax::samplers
