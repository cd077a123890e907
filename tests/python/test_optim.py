"""Row-wise optimizers against torch.optim on dense equivalents, and as optimizers of torch."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import xsoftmax
from gradient_checks import DTYPES, TOLERANCE, opmath, random_grad, sparse, seeded  # noqa: F401 (seeded: a fixture of every test)
from xsoftmax.optim import RowAdagrad, RowAdam, RowSGD

ops = torch.ops.xsoftmax


def test_steps_raise_the_version():
    """Backward through a value that a step has overwritten must fail, not use the new value."""
    weight = torch.nn.Parameter(torch.randn(5, 3))
    loss = (weight * weight).sum()
    weight.grad = sparse(torch.tensor([1]), torch.ones(1, 3), 5)
    RowAdam([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- against torch.optim on dense equivalents ----

def pair(num_rows=12, width=5, dtype=torch.float32):
    table = torch.randn(num_rows, *([width] if width else [])).to(dtype)
    return torch.nn.Parameter(table.clone()), torch.nn.Parameter(table.clone())


def run_both(ours, theirs, steps, *, every_row=False, kind="duplicates", between=lambda i: None):
    """Gradients that do not depend on the parameters: sparse for ours, the same made dense for theirs."""
    (mine,), (other,) = ours.param_groups[0]["params"], theirs.param_groups[0]["params"]
    n, width = mine.shape[0], mine.shape[1] if mine.dim() == 2 else 0
    for i in range(steps):
        rows, values = random_grad(n, width, 6, mine.dtype, kind)
        if every_row:
            rows, values = torch.cat([rows, torch.arange(n)]), torch.cat([values, torch.randn(n, *values.shape[1:]).to(mine.dtype)])
        mine.grad = sparse(rows, values, n)
        other.grad = mine.grad.to_dense()
        ours.step()
        theirs.step()
        between(i)
    return mine.detach(), other.detach()


@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(momentum=0.9), dict(momentum=0.9, dampening=0.3),
                                     dict(momentum=0.9, nesterov=True), dict(momentum=1.0),
                                     dict(momentum=0.7, maximize=True), dict(maximize=True)], ids=str)
def test_sgd_equals_dense_sgd(options, dtype, width):
    mine, other = pair(width=width, dtype=dtype)
    ours, theirs = RowSGD([mine], lr=0.05, **options), torch.optim.SGD([other], lr=0.05, **options)
    got, expected = run_both(ours, theirs, 40)
    if options.get("momentum"):
        assert not torch.allclose(got, expected, rtol=1e-4)  # rows owe momentum, or flush() below would show nothing
    ours.flush()
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
    ours.flush()  # owes nothing any more
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
    got, expected = run_both(ours, theirs, 7)
    ours.flush()
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])


# 0.98 = 1 - lr * weight_decay: the ratio of the two is 1
@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.98, False), (0.9, True), (0.98, True)])
def test_sgd_decoupled_weight_decay(momentum, nesterov):
    mine, other = pair(dtype=torch.float64)
    lr, weight_decay = 0.1, 0.2
    ours = RowSGD([mine], lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    class DecoupledSGD(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            other.mul_(1 - lr * weight_decay)
            super().step()

    theirs = DecoupledSGD([other], lr=lr, momentum=momentum, nesterov=nesterov)
    got, expected = run_both(ours, theirs, 30)
    assert not torch.allclose(got, expected)
    ours.flush()
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("options", [dict(), dict(lr_decay=0.1), dict(initial_accumulator_value=0.5), dict(eps=0.1), dict(maximize=True)], ids=str)
def test_adagrad_equals_dense_adagrad(options, width):
    mine, other = pair(width=width)
    got, expected = run_both(RowAdagrad([mine], lr=0.1, **options), torch.optim.Adagrad([other], lr=0.1, **options), 20)
    torch.testing.assert_close(got, expected, **TOLERANCE[torch.float32])


def test_adagrad_weight_decay_on_touched_rows():
    mine, other = pair()
    theirs = torch.optim.Adagrad([other], lr=0.1, weight_decay=0.3)
    got, expected = run_both(RowAdagrad([mine], lr=0.1, weight_decay=0.3), theirs, 20, every_row=True)
    torch.testing.assert_close(got, expected, **TOLERANCE[torch.float32])
    before = got.clone()
    mine.grad = sparse(torch.tensor([2]), torch.ones(1, 5), 12)
    RowAdagrad([mine], lr=0.1, weight_decay=0.3).step()
    assert torch.equal((mine != before).any(1).nonzero().flatten(), torch.tensor([2]))


def test_adagrad_row_wise_formula_and_memory():
    mine, _ = pair()
    expected, total = mine.detach().clone(), torch.full((12,), 0.25)
    optimizer = RowAdagrad([mine], lr=0.1, initial_accumulator_value=0.25, row_wise=True)
    for _ in range(5):
        rows, values = random_grad(12, 5, 6)
        mine.grad = sparse(rows, values, 12)
        grad = mine.grad.to_dense()
        optimizer.step()
        total += grad.square().mean(1)
        expected -= 0.1 * grad / (total.sqrt() + 1e-10)[:, None]
    assert optimizer.state[mine]["sum"].shape == (12,)
    torch.testing.assert_close(mine.detach(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("options", [dict(), dict(betas=(0.5, 0.9)), dict(eps=0.1), dict(weight_decay=0.3)], ids=str)
def test_adam_equals_dense_adamw_where_every_row_is_touched(options, width, dtype):
    mine, other = pair(width=width, dtype=dtype)
    theirs = torch.optim.AdamW([other], lr=0.01, **{"weight_decay": 0, **options})
    got, expected = run_both(RowAdam([mine], lr=0.01, **options), theirs, 25, every_row=True)
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("options, every", [(dict(), 1), (dict(), 40), (dict(betas=(0.5, 0.9)), 3), (dict(betas=(0.95, 0.99)), 3),
                                            (dict(betas=(0.0, 0.9)), 3), (dict(maximize=True), 3)], ids=str)
def test_adam_follows_dense_adamw_after_a_flush(options, every, width, dtype):
    """Rows that often have no gradient, flushed at times: as dense AdamW on the same gradients, zero where there is none."""
    n = 12
    mine, other = pair(width=width, dtype=dtype)
    ours, theirs = RowAdam([mine], lr=0.01, **options), torch.optim.AdamW([other], lr=0.01, weight_decay=0, **options)
    for step in range(400):
        rows, values = random_grad(n, width, 1 + 3 // every, dtype)
        if step % every:
            rows, values = rows[:0], values[:0]
        mine.grad = sparse(rows, values, n)
        other.grad = mine.grad.to_dense()
        ours.step()
        theirs.step()
        if step in (7, 50, 399):
            ours.flush()
            moved = (other.detach() - pair(width=width, dtype=dtype)[1].detach()).abs().max()
            assert (mine - other).abs().max() < 1e-4 * moved
    before = mine.detach().clone()
    ours.flush()
    assert torch.equal(mine.detach(), before)
    assert ours.state[mine]["exp_avg"].dtype == opmath(dtype)


def test_lazy_weight_decay_is_exact_under_a_schedule():
    """One gradient step at the end: before it, only decay acts, so the row must be its start times the product of all factors."""
    mine = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    optimizer = RowAdam([mine], lr=0.3, weight_decay=0.5, betas=(0.0, 0.0), eps=0.0)
    factor = 1.0
    for i in range(20):
        optimizer.param_groups[0].update(lr=0.3 / (i + 1), weight_decay=0.5 + 0.1 * (i % 3))
        factor *= 1 - optimizer.param_groups[0]["lr"] * optimizer.param_groups[0]["weight_decay"]
        row = 1 if i == 19 else 0
        mine.grad = sparse(torch.tensor([row]), torch.ones(1, 2, dtype=torch.float64), 3)
        optimizer.step()
    assert torch.equal(mine[2].detach(), torch.ones(2, dtype=torch.float64))  # owes all of it
    torch.testing.assert_close(mine[1].detach(), torch.full((2,), factor - 0.3 / 20, dtype=torch.float64), rtol=1e-12, atol=0)
    optimizer.flush()
    torch.testing.assert_close(mine[2].detach(), torch.full((2,), factor, dtype=torch.float64), rtol=1e-12, atol=0)
    before = mine.detach().clone()
    optimizer.flush()
    assert torch.equal(mine.detach(), before)


# ---- what gradients may look like ----

@pytest.mark.parametrize("make", [lambda p: RowSGD(p, momentum=0.9, weight_decay=0.1), RowAdagrad, RowAdam])
def test_empty_and_zero_gradients_touch_nothing(make):
    mine, _ = pair()
    before = mine.detach().clone()
    optimizer = make([mine])
    mine.grad = sparse(torch.empty(0, dtype=torch.long), torch.empty(0, 5), 12)
    optimizer.step()
    mine.grad = sparse(torch.tensor([3, 3, 7]), torch.stack([torch.ones(5), -torch.ones(5), torch.zeros(5)]), 12)  # sums to zero
    optimizer.step()
    assert torch.equal(mine.detach(), before)
    empty = torch.nn.Parameter(torch.empty(0, 4))
    empty.grad = sparse(torch.empty(0, dtype=torch.long), torch.empty(0, 4), 0)
    make([empty]).step()


@pytest.mark.parametrize("make", [RowSGD, lambda p: RowSGD(p, momentum=0.9), RowAdagrad, lambda p: RowAdagrad(p, row_wise=True),
                                  RowAdam, lambda p: RowAdam(p, row_wise=True), lambda p: RowAdam(p, state_dtype=torch.bfloat16)])
@pytest.mark.parametrize("impl", ["kernel", "reference"])
def test_nan_gradients_propagate(make, impl):
    ops.set_impl(impl)
    mine, _ = pair()
    mine.grad = sparse(torch.tensor([2, 5]), torch.tensor([[float("nan")] * 5, [1.0] * 5]), 12)
    make([mine]).step()
    assert torch.equal(mine.detach().isnan().any(1).nonzero().flatten(), torch.tensor([2]))


OPTIMIZERS = {"sgd": lambda p: RowSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
              "adagrad": lambda p: RowAdagrad(p, lr=0.1, lr_decay=0.1),
              "adagrad-row": lambda p: RowAdagrad(p, lr=0.1, row_wise=True),
              "adam": lambda p: RowAdam(p, lr=0.1, weight_decay=0.01),
              "adam-row": lambda p: RowAdam(p, lr=0.1, weight_decay=0.01, row_wise=True, stochastic_rounding=True),
              "adagrad-bfloat16": lambda p: RowAdagrad(p, lr=0.1, state_dtype=torch.bfloat16),
              "adam-row-bfloat16": lambda p: RowAdam(p, lr=0.1, row_wise=True, stochastic_rounding=True, state_dtype=torch.bfloat16)}


class TiedModel(torch.nn.Module):
    """Embedding and output layer share a table; both sides have sparse gradients. The encoder's are dense."""

    def __init__(self, sparse_grad=True):
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 8, sparse=sparse_grad)
        self.encoder = torch.nn.Linear(8, 8)
        self.bias = torch.nn.Parameter(torch.zeros(30))
        self.sparse_grad = sparse_grad

    def forward(self, tokens, targets):
        hidden = self.encoder(self.embedding(tokens))
        candidates = torch.arange(0, 30, 3)
        scores = ops.candidate_scores(hidden, self.embedding.weight, self.bias, targets[:, None], candidates, self.sparse_grad)
        return F.cross_entropy(scores, torch.zeros(len(tokens), dtype=torch.long))


def train(model, optimizer, steps, seed=0, clip=None, scheduler=None):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens, targets = torch.randint(30, (2, 7), generator=generator)
        optimizer.zero_grad()
        model(tokens, targets).backward()
        if clip is not None:
            xsoftmax.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("make", [(lambda p: RowSGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
                                  (lambda p: RowAdagrad(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1))])
def test_tied_embedding_trains_as_dense(make, clip):
    """Both sides of a tied table, dense parameters beside it. These two have no lazy part, so training must agree throughout."""
    model = TiedModel()
    dense = TiedModel(sparse_grad=False)
    dense.load_state_dict(model.state_dict())
    got = train(model, make[0](model.parameters()), 10, clip=clip)
    assert model.embedding.weight.grad.is_sparse and model.bias.grad.is_sparse and not model.encoder.weight.grad.is_sparse
    theirs = make[1](dense.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        tokens, targets = torch.randint(30, (2, 7), generator=generator)
        theirs.zero_grad()
        dense(tokens, targets).backward()
        if clip is not None:
            assert torch.nn.utils.clip_grad_norm_(dense.parameters(), clip) > clip
        theirs.step()
    for mine, other in zip(got, dense.parameters()):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name):
    model = TiedModel()
    tokens, targets = torch.randint(30, (2, 7))
    before = model(tokens, targets).item()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(30):
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()
    assert model(tokens, targets).item() < 0.5 * before


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_torch_optimizers_take_our_gradients(make):
    """The sparse gradient of candidate_scores drives torch's optimizers to where its dense equivalent does."""
    tables = []
    for is_sparse in (True, False):
        torch.manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(20, 4))
        optimizer = make([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ids = torch.randint(20, (5, 2))
            ops.candidate_scores(torch.randn(5, 4), weight, None, ids, torch.randint(20, (6,)), True).square().sum().backward()
            assert weight.grad.is_sparse
            if not is_sparse:
                weight.grad = weight.grad.to_dense().to_sparse(1) if make is torch.optim.SparseAdam else weight.grad.to_dense()
            optimizer.step()
        tables.append(weight.detach())
    torch.testing.assert_close(*tables)


# ---- dense gradients ----

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ours, theirs, options", [
    (RowSGD, torch.optim.SGD, dict(lr=0.1)),
    (RowSGD, torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1)),
    (RowSGD, torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True)),
    (RowAdagrad, torch.optim.Adagrad, dict(lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.3, eps=1e-3)),
    (RowAdagrad, torch.optim.Adagrad, dict(lr=0.1, weight_decay=0.1, maximize=True)),
    (RowAdam, torch.optim.AdamW, dict(lr=0.1, weight_decay=0.1, maximize=True)),
    (RowAdam, torch.optim.AdamW, dict(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1))], ids=str)
def test_dense_gradients_equal_torch(ours, theirs, options, dtype):
    shapes = [(3, 4), (7,), (2, 3, 4), ()]
    mine = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    mine.append(torch.nn.Parameter(torch.randn(4, 6).to(dtype).t()))  # not contiguous
    other = [torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in mine]
    a, b = ours(mine, **options), theirs(other, **options)
    for i in range(6):
        for p, q in zip(mine, other):
            p.grad, q.grad = (None, None) if i == 2 else (torch.randn(p.shape).to(dtype),) * 2
        mine[0].grad = other[0].grad = None if i < 3 else torch.ones(3, 4, dtype=dtype)  # joins late
        a.step()
        b.step()
    tolerance = TOLERANCE[dtype] if dtype in (torch.float32, torch.float64) else dict(rtol=5e-2, atol=2e-2)
    for p, q in zip(mine, other):
        torch.testing.assert_close(p.detach(), q.detach(), **tolerance)


def test_dense_after_sparse_and_sparse_after_dense():
    """The first gradient decides the kind of state; the other kind of gradient then gives the same numbers."""
    rows, values = random_grad(12, 5, 6)
    first, second = pair()
    a, b = RowAdam([first], lr=0.1), RowAdam([second], lr=0.1)
    full = torch.randn(12, 5)
    for grads in ((sparse(rows, values, 12), sparse(rows, values, 12)), (full, sparse(torch.arange(12), full, 12))):
        first.grad, second.grad = grads
        a.step()
        b.step()
    assert "last_step" in a.state[first] and torch.equal(first, second)

    first, second = pair()
    a, b = RowAdam([first], lr=0.1), torch.optim.AdamW([second], lr=0.1, weight_decay=0)
    for grad in (full, sparse(rows, values, 12)):
        first.grad, second.grad = grad, grad.to_dense()
        a.step()
        b.step()
    assert "last_step" not in a.state[first]
    torch.testing.assert_close(first, second)


# ---- the API of torch.optim.Optimizer ----

def resumed(name, model, optimizer, how):
    if how == "deepcopy":
        return copy.deepcopy((model, optimizer))
    if how == "pickle":
        return pickle.loads(pickle.dumps((model, optimizer)))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    clone = copy.deepcopy(model)
    fresh = OPTIMIZERS[name](clone.parameters())
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    return clone, fresh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_bit_for_bit(name, how, dtype):
    model = TiedModel().to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 5)
    clone, fresh = resumed(name, model, optimizer, how)
    a, b = train(model, optimizer, 5, seed=1), train(clone, fresh, 5, seed=1)
    assert all(torch.equal(x, y) for x, y in zip(a, b))
    for p, q in zip(model.parameters(), clone.parameters()):
        for key, value in optimizer.state[p].items():
            other = fresh.state[q][key]
            assert torch.equal(value, other) and value.dtype == other.dtype
    optimizer.flush()
    fresh.flush()
    assert torch.equal(model.embedding.weight, clone.embedding.weight)


def test_loads_a_checkpoint_of_torch_adamw():
    first, second = pair()
    theirs = torch.optim.AdamW([second], lr=0.1, weight_decay=0.1)
    second.grad = torch.randn(12, 5)
    theirs.step()
    ours = RowAdam([first])
    first.data.copy_(second.data)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    first.grad = second.grad = torch.randn(12, 5)
    ours.step()
    theirs.step()
    torch.testing.assert_close(first, second)


def test_load_state_dict_hooks_see_tensors():
    mine, _ = pair()
    mine.grad = sparse(*random_grad(12, 5, 6), 12)
    optimizer = RowAdam([mine])
    optimizer.step()
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append(s["state"][0]["last_step"].dtype))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[mine]["last_step"].dtype))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [torch.int32, torch.int32]


def test_learning_rate_schedulers():
    """StepLR cuts the lr of the table and of the dense parameters alike: as training with the lr set by hand."""
    models = [TiedModel()]
    models.append(copy.deepcopy(models[0]))
    scheduled, by_hand = (RowAdam(m.parameters(), lr=0.1, weight_decay=0.1) for m in models)
    a = train(models[0], scheduled, 6, scheduler=torch.optim.lr_scheduler.StepLR(scheduled, 2, gamma=0.1))
    generator = torch.Generator().manual_seed(0)
    for i in range(6):
        by_hand.param_groups[0]["lr"] = 0.1 * 0.1 ** (i // 2)
        tokens, targets = torch.randint(30, (2, 7), generator=generator)
        by_hand.zero_grad()
        models[1](tokens, targets).backward()
        by_hand.step()
    for x, y in zip(a, models[1].parameters()):
        torch.testing.assert_close(x, y.detach())
    assert scheduled.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_param_groups_closures_and_none_gradients():
    model = TiedModel()
    groups = [{"params": [model.embedding.weight], "lr": 0.0}, {"params": [model.bias]}]
    optimizer = RowAdam(groups, lr=0.1)
    optimizer.add_param_group({"params": model.encoder.parameters(), "weight_decay": 0.5})
    table, bias = model.embedding.weight.detach().clone(), model.bias.detach().clone()
    tokens, targets = torch.randint(30, (2, 7))

    def closure():
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        model.encoder.bias.grad = None
        return loss

    encoder_bias = model.encoder.bias.detach().clone()
    loss = optimizer.step(closure)
    assert loss.requires_grad and loss.item() > 0
    assert torch.equal(model.embedding.weight, table) and torch.equal(model.encoder.bias, encoder_bias)
    assert not torch.equal(model.bias, bias)
    assert model.encoder.bias not in optimizer.state


@pytest.mark.parametrize("scale", [1024.0, float("inf")])
def test_grad_scaler_unscales_sparse_gradients(scale):
    """unscale_ works on our gradients; a step whose gradients overflowed is left out."""
    model = TiedModel()
    optimizer = RowAdam(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale if scale < float("inf") else 2.0)
    tokens, targets = torch.randint(30, (2, 7))
    model(tokens, targets).backward()
    expected = model.embedding.weight.grad.to_dense()
    before = model.embedding.weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale(model(tokens, targets)).backward()
    if scale == float("inf"):
        model.embedding.weight.grad._values()[0, 0] = scale
    scaler.unscale_(optimizer)
    if scale < float("inf"):
        torch.testing.assert_close(model.embedding.weight.grad.to_dense(), expected)
        xsoftmax.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.embedding.weight, before) == (scale == float("inf"))
    assert (scaler.get_scale() < 2.0) == (scale == float("inf"))


# ---- bad input ----

@pytest.mark.parametrize("make, options, message", [
    (RowSGD, dict(lr=-1.0), "lr as a finite number of at least 0, got -1"), (RowSGD, dict(momentum=-0.1), "momentum of at least 0, got -0.1"),
    (RowSGD, dict(weight_decay=-1), "weight_decay of at least 0, got -1"),
    (RowSGD, dict(nesterov=True), "momentum and no dampening"),
    (RowSGD, dict(nesterov=True, momentum=0.9, dampening=0.1), "momentum and no dampening"),
    (RowSGD, dict(lr=float("nan")), "lr as a finite number of at least 0, got nan"),
    (RowAdagrad, dict(lr_decay=-1), "lr_decay"), (RowAdagrad, dict(eps=-1), "eps"),
    (RowAdagrad, dict(initial_accumulator_value=-1), "initial_accumulator_value"),
    (RowAdam, dict(betas=(1.0, 0.9)), r"betas\[0\] in \[0, 1\), got 1"), (RowAdam, dict(betas=(0.9, -0.1)), r"betas\[1\]"),
    (RowAdam, dict(eps=-1e-8), "eps of at least 0")])
def test_bad_options(make, options, message):
    mine, _ = pair()
    with pytest.raises(ValueError, match=f"{make.__name__}: expected .*{message}"):
        make([mine], **options)
    optimizer = make([mine])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_that_stands_twice_is_named():
    embedding, loss = torch.nn.Embedding(9, 4, sparse=True), xsoftmax.SampledSoftmaxLoss(4, 9, sampler="uniform", num_samples=3)
    loss.linear.weight = embedding.weight
    twice = [*embedding.parameters(), *loss.parameters()]
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(ValueError, match=r"RowAdam: expected each parameter once, got that of shape "
                                                                                r"\[9, 4\] as number 0 and as number 1.*dict.fromkeys"):
        RowAdam(twice)
    optimizer = RowAdam(list(dict.fromkeys(twice)))
    loss(embedding(torch.arange(3)), torch.arange(3)).backward()
    optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == 1


def test_bad_types():
    mine, _ = pair()
    with pytest.raises(TypeError, match="RowAdam: expected beta1 as a number, got a tensor"):
        RowAdam([mine], betas=(torch.tensor(0.9), 0.9))
    with pytest.raises(TypeError, match="row_sgd_state: expected param of dtype .* got complex64"):
        RowSGD([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="RowAdam: expected lr \\* weight_decay below 1"):
        mine.grad = sparse(torch.tensor([0]), torch.ones(1, 5), 12)
        RowAdam([mine], lr=2.0, weight_decay=0.5).step()


@pytest.mark.parametrize("impl", ["kernel", "reference"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rows_out_of_range(make, impl):
    ops.set_impl(impl)
    for bad in (12, -1):
        mine, _ = pair()
        before = mine.detach().clone()
        mine.grad = torch.sparse_coo_tensor(torch.tensor([[3, 3]]), torch.ones(2, 5), (12, 5))
        mine.grad._indices()[0, 1] = bad
        with pytest.raises(IndexError, match=rf"row_\w+_: expected rows in \[0, 12\), got {bad} at \[1\]"):
            make([mine]).step()
        assert torch.equal(mine.detach(), before)


def test_bad_arguments_of_steps():
    """The operators themselves: each argument in turn, and nothing changes."""
    table, rows, values = torch.ones(4, 3), torch.tensor([1]), torch.ones(1, 3)
    state = ops.row_adam_state(table, True, "lr=0.1")
    ops.row_adam_step_([table], [rows], [values], state, ["lr=0.1"], [1])
    good = dict(params=[table], rows=[rows], values=[values], state=state, options=["lr=0.1"], counts=[1])
    before = [tensor.clone() for tensor in (table, *state)]

    def replaced(i, tensor):
        return [*state[:i], tensor, *state[i + 1:]]

    for error, message, change in [
            (ValueError, r"values with size 3 \(the width of param\)", dict(values=[torch.ones(1, 2)])),
            (ValueError, "the length of rows", dict(values=[torch.ones(2, 3)])),
            (TypeError, "values of param's dtype", dict(values=[values.double()])),
            (TypeError, "rows of dtype int64", dict(rows=[rows.int()])),
            (IndexError, r"rows in \[0, 4\), got 4", dict(rows=[torch.tensor([4])])),
            (TypeError, "param of dtype float32", dict(params=[table.to(torch.complex64)])),
            (ValueError, r"gradient of shape \[4, 3\], got shape \[3, 4\]", dict(rows=[None], values=[torch.ones(3, 4)])),
            (ValueError, "rows and values for each of 1 params, got 2 and 1", dict(rows=[rows, rows])),
            (ValueError, "a count for each of 1 options, 1 in all", dict(counts=[2])),
            (ValueError, "a count for each of 1 options, 1 in all", dict(counts=[1, 0])),
            (ValueError, "expected 5 tensors of state for param 0, got 4", dict(state=state[:-1])),
            (ValueError, "expected 0 tensors of state for param 1, got 1", dict(state=[*state, torch.ones(1)])),
            (ValueError, r"step in \[0, 2\^31 - 1\), got -1", dict(state=replaced(0, torch.tensor(-1)))),
            (TypeError, "step of dtype float32", dict(state=replaced(0, torch.tensor(1, dtype=torch.int32)))),
            (ValueError, "exp_avg with size 4", dict(state=replaced(1, torch.ones(5, 3)))),
            (TypeError, "exp_avg_sq of dtype float32", dict(state=replaced(2, torch.ones(4, 3).double()))),
            (TypeError, "last_step of dtype int32", dict(state=replaced(3, torch.ones(4)))),
            (TypeError, "owed of dtype float64", dict(state=replaced(4, torch.ones(10)))),
            (ValueError, "owed as the contiguous tensor", dict(state=replaced(4, torch.ones(7).double()))),
            (ValueError, "RowAdam: expected lr as a finite number", dict(options=["lr=-1"]))]:
        with pytest.raises(error, match=message):
            ops.row_adam_step_(*{**good, **change}.values())
        assert all(torch.equal(tensor, old) for tensor, old in zip((table, *state), before))
    with pytest.raises(ValueError, match="row_adagrad_step_: expected sum with size 4"):
        ops.row_adagrad_step_([table], [rows], [values], [torch.tensor(0), torch.zeros(5)], ["lr=0.1"], [1])
    with pytest.raises(ValueError, match="row_sgd_flush_: expected 4 tensors of state"):
        ops.row_sgd_flush_(table, [torch.tensor(0)])
    param = torch.nn.Parameter(table.clone())
    param.grad = torch.ones(4, 3).to_sparse()
    for call in (RowSGD([param]).step, lambda: xsoftmax.clip_grad_norm_([param], 1.0)):
        with pytest.raises(RuntimeError, match="2 sparse dimensions"):
            call()
