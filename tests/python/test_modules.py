"""SampledSoftmaxLoss, LinearCrossEntropyLoss and replace_head as a training program uses them."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xsoftmax as xs
from xsoftmax.samplers import InBatchSampler, LogUniformSampler, UniformSampler, UnigramSampler

D, N = 6, 40


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def sampled(**kwargs):
    return xs.SampledSoftmaxLoss(D, N, **(dict(sampler="uniform", num_samples=8) | kwargs))


def batch(*shape, ignored=0):
    input, target = torch.randn(*shape, D), torch.randint(N, shape)
    target.view(-1)[:ignored] = -100
    return input, target


def exact(loss, input, target, **kwargs):
    return F.cross_entropy(loss.linear(input).flatten(0, -2), target.flatten(), **kwargs)


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


# ---- the exact loss and prediction

@pytest.mark.parametrize("kwargs", [dict(), dict(bias=True), dict(reduction="sum"), dict(reduction="none"), dict(ignore_index=3),
                                    dict(label_smoothing=0.2), dict(weight=torch.linspace(0.1, 2, N))], ids=str)
def test_eval_is_cross_entropy(kwargs):
    options = {k: v for k, v in kwargs.items() if k != "bias"}
    for loss in (sampled(**kwargs).eval(), xs.LinearCrossEntropyLoss(D, N, **kwargs)):
        for shape in ((5,), (3, 4)):
            input, target = batch(*shape)
            target.view(-1)[1] = options.get("ignore_index", -100)
            got, want = loss(input, target), exact(loss, input, target, **options)
            torch.testing.assert_close(got, want.view(got.shape))
            assert got.shape == (target.shape if options.get("reduction") == "none" else ())


@pytest.mark.parametrize("loss", [sampled(bias=True), xs.LinearCrossEntropyLoss(D, N, bias=True)], ids=["sampled", "exact"])
def test_prediction(loss):
    for shape in ((), (5,), (3, 4), (0,)):
        input = torch.randn(*shape, D)
        want = F.log_softmax(loss.linear(input), -1)
        torch.testing.assert_close(loss.log_prob(input), want)
        values, ids = loss.topk(input, 3)
        torch.testing.assert_close(values, want.topk(3).values)
        assert torch.equal(ids, want.topk(3).indices)
        assert torch.equal(loss.predict(input), want.argmax(-1))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_shapes_of_a_batch(reduction):
    """[D] and a scalar target, [B, T, D]; one sample of classes whatever the shape, so the same losses as flattened."""
    loss = sampled(reduction=reduction, head_classes=5)
    for shape in ((), (6,), (2, 3)):
        input, target = batch(*shape)
        got = loss(input, target, torch.Generator().manual_seed(1))
        flat = loss(input.reshape(-1, D), target.reshape(-1), torch.Generator().manual_seed(1))
        torch.testing.assert_close(got, flat.view(got.shape))
        assert got.shape == (target.shape if reduction == "none" else ())
        got.sum().backward()


# ---- sampling

@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("estimator, remove", [("sampled_softmax", True), ("sampled_softmax", False), ("ranking", True), ("nce", True),
                                               ("negative_sampling", True), ("one_vs_each", True), ("blackout", True), ("importance", True),
                                               ("cane", True), ("cane_log_of_mean", True)])
def test_is_the_functional_op_on_the_samplers_draws(estimator, remove, shared):
    """Distinct (shared) and independent (private, or noise) draws, with a head, an ignored target and one in the head."""
    distinct = shared and not estimator.startswith("cane")
    loss = sampled(bias=True, estimator=estimator, remove_accidental_hits=remove, shared=shared, head_classes=4,
                   sampler=xs.samplers.LogUniformSampler(N, distinct=distinct))
    input, target = batch(6, ignored=1)
    target[1] = 2
    got = loss(input, target, torch.Generator().manual_seed(5))
    drawn = loss.sampler.sample(input, 8, shared, target.clamp_min(0), torch.Generator().manual_seed(5))
    assert drawn.ids.min() >= 4 and drawn.distinct == distinct
    assert sampled(estimator=estimator, head_classes=4).shared != estimator.startswith("cane")  # whose draws are noise
    target_count = drawn.target_log_count
    if estimator in ("ranking", "nce", "blackout", "cane", "cane_log_of_mean"):
        target_count = target_count.masked_fill(target.clamp_min(0) < 4, 0.0)  # a class of the head is always there
    head, zeros = torch.arange(4), torch.zeros(4)
    sets = ((None, torch.cat([head, drawn.ids]), None, torch.cat([zeros, drawn.log_count])) if shared else
            (drawn.ids, head, drawn.log_count, zeros))
    want = torch.ops.xsoftmax.sampled_softmax_loss(input, loss.linear.weight, loss.linear.bias, target, *sets, target_count, None,
                                                   estimator, remove, 0, 12 if distinct else 4)
    assert torch.equal(got, want) and got.isfinite()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("log_z", [2.5, "learned"])
def test_nce_with_a_log_z(log_z, shared, reduction):
    """All scores are lowered by it; a learned one has the gradient of that."""
    loss = sampled(bias=True, estimator="nce", shared=shared, head_classes=4, log_z=log_z, reduction=reduction, weight=torch.linspace(0.5, 2, N))
    value = torch.tensor(2.5, requires_grad=True)
    if log_z == "learned":
        torch.nn.init.constant_(loss.log_z, 2.5)
    else:
        assert loss.log_z is None
    input, target = batch(6, ignored=1)
    got = loss(input, target, torch.Generator().manual_seed(5))
    drawn = loss.candidates(input, target.clamp_min(0), torch.Generator().manual_seed(5))
    own = target.clamp_min(0)[:, None] if shared else torch.cat([target.clamp_min(0)[:, None], drawn.private_ids], 1)
    scores = torch.ops.xsoftmax.candidate_scores(input, loss.linear.weight, loss.linear.bias, own, drawn.shared_ids) - value
    parts = torch.ops.xsoftmax.candidate_loss(scores, target.clamp_min(0), drawn.private_ids, drawn.shared_ids, drawn.private_log_count,
                                              drawn.shared_log_count, drawn.target_log_count, "nce", True, drawn.fixed_private,
                                              drawn.fixed_shared)
    share = torch.where(target >= 0, loss.weight[target.clamp_min(0)], 0.0)
    want = {"none": parts * share, "sum": (parts * share).sum(), "mean": (parts * share).sum() / share.sum()}[reduction]
    torch.testing.assert_close(got, want)
    got.sum().backward()
    if log_z == "learned":
        torch.testing.assert_close(loss.log_z.grad, torch.autograd.grad(want.sum(), value)[0])
    other = sampled(bias=True)
    assert other.load_state_dict({k: v for k, v in loss.state_dict().items() if k != "weight"}).unexpected_keys == []


def test_a_learned_log_z_finds_the_normaliser():
    """Of a table that stays as it is: the optimum of NCE over log Z alone."""
    torch.manual_seed(0)
    loss = sampled(estimator="nce", shared=False, num_samples=30, log_z="learned")
    input = torch.randn(4000, D)
    with torch.no_grad():
        logits = loss.linear(input)
        logits += 3.0 - logits.logsumexp(1, keepdim=True)  # the same normaliser for all
        target = torch.multinomial(logits.exp(), 1).squeeze(1)
        ids = torch.cat([target[:, None], torch.randint(N, (4000, 30))], 1)
    optimizer, count = torch.optim.Adam([loss.log_z], lr=0.1), torch.full((4000, 30), math.log(30 / N))
    for _ in range(150):
        optimizer.zero_grad()
        scores = logits.gather(1, ids) - loss.log_z
        torch.ops.xsoftmax.candidate_loss(scores, target, ids[:, 1:].contiguous(), None, count, None, count[:, 0].contiguous(),
                                          "nce").mean().backward()
        optimizer.step()
    assert loss.log_z.item() == pytest.approx(3.0, abs=0.05)


def test_complementary_sum_draws_with_replacement():
    """So many as one likes."""
    loss = sampled(estimator="complementary_sum", num_samples=3 * N, sampler="uniform")
    assert loss(*batch(3)).isfinite()


def test_complementary_sum_keeps_its_sampler_once():
    """The state dict names its tables once, and brings them back, an index that is no older than it was among them."""
    make = lambda: sampled(estimator="complementary_sum", num_samples=3, sampler="midx")  # noqa: E731
    one, other = make(), make()
    one(torch.randn(5, D), torch.randint(N, (5,)))
    state = one.state_dict()
    assert "sampler.cell" in state and not any(key.startswith("_complement") for key in state)
    assert other.load_state_dict(state) == ([], []) and other.sampler.step == 1
    z, ids = torch.randn(4, D), torch.arange(N)
    assert torch.equal(other.sampler.log_prob(z, ids), one.sampler.log_prob(z, ids))
    whole = torch.nn.Sequential(make())
    whole.load_state_dict({"0." + key: value for key, value in state.items()})
    assert torch.equal(whole[0].sampler.log_prob(z, ids), one.sampler.log_prob(z, ids))


def test_complementary_sum():
    """Draws from all classes but the target; the sum over those is estimated without bias (Botev et al., 2017)."""
    loss = sampled(bias=True, estimator="complementary_sum", num_samples=3, reduction="none",
                   sampler=xs.samplers.UnigramSampler(torch.arange(1, N + 1)))
    assert not loss.shared
    input, target = batch(1)
    many, targets = input.detach().expand(20_000, D), target.expand(20_000)
    drawn = loss.candidates(many, targets)
    assert (drawn.private_ids != target).all() and drawn.private_ids.shape == (20_000, 3)
    torch.manual_seed(1)
    drawn = loss.candidates(many, targets)
    torch.manual_seed(1)
    got = loss(many, targets)
    scores = loss.linear(input)[0]
    weights = (scores[drawn.private_ids] - drawn.private_log_count).exp().sum(1)
    torch.testing.assert_close(got, (scores[target].exp() + weights).log() - scores[target])
    rest = scores.exp().sum() - scores[target].exp()
    assert abs(weights.mean() - rest) < 4.5 * weights.std() / 20_000**0.5
    got.sum().backward()
    assert loss.linear.weight.grad.is_sparse


@pytest.mark.parametrize("estimator", ["sampled_softmax", "ranking"])
def test_head_of_all_but_one_class_is_exact(estimator):
    """The last class is drawn surely, so nothing is left to chance."""
    loss = sampled(head_classes=N - 1, num_samples=1, estimator=estimator, bias=True)
    input, target = batch(20)
    torch.testing.assert_close(loss(input, target), exact(loss, input, target))


def test_head_classes_as_ids():
    """Any ids, any order; the sampler, given as a module, leaves them out; the given module is not changed."""
    ids = torch.tensor([30, 2, 17])
    given = UnigramSampler(torch.arange(1, N + 1).float())
    loss = sampled(sampler=given, head_classes=ids, num_samples=N - 3)
    assert torch.equal(loss.head, ids.sort().values)
    assert loss.sampler.log_prob(torch.zeros(1, D), ids).isneginf().all() and given.log_prob(torch.zeros(1, D), ids).isfinite().all()
    input, target = batch(20)
    torch.testing.assert_close(loss(input, target), exact(loss, input, target))  # head and all the others: every class
    by_number, by_ids = sampled(head_classes=3), sampled(head_classes=torch.arange(3))
    by_ids.load_state_dict(by_number.state_dict())
    draws = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(by_number(input, target, draws[0]), by_ids(input, target, draws[1]))


@pytest.mark.parametrize("name, kind", [("uniform", UniformSampler), ("log_uniform", LogUniformSampler), ("in_batch", InBatchSampler)])
def test_samplers_by_name(name, kind):
    loss = sampled(sampler=name)
    assert type(loss.sampler) is kind and loss.sampler.num_classes == N
    input, target = batch(6)
    module = sampled(sampler=kind(N))
    module.load_state_dict(loss.state_dict())
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(loss(input, target, seeds[0]), module(input, target, seeds[1]))


def test_in_batch():
    """The candidates are the targets that count, at their streamed frequencies; a repeated one stands repeatedly."""
    loss = sampled(sampler="in_batch", reduction="none")
    input = torch.randn(5, D)
    target = torch.tensor([3, 7, 7, -100, 0])
    got = loss(input, target)
    assert loss.sampler.total == 4 and loss.sampler.counts[[0, 3, 7]].tolist() == [1, 1, 2]
    scores = input @ loss.linear.weight.T
    p = torch.tensor([1, 1, 2]) / 4
    for q, y in ((0, 3), (1, 7), (4, 0)):
        others = [c for c in (3, 7, 7, 0) if c != y]
        share = {0: p[0], 3: p[1], 7: p[2]}
        sum_others = sum(scores[q, c].exp() / share[c] for c in others) * (1 - share[y]) / len(others)
        torch.testing.assert_close(got[q], (scores[q, y].exp() + sum_others).log() - scores[q, y])
    assert got[3] == 0
    loss.eval()(input, target)
    assert loss.sampler.total == 4
    for wrong in (dict(shared=False), dict(remove_accidental_hits=False)):
        with pytest.raises(ValueError, match="expected shared=True and remove_accidental_hits=True for InBatchSampler"):
            sampled(sampler="in_batch", **wrong)
    with pytest.raises(TypeError, match="head"):
        sampled(sampler=InBatchSampler(N), head_classes=3)


def test_draws_are_reproducible():
    loss, (input, target) = sampled(), batch(6)
    torch.manual_seed(3)
    first, second = loss(input, target), loss(input, target)
    torch.manual_seed(3)
    assert torch.equal(loss(input, target), first) and not torch.equal(first, second)
    assert torch.equal(loss(input, target, torch.Generator().manual_seed(3)), first)


class Elsewhere:
    """What the device check looks at; there is no generator of another device here."""
    device = torch.device("cuda")


def test_generator_on_another_device():
    with pytest.raises(ValueError, match="expected a generator on input's device cpu, got one on cuda"):
        sampled()(*batch(6), Elsewhere())


def test_sparse_gradient():
    """Rows of the targets and the draws only, or dense: the same numbers."""
    grads = []
    input, target = batch(6)
    for sparse_grad in (True, False):
        torch.manual_seed(1)
        loss = sampled(sparse_grad=sparse_grad, bias=True)
        loss(input, target, torch.Generator().manual_seed(2)).backward()
        assert loss.linear.weight.grad.is_sparse == sparse_grad and loss.linear.bias.grad.is_sparse == sparse_grad
        grads.append([loss.linear.weight.grad.to_dense(), loss.linear.bias.grad.to_dense()])
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


# ---- sharing parameters

@pytest.mark.parametrize("make", [lambda l: xs.SampledSoftmaxLoss.from_linear(l, sampler="uniform", num_samples=8, head_classes=2),
                                  lambda l: xs.LinearCrossEntropyLoss.from_linear(l, weight=torch.ones(N, dtype=torch.float64))])
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
    loss = xs.replace_head(model, "decoder", xs.SampledSoftmaxLoss, sampler="uniform", num_samples=4)
    assert loss.linear is decoder and type(model.decoder) is nn.Identity
    torch.testing.assert_close(loss.eval()(model(input), target), want)
    nested = model.body[1]["head"]
    assert xs.replace_head(model, "body.1.head", xs.LinearCrossEntropyLoss).linear is nested
    assert type(model.body[1]["head"]) is nn.Identity


@pytest.mark.parametrize("name, kwargs, error, message", [
    ("lm_head", {}, AttributeError, r"Model has no layer 'lm_head'; its Linear layers: \['body.0', 'body.1.head', 'decoder'\]"),
    ("body.1", {}, TypeError, "expected an nn.Linear, got ModuleDict"),
    ("decoder", dict(reduction="max"), ValueError, "expected reduction to be"),
    ("decoder", dict(weight=torch.ones(3)), ValueError, "expected weight of shape")])
def test_replace_head_leaves_the_model_whole_on_error(name, kwargs, error, message):
    model = Model()
    before = dict(model.named_modules())
    with pytest.raises(error, match=message):
        xs.replace_head(model, name, xs.LinearCrossEntropyLoss, **kwargs)
    after = dict(model.named_modules())
    assert before.keys() == after.keys() and all(before[k] is after[k] for k in before)


@pytest.mark.parametrize("sparse", [True, False])
def test_tied_embedding(sparse):
    """One parameter, one gradient: that of the embedding plus that of the table."""
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


# ---- state

@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no LinearCrossEntropyLoss")
@pytest.mark.parametrize("weight", [None, torch.linspace(0.1, 2, N)], ids=["plain", "weighted"])
def test_checkpoints_interchange_with_torch(weight):
    for ours in (sampled(bias=True, weight=weight, head_classes=3), xs.LinearCrossEntropyLoss(D, N, bias=True, weight=weight)):
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
    """Tables of samplers and heads follow from the arguments; only counts that training made are kept."""
    assert set(sampled(bias=True, head_classes=3, sampler="log_uniform").state_dict()) == {"linear.weight", "linear.bias"}
    assert set(sampled(weight=torch.ones(N)).state_dict()) == {"linear.weight", "weight"}
    assert set(sampled(sampler="in_batch").state_dict()) == {"linear.weight", "sampler.counts", "sampler.total"}


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss)), roundtrip, scripted],
                         ids=["deepcopy", "pickle", "torch.save", "TorchScript"])
@pytest.mark.parametrize("kwargs", [dict(), dict(shared=False, sampler="log_uniform", bias=True), dict(head_classes=3, estimator="ranking"),
                                    dict(estimator="nce", log_z="learned"), dict(estimator="nce", log_z=2.0), dict(estimator="complementary_sum"),
                                    dict(sampler="in_batch", weight=torch.linspace(0.1, 2, N), reduction="sum"),
                                    dict(sampler="log_uniform", head_classes=torch.tensor([5, 1]), label_smoothing=0.1)], ids=str)
def test_copies_equal_the_original(kwargs, clone):
    """In train(), draw for draw, with gradients, and in eval()."""
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
    assert torch.equal(loss(input, target), other(input, target)) and torch.equal(loss.predict(input), other.predict(input))
    assert other.linear.weight is not loss.linear.weight


def test_moving_to_another_dtype():
    """The table is cast; ids and probabilities stay what they are."""
    loss = sampled(sampler="log_uniform", head_classes=3).to(torch.bfloat16)
    assert loss.linear.weight.dtype == torch.bfloat16 and loss.head.dtype == torch.int64
    assert loss.sampler.probability.dtype == torch.float64
    input, target = batch(5)
    value = loss(input.bfloat16(), target)
    value.backward()
    assert value.dtype == torch.float32 and loss.linear.weight.grad.dtype == torch.bfloat16


# ---- compilers, autocast, training

@pytest.mark.parametrize("kwargs", [dict(), dict(shared=False, head_classes=3, estimator="ranking"), dict(sampler="in_batch")], ids=str)
def test_compile(kwargs):
    """In one graph; with the draws of eager mode."""
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
    """The exact loss, over any batch."""
    loss = sampled(bias=True).eval()
    Q = torch.export.Dim("Q")
    program = torch.export.export(loss, batch(5), dynamic_shapes=({0: Q}, {0: Q}))
    input, target = batch(9)
    torch.testing.assert_close(program.module()(input, target), exact(loss, input, target))


def test_autocast():
    """A bfloat16 hidden state, a float32 table with a float32 gradient, a float32 loss; train() and eval()."""
    model, loss, (input, target) = nn.Linear(D, D), sampled(bias=True), batch(5)
    for train in (True, False):
        loss.train(train)
        loss.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model(input)
            value = loss(hidden, target)
        value.backward()
        assert hidden.dtype == torch.bfloat16 and value.dtype == torch.float32 and loss.linear.weight.grad.dtype == torch.float32
        assert loss.linear.weight.grad.to_dense().ne(0).any()


OPTIMIZERS = {"RowAdam": lambda p: xs.optim.RowAdam(p, lr=0.05), "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.05),
              "SGD": lambda p: torch.optim.SGD(p, lr=2.0), "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kwargs", [dict(), dict(shared=False), dict(sampler="in_batch"), dict(head_classes=4, sampler="log_uniform")],
                         ids=str)
def test_training_reduces_the_exact_loss(optimizer, kwargs):
    loss, centers = sampled(bias=True, **kwargs), torch.randn(N, D)
    optimizer = OPTIMIZERS[optimizer](list(loss.parameters()))
    target = torch.arange(N).repeat(4)
    input = centers[target] + 0.1 * torch.randn(len(target), D)
    before = exact(loss, input, target).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss(input, target).backward()
        optimizer.step()
    assert loss.eval()(input, target) < 0.5 * before


# ---- edges

@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("estimator", ["sampled_softmax", "ranking"])
def test_no_samples(estimator, shared):
    """Nothing to tell the target from: loss and gradient 0. With a head, the loss over the head."""
    input, target = batch(5)
    for head in (0, 4):
        loss = sampled(num_samples=0, estimator=estimator, shared=shared, head_classes=head, reduction="none")
        value = loss(input, target % 4)
        value.sum().backward()
        want = F.cross_entropy(loss.linear(input)[:, :4], target % 4, reduction="none") if head else torch.zeros(5)
        torch.testing.assert_close(value, want)
        assert loss.linear.weight.grad.to_dense().isfinite().all()


def test_one_class_and_one_feature():
    for d, n in ((1, 1), (1, N), (D, 1), (0, N)):
        loss = xs.SampledSoftmaxLoss(d, n, sampler="uniform", num_samples=1, bias=True)
        input, target = torch.randn(5, d), torch.randint(n, (5,))
        loss(input, target).backward()
        assert loss.linear.weight.grad.to_dense().isfinite().all()
        torch.testing.assert_close(loss.eval()(input, target), exact(loss, input, target))


@pytest.mark.parametrize("shared", [True, False])
def test_empty_batch_and_all_ignored(shared):
    """As F.cross_entropy: the sum is 0, the mean NaN."""
    for input, target in (batch(0), batch(3, ignored=3)):
        for reduction in ("sum", "mean"):
            loss = sampled(reduction=reduction, shared=shared)
            value = loss(input, target)
            value.backward()
            torch.testing.assert_close(value, exact(loss, input, target, reduction=reduction), equal_nan=True)
        assert sampled(reduction="none", shared=shared)(input, target).eq(0).all()


def test_extra_repr():
    text = repr(sampled(head_classes=3, estimator="ranking", reduction="sum", ignore_index=0, label_smoothing=0.1))
    for part in ("num_classes=40", "num_samples=8", "head_classes=3", "estimator='ranking'", "reduction='sum'", "ignore_index=0",
                 "label_smoothing=0.1"):
        assert part in text


@pytest.mark.parametrize("kwargs, error, message", [
    (dict(num_samples=-1), ValueError, "expected num_samples of at least 0, got -1"),
    (dict(num_samples=N - 2, head_classes=3), ValueError, f"UniformSampler: expected num_samples of at most {N - 3}, .*got {N - 2}"),
    (dict(num_samples=3, sampler=xs.samplers.UnigramSampler(torch.tensor([1.0, 1] + [0] * (N - 2)))), ValueError, "at most 2, .*got 3"),
    (dict(sampler=xs.samplers.UnionSampler((xs.samplers.LogUniformSampler(N), N - 2), (xs.samplers.MidxSampler(N, D), 4)), head_classes=3),
     ValueError, f"StaticSampler: expected num_samples of at most {N - 3}, .*got {N - 2}"),
    (dict(estimator="nce2"), ValueError, r"expected estimator to be one of \['sampled_softmax', 'ranking', .*got 'nce2'"),
    (dict(log_z=1.0), ValueError, "expected log_z=0 with estimator='sampled_softmax', which knows no log Z, got 1.0"),
    (dict(log_z="free", estimator="nce"), ValueError, 'expected log_z as a finite number or "learned", got \'free\''),
    (dict(log_z=float("inf"), estimator="nce"), ValueError, "expected log_z as a finite number"),
    (dict(estimator="cane", sampler="uniform"), ValueError, "expected candidates, the head or distinct draws, .* got 0 classes, 0 distinct"),
    (dict(estimator="cane", shared=True, head_classes=3), ValueError, "independent draws as noise with estimator='cane', got 3 classes, 8 distinct"),
    (dict(shared=True, sampler=xs.samplers.UnionSampler((UniformSampler(N), 4), (xs.samplers.MidxSampler(N, D), 4))), ValueError,
     "expected shared=None or False beside a UnionSampler"),
    (dict(estimator="nce", label_smoothing=0.1), ValueError, "expected label_smoothing=0 with estimator='nce', got 0.1"),
    (dict(estimator="complementary_sum", shared=True), ValueError, "expected private draws, head_classes=0 and label_smoothing=0"),
    (dict(estimator="complementary_sum", head_classes=3), ValueError, "expected private draws, head_classes=0 and label_smoothing=0"),
    (dict(reduction="max"), ValueError, "expected reduction to be \"mean\", \"sum\" or \"none\", got 'max'"),
    (dict(label_smoothing=1.1), ValueError, r"expected label_smoothing in \[0, 1\], got 1.1"),
    (dict(weight=torch.ones(N), label_smoothing=0.1), ValueError, "expected label_smoothing=0 beside class weights"),
    (dict(weight=torch.ones(N - 1)), ValueError, r"expected weight of shape \(40,\), got \(39,\)"),
    (dict(sampler="zipf"), ValueError, "make_sampler: expected"),
    (dict(sampler="unigram"), ValueError, "expected counts"),
    (dict(sampler=None), TypeError, "expected sampler to be a Sampler or a name, got NoneType"),
    (dict(sampler=UniformSampler(N - 1)), ValueError, "expected a sampler of 40 classes, got one of 39"),
    (dict(num_samples="3"), TypeError, "expected num_samples of type int, got str"),
    (dict(weight=torch.ones(N, dtype=torch.int64)), TypeError, "expected weight of a floating dtype, got torch.int64"),
    (dict(head_classes=[1, 2]), TypeError, "expected head_classes to be a number or a 1-D int64 tensor of ids, got list"),
    (dict(head_classes=None), TypeError, "got NoneType"),
    (dict(sampler="in_batch", head_classes=3), TypeError, "expected head_classes=0 with sampler=\"in_batch\""),
    (dict(head_classes=-1), ValueError, r"expected head_classes in \[0, 40\], got -1"),
    (dict(head_classes=N + 1), ValueError, r"expected head_classes in \[0, 40\], got 41"),
    (dict(head_classes=torch.tensor([1.0])), TypeError, "expected head_classes to be a number or a 1-D int64 tensor"),
    (dict(head_classes=torch.tensor([[1]])), TypeError, "expected head_classes to be a number or a 1-D int64 tensor"),
    (dict(head_classes=torch.tensor([1, N])), IndexError, r"expected head_classes in \[0, 40\), got 1 .. 40"),
    (dict(head_classes=torch.tensor([-1, 3])), IndexError, r"expected head_classes in \[0, 40\), got -1 .. 3"),
    (dict(head_classes=torch.tensor([1, 3, 1])), ValueError, "expected head_classes without repeats"),
])
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        sampled(**kwargs)


@pytest.mark.parametrize("loss", [sampled(), sampled().eval(), xs.LinearCrossEntropyLoss(D, N)], ids=["train", "eval", "exact"])
@pytest.mark.parametrize("input, target, error, message", [
    (torch.zeros(3, D), torch.zeros(4, dtype=torch.int64), ValueError, r"expected target of shape \[3\]"),
    (torch.zeros(3, D), torch.zeros(3, 1, dtype=torch.int64), ValueError, r"expected target of shape \[3\]"),
    (torch.zeros(3, D), torch.tensor([0, N, 1]), IndexError, r"expected target in \[0, 40\) or ignore_index, got 40 at \[1\]"),
    (torch.zeros(3, D), torch.tensor([0, 1, -1]), IndexError, r"expected target in \[0, 40\) or ignore_index, got -1 at \[2\]"),
    (torch.zeros(3, D), torch.zeros(3), TypeError, "expected target of dtype int64, got float32"),
    (torch.zeros(3, D).double(), torch.zeros(3, dtype=torch.int64), TypeError, "dtype"),
    (torch.zeros(3, D + 1), torch.zeros(3, dtype=torch.int64), ValueError, "7"),
    (torch.zeros(6, D // 2), torch.zeros(6, dtype=torch.int64), ValueError, "3"),
])
def test_bad_batches(loss, input, target, error, message):
    with pytest.raises(error, match=message):
        loss(input, target)


def test_no_classes():
    with pytest.raises(ValueError, match="expected num_classes of at least 1, got 0"):
        xs.LinearCrossEntropyLoss(D, 0)


def test_options_may_change_after_construction():
    input, target = batch(5, ignored=1)
    for loss in (sampled().eval(), xs.LinearCrossEntropyLoss(D, N)):
        for reduction in ("sum", "none", "mean"):
            loss.reduction, loss.ignore_index = reduction, 3
            torch.testing.assert_close(loss(input, target.clamp(min=0)), exact(loss, input, target.clamp(min=0), reduction=reduction, ignore_index=3))
        loss.reduction = "median"
        with pytest.raises(ValueError, match="expected reduction"):
            loss(input, target)


def test_the_table_has_a_row_for_each_class():
    for loss in (sampled(), sampled().eval(), xs.LinearCrossEntropyLoss(D, N)):
        loss.linear.weight = torch.nn.Parameter(torch.randn(N + 1, D))
        for call in (lambda: loss(torch.randn(2, D), torch.tensor([1, 2])), lambda: loss.topk(torch.randn(2, D), 3)):
            with pytest.raises(ValueError, match=rf"{type(loss).__name__}: expected linear.weight with a row for each of {N} classes"):
                call()


def test_class_weights_of_any_floating_dtype():
    input, target = batch(6)
    loss = sampled(weight=torch.rand(N, dtype=torch.float64))
    want = loss.eval()(input, target)
    loss.weight = loss.weight.float()
    torch.testing.assert_close(loss(input, target), want)


def test_to_empty_keeps_what_no_state_dict_restores():
    loss = sampled(sampler=UnigramSampler(torch.arange(1, N + 1)), head_classes=4)
    before = loss.sampler.log_prob(None, torch.arange(N))
    loss.to_empty(device="cpu")
    assert torch.equal(loss.sampler.log_prob(None, torch.arange(N)), before) and loss.head.tolist() == [0, 1, 2, 3]
    lost = loss.to("meta")
    with pytest.raises(RuntimeError, match="its tables have no values on the meta device"):
        lost.to_empty(device="cpu")


def test_the_estimator_suits_the_sampler():
    """Private independent draws that follow the table: ranking, whose optimum is then the softmax; else an estimate of the normaliser. What is
    named stays."""
    counts = torch.arange(50, 0, -1)
    midx = lambda **options: xs.samplers.MidxSampler(50, 8, codewords=4, **options)  # noqa: E731
    union = lambda: xs.samplers.UnionSampler((xs.samplers.UnigramSampler(counts), 8), (midx(), 4))  # noqa: E731
    for options, want in ((dict(sampler="midx", num_samples=4), "ranking"), (dict(sampler="lsh", num_samples=4), "ranking"),
                          (dict(sampler=midx(), num_samples=4, head_classes=5), "ranking"), (dict(sampler="sphere"), "ranking"),
                          (dict(sampler=union()), "sampled_softmax"), (dict(sampler=midx(distinct=True), num_samples=4), "sampled_softmax"),
                          (dict(sampler="midx", num_samples=4, shared=True), "sampled_softmax"),
                          (dict(sampler="uniform", num_samples=4, shared=False), "sampled_softmax"),
                          (dict(sampler="midx", num_samples=4, estimator="sampled_softmax"), "sampled_softmax")):
        loss = xs.SampledSoftmaxLoss(8, 50, **options)
        assert loss.estimator == want
        assert loss(torch.randn(3, 8), torch.tensor([1, 2, 49])).isfinite()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sampler", ["midx", "lsh", "sphere", "rff", "learnable", "spread", "union"])
def test_ignored_queries_say_nothing_to_a_sampler(sampler, shared):
    """They are padding, and may hold anything: draws and index are those beside zeros."""
    if shared and sampler in ("lsh", "sphere", "rff", "union"):
        pytest.skip("draws for each query")

    def made():
        torch.manual_seed(0)
        if sampler == "union":
            return xs.samplers.UnionSampler((xs.samplers.UniformSampler(50), 5), (xs.samplers.MidxSampler(50, 8, codewords=4), 4))
        if sampler in ("learnable", "spread"):
            return xs.samplers.MidxSampler(50, 8, codewords=4, **{sampler: True})
        return sampler

    results = []
    for padding in (0.0, 1e4, float("nan"), float("inf")):
        loss = xs.SampledSoftmaxLoss(8, 50, sampler=made(), num_samples=None if sampler == "union" else 6, shared=shared or None)
        torch.nn.init.normal_(loss.linear.weight, generator=torch.Generator().manual_seed(1))
        input, target = torch.randn(9, 8, generator=torch.Generator().manual_seed(2)), torch.arange(9)
        input[::3], target[::3] = padding, -100
        input.requires_grad_()
        torch.manual_seed(3)
        for _ in range(2):
            value = loss(input, target)
        value.backward()
        results.append([value.detach(), input.grad[1::3], *(b for b in loss.sampler.buffers())])
    for other in results[1:]:
        assert value.isfinite() and all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("sampler", ["midx", "lsh", "sphere", "rff"])
def test_samplers_that_follow_the_table_under_the_meta_device(sampler):
    """Only the table is left unmade, as with device="meta"."""
    with torch.device("meta"):
        loss = xs.SampledSoftmaxLoss(8, 30, sampler=sampler, num_samples=5, head_classes=3)
    assert loss.linear.weight.is_meta
    loss.to_empty(device="cpu")
    torch.nn.init.normal_(loss.linear.weight)
    assert loss(torch.randn(4, 8), torch.randint(30, (4,))).isfinite()
    # What a sampler says of queries is a constant.
    queries = torch.randn(4, 8, requires_grad=True)
    assert not loss.sampler.log_prob(queries, torch.arange(30)).requires_grad
    assert not loss.sampler.sample(queries, 3, False).log_count.requires_grad
