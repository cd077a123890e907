#include "op/optional.h"
#include "op/options.h"
#include "loss/two_tower_loss.h"
#include "loss/two_tower_memory.h"
#include "loss/two_tower_topk.h"
#include "proposal/modules.h"

#include <xsoftmax/nn.h>

#include <ATen/core/grad_mode.h>

#include <vector>

namespace xsoftmax::nn {

using at::Tensor;

TwoTowerLossImpl::TwoTowerLossImpl(const TwoTowerOptions& options)
    : TwoTowerLossImpl(
          options,
          samplers::StreamingCounts(samplers::StreamingOptions{.num_ids = options.num_items})) {}

TwoTowerLossImpl::TwoTowerLossImpl(const TwoTowerOptions& options,
                                   samplers::StreamingCounts counts_argument,
                                   bool learn_temperature)
    : Module("TwoTowerLoss"), options_(print_options(options)) {
  const std::optional<int64_t> counted =
      counts_argument.is_empty() ? std::nullopt : counts_argument->num_ids();
  std::tie(temperature, memory, memory_id, memory_state) =
      two_tower_state("TwoTowerLoss", options_, counted);
  if (learn_temperature) {
    temperature = register_parameter("temperature", temperature.to(at::kFloat));
  }
  if (!counts_argument.is_empty()) {
    counts = register_module("counts", counts_argument);
  }
  memory = register_buffer("memory", memory);
  memory_id = register_buffer("memory_id", memory_id);
  memory_state = register_buffer("memory_state", memory_state);
}

Tensor TwoTowerLossImpl::forward(const Tensor& query, const Tensor& item, const Tensor& item_id,
                                 const std::optional<std::tuple<Tensor, Tensor>>& negatives,
                                 const std::optional<Tensor>& weight) {
  static const auto step = find_op<decltype(two_tower_loss_)>("xsoftmax::two_tower_loss_");
  std::vector<Tensor> more, counted;
  if (negatives.has_value()) {
    more = {std::get<0>(*negatives), std::get<1>(*negatives)};
  }
  if (!counts.is_empty()) {
    counted = {counts->count, counts->total, counts->last, counts->seen};
  }
  return step.call(query, item, item_id, more, {}, weight, temperature, counted,
                   std::vector<Tensor>{memory, memory_id, memory_state},
                   {is_training() && !counted.empty() && counts->is_training(), is_training()},
                   counted.empty() ? "" : counts->options(), options_);
}

std::tuple<Tensor, Tensor> TwoTowerLossImpl::topk(const Tensor& query, const Tensor& item_vectors,
                                                  int64_t k, const Tensor& exclude) const {
  static const auto op = find_op<decltype(two_tower_topk)>("xsoftmax::two_tower_topk");
  return op.call(query, item_vectors, temperature, k, optional(exclude), options_);
}

void TwoTowerLossImpl::resize_classes(int64_t num_items) {
  static const auto op = find_op<decltype(two_tower_resized)>("xsoftmax::two_tower_resized");
  const std::optional<int64_t> known = counts.is_empty()
      ? parse_options<TwoTowerOptions>("TwoTowerLoss", options_).num_items
      : counts->num_ids();
  const std::vector<Tensor> before{memory, memory_id, memory_state};
  const auto [after, options] =
      op.call("TwoTowerLoss", before, num_items, !known.has_value(), options_);
  if (!counts.is_empty()) {
    counts->resize(num_items);
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < before.size(); ++i) {
    before[i].copy_(after[i]);
  }
  options_ = options;
}

void TwoTowerLossImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(device, non_blocking);
  to(dtype, non_blocking);
}

void TwoTowerLossImpl::to(torch::Dtype dtype, bool non_blocking) {
  const Tensor id = memory_id.detach(), state = memory_state.detach();
  Module::to(dtype, non_blocking);
  memory_id.set_data(id);
  memory_state.set_data(state);
}

void TwoTowerLossImpl::to(torch::Device device, bool non_blocking) {
  Module::to(device, non_blocking);
  if (!named_parameters(/*recurse=*/false).contains("temperature")) {
    temperature = temperature.to(device, non_blocking);
  }
}

} // namespace xsoftmax::nn
