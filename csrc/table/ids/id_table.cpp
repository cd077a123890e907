#include "table/ids/id_table.h"

#include "op/checks.h"
#include "cpu/memory.h"
#include "op/operators.h"
#include "op/options.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>

namespace xsoftmax {
namespace {

using at::Tensor;

constexpr int64_t kMaxRows = int64_t(1) << 40;

/// Returns the sizes of the state tensors.
std::array<std::vector<int64_t>, kIdTableState> state_sizes(const char* op, int64_t capacity,
                                                            const IdTableOptions& options) {
  TORCH_CHECK_VALUE(
      capacity >= 2 && capacity <= kMaxRows, op,
      ": expected capacity in [2, 2^40], the shared row and one for an id at least, got ",
      capacity);
  const int64_t keys = options.admission > 1 ? 2 * capacity : capacity,
                victims = options.eviction.has_value() ? (capacity + 15) / 16 : 0;
  return {{{2 * keys, 2}, {capacity}, {capacity, 2}, {victims}, {kIdTableCounters}}};
}

std::vector<Tensor> id_table(int64_t capacity, std::string_view text) {
  std::vector<Tensor> state;
  for (const std::vector<int64_t>& sizes :
       state_sizes("IdTable", capacity, id_table_options("IdTable", text))) {
    state.push_back(table_zeros(sizes, at::TensorOptions(at::kLong).device(at::kCPU)));
  }
  state[kCounters].select(0, kFresh).fill_(1);
  return state;
}

IdTableOptions check_state(at::TensorList state, int64_t capacity, std::string_view text) {
  constexpr const char* op = "id_table_check";
  const IdTableOptions options = id_table_options(op, text);
  check_id_table(op, state);
  const auto sizes = state_sizes(op, capacity, options);
  for (size_t i = 0; i < kIdTableState; ++i) {
    const at::IntArrayRef expected = sizes[i];
    TORCH_CHECK_VALUE(state[i].sym_sizes() == c10::fromIntArrayRefSlow(expected), op, ": expected ",
                      kIdTableNames[i], " of shape ", expected, " for capacity ", capacity, " and ",
                      text, ", got ", state[i].sym_sizes());
  }
  return options;
}

void id_table_check(at::TensorList state, int64_t capacity, std::string_view text) {
  const IdTableOptions options = check_state(state, capacity, text);
  check_id_table_values("id_table_check", id_table_view("id_table_check", state, /*writes=*/false),
                        options);
}

void check_meta(at::TensorList state, int64_t capacity, std::string_view text) {
  check_state(state, capacity, text);
}

std::tuple<Tensor, Tensor> insert_meta(const Tensor& ids, at::TensorList state,
                                       std::string_view options) {
  id_table_options("id_table_insert_", options);
  check_id_table("id_table_insert_", "ids", ids, state);
  return {at::empty_symint(ids.sym_sizes(), ids.options()),
          at::empty_symint({ids.sym_numel()}, ids.options())};
}

Tensor find_meta(const Tensor& ids, at::TensorList state) {
  check_id_table("id_table_find", "ids", ids, state);
  return at::empty_symint(ids.sym_sizes(), ids.options());
}

Tensor remove_meta(const Tensor& ids, at::TensorList state) {
  check_id_table("id_table_remove_", "ids", ids, state);
  return at::empty_symint(ids.sym_sizes(), ids.options());
}

Tensor ids_meta(const Tensor& rows, at::TensorList state, int64_t) {
  check_id_table("id_table_ids", "rows", rows, state);
  return at::empty_symint(rows.sym_sizes(), rows.options());
}

} // namespace

IdTableOptions id_table_options(const char* op, std::string_view text) {
  const auto options = parse_options<IdTableOptions>(op, text);
  TORCH_CHECK_VALUE(
      !options.eviction.has_value() || options.eviction == "lfu" || options.eviction == "lru", op,
      ": expected eviction to be \"lfu\", \"lru\" or None, got \"", options.eviction.value_or(""),
      "\"");
  TORCH_CHECK_VALUE(options.admission >= 1 && options.admission <= 1'000'000, op,
                    ": expected admission in [1, 1000000], got ", options.admission);
  return options;
}

void check_id_table(const char* op, const char* argument, const Tensor& numbers,
                    at::TensorList state) {
  check::int64(op, argument, numbers);
  check::in_memory(op, argument, numbers);
  check_id_table(op, state);
}

void check_id_table(const char* op, at::TensorList state) {
  TORCH_CHECK_VALUE(state.size() == kIdTableState, op, ": expected ", int(kIdTableState),
                    " tensors of state, got ", state.size());
  for (size_t i = 0; i < kIdTableState; ++i) {
    check::dim(op, kIdTableNames[i], state[i], i == kSlots || i == kSeen ? 2 : 1);
    check::int64(op, kIdTableNames[i], state[i]);
  }
  check::size(op, "slots", state[kSlots], 1, 2, "id and row");
  check::size(op, "seen", state[kSeen], 1, 2, "count and step");
  check::size(op, "seen", state[kSeen], 0, state[kRowIds].sym_size(0), "the rows");
  check::size(op, "counters", state[kCounters], 0, int64_t(kIdTableCounters), "what is counted");
  TORCH_CHECK_VALUE(
      state[kRowIds].sym_size(0) >= 2 && state[kSlots].sym_size(0) >= state[kRowIds].sym_size(0),
      op, ": expected a state with a slot for each row, and 2 rows at least, got ",
      state[kSlots].sym_size(0), " slots and ", state[kRowIds].sym_size(0), " rows");
}

IdTableView id_table_view(const char* op, at::TensorList state, bool writes) {
  for (size_t i = 0; i < kIdTableState; ++i) {
    TORCH_CHECK_TYPE(state[i].is_cpu(), op, ": expected ", kIdTableNames[i], " on the CPU, got ",
                     state[i].device());
    TORCH_CHECK_VALUE(state[i].is_contiguous(), op, ": expected ", kIdTableNames[i],
                      " as contiguous, got strides ", state[i].strides());
  }
  // A look-up must not trigger a copy of copy-on-write memory.
  const auto data = [&](IdTableState i) {
    return writes ? state[i].mutable_data_ptr() : const_cast<void*>(state[i].const_data_ptr());
  };
  const IdTableView view{static_cast<IdSlot*>(data(kSlots)),
                         static_cast<int64_t*>(data(kRowIds)),
                         static_cast<SeenRow*>(data(kSeen)),
                         static_cast<int64_t*>(data(kVictims)),
                         static_cast<int64_t*>(data(kCounters)),
                         state[kSlots].size(0),
                         state[kRowIds].size(0),
                         state[kVictims].size(0)};
  const auto within = [&](IdTableCounter counter, const char* name, int64_t least, int64_t most) {
    TORCH_CHECK_VALUE(view.counters[counter] >= least && view.counters[counter] <= most, op,
                      ": expected counters[", int64_t(counter), "] (", name, ") in [", least, ", ",
                      most, "], got ", view.counters[counter]);
  };
  within(kStep, "batches", 0, kMaxSteps);
  within(kFresh, "the first row that was never used", 1, view.capacity);
  within(kSize, "ids with a row", 0, view.counters[kFresh] - 1);
  within(kFree, "the first free row", 0, view.capacity - 1);
  within(kWaiting, "ids that wait", 0, view.num_slots);
  within(kVictimEnd, "victims", 0, view.num_victims);
  within(kVictim, "the next victim", 0, view.counters[kVictimEnd]);
  within(kVictimStep, "the batch of the victims", 0, view.counters[kStep]);
  return view;
}

XSOFTMAX_OPERATORS(m) {
  m.def("id_table(int capacity, str options) -> Tensor[]", id_table);
  m.def(
      "id_table_insert_(Tensor ids, Tensor(a!)[] state, str options) -> (Tensor rows, Tensor "
      "evicted)");
  m.def("id_table_find(Tensor ids, Tensor[] state) -> Tensor");
  m.def("id_table_remove_(Tensor ids, Tensor(a!)[] state) -> Tensor");
  m.def("id_table_ids(Tensor rows, Tensor[] state, int missing) -> Tensor");
  m.def("id_table_check(Tensor[] state, int capacity, str options) -> ()");
}

TORCH_LIBRARY_IMPL(xsoftmax, CompositeExplicitAutograd, m) {
  m.impl("id_table_insert_", id_table_insert_);
  m.impl("id_table_find", id_table_find);
  m.impl("id_table_remove_", id_table_remove_);
  m.impl("id_table_ids", id_table_ids);
  m.impl("id_table_check", id_table_check);
}

TORCH_LIBRARY_IMPL(xsoftmax, Meta, m) {
  m.impl("id_table_insert_", insert_meta);
  m.impl("id_table_find", find_meta);
  m.impl("id_table_remove_", remove_meta);
  m.impl("id_table_ids", ids_meta);
  m.impl("id_table_check", check_meta);
}

} // namespace xsoftmax
