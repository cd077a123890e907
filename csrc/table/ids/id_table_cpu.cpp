#include "table/ids/id_table.h"

#include "op/checks.h"
#include "op/state_lock.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kBlock = 32;       // ids whose slots are prefetched together
constexpr int64_t kGrain = 2048;     // ids per task
constexpr int64_t kAhead = 16;       // prefetch distance, in ids

void prefetch(const void* address) { __builtin_prefetch(address); }

/// Writes the row of each id, 0 if it has none. Returns whether all rows that were read from slots
/// are in range.
bool find_rows(const IdTableView& table, const int64_t* ids, int64_t n, int64_t* rows) {
  std::atomic<bool> fits{true};
  at::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    std::array<uint64_t, kBlock> home;
    bool all_fit = true;
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t count = std::min(kBlock, end - block);
      for (int64_t i = 0; i < count; ++i) {
        home[i] = table.home(ids[block + i]);
        prefetch(table.slots + home[i]);
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t slot = table.slot_of(ids[block + i], home[i]);
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
  at::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) {
        prefetch(table.seen + rows[i + kAhead]);
      }
      if (rows[i] > 0) {
        SeenRow& seen = table.seen[rows[i]];
        std::atomic_ref(seen.count).fetch_add(1, std::memory_order_relaxed);
        std::atomic_ref(seen.step).store(step, std::memory_order_relaxed);
      }
    }
  });
}

/// Sort key of a row for eviction: smallest first.
struct Age {
  int64_t first, second, row;
  auto operator<=>(const Age&) const = default;
};

/// Inserts and removes ids. Never accesses memory outside the state, whatever its tensors hold.
class Writer {
 public:
  Writer(const IdTableView& table, const IdTableOptions& options)
      : table_(table), options_(options), longest_ago_(options.eviction == "lru"),
        counters_(table.counters), step_(table.counters[kStep]) {}

  /// Records a sighting of an id that find_rows did not find. Returns its row, or 0.
  int64_t see(int64_t id) {
    const uint64_t home = table_.home(id);
    int64_t slot = table_.slot_of(id, home);
    if (slot < 0) {
      return 0;
    }
    if (table_.slots[slot].has_row()) {
      return seen_again(table_.slots[slot].value);
    }
    const bool waits = !table_.slots[slot].empty();
    const int64_t sightings =
        waits ? std::min(table_.slots[slot].sightings() + 1, options_.admission) : 1;
    if (sightings >= options_.admission) {
      const auto [row, moved] = free_row();
      if (row > 0) {
        slot = moved ? table_.slot_of(id, home) : slot;
        if (slot < 0) {
          return 0;
        }
        table_.slots[slot] = {id, row};
        table_.row_ids[row] = id;
        table_.seen[row] = {sightings, step_};
        counters_[kWaiting] -= waits;
        ++counters_[kSize];
        return row;
      }
    }
    if (options_.admission > 1) {
      if (!waits) {
        if (counters_[kWaiting] >= table_.capacity) {
          forget_half();
          slot = table_.slot_of(id, home);
        }
        counters_[kWaiting] += slot >= 0;
      }
      if (slot >= 0) {
        table_.slots[slot] = {id, -(step_ << kSightingBits | sightings)};
      }
    }
    return 0;
  }

  int64_t remove(int64_t id) {
    const int64_t slot = table_.slot_of(id);
    if (slot < 0 || table_.slots[slot].empty()) {
      return 0;
    }
    const int64_t row = table_.slots[slot].value;
    erase(slot);
    if (row < 0) {
      counters_[kWaiting] = std::max(counters_[kWaiting] - 1, int64_t(0));
      return 0;
    }
    if (row >= table_.capacity) {
      return 0;
    }
    table_.seen[row] = {};
    table_.row_ids[row] = std::exchange(counters_[kFree], row);
    --counters_[kSize];
    return row;
  }

  std::vector<int64_t> evicted; ///< rows that were reassigned from one id to another

 private:
  int64_t seen_again(int64_t row) {
    if (row >= table_.capacity) {
      return 0;
    }
    ++table_.seen[row].count;
    table_.seen[row].step = step_;
    return row;
  }

  bool is_row(int64_t row) const { return row > 0 && row < table_.capacity; }

  /// Returns a row for a new id (0: none), and whether an id was evicted, so that slots have moved.
  std::pair<int64_t, bool> free_row() {
    if (const int64_t row = counters_[kFree]; row > 0) {
      counters_[kFree] = is_row(table_.row_ids[row]) ? table_.row_ids[row] : 0;
      evicted.push_back(row);
      return {row, false};
    }
    if (counters_[kFresh] < table_.capacity) {
      return {counters_[kFresh]++, false};
    }
    while (options_.eviction.has_value() && !nobody_left_) {
      while (counters_[kVictim] < counters_[kVictimEnd]) {
        prefetch_victim(counters_[kVictim] + kAhead);
        const int64_t row = table_.victims[counters_[kVictim]++];
        if (is_row(row) && table_.seen[row].step > 0 &&
            table_.seen[row].step < counters_[kVictimStep]) {
          const int64_t slot = table_.slot_of(table_.row_ids[row]);
          if (slot >= 0 && table_.slots[slot].value == row) {
            erase(slot);
          }
          --counters_[kSize];
          evicted.push_back(row);
          return {row, true};
        }
      }
      choose_victims();
    }
    return {0, false};
  }

  void prefetch_victim(int64_t place) const {
    if (place < counters_[kVictimEnd] && is_row(table_.victims[place])) {
      prefetch(table_.slots + table_.home(table_.row_ids[table_.victims[place]]));
      prefetch(table_.seen + table_.victims[place]);
    }
  }

  Age age(int64_t row) const {
    const auto [count, step] = table_.seen[row];
    return longest_ago_ ? Age{step, count, row} : Age{count, step, row};
  }

  void choose_victims() {
    int64_t old = 0;
    Age largest{};
    for_old_rows([&](int64_t row) {
      const Age each = age(row);
      largest = {std::max(largest.first, each.first), std::max(largest.second, each.second), row};
      ++old;
    });
    const int64_t wanted = std::min(table_.num_victims, old);
    nobody_left_ = wanted == 0;
    std::vector<Age> chosen;
    if (wanted > 0) {
      // Finds the sort key of the last victim: its first number, then the second among rows with
      // that first number. Ties are resolved in favour of the lowest rows.
      chosen.reserve(wanted);
      const auto [first, before] = select(
          wanted - 1, largest.first, [&](int64_t row) { return std::optional(age(row).first); });
      const auto [second, also_before] =
          select(wanted - 1 - before, largest.second, [&, first = first](int64_t row) {
            const Age each = age(row);
            return each.first == first ? std::optional(each.second) : std::nullopt;
          });
      int64_t ties = wanted - before - also_before;
      for_old_rows([&, first = first, second = second](int64_t row) {
        const Age each = age(row);
        const bool tie = each.first == first && each.second == second;
        const bool gives_way =
            tie ? ties-- > 0 : std::pair(each.first, each.second) < std::pair(first, second);
        // The size check matters for a damaged state: its negative values break the selection.
        if (gives_way && int64_t(chosen.size()) < wanted) {
          chosen.push_back(each);
        }
      });
      std::sort(chosen.begin(), chosen.end());
    }
    std::transform(chosen.begin(), chosen.end(), table_.victims,
                   [](const Age& each) { return each.row; });
    counters_[kVictim] = 0;
    counters_[kVictimEnd] = int64_t(chosen.size());
    counters_[kVictimStep] = step_;
  }

  /// Visits the rows whose ids may be evicted: those not seen in this batch.
  template <typename Visit>
  void for_old_rows(const Visit& visit) const {
    for (int64_t row = 1; row < table_.capacity; ++row) {
      if (table_.seen[row].step > 0 && table_.seen[row].step < step_) {
        visit(row);
      }
    }
  }

  /// Returns the value of that rank (from 0) among the values in [0, largest] that key(row) gives
  /// for old rows, and the number of smaller values. A radix selection from the most significant
  /// digit, so that nothing of the table's size is copied or sorted.
  template <typename Key>
  std::pair<int64_t, int64_t> select(int64_t rank, int64_t largest, const Key& key) const {
    constexpr int kDigit = 11;
    constexpr size_t kCopies = 4; // separate counters, so that runs of equal values do not stall
    uint64_t found = 0;
    int shift = 0;
    while (shift + kDigit < 64 && largest >> (shift + kDigit) != 0) {
      shift += kDigit;
    }
    int64_t smaller = 0;
    for (; shift >= 0; shift -= kDigit) {
      std::array<std::array<int64_t, kCopies>, size_t(1) << kDigit> numbers{};
      for_old_rows([&](int64_t row) {
        if (const auto value = key(row);
            value.has_value() && uint64_t(*value) >> shift >> kDigit == found) {
          ++numbers[uint64_t(*value) >> shift & (numbers.size() - 1)][size_t(row) % kCopies];
        }
      });
      size_t digit = 0;
      const auto number = [&] {
        return std::accumulate(numbers[digit].begin(), numbers[digit].end(), int64_t(0));
      };
      for (; digit + 1 < numbers.size() && smaller + number() <= rank; ++digit) {
        smaller += number();
      }
      found = found << kDigit | digit;
    }
    return {int64_t(found), smaller};
  }

  /// Forgets the half of the waiting ids that was least recently seen.
  void forget_half() {
    std::vector<std::pair<int64_t, int64_t>> waiting; // step and sightings, id
    waiting.reserve(counters_[kWaiting]);
    for (int64_t slot = 0; slot < table_.num_slots; ++slot) {
      if (table_.slots[slot].value < 0) {
        waiting.emplace_back(int64_t(0 - uint64_t(table_.slots[slot].value)),
                             table_.slots[slot].id);
      }
    }
    const auto half = waiting.begin() + int64_t(waiting.size() + 1) / 2;
    std::nth_element(waiting.begin(), half, waiting.end());
    for (auto each = waiting.begin(); each != half; ++each) {
      erase(table_.slot_of(each->second));
    }
    counters_[kWaiting] = waiting.end() - half;
  }

  int64_t after(int64_t slot) const { return slot + 1 == table_.num_slots ? 0 : slot + 1; }

  /// Empties a slot. Later entries of the probe sequence are shifted back toward their home slots.
  void erase(int64_t slot) {
    if (slot < 0) {
      return;
    }
    const auto behind = [&](int64_t place, uint64_t from) {
      const int64_t distance = place - int64_t(from);
      return distance < 0 ? distance + table_.num_slots : distance;
    };
    int64_t hole = slot, place = after(slot);
    for (int64_t tried = 1; tried < table_.num_slots && !table_.slots[place].empty();
         ++tried, place = after(place)) {
      const uint64_t home = table_.home(table_.slots[place].id);
      if (behind(place, home) >= behind(place, uint64_t(hole))) {
        table_.slots[hole] = table_.slots[place];
        hole = place;
      }
    }
    table_.slots[hole] = {};
  }

  const IdTableView table_;
  const IdTableOptions& options_;
  const bool longest_ago_;
  int64_t* const counters_;
  const int64_t step_;
  bool nobody_left_ = false; // no id can be evicted any more in this batch
};

/// Returns whether an entry of `slots` agrees with the rest of the state.
bool consistent(const IdTableView& table, int64_t place, const IdTableOptions& options) {
  const IdSlot& slot = table.slots[place];
  const int64_t step = table.counters[kStep];
  if (slot.empty()) {
    return true;
  }
  if (!slot.has_row()) {
    return options.admission > 1 && slot.sightings() >= 1 &&
        slot.sightings() <= options.admission && slot.step() >= 1 && slot.step() <= step &&
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
  const int64_t none = std::numeric_limits<int64_t>::max();
  const auto first = [&](int64_t size, const auto& wrong) {
    const auto search = [&](int64_t begin, int64_t end, int64_t found) {
      for (int64_t i = begin; i < end && found == none; ++i) {
        found = wrong(i) ? i : none;
      }
      return found;
    };
    return at::parallel_reduce(0, size, kGrain, none, search,
                               [](int64_t a, int64_t b) { return std::min(a, b); });
  };
  const auto number = [&](int64_t size, const auto& counted) {
    const auto count = [&](int64_t begin, int64_t end, int64_t sum) {
      for (int64_t i = begin; i < end; ++i) {
        sum += counted(i);
      }
      return sum;
    };
    return at::parallel_reduce(0, size, kGrain, int64_t(0), count, std::plus<>());
  };
  const int64_t wrong_slot =
      first(table.num_slots, [&](int64_t i) { return !consistent(table, i, options); });
  TORCH_CHECK_VALUE(wrong_slot == none, op,
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
  TORCH_CHECK_VALUE(wrong_victim == none, op, ": expected victims in [1, ", fresh,
                    "), got others at ", wrong_victim);
}

std::tuple<Tensor, Tensor> id_table_insert_(const Tensor& ids, at::TensorList state,
                                            std::string_view text) {
  constexpr const char* op = "id_table_insert_";
  const IdTableOptions options = id_table_options(op, text);
  check_id_table(op, "ids", ids, state);
  const Tensor given = ids.to(at::kCPU).contiguous(),
               found = at::empty(ids.sizes(), given.options());
  const std::lock_guard guard(state_lock(state[kCounters]));
  const IdTableView table = id_table_view(op, state, /*writes=*/true);
  TORCH_CHECK_VALUE(table.counters[kStep] < kMostSteps, op, ": expected fewer than ", kMostSteps,
                    " batches");
  const int64_t n = given.numel();
  const int64_t* id = given.const_data_ptr<int64_t>();
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
  Writer writer(table, options);
  const auto for_unknown = [&](const auto& visit) {
    for (size_t i = 0; i < unknown.size(); ++i) {
      if (i + kAhead < unknown.size()) {
        prefetch(table.slots + table.home(id[unknown[i + kAhead]]));
      }
      visit(unknown[i]);
    }
  };
  for_unknown([&](int64_t i) { rows[i] = writer.see(id[i]); });
  if (options.admission > 1) { // earlier occurrences of an id that got its row later in the batch
    for_unknown([&](int64_t i) {
      const int64_t slot = rows[i] == 0 ? table.slot_of(id[i]) : -1;
      if (slot >= 0 && table.slots[slot].has_row()) {
        rows[i] = table.slots[slot].value;
      }
    });
  }
  table.counters[kEvicted] = int64_t(writer.evicted.size());
  const Tensor evicted = at::full({n}, -1, given.options());
  std::copy(writer.evicted.begin(), writer.evicted.end(), evicted.mutable_data_ptr<int64_t>());
  return {found.to(ids.device()), evicted.to(ids.device())};
}

Tensor id_table_find(const Tensor& ids, at::TensorList state) {
  constexpr const char* op = "id_table_find";
  check_id_table(op, "ids", ids, state);
  const Tensor given = ids.to(at::kCPU).contiguous(),
               rows = at::empty(ids.sizes(), given.options());
  const std::shared_lock guard(state_lock(state[kCounters]));
  const IdTableView table = id_table_view(op, state, /*writes=*/false);
  check_fits(op,
             find_rows(table, given.const_data_ptr<int64_t>(), given.numel(),
                       rows.mutable_data_ptr<int64_t>()),
             table.capacity);
  return rows.to(ids.device());
}

Tensor id_table_remove_(const Tensor& ids, at::TensorList state) {
  constexpr const char* op = "id_table_remove_";
  check_id_table(op, "ids", ids, state);
  const Tensor given = ids.to(at::kCPU).contiguous(),
               rows = at::empty(ids.sizes(), given.options());
  const std::lock_guard guard(state_lock(state[kCounters]));
  const IdTableView table = id_table_view(op, state, /*writes=*/true);
  const int64_t* id = given.const_data_ptr<int64_t>();
  const IdTableOptions options;
  Writer writer(table, options);
  std::transform(id, id + given.numel(), rows.mutable_data_ptr<int64_t>(),
                 [&](int64_t each) { return writer.remove(each); });
  return rows.to(ids.device());
}

Tensor id_table_ids(const Tensor& rows, at::TensorList state, int64_t missing) {
  constexpr const char* op = "id_table_ids";
  check_id_table(op, "rows", rows, state);
  const Tensor given = rows.to(at::kCPU).contiguous(),
               ids = at::empty(rows.sizes(), given.options());
  const std::shared_lock guard(state_lock(state[kCounters]));
  const IdTableView table = id_table_view(op, state, /*writes=*/false);
  check::class_ids(op, "rows", given, table.capacity);
  const int64_t* row = given.const_data_ptr<int64_t>();
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  at::parallel_for(0, given.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      id[i] = table.seen[row[i]].step > 0 ? table.row_ids[row[i]] : missing;
    }
  });
  return ids.to(rows.device());
}

} // namespace xsoftmax
