#include "op/options.h"
#include "proposal/adaptive_modules.h"

namespace xsoftmax::samplers {

using at::Tensor;
using Optional = std::optional<Tensor>;

namespace {

[[maybe_unused]] const bool midx_module_registered = [] {
  register_adaptive<MidxSamplerImpl, MidxOptions>("midx");
  return true;
}();

std::vector<std::string> table_names(const std::string& form) {
  std::vector<std::string> names{"codewords1", "codewords2", "cell",   "order",    "start",
                                 "mass",       "log_weight", "prefix", "heaviest", "touched"};
  if (form == "spread") {
    names.insert(names.end(), {"spread", "query_square"});
  } else if (form == "exact") {
    names.insert(names.end(), {"table", "table_bias"});
  }
  names.insert(names.end(), {"recent", "step"});
  return names;
}

std::string midx_text(MidxOptions& options, const char* form) {
  options.form = form;
  return print_options(options);
}

} // namespace

MidxSamplerImpl::MidxSamplerImpl(const char* name, const char* form, int64_t num_classes,
                                 int64_t dim, MidxOptions options)
    : AdaptiveSamplerImpl(
          name,
          {"midx",
           table_names(form),
           "cell",
           {"distortion", "mean_square", "inertia1", "inertia2", "cells"},
           std::string(form) == "learnable" ? std::vector<std::string>{"codewords1", "codewords2"}
                                            : std::vector<std::string>{}},
          num_classes, dim, options.num_samples, options.shared, options.is_distinct(),
          options.exclude, midx_text(options, form)),
      midx_options_(options) {}

MidxSamplerImpl::MidxSamplerImpl(int64_t num_classes, int64_t dim, const MidxOptions& options)
    : MidxSamplerImpl("MidxSampler", "plain", num_classes, dim, options) {}

void MidxSamplerImpl::update(const Tensor& weight, const Optional& bias, const Tensor& rows) {
  static const auto op = find_op<void(const Tensor&, const Optional&, const Tensor&, const Tensor&,
                                      at::TensorList, std::string_view)>("xsoftmax::midx_update_");
  op.call(weight.detach(), detached(bias), rows, table("step"), detached(tables()), options());
}

std::shared_ptr<AdaptiveSamplerImpl> MidxSamplerImpl::like(const Tensor& exclude) const {
  return like_this<MidxSamplerImpl>(exclude);
}

} // namespace xsoftmax::samplers
