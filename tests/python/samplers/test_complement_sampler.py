"""Draws outside a set of classes: formula, statistics, and errors."""

import math

import pytest
import torch

import xsoftmax as xs
from sampler_checks import chi_square
from xsoftmax.samplers import (ComplementSampler, InBatchSampler, StaticSampler, UniformSampler,
                               UnigramSampler, UnionSampler)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ops = torch.ops.xsoftmax
WEIGHTS = torch.tensor([9.0, 5, 4, 3, 2, 2, 1, 1, 1, 0.5])


def complement(name, num_samples, tries):
    if name == "uniform":
        return ComplementSampler(None, num_samples, num_classes=10)
    options = dict(num_samples=num_samples * tries, shared=False)
    return ComplementSampler(
        UniformSampler(10, exclude=3, **options) if name == "uniform but three" else StaticSampler(
            WEIGHTS, **options), num_samples)


@pytest.mark.parametrize("name, tries", [("uniform", 1), ("uniform but three", 2), ("skewed", 1),
                                         ("skewed", 2), ("skewed", 5)])
def test_draws_match_their_counts(name, tries):
    """No class of the set is drawn; counts sum to num_samples over the other classes and match the
    draws. Sets of several sizes."""
    n, queries = 6000, torch.zeros(3, 4)
    sampler = complement(name, n, tries)
    sets = torch.tensor([[0, 1, 2, 5], [9, -1, -1, 0], [-1, -1, -1, -1]])
    torch.manual_seed(3)
    drawn = sampler.sample_outside(queries, sets, torch.arange(10).expand(3, 10))
    assert not drawn.distinct and drawn.ids.shape == (3, n)
    for q in range(3):
        outside = torch.tensor([c not in sets[q].tolist() for c in range(10)])
        count = drawn.target_log_count[q].exp().double()
        assert (count[~outside] == 0).all()
        assert count.sum().item() == pytest.approx(n, rel=1e-5)
        seen = torch.bincount(drawn.ids[q], minlength=10)
        assert seen[~outside].sum() == 0
        assert chi_square(seen[outside], count[outside]) > 1e-3
        torch.testing.assert_close(drawn.log_count[q], drawn.target_log_count[q][drawn.ids[q]],
                                   rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tries", [0, 1, 5])
@pytest.mark.parametrize("rows", ["one set", "sets", "all classes"])
def test_kernels_are_equal_to_their_reference(tries, rows):
    """Sets of several sizes, some empty; draws that are all inside are replaced by uniform ones."""
    random = torch.Generator().manual_seed(tries)
    num_classes, queries, num_samples = 12, 40, 6

    def integers(*shape, low=0):
        return torch.randint(low, num_classes, shape, generator=random).clamp(min=-1)

    sets = ops.candidate_set(integers(queries, 7, low=-4), num_classes)
    if rows == "one set":
        sets = sets[:1]
    elif rows == "all classes":
        sets[::3] = -1
        sets = torch.cat([sets, torch.full((queries, 5), -1)], 1)
        sets[1::3] = torch.arange(num_classes)
    target, ids = integers(queries, 2, low=-1), integers(queries, num_samples)
    draws = integers(queries, num_samples * tries) if tries else None
    options = f"num_classes={num_classes},num_samples={num_samples},tries={tries}"
    log_q = torch.rand(num_classes, dtype=torch.float64, generator=random).log_softmax(0)

    def counts(classes):
        return (log_q[classes.clamp(0, num_classes - 1)].float() +
                math.log(num_samples * tries)) if tries else None

    def results():
        inside = ops.sort_sets(sets, num_classes)
        return [
            inside,
            ops.complement_sample(torch.tensor(3), inside, draws, torch.zeros(queries, 1), options),
            *ops.complement_log_count(inside, counts(inside), ids, counts(ids), target,
                                      counts(target), options),
            *ops.complement_log_count(inside, counts(inside), ids, counts(ids), None, None, options)
        ]

    found = results()
    with xs.use_impl("reference"):
        want = results()
    for a, b in zip(found, want):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    if tries == 1 and rows == "one set":
        assert (found[1] != draws).any() and (found[1] == draws).any()


def test_approaches_the_renormalised_sampler():
    """The distribution approaches q / (1 - q(C)) with more tries."""
    inside, want = torch.tensor([0, 1]), (WEIGHTS[2:] / WEIGHTS[2:].sum()).log()
    errors = []
    for tries in (1, 4, 16):
        got = complement("skewed", 1, tries).sample_outside(torch.zeros(8, 1), inside,
                                                            torch.arange(2, 10)).target_log_count
        errors.append((got - want).abs().max().item())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-4


def test_a_sampler_draws_outside_the_target():
    """Complementary sum sampling: the estimated sum over all classes except the target is
    unbiased."""
    n, target = 5, torch.tensor([0, 4, -1])
    values = torch.rand(10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name in ("uniform", "skewed"):
        sampler = complement(name, n, 3)
        torch.manual_seed(0)
        sums = []
        for _ in range(2000):
            [drawn] = sampler.sample(torch.zeros(3, 2), target)
            assert (drawn.ids != target[:, None]).all() and drawn.target_log_count.isneginf().all()
            sums.append((values[drawn.ids] * (-drawn.log_count.double()).exp()).sum(1))
        sums, want = torch.stack(sums), values.sum() - values[target.clamp(min=0)].where(
            target >= 0, 0)
        assert ((sums.mean(0) - want).abs() < 4 * sums.std(0) / 2000**0.5).all()
    assert sampler.sample(torch.zeros(
        3, 2))[0].target_log_count is None and not sampler.shared and not sampler.distinct


@pytest.mark.parametrize("name", ["uniform", "skewed"])
def test_one_set_for_all_queries_and_one_for_each(name):
    sampler, queries, target = complement(name, 3, 2), torch.zeros(4, 1), torch.tensor([7, 8, 9, 0])
    torch.manual_seed(0)
    shared = sampler.sample_outside(queries, torch.tensor([5, 2]), target)
    torch.manual_seed(0)
    private = sampler.sample_outside(queries, torch.tensor([5, 2]).expand(4, 2), target)
    for a, b in zip(shared, private):
        assert a is b or torch.equal(a, b)
    if name == "uniform":
        torch.testing.assert_close(shared.target_log_count, torch.full((4,), math.log(3 / 8)))


def test_counts_of_a_shared_set_are_computed_once():
    class Asked(UnigramSampler):
        def log_count(self, queries, ids):
            shapes.append(tuple(ids.shape))
            return super().log_count(queries, ids)

    shapes = []
    ComplementSampler(Asked(WEIGHTS, 6, shared=False),
                      3).sample_outside(torch.zeros(4, 1), torch.tensor([5, 2]),
                                        torch.tensor([7, 8, 9, 0]))
    assert shapes == [(2,), (4, 3)]


@pytest.mark.parametrize("name", ["uniform", "skewed"])
def test_a_set_of_all_classes(name):
    drawn = complement(name, 4, 2).sample_outside(torch.zeros(2, 1),
                                                  torch.arange(10).flip(0), torch.tensor([0, 1]))
    assert drawn.log_count.eq(math.inf).all() and drawn.ids.ge(0).all() and drawn.ids.lt(10).all()
    assert drawn.target_log_count.isneginf().all()


def test_opcheck_script_and_compile():
    inside = ops.sort_sets(torch.tensor([[3, -1, 0], [-1, 7, 8]]), 9)
    assert inside.tolist() == [[0, 3, 10], [7, 8, 9]]
    uniform, sampled = "num_classes=9,num_samples=2", "num_classes=9,num_samples=2,tries=2"
    ids, draws, target = torch.tensor([[1, 2],
                                       [3, 0]]), torch.tensor([[0, 3, 3, 4],
                                                               [0, 0, 8, 7]]), torch.tensor([[2],
                                                                                             [-1]])
    torch.library.opcheck(ops.sort_sets.default, (torch.tensor([[3, -1, 0], [-1, 7, 8]]), 9))
    seed, queries = torch.tensor(5), torch.zeros(2, 3)
    assert ops.complement_sample(seed, inside, draws, queries, sampled).tolist()[0][1] == 4
    for given, options in ((None, uniform), (draws, sampled)):
        torch.library.opcheck(ops.complement_sample.default,
                              (seed, inside, given, queries, options))
    torch.library.opcheck(ops.complement_log_count.default,
                          (inside, None, ids, None, target, None, uniform))
    counts = [torch.rand(2, size).log() for size in (3, 2, 1)]
    torch.library.opcheck(ops.complement_log_count.default,
                          (inside, counts[0], ids, counts[1], target, counts[2], sampled))
    torch.library.opcheck(ops.complement_log_count.default,
                          (inside[:1], counts[0][0], ids, counts[1], None, None, sampled))

    class Use(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.sampler = complement(name, 3, 2)

        def forward(self, queries, candidates, target):
            drawn, outside = self.sampler.sample(queries, target)[0], self.sampler.sample_outside(
                queries, candidates, target)
            return (drawn.ids, drawn.log_count, drawn.target_log_count, outside.ids,
                    outside.log_count, outside.target_log_count)

    for name in ("uniform", "skewed"):
        torch._dynamo.reset()
        results, args = [], (torch.zeros(3, 2), torch.tensor([5, 2, -1]), torch.tensor([7, -1, 0]))
        for wrap in (lambda m: m, torch.jit.script,
                     lambda m: torch.compile(m, fullgraph=True, backend="aot_eager"),
                     lambda m: torch.export.export(m, args).module()):
            called = wrap(Use(name))
            torch.manual_seed(0)
            results.append(called(*args))
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_the_sampler_inside_follows_the_table():
    class Follower(UniformSampler):
        def prepare(self, weight, bias, generator=None):
            self.prepared = weight.sum()

        def refresh(self, weight, bias=None):
            return {"sum": float(weight.sum())}

    sampler = ComplementSampler(Follower(10, 2, shared=False), 2)
    sampler.prepare(torch.ones(10, 2), None)
    assert sampler.sampler.prepared == 20 and sampler.refresh(torch.ones(10, 2)) == {"sum": 20}
    assert complement("uniform", 2, 1).refresh(torch.ones(10, 2)) == {}


def outside(candidates):
    return ComplementSampler(None, 3, num_classes=9).sample_outside(torch.zeros(2, 1),
                                                                    torch.tensor(candidates),
                                                                    torch.zeros(2).long())


@pytest.mark.parametrize("call, error, message", [
    (lambda: outside([[3, 3], [1, 2]]), ValueError, "sort_sets: expected sets without repeats, got "
     "3 twice in that of query 0"),
    (lambda: outside([[3, 1], [1, 30]]), IndexError, r"sort_sets: expected classes in \[0, 9\), or "
     r"-1 for none, got 30 at \[1, 1\]"),
    (lambda: outside([4, -2]), IndexError, r"sort_sets: expected classes in \[0, 9\), or -1 for "
     r"none, got -2"),
    (lambda: outside([4.0, 2.0]), TypeError,
     "sort_sets: expected sets of dtype int64, got float32"),
    (lambda: outside([[1], [2], [3]]), ValueError, r"ComplementSampler: expected candidates of "
     r"shape \[C\] or \[2, C\], got \[3, 1\]"),
    (lambda: ops.complement_sample(torch.tensor(1),
                                   torch.zeros(2, 3).long(), None, torch.zeros(4, 2),
                                   "num_classes=9"), ValueError,
     "complement_sample: expected inside with 1 row or 4, the queries, got 2"),
    (lambda: ops.complement_sample(torch.tensor(1),
                                   torch.zeros(1, 3).long(),
                                   torch.zeros(4, 5).long(), torch.zeros(4, 2),
                                   "num_classes=9,num_samples=2,tries=2"), ValueError,
     "draws with size 4 .*num_samples times tries"),
    (lambda: ops.complement_log_count(
        torch.zeros(1, 3).long(), None,
        torch.zeros(2, 2).long(), torch.zeros(2, 2), None, None, "num_classes=9"), ValueError,
     "complement_log_count: expected inside_count, log_count and target_count if tries is above 0"),
    (lambda: ops.complement_log_count(
        torch.zeros(1, 3).long(), torch.zeros(3),
        torch.zeros(2, 1).long(), torch.zeros(2, 5), None, None,
        "num_classes=9,num_samples=1,tries=1"), ValueError, "complement_log_count: expected "
     r"log_count of a shape that broadcasts to \[2, 1\], got \[2, 5\]"),
    (lambda: ops.complement_sample(torch.tensor(1),
                                   torch.zeros(1, 3).long(), None, torch.zeros(4, 2),
                                   "num_classes=0"), ValueError,
     "complement_sample: expected num_classes of at least 1"),
    (lambda: ComplementSampler("uniform", 2), TypeError, "ComplementSampler: expected sampler to "
     "be a Sampler or None, got str"),
    (lambda: ComplementSampler(None, 2), TypeError, "ComplementSampler: expected num_classes of "
     "type int, got NoneType"),
    (lambda: ComplementSampler(UniformSampler(9, 4), 2), ValueError, "ComplementSampler: expected "
     "a sampler of private "
     "independent draws"),
    (lambda: ComplementSampler(UniformSampler(9, 4, shared=False, distinct=True), 2), ValueError,
     "expected a sampler of private independent draws"),
    (lambda: ComplementSampler(InBatchSampler(9), 2), ValueError, "expected a sampler of private "
     "independent draws"),
    (lambda: ComplementSampler(
        UnionSampler(UniformSampler(9, 4, shared=False), UniformSampler(9, 2)), 2).sample(
            torch.zeros(2, 1)), ValueError,
     "ComplementSampler: expected a sampler of one set, got 2 sets"),
    (lambda: ComplementSampler(UniformSampler(9, 5, shared=False), 2), ValueError,
     "a multiple of num_samples = 2 for each query, got 5"),
    (lambda: ComplementSampler(UniformSampler(9, 0, shared=False), 2), ValueError,
     "a multiple of num_samples = 2 for each query, got 0"),
    (lambda: ComplementSampler(UniformSampler(9, 4, shared=False), 2, num_classes=8), ValueError,
     "expected num_classes=9, that of the sampler, got 8"),
    (lambda: ComplementSampler(None, 2, num_classes=9).log_count(torch.zeros(1, 1), torch.arange(
        2)), ValueError, "expected counts of a draw, got a call of log_count"),
])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
