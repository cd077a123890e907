"""IdTable against a model in plain Python; state, scripts, checkpoints.

test_id_table_reset.py tests how the row of an evicted id is reset.
"""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import op_samples
import xsoftmax as xs

ops = torch.ops.xsoftmax
EVICTIONS = ["lfu", "lru", None]


class PlainIdTable:
    """The behaviour described in csrc/table/ids/id_table.h, with dicts."""
    def __init__(self, capacity, eviction="lfu", admission=1):
        self.capacity, self.eviction, self.admission = capacity, eviction, admission
        # id -> row; row -> [count, step]; id -> [step, sightings]
        self.row, self.seen, self.waiting = {}, {}, {}
        self.step, self.fresh, self.free, self.victims, self.chosen = 0, 1, [], [], 0

    def insert(self, batch):
        self.step += 1
        known, evicted, stuck = set(self.row), [], False
        for id in batch:
            if id in known:
                self.seen[self.row[id]][0] += 1
                self.seen[self.row[id]][1] = self.step
        for id in batch:
            if id in known:
                continue
            if id in self.row:
                self.seen[self.row[id]][0] += 1
                continue
            sightings = min(self.waiting.get(id, [0, 0])[1] + 1, self.admission)
            row = 0
            if sightings >= self.admission:
                row, gone, stuck = self.row_for_new(stuck)
                if gone:
                    evicted.append(row)
            if row:
                self.waiting.pop(id, None)
                self.row[id], self.seen[row] = row, [sightings, self.step]
            elif self.admission > 1:
                if id not in self.waiting and len(self.waiting) >= self.capacity:
                    oldest = sorted((*seen, other) for other, seen in self.waiting.items())
                    for *_, other in oldest[:(len(oldest) + 1) // 2]:
                        del self.waiting[other]
                self.waiting[id] = [self.step, sightings]
        return [self.row.get(id, 0) for id in batch], evicted

    def row_for_new(self, stuck):
        """Returns (row or 0, whether it had another id, whether every row with an id is in use by
        this batch)."""
        if self.free:
            return self.free.pop(), True, stuck
        if self.fresh < self.capacity:
            self.fresh += 1
            return self.fresh - 1, False, stuck
        while self.eviction is not None and not stuck:
            while self.victims:
                row = self.victims.pop(0)
                if row in self.seen and self.seen[row][1] < self.chosen:
                    del self.row[next(id for id, other in self.row.items() if other == row)]
                    return row, True, stuck
            order = (0, 1) if self.eviction == "lfu" else (1, 0)
            old = sorted((*(seen[i] for i in order), row)
                         for row, seen in self.seen.items() if seen[1] < self.step)
            self.victims, self.chosen = [row
                                         for *_, row in old[:(self.capacity + 15) // 16]], self.step
            stuck = not self.victims
        return 0, False, stuck

    def remove(self, batch):
        rows = []
        for id in batch:
            self.waiting.pop(id, None)
            row = self.row.pop(id, 0)
            if row:
                del self.seen[row]
                self.free.append(row)
            rows.append(row)
        return rows


def stream(seed, batches, ids, most):
    """Batches of Zipf-distributed ids that drift, spread over all of int64."""
    random, names = np.random.default_rng(seed), np.random.default_rng(7).integers(
        -(2**63), 2**63 - 1, ids)
    names[:3] = -(2**63), 2**63 - 1, 0
    for step in range(batches):
        yield names[(random.zipf(1.3, random.integers(0, most)) + step // 4) % ids].tolist()


def check_same(table, distribution):
    names = {row: id for id, row in distribution.row.items()}
    rows = torch.arange(table.capacity)
    assert table.ids_of(
        rows, missing=12345).tolist() == [names.get(row, 12345) for row in range(table.capacity)]
    assert [tuple(seen) for seen in table.seen.tolist()
            ] == [tuple(distribution.seen.get(row, (0, 0))) for row in range(table.capacity)]
    assert len(table) == len(distribution.row)
    waiting = {
        id: [-value >> 20, -value & (2**20 - 1)]
        for id, value in table.slots.tolist() if value < 0
    }
    assert waiting == distribution.waiting


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("admission", [1, 3])
@pytest.mark.parametrize("capacity", [2, 17, 100])
def test_rows_counts_and_evictions_match_the_model(capacity, admission, eviction):
    table, distribution = xs.IdTable(capacity, eviction=eviction,
                                     admission=admission), PlainIdTable(
                                         capacity, eviction, admission)
    random = np.random.default_rng(1)
    gone = 0
    for step, batch in enumerate(stream(capacity, 200, 4 * capacity, 2 * capacity)):
        rows, evicted = table.insert(torch.tensor(batch, dtype=torch.int64))
        assert (rows.tolist(), evicted.tolist()) == distribution.insert(batch), step
        gone += len(evicted)
        if step % 7 == 3 and distribution.row:
            leaving = [
                *random.choice(list(distribution.row), min(3, len(distribution.row))).tolist(),
                *list(distribution.waiting)[:2], 99
            ]
            assert table.remove(torch.tensor(leaving)).tolist() == distribution.remove(leaving)
        if step % 10 == 0 or step > 195:
            check_same(table, distribution)
            ops.id_table_check(table._state(), capacity, table.options)
    assert gone > (capacity if eviction else 10)
    probe = [*distribution.row, *distribution.waiting, 5, 6]
    assert table.eval()(
        torch.tensor(probe)).tolist() == [distribution.row.get(id, 0) for id in probe]
    check_same(table, distribution)  # lookups in eval() do not count


def test_ids_of_the_batch_are_not_evicted():
    table = xs.IdTable(4)
    rows, evicted = table.insert(torch.tensor([10, 11, 12, 13, 10, 14]))
    assert rows.tolist() == [1, 2, 3, 0, 1, 0] and evicted.tolist() == []
    rows, evicted = table.insert(torch.tensor([13, 14, 12]))
    assert rows.tolist() == [2, 1, 3] and evicted.tolist() == [2, 1]  # 11 was seen once, 10 twice


def test_an_id_repeated_in_a_batch_gets_one_row():
    table = xs.IdTable(8, admission=3)
    assert table(torch.tensor([5, 6, 5, 6, 5, 5])).tolist() == [1, 0, 1, 0, 1, 1]
    assert table.seen[1].tolist() == [4, 1]
    assert table(torch.tensor([[6], [6]])).tolist() == [[2], [2]]


def test_a_full_table_without_eviction_leaves_new_ids_in_row_0():
    table = xs.IdTable(3, eviction=None)
    assert table(torch.tensor([7, 8, 9])).tolist() == [1, 2, 0]
    table.remove(torch.tensor([7]))
    rows, evicted = table.insert(torch.tensor([9]))
    assert rows.tolist() == [1] and evicted.tolist() == [1]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_any_number_of_threads_gives_the_same_rows(eviction):
    states, outs, before = [], [], torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            table, out = xs.IdTable(3000, eviction=eviction, admission=2), []
            for batch in stream(3, 12, 20_000, 20_000):
                out += table.insert(torch.tensor(batch, dtype=torch.int64))
                out.append(table.find(torch.tensor(batch[::-1], dtype=torch.int64)))
            states.append(table._state())
            outs.append(out)
    finally:
        torch.set_num_threads(before)
    for state, out in zip(states[1:], outs[1:]):
        assert all(map(torch.equal, state, states[0])) and all(map(torch.equal, out, outs[0]))


def trained(**options):
    table = xs.IdTable(20, **options)
    for batch in stream(0, 30, 80, 40):
        table(torch.tensor(batch, dtype=torch.int64))
    return table


def continues_equally(a, b):
    for batch in stream(1, 20, 80, 40):
        batch = torch.tensor(batch, dtype=torch.int64)
        if not all(map(torch.equal, a.insert(batch), b.insert(batch))):
            return False
    return all(map(torch.equal, a._state(), b._state()))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_copies_and_checkpoints_continue_equally(eviction):
    table = trained(eviction=eviction, admission=2)
    loaded = xs.IdTable(20, eviction=eviction, admission=2)
    assert not loaded.load_state_dict(table.state_dict()).missing_keys
    assigned = xs.IdTable(20, eviction=eviction, admission=2)
    assigned.load_state_dict(copy.deepcopy(table.state_dict()), assign=True)
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    copies = [
        loaded, assigned,
        copy.deepcopy(table),
        pickle.loads(pickle.dumps(table)),
        torch.load(file, weights_only=False)
    ]
    for each in copies:
        assert continues_equally(copy.deepcopy(table), each)


def test_a_script_gives_the_same_rows():
    table = trained()
    scripted = torch.jit.script(copy.deepcopy(table))
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    for batch in stream(1, 20, 80, 40):
        batch = torch.tensor(batch, dtype=torch.int64)
        rows, evicted = table.insert(batch)
        assert torch.equal(scripted(batch), rows) and torch.equal(loaded.insert(batch)[1], evicted)
    assert torch.equal(scripted.ids_of(torch.arange(20)), table.ids_of(torch.arange(20)))
    assert torch.equal(scripted.eval()(torch.tensor([1, 2])), torch.tensor([0, 0]))


def damaged(state, name, place, value):
    return {
        **state, name: state[name].clone().index_put_(tuple(torch.tensor(i) for i in place),
                                                      torch.tensor(value))
    }


@pytest.mark.parametrize("name, place, value, message",
                         [("slots", (0, 1), 2**40, "slots that agree"),
                          ("slots", (3, 0), 77, "slots that agree"),
                          ("row_ids", (4,), 5, "slots that agree"),
                          ("seen", (4, 1), 10**6, "slots that agree"),
                          ("seen", (0, 0), 3, "seen of 19 rows"),
                          ("counters", (1,), 3, "with a row"), ("counters", (2,), 30, "never used"),
                          ("counters", (0,), -1, "batches"), ("counters", (3,), 5, "free rows"),
                          ("victims", (0,), 10**9, "victims")])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(name, place, value, message):
    table = trained()
    if table.slots[place][()] == 0 if name == "slots" else False:
        place = (int(table.slots[:, 1].nonzero()[0]), *place[1:])
    before = [each.clone() for each in table._state()]
    with pytest.raises(RuntimeError, match=message):
        table.load_state_dict(damaged(table.state_dict(), name, place, value))
    assert all(map(torch.equal, table._state(), before))


def test_operators_with_an_invalid_state_write_within_bounds():
    """With negative counts all rows would be evicted at once, more than `victims` has places
    for."""
    table = trained()
    state = [tensor.clone() for tensor in table._state()]
    state[2][4:, 0] = -1
    for id in range(1000, 1003):
        ops.id_table_insert_(torch.tensor([id]), state, table.options)
        assert 0 < state[4][6] <= len(state[3])


def test_checkpoints_of_other_kinds_are_refused():
    table, state = trained(), trained().state_dict()
    before = [each.clone() for each in table._state()]
    for wrong, message in [({**state, "seen": state["seen"].double()}, "int64"),
                           ({**state, "seen": state["seen"].to_sparse()}, "layout|strided|dense"),
                           ({name: state[name]
                             for name in ("slots", "seen")}, "alone"),
                           (trained(admission=3).state_dict(), "shape"),
                           (xs.IdTable(21).state_dict(), r"slots of shape \[\d+, 2\] for"),
                           (trained(eviction=None).state_dict(), "victims")]:
        with pytest.raises(RuntimeError, match=message):
            table.load_state_dict(wrong)
    assert table.load_state_dict({}, strict=False).missing_keys
    assert all(map(torch.equal, table._state(), before))


def test_bad_calls_say_what_was_expected_and_change_nothing():
    for arguments, error, message in [((1,), ValueError, "at least 2"), ((2.0,), TypeError, "int"),
                                      ((True,), TypeError, "int"), ((2**41,), ValueError, "2^40")]:
        with pytest.raises(error, match=message.replace("^", r"\^")):
            xs.IdTable(*arguments)
    for options, error in [(dict(eviction="fifo"), ValueError), (dict(eviction=3), TypeError),
                           (dict(admission=0), ValueError), (dict(admission=10**7), ValueError),
                           (dict(admission=1.5), TypeError),
                           (dict(eviction="lfu,admission=2"), ValueError)]:
        with pytest.raises(error):
            xs.IdTable(4, **options)
    table = trained()
    before = [each.clone() for each in table._state()]
    for ids, error in [([1, 2], TypeError), (torch.tensor([1.0]), TypeError),
                       (torch.tensor([float("nan")]), TypeError),
                       (torch.tensor([1], dtype=torch.int32), TypeError),
                       (torch.tensor([True]), TypeError),
                       (torch.tensor([1]).to_sparse(), TypeError), (None, TypeError)]:
        for call in (table, table.insert, table.find, table.remove, table.ids_of):
            with pytest.raises(error):
                call(ids)
    for row in (-1, 20):
        with pytest.raises(IndexError, match="rows"):
            table.ids_of(torch.tensor([row]))
    assert all(map(torch.equal, table._state(), before))


def test_no_ids_and_any_shape():
    table = xs.IdTable(4)
    assert table(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)
    assert table(torch.tensor(5)).shape == () and table.find(torch.tensor([[5, 6]
                                                                           ])).tolist() == [[1, 0]]
    # in the order of the shape
    assert table(torch.tensor([[5, 6], [7, 8]]).t()).tolist() == [[1, 2], [3, 0]]
    assert len(table) == 3 and bool(
        xs.IdTable(4)) and repr(table) == "IdTable(4, eviction='lfu', admission=1)"


def test_the_table_stays_on_the_cpu():
    model = torch.nn.Sequential(trained())
    before = [each.clone() for each in model[0]._state()]
    model.to("meta").half().to_empty(device="cpu")
    assert all(map(torch.equal, model[0]._state(), before))
    with torch.device("meta"):
        assert xs.IdTable(4)(torch.tensor([5], device="cpu")).tolist() == [1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lookups_compile():
    table = trained()
    found = torch.compile(lambda ids: table.find(ids) + 1, fullgraph=True, backend="aot_eager")
    ids = torch.tensor(table.ids_of(torch.tensor([1, 2, 3])).tolist() + [5])
    assert found(ids).tolist() == [2, 3, 4, 1]
    loss = xs.SampledSoftmaxLoss(4, 20, sampler="uniform", num_samples=3)
    table.attach(loss)
    step = torch.compile(lambda hidden, rows: loss(hidden, rows), fullgraph=True,
                         backend="aot_eager")
    step(torch.randn(4, 4), table(ids)).backward()
    # in two graphs
    broken = torch.compile(lambda hidden, ids: loss(hidden, table(ids)), backend="aot_eager")
    broken(torch.randn(4, 4), ids + 1).backward()
    assert table.find(ids + 1).tolist() != [0] * 4


# Without id_table, which creates its state on the CPU also under tracing.
@pytest.mark.parametrize("name", [
    "id_table_check", "id_table_find", "id_table_ids", "id_table_insert_", "id_table_remove_",
    "reset_rows_", "streaming_forget_"
])
def test_opcheck(name):
    torch.library.opcheck(getattr(ops, name).default, op_samples.samples()[name])
