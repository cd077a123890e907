#include "table/ids/id_table.h"

#include "op/checks.h"
#include "op/state_lock.h"
#include "table/ids/id_table_writer.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kBlock = 32; // ids whose slots are prefetched together
constexpr int64_t kIdsPerTask = 2048;

/// Writes the row of each id, 0 if it has none. Returns whether all rows that were read from slots
/// are in range.
bool find_rows(const IdTableView& table, const int64_t* ids, int64_t n, int64_t* rows) {
  std::atomic<bool> fits{true};
  at::parallel_for(0, n, kIdsPerTask, [&](int64_t begin, int64_t end) {
    std::array<uint64_t, kBlock> home_slot;
    bool all_fit = true;
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t count = std::min(kBlock, end - block);
      for (int64_t i = 0; i < count; ++i) {
        home_slot[i] = table.home_slot(ids[block + i]);
        __builtin_prefetch(table.slots + home_slot[i]);
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t slot = table.slot_of(ids[block + i], home_slot[i]);
        const int64_t value = slot < 0 ? 0 : std::max(table.slots[slot].value, int64_t(0));
        all_fit &= value < table.capacity;
        rows[block + i] = value;
      }
    }
    if (!all_fit) {
      fits = false;
    }
  });
  return fits;
}

void check_fits(const char* op, bool fits, int64_t capacity) {
  TORCH_CHECK_INDEX(fits, op, ": expected slots with rows in [0, ", capacity, "), got others");
}

/// Updates the counts of rows. Integer sums do not depend on the order of threads.
void count_rows(const IdTableView& table, const int64_t* rows, int64_t n, int64_t step) {
  at::parallel_for(0, n, kIdsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kIdsAhead < end) {
        __builtin_prefetch(table.seen + rows[i + kIdsAhead]);
      }
      if (rows[i] > 0) {
        SeenRow& seen = table.seen[rows[i]];
        std::atomic_ref(seen.count).fetch_add(1, std::memory_order_relaxed);
        std::atomic_ref(seen.step).store(step, std::memory_order_relaxed);
      }
    }
  });
}

} // namespace

std::tuple<Tensor, Tensor> id_table_insert_(const Tensor& ids, at::TensorList state,
                                            std::string_view text) {
  constexpr const char* op = "id_table_insert_";
  const IdTableOptions options = id_table_options(op, text);
  check_id_table(op, "ids", ids, state);
  const Tensor host_ids = ids.to(at::kCPU).contiguous(),
               found = at::empty(ids.sizes(), host_ids.options());
  const std::lock_guard guard(state_lock(state[kCounters]));
  const IdTableView table = id_table_view(op, state, /*writes=*/true);
  TORCH_CHECK_VALUE(table.counters[kStep] < kMaxSteps, op, ": expected fewer than ", kMaxSteps,
                    " batches");
  const int64_t n = host_ids.numel();
  const int64_t* id = host_ids.const_data_ptr<int64_t>();
  int64_t* rows = found.mutable_data_ptr<int64_t>();
  check_fits(op, find_rows(table, id, n, rows), table.capacity);

  ++table.counters[kStep];
  count_rows(table, rows, n, table.counters[kStep]);
  std::vector<int64_t> unknown;
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] == 0) {
      unknown.push_back(i);
    }
  }
  IdTableWriter writer(table, options);
  const auto for_unknown = [&](const auto& visit) {
    for (size_t i = 0; i < unknown.size(); ++i) {
      if (i + kIdsAhead < unknown.size()) {
        __builtin_prefetch(table.slots + table.home_slot(id[unknown[i + kIdsAhead]]));
      }
      visit(unknown[i]);
    }
  };
  for_unknown([&](int64_t i) { rows[i] = writer.record(id[i]); });
  if (options.admission > 1) { // earlier occurrences of an id that got its row later in the batch
    for_unknown([&](int64_t i) {
      const int64_t slot = rows[i] == 0 ? table.slot_of(id[i]) : -1;
      if (slot >= 0 && table.slots[slot].has_row()) {
        rows[i] = table.slots[slot].value;
      }
    });
  }
  table.counters[kEvicted] = int64_t(writer.evicted.size());
  const Tensor evicted = at::full({n}, -1, host_ids.options());
  std::copy(writer.evicted.begin(), writer.evicted.end(), evicted.mutable_data_ptr<int64_t>());
  return {found.to(ids.device()), evicted.to(ids.device())};
}

Tensor id_table_find(const Tensor& ids, at::TensorList state) {
  constexpr const char* op = "id_table_find";
  check_id_table(op, "ids", ids, state);
  const Tensor host_ids = ids.to(at::kCPU).contiguous(),
               rows = at::empty(ids.sizes(), host_ids.options());
  const std::shared_lock guard(state_lock(state[kCounters]));
  const IdTableView table = id_table_view(op, state, /*writes=*/false);
  check_fits(op,
             find_rows(table, host_ids.const_data_ptr<int64_t>(), host_ids.numel(),
                       rows.mutable_data_ptr<int64_t>()),
             table.capacity);
  return rows.to(ids.device());
}

Tensor id_table_remove_(const Tensor& ids, at::TensorList state) {
  constexpr const char* op = "id_table_remove_";
  check_id_table(op, "ids", ids, state);
  const Tensor host_ids = ids.to(at::kCPU).contiguous(),
               rows = at::empty(ids.sizes(), host_ids.options());
  const std::lock_guard guard(state_lock(state[kCounters]));
  const IdTableView table = id_table_view(op, state, /*writes=*/true);
  const int64_t* id = host_ids.const_data_ptr<int64_t>();
  const IdTableOptions options;
  IdTableWriter writer(table, options);
  std::transform(id, id + host_ids.numel(), rows.mutable_data_ptr<int64_t>(),
                 [&](int64_t each) { return writer.remove(each); });
  return rows.to(ids.device());
}

Tensor id_table_ids(const Tensor& rows, at::TensorList state, int64_t missing) {
  constexpr const char* op = "id_table_ids";
  check_id_table(op, "rows", rows, state);
  const Tensor host_rows = rows.to(at::kCPU).contiguous(),
               ids = at::empty(rows.sizes(), host_rows.options());
  const std::shared_lock guard(state_lock(state[kCounters]));
  const IdTableView table = id_table_view(op, state, /*writes=*/false);
  check::class_ids(op, "rows", host_rows, table.capacity);
  const int64_t* row = host_rows.const_data_ptr<int64_t>();
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  at::parallel_for(0, host_rows.numel(), kIdsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      id[i] = table.seen[row[i]].step > 0 ? table.row_ids[row[i]] : missing;
    }
  });
  return ids.to(rows.device());
}

} // namespace xsoftmax
