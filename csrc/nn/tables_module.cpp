#include <xsoftmax/tables.h>

#include "table/files/mapped_file.h"
#include "table/files/mapped_table.h"
#include "table/files/paths.h"
#include "table/pinned_table.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace xsoftmax::tables {
namespace {

using at::Tensor;

constexpr int64_t kBlockBytes = int64_t(64) << 20;

// Calls through the dispatcher, so that the version counter of the table is updated.
template <typename Function, typename... Args>
auto call(const char* name, Function*, const Args&... args) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("xsoftmax::") + name).c_str(), "")
      .typed<Function>()
      .call(args...);
}

std::vector<int64_t> sizes_of(int64_t num_rows, std::optional<int64_t> width) {
  std::vector<int64_t> sizes{num_rows};
  if (width.has_value()) {
    sizes.push_back(*width);
  }
  return sizes;
}

// Fills from the last block to the first, as in Python, so that a seed gives the same file.
void fill(const Tensor& table, const MappedOptions& options) {
  const int64_t rows = table.size(0),
                row_bytes =
                    std::max<int64_t>(1, int64_t(table.nbytes()) / std::max<int64_t>(1, rows));
  const int64_t block = std::max<int64_t>(1, kBlockBytes / row_bytes);
  std::vector<int64_t> sizes = table.sizes().vec();
  for (int64_t end = rows; end > 0 && options.init != nullptr;) {
    const int64_t begin = (end - 1) / block * block;
    sizes[0] = end - begin;
    const Tensor values = at::zeros(sizes, table.options());
    options.init(values);
    call("mapped_table_fill_", mapped_table_fill_, table, begin, values);
    end = begin;
    if (options.progress != nullptr) {
      options.progress(rows - begin, rows);
    }
  }
  call("mapped_table_flush_", mapped_table_flush_, table);
}

} // namespace

void as_linear(Tensor rows) {
  const double bound =
      1 / std::sqrt(double(rows.dim() > 1 ? std::max<int64_t>(1, rows.size(-1)) : 1));
  rows.uniform_(-bound, bound);
}

Tensor mapped(const std::string& path, int64_t num_rows, std::optional<int64_t> width,
              const MappedOptions& options) {
  const at::NoGradGuard no_grad;
  const std::vector<int64_t> sizes = sizes_of(num_rows, width);
  if (MappedFile::exists(path) && !MappedFile::remove_unfinished(path)) {
    const Tensor table = open(path);
    TORCH_CHECK_VALUE(
        table.sizes() == at::IntArrayRef(sizes) && table.scalar_type() == options.dtype,
        "tables.mapped: expected ", path, " as a table of shape ", at::IntArrayRef(sizes),
        " and dtype ", options.dtype, ", got shape ", table.sizes(), " and dtype ",
        table.scalar_type());
    return table;
  }
  const Tensor table = mapped_table_create(path, sizes, options.dtype);
  try {
    fill(table, options);
  } catch (...) {
    paths::remove_file(path);
    throw;
  }
  return table.requires_grad_();
}

Tensor open(const std::string& path, bool writable, bool recover) {
  return mapped_table_open(path, writable, recover).requires_grad_();
}

torch::nn::Linear linear(const Tensor& weight, const Tensor& bias) {
  TORCH_CHECK_VALUE(weight.defined() && weight.dim() == 2,
                    "tables.linear: expected weight of shape [N, D], got ",
                    weight.defined() ? weight.sizes() : at::IntArrayRef());
  TORCH_CHECK_VALUE(!bias.defined() || bias.sizes() == weight.sizes().slice(0, 1),
                    "tables.linear: expected bias of shape [N], got ", bias.sizes());
  const at::NoGradGuard no_grad;
  torch::nn::Linear linear(torch::nn::LinearOptions(1, 1).bias(bias.defined()));
  linear->options.in_features(weight.size(1)).out_features(weight.size(0));
  linear->weight.set_data(weight.detach());
  if (bias.defined()) {
    linear->bias.set_data(bias.detach());
  }
  return linear;
}

Tensor pinned(int64_t num_rows, std::optional<int64_t> width, const PinnedOptions& options) {
  TORCH_CHECK_VALUE(options.device.is_cuda(), "tables.pinned: expected a CUDA device, got ",
                    options.device);
  TORCH_CHECK_TYPE(at::isFloatingType(options.dtype),
                   "tables.pinned: expected a floating dtype, got ", options.dtype);
  const at::NoGradGuard no_grad;
  const Tensor like = at::empty({0}, at::device(options.device).dtype(options.dtype));
  const Tensor table = pinned_table(like, sizes_of(num_rows, width));
  if (options.init != nullptr) {
    options.init(table);
  }
  return table.requires_grad_();
}

void flush(const Tensor& table) {
  const at::NoGradGuard no_grad;
  call("mapped_table_flush_", mapped_table_flush_, table);
}

void prefetch(const Tensor& table, const Tensor& rows) { mapped_table_prefetch(table, rows); }

} // namespace xsoftmax::tables
