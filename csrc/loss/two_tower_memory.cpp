#include "loss/two_tower_memory.h"

#include "op/checks.h"
#include "op/find_op.h"
#include "op/operators.h"
#include "op/options.h"
#include "op/shape_checks.h"
#include "loss/two_tower_checks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

namespace xsoftmax {
namespace {

using at::Tensor;

// Checks the arguments of an update. Returns whether the memory has places.
bool check_update(const Tensor& ids, const Tensor& items, at::TensorList counts,
                  at::TensorList memory, std::string_view counts_options) {
  constexpr const char* op = "two_tower_update_";
  check::dim(op, "items", items, 2);
  check::floating(op, "items", items);
  check::dim(op, "ids", ids, 1);
  check::int64(op, "ids", ids);
  check::size(op, "ids", ids, 0, items.sym_size(0), "the items");
  check::same_device(op, "ids", ids, "items", items);
  if (has_parts(op, "counts", counts, 4)) {
    check_streaming(op, "ids", ids, state_of(counts), streaming_options(op, counts_options));
  }
  return check_memory(op, memory, items);
}

void update_meta(const Tensor& ids, const Tensor& items, at::TensorList counts,
                 at::TensorList memory, std::string_view counts_options) {
  check_update(ids, items, counts, memory, counts_options);
}

} // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> two_tower_state(std::string owner, std::string_view text,
                                                           std::optional<int64_t> counted_ids) {
  const TwoTowerOptions options = two_tower_options(owner.c_str(), text);
  TORCH_CHECK_VALUE(!options.num_items.has_value() || !counted_ids.has_value() ||
                        *counted_ids == *options.num_items,
                    owner, ": expected counts of ", options.num_items.value_or(0),
                    " ids, got those of ", counted_ids.value_or(0));
  return {at::scalar_tensor(options.temperature, at::kDouble),
          at::zeros({options.memory, options.dim.value_or(0)}, at::kFloat),
          at::zeros({options.memory}, at::kLong), at::zeros({2}, at::kLong)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> two_tower_memory(at::TensorList memory, int64_t warmup) {
  constexpr const char* op = "two_tower_memory";
  TORCH_CHECK_VALUE(check_memory_tensors(op, memory), op,
                    ": expected memory with places, got none");
  const c10::SymInt size = memory[0].sym_size(0);
  const Tensor seen = memory[2].select(0, 0), calls = memory[2].select(0, 1);
  const Tensor age = at::arange(c10::Scalar(size), memory[1].options());
  const Tensor newest = at::remainder(seen - 1 - age, c10::Scalar(size));
  const Tensor number = at::where(calls.ge(warmup), seen.clamp_max(c10::Scalar(size)), 0);
  return {memory[0].index_select(0, newest), memory[1].index_select(0, newest), age.lt(number),
          number};
}

void two_tower_update_(const Tensor& ids, const Tensor& items, at::TensorList counts,
                       at::TensorList memory, std::string_view counts_options) {
  static const auto count = find_op<decltype(streaming_update_)>("xsoftmax::streaming_update_");
  const bool has_places = check_update(ids, items, counts, memory, counts_options);
  if (!counts.empty()) {
    auto [number, total, last, seen] = state_of(counts);
    count.call(ids, std::nullopt, number, total, last, seen, counts_options);
  }
  if (has_places) {
    const int64_t size = memory[0].size(0), kept = std::min(size, ids.size(0)),
                  first = ids.size(0) - kept;
    const Tensor places =
        at::remainder(memory[2].select(0, 0) + first + at::arange(kept, ids.options()), size);
    memory[0].index_copy_(0, places, items.narrow(0, first, kept).to(memory[0].scalar_type()));
    memory[1].index_copy_(0, places, ids.narrow(0, first, kept));
    memory[2].select(0, 0).add_(ids.size(0));
    memory[2].select(0, 1).add_(1);
  }
}

std::tuple<std::vector<Tensor>, std::string> two_tower_resized(std::string owner,
                                                               at::TensorList memory,
                                                               int64_t num_items, bool open,
                                                               std::string_view text) {
  const char* name = owner.c_str();
  TwoTowerOptions options = two_tower_options(name, text);
  TORCH_CHECK_VALUE(num_items >= 1, name, ": expected num_items of at least 1, got ", num_items);
  check_memory_tensors(name, memory);
  if (options.num_items.has_value()) {
    options.num_items = num_items;
  }
  std::vector<Tensor> resized;
  for (const Tensor& part : memory) {
    resized.push_back(part.detach().clone());
  }
  if (open || memory.empty() || memory[0].sym_size(0) == 0) {
    return {resized, print_options(options)};
  }
  const int64_t size = memory[0].size(0);
  const Tensor seen = memory[2].select(0, 0), number = seen.clamp_max(size);
  const Tensor place = at::arange(size, memory[1].options()),
               oldest_first = at::remainder(seen - number + place, size);
  const Tensor filled = place.lt(number),
               kept = filled & memory[1].index_select(0, oldest_first).lt(num_items);
  const Tensor count = kept.sum(), shrinks = count.lt(number), stays_filled = place.lt(count);
  const Tensor order =
      std::get<1>(kept.to(at::kByte).sort(/*stable=*/true, /*dim=*/0, /*descending=*/true));
  const Tensor from = oldest_first.index_select(0, order);
  const auto laid_out = [&](const Tensor& part, const Tensor& is_valid) {
    return at::where(shrinks, part.index_select(0, from).masked_fill(is_valid.logical_not(), 0),
                     part);
  };
  resized[0] = laid_out(resized[0], stays_filled.unsqueeze(1));
  resized[1] = laid_out(resized[1], stays_filled);
  resized[2].select(0, 0).copy_(at::where(shrinks, count, seen));
  return {resized, print_options(options)};
}

XSOFTMAX_OPERATORS(m) {
  m.def(
      "two_tower_state(str owner, str options, int? counted_ids=None) -> (Tensor temperature, "
      "Tensor memory, Tensor memory_id, Tensor memory_state)",
      two_tower_state);
  m.def(
      "two_tower_memory(Tensor[] memory, int warmup) -> (Tensor vectors, Tensor ids, Tensor "
      "filled, Tensor number)");
  m.def(
      "two_tower_update_(Tensor ids, Tensor items, Tensor(a!)[] counts, Tensor(b!)[] memory, str "
      "counts_options=\"\") -> ()");
  m.def(
      "two_tower_resized(str owner, Tensor[] memory, int num_items, bool open, str options=\"\") "
      "-> (Tensor[] memory, str options)",
      two_tower_resized);
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("two_tower_memory", two_tower_memory);
  m.impl("two_tower_update_", two_tower_update_);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("two_tower_memory", two_tower_memory);
  m.impl("two_tower_update_", update_meta);
}

} // namespace xsoftmax
