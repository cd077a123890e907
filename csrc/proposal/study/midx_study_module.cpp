#include "proposal/adaptive_modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/randint.h>

namespace xsoftmax::samplers {

using at::Tensor;
using Optional = std::optional<Tensor>;

namespace {

[[maybe_unused]] const bool midx_study_module_registered = [] {
  register_adaptive<ExactMidxSamplerImpl, MidxOptions>("midx_exact");
  register_adaptive<SpreadMidxSamplerImpl, MidxOptions>("midx_spread");
  register_adaptive<LearnableMidxSamplerImpl, MidxOptions>("midx_learnable");
  return true;
}();

} // namespace

ExactMidxSamplerImpl::ExactMidxSamplerImpl(int64_t num_classes, int64_t dim,
                                           const MidxOptions& options)
    : MidxSamplerImpl("ExactMidxSampler", "exact", num_classes, dim, options) {}

SpreadMidxSamplerImpl::SpreadMidxSamplerImpl(int64_t num_classes, int64_t dim,
                                             const MidxOptions& options)
    : MidxSamplerImpl("SpreadMidxSampler", "spread", num_classes, dim, options) {}

LearnableMidxSamplerImpl::LearnableMidxSamplerImpl(int64_t num_classes, int64_t dim,
                                                   const MidxOptions& options, int64_t learn_rows)
    : MidxSamplerImpl("LearnableMidxSampler", "learnable", num_classes, dim, options),
      learn_rows_(learn_rows) {
  TORCH_CHECK_VALUE(learn_rows >= 1, name(), ": expected learn_rows of at least 1, got ",
                    learn_rows);
}

Tensor LearnableMidxSamplerImpl::codebook_loss(const Tensor& queries, const Tensor& weight,
                                               const Optional& bias,
                                               std::optional<at::Generator> generator) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const Optional&, const Tensor&)>(
          "xsoftmax::midx_codebook_loss");
  const Tensor order = table("order");
  const Tensor ids =
      order.index_select(0,
                         at::randint(order.size(0), {std::min(learn_rows_, order.size(0))},
                                     std::move(generator), order.options()));
  const Optional bias_of_rows = is_defined(bias)
      ? Optional(bias->detach().index_select(0, ids).to(at::kFloat))
      : std::nullopt;
  return op.call(table("codewords1"), table("codewords2"),
                 weight.detach().index_select(0, ids).to(at::kFloat), bias_of_rows,
                 queries.detach().to(at::kFloat));
}

std::shared_ptr<AdaptiveSamplerImpl> LearnableMidxSamplerImpl::like(const Tensor& exclude) const {
  MidxOptions options = midx_options();
  options.exclude = exclude;
  return std::make_shared<LearnableMidxSamplerImpl>(num_classes(), dim(), options, learn_rows_);
}

} // namespace xsoftmax::samplers
