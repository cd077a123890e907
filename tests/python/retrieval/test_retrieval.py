"""Search by an index finds the best classes by float64 scores of all classes."""

import copy
import gc
import subprocess
import sys

import pytest
import torch

import xsoftmax as xs
from search_checks import expected, problem, recall

ops = torch.ops.xsoftmax
SEED = torch.tensor(0)


def made(weight, bias, codewords=4):
    return ops.midx_search_index(weight, bias, None, None, codewords, SEED)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("Q, D, N, k, codewords", [(1, 1, 1, 1, 1), (5, 3, 15, 15, 2),
                                                   (70, 17, 3001, 10, 6), (3, 66, 500, 100, 24),
                                                   (1100, 8, 400, 1, 3), (0, 3, 9, 2, 1),
                                                   (4, 3, 9, 0, 1)])
def test_certified_search_equals_scoring_all_classes(bias, Q, D, N, k, codewords):
    """Ids equal those of float64 scores, ties included, for any number of cells."""
    check_certified(problem(Q, D, N, torch.float32, bias), k, codewords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_certified_search_in_every_dtype(impl, dtype):
    check_certified(problem(30, 18, 2001, dtype), 10, 5)


def check_certified(args, k, codewords):
    Q, dtype = len(args[0]), args[0].dtype
    scores, ids, cells, certified = ops.search_topk(*args, made(*args[1:], codewords), k, "")
    want, want_ids = expected(*args, k)
    assert torch.equal(ids, want_ids) and certified.all() and certified.shape == cells.shape == (Q,)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(scores.double(), want,
                               rtol=1e-6 if scores.dtype == torch.float32 else 1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", ["rq", "pq"])
def test_the_index_reuses_the_codewords_of_a_sampler(kind):
    """Results are exact although the codewords were fitted to another table."""
    query, weight, bias = problem(50, 12, 3000)
    loss = xs.SampledSoftmaxLoss(
        12, 3000, bias=True, sampler=xs.samplers.MidxSampler(3000, 12, codewords=8, kind=kind,
                                                             bias=True))
    loss.sampler.refresh(loss.linear.weight, loss.linear.bias)
    with torch.no_grad():
        loss.linear.weight.copy_(weight)
        loss.linear.bias.copy_(bias)
    found = loss.search(query, 10)
    assert torch.equal(found.ids, expected(query, weight, bias, 10)[1]) and found.certified.all()
    assert loss.search_index().num_cells == 64  # of the sampler; the default would be 16


def test_equal_classes():
    """Of equal classes the lower id comes first, even if thousands tie for the last place."""
    g = torch.Generator().manual_seed(1)
    query, weight = torch.randint(-2, 3, (20, 3),
                                  generator=g).float(), torch.randint(-2, 3, (9000, 3),
                                                                      generator=g).float()
    _, ids, _, certified = ops.search_topk(query, weight, None, made(weight, None), 50, "")
    assert torch.equal(ids, expected(query, weight, None, 50)[1]) and certified.all()
    same = torch.ones(20_000, 4)
    for rows in (same, torch.zeros(20_000, 4)):
        scores, ids, _, _ = ops.search_topk(torch.randn(3, 4), rows, None, made(rows, None), 7, "")
        assert torch.equal(ids, torch.arange(7).expand(3, 7))


def test_vectors_of_very_different_lengths():
    """Bounds neither overflow nor underflow, also if biases are much larger or smaller than
    scores."""
    query, weight, bias = problem(40, 16, 2000)
    query = query * torch.logspace(-30, 30, 40).unsqueeze(1)
    weight = weight * torch.logspace(-6, 2, 2000).unsqueeze(1)
    for factor in (1e-12, 1.0, 1e12):
        _, ids, _, certified = ops.search_topk(query, weight, bias * factor,
                                               made(weight, bias * factor), 5, "")
        assert torch.equal(ids, expected(query, weight, bias * factor, 5)[1]) and certified.all()


def test_the_smallest_and_largest_queries():
    query, weight, _ = problem(4, 16, 500, torch.float64, bias=False)
    unit = query / query.abs().amax(1, keepdim=True)
    index = made(weight, None)
    for length in (1e-310, 1e-307, 1.7e308):
        _, ids, _, certified = ops.search_topk(unit * length, weight, None, index, 5, "")
        coarse = unit * length / length if length < 1 else unit  # with the digits that are left
        assert torch.equal(ids, expected(coarse, weight, None, 5)[1]) and certified.all()


def test_bounds_of_the_index_hold_for_every_row():
    """Each row is in one cell, within the radius of its centre, and coded within the error."""
    _, weight, bias = problem(1, 10, 3000)
    order, codes, start, radius, centre, bounds, beta, basis, _, _ = made(weight, bias, 5)
    assert basis.shape == (0, 11)
    rows = torch.cat([weight.double(), bias.double().unsqueeze(1) / beta.double()], 1)
    assert torch.equal(order[order >= 0].sort().values, torch.arange(3000))
    reach, scale, code_error, code_norm, size = bounds[:5].double()
    for cell in range(25):
        first, last = start[cell], start[cell + 1]
        if first == last:
            assert size[cell] == 0 and reach[cell] == -float("inf")
            continue
        ids = order[16 * first:16 * last]
        there = ids >= 0
        c = centre[cell // 16, :, cell % 16].double()
        r = rows[ids[there]] - c
        coded = (codes[first:last].permute(0, 2, 1, 3).reshape(-1, 12)[there].double()[:, :11] -
                 128) * scale[cell]
        assert (r - coded).norm(dim=1).max() <= code_error[cell] and coded.norm(
            dim=1).max() <= code_norm[cell] * (1 + 1e-9)
        assert (r.norm(dim=1) <= radius[first:last].double().repeat_interleave(16)[there] *
                (1 + 1e-9)).all() and r.norm(dim=1).max() <= reach[cell]
        assert there.sum() == size[cell] and (radius[first:last].diff() <= 0).all()


def test_bounds_of_coarse_codes_hold_for_every_row():
    _, weight, bias = problem(1, 130, 3000)
    order, _, start, _, centre, bounds, beta, basis, coarse, tail = made(weight, bias, 5)
    rows = torch.cat([weight.double(), bias.double().unsqueeze(1) / beta.double()], 1)
    assert basis.shape == (16, 131) and torch.allclose(basis @ basis.T,
                                                       torch.eye(16).double(), rtol=0, atol=1e-9)
    # The directions are nearly the best ones of this size.
    best = torch.linalg.eigvalsh(rows.T @ rows)[-16:].sum()
    assert (rows @ basis.T).square().sum() > 0.9 * best
    scale, error, norm = bounds[5:].double()
    for cell in range(25):
        first, last = start[cell], start[cell + 1]
        ids = order[16 * first:16 * last]
        there = ids >= 0
        r = rows[ids[there]] - centre[cell // 16, :, cell % 16].double()
        coordinates = r @ basis.T
        coded = (coarse[first:last].permute(0, 2, 1, 3).reshape(-1, 16)[there].double() -
                 128) * scale[cell]
        if there.any():
            assert (coordinates - coded).norm(dim=1).max() <= error[cell]
            assert coded.norm(dim=1).max() <= norm[cell] * (1 + 1e-9)
        left = (r - coordinates @ basis).norm(dim=1)
        assert (left <= tail[first:last].double().repeat_interleave(16)[there] * (1 + 1e-9)).all()


@pytest.mark.parametrize("bias", [False, True])
def test_an_index_for_queries_has_their_directions_and_finds_the_same(bias):
    """The coarse codes are in the directions of the queries, which are those of a few clusters."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3000, 128, generator=generator)
    bias = torch.randn(3000, generator=generator) if bias else None
    query = torch.randn(200, 8, generator=generator) @ torch.randn(8, 128, generator=generator)
    cell = torch.zeros(3000, dtype=torch.int32)
    plain, aimed = (ops.search_index(weight, bias, cell, 1, queries)
                    for queries in (None, query[:100]))
    assert all(map(torch.equal, plain[:5], aimed[:5]))
    left = [(query - query @ (basis := index[7][:, :128].float()).T @ basis).norm()
            for index in (plain, aimed)]
    assert left[1] < 0.01 * left[0]
    for one, other in zip(*(ops.search_topk(query, weight, bias, index, 5, "")
                            for index in (plain, aimed))):
        assert torch.equal(one, other)
    # A query that is not finite is left out.
    with_nan = torch.cat([query[:100], torch.full((1, 128), torch.nan)])
    for one, other in zip(aimed, ops.search_index(weight, bias, cell, 1, with_nan)):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=50)
    with pytest.raises(ValueError, match="queries"):
        ops.search_index(weight, bias, cell, 1, query[:, :7])
    with pytest.raises(TypeError, match="queries"):
        ops.search_index(weight, bias, cell, 1, query.double())


def test_prunes_and_counts():
    """Cells far from a query are not read; `max_cells` is respected, and only the best classes are
    certified."""
    query, weight, _ = problem(200, 16, 20_000, bias=False, clusters=50)
    index = made(weight, None, 9)
    want = expected(query, weight, None, 10)[1]
    # few queries, since a GPU multiplies all rows for many
    _, ids, cells, _ = ops.search_topk(query[:10], weight, None, index, 10, "")
    assert (cells >= 1).all() and cells.double().mean() < 0.7 * 81
    shares = []
    for limit in (1, 3, 9, 27, 81):
        _, found, read, certified = ops.search_topk(query, weight, None, index, 10,
                                                    f"max_cells={limit}")
        assert (read <= limit).all()
        assert torch.equal(found[certified], want[certified])
        shares.append(recall(found, want))
    assert shares[0] < 0.9 < shares[-1] == 1 and shares == sorted(shares)
    # more cells are read if one does not hold k classes
    _, found, read, _ = ops.search_topk(query[:5], weight, None, index, 3000, "max_cells=1")
    assert (read > 1).all() and all(row.unique().numel() == 3000 for row in found)


def test_queries_of_autocast_serve_for_a_recall():
    """16-bit queries of an encoder under autocast can calibrate the index."""
    loss = xs.LinearCrossEntropyLoss(8, 500)
    query = torch.randn(300, 8)
    loss.search_index(query.bfloat16())
    assert loss.search(query, 5, recall=0.9).ids.shape == (300, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss.search(query.bfloat16(), 5, recall=0.9).ids.shape == (300, 5)


def test_recall_is_reached():
    """Queries like those of the calibration reach the requested recall with few cells."""
    loss = xs.LinearCrossEntropyLoss(16, 10_000)
    query, weight, _ = problem(1000, 16, 10_000, bias=False, clusters=50)
    with torch.no_grad():
        loss.linear.weight.copy_(weight)
    want = expected(query, weight, None, 10)[1]
    loss.search_index(query[:400])
    reads = []
    for share in (0.5, 0.9, 0.99):
        found = loss.search(query[400:], 10, recall=share)
        assert recall(found.ids, want[400:]) >= share
        reads.append(found.cells_read.double().mean().item())
    assert reads == sorted(reads) and reads[0] < reads[-1] < 40
    # Without calibration queries, the first queries are certified and calibrate it.
    loss.search_index()
    assert loss.search(query[:200], 10, recall=0.5).certified.all()
    assert not loss.search(query[200:600], 10, recall=0.5).certified.all()


def test_the_index_is_rebuilt_when_the_table_changes():
    """After an optimizer step, pending or not, or a write.

    Copies and state dicts of the loss do not include the index.
    """
    loss = xs.SampledSoftmaxLoss(8, 2000, sampler="uniform", num_samples=50, bias=True)
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.5)
    query, target = torch.randn(30, 8), torch.randint(2000, (30,))
    for _ in range(4):
        assert torch.equal(
            loss.search(query, 5).ids,
            expected(query, loss.linear.weight.detach(), loss.linear.bias.detach(), 5)[1])
        loss(query, target).backward()
        optimizer.step()
        optimizer.zero_grad()
    index = xs._core.hooks.search_indices[loss]
    loss.search(query, 5), loss.eval().search(query, 7)
    kept = xs._core.hooks.search_indices[loss]
    loss.search(query, 5)
    assert kept is xs._core.hooks.search_indices[loss] and kept is not index
    other = copy.deepcopy(loss)
    assert set(other.state_dict()) == {"linear.weight", "linear.bias"}
    with torch.no_grad():
        other.linear.weight.neg_()
    assert torch.equal(
        other.search(query, 5).ids,
        expected(query, other.linear.weight, other.linear.bias, 5)[1])
    count = len(xs._core.hooks.search_indices)
    del other, loss, optimizer
    gc.collect()
    assert len(xs._core.hooks.search_indices) < count


@pytest.mark.parametrize(
    "rule", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_the_index_is_rebuilt_after_steps_of_fused_optimizers(rule):
    """Fused kernels of torch do not increment the version counter of the table, so an outdated
    index would certify wrong classes."""
    loss = xs.SampledSoftmaxLoss(8, 500, sampler="uniform", num_samples=50, bias=True,
                                 sparse_grad=False)
    optimizer = rule(loss.parameters(), lr=1.0, fused=True)
    query, target = torch.randn(30, 8), torch.randint(500, (30,))
    for _ in range(3):
        assert torch.equal(
            loss.search(query, 5).ids,
            expected(query, loss.linear.weight.detach(), loss.linear.bias.detach(), 5)[1])
        loss(query, target).backward()
        optimizer.step()


def test_the_index_follows_fused_steps_of_the_tensor_that_the_table_views():
    class First(torch.nn.Module):
        def forward(self, rows):
            return rows[:500]

    loss = xs.LinearCrossEntropyLoss(8, 600)
    torch.nn.utils.parametrize.register_parametrization(loss.linear, "weight", First(), unsafe=True)
    loss.num_classes = 500
    optimizer = torch.optim.SGD(loss.parameters(), lr=10.0, fused=True)
    query = torch.randn(30, 8)
    for _ in range(2):
        assert torch.equal(
            loss.search(query, 5).ids,
            expected(query, loss.linear.weight.detach(), None, 5)[1])
        loss(query, torch.arange(30)).backward()
        optimizer.step()


def test_threads(threads):
    """One, two and four threads give the same bits, for one query and many, with and without a
    limit."""
    query, weight, bias = problem(700, 16, 5000)
    results = []
    for count in (1, 2, 4):
        threads(count)
        index = made(weight, bias, 5)
        results.append([
            index, *(ops.search_topk(query[:n], weight, bias, index, 10, text)
                     for n in (1, 100, 700) for text in ("", "max_cells=5"))
        ])
    for result in results[1:]:
        for one, other in zip(results[0], result):
            assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_shapes_of_results_and_topk_of_a_scripted_loss():
    loss = xs.LinearCrossEntropyLoss(6, 100)
    query = torch.randn(2, 3, 6)
    found = loss.search(query, 4)
    assert found.scores.shape == found.ids.shape == (
        2, 3, 4) and found.cells_read.shape == found.certified.shape == (2, 3)
    assert loss.search(query[0, 0], 4).ids.shape == (4,) and not found.scores.requires_grad
    assert torch.equal(found.ids, loss.topk(query, 4)[1])
    scripted = torch.jit.script(loss)
    assert torch.equal(scripted.topk(query, 4)[1], found.ids)


def test_queries_with_nan_or_infinity_do_not_affect_others(impl):
    """Such a query gets NaN scores; a zero query gets the first classes."""
    query, weight, _ = problem(4, 5, 300, bias=False)
    query[0, 1], query[1, 2], query[2] = float("nan"), float("inf"), 0.0
    scores, ids, cells, certified = ops.search_topk(query, weight, None, made(weight, None), 3, "")
    assert scores[:2].isnan().all() and torch.equal(
        ids[:3],
        torch.arange(3).expand(3, 3)) and certified.tolist() == [False, False, True, True]
    assert cells[:2].tolist() == [0, 0] and torch.equal(scores[2], torch.zeros(3))
    assert torch.equal(ids[3:], expected(query[3:], weight, None, 3)[1])


def test_queries_that_are_not_finite_lower_no_budget():
    loss = xs.LinearCrossEntropyLoss(5, 2000)
    like = torch.randn(300, 5)
    budget = loss.search_index(like).budget(10, 0.9)
    # Their result is the same for any budget, so counting them would lower the budget.
    assert loss.search_index(torch.cat([like, torch.full(
        (3000, 5), float("nan"))])).budget(10, 0.9) == budget > 1


@pytest.mark.parametrize("k, wanted", [(1, 0.5), (7, 0.8), (7, 1.0), (60, 0.9)])
def test_the_budget_is_the_first_whose_searches_find_enough(k, wanted):
    query, weight, bias = problem(200, 6, 900)
    index, want = made(weight, bias, codewords=5), expected(query, weight, bias, k)[1]

    def finds_enough(budget):
        found = ops.search_topk(query, weight, bias, index, k, f"max_cells={budget}")[1]
        of_query = (found.unsqueeze(2) == want.unsqueeze(1)).any(2).double().mean(1)
        return of_query.mean() - of_query.std() / len(query)**0.5 >= wanted

    tried = [budget for budget in (1, 2, 3, 4, 6, 8, 12, 16, 24) if budget < 25]
    assert ops.search_budget(query, weight, bias, index, k, wanted).item() == next(
        (budget for budget in tried if finds_enough(budget)), 25)


PEAK = """
import resource, torch, xsoftmax
torch.manual_seed(0)
query, weight = torch.randn(1500, 4), torch.randn(1200, 4)
index = torch.ops.xsoftmax.midx_search_index(weight, None, None, None, 3, torch.tensor(0))
torch.ops.xsoftmax.search_topk(query, weight, None, index, 1000, "")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.ops.xsoftmax.search_budget(query, weight, None, index, 1000, 1.0)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_memory_of_a_budget():
    """The search for a budget needs O(Q k) memory: [Q, k, k] bytes would be 1.5 GB."""
    assert int(
        subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True,
                       text=True).stdout) < 20 * 12e6


def test_wrong_arguments_are_refused():
    query, weight, bias = problem(4, 5, 300)
    index = made(weight, bias)
    for text, message in (("max_cells=0", "max_cells of at least 1"), ("cells=2", "cells")):
        with pytest.raises(ValueError, match=message):
            ops.search_topk(query, weight, bias, index, 3, text)
    for k in (-1, 301):
        with pytest.raises(ValueError, match="expected k"):
            ops.search_topk(query, weight, bias, index, k, "")
    with pytest.raises(ValueError, match=r"index\[1\]|index\[4\]"):
        ops.search_topk(query, weight, None, index, 3, "")
    with pytest.raises(ValueError, match="10 tensors"):
        ops.search_topk(query, weight, bias, index[:3], 3, "")
    with pytest.raises(TypeError, match="index on weight's device cpu, got meta"):
        ops.search_topk(query, weight, bias, [tensor.to("meta") for tensor in index], 3, "")
    for max_cells in (1, 5):  # bounds of 0 make cells look empty
        cells_read = ops.search_topk(
            query, weight, bias, [*index[:5], torch.zeros_like(index[5]), *index[6:]], 1,
            f"max_cells={max_cells}")[2]
        assert (cells_read >= 1).all() and (cells_read <= max_cells).all()
    weight[17, 2] = float("inf")
    with pytest.raises(ValueError, match="class 17"):
        ops.search_index(weight, bias, torch.zeros(300, dtype=torch.int32), 1)
    with pytest.raises(IndexError, match="got 2 at position 0"):
        ops.search_index(weight, bias, torch.full((300,), 2, dtype=torch.int32), 2)
    loss = xs.LinearCrossEntropyLoss(5, 300)
    for arguments, error in (({"index": "hnsw"}, ValueError), ({"recall": 0.0}, ValueError),
                             ({"recall": "much"}, ValueError), ({"max_cells": 0}, ValueError),
                             ({"recall": 0.5,
                               "max_cells": 3}, ValueError), ({"max_cells": 1.5}, TypeError)):
        with pytest.raises(error, match="LinearCrossEntropyLoss: expected"):
            loss.search(query, 3, **arguments)
    with pytest.raises(TypeError,
                       match="recall"):  # topk returns log-probabilities, search does not
        loss.topk(query, 3, recall=0.9)
    with pytest.raises(ValueError, match="table with values .* got one on meta"):
        xs.LinearCrossEntropyLoss(5, 300, device="meta").search_index()
    with pytest.raises(TypeError, match="weight's device cpu, got meta"):
        loss.search(query.to("meta"), 3)


def test_damaged_indices():
    query, weight, bias = problem(4, 5, 300)
    index = made(weight, bias)
    with pytest.raises(IndexError, match="classes in"):
        ops.search_topk(query, weight, bias, [index[0] + 300 * (index[0] >= 0), *index[1:]], 3, "")
    with pytest.raises(ValueError, match="holds every class"):
        ops.search_topk(query, weight, bias, [torch.full_like(index[0], -1), *index[1:]], 3, "")
    query, weight, _ = problem(4, 128, 300)
    index = ops.search_index(weight, None, torch.zeros(300, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="finite"):
        ops.search_topk(query, weight, None,
                        [*index[:7], torch.full_like(index[7], torch.nan), *index[8:]], 3, "")
    # Bounds that are NaN exclude nothing.
    index = [*index[:9], torch.full_like(index[9], torch.nan)]
    assert torch.equal(
        ops.search_topk(query, weight, None, index, 3, "")[1],
        expected(query, weight, None, 3)[1])


def test_opcheck():
    query, weight, bias = problem(6, 5, 200)
    cell = torch.randint(9, (200,), dtype=torch.int32)
    index = ops.search_index(weight, bias, cell, 9)
    codewords = torch.randn(3, 5), torch.randn(3, 5)
    for name, args in (("search_index", (weight, bias, cell, 9)),
                       ("midx_search_index", (weight, bias, *codewords, 0, SEED)),
                       ("midx_search_index", (weight, None, None, None, 2, SEED)),
                       ("search_topk", (query, weight, bias, index, 3, "max_cells=2")),
                       ("search_budget", (query, weight, bias, index, 3, 0.9))):
        torch.library.opcheck(getattr(ops, name).default, args)
