#include "samplers/adaptive.h"

#include "core/checks.h"
#include "samplers/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>

namespace xsoftmax {

using at::Tensor;

bool refresh_is_due(int64_t step, int64_t every) {
  if (every == 0 || step % every == 0) {
    return step == 0 || every > 0;
  }
  for (int64_t early = every / 2; early >= 1 && early >= every / 32; early /= 2) {
    if (step == early) {
      return true;
    }
  }
  return false;
}

void check_schedule(const char* op, const OptionalTensor& step, int64_t refresh_every) {
  TORCH_CHECK_VALUE(refresh_every >= 0, op, ": expected refresh_every of at least 0, got ", refresh_every);
  if (given(step)) {
    check::dim(op, "step", *step, 0);
    check::int64(op, "step", *step);
  }
}

bool take_step(const OptionalTensor& step, int64_t refresh_every) {
  if (!given(step)) {
    return true;
  }
  const bool due = refresh_is_due(step->item<int64_t>(), refresh_every);
  step->add_(1);
  return due;
}

void check_class_table(const char* op, const Tensor& weight, const OptionalTensor& bias, const c10::SymInt& num_classes) {
  check::dim(op, "weight", weight, 2);
  check::floating(op, "weight", weight);
  check::size(op, "weight", weight, 0, num_classes, "the classes of the sampler");
  if (given(bias)) {
    check::dim(op, "bias", *bias, 1);
    check::floating(op, "bias", *bias);
    check::size(op, "bias", *bias, 0, weight.sym_size(0), "the rows of weight");
    check::same_device(op, "bias", *bias, "weight", weight);
  }
}

void check_finite_rows(const char* op, const Tensor& weight) {
  constexpr int64_t kRows = 1 << 16; // bounds the squares in memory
  for (int64_t begin = 0; begin < weight.size(0); begin += kRows) {
    const Tensor rows = weight.narrow(0, begin, std::min(kRows, weight.size(0) - begin));
    const Tensor bad = rows.to(at::kFloat).square().sum(1).isfinite().logical_not().nonzero();
    if (bad.size(0) > 0) {
      const int64_t row = begin + bad[0].item<int64_t>();
      TORCH_CHECK_VALUE(false, op, ": expected weight with rows of finite norms, got ", weight[row].norm().item<double>(), " for row ", row);
    }
  }
}

void check_finite_bias(const char* op, const OptionalTensor& bias) {
  if (given(bias)) {
    const Tensor bad = bias->isfinite().logical_not().nonzero();
    TORCH_CHECK_VALUE(bad.size(0) == 0, op, ": expected bias with finite values, got ", (*bias)[bad[0].item<int64_t>()].item<double>(), " at [",
                      bad[0].item<int64_t>(), "]");
  }
}

void check_query_ids(const char* op, const Tensor& input, const Tensor& ids) {
  check::int64(op, "ids", ids);
  check::same_device(op, "ids", ids, "input", input);
  TORCH_CHECK_VALUE(ids.dim() == 1 || (ids.dim() == 2 && ids.sym_size(0) == input.sym_size(0)), op,
                    ": expected ids of shape [S] or with a row for each query, got shape ", ids.sym_sizes());
}

void check_draws(const char* op, const Tensor& seed, const Tensor& input, const c10::SymInt& num_samples, bool shared,
                 const Tensor& target, int64_t target_dim) {
  check_sampling(op, seed, std::nullopt, num_samples);
  check::same_device(op, "seed", seed, "input", input);
  check::dim(op, "target", target, target_dim);
  check::int64(op, "target", target);
  if (!shared) {
    check::size(op, "target", target, 0, input.sym_size(0), "the rows of input");
  }
  check::same_device(op, "target", target, "input", input);
}

std::tuple<Tensor, Tensor, Tensor> empty_private_draws(const Tensor& input, const c10::SymInt& num_samples, const Tensor& target) {
  const auto floats = target.options().dtype(at::kFloat);
  return {at::empty_symint({input.sym_size(0), num_samples}, target.options()),
          at::empty_symint({input.sym_size(0), num_samples}, floats), at::empty_symint(target.sym_sizes(), floats)};
}

Tensor with_bias_column(const Tensor& rows, const OptionalTensor& bias, int64_t width) {
  const Tensor plain = rows.to(at::kFloat);
  if (rows.size(1) == width) {
    return plain;
  }
  const Tensor column = given(bias) ? bias->to(at::kFloat).unsqueeze(1) : at::ones({rows.size(0), 1}, plain.options());
  return at::cat({plain, column}, 1);
}

} // namespace xsoftmax
