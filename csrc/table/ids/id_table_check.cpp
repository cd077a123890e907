#include "table/ids/id_table.h"

#include "op/checks.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <functional>
#include <limits>

// Rejects states that no table can reach.

namespace xsoftmax {
namespace {

constexpr int64_t kEntriesPerTask = 2048;

/// Returns whether an entry of `slots` agrees with the rest of the state.
bool consistent(const IdTableView& table, int64_t place, const IdTableOptions& options) {
  const IdSlot& slot = table.slots[place];
  const int64_t step = table.counters[kStep];
  if (slot.empty()) {
    return true;
  }
  if (!slot.has_row()) {
    return options.admission > 1 && slot.occurrences() >= 1 &&
        slot.occurrences() <= options.admission && slot.step() >= 1 && slot.step() <= step &&
        table.slot_of(slot.id) == place;
  }
  if (slot.value >= table.counters[kFresh]) {
    return false;
  }
  const SeenRow& seen = table.seen[slot.value];
  return table.row_ids[slot.value] == slot.id && seen.count >= 1 && seen.step >= 1 &&
      seen.step <= step && table.slot_of(slot.id) == place;
}

} // namespace

void check_id_table_values(const char* op, const IdTableView& table,
                           const IdTableOptions& options) {
  const int64_t no_pair = std::numeric_limits<int64_t>::max();
  const auto first = [&](int64_t size, const auto& wrong) {
    const auto search = [&](int64_t begin, int64_t end, int64_t found) {
      for (int64_t i = begin; i < end && found == no_pair; ++i) {
        found = wrong(i) ? i : no_pair;
      }
      return found;
    };
    return at::parallel_reduce(0, size, kEntriesPerTask, no_pair, search,
                               [](int64_t a, int64_t b) { return std::min(a, b); });
  };
  const auto number = [&](int64_t size, const auto& counted) {
    const auto count = [&](int64_t begin, int64_t end, int64_t sum) {
      for (int64_t i = begin; i < end; ++i) {
        sum += counted(i);
      }
      return sum;
    };
    return at::parallel_reduce(0, size, kEntriesPerTask, int64_t(0), count, std::plus<>());
  };
  const int64_t wrong_slot =
      first(table.num_slots, [&](int64_t i) { return !consistent(table, i, options); });
  TORCH_CHECK_VALUE(wrong_slot == no_pair, op,
                    ": expected slots that agree with row_ids and seen, got others at ",
                    wrong_slot);
  const int64_t size = table.counters[kSize], waiting = table.counters[kWaiting],
                fresh = table.counters[kFresh];
  const int64_t rows = number(table.num_slots, [&](int64_t i) { return table.slots[i].has_row(); });
  const int64_t others =
      number(table.num_slots, [&](int64_t i) { return table.slots[i].value < 0; });
  TORCH_CHECK_VALUE(rows == size && others == waiting, op, ": expected slots of ", size,
                    " ids with a row and ", waiting, " that wait, as counters say, got ", rows,
                    " and ", others);
  const int64_t seen = number(table.capacity, [&](int64_t i) {
    return table.seen[i].step != 0 || table.seen[i].count != 0;
  });
  TORCH_CHECK_VALUE(seen == size, op, ": expected seen of ", size, " rows, as counters say, got ",
                    seen);
  int64_t row = table.counters[kFree], free = 0;
  for (; row > 0 && row < fresh && table.seen[row].step == 0 && free < fresh - 1 - size; ++free) {
    row = table.row_ids[row];
  }
  TORCH_CHECK_VALUE(row == 0 && free == fresh - 1 - size, op, ": expected ", fresh - 1 - size,
                    " free rows, each with the next in row_ids, got others after ", free);
  const int64_t wrong_victim = first(table.counters[kVictimEnd], [&](int64_t i) {
    return table.victims[i] < 1 || table.victims[i] >= fresh;
  });
  TORCH_CHECK_VALUE(wrong_victim == no_pair, op, ": expected victims in [1, ", fresh,
                    "), got others at ", wrong_victim);
}

} // namespace xsoftmax
