"""Row-wise optimizers work like any torch.optim.Optimizer.

Tied models, saving and resuming, schedulers, parameter groups, GradScaler, and errors.
"""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import xsoftmax
from gradient_checks import pair, random_grad, seeded, sparse  # noqa: F401 (seeded: an autouse fixture)
from xsoftmax.optim import RowAdagrad, RowAdam, RowSGD

ops = torch.ops.xsoftmax

OPTIMIZERS = {
    "sgd": lambda p: RowSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: RowAdagrad(p, lr=0.1, lr_decay=0.1),
    "adagrad-row": lambda p: RowAdagrad(p, lr=0.1, row_wise=True),
    "adam": lambda p: RowAdam(p, lr=0.1, weight_decay=0.01), "adam-row": lambda p: RowAdam(
        p, lr=0.1, weight_decay=0.01, row_wise=True, stochastic_rounding=True),
    "adagrad-bfloat16": lambda p: RowAdagrad(p, lr=0.1, state_dtype=torch.bfloat16),
    "adam-row-bfloat16": lambda p: RowAdam(p, lr=0.1, row_wise=True, stochastic_rounding=True,
                                           state_dtype=torch.bfloat16)
}


class TiedModel(torch.nn.Module):
    """A model whose embedding and output layer share a table, both with sparse gradients.

    The encoder's gradients are dense.
    """
    def __init__(self, sparse_grad=True):
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 8, sparse=sparse_grad)
        self.encoder = torch.nn.Linear(8, 8)
        self.bias = torch.nn.Parameter(torch.zeros(30))
        self.sparse_grad = sparse_grad

    def forward(self, tokens, targets):
        hidden = self.encoder(self.embedding(tokens))
        candidates = torch.arange(0, 30, 3)
        scores = ops.candidate_scores(hidden, self.embedding.weight, self.bias, targets[:, None],
                                      candidates, self.sparse_grad)
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
@pytest.mark.parametrize(
    "make", [(lambda p: RowSGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
             (lambda p: RowAdagrad(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1))])
def test_a_tied_embedding_trains_like_dense_parameters(make, clip):
    """A tied table and dense parameters train as with the dense optimizer of torch.

    Neither optimizer has pending updates, so they agree in every step.
    """
    model = TiedModel()
    dense = TiedModel(sparse_grad=False)
    dense.load_state_dict(model.state_dict())
    got = train(model, make[0](model.parameters()), 10, clip=clip)
    assert model.embedding.weight.grad.is_sparse and model.bias.grad.is_sparse
    assert not model.encoder.weight.grad.is_sparse
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
def test_resuming_gives_the_same_bits(name, how, dtype):
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


def test_a_checkpoint_of_torch_adamw_loads():
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
    optimizer.register_load_state_dict_pre_hook(
        lambda o, s: seen.append(s["state"][0]["last_step"].dtype))
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[mine]["last_step"].dtype))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [torch.int32, torch.int32]


def test_learning_rate_schedulers_change_all_parameters():
    """Training with StepLR equals training with the learning rate set by hand."""
    models = [TiedModel()]
    models.append(copy.deepcopy(models[0]))
    scheduled, by_hand = (RowAdam(m.parameters(), lr=0.1, weight_decay=0.1) for m in models)
    a = train(models[0], scheduled, 6,
              scheduler=torch.optim.lr_scheduler.StepLR(scheduled, 2, gamma=0.1))
    generator = torch.Generator().manual_seed(0)
    for i in range(6):
        by_hand.param_groups[0]["lr"] = 0.1 * 0.1**(i // 2)
        tokens, targets = torch.randint(30, (2, 7), generator=generator)
        by_hand.zero_grad()
        models[1](tokens, targets).backward()
        by_hand.step()
    for x, y in zip(a, models[1].parameters()):
        torch.testing.assert_close(x, y.detach())
    assert scheduled.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_param_groups_closures_and_missing_gradients_are_handled():
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
    assert torch.equal(model.embedding.weight, table) and torch.equal(model.encoder.bias,
                                                                      encoder_bias)
    assert not torch.equal(model.bias, bias)
    assert model.encoder.bias not in optimizer.state


@pytest.mark.parametrize("scale", [1024.0, float("inf")])
def test_grad_scaler_unscales_sparse_gradients(scale):
    """`unscale_` handles row-sparse gradients; a step whose gradients overflowed is skipped."""
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


@pytest.mark.parametrize(
    "make, options, message",
    [(RowSGD, dict(lr=-1.0), "lr as a finite number of at least 0, got -1"),
     (RowSGD, dict(momentum=-0.1), "momentum of at least 0, got -0.1"),
     (RowSGD, dict(weight_decay=-1), "weight_decay of at least 0, got -1"),
     (RowSGD, dict(nesterov=True), "momentum and no dampening"),
     (RowSGD, dict(nesterov=True, momentum=0.9, dampening=0.1), "momentum and no dampening"),
     (RowSGD, dict(lr=float("nan")), "lr as a finite number of at least 0, got nan"),
     (RowAdagrad, dict(lr_decay=-1), "lr_decay"), (RowAdagrad, dict(eps=-1), "eps"),
     (RowAdagrad, dict(initial_accumulator_value=-1), "initial_accumulator_value"),
     (RowAdam, dict(betas=(1.0, 0.9)), r"betas\[0\] in \[0, 1\), got 1"),
     (RowAdam, dict(betas=(0.9, -0.1)), r"betas\[1\]"),
     (RowAdam, dict(eps=-1e-8), "eps of at least 0")])
def test_wrong_options_are_refused(make, options, message):
    mine, _ = pair()
    with pytest.raises(ValueError, match=f"{make.__name__}: expected .*{message}"):
        make([mine], **options)
    optimizer = make([mine])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1


def test_a_repeated_parameter_is_refused_by_shape_and_position():
    embedding, loss = torch.nn.Embedding(9, 4, sparse=True), xsoftmax.SampledSoftmaxLoss(
        4, 9, sampler="uniform", num_samples=3)
    loss.linear.weight = embedding.weight
    twice = [*embedding.parameters(), *loss.parameters()]
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(
            ValueError, match=r"RowAdam: expected each parameter once, got that of shape "
            r"\[9, 4\] as number 0 and as number 1.*dict.fromkeys"):
        RowAdam(twice)
    optimizer = RowAdam(list(dict.fromkeys(twice)))
    loss(embedding(torch.arange(3)), torch.arange(3)).backward()
    optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == 1


def test_wrong_types_and_combinations_are_refused():
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
def test_rows_out_of_range_are_refused(make, impl):
    ops.set_impl(impl)
    for bad in (12, -1):
        mine, _ = pair()
        before = mine.detach().clone()
        mine.grad = torch.sparse_coo_tensor(torch.tensor([[3, 3]]), torch.ones(2, 5), (12, 5))
        mine.grad._indices()[0, 1] = bad
        with pytest.raises(IndexError, match=rf"row_\w+_: expected rows in \[0, 12\), got {bad} at "
                           r"\[1\]"):
            make([mine]).step()
        assert torch.equal(mine.detach(), before)


def test_wrong_arguments_of_step_operators_are_refused():
    """Each wrong argument of the step operators raises its error and changes nothing."""
    table, rows, values = torch.ones(4, 3), torch.tensor([1]), torch.ones(1, 3)
    state = ops.row_adam_state(table, True, "lr=0.1")
    ops.row_adam_step_([table], [rows], [values], state, ["lr=0.1"], [1])
    good = dict(params=[table], rows=[rows], values=[values], state=state, options=["lr=0.1"],
                counts=[1])
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
        (ValueError, r"gradient of shape \[4, 3\], got shape \[3, 4\]",
         dict(rows=[None], values=[torch.ones(3, 4)])),
        (ValueError, "rows and values for each of 1 params, got 2 and 1", dict(rows=[rows, rows])),
        (ValueError, "a count for each of 1 options, 1 in all", dict(counts=[2])),
        (ValueError, "a count for each of 1 options, 1 in all", dict(counts=[1, 0])),
        (ValueError, "expected 5 tensors of state for param 0, got 4", dict(state=state[:-1])),
        (ValueError, "expected 0 tensors of state for param 1, got 1",
         dict(state=[*state, torch.ones(1)])),
        (ValueError, r"step in \[0, 2\^31 - 1\), got -1",
         dict(state=replaced(0, torch.tensor(-1)))),
        (TypeError, "step of dtype float32",
         dict(state=replaced(0, torch.tensor(1, dtype=torch.int32)))),
        (ValueError, "exp_avg with size 4", dict(state=replaced(1, torch.ones(5, 3)))),
        (TypeError, "exp_avg_sq of dtype float32",
         dict(state=replaced(2,
                             torch.ones(4, 3).double()))),
        (TypeError, "last_step of dtype int32", dict(state=replaced(3, torch.ones(4)))),
        (TypeError, "pending of dtype float64", dict(state=replaced(4, torch.ones(10)))),
        (ValueError, "as the contiguous tensor that",
         dict(state=replaced(4,
                             torch.ones(7).double()))),
        (ValueError, "RowAdam: expected lr as a finite number", dict(options=["lr=-1"]))
    ]:
        with pytest.raises(error, match=message):
            ops.row_adam_step_(*{**good, **change}.values())
        assert all(torch.equal(tensor, old) for tensor, old in zip((table, *state), before))
    with pytest.raises(ValueError, match="row_adagrad_step_: expected sum with size 4"):
        ops.row_adagrad_step_([table], [rows], [values],
                              [torch.tensor(0), torch.zeros(5)], ["lr=0.1"], [1])
    with pytest.raises(ValueError, match="row_sgd_flush_: expected 4 tensors of state"):
        ops.row_sgd_flush_(table, [torch.tensor(0)])
    param = torch.nn.Parameter(table.clone())
    param.grad = torch.ones(4, 3).to_sparse()
    for call in (RowSGD([param]).step, lambda: xsoftmax.clip_grad_norm_([param], 1.0)):
        with pytest.raises(RuntimeError, match="2 sparse dimensions"):
            call()


def test_lazy_tables_can_be_wrapped_as_parameters():
    """torch.nn.Parameter and nn.Embedding.from_pretrained take the table of a lazy optimizer, and
    detach() returns a plain tensor."""
    table = torch.nn.Parameter(torch.randn(5, 3))
    RowAdam([table], lazy_gradient=True)
    assert type(table) is not torch.nn.Parameter and type(table.detach()) is torch.Tensor
    again = torch.nn.Parameter(table)
    embedding = torch.nn.Embedding.from_pretrained(table)
    for parameter in (again, embedding.weight):
        assert isinstance(parameter, torch.nn.Parameter) and parameter.grad is None
        assert parameter.data_ptr() == table.data_ptr()


def test_a_group_cannot_set_lazy_gradient():
    with pytest.raises(TypeError, match="expected lazy_gradient as an argument of the optimizer"):
        RowAdam([dict(params=[torch.nn.Parameter(torch.ones(2, 3))], lazy_gradient=True)])
