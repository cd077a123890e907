"""Resetting a row of an IdTable that a new id takes over: table, optimizer state and counts.

The choice of rows is tested in test_id_table.py.
"""

import copy
import math
import warnings

import pytest
import torch

import xsoftmax as xs
from ranks import ranks
from test_optim_invariants import CASES, dense_twin
from xsoftmax.samplers import (InBatchSampler, MidxSampler, StreamingCounts, UniformSampler,
                               UnigramSampler, UnionSampler)

C, D = 12, 3
BEGIN = 0.25  # the first value of each row


def begin(rows):
    return torch.nn.init.constant_(rows, BEGIN)


def full_table(**options):
    """Returns an IdTable whose rows 1 to 11 hold ids 1 to 11; id i was seen i times."""
    ids = xs.IdTable(C, **options)
    ids(torch.arange(1, C).repeat_interleave(torch.arange(1, C)))
    return ids


def gradient(rows, generator):
    values = torch.randn(len(rows), D, dtype=torch.float64, generator=generator)
    return torch.sparse_coo_tensor(rows[None], values, (C, D), check_invariants=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("flush", [False, True])
def test_training_with_resets_matches_a_dense_optimizer_with_reset_rows(case, flush):
    """A reset drops the pending updates of its rows and keeps those of other rows, with or without
    flushes in between."""
    make, options = CASES[case]
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(C, D, dtype=torch.float64))
    twin = torch.nn.Parameter(table.detach().clone())
    optimizer = make([table], **options)
    dense = dense_twin(make, [twin], options)
    ids, generator = full_table().attach(table, init=begin), torch.Generator().manual_seed(1)
    resets = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dropped pending updates give no warning here
        for step in range(60):
            rows = torch.arange(C) if step == 0 else torch.randint(1, C, (2,), generator=generator)
            if step % 5 == 4:
                rows, gone = ids.insert(torch.tensor([1000 + step, 2000 + step]))
                resets += len(gone)
                twin.data[gone] = BEGIN
                for state in dense.state[twin].values():
                    if isinstance(state, torch.Tensor) and state.shape[:1] == twin.shape[:1]:
                        state[gone] = 0
                assert torch.equal(table.detach()[gone], twin.detach()[gone])
            table.grad = gradient(rows, generator)
            twin.grad = table.grad.to_dense()
            optimizer.step()
            dense.step()
            if flush and step % 7 == 6:
                optimizer.flush()
        optimizer.flush()
    assert resets > 15
    torch.testing.assert_close(table, twin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [xs.optim.RowSGD, xs.optim.RowAdagrad, xs.optim.RowAdam])
def test_reset_without_state_and_with_state_of_dense_gradients(make):
    table = torch.nn.Parameter(torch.randn(C, D))
    optimizer = make([table], **(dict(momentum=0.9) if make is xs.optim.RowSGD else {}))
    xs.optim.reset_rows(table, torch.tensor([2]), torch.zeros(1, D))
    table.grad = torch.ones_like(table)
    optimizer.step()
    state = optimizer._tensors(optimizer.state[table])
    before = [tensor.clone() for tensor in state]
    xs.optim.reset_rows(table, torch.tensor([2, 5]), torch.zeros(2, D))
    for tensor, old in zip(state, before):
        if tensor.dim() > 0:
            assert not tensor[[2, 5]].any()
            tensor[[2, 5]] = old[[2, 5]]
        assert torch.equal(tensor, old)


def test_state_that_the_current_options_do_not_use_is_reset_too():
    """A schedule may set momentum to 0 for a while; row_wise is fixed by the first gradient,
    whatever the option says later."""
    for make, options, later, name in [
        (xs.optim.RowSGD, dict(momentum=0.9), dict(momentum=0.0), "momentum_buffer"),
        (xs.optim.RowAdagrad, dict(row_wise=True), dict(row_wise=False), "sum"),
        (xs.optim.RowAdam, dict(row_wise=True), dict(row_wise=False), "exp_avg_sq")
    ]:
        table = torch.nn.Parameter(torch.randn(C, D, dtype=torch.float64))
        optimizer = make([table], **options)
        table.grad = gradient(torch.arange(C), None)
        optimizer.step()
        optimizer.param_groups[0].update(later)
        state = optimizer.state[table][name]
        assert state.any(-1).all()
        xs.optim.reset_rows(table, torch.tensor([3, 3]), torch.zeros(2, D, dtype=torch.float64))
        assert not state[3].any() and state[2].any() and state[4].any()


@pytest.mark.parametrize("rows", [2055, 13])
def test_the_tensor_of_pending_updates_is_not_mistaken_for_rows(rows):
    """It has 2,055 elements for a small table, which may be the number of rows."""
    table = torch.nn.Parameter(torch.randn(rows, D))
    optimizer = xs.optim.RowAdam([table], weight_decay=0.1)
    for _ in range(3):
        table.grad = torch.sparse_coo_tensor(torch.tensor([[5]]), torch.ones(1, D), (rows, D),
                                             check_invariants=True)
        optimizer.step()
    pending = optimizer.state[table]["pending"].clone()
    assert len(pending) == 2055
    xs.optim.reset_rows(table, torch.tensor([0, 5]), torch.zeros(2, D))
    assert torch.equal(optimizer.state[table]["pending"],
                       pending) and optimizer.state[table]["last_step"][[0, 4, 5
                                                                         ]].tolist() == [3, 0, 3]


def test_wrong_rows_or_values_are_refused_and_change_nothing():
    table = torch.nn.Parameter(torch.randn(C, D))
    optimizer = xs.optim.RowAdam([table])
    table.grad = gradient(torch.arange(C), None).float()
    optimizer.step()
    before = [tensor.clone() for tensor in [table, *optimizer._tensors(optimizer.state[table])]]
    one = torch.zeros(1, D)
    for wrong, values, error in [(torch.tensor([0, C]), torch.zeros(2, D), IndexError),
                                 (torch.tensor([-1]), one, IndexError),
                                 (torch.tensor([1.0]), one, TypeError),
                                 (torch.tensor([[1]]), one, ValueError),
                                 (torch.tensor([1]), torch.zeros(2, D), ValueError),
                                 (torch.tensor([1]), torch.zeros(1, D + 1), ValueError),
                                 (torch.tensor([1]), one.double(), TypeError)]:
        with pytest.raises(error):
            xs.optim.reset_rows(table, wrong, values)
    assert all(map(torch.equal, [table, *optimizer._tensors(optimizer.state[table])], before))


@pytest.mark.parametrize("way", ["load_state_dict", "deepcopy"])
def test_loaded_or_copied_state_is_reset_before_its_first_step(way):
    table = torch.nn.Parameter(torch.randn(C, D))
    optimizer = xs.optim.RowAdam([table])
    table.grad = gradient(torch.arange(C), None).float()
    optimizer.step()
    if way == "deepcopy":
        table, optimizer = copy.deepcopy((table, optimizer))
    else:
        state = copy.deepcopy(optimizer.state_dict())
        table = torch.nn.Parameter(table.detach().clone())
        optimizer = xs.optim.RowAdam([table])
        optimizer.load_state_dict(state)
    xs.optim.reset_rows(table, torch.tensor([3]), torch.zeros(1, D))
    assert not optimizer.state[table]["exp_avg"][3].any(
    ) and optimizer.state[table]["exp_avg"][4].any()


def test_the_sparse_momentum_of_sgd_is_reset_and_unknown_optimizers_are_refused():
    embedding = torch.nn.Embedding(C, D, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)
    embedding(torch.arange(6)).square().sum().backward()
    optimizer.step()
    gone = full_table().attach(embedding, optimizer).insert(torch.tensor([500]))[1]
    buffer = optimizer.state[embedding.weight]["momentum_buffer"].to_dense()
    assert gone.tolist() == [1] and not buffer[1].any() and buffer[2].all()
    with pytest.raises(TypeError, match="Rprop"):
        full_table().attach(torch.optim.Rprop(embedding.parameters()))


def test_adagrad_is_reset_to_its_initial_accumulator_value():
    for make in (xs.optim.RowAdagrad, torch.optim.Adagrad):
        table = torch.nn.Parameter(torch.randn(C, D))
        optimizer = make([table], initial_accumulator_value=0.5)
        table.grad = torch.ones_like(table)
        optimizer.step()
        ids = full_table().attach(table, optimizer, init=begin)
        gone = ids.insert(torch.tensor([77]))[1]
        assert gone.tolist() == [1] and optimizer.state[table]["sum"][:3, 0].tolist() == [
            1.5, 0.5, 1.5
        ]


@pytest.mark.parametrize("make", [
    torch.optim.Adam, torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD,
    torch.optim.RMSprop
])
def test_state_of_torch_optimizers_is_reset(make):
    embedding = torch.nn.Embedding(C, D, sparse=make in (torch.optim.SparseAdam, torch.optim.SGD))
    optimizer = make(embedding.parameters(), lr=0.1)
    ids = full_table().attach(embedding, optimizer)
    embedding(torch.arange(C)).square().sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    rows, gone = ids.insert(torch.tensor([50, 51, 9]))
    assert sorted(gone.tolist()) == [1, 2] and set(rows.tolist()) == {1, 2, 9}
    for name, tensor in optimizer.state_dict()["state"].get(0, {}).items():
        old = before[0][name]
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2:
            assert not tensor[gone].any() and torch.equal(tensor[3:], old[3:]) and old[gone].any()
        elif tensor is not None:
            assert tensor == old


@pytest.mark.parametrize("bias", [True, False])
def test_a_loss_and_the_embedding_tied_to_it_are_reset_once(bias):
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, C, sampler="uniform", num_samples=4, bias=bias)
    embedding = torch.nn.Embedding(C, D, sparse=True)
    loss.linear.weight = embedding.weight
    optimizer = xs.optim.RowAdam([*loss.parameters(), *embedding.parameters()][:1 + bias], lr=0.1)
    ids = full_table(eviction="lru").attach(loss, embedding)
    for step in range(30):
        raw = torch.randint(1000, (5,))
        before = loss.state_dict()
        before = {name: tensor.clone() for name, tensor in before.items()}
        rows, gone = ids.insert(raw)
        others = torch.ones(C, dtype=torch.bool).index_fill(0, gone, False)
        bound = 1 / math.sqrt(D)
        for name, tensor in loss.linear.named_parameters():
            assert torch.equal(tensor[others], before["linear." + name][others])
            assert (tensor[gone] != before["linear." + name][gone]).all() and (tensor[gone].abs()
                                                                               <= bound).all()
        optimizer.zero_grad()
        loss(embedding(rows), rows).backward()
        optimizer.step()
        assert set(optimizer.state[embedding.weight]["last_step"][rows].tolist()) == {step + 1}
    assert loss.linear.weight is embedding.weight


@pytest.mark.parametrize("half_life", [None, 20.0])
def test_streaming_counts_of_a_reset_row_start_at_zero(half_life):
    counts = StreamingCounts(C, half_life=half_life)
    ids = full_table().attach(counts)
    counts.update(torch.randint(1, C, (200,)))
    before = counts.counts(torch.arange(C))
    gone = ids.insert(torch.tensor([500, 501, 502]))[1]
    after = counts.counts(torch.arange(C))
    assert len(gone) == 3 and not after[gone].any() and torch.equal(counts.log_prob(gone),
                                                                    torch.full([3], -math.inf))
    torch.testing.assert_close(after, before.index_fill(0, gone, 0.0), rtol=1e-12, atol=0)
    torch.testing.assert_close(counts.total.double(), after.sum(), rtol=1e-12, atol=1e-12)
    counts.update(gone)
    torch.testing.assert_close(counts.counts(gone), torch.ones(3, dtype=torch.float64))


def test_forget_handles_repeated_ids_and_refuses_wrong_ones():
    counts = StreamingCounts(4)
    counts.update(torch.tensor([1, 1, 2, 3]))
    counts.forget(torch.tensor([[1, 1], [1, 0]]))
    assert counts.count.tolist() == [0, 0, 1, 1] and counts.total == 2
    counts.forget(torch.empty(0, dtype=torch.int64))
    for ids, error in [(torch.tensor([4]), IndexError), (torch.tensor([-1]), IndexError),
                       (torch.tensor([1.0]), TypeError)]:
        with pytest.raises(error):
            counts.forget(ids)
    assert counts.count.tolist() == [0, 0, 1, 1] and counts.total == 2
    with pytest.raises(ValueError, match="open"):
        StreamingCounts(None, buckets=8).forget(torch.tensor([1]))


@pytest.mark.parametrize("sampler", [
    lambda: InBatchSampler(C), lambda: InBatchSampler(C, counts=StreamingCounts(C, half_life=30)),
    lambda: UnigramSampler(StreamingCounts(C), 4),
    lambda: UnionSampler(InBatchSampler(C), UniformSampler(C, 3))
], ids=["in-batch", "streamed in-batch", "unigram", "union"])
def test_attaching_a_loss_attaches_the_counts_of_its_sampler(sampler):
    loss = xs.SampledSoftmaxLoss(D, C, sampler=sampler())
    ids = full_table().attach(loss)
    hidden = torch.randn(40, D)
    loss(hidden, torch.randint(1, C, (40,)))
    gone = ids.insert(torch.tensor([500]))[1]
    count = next(tensor for name, tensor in loss.named_buffers()
                 if name.split(".")[-1] in ("count", "counts"))
    total = next(tensor for name, tensor in loss.named_buffers() if name.split(".")[-1] == "total")
    assert count[gone].item() == 0 and count.sum() > 0
    assert half_lives(loss) or total == count.sum()
    loss(hidden, torch.randint(1, C, (40,)))


def half_lives(loss):
    return any(
        isinstance(module, StreamingCounts) and "half_life=30" in module.options
        for module in loss.modules())


def test_counts_on_another_device_than_the_ids_are_reset_there():
    counts = StreamingCounts(C).to("meta")
    assert full_table().attach(counts).insert(torch.tensor([500]))[1].tolist() == [1]


def test_a_reset_row_keeps_its_place_in_a_midx_index_until_the_next_update():
    torch.manual_seed(0)
    sampler = MidxSampler(C, D, 6, codewords=2, refresh_every=0, update_every=4)
    loss = xs.SampledSoftmaxLoss(D, C, sampler=sampler)
    ids = full_table().attach(loss)
    queries, rows = torch.randn(50, D), torch.arange(C).expand(50, C)
    loss(queries, torch.randint(1, C, (50,)))
    before = sampler.log_count(queries, rows)
    gone = ids.insert(torch.tensor([500]))[1]
    # expected counts follow the index, so they stay exact for what is drawn
    assert torch.equal(sampler.log_count(queries, rows), before)
    assert sampler.touched[gone].all()
    torch.testing.assert_close(before.exp().sum(1), torch.full([50], 6.0), rtol=1e-5, atol=1e-5)


def test_all_living_optimizers_of_a_table_are_reset():
    table = torch.nn.Parameter(torch.randn(C, D))
    optimizers = [xs.optim.RowAdam([table]), xs.optim.RowAdagrad([table])]
    ids = full_table().attach(table, init=begin)
    for optimizer in optimizers:
        table.grad = gradient(torch.arange(C), None).float()
        optimizer.step()
    gone = ids.insert(torch.tensor([500]))[1]
    assert not optimizers[0].state[table]["exp_avg"][gone].any(
    ) and not optimizers[1].state[table]["sum"][gone].any()
    del optimizers, optimizer
    ids.insert(torch.tensor([501]))
    assert (table[ids.find(torch.tensor([501]))] == BEGIN).all()


def test_the_row_of_a_removed_id_is_reset_when_another_id_takes_it():
    table = torch.nn.Parameter(torch.zeros(C, D))
    ids = xs.IdTable(C).attach(table, init=begin)
    ids(torch.tensor([5, 6]))
    assert ids.remove(torch.tensor([5])).tolist() == [1] and not table.any()
    assert ids(torch.tensor([7])).tolist() == [1]
    assert (table[1] == BEGIN).all() and not table[2:].any()
    # a row that no id had before keeps the table's first values
    assert ids(torch.tensor([8])).tolist() == [3] and not table[3].any()


def test_a_copied_id_table_has_nothing_attached():
    loss = xs.SampledSoftmaxLoss(D, C, sampler="uniform", num_samples=3)
    model = torch.nn.ModuleList([full_table().attach(loss), loss])
    twin = copy.deepcopy(model)
    before = [parameter.clone() for parameter in [*model.parameters(), *twin.parameters()]]
    twin[0](torch.tensor([500]))
    assert all(map(torch.equal, [*model.parameters(), *twin.parameters()], before))
    twin[0].attach(twin[1])(torch.tensor([501]))
    assert torch.equal(loss.linear.weight,
                       before[0]) and not torch.equal(twin[1].linear.weight, before[1])


def test_attach_refuses_unsuitable_modules():
    ids = xs.IdTable(C)
    tree = xs.BeamTreeLoss(D, xs.LabelTree.random(C, 2), num_candidates=2, num_noises=2)
    shared = InBatchSampler(C, counts=StreamingCounts(None, buckets=8))
    for table, error, message in [(torch.nn.Linear(D, C + 1), ValueError, f"{C} rows"),
                                  (torch.nn.Embedding(C, D,
                                                      padding_idx=3), ValueError, "padding_idx"),
                                  (tree, TypeError, "class table"),
                                  (torch.nn.Linear(D, C).weight, TypeError, "init"),
                                  (torch.randn(C, D), TypeError, "Tensor"),
                                  (StreamingCounts(C + 1), ValueError, "rows"),
                                  (StreamingCounts(None), ValueError, "None"),
                                  (xs.SampledSoftmaxLoss(D, C, sampler=shared), ValueError, "None"),
                                  (None, TypeError, "NoneType")]:
        with pytest.raises(error, match=message):
            ids.attach(torch.nn.Linear(D, C), table)
    with pytest.raises(TypeError, match="function"):
        ids.attach(torch.nn.Linear(D, C), init=0.5)
    with pytest.raises(ValueError, match="Fan in"):
        # kaiming_uniform_ does not support vectors: an error now, not at the first reset
        ids.attach(torch.nn.Linear(D, C, bias=True), init=torch.nn.init.kaiming_uniform_)
    ids.attach(torch.nn.Embedding(C, D, padding_idx=0))
    assert len(ids._attachments) == 1


def test_a_reset_that_failed_is_done_in_the_next_call():
    """An id must not inherit the values of another one because `init` raised an error."""
    fails = [False, True, False]  # at attach, in the first call, in the second

    def begin_or_fail(rows):
        if fails.pop(0):
            raise MemoryError("no memory")
        begin(rows)

    first, second = (torch.nn.Parameter(torch.ones(C, D)) for _ in range(2))
    ids = full_table().attach(first, init=begin).attach(second, init=begin_or_fail)
    with pytest.raises(MemoryError):
        ids(torch.tensor([500]))
    assert second.eq(1).all()
    rows, started = ids.insert(torch.tensor([500]))
    assert torch.equal(rows, started) and len(started) == 1
    for table in (first, second):
        assert table[started].eq(BEGIN).all() and table.eq(BEGIN).sum() == D
    assert ids.insert(torch.tensor([500]))[1].numel() == 0 and not fails


def test_a_row_with_a_failed_reset_that_gets_another_id_is_reset_once():
    fails = [False, True, False]
    starts = []

    def begin_or_fail(rows):
        starts.append(len(rows))
        if fails.pop(0):
            raise MemoryError("no memory")
        begin(rows)

    table = torch.nn.Parameter(torch.ones(C, D))
    ids = full_table(eviction="lru").attach(table, init=begin_or_fail)
    with pytest.raises(MemoryError):
        ids(torch.tensor([500]))
    ids.remove(torch.tensor([500]))
    rows, started = ids.insert(torch.tensor([501]))
    assert torch.equal(rows, started) and starts == [1, 1, 1]  # at attach, for 500, for 501


def test_a_table_resized_after_attach_is_refused_before_anything_changes():
    embedding = torch.nn.Embedding(C, D)
    ids = full_table().attach(embedding)
    embedding.weight = torch.nn.Parameter(torch.zeros(C + 1, D))
    before = [tensor.clone() for tensor in ids._state()]
    with pytest.raises(ValueError, match=f"{C} rows"):
        ids(torch.tensor([500]))
    assert all(map(torch.equal, ids._state(), before))


def replicated_or_split(rank, way):
    loss = xs.SampledSoftmaxLoss(D, C, sampler="uniform", num_samples=3)
    ids = xs.IdTable(C).attach(loss)
    getattr(xs.distributed, way)(loss)
    for call in (lambda: ids.attach(loss), lambda: ids(torch.tensor([5]))):
        with pytest.raises(ValueError, match="this process alone|rows"):
            call()
    return len(ids)


@pytest.mark.parametrize("way", ["replicate", "shard_classes"])
def test_tables_of_several_ranks_are_refused(way):
    assert ranks(2).run(replicated_or_split, way) == [0, 0]
