"""Unions: counts match the average number of draws for any parts, also user-defined samplers."""

import io
import math
from typing import List, Optional

import pytest
import torch
from torch import Tensor

from xsoftmax import use_impl
from xsoftmax.samplers import (CandidateSet, ComplementSampler, FixedSampler, InBatchSampler,
                               LogUniformSampler, MidxSampler, Sampler, UniformSampler,
                               UnigramSampler, UnionSampler)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
N, Q, D = 30, 6, 4
WEIGHTS = torch.arange(1, N + 1)


class ScoreSampler(Sampler):
    """A user-defined sampler: private draws with replacement from the softmax of a given table."""
    def __init__(self, table: Tensor, num_samples: int):
        super().__init__(table.size(0), num_samples, shared=False)
        self.default_estimator = "ranking"
        self.register_buffer("table", table)

    def _log_counts(self, queries: Tensor) -> Tensor:
        return (queries @ self.table.T).log_softmax(1) + math.log(self.num_samples)

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        counts = self._log_counts(queries)
        ids = torch.multinomial(counts.exp(), self.num_samples, replacement=True,
                                generator=generator)
        target_log_count: Optional[Tensor] = None
        if target is not None:
            of_classes = self.log_count(queries, target.view(queries.size(0), -1).clamp(min=0))
            target_log_count = of_classes.view(target.shape).masked_fill(target < 0, float("-inf"))
        return [CandidateSet(ids, counts.gather(1, ids), target_log_count, False)]

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        counts = self._log_counts(queries)
        return counts[:, ids] if ids.dim() == 1 else counts.gather(1, ids)


class OnlyWhileDrawing(ScoreSampler):
    """A sampler that knows its counts only during a draw."""
    def __init__(self, table: Tensor, num_samples: int):
        super().__init__(table, num_samples)
        self.distinct = True  # claims to draw without replacement

    def sample(self, queries, target=None, generator=None):
        self.log_count = lambda queries, ids: ScoreSampler.log_count(self, queries, ids)
        drawn = super().sample(queries, target, generator)
        del self.log_count
        return drawn

    def log_count(self, queries, ids):
        raise ValueError("OnlyWhileDrawing: only a draw knows its counts")


def table():
    return torch.randn(N, D, generator=torch.Generator().manual_seed(2))


def inputs():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(Q, D, generator=generator), torch.tensor([3, 29, 3, 0, 17, 8])


UNIONS = {
    "one": lambda: UnionSampler(UnigramSampler(WEIGHTS, 7)),
    "shared": lambda: UnionSampler(UnigramSampler(WEIGHTS, 7), UniformSampler(N, 4),
                                   LogUniformSampler(N, 3, distinct=False)),
    "private": lambda: UnionSampler(UnigramSampler(WEIGHTS, 7, shared=False),
                                    UniformSampler(N, 4, shared=False, distinct=True)),
    "both": lambda: UnionSampler(UniformSampler(N, 4, shared=False), UnigramSampler(WEIGHTS, 7),
                                 FixedSampler(N, 3)),
    "of a user": lambda: UnionSampler(ScoreSampler(table(), 5), UnigramSampler(WEIGHTS, 7),
                                      ScoreSampler(-table(), 3)),
    "known while drawing": lambda: UnionSampler(OnlyWhileDrawing(table(), 5), UniformSampler(N, 4),
                                                UniformSampler(N, 3, shared=False)),
    "nested": lambda: UnionSampler(
        UnionSampler(UniformSampler(N, 3), ScoreSampler(table(), 5)), UnigramSampler(WEIGHTS, 4),
        UnionSampler(UnigramSampler(WEIGHTS, 2), FixedSampler(N, torch.tensor([4, 20])))),
    "complement": lambda: UnionSampler(
        UniformSampler(N, 4), ComplementSampler(UnigramSampler(WEIGHTS, 9, shared=False), 3)),
}
SCRIPTED = ["one", "shared", "private", "both", "of a user", "nested", "complement"]


def brute_force_counts(union, queries, target, trials):
    """[Q, N]: average number of draws of each class for each query."""
    seen = torch.zeros(Q, N)
    for _ in range(trials):
        for drawn in union.sample(queries, target):
            ids = drawn.ids.expand(Q, -1) if drawn.ids.dim() == 1 else drawn.ids
            takes_part = drawn.log_count.isposinf().logical_not().expand(Q, -1)
            seen.scatter_add_(1, ids, takes_part.float())
    return seen / trials


@pytest.mark.parametrize("name", UNIONS)
def test_union_counts_match_average_draws(name):
    """The count of a candidate is that of its class over all sets, and the target counts of the
    sets add up to it."""
    union, (queries, target), trials = UNIONS[name](), inputs(), 1200
    torch.manual_seed(0)
    seen = brute_force_counts(union, queries, target, trials)
    sets = union.sample(queries, target)
    assert sum(drawn.ids.size(-1) for drawn in sets) == union.num_samples
    # five standard errors; the variance of a count is at most 2
    close = dict(atol=5 * (2.0 / trials)**0.5, rtol=0)
    for drawn in sets:
        ids = drawn.ids.expand(Q, -1)
        torch.testing.assert_close(
            drawn.log_count.expand(Q, -1).exp(), seen.gather(1, ids), **close)
    total = torch.stack([drawn.target_log_count for drawn in sets]).logsumexp(0).exp()
    torch.testing.assert_close(total, seen.gather(1, target[:, None])[:, 0], **close)
    if name not in ("known while drawing", "complement"):
        counts = union.log_count(queries, torch.arange(N)).exp().expand(Q, N)
        torch.testing.assert_close(counts, seen, **close)
        for drawn in sets:  # and the counts of the sets agree bit for bit
            torch.testing.assert_close(
                drawn.log_count.expand(Q, -1).exp(), counts.gather(1, drawn.ids.expand(Q, -1)))


def test_a_union_with_the_batch():
    """In-batch targets join other draws; their counts are those of the sampler by itself, with one
    query fewer."""
    union, (queries, target) = UnionSampler(InBatchSampler(N), UnigramSampler(WEIGHTS, 7),
                                            ScoreSampler(table(), 5)), inputs()
    target[1] = -1
    sets = union.sample(queries, target)
    counts = union.log_count(queries, torch.arange(N)).exp()
    p = torch.bincount(target[target >= 0], minlength=N) / 5
    static = UnigramSampler(WEIGHTS, 7).log_count(queries, torch.arange(N)).exp()
    torch.testing.assert_close(
        counts, 4 * p + static + ScoreSampler(table(), 5).log_count(queries, torch.arange(N)).exp())
    for drawn in sets:
        want = counts.gather(1, drawn.ids.expand(Q, -1))
        part = drawn.log_count.isfinite().expand(Q, -1)
        torch.testing.assert_close(drawn.log_count.exp().expand(Q, -1)[part], want[part])
    in_batch = sets[0].log_count.isposinf()
    assert in_batch.diagonal().all() and in_batch[:, 1].all() and in_batch[1].all(
    ) and in_batch.sum() == 6 + 5 + 5


@pytest.mark.parametrize("distinct", [True, False])
def test_a_shared_midx_counts_ids_of_other_parts_like_its_own(distinct):
    """Its mixture is over queries that are not ignored, whether marked by targets, as in a draw, or
    by zeros, as for ids of other parts."""
    queries, target = inputs()
    queries[1], target[1] = 0, -1
    midx = MidxSampler(N, D, 5, codewords=3, shared=True, distinct=distinct)
    midx.refresh(table())
    [drawn] = midx.sample(queries, target)
    for impl in ("kernel", "reference"):
        with use_impl(impl):
            torch.testing.assert_close(midx.log_count(queries, drawn.ids), drawn.log_count)
    without = midx.log_count(queries[[0, 2, 3, 4, 5]], drawn.ids)
    torch.testing.assert_close(without, drawn.log_count)
    union = UnionSampler(midx, UniformSampler(N, 4, shared=False))
    for drawn in union.sample(queries, target):
        torch.testing.assert_close(drawn.log_count,
                                   union.log_count(queries, drawn.ids).expand_as(drawn.log_count))


@pytest.mark.parametrize("name", [*UNIONS, "batch"])
def test_ignored_queries_change_nothing(name):
    make = UNIONS.get(
        name, lambda: UnionSampler(InBatchSampler(N), UnigramSampler(WEIGHTS, 4, shared=False),
                                   UniformSampler(N, 3)))
    (queries, target), results = inputs(), []
    for extra in (0, 2):
        torch.manual_seed(1)
        sets = make().sample(torch.cat([queries, torch.zeros(extra, D)]),
                             torch.cat([target, torch.full((extra,), -1)]))
        if name == "batch":
            sets[0] = sets[0]._replace(ids=sets[0].ids[:Q], log_count=sets[0].log_count[:, :Q])
        assert not any(drawn.log_count.isnan().any() for drawn in sets)
        results.append(sets)
    for plain, padded in zip(*results):
        ids, log_count = (each[:Q] if each.dim() == 2 else each
                          for each in (padded.ids, padded.log_count))
        exact = dict(rtol=0, atol=0)
        if name in ("of a user", "known while drawing", "nested"):
            if plain.ids.dim() == 2:
                continue  # torch.multinomial depends on the number of rows
            exact = dict(rtol=1e-5, atol=1e-6)  # rounding of a matrix product depends on it, too
        assert torch.equal(plain.ids, ids)
        torch.testing.assert_close(plain.log_count, log_count, **exact)
        torch.testing.assert_close(plain.target_log_count, padded.target_log_count[:Q], **exact)


def test_several_targets_of_each_query():
    """target [Q, T], as a union asks its parts, or a loss that needs more counts."""
    for name in UNIONS:
        queries, target = inputs()
        several = torch.stack([target, target.flip(0), torch.full_like(target, -1)], 1)
        torch.manual_seed(0)
        one = UNIONS[name]().sample(queries, target)
        torch.manual_seed(0)
        for a, b in zip(one, UNIONS[name]().sample(queries, several)):
            assert torch.equal(a.ids, b.ids) and torch.equal(a.log_count, b.log_count)
            assert torch.equal(a.target_log_count,
                               b.target_log_count[:, 0]) and b.target_log_count[:,
                                                                                2].isneginf().all()
        torch.manual_seed(0)
        for a, b in zip(one, UNIONS[name]().sample(queries)):
            assert b.target_log_count is None and (name == "complement"
                                                   or torch.equal(a.ids, b.ids))


@pytest.mark.parametrize("name", SCRIPTED)
def test_torchscript_and_compile(name):
    class Use(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sampler = UNIONS[name]()

        def forward(self, queries: Tensor, target: Tensor):
            out: List[Tensor] = []
            for drawn in self.sampler.sample(queries, target):
                out.append(drawn.ids)
                out.append(drawn.log_count)
                count = drawn.target_log_count
                if count is not None:
                    out.append(count)
            return out

    torch._dynamo.reset()
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Use()), buffer)
    buffer.seek(0)
    queries, target = inputs()
    results = []
    compiled = [torch.compile(Use(), fullgraph=True, backend="aot_eager")
                ] if name in ("both", "nested", "complement") else []
    for module in (Use(), torch.jit.script(Use()), torch.jit.load(buffer), *compiled):
        torch.manual_seed(1)
        results.append(module(queries, target))
    for other in results[1:]:
        assert len(other) == len(results[0]) and all(
            torch.equal(a, b) for a, b in zip(results[0], other))


def test_merged_counts_are_sums():
    first, second = torch.rand(N), torch.rand(Q, N)
    first[2], second[3, 4], first[5], second[:, 5] = 0, 0, 0, 0
    counts = [first.log(), second.log(), torch.full((1, N), -math.inf)]
    merged = torch.ops.xsoftmax.merge_log_counts(counts)
    torch.testing.assert_close(merged, (first + second).log())
    first[7] = math.inf  # excluded, whatever the other counts are
    assert torch.ops.xsoftmax.merge_log_counts([first.log(), second.log()])[:, 7].isposinf().all()
    assert torch.ops.xsoftmax.merge_log_counts([first.log().double()]).dtype == torch.float32
    # as on a rank without queries
    assert torch.ops.xsoftmax.merge_log_counts([torch.zeros(0, 3), torch.zeros(3)]).shape == (0, 3)
    assert torch.ops.xsoftmax.merge_log_counts([torch.zeros(2, 1),
                                                torch.zeros(2, 0)]).shape == (2, 0)
    for args in (counts, [first.log()]):
        torch.library.opcheck(torch.ops.xsoftmax.merge_log_counts.default, (args,))
    with pytest.raises(ValueError, match="merge_log_counts: expected at least one tensor"):
        torch.ops.xsoftmax.merge_log_counts([])


def test_state_excluding_and_estimator():
    union = UnionSampler(InBatchSampler(N), UnigramSampler(WEIGHTS, 3),
                         UnionSampler(InBatchSampler(N)))
    assert set(union.state_dict()) == {
        "parts.0.counts", "parts.0.total", "parts.2.parts.0.counts", "parts.2.parts.0.total"
    }
    assert union.excluding(torch.tensor([1])) is None
    union = UnionSampler(UniformSampler(N, 3), UnigramSampler(WEIGHTS, 3))
    assert union.excluding(torch.tensor([1, 5])).log_count(torch.zeros(
        1, D), torch.arange(7)).isneginf().tolist() == [0, 1, 0, 0, 0, 1, 0]
    assert union.num_samples == 6 and union.shared and union.distinct
    # one part has shared draws
    assert UNIONS["both"]().default_estimator == UNIONS["of a user"](
    ).default_estimator == "sampled_softmax"
    ranking = UnionSampler(ScoreSampler(table(), 2), UniformSampler(N, 3, shared=False))
    assert ranking.default_estimator == "ranking" and not ranking.shared
    assert UnionSampler(UniformSampler(N, 3, shared=False)).default_estimator == "ranking"


def test_parts_follow_the_table():
    class Follower(UniformSampler):
        def prepare(self, weight, bias, generator=None):
            self.prepared = weight.sum()

        def refresh(self, weight, bias=None):
            return {"sum": float(weight.sum())}

    union = UnionSampler(UniformSampler(N, 2), Follower(N, 2), UnionSampler(Follower(N, 1)))
    union.prepare(torch.ones(N, D), None)
    assert union.parts[1].prepared == N * D
    assert union.refresh(torch.ones(N, D)) == {"1.sum": N * D, "2.0.sum": N * D}


@pytest.mark.parametrize("make, error, message", [
    (lambda: UnionSampler(), ValueError, "UnionSampler: expected at least one sampler, got none"),
    (lambda: UnionSampler((UniformSampler(N, 3), 3)), TypeError, "UnionSampler: expected Sampler "
     "objects, got"),
    (lambda: UnionSampler(UniformSampler(N, 3), UniformSampler(N + 1, 3)), ValueError,
     r"one number of classes, got \[30, 31\]"),
    (lambda: UnionSampler(OnlyWhileDrawing(table(), 2), OnlyWhileDrawing(table(), 2)).sample(
        *inputs()), ValueError, "only a draw knows"),
    (lambda: UnionSampler(*[UNIONS["complement"]().parts[0]]), ValueError, "expected a sampler "
     "that no other module "
     "uses, got a "
     "UniformSampler"),
])
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_sampler_is_part_of_one_union():
    part, other = UniformSampler(N, 3), UniformSampler(N, 3)
    UnionSampler(part)
    with pytest.raises(
            ValueError, match="UnionSampler: expected a sampler that no other module "
            "uses, got a UniformSampler that belongs to a "
            "UnionSampler"):
        UnionSampler(other, part)
    UnionSampler(other)  # after an error the sampler is still free
    with pytest.raises(ValueError, match="UnionSampler: expected different samplers, got one of "
                       "them twice"):
        both = UniformSampler(N, 3)
        UnionSampler(both, both)
