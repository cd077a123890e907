#include "proposal/adaptive_tensors.h"

#include "op/checks.h"
#include "table/updates/pending_updates.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <mutex>

// Tables, seeds, targets and results of adaptive samplers.

namespace xsoftmax {

using at::Tensor;

ClassTable::ClassTable(const Tensor& weight, const OptionalTensor& bias, bool whole)
    : weight(detached(weight)),
      bias(is_defined(bias) ? OptionalTensor(bias->detach()) : std::nullopt) {
  const at::NoGradGuard guard;
  if (whole) {
    catch_up(weight);
  }
  if (is_defined(bias)) {
    catch_up(*bias);
  }
}

Tensor with_seed(const at::Device& device, const std::optional<at::Generator>& generator,
                 const std::function<Tensor(const Tensor&)>& refresh) {
  at::Generator source = generator.has_value() && generator->defined()
      ? *generator
      : at::globalContext().defaultGenerator(device);
  TORCH_CHECK_VALUE(source.device().type() == device.type(),
                    "prepare: expected a generator on the table's device ", device, ", got one on ",
                    source.device());
  const auto locked = [&](const auto& task) {
    const std::lock_guard<std::mutex> lock(source.mutex());
    return task();
  };
  const Tensor state = locked([&] { return source.get_state(); });
  try {
    return refresh(at::randint(std::numeric_limits<int64_t>::max(), {}, source,
                               at::TensorOptions(device).dtype(at::kLong)));
  } catch (...) {
    locked([&] { source.set_state(state); });
    throw;
  }
}

std::vector<Tensor> with_step(at::TensorList tables, const Tensor& step) {
  std::vector<Tensor> index = tables.vec();
  index.push_back(step);
  return index;
}

std::vector<Tensor> new_index(at::TensorList tables, const Tensor& step) {
  return with_step(with_step(tables, at::zeros_like(step)), step);
}

Tensor ids_of_queries(const Tensor& queries, const Tensor& ids) {
  return ids.dim() == 2 ? ids : ids.unsqueeze(0).expand({queries.size(0), ids.size(0)});
}

Targets::Targets(const char* op, const OptionalTensor& target, const Tensor& queries,
                 int64_t num_classes)
    : ids(is_defined(target) ? target->contiguous()
                             : at::empty({0}, queries.options().dtype(at::kLong))),
      width(!is_defined(target)      ? 0
                : target->dim() == 1 ? 1
                                     : target->size(1)) {
  check::class_ids(op, "target", ids, num_classes, -1);
}

Tensor empty_target_count(const Tensor& seed, const OptionalTensor& target) {
  const auto floats = seed.options().dtype(at::kFloat);
  return is_defined(target) ? at::empty_symint(target->sym_sizes(), floats)
                            : at::empty({0}, floats);
}

PrivateDraws empty_private_draws(const Tensor& seed, const Tensor& queries,
                                 const OptionalTensor& target, int64_t num_samples) {
  const c10::SymInt size[] = {queries.sym_size(0), num_samples};
  return {at::empty_symint(size, seed.options()),
          at::empty_symint(size, seed.options().dtype(at::kFloat)),
          empty_target_count(seed, target)};
}

Tensor counted_queries(const Tensor& queries, const OptionalTensor& target) {
  if (!is_defined(target) || (target->dim() == 2 && target->size(1) == 0)) {
    return queries;
  }
  const Tensor counts = (target->dim() == 2 ? target->select(1, 0) : *target).ge(0);
  return counts.all().item<bool>() ? queries : queries.index_select(0, counts.nonzero().squeeze(1));
}

std::vector<Tensor> detached(at::TensorList tensors) {
  std::vector<Tensor> plain;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(plain),
                 [](const Tensor& tensor) { return detached(tensor); });
  return plain;
}

std::vector<Tensor> to_cpu(at::TensorList tensors) {
  std::vector<Tensor> copies;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(copies),
                 [](const Tensor& tensor) { return tensor.cpu(); });
  return copies;
}

Tensor with_bias_column(const Tensor& rows, const OptionalTensor& bias, int64_t width) {
  const Tensor plain = rows.to(at::kFloat);
  if (rows.size(1) == width) {
    return plain;
  }
  const Tensor column = is_defined(bias) ? bias->to(at::kFloat).unsqueeze(1)
                                         : at::ones({rows.size(0), 1}, plain.options());
  return at::cat({plain, column}, 1);
}

} // namespace xsoftmax
