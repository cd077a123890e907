#include <xsoftmax/options.h>

#include "op/options.h"
#include "proposal/adaptive.h"
#include "proposal/adaptive_tensors.h"
#include "proposal/modules.h"
#include "proposal/sampler_kind.h"

#include <string>

// Kinds that follow the class table: midx, lsh and kernel. Tensors: the family's index
// (adaptive.h), which ends with recent and step. Options: MidxOptions, LshOptions, KernelOptions.
// In training, a draw of midx records what the next update has to recode (midx_note_).

namespace xsoftmax {
namespace {

using at::Tensor;

template <typename Options>
class AdaptiveKind : public SamplerKind {
 public:
  explicit AdaptiveKind(const char* family) : family_(family) {}

  bool fits(const SamplerDescription& sampler) const override {
    return sampler.count >= 2 && sampler.parts.empty();
  } // the family's operators check the rest
  bool shared(const SamplerView& sampler) const override { return options_of(sampler).shared; }
  bool distinct(const SamplerView& sampler) const override {
    return options_of(sampler).is_distinct();
  }
  bool reads_queries(const SamplerView&) const override { return true; }

  Proposal sample(const SamplerView& sampler, const DrawRequest& request) const override {
    const Options options = options_of(sampler);
    return {set_of(adaptive_sample(family_, seed_of(request, options.shared), request.queries,
                                   request.target, sampler.tensors(), sampler.options()),
                   request.target, options.is_distinct())};
  }

  Tensor log_count(const SamplerView& sampler, const Tensor& queries,
                   const Tensor& ids) const override {
    return adaptive_log_count(family_, queries, ids, sampler.tensors(), sampler.options());
  }

  void step(const SamplerView& sampler, const Tensor& weight, const OptionalTensor& bias,
            const std::optional<at::Generator>& generator) const override {
    const at::TensorList index = sampler.tensors();
    adaptive_step_(family_, weight, bias, index.back(), index.slice(0, index.size() - 1),
                   sampler.options(), generator);
  }

 protected:
  static Options options_of(const SamplerView& sampler) {
    return parse_options<Options>("sampler_sample", sampler.options());
  }

 private:
  const std::string family_;
};

class MidxKind : public AdaptiveKind<samplers::MidxOptions> {
 public:
  using AdaptiveKind::AdaptiveKind;

  Proposal sample(const SamplerView& sampler, const DrawRequest& request) const override {
    const Proposal sets = AdaptiveKind::sample(sampler, request);
    const samplers::MidxOptions options = options_of(sampler);
    const bool spread = options.form == "spread";
    if (request.training && (options.update_every > 0 || spread)) {
      constexpr size_t kTouched = 9, kQuerySquare = 11;
      using Note = void(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                        const OptionalTensor&, const Tensor&);
      static const auto note = find_op<Note>("xsoftmax::midx_note_");
      const at::TensorList index = sampler.tensors();
      note.call(index[kTouched], spread ? OptionalTensor(index[kQuerySquare]) : std::nullopt,
                index.back(), detached(request.queries), request.target, sets[0].ids);
    }
    return sets;
  }
};

[[maybe_unused]] const bool adaptive_kind_registered =
    register_sampler_kind("midx", std::make_unique<MidxKind>("midx")) &&
    register_sampler_kind("lsh", std::make_unique<AdaptiveKind<samplers::LshOptions>>("lsh")) &&
    register_sampler_kind("kernel",
                          std::make_unique<AdaptiveKind<samplers::KernelOptions>>("kernel"));

} // namespace
} // namespace xsoftmax
