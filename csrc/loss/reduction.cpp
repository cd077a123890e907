#include "loss/reduction.h"

#include "op/anomalies.h"
#include "op/checks.h"
#include "cpu/dtypes.h"
#include "op/operators.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "op/host_reads.h"
#include "estimator/loss_shares.h"
#include "loss/several_positives.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <sstream>
#include <string>

namespace xsoftmax {

using at::Tensor;

int64_t reduction_code(const char* op, const std::string& reduction) {
  if (reduction == "none") {
    return at::Reduction::None;
  }
  if (reduction == "mean") {
    return at::Reduction::Mean;
  }
  TORCH_CHECK_VALUE(reduction == "sum", op,
                    ": expected reduction to be \"mean\", \"sum\" or \"none\", got \"", reduction,
                    "\"");
  return at::Reduction::Sum;
}

void check_class_weight(const char* op, const OptionalTensor& class_weight,
                        const c10::SymInt& classes, const Tensor& target) {
  if (is_defined(class_weight)) {
    check::dim(op, "class_weight", *class_weight, 1);
    check::floating(op, "class_weight", *class_weight);
    check::same_device(op, "class_weight", *class_weight, "target", target);
    check::size(op, "class_weight", *class_weight, 0, classes, "the classes");
  }
}

namespace {

// Returns the expected shape of several positives as text, "[2, 3, T]" for queries [2, 3].
std::string positives_shape(c10::SymIntArrayRef queries) {
  std::ostringstream text;
  text << '[';
  for (const c10::SymInt& size : queries) {
    text << size << ", ";
  }
  text << "T]";
  return text.str();
}

} // namespace

void check_batch(const char* op, const Tensor& input, const Tensor& target, const Tensor& weight,
                 int64_t ignore_index, bool soft) {
  const c10::SymIntArrayRef queries =
      input.sym_sizes().slice(0, std::max<int64_t>(0, input.dim() - 1));
  const bool has_multiple =
      target.dim() == input.dim() && target.sym_sizes().slice(0, queries.size()) == queries;
  TORCH_CHECK_VALUE(input.dim() >= 1, op,
                    ": expected input of shape [*, D], got a tensor without dimensions");
  TORCH_CHECK_VALUE(has_multiple || target.sym_sizes() == queries, op,
                    ": expected target of shape ", queries, ", or ", positives_shape(queries),
                    " for several positives, got ", target.sym_sizes());
  TORCH_CHECK_VALUE(!has_multiple || soft || target.sym_size(-1) == 1 || weight.dim() != 2 ||
                        !TORCH_GUARD_OR_FALSE(target.sym_size(-1).sym_eq(weight.sym_size(0))),
                    op, ": expected target as class ids, of shape ", queries,
                    " or [*, T] with T below the number of classes, got shape ", target.sym_sizes(),
                    ", a number for each class as one-hot targets have: use target.argmax(-1), or "
                    "for several classes their ids, padded with ",
                    ignore_index);
  check::floating(op, "input", input);
  check::int64(op, "target", target);
  check::same_device(op, "target", target, "input", input);
  check::dim(op, "weight", weight, 2);
  check::size(op, "weight", weight, 1, input.sym_size(-1), "the width of input");
  if (check::can_read(target)) {
    check::class_ids(op, "target", target, weight.size(0), ignore_index);
  }
  check::finite_queries(op, "input", input, target, ignore_index);
}

Tensor reduced_loss(const Tensor& loss, const Tensor& target, const OptionalTensor& class_weight,
                    const ReductionOptions& options) {
  constexpr const char* op = "reduced_loss";
  const int64_t code = reduction_code(op, options.reduction);
  check::dim(op, "loss", loss, 1);
  check::floating(op, "loss", loss);
  check::int64(op, "target", target);
  const Tensor flat = target.reshape({-1}), counts = flat.ne(options.ignore_index);
  check::size(op, "loss", loss, 0, flat.sym_size(0), "the targets");
  check::same_device(op, "target", target, "loss", loss);
  Tensor each = at::where(counts, loss, at::zeros({}, loss.options())), total = counts;
  if (is_defined(class_weight)) {
    check::dim(op, "class_weight", *class_weight, 1);
    check::floating(op, "class_weight", *class_weight);
    check::same_device(op, "class_weight", *class_weight, "target", target);
    const Tensor weights =
        class_weight->to(loss.scalar_type()).index_select(0, at::where(counts, flat, 0));
    total = weights.masked_fill(counts.logical_not(), 0); // 0 times an infinite weight would be NaN
    each = each * total;
  }
  switch (code) {
    case at::Reduction::Mean: return each.sum() / total.sum();
    case at::Reduction::Sum: return each.sum();
    default: return each.reshape_symint(target.sym_sizes());
  }
}

Tensor as_queries(const Tensor& input, const c10::SymInt& queries) {
  return input.dim() == 2 ? input : input.reshape_symint({queries, input.sym_size(-1)});
}

Tensor as_vector(const Tensor& target) { return target.dim() == 1 ? target : target.reshape({-1}); }

namespace {

// Returns how many values of a tensor, which must be readable, differ from `value`.
int64_t count_others(const Tensor& target, int64_t value) {
  const Tensor flat = check::readable(target);
  const int64_t* const data = flat.const_data_ptr<int64_t>();
  return flat.numel() - std::count(data, data + flat.numel(), value);
}

} // namespace

OptionalTensor mean_weights(const Tensor& target, const ReductionOptions& options,
                            at::ScalarType dtype) {
  const int64_t code = reduction_code("reduced_loss", options.reduction);
  // The mean over an empty batch is NaN, not 0.
  if (code == at::Reduction::None || target.sym_size(0).maybe_as_int() == 0) {
    return std::nullopt;
  }
  const auto floats = target.options().dtype(dtype);
  if (check::can_read(target)) {
    const Tensor shares = at::empty(target.sizes(), floats);
    const double share =
        code == at::Reduction::Sum ? 1.0 : 1.0 / double(count_others(target, options.ignore_index));
    dispatch_sums(dtype, [&](auto zero) {
      std::fill_n(data<decltype(zero)>(shares), shares.numel(), decltype(zero)(share));
    });
    return shares;
  }
  return code == at::Reduction::Sum ? at::full_symint({target.sym_size(0)}, 1.0, floats)
                                    : mean_shares(target, options.ignore_index, dtype);
}

Tensor mask_ignored_rows(const Tensor& input, const Tensor& target,
                         const c10::SymInt& ignore_index) {
  if (check::can_read(target) &&
      count_others(target, ignore_index.expect_int()) == target.numel()) {
    return input;
  }
  return at::where(target.eq(ignore_index).unsqueeze(1), 0, input);
}

std::tuple<Tensor, Tensor> counted_queries(const Tensor& input, const Tensor& target_argument,
                                           const Tensor& weight, int64_t ignore_index, bool soft,
                                           bool values) {
  constexpr const char* op = "sampled_softmax_loss"; // the operator that users call
  check_batch(op, input, target_argument, weight, ignore_index, soft);
  // The loss would check this only after the sampler has counted the batch. Autocast casts all
  // dtypes except float64 to one.
  const auto device = input.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device) ||
      input.scalar_type() == at::kDouble || weight.scalar_type() == at::kDouble) {
    check::same_dtype(op, "weight", weight, "input", input);
  }
  if (target_argument.dim() < input.dim() && check::can_read(target_argument) &&
      count_others(target_argument, ignore_index) == target_argument.numel()) {
    const Tensor queries = as_queries(values && input.requires_grad() ? input.detach() : input,
                                      target_argument.sym_numel()),
                 target = as_vector(target_argument);
    return values ? std::tuple(queries.contiguous(), target) : std::tuple(queries, target);
  }
  Tensor counted;
  if (Tensor target = target_argument; has_multiple_positives(input, target, ignore_index)) {
    const Tensor positives = distinct_positives(target, ignore_index);
    // Samplers do not support padding.
    counted = at::where(positives.lt(0), positives.narrow(1, 0, 1), positives);
  } else {
    counted = target.reshape({-1});
    // On a device, samplers treat every negative id as ignored.
    const bool is_told = !values && ignore_index < 0 && check::on_device(input);
    counted = is_told ? counted : counted.masked_fill(counted.eq(ignore_index), -1);
  }
  if (!values) {
    return {input.detach().reshape_symint({counted.sym_size(0), input.sym_size(-1)}), counted};
  }
  const Tensor counts = (counted.dim() == 2 ? counted.select(1, 0) : counted).ge(0).unsqueeze(1);
  const Tensor queries = input.detach().reshape_symint({counts.sym_size(0), input.sym_size(-1)});
  if (check::can_read(counts) && counts.all().item<bool>()) {
    return {queries.contiguous(), counted};
  }
  return {at::where(counts, queries, at::zeros({}, queries.options())), counted};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "reduced_loss(Tensor loss, Tensor target, Tensor? class_weight, str options=\"\") -> Tensor",
      [](const Tensor& loss, const Tensor& target, const OptionalTensor& class_weight,
         std::string_view options) {
        return reduced_loss(loss, target, class_weight,
                            parse_options<ReductionOptions>("reduced_loss", options));
      });
  m.def(
      "counted_queries(Tensor(a) input, Tensor target, Tensor weight, int ignore_index, bool "
      "soft=False) -> (Tensor(a) queries, Tensor counted)",
      [](const Tensor& input, const Tensor& target, const Tensor& weight, int64_t ignore_index,
         bool soft) {
        const auto [queries, counted] =
            counted_queries(input, target, weight, ignore_index, soft, /*values=*/true);
        return std::tuple(queries, counted.is_alias_of(target) ? counted.clone() : counted);
      });
}

} // namespace xsoftmax
