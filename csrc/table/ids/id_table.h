#pragma once

#include <xsoftmax/options.h>

#include "random/philox.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <vector>

namespace xsoftmax {

// Maps raw ids, any int64, to rows [0, C) of a class table or an embedding. Row 0 is shared by all
// ids without a row. The state is on the CPU; ids may be on any device, and results are on theirs.
//
// id_table(int capacity, str options) -> Tensor[]: the state of an empty table (IdTableOptions;
// capacity >= 2).
//
// id_table_insert_(ids [*], state, options) -> (rows [*], evicted [ids.numel()]): looks up the ids
// of a training batch and inserts new ones. An id that has been seen `admission` times gets a row,
// in order of first appearance in the batch. All occurrences of an id in the batch get the same row
// (or 0). evicted: the rows that were reassigned from one id to another, in order, padded with -1;
// counters[kEvicted] is their number.
//
// id_table_find(ids [*], state) -> rows [*]: looks ids up; changes nothing.
//
// id_table_remove_(ids [*], state) -> rows [*]: removes ids; returns the rows that they had (0:
// none). New ids get these rows before rows that were never used.
//
// id_table_ids(rows [*], state, missing) -> ids [*]: the raw id of each row; `missing` for a row
// without an id.
//
// id_table_check(state, capacity, options): raises ValueError for a state that no table of this
// capacity and these options can reach, as from a damaged file. O(C). The other operators check
// sizes and counters only; they stay within the memory of the state whatever its values are.
//
// Eviction: if no row is free, victims are chosen for capacity / 16 rows at once, by selection in
// O(C): the least often seen ("lfu"; ties: least recently, then the lowest row) or the least
// recently seen ("lru"; ties: least often, then the lowest row). They are evicted one by one, in
// that order, as rows are needed; a victim that was seen since the choice is skipped. So an id of
// the current batch is never evicted, an id that is new at one choice is safe until the next, and
// both a new and a known id cost O(1) on average. If nothing can be evicted, the id stays without a
// row.
//
// Ids waiting for admission are in the same hash table, at most C of them. If there are more, the
// half that was least recently seen is forgotten (ties: least often, then the smallest id).
//
// Threads may share a state: look-ups run concurrently, inserts and removals one at a time.
// Look-ups run on all threads; rows are assigned by one thread in the order of the batch, so the
// result does not depend on the number of threads.

enum IdTableState : size_t { kSlots, kRowIds, kSeen, kVictims, kCounters, kIdTableState };
constexpr std::array<const char*, kIdTableState> kIdTableNames{"slots", "row_ids", "seen",
                                                               "victims", "counters"};

/// Indices into `counters`.
enum IdTableCounter : int64_t {
  kStep, ///< number of batches so far
  kSize, ///< number of ids with a row
  kFresh, ///< first row that was never used
  kFree, ///< head of the list of rows whose id was removed (0: empty), linked through row_ids
  kWaiting, ///< number of ids waiting for admission
  kVictim, ///< index of the next of `victims`
  kVictimEnd, ///< number of victims
  kVictimStep, ///< batch in which they were chosen
  kEvicted, ///< rows reassigned from one id to another in the last batch
  kIdTableCounters
};

constexpr int64_t kOccurrenceBits = 20, kMaxOccurrences = (int64_t(1) << kOccurrenceBits) - 1,
                  kMaxSteps = int64_t(1) << 42;

struct SeenRow {
  int64_t count, step; ///< number of occurrences, and last batch; step 0: the row has no id
};

/// An entry of `slots` [H, 2]: open addressing with linear probing. Deletion shifts later entries
/// back, so no key is reserved as a tombstone and every int64 is a legal id.
struct IdSlot {
  int64_t id;
  int64_t value; ///< 0: empty; > 0: a row; < 0: -(step << 20 | occurrences) of a waiting id

  bool empty() const { return value == 0; }
  bool has_row() const { return value > 0; }
  /// Returns how often a waiting id was seen.
  int64_t occurrences() const { return int64_t((0 - uint64_t(value)) & uint64_t(kMaxOccurrences)); }
  /// Returns the batch in which a waiting id was last seen.
  int64_t step() const { return int64_t((0 - uint64_t(value)) >> kOccurrenceBits); }
};

/// View of a state whose sizes and counters were checked.
struct IdTableView {
  IdSlot* slots; ///< slots [H, 2]
  int64_t* row_ids; ///< row_ids [C]: the id of a row; for a free row, the next free row
  SeenRow* seen; ///< seen [C, 2]
  int64_t* victims; ///< victims [V]
  int64_t* counters;
  int64_t num_slots, capacity, num_victims;

  /// Returns the first slot to probe, from the finaliser of MurmurHash3 (Appleby; public domain):
  /// each bit of the id affects each bit of the hash.
  uint64_t home_slot(int64_t id) const {
    uint64_t hash = uint64_t(id);
    hash = (hash ^ hash >> 33) * 0xFF51AFD7ED558CCDu;
    hash = (hash ^ hash >> 33) * 0xC4CEB9FE1A85EC53u;
    return multiply_shift(hash ^ hash >> 33, uint64_t(num_slots));
  }
  /// Returns the slot of the id, or the empty slot where it would go; -1 if the table is full.
  int64_t slot_of(int64_t id, uint64_t home_slot) const {
    for (int64_t tried = 0, slot = int64_t(home_slot); tried < num_slots; ++tried) {
      if (slots[slot].empty() || slots[slot].id == id) {
        return slot;
      }
      slot = slot + 1 == num_slots ? 0 : slot + 1;
    }
    return -1;
  }
  int64_t slot_of(int64_t id) const { return slot_of(id, home_slot(id)); }
};

IdTableOptions id_table_options(const char* op, std::string_view text);
/// Check the sizes and dtypes of a state, and of ids or rows.
void check_id_table(const char* op, const char* argument, const at::Tensor& numbers,
                    at::TensorList state);
void check_id_table(const char* op, at::TensorList state);
/// Checks devices, strides and counters, and returns a view of the state.
IdTableView id_table_view(const char* op, at::TensorList state, bool writes);

std::tuple<at::Tensor, at::Tensor> id_table_insert_(const at::Tensor& ids, at::TensorList state,
                                                    std::string_view options);
at::Tensor id_table_find(const at::Tensor& ids, at::TensorList state);
at::Tensor id_table_remove_(const at::Tensor& ids, at::TensorList state);
at::Tensor id_table_ids(const at::Tensor& rows, at::TensorList state, int64_t missing);
/// Checks the values of a state, as id_table_check does. `options`: those of the table.
void check_id_table_values(const char* op, const IdTableView& table, const IdTableOptions& options);

} // namespace xsoftmax
