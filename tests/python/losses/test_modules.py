"""SampledSoftmaxLoss, LinearCrossEntropyLoss and replace_head in a training program: tables,
checkpoints, compilers."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xsoftmax as xs

from gradient_checks import seeded  # noqa: F401 (a fixture of every test)
from loss_checks import D, N, batch, exact, sampled


def roundtrip(loss):
    buffer = io.BytesIO()
    torch.save(loss, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def scripted(loss):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(loss), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.parametrize("make", [
    lambda linear: xs.SampledSoftmaxLoss.from_linear(linear, sampler="uniform", num_samples=8,
                                                     head_classes=2), lambda linear: xs.
    LinearCrossEntropyLoss.from_linear(linear, weight=torch.ones(N, dtype=torch.float64))
])
def test_from_linear(make):
    linear = nn.Linear(D, N, dtype=torch.float64)
    made = []
    original = nn.Linear.reset_parameters
    nn.Linear.reset_parameters = lambda self: (made.append(self.weight.device.type), original(self))
    try:
        loss = make(linear)
    finally:
        nn.Linear.reset_parameters = original
    assert loss.linear is linear and "cpu" not in made, "a second table was made"
    assert all(t.device.type == "cpu" for t in (*loss.parameters(), *loss.buffers()))
    input, target = batch(5)
    loss(input.double(), target).backward()
    assert linear.weight.grad is not None
    with pytest.raises(TypeError, match="expected an nn.Linear, got Conv1d"):
        xs.LinearCrossEntropyLoss.from_linear(nn.Conv1d(1, 1, 1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.ModuleDict({"head": nn.Linear(D, N)}))
        self.decoder = nn.Linear(D, N, bias=False)

    def forward(self, x):
        return self.decoder(self.body[0](x))


def test_replace_head():
    model, (input, target) = Model(), batch(5)
    want = F.cross_entropy(model(input), target)
    decoder = model.decoder
    loss = xs.replace_head(model, "decoder", xs.SampledSoftmaxLoss, sampler="uniform",
                           num_samples=4)
    assert loss.linear is decoder and isinstance(model.decoder, nn.Identity)
    torch.testing.assert_close(loss.eval()(model(input), target), want)
    nested = model.body[1]["head"]
    assert xs.replace_head(model, "body.1.head", xs.LinearCrossEntropyLoss).linear is nested
    assert isinstance(model.body[1]["head"], nn.Identity)


def test_restore_head():
    model, (input, _) = Model(), batch(5)
    keys, want, decoder = list(model.state_dict()), model(input), model.decoder
    loss = xs.replace_head(model, "decoder", xs.SampledSoftmaxLoss, sampler="uniform",
                           num_samples=4)
    other = xs.replace_head(model, "body.1.head", xs.LinearCrossEntropyLoss)
    with pytest.raises(
            ValueError, match=r"restore_head: expected one place where.*got "
            r"\['body.1.head', 'decoder'\] in Model"):
        xs.restore_head(model, loss)
    with pytest.raises(ValueError, match="restore_head: expected a head that was taken out of "
                       "'body.0'"):
        xs.restore_head(model, loss, "body.0")
    with pytest.raises(
            TypeError, match="restore_head: expected a loss with a Linear, as "
            "replace_head gives it, got Linear"):
        xs.restore_head(model, decoder)
    assert xs.restore_head(model, loss, "decoder") is model.decoder is decoder
    assert xs.restore_head(model, other) is model.body[1]["head"]
    assert list(model.state_dict()) == keys and torch.equal(model(input), want)


def test_restore_head_applies_pending_updates():
    model = Model()
    loss = xs.replace_head(model, "decoder", xs.SampledSoftmaxLoss, sampler="uniform",
                           num_samples=4)
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss(*batch(2)).backward()
        optimizer.step()
    xs.restore_head(model, loss)
    restored = model.decoder.weight.detach().clone()
    optimizer.flush()
    assert torch.equal(model.decoder.weight, restored)


def test_the_moved_layer_raises_if_it_is_used():
    model = Model()
    xs.replace_head(model, "decoder", xs.LinearCrossEntropyLoss)
    for name in ("weight", "bias", "in_features", "out_features"):
        with pytest.raises(
                AttributeError, match=f"MovedHead has no '{name}': xs.replace_head took "
                "the nn.Linear out.*xs.restore_head"):
            getattr(model.decoder, name)
    for twin in (copy.deepcopy(model.decoder), torch.jit.script(model.decoder),
                 roundtrip(model.decoder)):
        assert torch.equal(twin(torch.ones(2, D)), torch.ones(2, D))


@pytest.mark.parametrize(
    "loss_class, got", [(nn.CrossEntropyLoss, "CrossEntropyLoss"),
                        (xs.TwoTowerLoss, "TwoTowerLoss"),
                        (xs.HierarchicalSoftmaxLoss, "HierarchicalSoftmaxLoss"),
                        (xs.LinearCrossEntropyLoss(D, N), "an instance of LinearCrossEntropyLoss")])
def test_replace_head_refuses_other_losses_by_name(loss_class, got):
    model = Model()
    with pytest.raises(
            TypeError, match="replace_head: expected one of the classes "
            "SampledSoftmaxLoss, CaneLoss and LinearCrossEntropyLoss, "
            "followed by "
            f"its arguments, got {got}$"):
        xs.replace_head(model, "decoder", loss_class)
    assert isinstance(model.decoder, nn.Linear)


def test_log_prob_refuses_another_width():
    with pytest.raises(
            ValueError, match=r"LinearCrossEntropyLoss: expected input of shape \[\*, "
            rf"{D}\], got \[3, {D + 1}\]"):
        xs.LinearCrossEntropyLoss(D, N).log_prob(torch.randn(3, D + 1))


def test_a_unigram_sampler_needs_counts():
    with pytest.raises(
            ValueError,
            match=r'for "unigram", got none: use xs.samplers.UnigramSampler\(counts, num_samples\)'
    ):
        xs.SampledSoftmaxLoss(D, N, sampler="unigram", num_samples=4)


@pytest.mark.parametrize("name, kwargs, error, message", [
    ("lm_head", {}, AttributeError, r"Model has no layer 'lm_head'; its Linear layers: \['body.0', "
     r"'body.1.head', 'decoder'\]"),
    ("body.1", {}, TypeError, "expected an nn.Linear, got ModuleDict"),
    ("decoder", dict(reduction="max"), ValueError, "expected reduction to be"),
    ("decoder", dict(weight=torch.ones(3)), ValueError, "expected weight of shape")
])
def test_a_failed_replace_head_leaves_the_model_unchanged(name, kwargs, error, message):
    model = Model()
    before = dict(model.named_modules())
    with pytest.raises(error, match=message):
        xs.replace_head(model, name, xs.LinearCrossEntropyLoss, **kwargs)
    after = dict(model.named_modules())
    assert before.keys() == after.keys() and all(before[k] is after[k] for k in before)


@pytest.mark.parametrize("sparse", [True, False])
def test_tied_embedding(sparse):
    """One parameter whose gradient is the sum of the embedding's and the table's."""
    embedding = nn.Embedding(N, D, sparse=sparse)
    loss = sampled(sparse_grad=sparse)
    loss.linear.weight = embedding.weight
    tokens, target = torch.randint(N, (6,)), torch.randint(N, (6,))
    seed = torch.Generator().manual_seed
    loss(embedding(tokens), target, seed(1)).backward()
    grad = embedding.weight.grad
    assert grad is loss.linear.weight.grad and grad.is_sparse == sparse and grad.shape == (N, D)
    hidden = embedding(tokens).detach().requires_grad_()
    embedding.weight.grad = None
    loss(hidden, target, seed(1)).backward()
    want = embedding.weight.grad.to_dense().index_add(0, tokens, hidden.grad)
    torch.testing.assert_close(grad.to_dense(), want)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no "
                    "LinearCrossEntropyLoss")
@pytest.mark.parametrize("weight", [None, torch.linspace(0.1, 2, N)], ids=["plain", "weighted"])
def test_checkpoints_interchange_with_torch(weight):
    for ours in (sampled(bias=True, weight=weight,
                         head_classes=3), xs.LinearCrossEntropyLoss(D, N, bias=True,
                                                                    weight=weight)):
        theirs = nn.LinearCrossEntropyLoss(D, N, bias=True, weight=weight)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        other = copy.deepcopy(ours)
        with torch.no_grad():
            theirs.linear.weight.mul_(2)
        other.load_state_dict(theirs.state_dict(), strict=True)
        assert torch.equal(other.linear.weight, ours.linear.weight * 2)
        input, target = batch(5)
        torch.testing.assert_close(other.eval()(input, target), theirs(input, target))


def test_state_dict():
    """Tables of samplers and heads are rebuilt from arguments; only counts made by training are
    saved."""
    assert set(sampled(bias=True, head_classes=3,
                       sampler="log_uniform").state_dict()) == {"linear.weight", "linear.bias"}
    assert set(sampled(weight=torch.ones(N)).state_dict()) == {"linear.weight", "weight"}
    assert set(sampled(sampler="in_batch", num_samples=None).state_dict()) == {
        "linear.weight", "sampler.counts", "sampler.total"
    }


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss)), roundtrip, scripted],
    ids=["deepcopy", "pickle", "torch.save", "TorchScript"])
@pytest.mark.parametrize("kwargs", [
    dict(),
    dict(shared=False, sampler="log_uniform", bias=True),
    dict(head_classes=3, estimator="ranking"),
    dict(estimator="nce", log_z="learned"),
    dict(estimator="nce", log_z=2.0),
    dict(estimator="complementary_sum"),
    dict(sampler="in_batch", num_samples=None, weight=torch.linspace(0.1, 2, N), reduction="sum"),
    dict(sampler="log_uniform", head_classes=torch.tensor([5, 1]), label_smoothing=0.1)
], ids=str)
def test_copies_equal_the_original(kwargs, clone):
    """In train(), with the same draws and gradients, and in eval()."""
    loss = sampled(**kwargs)
    other, (input, target) = clone(loss), batch(2, 3, ignored=1)
    results = []
    for each in (loss, other):
        torch.manual_seed(7)
        value = each(input, target)
        value.backward()
        results.append((value.detach(), each.linear.weight.grad.to_dense()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    loss.eval(), other.eval()
    assert torch.equal(loss(input, target), other(input, target)) and torch.equal(
        loss.predict(input), other.predict(input))
    assert other.linear.weight is not loss.linear.weight


def test_moving_to_another_dtype():
    """The table is cast; ids and probabilities are not."""
    loss = sampled(sampler="log_uniform", head_classes=3).to(torch.bfloat16)
    assert loss.linear.weight.dtype == torch.bfloat16 and loss.head.dtype == torch.int64
    assert loss.sampler.probability.dtype == torch.float64
    input, target = batch(5)
    value = loss(input.bfloat16(), target)
    value.backward()
    assert value.dtype == torch.float32 and loss.linear.weight.grad.dtype == torch.bfloat16


def test_to_empty_keeps_what_no_state_dict_restores():
    loss = sampled(sampler=xs.samplers.UnigramSampler(torch.arange(1, N + 1), 8), num_samples=None,
                   head_classes=4)
    before = loss.sampler.log_count(torch.zeros(1, D), torch.arange(N))
    loss.to_empty(device="cpu")
    assert torch.equal(loss.sampler.log_count(torch.zeros(1, D), torch.arange(N)),
                       before) and loss.head.tolist() == [0, 1, 2, 3]
    lost = loss.to("meta")
    with pytest.raises(RuntimeError, match="its tables have no values on the meta device"):
        lost.to_empty(device="cpu")


def test_pending_updates_are_not_applied_to_a_loaded_table():
    """A checkpoint is loaded after more training, whose optimizer is dropped."""
    loss = sampled()
    optimizer = xs.optim.RowSGD(loss.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        loss(*batch(3)).backward()
        optimizer.step()
        if step == 1:
            best = copy.deepcopy(loss.state_dict())
    loss.load_state_dict(best)
    del optimizer
    assert torch.equal(loss.linear.weight, best["linear.weight"])


@pytest.mark.parametrize("sampler", ["midx", "lsh", "sphere", "rff"])
def test_samplers_that_follow_the_table_under_the_meta_device(sampler):
    """Only the table is on the meta device, as with device="meta"."""
    with torch.device("meta"):
        loss = xs.SampledSoftmaxLoss(8, 30, sampler=sampler, num_samples=5, head_classes=3)
    assert loss.linear.weight.is_meta
    loss.to_empty(device="cpu")
    torch.nn.init.normal_(loss.linear.weight)
    assert loss(torch.randn(4, 8), torch.randint(30, (4,))).isfinite()
    # The log counts of the sampler are constants for autograd.
    queries = torch.randn(4, 8, requires_grad=True)
    assert not loss.sampler.log_count(queries, torch.arange(30)).requires_grad
    assert not loss.sampler.sample(queries)[0].log_count.requires_grad


@pytest.mark.parametrize("kwargs", [
    dict(),
    dict(shared=False, head_classes=3, estimator="ranking"),
    dict(sampler="in_batch", num_samples=None)
], ids=str)
def test_compile(kwargs):
    """One graph, with the draws of eager mode."""
    loss, (input, target) = sampled(**kwargs), batch(5)
    results = []
    state = copy.deepcopy(loss.state_dict())
    torch._dynamo.reset()
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        loss.load_state_dict(state)
        loss.linear.weight.grad = None
        torch.manual_seed(7)
        call(input, target).backward()
        results.append(loss.linear.weight.grad.to_dense())
    torch.testing.assert_close(*results)
    assert results[0].ne(0).any()


def test_export():
    """The exact loss, for any batch size."""
    loss = sampled(bias=True).eval()
    Q = torch.export.Dim("Q")
    program = torch.export.export(loss, batch(5), dynamic_shapes=({0: Q}, {0: Q}))
    input, target = batch(9)
    torch.testing.assert_close(program.module()(input, target), exact(loss, input, target))


def test_autocast():
    """A bfloat16 hidden state and a float32 table: float32 loss and gradient, in train() and
    eval()."""
    model, loss, (input, target) = nn.Linear(D, D), sampled(bias=True), batch(5)
    for train in (True, False):
        loss.train(train)
        loss.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model(input)
            value = loss(hidden, target)
        value.backward()
        assert hidden.dtype == torch.bfloat16 and value.dtype == torch.float32
        assert loss.linear.weight.grad.dtype == torch.float32
        assert loss.linear.weight.grad.to_dense().ne(0).any()


@pytest.mark.parametrize("first", [True, False], ids=["embedding first", "loss first"])
@pytest.mark.parametrize("copied_by", [copy.deepcopy, roundtrip], ids=["deepcopy", "torch.save"])
def test_a_copy_of_a_tied_table_keeps_pending_updates(first, copied_by):
    """deepcopy copies an embedding before the loss, so before the loss can bring the table up to
    date."""
    embedding, loss = nn.Embedding(N, D, sparse=True), sampled()
    loss.linear.weight = embedding.weight
    model = nn.ModuleList([embedding, loss] if first else [loss, embedding])
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.05)
    for _ in range(5):
        input, target = batch(4)
        optimizer.zero_grad()
        loss(input, target).backward()
        optimizer.step()
    before = embedding.weight.detach().clone()
    copied = copied_by(model)
    got = copied[0 if first else 1].weight
    assert got is copied[1 if first else 0].linear.weight
    optimizer.flush()
    assert not torch.equal(before, embedding.weight)
    assert torch.equal(got, embedding.weight)
