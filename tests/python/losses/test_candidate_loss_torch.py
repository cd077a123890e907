"""candidate_loss under autograd, torch.compile, export, TorchScript, autocast and threads, and the
arguments it refuses."""

from typing import Optional

import pytest
import torch

import xsoftmax as xs
from candidate_loss_checks import (LAYOUTS, SMOOTHING, assert_same, candidate_loss,
                                   candidate_loss_backward, every_estimator, loss_and_gradient,
                                   naive, ops, problem)
from set_checks import columns


def test_strided(impl):
    arguments = problem()
    want = loss_and_gradient(candidate_loss, arguments)
    moved = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in arguments.items()}
    moved["private_ids"] = arguments["private_ids"].t().contiguous().t()
    moved["scores"] = arguments["scores"].t().contiguous().t()
    assert not any(t.is_contiguous() for t in moved.values())
    assert_same(loss_and_gradient(candidate_loss, moved), want, torch.float32)
    got = candidate_loss_backward(torch.ones(1).expand(7), **moved)
    torch.testing.assert_close(got, candidate_loss_backward(torch.ones(7), **arguments))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@every_estimator
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck(impl, layout, estimator, label_smoothing):
    if estimator not in SMOOTHING and label_smoothing:
        pytest.skip("has no form with label smoothing")
    arguments = problem(layout, Q=3, dtype=torch.float64)
    scores = arguments.pop("scores").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: candidate_loss(s, **arguments, estimator=estimator, label_smoothing=
                                 label_smoothing), scores)


def test_no_second_derivative(impl):
    arguments = problem()
    scores = arguments.pop("scores").requires_grad_()
    (grad,) = torch.autograd.grad(
        candidate_loss(scores, **arguments).sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


def test_impl_may_change_before_backward():
    """Forward saves only the scores, so kernel and composite backward passes are
    interchangeable."""
    arguments = problem()
    scores = arguments.pop("scores").requires_grad_()
    with xs.use_impl("reference"):
        loss = candidate_loss(scores, **arguments).sum()
    (grad,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(
        grad,
        loss_and_gradient(naive, arguments | dict(scores=scores))[1] /
        torch.linspace(0.5, 2.0, 7)[:, None])


def test_threads_give_the_same_bits(same_for_any_threads):
    g = torch.Generator().manual_seed(0)
    arguments = dict(scores=torch.randn(500, 101,
                                        generator=g), target=torch.randint(50, (500,), generator=g),
                     shared_ids=torch.randint(50, (100,), generator=g),
                     target_log_count=torch.rand(500, generator=g))
    same_for_any_threads(lambda: loss_and_gradient(candidate_loss, arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout, dtype):
    arguments = problem(layout, dtype=dtype)
    scores, target = arguments.pop("scores"), arguments.pop("target")
    for options in (dict(estimator="sampled_softmax"),
                    dict(estimator="ranking", remove_accidental_hits=False, label_smoothing=0.2)):
        lists = columns(**arguments, **options)
        torch.library.opcheck(ops.estimator_loss_backward.default,
                              (torch.ones(7, dtype=dtype), scores, target, *lists))
        torch.library.opcheck(ops.estimator_loss.default,
                              (scores.clone().requires_grad_(), target, *lists))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def step(scores, **arguments):
        return candidate_loss(scores * 2, **arguments, label_smoothing=0.1)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seed in (0, 1):
        assert_same(loss_and_gradient(compiled, problem(seed=seed)),
                    loss_and_gradient(step, problem(seed=seed)), torch.float32)


def test_export():
    class Loss(torch.nn.Module):
        def forward(self, scores, target, shared_ids, shared_log_count, target_log_count):
            return ops.candidate_loss(scores, target, [shared_ids], [shared_log_count],
                                      [target_log_count], [False])

    Q = torch.export.Dim("Q")
    arguments = problem("shared")
    program = torch.export.export(Loss(), tuple(arguments.values()),
                                  dynamic_shapes=({0: Q}, {0: Q}, None, None, {0: Q}))
    arguments = problem("shared", Q=11)
    assert torch.equal(program.module()(*arguments.values()), candidate_loss(**arguments))


def test_torchscript():
    @torch.jit.script
    def loss(scores: torch.Tensor, target: torch.Tensor, shared_ids: torch.Tensor):
        none: Optional[torch.Tensor] = None
        counts = [none]
        return torch.ops.xsoftmax.candidate_loss(scores, target, [shared_ids],
                                                 [torch.zeros(shared_ids.shape)], counts, [False],
                                                 "label_smoothing=0.1")

    arguments = problem("shared", counts=False)
    assert_same(loss_and_gradient(loss, arguments),
                loss_and_gradient(naive, arguments, label_smoothing=0.1), torch.float32)


def test_autocast():
    """Scores may have any floating dtype; the loss is float32."""
    arguments = problem()
    low = arguments["scores"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        loss = candidate_loss(**arguments | dict(scores=low))
    assert loss.dtype == torch.float32 and torch.equal(
        loss, candidate_loss(**arguments | dict(scores=low.float())))


@pytest.mark.parametrize("change, error, message", [
    (dict(scores=torch.zeros(2)), ValueError, "expected scores with 2 dimensions"),
    (dict(scores=torch.zeros(2, 7)), ValueError,
     r"expected scores with size 6 \(the target, then the private, then the shared candidates\)"),
    (dict(scores=torch.zeros(2, 6, dtype=torch.bfloat16)), TypeError, "expected scores of dtype "
     "float32 or float64, got "
     "bfloat16"),
    (dict(scores=torch.zeros(2, 6, dtype=torch.complex64)), TypeError, "expected scores of dtype "
     "float32 or float64, got "
     "complex64"),
    (dict(target=torch.zeros(3, dtype=torch.int64)), ValueError, r"expected target with size 2 "
     r"\(the rows of scores\)"),
    (dict(target=torch.zeros(2, 1, dtype=torch.int64)), ValueError, "expected target with 1 "
     "dimension,"),
    (dict(target=torch.zeros(2)), TypeError, "expected target of dtype int64, got float32"),
    (dict(target=torch.zeros(2, dtype=torch.int64, device="meta")), TypeError,
     "expected target on scores's device cpu, got meta"),
    (dict(private_ids=torch.zeros(3, 2, dtype=torch.int64)), ValueError, "expected private_ids "
     "with size 2"),
    (dict(private_ids=torch.zeros(2, 2, dtype=torch.int32)), TypeError, "expected ids of a set of "
     "dtype int64, got int32"),
    (dict(shared_ids=torch.zeros(1, 1, 3, dtype=torch.int64)), ValueError, r"expected ids of a set "
     r"of shape \[M\], or "
     r"\[Q, M\], got"),
    (dict(shared_ids=torch.zeros(3, dtype=torch.int64, device="meta")), TypeError,
     "expected shared_ids on scores's device cpu"),
    (dict(private_log_count=torch.zeros(2, 3)), ValueError, "expected log_count of a set of the "
     "shape of its ids"),
    (dict(shared_log_count=torch.zeros(2)), ValueError, "expected log_count of a set of the shape "
     "of its ids"),
    (dict(shared_log_count=torch.zeros(3, dtype=torch.int64)), TypeError, "expected log_count of a "
     "set of dtype float32"),
    (dict(shared_log_count=torch.zeros(3, device="meta")), TypeError, "expected shared_log_count "
     "on scores's device cpu"),
    (dict(scores=torch.zeros(2, 4), private_ids=None,
          target_log_count=torch.zeros(3)), ValueError, "expected target_log_count with size 2"),
    (dict(scores=torch.zeros(2, 4), private_ids=None, target_log_count=torch.zeros(
        2, dtype=torch.int64)), TypeError, "expected target_log_count of a set of dtype float32"),
    (dict(estimator="nce2"), ValueError,
     'expected estimator to be one of "sampled_softmax", "ranking", .*got "nce2"'),
    (dict(estimator="blackout"), ValueError,
     'expected target_log_count of the sets that are drawn, for estimator "blackout", got none'),
    (dict(estimator="one_vs_each", label_smoothing=0.1), ValueError,
     'expected label_smoothing=0 for estimator "one_vs_each", got 0.1'),
    (dict(label_smoothing=1.5), ValueError, r"expected label_smoothing in \[0, 1\], got 1.5"),
    (dict(label_smoothing=float("nan")), ValueError, r"expected label_smoothing in \[0, 1\], got "
     r"nan"),
    (dict(reduction="mean"), ValueError, "expected options among estimator, "
     "remove_accidental_hits, label_smoothing|reduction"),
])
def test_bad_inputs(impl, change, error, message):
    arguments = dict(scores=torch.zeros(2, 6), target=torch.zeros(2, dtype=torch.int64),
                     private_ids=torch.zeros(2, 2, dtype=torch.int64), shared_ids=torch.zeros(
                         3, dtype=torch.int64)) | change
    with pytest.raises(error, match="candidate_loss: " + message):
        candidate_loss(**arguments)


def test_lists_of_different_lengths_are_refused():
    scores, target, ids = torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64), torch.zeros(
        3, dtype=torch.int64)
    with pytest.raises(ValueError, match="with an entry for each set, got 1, 1, 0 and 1"):
        ops.candidate_loss(scores, target, [ids], [torch.zeros(3)], [], [False])
    private = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected sets in the order of the columns of scores"):
        ops.candidate_loss(scores, target, [ids, private],
                           [torch.zeros(3), torch.zeros(2, 2)], [None, None], [False, False])


@pytest.mark.parametrize("grad", [torch.ones(3), torch.ones(2, 1)])
def test_gradient_of_the_wrong_shape(impl, grad):
    """Without the check the kernel would read past the end of the gradient."""
    with pytest.raises(ValueError, match="grad"):
        candidate_loss_backward(grad, torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64),
                                shared_ids=torch.zeros(3, dtype=torch.int64))
