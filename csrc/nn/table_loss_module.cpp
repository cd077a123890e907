#include "loss/reduction.h"
#include "table/updates/pending_updates.h"

#include <xsoftmax/nn.h>

#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <string>

namespace xsoftmax::nn {

using at::Tensor;

TableLossImpl::TableLossImpl(const char* name, int64_t num_classes, const LossOptions& options,
                             std::vector<std::string> optional)
    : name_(name), num_classes_(num_classes), options_(options), optional_(std::move(optional)) {
  TORCH_CHECK_VALUE(num_classes >= 1, name, ": expected num_classes of at least 1, got ",
                    num_classes);
  reduction_code(name, options.reduction);
  if (options.weight.defined()) {
    TORCH_CHECK_VALUE(options.weight.dim() == 1 && options.weight.size(0) == num_classes, name,
                      ": expected weight of shape [", num_classes, "], got ",
                      options.weight.sizes());
    TORCH_CHECK_TYPE(options.weight.is_floating_point(), name,
                     ": expected weight of a floating dtype, got ", options.weight.scalar_type());
    weight = register_buffer("weight", options.weight);
  }
}

void TableLossImpl::catch_up() const {
  for (const Tensor& rows : table()->parameters()) {
    xsoftmax::catch_up(rows);
  }
}

void TableLossImpl::train(bool on) {
  if (!on) {
    catch_up();
  }
  Module::train(on);
}

void TableLossImpl::save(torch::serialize::OutputArchive& archive) const {
  catch_up();
  Module::save(archive);
}

void TableLossImpl::load(torch::serialize::InputArchive& archive) {
  for (const auto& child : named_children()) { // check first: an error changes nothing
    torch::serialize::InputArchive state;
    if (child.value() == table().ptr() && archive.try_read(child.key(), state)) {
      Tensor rows;
      state.read("weight", rows);
      const Tensor& weight = table()->weight;
      const bool other_classes =
          child.key() == "linear" && rows.dim() == 2 && rows.size(1) == weight.size(1);
      TORCH_CHECK_VALUE(rows.sizes() == weight.sizes(), name_, ": expected a checkpoint with ",
                        child.key(), ".weight of shape ", weight.sizes(), ", got ", rows.sizes(),
                        other_classes
                            ? ": call resize_classes(" + std::to_string(rows.size(0)) + ") first"
                            : std::string());
    }
  }
  catch_up(); // pending updates of the old table must not change the new one
  const auto check = [&](bool found, const std::string& key) {
    const bool needed = std::find(optional_.begin(), optional_.end(), key) == optional_.end();
    TORCH_CHECK_VALUE(found || !needed, name_, ": expected a checkpoint with ", key,
                      ", got one without");
  };
  for (auto& child : named_children()) {
    torch::serialize::InputArchive state;
    const bool found = archive.try_read(child.key(), state);
    check(found, child.key());
    if (found && !state.keys().empty()) {
      child.value()->load(state);
    }
  }
  for (auto& buffer : named_buffers(/*recurse=*/false)) {
    check(archive.try_read(buffer.key(), buffer.value(), /*is_buffer=*/true), buffer.key());
  }
  for (auto& parameter : named_parameters(/*recurse=*/false)) {
    check(archive.try_read(parameter.key(), parameter.value()), parameter.key());
  }
}

namespace {

/// Calls move() and then restores integer buffers (step counts, which every step reads) on the
/// host.
template <typename Move>
void keep_integers(torch::nn::Module& module, const Move& move) {
  std::vector<std::pair<Tensor, Tensor>> integers;
  for (auto& buffer : module.buffers(/*recurse=*/false)) {
    if (!buffer.is_floating_point()) {
      integers.emplace_back(buffer, buffer.detach());
    }
  }
  move();
  for (auto& [buffer, value] : integers) {
    buffer.set_data(value);
  }
}

} // namespace

// Pending updates are keyed by the memory of the table, so apply them before it moves.

void TableLossImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  catch_up();
  keep_integers(*this, [&] { Module::to(device, dtype, non_blocking); });
}

void TableLossImpl::to(torch::Dtype dtype, bool non_blocking) {
  catch_up();
  keep_integers(*this, [&] { Module::to(dtype, non_blocking); });
}

void TableLossImpl::to(torch::Device device, bool non_blocking) {
  catch_up();
  keep_integers(*this, [&] { Module::to(device, non_blocking); });
}

} // namespace xsoftmax::nn
