#pragma once

#include <xsoftmax/options.h>

#include "table/ids/id_table.h"

#include <compare>
#include <cstdint>
#include <utility>
#include <vector>

// Inserts, removes and evicts ids, one at a time (rules: id_table.h).

namespace xsoftmax {

/// Distance, in ids, at which loops over ids prefetch.
constexpr int64_t kIdsAhead = 16;

/// Inserts and removes ids. Never accesses memory outside the state, whatever its tensors hold.
class IdTableWriter {
 public:
  IdTableWriter(const IdTableView& table, const IdTableOptions& options);

  /// Records a sighting of an id that has no row, or got it earlier in this batch. Returns its row,
  /// or 0.
  int64_t record(int64_t id);
  /// Removes an id. Returns the row that it had, or 0.
  int64_t remove(int64_t id);

  std::vector<int64_t> evicted; ///< rows that were reassigned from one id to another

 private:
  /// Sort key of a row for eviction: smallest first.
  struct EvictionKey {
    int64_t first, second, row;
    auto operator<=>(const EvictionKey&) const = default;
  };

  bool is_row(int64_t row) const { return row > 0 && row < table_.capacity; }
  int64_t next_slot(int64_t slot) const { return slot + 1 == table_.num_slots ? 0 : slot + 1; }

  int64_t record_row(int64_t row);
  /// Returns a row for a new id (0: none), and whether an id was evicted, so that slots have moved.
  std::pair<int64_t, bool> take_row();
  void prefetch_victim(int64_t place) const;
  EvictionKey eviction_key(int64_t row) const;
  void choose_victims();
  /// Visits the rows whose ids may be evicted: those not seen in this batch.
  template <typename Visit>
  void for_evictable_rows(const Visit& visit) const;
  /// Returns the value of that rank (from 0) among the values in [0, largest] that key(row) gives
  /// for old rows, and the number of smaller values. A radix selection from the most significant
  /// digit, so that nothing of the table's size is copied or sorted.
  template <typename Key>
  std::pair<int64_t, int64_t> select(int64_t rank, int64_t largest, const Key& key) const;
  /// Forgets the half of the waiting ids that was least recently seen.
  void drop_older_half();
  /// Empties a slot. Later entries of the probe sequence are shifted back toward their home slots.
  void erase(int64_t slot);

  const IdTableView table_;
  const IdTableOptions& options_;
  const bool by_last_step_;
  int64_t* const counters_;
  const int64_t step_;
  bool none_evictable_ = false; // no id can be evicted any more in this batch
};

} // namespace xsoftmax
