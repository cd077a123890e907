#include <xsoftmax/tables.h>
#include <xsoftmax/optim.h>

#include "op/options.h"
#include "table/ids/id_table.h"
#include "op/find_op.h"

#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isin.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/init.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <array>
#include <cmath>
#include <utility>

namespace xsoftmax::nn {
namespace {

using at::Tensor;
using Init = std::function<void(Tensor)>;

Tensor first_values(const Tensor& table, int64_t count, const Init& init) {
  const torch::NoGradGuard no_grad;
  std::vector<int64_t> sizes = table.sizes().vec();
  sizes[0] = count;
  Tensor values = at::empty(sizes, table.options().requires_grad(false));
  init(values);
  return values;
}

/// Throws now, rather than when rows are reset, if `init` does not fit the table. Leaves the
/// generator unchanged.
void try_init(const Tensor& table, const Init& init) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const Tensor before = generator.get_state();
  const auto restore = c10::make_scope_exit([&] { generator.set_state(before); });
  first_values(table, 1, init);
}

void check_rows(int64_t capacity, const Tensor& rows) {
  TORCH_CHECK_VALUE(rows.defined() && rows.dim() >= 1 && rows.size(0) == capacity,
                    "IdTable: expected a table of ", capacity, " rows, the capacity, got ",
                    rows.defined() && rows.dim() >= 1 ? rows.size(0) : 0);
}

void check_counts(int64_t capacity, const samplers::StreamingCounts& counts) {
  TORCH_CHECK_VALUE(!counts.is_empty() && counts->num_ids() == capacity,
                    "IdTable: expected StreamingCounts of ", capacity, " rows, the capacity, got ",
                    counts.is_empty() ? 0 : counts->num_ids().value_or(0));
}

} // namespace

IdTableImpl::IdTableImpl(int64_t capacity, const IdTableOptions& options)
    : Module("IdTable"), options_(print_options(options)) {
  static const auto op =
      find_op<std::vector<Tensor>(int64_t, std::string_view)>("xsoftmax::id_table");
  const std::vector<Tensor> made = op.call(capacity, options_);
  const std::array<Tensor*, kIdTableState> members{&slots, &row_ids, &seen, &victims, &counters};
  for (size_t i = 0; i < kIdTableState; ++i) {
    *members[i] = register_buffer(kIdTableNames[i], made[i]);
  }
}

Tensor IdTableImpl::forward(const Tensor& ids) {
  return is_training() ? std::get<0>(insert(ids)) : find(ids);
}

std::tuple<Tensor, Tensor> IdTableImpl::insert(const Tensor& ids) {
  static const auto op = find_op<decltype(id_table_insert_)>("xsoftmax::id_table_insert_");
  const std::lock_guard<std::recursive_mutex> guard(mutex_);
  // An attached table whose size has changed throws here, before anything changes.
  for (const auto& reset : attached_) {
    reset(at::empty({0}, at::kLong));
  }
  const auto [rows, padded] = op.call(ids, state(), options_);
  const Tensor now = padded.narrow(0, 0, counters[kEvicted].item<int64_t>());
  if (pending_.numel() > 0) { // rows left by a call that threw are reset by this one
    pending_ = at::cat({pending_.masked_select(at::isin(pending_, now).logical_not()), now});
  } else {
    pending_ = now;
  }
  if (pending_.numel() > 0) {
    for (const auto& reset : attached_) {
      reset(pending_);
    }
  }
  return {rows, std::exchange(pending_, at::empty({0}, at::kLong))};
}

Tensor IdTableImpl::find(const Tensor& ids) const {
  static const auto op = find_op<decltype(id_table_find)>("xsoftmax::id_table_find");
  return op.call(ids, state());
}

Tensor IdTableImpl::remove(const Tensor& ids) {
  static const auto op = find_op<decltype(id_table_remove_)>("xsoftmax::id_table_remove_");
  return op.call(ids, state());
}

Tensor IdTableImpl::ids_of(const Tensor& rows, int64_t missing) const {
  static const auto op = find_op<decltype(id_table_ids)>("xsoftmax::id_table_ids");
  return op.call(rows, state(), missing);
}

int64_t IdTableImpl::size() const { return counters[kSize].item<int64_t>(); }

void IdTableImpl::attach(const Tensor& table, std::function<void(Tensor)> init) {
  check_rows(capacity(), table);
  TORCH_CHECK_VALUE(
      init != nullptr,
      "IdTable: expected init with a parameter, to fill the rows of new ids, got none");
  try_init(table, init);
  attached_.emplace_back(
      [table, init = std::move(init), capacity = capacity()](const Tensor& rows) {
        check_rows(capacity, table);
        if (rows.numel() > 0) {
          reset_rows(table, rows.to(table.device()), first_values(table, rows.numel(), init));
        }
      });
}

void IdTableImpl::attach(const torch::nn::Linear& linear) {
  TORCH_CHECK_VALUE(!linear.is_empty(), "IdTable: expected a Linear, got none");
  const double width = double(linear->weight.size(1));
  attach(linear->weight,
         [](Tensor rows) { torch::nn::init::kaiming_uniform_(rows, std::sqrt(5)); });
  if (linear->bias.defined()) {
    attach(linear->bias, [width](Tensor rows) {
      torch::nn::init::uniform_(rows, -1 / std::sqrt(width), 1 / std::sqrt(width));
    });
  }
}

void IdTableImpl::attach(const torch::nn::Embedding& embedding) {
  TORCH_CHECK_VALUE(!embedding.is_empty(), "IdTable: expected an Embedding, got none");
  const auto padding = embedding->options.padding_idx();
  TORCH_CHECK_VALUE(padding.value_or(0) == 0,
                    "IdTable: expected padding_idx to be 0, which no id has, or none, got ",
                    *padding);
  attach(embedding->weight, [](Tensor rows) { torch::nn::init::normal_(rows); });
}

void IdTableImpl::attach(samplers::StreamingCounts counts) {
  check_counts(capacity(), counts);
  attached_.emplace_back([counts, capacity = capacity()](const Tensor& rows) mutable {
    check_counts(capacity, counts);
    counts->forget(rows.to(counts->count.device()));
  });
}

void IdTableImpl::load(torch::serialize::InputArchive& archive) {
  static const auto op =
      find_op<void(at::TensorList, int64_t, std::string_view)>("xsoftmax::id_table_check");
  std::vector<Tensor> loaded;
  for (const char* name : kIdTableNames) {
    Tensor tensor;
    archive.read(name, tensor, /*is_buffer=*/true);
    loaded.push_back(tensor.to(at::kCPU).contiguous());
  }
  op.call(loaded, capacity(), options_);
  const torch::NoGradGuard no_grad;
  const std::vector<Tensor> mine = state();
  for (size_t i = 0; i < kIdTableState; ++i) {
    Tensor(mine[i]).copy_(loaded[i]);
  }
  pending_ = at::empty({0}, at::kLong);
}

// The integers are looked up on the host, so they stay there.
void IdTableImpl::to(torch::Device, torch::Dtype, bool) {}
void IdTableImpl::to(torch::Dtype, bool) {}
void IdTableImpl::to(torch::Device, bool) {}

} // namespace xsoftmax::nn
