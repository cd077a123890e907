#include "proposal/in_batch_sample.h"
#include "proposal/modules.h"
#include "proposal/sampler_kind.h"

// Kind "in_batch": the targets of the batch. Tensors: count, total, last and seen of
// streaming_counts.h, and drawn. Options: StreamingOptions. A draw in training also counts the
// targets.

namespace xsoftmax {
namespace {

using at::Tensor;

class InBatchKind : public SamplerKind {
 public:
  bool fits(const SamplerDescription& sampler) const override {
    return sampler.count == 5 && sampler.parts.empty();
  }
  bool shared(const SamplerView&) const override { return true; }
  bool distinct(const SamplerView&) const override { return false; }

  Proposal sample(const SamplerView& sampler, const DrawRequest& request) const override {
    static const auto op = find_op<decltype(in_batch_sample)>("xsoftmax::in_batch_sample");
    TORCH_CHECK_VALUE(
        is_defined(request.target),
        "InBatchSampler: expected target, whose classes are the candidates, got None");
    std::vector<Tensor> state = sampler.tensors().vec();
    const OptionalTensor counted = request.training ? request.target : std::nullopt;
    return {set_of(op.call(*request.target, counted, state[0], state[1], state[2], state[3],
                           state[4], sampler.options()),
                   request.target, false)};
  }

  Tensor log_count(const SamplerView& sampler, const Tensor&, const Tensor& ids) const override {
    static const auto op = find_op<decltype(in_batch_log_count)>("xsoftmax::in_batch_log_count");
    const at::TensorList state = sampler.tensors();
    return op.call(ids, state[0], state[1], state[2], state[3], state[4], sampler.options());
  }
};

[[maybe_unused]] const bool in_batch_kind_registered =
    register_sampler_kind("in_batch", std::make_unique<InBatchKind>());

} // namespace
} // namespace xsoftmax
