"""Samples for a part of a batch equal those of the whole batch.

A seed then has two numbers, the key and the number of the first query.
"""

import pytest
import torch

import xsoftmax as xs

N, D, Q, M, FIRST = 60, 5, 150, 4, 130
COUNTS = 1.0 / torch.arange(1, N + 1)
make = xs.samplers.make_sampler
SAMPLERS = {
    "uniform": lambda: xs.samplers.UniformSampler(N, M, shared=False),
    "uniform distinct": lambda: xs.samplers.UniformSampler(N, M, shared=False, distinct=True,
                                                           exclude=torch.tensor([3, 4])),
    "log_uniform": lambda: xs.samplers.LogUniformSampler(N, M, shared=False),
    "unigram": lambda: xs.samplers.UnigramSampler(COUNTS, M, shared=False),
    "unigram distinct": lambda: xs.samplers.UnigramSampler(COUNTS, M, shared=False, distinct=True),
    "complement": lambda: xs.samplers.ComplementSampler(None, M, num_classes=N),
    "complement of unigram": lambda: xs.samplers.ComplementSampler(
        xs.samplers.UnigramSampler(COUNTS, M, shared=False), M),
    "midx": lambda: make("midx", N, M, dim=D, codewords=3),
    "midx distinct": lambda: make("midx", N, M, dim=D, codewords=3, distinct=True),
    **{
        name: lambda name=name: make(name, N, M, dim=D)
        for name in ("midx_exact", "lsh", "sphere", "rff")
    },
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_of_a_part_equal_those_of_the_whole(name):
    torch.manual_seed(0)
    sampler, weight, queries, target = SAMPLERS[name](), torch.randn(N, D), torch.randn(
        Q, D), torch.randint(N, (Q,))
    sampler.refresh(weight)
    whole, = sampler.sample(queries, target, torch.Generator().manual_seed(7))
    for part in sampler.modules():
        part._first_query = FIRST
    part, = sampler.sample(queries[FIRST:], target[FIRST:], torch.Generator().manual_seed(7))
    assert torch.equal(part.ids, whole.ids[FIRST:])
    torch.testing.assert_close(part.log_count, whole.log_count[FIRST:])
    torch.testing.assert_close(part.target_log_count, whole.target_log_count[FIRST:])


@pytest.mark.parametrize("name, options", [("uniform", {}), ("unigram", dict(counts=COUNTS)),
                                           ("midx", dict(shared=True, codewords=3))])
def test_a_shared_set_does_not_depend_on_the_first_query(name, options):
    torch.manual_seed(0)
    sampler, queries = make(name, N, M, dim=D, **options), torch.randn(Q, D)
    sampler.refresh(torch.randn(N, D))
    whole, = sampler.sample(queries, None, torch.Generator().manual_seed(7))
    sampler._first_query = FIRST
    part, = sampler.sample(queries, None, torch.Generator().manual_seed(7))
    assert torch.equal(part.ids, whole.ids)


def test_a_seed_may_be_a_strided_tensor():
    seed = torch.tensor([5, 9, 3, 9])[::2]
    draws = torch.ops.xsoftmax.uniform_sample(seed, 0, 1000, 4, 5, False)
    assert torch.equal(draws,
                       torch.ops.xsoftmax.uniform_sample(torch.tensor(5), 0, 1000, 7, 5, False)[3:])


@pytest.mark.parametrize("shape, queries", [([3], 4), ([1], 4), ([1, 2], 4), ([2], None)])
def test_seeds_of_a_wrong_shape_are_refused(shape, queries):
    with pytest.raises(
            ValueError, match=r"uniform_sample: expected seed of shape \[\], or \[2\] "
            r".* got shape \["):
        torch.ops.xsoftmax.uniform_sample(torch.zeros(shape, dtype=torch.int64), 0, 10, queries, 5,
                                          False)
