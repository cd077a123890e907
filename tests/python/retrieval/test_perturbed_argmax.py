"""perturbed_argmax: the class with the largest score plus noise, which samples the softmax."""

import pytest
import torch

import xsoftmax as xs
from xsoftmax.retrieval import SearchIndex

ops = torch.ops.xsoftmax


def table(classes=3000, width=24, bias=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(20, width, generator=generator)
    near = torch.randint(20, (classes,), generator=generator)
    weight = centres[near] + torch.randn(classes, width, generator=generator) * torch.rand(
        classes, 1, generator=generator)
    return weight.to(dtype), torch.randn(classes, generator=generator).to(dtype) if bias else None


def gumbel(*shape):
    return -torch.empty(*shape).exponential_().log()


def dense(queries, weight, bias, noise):
    scores = queries.double() @ weight.double().t() + noise
    return scores if bias is None else scores + bias.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])
def test_the_class_is_that_of_all_scores(dtype, bias, scale):
    torch.manual_seed(1)
    weight, bias = table(bias=bias, dtype=dtype)
    index = SearchIndex(weight, bias)
    queries, noise = torch.randn(70, 24).to(dtype), scale * gumbel(70, 3000)
    ids, cells, certified = ops.perturbed_argmax(queries, weight, bias, index.tensors, noise)
    assert torch.equal(ids, dense(queries, weight, bias, noise).argmax(1))
    assert certified.all() and (cells <= index.num_cells).all()
    with xs.use_impl("reference"):
        reference, _, _ = ops.perturbed_argmax(queries, weight, bias, index.tensors, noise)
    assert torch.equal(ids, reference)
    if scale == 0.05:  # the bounds leave out as many cells as in a search without noise
        plain = ops.search_topk(queries, weight, bias, index.tensors, 1, "")[2].double().mean()
        assert plain < 0.8 * index.num_cells and cells.double().mean() < 1.1 * plain
    for one in range(3):  # the others make no difference
        alone = ops.perturbed_argmax(queries[one:one + 1], weight, bias, index.tensors,
                                     noise[one:one + 1])
        assert alone[0] == ids[one]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_wide_rows_are_compared_in_a_few_directions_first(bias, scale):
    torch.manual_seed(1)
    weight, bias = table(width=128, bias=bias)
    queries = 0.3 * torch.randn(70, 4) @ torch.randn(4, 128)
    noise = scale * gumbel(70, 3000)
    want = dense(queries, weight, bias, noise).argmax(1)
    for given in (None, queries):
        index = SearchIndex(weight, bias, queries=given, num_codewords=1)
        assert index.tensors[7].shape[0] == 16
        ids, _, certified = ops.perturbed_argmax(queries, weight, bias, index.tensors, noise)
        assert torch.equal(ids, want) and certified.all()


@pytest.mark.parametrize("size", [1e10, 1e17, 1e30])
def test_large_noise_loses_no_class(size):
    """Sums are rounded to float64, and of equal sums the lower id wins."""
    torch.manual_seed(3)
    weight, _ = table(500, dtype=torch.float64)
    index, queries = SearchIndex(weight, None), torch.randn(50, 24, dtype=torch.float64)
    noise = torch.where(torch.rand(50, 500) < 0.1, size, 0.0)
    ids, _, certified = ops.perturbed_argmax(queries, weight, None, index.tensors, noise)
    sums = dense(queries, weight, None, noise)
    assert torch.equal(sums.gather(1, ids[:, None])[:, 0], sums.amax(1)) and certified.all()
    if size == 1e30:
        assert torch.equal(ids, noise.argmax(1))


def test_queries_too_small_for_noise_are_not_certified():
    weight, _ = table(500, dtype=torch.float64)
    index = SearchIndex(weight, None)
    queries = torch.full((1, 24), 1e-300, dtype=torch.float64)
    _, _, certified = ops.perturbed_argmax(queries, weight, None, index.tensors, gumbel(1, 500))
    assert not certified.any()


@pytest.mark.parametrize("factor", [1e-36, 1e-6, 1e6, 1e30])
def test_scales_of_queries_and_noise_may_differ_widely(factor):
    weight, _ = table(500)
    index = SearchIndex(weight, None)
    queries, noise = factor * torch.randn(20, 24), gumbel(20, 500)
    ids, _, certified = ops.perturbed_argmax(queries, weight, None, index.tensors, noise)
    assert torch.equal(ids, dense(queries, weight, None, noise).argmax(1)) and certified.all()


def test_infinite_noise_forces_and_forbids_classes():
    weight, bias = table(500, bias=True)
    index = SearchIndex(weight, bias)
    queries, noise = torch.randn(6, 24), torch.zeros(6, 500)
    best = dense(queries, weight, bias, noise).argmax(1)
    noise[torch.arange(6), best] = -torch.inf
    noise[0, 77] = torch.inf
    ids, _, certified = ops.perturbed_argmax(queries, weight, bias, index.tensors, noise)
    assert ids[0] == 77 and certified.all()
    assert torch.equal(ids, dense(queries, weight, bias, noise).argmax(1)) and (ids != best).all()


def test_equal_sums_give_the_lower_id_and_zero_queries_the_noise():
    weight = torch.ones(400, 8)
    index = SearchIndex(weight, None)
    queries = torch.cat([torch.ones(1, 8), torch.zeros(2, 8), torch.full((1, 8), torch.nan)])
    noise = torch.zeros(4, 400)
    noise[0, [9, 300]] = 1
    noise[1, 44] = 1
    ids, cells, certified = ops.perturbed_argmax(queries, weight, None, index.tensors, noise)
    assert ids.tolist() == [9, 44, 0, 0]
    assert certified.tolist() == [True, True, True, False] and cells[3] == 0


def test_gumbel_noise_samples_the_softmax():
    """A chi-square test of 100,000 samples against the probabilities."""
    torch.manual_seed(2)
    weight, bias = table(300, 16, bias=True, seed=3)
    index, query = SearchIndex(weight, bias), 0.3 * torch.randn(16)
    counts = torch.zeros(300)
    for _ in range(10):
        ids, _, _ = ops.perturbed_argmax(query.expand(10_000, 16), weight, bias, index.tensors,
                                         gumbel(10_000, 300))
        counts += ids.bincount(minlength=300)
    expected = 100_000 * (weight @ query + bias).softmax(0)
    frequent = expected >= 5
    found, wanted = (torch.cat([part[frequent], part[~frequent].sum()[None]]).double()
                     for part in (counts, expected))
    stats = pytest.importorskip("scipy.stats")
    assert stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > 1e-4


@pytest.mark.parametrize("change, error, message", [
    (dict(noise=torch.zeros(5, 99)), ValueError, "expected noise with size 100"),
    (dict(noise=torch.zeros(5, 100, dtype=torch.float64)), TypeError, "noise of dtype float32"),
    (dict(noise=torch.full((5, 100), torch.nan)), ValueError, "noise without NaN"),
    (dict(input=torch.zeros(4, 8)), ValueError, "noise"),
    (dict(index=[torch.zeros(1)]), ValueError, "an index of 10 tensors, got 1"),
])
def test_bad_arguments_are_named(change, error, message):
    weight = torch.randn(100, 8)
    arguments = dict(input=torch.randn(5, 8), weight=weight, bias=None, index=SearchIndex(
        weight, None).tensors, noise=torch.zeros(5, 100)) | change
    with pytest.raises(error, match=message) as caught:
        ops.perturbed_argmax(*arguments.values())
    assert "perturbed_argmax" in str(caught.value)
