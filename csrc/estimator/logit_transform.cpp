#include "estimator/logit_transform.h"

#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/options.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <torch/library.h>

#include <cmath>

namespace xsoftmax {

using at::Tensor;

void check_logits(const char* op, const LogitOptions& options) {
  TORCH_CHECK_VALUE(std::isfinite(options.logit_scale) && options.logit_scale > 0, op,
                    ": expected logit_scale as a finite number above 0, got ", options.logit_scale);
  TORCH_CHECK_VALUE(std::isfinite(options.softcap) && options.softcap >= 0, op,
                    ": expected softcap as a finite number above 0, or 0 for no cap, got ",
                    options.softcap);
}

void check_z_loss(const char* op, double z_loss) {
  TORCH_CHECK_VALUE(std::isfinite(z_loss) && z_loss >= 0, op,
                    ": expected z_loss as a finite number of at least 0, got ", z_loss);
}

Tensor transform_logits(const Tensor& scores, const LogitOptions& options) {
  if (!transforms(options)) {
    return scores;
  }
  const Tensor wide = scores.to(opmath_dtype(scores.scalar_type()));
  const Tensor logits = options.softcap == 0
      ? wide * options.logit_scale
      : (wide * (options.logit_scale / options.softcap)).tanh() * options.softcap;
  return logits.to(scores.scalar_type());
}

void transform_products(Tensor products, const OptionalTensor& bias, const LogitOptions& options) {
  if (is_defined(bias)) {
    products.add_(*bias);
  }
  if (options.softcap != 0) {
    products.mul_(options.logit_scale / options.softcap).tanh_().mul_(options.softcap);
  } else if (options.logit_scale != 1) {
    products.mul_(options.logit_scale);
  }
}

Tensor transform_derivative(const Tensor& logits, const LogitOptions& options) {
  if (options.softcap == 0) {
    return at::full_like(logits, options.logit_scale);
  }
  return (1 - (logits / options.softcap).square()) * options.logit_scale;
}

XSOFTMAX_OPERATORS(m) {
  m.def("transform_logits(Tensor(a) scores, str options=\"\") -> Tensor(a)",
        [](const Tensor& scores, std::string_view text) {
          constexpr const char* op = "transform_logits";
          const auto options = parse_options<LogitOptions>(op, text);
          check::floating(op, "scores", scores);
          check_logits(op, options);
          return transform_logits(scores, options);
        });
}

} // namespace xsoftmax
