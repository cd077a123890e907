#include "table/ids/id_table_writer.h"

#include "cpu/prefetch.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

// The rules of admission and eviction, and deletion from the hash table.

namespace xsoftmax {

IdTableWriter::IdTableWriter(const IdTableView& table, const IdTableOptions& options)
    : table_(table), options_(options), by_last_step_(options.eviction == "lru"),
      counters_(table.counters), step_(table.counters[kStep]) {}

int64_t IdTableWriter::record(int64_t id) {
  const uint64_t home_slot = table_.home_slot(id);
  int64_t slot = table_.slot_of(id, home_slot);
  if (slot < 0) {
    return 0;
  }
  if (table_.slots[slot].has_row()) {
    return record_row(table_.slots[slot].value);
  }
  const bool is_waiting = !table_.slots[slot].empty();
  const int64_t occurrences =
      is_waiting ? std::min(table_.slots[slot].occurrences() + 1, options_.admission) : 1;
  if (occurrences >= options_.admission) {
    const auto [row, moved] = take_row();
    if (row > 0) {
      slot = moved ? table_.slot_of(id, home_slot) : slot;
      if (slot < 0) {
        return 0;
      }
      table_.slots[slot] = {id, row};
      table_.row_ids[row] = id;
      table_.seen[row] = {occurrences, step_};
      counters_[kWaiting] -= is_waiting;
      ++counters_[kSize];
      return row;
    }
  }
  if (options_.admission > 1) {
    if (!is_waiting) {
      if (counters_[kWaiting] >= table_.capacity) {
        drop_older_half();
        slot = table_.slot_of(id, home_slot);
      }
      counters_[kWaiting] += slot >= 0;
    }
    if (slot >= 0) {
      table_.slots[slot] = {id, -(step_ << kOccurrenceBits | occurrences)};
    }
  }
  return 0;
}

int64_t IdTableWriter::record_row(int64_t row) {
  if (row >= table_.capacity) {
    return 0;
  }
  ++table_.seen[row].count;
  table_.seen[row].step = step_;
  return row;
}

int64_t IdTableWriter::remove(int64_t id) {
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

std::pair<int64_t, bool> IdTableWriter::take_row() {
  if (const int64_t row = counters_[kFree]; row > 0) {
    counters_[kFree] = is_row(table_.row_ids[row]) ? table_.row_ids[row] : 0;
    evicted.push_back(row);
    return {row, false};
  }
  if (counters_[kFresh] < table_.capacity) {
    return {counters_[kFresh]++, false};
  }
  while (options_.eviction.has_value() && !none_evictable_) {
    while (counters_[kVictim] < counters_[kVictimEnd]) {
      prefetch_victim(counters_[kVictim] + kIdsAhead);
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

void IdTableWriter::prefetch_victim(int64_t place) const {
  if (place < counters_[kVictimEnd] && is_row(table_.victims[place])) {
    prefetch_line(table_.slots + table_.home_slot(table_.row_ids[table_.victims[place]]));
    prefetch_line(table_.seen + table_.victims[place]);
  }
}

IdTableWriter::EvictionKey IdTableWriter::eviction_key(int64_t row) const {
  const auto [count, step] = table_.seen[row];
  return by_last_step_ ? EvictionKey{step, count, row} : EvictionKey{count, step, row};
}

template <typename Visit>
void IdTableWriter::for_evictable_rows(const Visit& visit) const {
  for (int64_t row = 1; row < table_.capacity; ++row) {
    if (table_.seen[row].step > 0 && table_.seen[row].step < step_) {
      visit(row);
    }
  }
}

template <typename Key>
std::pair<int64_t, int64_t> IdTableWriter::select(int64_t rank, int64_t largest,
                                                  const Key& key) const {
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
    for_evictable_rows([&](int64_t row) {
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

void IdTableWriter::choose_victims() {
  int64_t evictable = 0;
  EvictionKey largest{};
  for_evictable_rows([&](int64_t row) {
    const EvictionKey key = eviction_key(row);
    largest = {std::max(largest.first, key.first), std::max(largest.second, key.second), row};
    ++evictable;
  });
  const int64_t wanted = std::min(table_.num_victims, evictable);
  none_evictable_ = wanted == 0;
  std::vector<EvictionKey> chosen;
  if (wanted > 0) {
    // Finds the sort key of the last victim: its first number, then the second among rows with
    // that first number. Ties are resolved in favour of the lowest rows.
    chosen.reserve(wanted);
    const auto [first, before] = select(wanted - 1, largest.first, [&](int64_t row) {
      return std::optional(eviction_key(row).first);
    });
    const auto [second, also_before] =
        select(wanted - 1 - before, largest.second, [&, first = first](int64_t row) {
          const EvictionKey key = eviction_key(row);
          return key.first == first ? std::optional(key.second) : std::nullopt;
        });
    int64_t ties = wanted - before - also_before;
    for_evictable_rows([&, first = first, second = second](int64_t row) {
      const EvictionKey key = eviction_key(row);
      const bool tie = key.first == first && key.second == second;
      const bool is_victim =
          tie ? ties-- > 0 : std::pair(key.first, key.second) < std::pair(first, second);
      // The size check matters for a damaged state: its negative values break the selection.
      if (is_victim && int64_t(chosen.size()) < wanted) {
        chosen.push_back(key);
      }
    });
    std::sort(chosen.begin(), chosen.end());
  }
  std::transform(chosen.begin(), chosen.end(), table_.victims,
                 [](const EvictionKey& key) { return key.row; });
  counters_[kVictim] = 0;
  counters_[kVictimEnd] = int64_t(chosen.size());
  counters_[kVictimStep] = step_;
}

void IdTableWriter::drop_older_half() {
  std::vector<std::pair<int64_t, int64_t>> waiting; // step and occurrences, id
  waiting.reserve(counters_[kWaiting]);
  for (int64_t slot = 0; slot < table_.num_slots; ++slot) {
    if (table_.slots[slot].value < 0) {
      waiting.emplace_back(int64_t(0 - uint64_t(table_.slots[slot].value)), table_.slots[slot].id);
    }
  }
  const auto half = waiting.begin() + int64_t(waiting.size() + 1) / 2;
  std::nth_element(waiting.begin(), half, waiting.end());
  for (auto each = waiting.begin(); each != half; ++each) {
    erase(table_.slot_of(each->second));
  }
  counters_[kWaiting] = waiting.end() - half;
}

void IdTableWriter::erase(int64_t slot) {
  if (slot < 0) {
    return;
  }
  const auto distance_from = [&](int64_t place, uint64_t from) {
    const int64_t distance = place - int64_t(from);
    return distance < 0 ? distance + table_.num_slots : distance;
  };
  int64_t hole = slot, place = next_slot(slot);
  for (int64_t tried = 1; tried < table_.num_slots && !table_.slots[place].empty();
       ++tried, place = next_slot(place)) {
    const uint64_t home_slot = table_.home_slot(table_.slots[place].id);
    if (distance_from(place, home_slot) >= distance_from(place, uint64_t(hole))) {
      table_.slots[hole] = table_.slots[place];
      hole = place;
    }
  }
  table_.slots[hole] = {};
}

} // namespace xsoftmax
