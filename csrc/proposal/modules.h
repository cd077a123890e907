#pragma once

#include <xsoftmax/sampler.h>

#include "op/find_op.h"
#include "op/optional.h"
#include "proposal/union_kind.h"

#include <tuple>

// Shared by the sampler modules.

namespace xsoftmax::samplers {

/// Returns a sampler of any class as a part of a compound sampler.
UnionPart part_of(const std::shared_ptr<SamplerImpl>& sampler);
/// Returns whether draws may depend on the query vectors.
bool reads_queries(const SamplerImpl& sampler);

/// Draws one int64 from `generator`, or from the default generator of queries' device; 0-dim, on
/// that device.
at::Tensor draw_seed(const at::Tensor& queries, const std::optional<at::Generator>& generator);

/// Converts the (ids, log_count, target_log_count) of an op that draws to a proposal. Target counts
/// are included if there are targets.
Proposal one_set(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& drawn,
                 const at::Tensor& target, bool distinct);

} // namespace xsoftmax::samplers
