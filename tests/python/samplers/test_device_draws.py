"""Device kernels draw and count like those of the CPU, from the same index and seed.

Uses the GPU if there is one, otherwise whatever runs CPU tensors: CUDA kernels on the emulator
(tests/cuda_emulation). The CPU's results come from a separate process: python test_device_draws.py
FILE
"""

import copy
import os
import subprocess
import sys

import pytest
import torch

import xsoftmax as xs

N, D, Q, T, HEAD = 400, 9, 6, 3, 7
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ops = torch.ops.xsoftmax

PRIVATE = [
    dict(),
    dict(num_samples=70),
    dict(distinct=True),
    dict(distinct=True, num_samples=150),
    dict(distinct=True, num_samples=N - HEAD)
]
SHARED = [
    dict(shared=True),
    dict(shared=True, num_samples=150),
    dict(shared=True, mixture="rms"),
    dict(shared=True, distinct=False, num_samples=50)
]
MIDX = [
    dict(codewords=6),
    dict(codewords=6, kind="pq", bias=True),
    dict(codewords=70, bias=True),
    dict(codewords=3, skew=True, bias=True)
]
CASES = {
    f"midx-{i}-{j}": ("midx", {**table, **set_})
    for i, table in enumerate(MIDX)
    for j, set_ in enumerate(PRIVATE + SHARED)
}
CASES |= {
    f"spread-{j}": ("midx_spread", dict(codewords=6, **set_))
    for j, set_ in enumerate([PRIVATE[0], PRIVATE[3], SHARED[1]])
}
CASES |= {
    f"unrefreshed-{j}": ("midx", dict(codewords=6, unseen=True, bias=bool(j % 2), **set_))
    for j, set_ in enumerate(PRIVATE[1:] + SHARED)
}
CASES |= {f"exact-{bias}": ("midx_exact", dict(codewords=6, bias=bias)) for bias in (False, True)}
CASES |= {
    f"{name}-{bias}": (name, dict(bias=bias))
    for name in ("lsh", "sphere", "rff")
    for bias in (False, True)
}


def batch():
    """Queries, one with NaN and one ignored, and their targets, some of which are never drawn."""
    torch.manual_seed(1)
    z, target = torch.randn(Q, D), torch.randint(N, (Q, T))
    target[0, 1], target[2, 1], z[3] = -1, 0, 0.0
    target[3] = -1
    return z, target


def make(name, unseen=False, skew=False, num_samples=20, **options):
    torch.manual_seed(0)
    weight, bias = torch.randn(N, D), 1.5 * torch.randn(N)
    bias = 4 * bias if skew else bias  # a few classes have all of q, so they are always drawn
    sampler = xs.samplers.make_sampler(name, N, num_samples, dim=D, exclude=HEAD, **options)
    if not unseen:
        sampler.refresh(weight, bias if options.get("bias") else None)
    return sampler


def answers(sampler, z, target, with_nan):
    """Draws, and counts of any classes. A NaN query leaves no shared set."""
    if with_nan:
        z = z.clone()
        z[1, 0] = float("nan")
    index = [table.detach() for table in sampler._index()]
    seed = torch.tensor(11, dtype=torch.int64, device=z.device)
    sets = ops.adaptive_sample(sampler.family, seed, z, target, index, sampler.options)
    counts = ()
    if sampler.shared or not sampler.distinct:
        classes = torch.arange(0, N, 3, device=z.device)
        counts = (sampler.log_count(z, classes), sampler.log_count(z, target.clamp(min=0)))
    return [result.cpu() for result in (*sets, *counts)]


UPDATED = {
    f"{name}-{kind}-{bias}": (name,
                              dict(codewords=6, kind=kind, bias=bias, update_every=2,
                                   refresh_every=0))
    for name in ("midx", "midx_spread")
    for kind in ("rq", "pq")
    for bias in (False, True)
}
UPDATED |= {"midx_exact": ("midx_exact", dict(codewords=6, bias=True, refresh_every=0))}


def trained(sampler, device):
    """The index after steps that mark scored rows and update it now and then, and after an update
    of given rows."""
    torch.manual_seed(2)
    weight, bias = torch.randn(
        N, D).to(device), torch.randn(N).to(device) if "bias=true" in sampler.options else None
    z, target = (x.to(device) for x in batch())
    for step in range(4):
        ids = torch.randint(N, (Q, 5)).to(device)
        if sampler.touched.numel() > 0:
            ops.midx_note_(sampler.touched, getattr(sampler, "query_square", None), sampler.step, z,
                           target, ids)
            ops.midx_note_(sampler.touched, getattr(sampler, "query_square", None), sampler.step, z,
                           target[:, 0], ids[0])
        marked = sampler.touched.clone()
        sampler.prepare(weight, bias)
        weight += 1
    sampler.update(weight, bias, torch.tensor([N - 1, 300, 0, 300], device=device))
    return [marked.cpu(), *(table.detach().cpu().clone() for table in sampler._index())]


def every_case():
    results = {}
    for name, (family, options) in UPDATED.items():
        sampler = make(family, **options)
        results[name] = (copy.deepcopy(sampler.state_dict()), trained(sampler, "cpu"))
    for name, (family, options) in CASES.items():
        sampler = make(family, **options)
        z, target = batch()
        private = not sampler.shared and family in ("midx", "midx_spread", "lsh")
        results[name] = (sampler.state_dict(), answers(sampler, z, target, False),
                         answers(sampler, z, target, True) if private else None)
    return results


@pytest.fixture(scope="module")
def of_cpu(tmp_path_factory):
    path = tmp_path_factory.mktemp("draws") / "answers.pt"
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XSOFTMAX_EMULATE", "LD_PRELOAD"))
    }
    subprocess.run([sys.executable, __file__, str(path)], check=True, env=plain)
    return torch.load(path)


def drawn(results, is_set):
    """Ids and counts; those of a set in ascending order, because rounding decides which classes
    with probability 1 come first."""
    ids, order = results[0].sort(-1) if is_set else (results[0], None)
    return ids, results[1].gather(-1, order) if is_set else results[1]


@pytest.mark.parametrize("case", CASES)
def test_draws_of_a_device_match_the_cpu(case, of_cpu):
    family, options = CASES[case]
    state, usual, with_nan = of_cpu[case]
    sampler = make(family, **{**options, "unseen": True})
    sampler.load_state_dict(state)
    sampler.to(DEVICE)
    z, target = (x.to(DEVICE) for x in batch())
    for want, is_nan in ((usual, False), (with_nan, True)):
        if want is None:
            continue
        got = answers(sampler, z, target, is_nan)
        ids, of_ids = drawn(got, sampler.distinct), drawn(want, sampler.distinct)
        same = ids[0] == of_ids[0]
        assert same.double().mean() > 0.98  # except points that rounding moves across a boundary
        torch.testing.assert_close(ids[1][same], of_ids[1][same], rtol=0, atol=2e-5, equal_nan=True)
        for one, other in zip(got[2:], want[2:]):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5, equal_nan=True)
        assert not sampler.distinct or (got[0].sort(-1).values.diff() > 0).all()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("factor", [1.3, 50.0])
def test_a_set_never_holds_a_class_twice(shared, factor):
    """Here a cell claims more weight than it has, so rounding puts more points into it than it has
    classes. The CPU, which checks values, refuses such an index."""
    sampler = make("midx", codewords=6, distinct=True, shared=shared, num_samples=150).to(DEVICE)
    [mass] = [
        table
        for table in sampler._index() if table.dtype == torch.float64 and table.shape == (6, 6)
    ]
    mass.view(-1)[mass.argmax()] *= factor
    for step in range(5):
        try:
            ids = sampler.sample(batch()[0].to(DEVICE),
                                 generator=torch.Generator(DEVICE).manual_seed(step))[0].ids
        except ValueError as error:
            assert DEVICE == "cpu" and "expected mass to be the number of classes" in str(error)
            return
        assert (ids.sort(-1).values.diff() > 0).all() and HEAD <= ids.min() and ids.max() < N


@pytest.mark.parametrize("case", UPDATED)
def test_index_updates_of_a_device_match_the_cpu(case, of_cpu):
    family, options = UPDATED[case]
    state, want = of_cpu[case]
    sampler = make(family, **{**options, "unseen": True})
    sampler.load_state_dict(state)
    sampler.to(DEVICE)
    for one, other in zip(trained(sampler, DEVICE), want):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    torch.save(every_case(), sys.argv[1])
