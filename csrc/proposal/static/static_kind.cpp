#include "op/options.h"
#include "proposal/modules.h"
#include "proposal/sampler_kind.h"
#include "proposal/static/static_follow.h"
#include "proposal/static/static_sample.h"

#include <algorithm>

// Kinds whose draws do not depend on the queries:
//
//     static     tensors: those of static_sample.h. Options: StaticOptions
//     unigram    tensors: the same, then excluded and step, then count, total, last and seen of the
//                counts that the distribution follows.
//                Options: StaticOptions | StreamingOptions | FollowOptions. A draw in training
//                counts the targets, and rebuilds the tables if due (static_follow_)

namespace xsoftmax {
namespace {

using at::Tensor;

std::string_view first_options(std::string_view text) { return text.substr(0, text.find('|')); }

StaticOptions options_of(const SamplerView& sampler) {
  return parse_options<StaticOptions>("static_sample", first_options(sampler.options()));
}

class StaticKind : public SamplerKind {
 public:
  bool fits(const SamplerDescription& sampler) const override {
    return sampler.count == kStaticTables && sampler.parts.empty();
  }
  bool shared(const SamplerView& sampler) const override { return options_of(sampler).shared; }
  bool distinct(const SamplerView& sampler) const override { return options_of(sampler).distinct; }

  Proposal sample(const SamplerView& sampler, const DrawRequest& request) const override {
    static const auto op = find_op<decltype(static_sample)>("xsoftmax::static_sample");
    const StaticOptions options = options_of(sampler);
    const OptionalTensor target =
        options.distinct && !request.wants_distinct_target_counts ? std::nullopt : request.target;
    const std::string_view text = first_options(sampler.options());
    return {set_of(
        op.call(seed_of(request, options.shared), request.queries, target, tables(sampler), text),
        target, options.distinct)};
  }

  Tensor log_count(const SamplerView& sampler, const Tensor&, const Tensor& ids) const override {
    static const auto op = find_op<decltype(static_log_count)>("xsoftmax::static_log_count");
    return op.call(ids, tables(sampler), first_options(sampler.options()));
  }

 private:
  static at::TensorList tables(const SamplerView& sampler) {
    return sampler.tensors().slice(0, kStaticTables);
  }
};

class UnigramKind : public StaticKind {
 public:
  bool fits(const SamplerDescription& sampler) const override {
    return sampler.count == kStaticTables + 6 && sampler.parts.empty();
  }
  Proposal sample(const SamplerView& sampler, const DrawRequest& request) const override {
    if (request.training && is_defined(request.target)) {
      static const auto follow = find_op<decltype(static_follow_)>("xsoftmax::static_follow_");
      const std::string_view text = sampler.options();
      const size_t counts = text.find('|') + 1, follow_begin = text.find('|', counts) + 1;
      std::vector<Tensor> state = sampler.tensors().slice(kStaticTables).vec();
      follow.call(*request.target, request.target, state[0], state[1], state[2], state[3], state[4],
                  state[5], sampler.tensors().slice(0, kStaticTables),
                  text.substr(counts, follow_begin - 1 - counts), text.substr(follow_begin));
    }
    return StaticKind::sample(sampler, request);
  }
};

[[maybe_unused]] const bool static_kind_registered =
    register_sampler_kind("static", std::make_unique<StaticKind>()) &&
    register_sampler_kind("unigram", std::make_unique<UnigramKind>());

} // namespace
} // namespace xsoftmax
