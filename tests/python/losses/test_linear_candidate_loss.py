"""The loss of linear candidates in one pass against its composite, in shapes that kernels treat
differently."""

import pytest
import torch

import xsoftmax as xs
from score_checks import ROUNDING

ops = torch.ops.xsoftmax
DRAWN = [
    "sampled_softmax", "ranking", "nce", "negative_sampling", "one_vs_each", "blackout",
    "importance"
]
CANE = ["cane", "cane_log_of_mean"]
# Queries, private and shared candidates, width, classes, private and shared columns without
# replacement.
SHAPES = {
    "both": (5, 3, 7, 40, 30, 1, 2), "private": (4, 21, 0, 64, 50, 4, 0),
    "shared": (3, 0, 33, 7, 40, 0, 5), "none": (3, 0, 0, 16, 5, 0, 0),
    "long": (2, 30, 1100, 24, 2000, 0, 9),
    "longer than shared memory": (2, 1, 12500, 8, 90000, 0, 0),
    "rows beyond shared memory": (2, 60, 5, 200, 90, 3, 0), "many rows": (2, 150, 0, 301, 500, 0, 0)
}


def problem(Q, P, S, D, N, distinct_private, distinct_shared, dtype, strided=False, bias=True):
    g = torch.Generator().manual_seed(0)
    floats = torch.float64 if dtype == torch.float64 else torch.float32
    random = lambda *size: torch.randn(size, generator=g, dtype=floats)
    weight = random(N, D + 8).to(dtype)[:, :D]
    input, target = (random(Q, D) * 0.3).to(dtype), torch.randint(N, (Q,), generator=g)
    target[1], input[1] = -100, float("nan")  # an ignored query may hold anything
    private, shared = torch.randint(N, (Q, P), generator=g), torch.randint(N, (S,), generator=g)
    counts = [random(Q, P), random(S)]
    if P > 2:
        private[0, 1], counts[0][0, 2] = target[0], float("inf")
    if S > 2:
        shared[1], counts[1][2] = target[0], float("inf")
    candidates = [
        private if P else None, shared if S else None, counts[0] if P else None,
        counts[1] if S else None,
        random(Q)
    ]
    return (input, weight if strided else weight.contiguous(),
            random(N).to(dtype) if bias else None, target, candidates,
            [distinct_private, distinct_shared])


def compare(arguments, options, dtype):
    run = lambda: ops.linear_candidate_loss_forward(*arguments, options, [True, True])
    got = run()
    with xs.use_impl("reference"):
        want = run()
    assert torch.equal(got[3], want[3])
    assert got[0][1] == 0 and got[1][1].eq(0).all() and got[2][1].eq(0).all()
    # the composite's gradient of an ignored query with NaN is NaN
    counted = torch.arange(got[0].shape[0]) != 1
    for i in range(3):
        a, b = got[i][counted], want[i][counted]
        # The composite rounds the gradient of the input to its dtype. Gradients of shared
        # candidates' scores may be rounded to bfloat16 before the product (see
        # candidate_scores_checks.py), an error of 2^-8 of each term.
        rounding = ROUNDING[dtype] if i == 1 else {torch.float64: 1e-12}.get(dtype, 1e-5)
        loose = dtype == torch.bfloat16 and i == 1
        largest = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(
            a, b, rtol=max(rounding, 1e-12 if dtype == torch.float64 else 1e-5), atol=2**-7 *
            largest if loose else {torch.float64: 1e-12}.get(dtype, 1e-5) * max(1.0, largest))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("estimator", ["sampled_softmax", "nce", "blackout", "cane"])
def test_shapes(shape, estimator):
    *_, distinct_private, distinct_shared = SHAPES[shape]
    if estimator == "cane" and distinct_private + distinct_shared == 0:
        pytest.skip("CANE needs a distinct set")
    compare(problem(*SHAPES[shape], torch.float32), f"estimator={estimator}", torch.float32)


@pytest.mark.parametrize("remove", ["true", "false"])
@pytest.mark.parametrize("estimator", DRAWN + CANE)
def test_estimators(estimator, remove):
    for shape in ("both", "private", "shared"):
        for smoothing in (0.0, 0.1) if estimator in DRAWN[:2] else (0.0,):
            options = (f"estimator={estimator},remove_accidental_hits={remove},"
                       f"label_smoothing={smoothing}")
            compare(problem(*SHAPES[shape], torch.float32, bias=shape != "shared"), options,
                    torch.float32)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16],
                         ids=str)
def test_dtypes(dtype, strided):
    for shape in ("both", "private", "shared", "many rows"):
        compare(problem(*SHAPES[shape], dtype, strided), "estimator=sampled_softmax", dtype)


@pytest.mark.parametrize("impl", ["kernel", "reference"])
def test_aligned_rows_of_scores_give_the_same_result(impl):
    """Shared scores start at a multiple of eight columns, and rows have a multiple of eight."""
    for P, S in ((0, 33), (3, 7), (7, 8)):
        arguments = problem(5, P, S, 40, 50, 0, 0, torch.float32)
        with xs.use_impl(impl):
            plain = ops.linear_candidate_loss_forward(*arguments, "", [True, True])
            aligned = ops.linear_candidate_loss_forward(*arguments, "", [True, True], None, True)
        lead = -(1 + P) % 8
        assert aligned[2].shape[1] % 8 == 0 and aligned[2].shape[1] - lead - (1 + P + S) < 8
        counted = torch.arange(5) != 1
        torch.testing.assert_close(aligned[2][counted, lead:lead + 1 + P + S], plain[2][counted],
                                   rtol=1e-6, atol=1e-6)
        torch.testing.assert_close([t[counted] for t in aligned[:2]],
                                   [t[counted] for t in plain[:2]], rtol=1e-6, atol=1e-6)


def test_one_gradient_scale_for_all_queries():
    """A 0-d scale applies to every query, and a gradient of 0 stays 0 whatever the scale and the
    query hold."""
    generator = torch.Generator().manual_seed(1)
    grad, input, weight = (torch.randn(*size, generator=generator)
                           for size in ((4, 5), (4, 6), (20, 6)))
    private, shared = torch.randint(20, (4, 2), generator=generator), torch.randint(
        20, (3,), generator=generator)
    grad[1] = 0
    for factor in (3.0, 0.0):
        one, each = (ops.candidate_scores_backward(grad, input, weight, private, shared,
                                                   [True, True, True], scale, True)
                     for scale in (torch.tensor(factor), torch.full((4,), factor)))
        torch.testing.assert_close(one, each)
    row = torch.zeros(1, 5)
    infinite = ops.candidate_scores_backward(row, input[:1], weight, private[:1], shared,
                                             [False, True, False], torch.tensor(float("inf")), True)
    with xs.use_impl("reference"):
        reference = ops.candidate_scores_backward(row, input[:1], weight, private[:1],
                                                  shared, [False, True, False],
                                                  torch.tensor(float("inf")), True)
    assert reference[2].eq(0).all() and infinite[2].isnan().logical_not().all()
