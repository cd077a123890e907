"""logit_scale, softcap and z_loss against PyTorch: F.cross_entropy of transformed logits plus c
times the mean squared logsumexp."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from logit_transform_checks import (TRANSFORMS, D, N, Q, drawn_sets, losses, ops, plain, problem,
                                    transformed)
from xsoftmax._core.options import option_text

transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def gradients(function, input, weight, bias, *args, **kwargs):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (input, weight, bias)]
    loss = function(*leaves, *args, **kwargs)
    loss.backward(torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape))
    return loss.detach(), *(leaf.grad.to_dense() for leaf in leaves)


def assert_same(got, want, rtol=1e-9):
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        scale = other.abs().max().item() if other.numel() else 1.0
        torch.testing.assert_close(one.double(), other.double(), rtol=rtol,
                                   atol=rtol * max(scale, 1e-3))


def functional(input, weight, bias, target, **options):
    return xs.functional.linear_cross_entropy(input, weight, target, bias=bias, **options)


@transforms
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_exact_loss_equals_torch(impl, transform, reduction):
    input, weight, bias, target = problem()
    for class_weight, smoothing in itertools.product(
        (None, torch.linspace(0.2, 2.0, N, dtype=torch.float64)), (0.0, 0.1)):
        options = dict(class_weight=class_weight, reduction=reduction, label_smoothing=smoothing,
                       **transform)
        assert_same(gradients(functional, input, weight, bias, target, **options),
                    gradients(plain, input, weight, bias, target, **options))


# Several groups of blocks; some logits saved (reduction "none"); chunks of queries (mean).
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(40, 8, 5000), (1000, 4, 12000), (300, 3, 100000)])
def test_blocks_of_classes_agree(shape):
    input, weight, bias, target = problem(*shape, dtype=torch.float32)
    class_weight = torch.linspace(0.2, 2.0, shape[2])
    for reduction in ("mean", "none"):
        options = dict(class_weight=class_weight, label_smoothing=0.1, reduction=reduction,
                       **TRANSFORMS["all"])
        want = gradients(plain, input.double(), weight.double(), bias.double(), target,
                         **options | {"class_weight": class_weight.double()})
        assert_same(gradients(functional, input, weight, bias, target, **options), want, rtol=2e-4)


def test_gradcheck():
    leaves = [leaf.requires_grad_() for leaf in problem(4, 3, 6)[:3]]
    target = torch.tensor([0, 5, -100, 2])
    assert torch.autograd.gradcheck(
        lambda *args: functional(*args, target, reduction="none", label_smoothing=0.1, **TRANSFORMS[
            "all"]), leaves)


@pytest.mark.parametrize("softcap", [1e-3, 0.5, 30.0, 1e4, 1e7])
def test_the_kernels_tanh_keeps_its_digits(softcap):
    """With a cap far above the logits, where e^2x - 1 would cancel, and with one far below, where
    all logits saturate."""
    scores = torch.cat([torch.linspace(-100, 100, 400), torch.logspace(-6, 0, 200)])
    input, weight = torch.ones(1, 1), scores[:, None]
    values, ids = ops.linear_topk(input, weight, None, len(scores), f"softcap={softcap}")
    want = transformed(scores.double(), softcap=softcap).log_softmax(0)
    assert torch.equal(ids[0], scores.argsort(descending=True, stable=True))
    torch.testing.assert_close(values[0].double(), want[ids[0]], rtol=1e-6,
                               atol=3e-7 * max(1.0, min(softcap, 100.0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tables(impl, dtype):
    input, weight, bias, target = problem(dtype=dtype)
    got = gradients(functional, input, weight, bias, target, **TRANSFORMS["all"])
    want = gradients(plain, input.double(), weight.double(), bias.double(), target,
                     **TRANSFORMS["all"])
    assert got[0].dtype == torch.float32
    assert_same(got, want, rtol=3e-2)


def several(input, weight, bias, target, reduction, positives, class_weight=None, **transform):
    """The loss of several positives, query by query."""
    logits, losses, shares = transformed(F.linear(input, weight, bias), **transform), [], []
    for row, ids in zip(logits, target):
        ids = ids[ids >= 0].unique()
        others = torch.ones(len(row), dtype=torch.bool).index_fill(0, ids, False)
        scores = row[ids].logsumexp(0, keepdim=True) if positives == "sum" else row[ids]
        normalisers = torch.logaddexp(scores, row[others].logsumexp(0)) if len(ids) else scores
        share = (torch.ones(len(ids), dtype=row.dtype)
                 if class_weight is None else class_weight[ids]) / max(len(ids), 1)
        share = torch.full(
            (1,), float(len(ids) > 0), dtype=row.dtype) if positives == "sum" else share
        each = normalisers - scores + transform.get("z_loss", 0.0) * normalisers.square()
        losses.append((torch.where(share > 0, each, 0.0) * share).sum())
        shares.append(share.sum())
    losses, shares = torch.stack(losses), torch.stack(shares)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / shares.sum()}[reduction]


def with_positives(made):
    """Targets [Q, 3] with repeats, padding and an ignored query."""
    made[-1] = torch.randint(N, (Q, 3), generator=torch.Generator().manual_seed(1))
    made[-1][1, 1:], made[-1][2, 1], made[-1][3] = -100, made[-1][2, 0], -100
    return made


@transforms
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("positives", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_several_positives(kind, positives, reduction, transform):
    """The sampled loss has all classes as candidates."""
    input, weight, bias, target = with_positives(list(problem()))
    for class_weight in (None,
                         torch.linspace(0.2, 2.0, N,
                                        dtype=torch.float64))[:1 if positives == "sum" else 2]:
        options = dict(positives=positives, reduction=reduction, weight=class_weight, **transform)

        def loss(input, weight, bias, target):
            return whole(kind, weight, bias, **options)(input, target)

        want = gradients(several, input, weight, bias, target, reduction, positives, class_weight,
                         **transform)
        assert_same(gradients(loss, input, weight, bias, target), want)


def whole(kind, table, row, **options):
    """A loss over a given table; with kind "sampled" all classes are candidates."""
    shape = dict(bias=True, dtype=table.dtype, **options)
    loss = xs.LinearCrossEntropyLoss(D, N, **shape) if kind == "exact" else xs.SampledSoftmaxLoss(
        D, N, sampler=None, head_classes=N, **shape)
    del loss.linear.weight, loss.linear.bias
    loss.linear.weight, loss.linear.bias = table, row
    return loss


@transforms
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("more", [
    dict(),
    dict(label_smoothing=0.1),
    dict(weight=torch.linspace(0.2, 2.0, N, dtype=torch.float64)),
    dict(sparse_grad=False)
], ids=lambda more: next(iter(more), "plain"))
def test_all_classes_as_candidates_give_the_exact_loss(impl, transform, reduction, more):
    input, weight, bias, target = problem()
    options = dict(reduction=reduction, **more, **transform)
    exact = {name: value for name, value in options.items() if name != "sparse_grad"}

    def made(kind, **options):
        return lambda input, weight, bias, target: whole(kind, weight, bias, **options)(input,
                                                                                        target)

    got = gradients(made("sampled", **options), input, weight, bias, target)
    assert_same(got, gradients(made("exact", **exact), input, weight, bias, target))
    evaluated = whole("sampled", weight, bias, **options).eval()
    assert_same([evaluated(input, target)], got[:1])


NORMALISED = ["sampled_softmax", "ranking", "importance", "cane", "cane_log_of_mean"]


@pytest.mark.parametrize("estimator", NORMALISED)
@pytest.mark.parametrize("transform", [dict(), TRANSFORMS["both"]], ids=["scores", "both"])
def test_z_loss_uses_the_normaliser_of_the_estimator(estimator, transform):
    """These losses are a log normaliser minus the score of the target, which "ranking" lowers by
    its log count."""
    input, weight, bias, target = problem()
    sets = drawn_sets()

    def loss(**more):
        return xs.functional.sampled_softmax_loss(input, weight, target, sets, bias=bias,
                                                  estimator=estimator, reduction="none",
                                                  sparse_grad=False, **transform, **more)

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
        lambda input, weight, bias: xs.functional.sampled_softmax_loss(
            input, weight, target, sets, bias=bias, estimator=estimator, reduction="sum",
            sparse_grad=False, **TRANSFORMS["all"]), leaves)


@pytest.mark.parametrize("estimator", ops.estimator_names())
def test_every_estimator_uses_transformed_scores(estimator):
    """The loss equals that of a table whose scores are already the transformed logits. log Z is
    subtracted from the logits."""
    input, weight, bias, target = problem()
    sets, log_z = drawn_sets(), torch.tensor(0.7) if estimator == "nce" else None
    logits = transformed(F.linear(input, weight, bias), **TRANSFORMS["both"])
    got = xs.functional.sampled_softmax_loss(input, weight, target, sets, bias=bias,
                                             estimator=estimator, log_z=log_z, sparse_grad=False,
                                             **TRANSFORMS["both"])
    want = xs.functional.sampled_softmax_loss(torch.eye(Q, dtype=torch.float64),
                                              logits.t().contiguous(), target, sets,
                                              estimator=estimator, log_z=log_z, sparse_grad=False)
    torch.testing.assert_close(got, want)


@transforms
def test_predictions(transform):
    """topk and log_prob return log-probabilities of the transformed logits, in the order of the
    scores."""
    input = problem(dtype=torch.float32)[0]
    for loss in losses(**transform):
        want = transformed(loss.linear(input), **transform).log_softmax(1)
        torch.testing.assert_close(loss.log_prob(input), want)
        values, ids = loss.topk(input, 4)
        torch.testing.assert_close(values, want.gather(1, ids))
        assert torch.equal(ids,
                           loss.linear(input).topk(4).indices) and torch.equal(
                               loss.predict(input), ids[:, 0])
        found = loss.search(input, 4)
        assert torch.equal(found.ids, ids)
        torch.testing.assert_close(found.scores, loss.linear(input).gather(1, ids))


def test_a_cap_that_saturates_keeps_the_order(impl):
    """If all logits round to the cap, the best class is still that of the largest score, not the
    lowest id."""
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
    torch.testing.assert_close(
        got.double(), want, rtol=0.51 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6,
        atol=1e-6)
    assert torch.equal(ops.transform_logits(scores, ""), scores)


def test_torchscript_compile_and_export():
    input, _, _, target = problem(dtype=torch.float32)
    exact, sampled, cane = losses(**TRANSFORMS["all"])
    for loss in (exact, sampled, cane):
        scripted = torch.jit.script(loss)
        for call in (lambda of: of.exact(input, target), lambda of: of.log_prob(input),
                     lambda of: of.topk(input, 3)[0]):
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
    torch.testing.assert_close(
        torch.compile(exact, fullgraph=True, backend="aot_eager", dynamic=True)(input, target),
        exact(input, target))
    program = torch.export.export(
        Predict(sampled).eval(), (input,), dynamic_shapes=({0: torch.export.Dim("Q")},))
    for of in (program, program.run_decompositions(xs.decompositions())):
        torch.testing.assert_close(of.module()(input), sampled.topk(input, 3))


class Predict(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, input):
        return self.loss.topk(input, 3)


def test_compiled_steps():
    """torch.compile with symbolic sizes gives the gradients, also of the z-loss. Options may be
    symbolic."""
    *leaves, target = problem(dtype=torch.float32)
    sets = drawn_sets()

    def loss(input, weight, bias):
        exact = functional(input, weight, bias, target, ignore_index=-100, label_smoothing=0.1,
                           **TRANSFORMS["all"])
        return exact + xs.functional.sampled_softmax_loss(input, weight, target, sets, bias=bias,
                                                          sparse_grad=False, **TRANSFORMS["all"])

    assert_same(
        gradients(torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True), *leaves),
        gradients(loss, *leaves), rtol=1e-5)


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
    torch.library.opcheck(
        ops.sampled_softmax_loss.default,
        (*leaves, target, *columns, None, None,
         option_text(estimator=estimator, sparse_grad=False, **TRANSFORMS["all"])))


def test_ignored_queries_may_hold_anything():
    input, weight, bias, target = problem()
    broken = input.clone()
    broken[0] = torch.nan
    sets = drawn_sets()

    def loss(input, weight, bias):
        return xs.functional.sampled_softmax_loss(input, weight, target, sets, bias=bias,
                                                  sparse_grad=False, **TRANSFORMS["all"])

    assert_same(gradients(loss, broken, weight, bias), gradients(loss, input, weight, bias))
    target = with_positives([*problem()])[-1]
    broken = input.clone()
    broken[3] = torch.nan
    got, want = (gradients(
        lambda *leaves: whole("exact", *leaves[1:], **TRANSFORMS["all"])(leaves[0], target), rows,
        weight, bias) for rows in (broken, input))
    assert_same(got, want)
