"""Losses name wrong arguments, options and batches, and an error changes nothing."""

import math

import numpy as np
import pytest
import torch

import xsoftmax as xs
from gradient_checks import seeded  # noqa: F401 (a fixture of every test)
from loss_checks import D, N, batch, sampled
from xsoftmax._core.options import option_text
from xsoftmax.samplers import LogUniformSampler, MidxSampler, UniformSampler, UnionSampler


def test_a_sampler_belongs_to_one_loss():
    """Two losses cannot share a sampler, but a sampler stays free if the loss raised."""
    given = UniformSampler(N, 4)
    for wrong in (dict(estimator="nce",
                       label_smoothing=0.1), dict(log_z=1.0), dict(weight=torch.ones(3)),
                  dict(num_samples=4), dict(estimator="complementary_sum")):
        with pytest.raises(ValueError):
            xs.SampledSoftmaxLoss(D, N, sampler=given, **wrong)
    xs.SampledSoftmaxLoss(D, N, sampler=given)
    with pytest.raises(
            ValueError, match="expected a sampler that no other module uses, got a "
            "UniformSampler that belongs to a SampledSoftmaxLoss"):
        xs.SampledSoftmaxLoss(D, N, sampler=given)


def test_generator_on_another_device():
    input, target = batch(6)
    with pytest.raises(ValueError, match="expected generator on the queries' device meta, got one "
                       "on cpu"):
        sampled(device="meta")(input.to("meta"), target.to("meta"), torch.Generator())


@pytest.mark.parametrize("kwargs, error, message", [
    (dict(num_samples=-1), ValueError, "expected num_samples of at least 0, got -1"),
    (dict(num_samples=N - 2, head_classes=3), ValueError, "UniformSampler: expected num_samples "
     f"of at most {N - 3}, .*got {N - 2}"),
    (dict(num_samples=None, sampler=UnionSampler(LogUniformSampler(
        N, N - 2), MidxSampler(N, D, 4, codewords=4)), head_classes=3), ValueError,
     f"LogUniformSampler: expected num_samples of at most {N - 3}, .*got {N - 2}"),
    (dict(sampler=None), TypeError, "expected sampler as a Sampler or one of .*\"uniform\", .* "
     "with num_samples=8, got None"),
    (dict(num_samples=None), ValueError, "make_sampler: expected num_samples for a UniformSampler, "
     "got None"),
    (dict(sampler=UniformSampler(N, 3)), ValueError, "expected no num_samples with a sampler "
     "object, got num_samples=8"),
    (dict(sampler=UniformSampler(N, 3), num_samples=None,
          shared=True), ValueError, "expected no shared with a sampler object, got shared=True"),
    (dict(estimator="nce2"), ValueError, r"expected estimator to be one of \['sampled_softmax', "
     r"'ranking', .*got 'nce2'"),
    (dict(log_z=1.0), ValueError, "expected log_z=0 with estimator='sampled_softmax', which does "
     "not use it, got 1.0"),
    (dict(log_z="free", estimator="nce"), ValueError,
     'expected log_z as a finite number or "learned", got \'free\''),
    (dict(log_z=float("inf"), estimator="nce"), ValueError, "expected log_z as a finite number"),
    (dict(estimator="nce", label_smoothing=0.1), ValueError, "expected label_smoothing=0 with "
     "estimator='nce', got 0.1"),
    (dict(estimator="complementary_sum", shared=True), ValueError, "expected shared=False, "
     "head_classes=0 and "
     "label_smoothing=0"),
    (dict(estimator="complementary_sum", head_classes=3), ValueError, "expected shared=False, "
     "head_classes=0 and "
     "label_smoothing=0"),
    (dict(reduction="max"), ValueError, "expected reduction to be \"mean\", \"sum\" or \"none\", "
     "got 'max'"),
    (dict(label_smoothing=1.1), ValueError, r"expected label_smoothing in \[0, 1\], got 1.1"),
    (dict(weight=torch.ones(N), label_smoothing=0.1), ValueError, "expected label_smoothing=0 with "
     "class weights"),
    (dict(weight=torch.ones(N - 1)), ValueError, r"expected weight of shape \(40,\), got \(39,\)"),
    (dict(sampler="zipf"), ValueError, "make_sampler: expected"),
    (dict(sampler="unigram"), ValueError, "expected counts"),
    (dict(sampler=UniformSampler(N - 1, 3), num_samples=None), ValueError, "expected a sampler of "
     "40 classes, got one of "
     "39"),
    (dict(num_samples="3"), TypeError, "expected num_samples of type int, got str"),
    (dict(weight=torch.ones(N, dtype=torch.int64)), TypeError, "expected weight of a floating "
     "dtype, got torch.int64"),
    (dict(head_classes="some"), TypeError, "expected head_classes of type int, got str"),
    (dict(head_classes=None), TypeError, "got NoneType"),
    (dict(head_classes=-1), ValueError, "expected head_classes of at least 0, got -1"),
    (dict(head_classes=N + 1), ValueError, r"expected head_classes in \[0, 40\], got 41"),
    (dict(head_classes=torch.tensor([1.0])), TypeError, "expected head_classes as a number or 1-D "
     "int64 ids"),
    (dict(head_classes=torch.tensor([[1]])), TypeError, "expected head_classes as a number or 1-D "
     "int64 ids"),
    (dict(head_classes=torch.tensor([1, N])), IndexError, r"expected head_classes in \[0, 40\), "
     r"got 1 .. 40"),
    (dict(head_classes=torch.tensor([-1, 3])), IndexError, r"expected head_classes in \[0, 40\), "
     r"got -1 .. 3"),
    (dict(head_classes=torch.tensor([1, 3, 1])), ValueError, "expected head_classes without "
     "repeats"),
])
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        sampled(**kwargs)


def test_from_linear_refuses_arguments_that_the_layer_determines():
    with pytest.raises(
            TypeError, match="from_linear: expected arguments other than those of the "
            "linear layer, got device, dtype"):
        xs.LinearCrossEntropyLoss.from_linear(torch.nn.Linear(D, N), dtype=torch.float64,
                                              device="cpu")


def test_functional_losses_name_arguments_that_are_not_tensors():
    x, ids, weight = torch.zeros(3, D), torch.zeros(3, dtype=torch.int64), torch.zeros(N, D)
    calls = {
        "linear_cross_entropy": dict(input=x, weight=weight,
                                     target=ids), "linear_entropy": dict(input=x, weight=weight),
        "linear_log_prob": dict(input=x, weight=weight),
        "sampled_softmax_loss": dict(input=x, weight=weight, target=ids,
                                     sets=[]), "tower_loss": dict(query=x, item=x, item_id=ids,
                                                                  candidates=[])
    }
    for name, arguments in calls.items():
        for argument in set(arguments) - {"sets", "candidates"}:
            for other, kind in (([1.0], "list"), (np.zeros(3), "ndarray"), (None, "NoneType")):
                with pytest.raises(TypeError, match=f"{name}: expected {argument} as a tensor, got "
                                   f"{kind}"):
                    getattr(xs.functional, name)(**{**arguments, argument: other})
    for name, argument in (("linear_log_prob", "ids"), ("linear_log_prob", "bias"),
                           ("linear_entropy", "bias")):
        with pytest.raises(TypeError, match=f"{name}: expected {argument} as a tensor, got list"):
            getattr(xs.functional, name)(x, weight, **{argument: [1]})


@pytest.mark.parametrize(
    "loss",
    [sampled(), sampled().eval(), xs.LinearCrossEntropyLoss(D, N)], ids=["train", "eval", "exact"])
@pytest.mark.parametrize("input, target, error, message", [
    (torch.zeros(3, D), torch.zeros(4, dtype=torch.int64), ValueError, r"expected target of shape "
     r"\[3\]"),
    (torch.zeros(3, D), torch.zeros(4, 1, dtype=torch.int64), ValueError, r"expected target of "
     r"shape \[3\]"),
    (torch.zeros(3, D), torch.tensor([0, N, 1]), IndexError, r"expected target in \[0, 40\) or "
     r"ignore_index, got 40 at \[1\]"),
    (torch.zeros(3, D), torch.tensor([0, 1, -1]), IndexError, r"expected target in \[0, 40\) or "
     r"ignore_index, got -1 at \[2\]"),
    (torch.zeros(3, D), torch.zeros(3), TypeError, "expected target of dtype int64, got float32"),
    (torch.zeros(3, D).double(), torch.zeros(3, dtype=torch.int64), TypeError, "dtype"),
    (torch.zeros(3, D + 1), torch.zeros(3, dtype=torch.int64), ValueError, "7"),
    ([1.0], torch.zeros(3, dtype=torch.int64), TypeError, "expected input as a tensor, got list"),
    (torch.zeros(3, D), [1, 2, 3], TypeError, "expected target as a tensor, got list"),
    (torch.zeros(6, D // 2), torch.zeros(6, dtype=torch.int64), ValueError, "3"),
])
def test_bad_batches(loss, input, target, error, message):
    with pytest.raises(error, match=message):
        loss(input, target)


def test_zero_classes_are_refused():
    with pytest.raises(ValueError, match="expected num_classes of at least 1, got 0"):
        xs.LinearCrossEntropyLoss(D, 0)


OPTIONS = {
    "reduction": ("sum", [("max", ValueError), (None, ValueError)]),
    "ignore_index": (-1, [("1", TypeError), (1.0, TypeError), (True, TypeError)]),
    "label_smoothing": (0.1, [(1.5, ValueError), (-0.1, ValueError), (math.nan, ValueError),
                              ("1", TypeError), (True, TypeError), (None, TypeError)]),
    "positives": ("sum", [("max", ValueError), (1, ValueError)]),
    "logit_scale": (2.0, [(0.0, ValueError), ("1", TypeError)]),
    "softcap": (3.0, [(0.0, ValueError), ("1", TypeError)]),
    "z_loss": (0.1, [(-1.0, ValueError), ("1", TypeError)]),
    "estimator": ("ranking", [("soft", ValueError), (None, ValueError)]),
    "remove_accidental_hits": (False, [(1, TypeError), ("no", TypeError)]),
    "sparse_grad": (False, [(1, TypeError), ("none", TypeError)]),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["sampled", "exact"])
def test_assigned_options_are_checked_like_constructor_arguments(kind, option, monkeypatch):
    """The error is the same and leaves the loss unchanged. Assigning an option builds each
    operator's option text once."""
    make = sampled if kind == "sampled" else lambda **options: xs.LinearCrossEntropyLoss(
        D, N, **options)
    if kind == "exact" and option in ("estimator", "remove_accidental_hits", "sparse_grad"):
        make = lambda **options: xs.CaneLoss(D, N, candidates=3, **options)
    value, others = OPTIONS[option]
    if kind == "exact" and option == "estimator":
        value = "cane_log_of_mean"
    loss, built = make(), []
    before = dict(vars(loss))
    for other, error in others:
        with pytest.raises(error, match=f"{type(loss).__name__}: expected {option}") as assigned:
            setattr(loss, option, other)
        if kind == "sampled" and option != "estimator":  # the constructor checks more
            with pytest.raises(error) as constructed:
                make(**{option: other})
            assert str(constructed.value) == str(assigned.value)
        assert vars(loss) == before

    def text(**values):
        built.append(tuple(sorted(values)))
        return option_text(**values)

    for module in (xs.tables.table_module, xs.losses.linear_loss):
        monkeypatch.setattr(module, "option_text", text)
    setattr(loss, option, value)
    assert getattr(loss, option) == value and len(set(built)) == len(built)


def test_cane_needs_candidates():
    with pytest.raises(
            ValueError, match="expected candidates .head classes, or draws without "
            "replacement. and noise .draws with replacement. with"):
        sampled(estimator="cane")
    loss = sampled(shared=False)
    loss.estimator = "cane"
    with pytest.raises(
            ValueError, match="expected candidates, sets of distinct classes such as a head, "
            'and noise, .* "cane", got 0 of 1 sets distinct'):
        loss(*batch(3))


def test_the_table_has_a_row_for_each_class():
    for loss in (sampled(), sampled().eval(), xs.LinearCrossEntropyLoss(D, N)):
        loss.linear.weight = torch.nn.Parameter(torch.randn(N + 1, D))
        for call in (lambda: loss(torch.randn(2, D), torch.tensor([1, 2])),
                     lambda: loss.topk(torch.randn(2, D), 3)):
            with pytest.raises(
                    ValueError, match=rf"{type(loss).__name__}: expected linear.weight "
                    rf"with a row for each of {N} classes"):
                call()


@pytest.mark.parametrize(
    "make, name, value",
    [(lambda: xs.BeamTreeLoss(4, xs.LabelTree.balanced(20), num_candidates=3, num_noises=1), "beam",
      5),
     (lambda: xs.BeamTreeLoss(4, xs.LabelTree.balanced(20), num_candidates=3, num_noises=1),
      "num_candidates", 2),
     (lambda: xs.CaneLoss(4, 20, candidates=3), "noise_reduction", "log_of_mean"),
     (lambda: xs.TwoTowerLoss(20), "estimator", "ranking"),
     (lambda: xs.TwoTowerLoss(20), "similarity", "cosine")])
def test_options_fixed_at_construction_cannot_be_assigned(make, name, value):
    with pytest.raises(AttributeError, match=f"expected {name} as an argument of the constructor"):
        setattr(make(), name, value)


@pytest.mark.parametrize("make", [
    lambda: xs.CaneLoss(4, 20, candidates=3),
    lambda: xs.BeamTreeLoss(4, xs.LabelTree.balanced(20), num_candidates=3, num_noises=1)
])
def test_cane_refuses_estimators_without_noise(make):
    loss = make()
    with pytest.raises(
            ValueError, match=r"expected estimator to be one of \['cane', "
            r"'cane_log_of_mean'\], got 'ranking'"):
        loss.estimator = "ranking"
    loss.estimator = "cane_log_of_mean"


@pytest.mark.parametrize(
    "call",
    [dict(weight=torch.ones(3)),
     dict(log_z=torch.zeros(2)),
     dict(z_loss=0.1, estimator="nce")])
@pytest.mark.parametrize("refreshed", [False, True])
def test_a_refused_step_changes_no_sampler_and_no_generator(call, refreshed):
    sampler = xs.samplers.MidxSampler(20, 4, 5, codewords=2)
    loss = xs.SampledSoftmaxLoss(4, 20, sampler=sampler,
                                 estimator=call.get("estimator", "sampled_softmax"))
    if refreshed:
        loss(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    if "weight" in call:
        loss.weight = call["weight"]
    elif "log_z" in call:
        loss.log_z = torch.nn.Parameter(call["log_z"])
    else:
        loss.__dict__["_options"] = loss._options + ",z_loss=0.1"
    generator = torch.Generator().manual_seed(0)
    before, state = {name: value.clone()
                     for name, value in sampler.state_dict().items()}, generator.get_state()
    with pytest.raises((ValueError, RuntimeError)):
        loss(torch.randn(3, 4), torch.tensor([0, 1, 2]), generator)
    assert torch.equal(generator.get_state(), state)
    for name, value in sampler.state_dict().items():
        assert torch.equal(value, before[name]), name
