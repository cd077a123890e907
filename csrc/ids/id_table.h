#pragma once

#include <xsoftmax/id_table_options.h>

#include "core/philox.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <vector>

namespace xsoftmax {

// Raw ids, any int64, to rows [0, C) of a class table or an embedding. Row 0 is shared by the ids that have no row. The state is on the CPU; ids may be on any
// device, and what is returned is on theirs.
//
// id_table(int capacity, str options) -> Tensor[]: the state of an empty table (IdTableOptions; capacity >= 2).
// id_table_insert_(ids [*], state, options) -> (rows [*], evicted [ids.numel()]): a training batch. Ids are counted; one that has been seen `admission` times
//     gets a row, in the order in which ids first stand in the batch. An id has the same row, or 0, wherever it stands in the batch. evicted: the rows that
//     went from an id to another, in the order in which they did, then -1; their number is counters[kEvicted].
// id_table_find(ids [*], state) -> rows [*]: changes nothing.
// id_table_remove_(ids [*], state) -> rows [*] that the ids had (0: none). They go to new ids before rows that were never used.
// id_table_ids(rows [*], state, missing) -> ids [*]: the raw id of each row, `missing` for one that no id has.
// id_table_check(state, capacity, options): ValueError for a state that no table of this capacity and these options comes to, as one from a damaged file. O(C).
//     The other operators read and write no other memory than the state's whatever stands in it, and check sizes and counters.
//
// A table without a free row chooses who gives way for a sixteenth of the rows at once, by selection in O(C): those least often seen ("lfu"; ties: longest ago,
// then the lowest row) or seen longest ago ("lru"; ties: least often, then the lowest row). They give way one by one, in that order, when a row is needed. Who
// has been seen since the choice is passed over. So an id of the batch never gives way, ids that are new at one choice are safe until the next, and a new id
// costs O(1) on average, as does an id that is seen again. Where nobody can give way, the id stays without a row.
//
// Ids that wait for admission stand in the same hash table, C of them at most: where one more comes, the half that was seen longest ago is forgotten (ties:
// least often, then the smallest id).
//
// Calls of several threads on one state: look-ups run side by side, inserts and removals one after the other.
//
// Look-ups run on all threads; rows are given out on one, in the order of the batch, so the number of threads changes nothing.

enum IdTableState : size_t { kSlots, kRowIds, kSeen, kVictims, kCounters, kIdTableState };
constexpr std::array<const char*, kIdTableState> kIdTableNames{"slots", "row_ids", "seen", "victims", "counters"};

/// Positions in `counters`.
enum IdTableCounter : int64_t {
  kStep,       ///< batches so far
  kSize,       ///< ids that have a row
  kFresh,      ///< the first row that was never used
  kFree,       ///< the first row whose id was removed (0: none); row_ids has the next
  kWaiting,    ///< ids that wait for admission
  kVictim,     ///< the next of `victims`
  kVictimEnd,  ///< their number
  kVictimStep, ///< the batch in which they were chosen
  kEvicted,    ///< rows that went from an id to another in the last batch
  kIdTableCounters
};

constexpr int64_t kSightingBits = 20, kMostSightings = (int64_t(1) << kSightingBits) - 1, kMostSteps = int64_t(1) << 42;

struct SeenRow {
  int64_t count, step; ///< how often, and in which batch last; step 0: no id has the row
};

/// `slots` [H, 2]: open addressing with linear probing; an entry is taken back by moving those behind it up. So every id is a legal key.
struct IdSlot {
  int64_t id;
  int64_t value; ///< 0: empty; a row; or -(step << 20 | sightings) of an id that waits

  bool empty() const { return value == 0; }
  bool has_row() const { return value > 0; }
  int64_t sightings() const { return int64_t((0 - uint64_t(value)) & uint64_t(kMostSightings)); } ///< of an id that waits
  int64_t step() const { return int64_t((0 - uint64_t(value)) >> kSightingBits); }                ///< in which it was last seen
};

/// Checked, for reading and writing.
struct IdTableView {
  IdSlot* slots;    ///< slots [H, 2]
  int64_t* row_ids; ///< row_ids [C]: the id of a row; of a free row the next one
  SeenRow* seen;    ///< seen [C, 2]
  int64_t* victims; ///< victims [V]
  int64_t* counters;
  int64_t num_slots, capacity, num_victims;

  /// Finaliser of MurmurHash3 (Appleby; public domain): each bit of the id moves each bit of the slot.
  uint64_t home(int64_t id) const {
    uint64_t hash = uint64_t(id);
    hash = (hash ^ hash >> 33) * 0xFF51AFD7ED558CCDu;
    hash = (hash ^ hash >> 33) * 0xC4CEB9FE1A85EC53u;
    return multiply_shift(hash ^ hash >> 33, uint64_t(num_slots));
  }
  /// The slot of the id, or the empty one where it would stand; -1 in a table that has neither.
  int64_t slot_of(int64_t id, uint64_t home) const {
    for (int64_t tried = 0, slot = int64_t(home); tried < num_slots; ++tried) {
      if (slots[slot].empty() || slots[slot].id == id) {
        return slot;
      }
      slot = slot + 1 == num_slots ? 0 : slot + 1;
    }
    return -1;
  }
  int64_t slot_of(int64_t id) const { return slot_of(id, home(id)); }
};

IdTableOptions id_table_options(const char* op, std::string_view text);
/// Sizes and dtypes.
void check_id_table(const char* op, const char* argument, const at::Tensor& numbers, at::TensorList state);
void check_id_table(const char* op, at::TensorList state);
/// Checks memory and counters.
IdTableView id_table_view(const char* op, at::TensorList state, bool writes);

std::tuple<at::Tensor, at::Tensor> id_table_insert_(const at::Tensor& ids, at::TensorList state, std::string_view options);
at::Tensor id_table_find(const at::Tensor& ids, at::TensorList state);
at::Tensor id_table_remove_(const at::Tensor& ids, at::TensorList state);
at::Tensor id_table_ids(const at::Tensor& rows, at::TensorList state, int64_t missing);
/// What id_table_check finds in the values. `options`: of the table.
void check_id_table_values(const char* op, const IdTableView& table, const IdTableOptions& options);

} // namespace xsoftmax
