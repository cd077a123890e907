#pragma once

#include <xsoftmax/sampler.h>

#include "core/optional.h"
#include "samplers/union_kind.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>

// What the sampler modules share.

namespace xsoftmax::samplers {

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

/// A sampler of any class as a part of what draws by several.
UnionPart part_of(const std::shared_ptr<SamplerImpl>& sampler);
/// Whether draws depend on the query vectors, as far as is known.
bool reads_queries(const SamplerImpl& sampler);

/// One int64 from `generator`, or from the default one of queries' device, 0-dim, on that device.
at::Tensor draw_seed(const at::Tensor& queries, const std::optional<at::Generator>& generator);

/// What an op that draws returned (ids, log_count, target_log_count) as a proposal; the counts of targets where there are any.
Proposal one_set(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& drawn, const at::Tensor& target, bool distinct);

} // namespace xsoftmax::samplers
