#include "table/transform_names.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log_sigmoid.h>
#include <c10/util/Exception.h>

namespace xsoftmax {

at::Tensor NamedTransform::operator()(const at::Tensor& z) const {
  switch (transform) {
    case ScoreTransform::LogSigmoid: return at::log_sigmoid(z);
    case ScoreTransform::LogHinge: return -(1 - z).clamp_min(0).pow(power);
    default: return z;
  }
}

NamedTransform transform_named(const char* op, std::string_view name) {
  const bool log = name.substr(0, 4) == "log-";
  const std::string_view base = log ? name.substr(4) : name;
  if (base == "sigmoid") {
    return {log ? ScoreTransform::LogSigmoid : ScoreTransform::Sigmoid, 1};
  }
  if (base.size() == 8 && base[0] == 'l' && base[1] >= '1' && base[1] <= '6' &&
      base.substr(2) == "-hinge") {
    return {log ? ScoreTransform::LogHinge : ScoreTransform::Hinge, base[1] - '0'};
  }
  TORCH_CHECK_VALUE(name == "identity", op,
                    ": expected transform as \"l1-hinge\" .. \"l6-hinge\", \"sigmoid\", "
                    "\"log-l1-hinge\" .. \"log-l6-hinge\", \"log-sigmoid\" or "
                    "\"identity\", got \"",
                    name, "\"");
  return {ScoreTransform::Identity, 1};
}

NamedTransform additive_transform_named(const char* op, std::string_view name) {
  const NamedTransform found = transform_named(op, name);
  TORCH_CHECK_VALUE(found.additive(), op,
                    ": expected transform as \"identity\", \"log-sigmoid\" or \"log-l1-hinge\" .. "
                    "\"log-l6-hinge\", got \"",
                    name, "\"");
  return found;
}

} // namespace xsoftmax
