"""logit_scale, softcap and z_loss of the losses against PyTorch: F.cross_entropy of transformed logits and c times the mean squared logsumexp."""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from xsoftmax._options import option_text

ops = torch.ops.xsoftmax
D, N, Q = 5, 23, 7
TRANSFORMS = {"scale": dict(logit_scale=2.5), "cap": dict(softcap=1.5), "both": dict(logit_scale=0.3, softcap=2.0), "z": dict(z_loss=0.2),
              "all": dict(logit_scale=1.7, softcap=3.0, z_loss=0.1)}
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def transformed(scores, logit_scale=1.0, softcap=None, z_loss=0.0):
    scores = scores * logit_scale
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def plain(input, weight, bias, target, class_weight=None, reduction="mean", label_smoothing=0.0, **transform):
    logits = transformed(F.linear(input, weight, bias), **transform)
    loss = F.cross_entropy(logits, target, class_weight, reduction=reduction, label_smoothing=label_smoothing)
    counts = target != -100
    share = counts.to(logits.dtype) if class_weight is None else torch.where(counts, class_weight[target.clamp(min=0)], 0.0)
    squares = torch.where(counts, logits.logsumexp(1).square(), 0.0) * share * transform.get("z_loss", 0.0)
    return loss + {"none": squares, "sum": squares.sum(), "mean": squares.sum() / share.sum()}[reduction]


def problem(queries=Q, width=D, classes=N, dtype=torch.float64, seed=0, ignored=1):
    made = torch.Generator().manual_seed(seed)
    input, weight, bias = (torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype) for shape in ((queries, width), (classes, width), (classes,)))
    target = torch.randint(classes, (queries,), generator=made)
    target[:ignored] = -100
    return input, weight, bias, target


def gradients(function, input, weight, bias, *args, **kwargs):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (input, weight, bias)]
    loss = function(*leaves, *args, **kwargs)
    loss.backward(torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape))
    return loss.detach(), *(leaf.grad.to_dense() for leaf in leaves)


def assert_same(got, want, rtol=1e-9):
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        scale = other.abs().max().item() if other.numel() else 1.0
        torch.testing.assert_close(one.double(), other.double(), rtol=rtol, atol=rtol * max(scale, 1e-3))


def functional(input, weight, bias, target, **options):
    return xs.functional.linear_cross_entropy(input, weight, target, bias=bias, **options)


@transforms
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_exact_loss_equals_torch(impl, transform, reduction):
    input, weight, bias, target = problem()
    for class_weight, smoothing in itertools.product((None, torch.linspace(0.2, 2.0, N, dtype=torch.float64)), (0.0, 0.1)):
        options = dict(class_weight=class_weight, reduction=reduction, label_smoothing=smoothing, **transform)
        assert_same(gradients(functional, input, weight, bias, target, **options), gradients(plain, input, weight, bias, target, **options))


# Several groups of blocks; logits saved in part (reduction "none"); chunks of queries (mean).
@pytest.mark.parametrize("shape", [(40, 8, 5000), (1000, 4, 12000), (300, 3, 100000)])
def test_blocks_of_classes_agree(shape):
    input, weight, bias, target = problem(*shape, dtype=torch.float32)
    class_weight = torch.linspace(0.2, 2.0, shape[2])
    for reduction in ("mean", "none"):
        options = dict(class_weight=class_weight, label_smoothing=0.1, reduction=reduction, **TRANSFORMS["all"])
        want = gradients(plain, input.double(), weight.double(), bias.double(), target, **options | {"class_weight": class_weight.double()})
        assert_same(gradients(functional, input, weight, bias, target, **options), want, rtol=2e-4)


def test_gradcheck():
    leaves = [leaf.requires_grad_() for leaf in problem(4, 3, 6)[:3]]
    target = torch.tensor([0, 5, -100, 2])
    assert torch.autograd.gradcheck(lambda *args: functional(*args, target, reduction="none", label_smoothing=0.1, **TRANSFORMS["all"]), leaves)


@pytest.mark.parametrize("softcap", [1e-3, 0.5, 30.0, 1e4, 1e7])
def test_the_kernels_tanh_keeps_its_digits(softcap):
    """A cap far above the logits, where e^2x - 1 would lose them all, and one far below, where they all saturate."""
    scores = torch.cat([torch.linspace(-100, 100, 400), torch.logspace(-6, 0, 200)])
    input, weight = torch.ones(1, 1), scores[:, None]
    values, ids = ops.linear_topk(input, weight, None, len(scores), f"softcap={softcap}")
    want = transformed(scores.double(), softcap=softcap).log_softmax(0)
    assert torch.equal(ids[0], scores.argsort(descending=True, stable=True))
    torch.testing.assert_close(values[0].double(), want[ids[0]], rtol=1e-6, atol=3e-7 * max(1.0, min(softcap, 100.0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tables(impl, dtype):
    input, weight, bias, target = problem(dtype=dtype)
    got = gradients(functional, input, weight, bias, target, **TRANSFORMS["all"])
    want = gradients(plain, input.double(), weight.double(), bias.double(), target, **TRANSFORMS["all"])
    assert got[0].dtype == torch.float32
    assert_same(got, want, rtol=3e-2)


def several(input, weight, bias, target, reduction, positives, class_weight=None, **transform):
    """The formula of several positives, query by query."""
    logits, losses, shares = transformed(F.linear(input, weight, bias), **transform), [], []
    for row, ids in zip(logits, target):
        ids = ids[ids >= 0].unique()
        others = torch.ones(len(row), dtype=torch.bool).index_fill(0, ids, False)
        scores = row[ids].logsumexp(0, keepdim=True) if positives == "sum" else row[ids]
        normalisers = torch.logaddexp(scores, row[others].logsumexp(0)) if len(ids) else scores
        share = (torch.ones(len(ids), dtype=row.dtype) if class_weight is None else class_weight[ids]) / max(len(ids), 1)
        share = torch.full((1,), float(len(ids) > 0), dtype=row.dtype) if positives == "sum" else share
        each = normalisers - scores + transform.get("z_loss", 0.0) * normalisers.square()
        losses.append((torch.where(share > 0, each, 0.0) * share).sum())
        shares.append(share.sum())
    losses, shares = torch.stack(losses), torch.stack(shares)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / shares.sum()}[reduction]


def with_positives(made):
    """Targets [Q, 3]: repeats, padding, and a query that is ignored."""
    made[-1] = torch.randint(N, (Q, 3), generator=torch.Generator().manual_seed(1))
    made[-1][1, 1:], made[-1][2, 1], made[-1][3] = -100, made[-1][2, 0], -100
    return made


@transforms
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("positives", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_several_positives(kind, positives, reduction, transform):
    """Sampled: with all classes as candidates."""
    input, weight, bias, target = with_positives(list(problem()))
    for class_weight in (None, torch.linspace(0.2, 2.0, N, dtype=torch.float64))[:1 if positives == "sum" else 2]:
        options = dict(positives=positives, reduction=reduction, weight=class_weight, **transform)

        def loss(input, weight, bias, target):
            return whole(kind, weight, bias, **options)(input, target)

        want = gradients(several, input, weight, bias, target, reduction, positives, class_weight, **transform)
        assert_same(gradients(loss, input, weight, bias, target), want)


def whole(kind, table, row, **options):
    """A loss over a given table; kind "sampled": all classes are candidates."""
    shape = dict(bias=True, dtype=table.dtype, **options)
    loss = xs.LinearCrossEntropyLoss(D, N, **shape) if kind == "exact" else xs.SampledSoftmaxLoss(D, N, sampler=None, head_classes=N, **shape)
    del loss.linear.weight, loss.linear.bias
    loss.linear.weight, loss.linear.bias = table, row
    return loss


@transforms
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("more", [dict(), dict(label_smoothing=0.1), dict(weight=torch.linspace(0.2, 2.0, N, dtype=torch.float64)), dict(sparse_grad=False)],
                         ids=lambda more: next(iter(more), "plain"))
def test_all_classes_as_candidates_give_the_exact_loss(impl, transform, reduction, more):
    input, weight, bias, target = problem()
    options = dict(reduction=reduction, **more, **transform)
    exact = {name: value for name, value in options.items() if name != "sparse_grad"}

    def made(kind, **options):
        return lambda input, weight, bias, target: whole(kind, weight, bias, **options)(input, target)

    got = gradients(made("sampled", **options), input, weight, bias, target)
    assert_same(got, gradients(made("exact", **exact), input, weight, bias, target))
    evaluated = whole("sampled", weight, bias, **options).eval()
    assert_same([evaluated(input, target)], got[:1])


NORMALISED = ["sampled_softmax", "ranking", "importance", "cane", "cane_log_of_mean"]


def drawn_sets(dtype=torch.float64):
    """A head, and private independent draws with exact counts."""
    sampler = xs.samplers.UniformSampler(N, 4, shared=False, exclude=torch.arange(3))
    target = problem()[3]
    drawn = sampler.sample(torch.zeros(Q, D), torch.where(target < 0, -1, target), torch.Generator().manual_seed(2))
    head = xs.samplers.CandidateSet(torch.arange(3), torch.zeros(3), None, True)
    return [head, *drawn]


@pytest.mark.parametrize("estimator", NORMALISED)
@pytest.mark.parametrize("transform", [dict(), TRANSFORMS["both"]], ids=["scores", "both"])
def test_z_loss_takes_the_normaliser_of_the_estimator(estimator, transform):
    """These losses are a log normaliser less the score of the target, lowered by its log count in "ranking"."""
    input, weight, bias, target = problem()
    sets = drawn_sets()

    def loss(**more):
        return xs.functional.sampled_softmax_loss(input, weight, target, sets, bias=bias, estimator=estimator, reduction="none", sparse_grad=False,
                                                  **transform, **more)

    known = target.clamp(min=0)
    scores = transformed((input * weight[known]).sum(1) + bias[known], **transform)
    if estimator == "ranking":
        count = sets[1].target_log_count.double()
        scores = scores - torch.where(count.isneginf(), 0.0, count)
    want = loss() + 0.3 * (loss() + scores).square()
    torch.testing.assert_close(loss(z_loss=0.3), torch.where(target < 0, 0.0, want))


@pytest.mark.parametrize("estimator", NORMALISED)
def test_gradcheck_of_sampled_losses(estimator):
    *leaves, target = problem()
    sets = drawn_sets()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(
        lambda input, weight, bias: xs.functional.sampled_softmax_loss(input, weight, target, sets, bias=bias, estimator=estimator, reduction="sum",
                                                                       sparse_grad=False, **TRANSFORMS["all"]), leaves)


@pytest.mark.parametrize("estimator", ops.estimator_names())
def test_every_estimator_takes_transformed_scores(estimator):
    """The loss of transformed scores: what a table gives whose scores are these logits already. log Z is subtracted from logits."""
    input, weight, bias, target = problem()
    sets, log_z = drawn_sets(), torch.tensor(0.7) if estimator == "nce" else None
    logits = transformed(F.linear(input, weight, bias), **TRANSFORMS["both"])
    got = xs.functional.sampled_softmax_loss(input, weight, target, sets, bias=bias, estimator=estimator, log_z=log_z, sparse_grad=False,
                                             **TRANSFORMS["both"])
    want = xs.functional.sampled_softmax_loss(torch.eye(Q, dtype=torch.float64), logits.t().contiguous(), target, sets, estimator=estimator, log_z=log_z,
                                              sparse_grad=False)
    torch.testing.assert_close(got, want)


def losses(**options):
    torch.manual_seed(0)
    return [xs.LinearCrossEntropyLoss(D, N, bias=True, **options), xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4, bias=True, **options),
            xs.CaneLoss(D, N, candidates=3, bias=True, **options)]


@transforms
def test_predictions(transform):
    """topk and log_prob report log-probabilities of the logits; the order of classes is that of scores."""
    input = problem(dtype=torch.float32)[0]
    for loss in losses(**transform):
        want = transformed(loss.linear(input), **transform).log_softmax(1)
        torch.testing.assert_close(loss.log_prob(input), want)
        values, ids = loss.topk(input, 4)
        torch.testing.assert_close(values, want.gather(1, ids))
        assert torch.equal(ids, loss.linear(input).topk(4).indices) and torch.equal(loss.predict(input), ids[:, 0])
        found = loss.search(input, 4)
        assert torch.equal(found.ids, ids)
        torch.testing.assert_close(found.scores, loss.linear(input).gather(1, ids))


def test_a_cap_that_saturates_keeps_the_order(impl):
    """All logits round to the cap; the best class is still the one of the largest score, not the lowest id."""
    weight = torch.arange(1.0, 200.0)[:, None]
    values, ids = ops.linear_topk(torch.full((2, 1), 1e4), weight, None, 3, "softcap=1.0")
    assert torch.equal(ids, torch.tensor([[198, 197, 196]] * 2))
    torch.testing.assert_close(values, torch.full((2, 3), -torch.tensor(199.0).log().item()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_transform_logits_rounds_once(dtype):
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = ops.transform_logits(scores, "logit_scale=3.0,softcap=2.0")
    assert got.dtype == dtype
    want = transformed(scores.double(), logit_scale=3.0, softcap=2.0)
    torch.testing.assert_close(got.double(), want, rtol=0.51 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6, atol=1e-6)
    assert torch.equal(ops.transform_logits(scores, ""), scores)


def test_torchscript_compile_and_export():
    input, _, _, target = problem(dtype=torch.float32)
    exact, sampled, cane = losses(**TRANSFORMS["all"])
    for loss in (exact, sampled, cane):
        scripted = torch.jit.script(loss)
        for call in (lambda of: of.exact(input, target), lambda of: of.log_prob(input), lambda of: of.topk(input, 3)[0]):
            torch.testing.assert_close(call(scripted), call(loss))
        results = []
        for of in (loss, scripted):
            torch.manual_seed(3)
            results.append(of(input, target))
        assert torch.equal(*results)
    for loss in (exact, sampled):
        value = torch.compile(loss, fullgraph=True, backend="aot_eager")(input, target)
        torch.manual_seed(3)
        assert value.isfinite()
    torch.testing.assert_close(torch.compile(exact, fullgraph=True, backend="aot_eager", dynamic=True)(input, target), exact(input, target))
    program = torch.export.export(Predict(sampled).eval(), (input,), dynamic_shapes=({0: torch.export.Dim("Q")},))
    for of in (program, program.run_decompositions(xs.decompositions())):
        torch.testing.assert_close(of.module()(input), sampled.topk(input, 3))


class Predict(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, input):
        return self.loss.topk(input, 3)


def test_compiled_steps():
    """Gradients under torch.compile with symbolic sizes, z-loss in ATen calls among them. Options may be symbols, too."""
    *leaves, target = problem(dtype=torch.float32)
    sets = drawn_sets()

    def loss(input, weight, bias):
        exact = functional(input, weight, bias, target, ignore_index=-100, label_smoothing=0.1, **TRANSFORMS["all"])
        return exact + xs.functional.sampled_softmax_loss(input, weight, target, sets, bias=bias, sparse_grad=False, **TRANSFORMS["all"])

    assert_same(gradients(torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True), *leaves), gradients(loss, *leaves), rtol=1e-5)


def test_autocast():
    input, _, _, target = problem(dtype=torch.float32)
    for loss in losses(**TRANSFORMS["all"]):
        torch.manual_seed(1)
        want = loss(input, target)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            got = loss(input, target)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("estimator", ["sampled_softmax", "cane"])
def test_opcheck_of_the_sampled_loss(estimator):
    *leaves, target = problem(dtype=torch.float64)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    columns = xs.samplers.columns_of(drawn_sets())
    torch.library.opcheck(ops.sampled_softmax_loss.default, (*leaves, target, *columns, None, None,
                                                             option_text(estimator=estimator, sparse_grad=False, **TRANSFORMS["all"])))


def test_ignored_queries_may_hold_anything():
    input, weight, bias, target = problem()
    broken = input.clone()
    broken[0] = torch.nan
    sets = drawn_sets()

    def loss(input, weight, bias):
        return xs.functional.sampled_softmax_loss(input, weight, target, sets, bias=bias, sparse_grad=False, **TRANSFORMS["all"])

    assert_same(gradients(loss, broken, weight, bias), gradients(loss, input, weight, bias))
    target = with_positives([*problem()])[-1]
    broken = input.clone()
    broken[3] = torch.nan
    got, want = (gradients(lambda *leaves: whole("exact", *leaves[1:], **TRANSFORMS["all"])(leaves[0], target), rows, weight, bias) for rows in (broken, input))
    assert_same(got, want)


class Recorder(xs.samplers.UniformSampler):
    def sample(self, queries, target, generator=None):
        self.seen = queries
        return super().sample(queries, target, generator)


def test_samplers_see_scaled_queries():
    input, _, _, target = problem(dtype=torch.float32)
    sampler = Recorder(N, 4)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=sampler, logit_scale=3.0, softcap=5.0)
    loss(input, target)
    torch.testing.assert_close(sampler.seen, torch.where((target >= 0)[:, None], 3 * input, 0.0))
    xs.diagnose(loss, input, target, draws=2)
    torch.testing.assert_close(sampler.seen, 3 * input[target >= 0])


def test_diagnose_measures_the_logits():
    """With all classes as candidates there is no error; the proposal is uniform, so its distance is that of the transformed softmax."""
    input, _, _, target = problem(dtype=torch.float64)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=None, head_classes=N, dtype=torch.float64, **TRANSFORMS["all"])
    found = xs.diagnose(loss, input, target, draws=2)
    assert abs(found.log_z_bias) < 1e-6 and found.gradient_bias < 1e-6
    log_p = transformed(loss.linear(input[1:]), **TRANSFORMS["all"]).log_softmax(1)
    torch.testing.assert_close(found.kl, (-torch.tensor(float(N)).log() - log_p).mean().item())


def test_advise_keeps_the_options(monkeypatch):
    """The line of code of every loss names them, and the sampled losses that were measured have them."""
    monkeypatch.setattr(sys.modules["xsoftmax.advise"], "_ROUNDS", 3)
    input, target = torch.randn(64, D, generator=torch.Generator().manual_seed(0)), torch.arange(64) % N
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4, logit_scale=2.0, softcap=30.0, z_loss=1e-4)
    rows = {row.name: row for row in xs.advise(loss, input, target, 10, samplers=["uniform"], draws=[4]).rows}
    assert all("logit_scale=2.0, softcap=30.0, z_loss=0.0001" in rows[name].code for name in ("exact", "uniform 4"))
    assert rows["uniform 4"].bias < 0.5  # of the exact gradient with the same options


def test_options_follow_what_is_assigned():
    input, _, _, target = problem(dtype=torch.float32)
    for loss in losses():
        for name, value in TRANSFORMS["all"].items():
            setattr(loss, name, value)
        want = plain(input, loss.linear.weight, loss.linear.bias, target, **TRANSFORMS["all"])
        torch.testing.assert_close(loss.exact(input, target), want)
        assert "logit_scale=1.7, softcap=3.0, z_loss=0.1" in repr(loss)
        copied = xs.LinearCrossEntropyLoss.from_linear(loss.linear, **TRANSFORMS["all"])
        assert torch.equal(copied(input, target), loss.exact(input, target))
        loss.resize_classes(N + 2)
        assert torch.equal(loss.topk(input, 1)[1].squeeze(1), loss.linear(input).argmax(1)) and loss.log_prob(input).shape == (Q, N + 2)


@pytest.mark.parametrize("name, value, error", [
    ("logit_scale", 0.0, ValueError), ("logit_scale", -1.0, ValueError), ("logit_scale", float("inf"), ValueError), ("logit_scale", "2", TypeError),
    ("logit_scale", None, TypeError), ("softcap", 0.0, ValueError), ("softcap", -3.0, ValueError), ("softcap", float("nan"), ValueError),
    ("softcap", True, TypeError), ("z_loss", -0.1, ValueError), ("z_loss", float("inf"), ValueError)])
def test_options_out_of_range(name, value, error):
    for make in (xs.LinearCrossEntropyLoss, lambda *args, **options: xs.SampledSoftmaxLoss(*args, sampler="uniform", num_samples=3, **options),
                 lambda *args, **options: xs.CaneLoss(*args, candidates=3, **options)):
        with pytest.raises(error, match=f"expected {name} as a"):
            make(D, N, **{name: value})
    input, weight, _, target = problem()
    if isinstance(value, float):
        with pytest.raises(ValueError, match=f"expected {name} as a finite number"):
            xs.functional.linear_cross_entropy(input, weight, target, **{name: value})
        with pytest.raises(ValueError, match=f"expected {name} as a finite number"):
            xs.functional.sampled_softmax_loss(input, weight, target, drawn_sets(), **{name: value})
    if isinstance(value, float) and (name, value) != ("softcap", 0.0):
        for call in (lambda text: ops.linear_cross_entropy(input, weight, None, target, None, text),
                     lambda text: ops.linear_positives_loss(input, weight, None, target[:, None], None, text),
                     lambda text: ops.sampled_softmax_loss(input, weight, None, target, *xs.samplers.columns_of(drawn_sets()), None, None, text)):
            with pytest.raises(ValueError, match=f"expected {name} as a finite number"):
                call(option_text(**{name: value}))
        if name != "z_loss":
            with pytest.raises(ValueError, match=f"linear_topk: expected {name} as a finite number"):
                ops.linear_topk(input, weight, None, 1, option_text(**{name: value}))


@pytest.mark.parametrize("estimator", ["nce", "negative_sampling", "one_vs_each", "blackout"])
def test_estimators_without_a_normaliser_refuse_z_loss(estimator):
    with pytest.raises(ValueError, match=f"expected z_loss=0 with estimator='{estimator}', which has no log normaliser, got 0.1"):
        xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3, estimator=estimator, z_loss=0.1)
    input, weight, _, target = problem()
    with pytest.raises(ValueError, match=f'expected z_loss of 0 with estimator "{estimator}", which has no log normaliser, got 0.1'):
        xs.functional.sampled_softmax_loss(input, weight, target, drawn_sets(), estimator=estimator, z_loss=0.1)


def test_tables_over_ranks_refuse_the_options():
    from xsoftmax.distributed.class_parallel import check_splits
    for options in TRANSFORMS.values():
        with pytest.raises(ValueError, match="shard_classes: expected a loss with logit_scale=1, softcap=None and z_loss=0"):
            check_splits("shard_classes", xs.LinearCrossEntropyLoss(D, N, **options), "auto")


def test_steps_without_scores_refuse_the_options():
    """Operators that never hold the scores would leave the options out in silence."""
    input, weight, bias, target = problem(dtype=torch.float32, ignored=0)
    candidates = [None, torch.arange(3), None, torch.zeros(3), None]
    with pytest.raises(ValueError, match="expected logit_scale of 1, no softcap and no z_loss"):
        ops.linear_candidate_loss(input, weight, bias, target, candidates, [0, 3], "softcap=2.0")
    tree = xs.LabelTree.balanced(N, 3)
    edges = torch.randn(tree.num_edges, D)
    with pytest.raises(ValueError, match="beam_tree_loss: expected logit_scale of 1, no softcap and no z_loss"):
        ops.beam_tree_loss(input, edges, None, target, tree.tables(), list(tree.layer_sizes), *xs.samplers.columns_of(drawn_sets()), None, "z_loss=0.1")


def test_an_estimator_in_python_sees_logits():
    name = "test_logit_transforms"
    if name not in xs.estimators._REGISTERED:
        xs.register_estimator(name, lambda batch: batch.adjusted.logsumexp(1) - batch.target, weighs=True)
    input, _, _, target = problem(dtype=torch.float64)
    options = dict(sampler=None, head_classes=N, bias=True, dtype=torch.float64, estimator=name, logit_scale=1.7, softcap=3.0)
    loss = xs.SampledSoftmaxLoss(D, N, **options)
    torch.testing.assert_close(loss(input, target), loss.exact(input, target))
    with pytest.raises(ValueError, match="which has no log normaliser"):
        xs.SampledSoftmaxLoss(D, N, z_loss=0.1, **options)
