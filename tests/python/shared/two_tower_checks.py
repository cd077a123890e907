"""Batches for the tests of TwoTowerLoss, and its formula, query by query."""

import math

import torch

ops = torch.ops.xsoftmax
N, D, Q, S, P = 30, 6, 12, 7, 3


def batch(seed=0, dtype=torch.float64):
    """Returns (query, item, ids, mixed negatives, hard negatives). Items repeat within the batch
    and the negatives, and one negative of a query is its own item."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, (Q,), generator=made)
    vectors = lambda *shape: torch.randn(*shape, D, generator=made, dtype=dtype).requires_grad_()
    hard = torch.randint(15, (Q, P), generator=made)
    hard[0, 1], hard[1, 2] = ids[0], hard[1, 0]
    return vectors(Q), vectors(Q), ids, (vectors(S), torch.randint(15, (S,),
                                                                   generator=made)), (vectors(Q, P),
                                                                                      hard)


def included(p, draws, uniform=0):
    """Probability that an item of frequency p is in the candidates of a query."""
    return 1 - (1 - p)**draws * (1 - 1 / N)**uniform


def naive(query, item, ids, negatives, hard, p, memory=(), temperature=1.0,
          estimator="sampled_softmax"):
    """Computes the loss of each query in a loop. `p` maps ids to frequencies. Excluded candidates
    are left out rather than masked."""
    columns = [(i.item(), v) for i, v in zip(ids, item)]
    columns += [] if negatives is None else [(i.item(), v)
                                             for i, v in zip(negatives[1], negatives[0])]
    columns += list(memory)
    first = {}
    for i, vector in columns:
        first.setdefault(i, vector)
    draws, uniform = len(ids) - 1 + len(memory), 0 if negatives is None else len(negatives[1])
    losses = []
    for q in range(len(ids)):
        of_query = {} if hard is None else {
            i.item(): v
            for i, v in zip(reversed(hard[1][q]), hard[0][q].flip(0))
        }
        sets = [of_query, first]
        scores = [[query[q] @ vector / temperature for vector in one.values()] for one in sets]
        counts = [[math.log(included(p[i], draws, uniform) + (i in of_query)) for i in one]
                  for one in sets]
        y = ids[q].item()
        of_target = [
            torch.tensor([0.0 if y in of_query else -math.inf]),
            torch.tensor([math.log(included(p[y], draws, uniform))])
        ]
        row = torch.stack([query[q] @ item[q] / temperature, *scores[0], *scores[1]])[None]
        losses.append(
            ops.candidate_loss(
                row, ids[q:q + 1],
                [torch.tensor([list(one)], dtype=torch.int64).reshape(1, -1) for one in sets],
                [torch.tensor([part], dtype=torch.float64).reshape(1, -1)
                 for part in counts], of_target, [True, True], f"estimator={estimator}"))
    return torch.cat(losses)


def frequencies(*batches):
    """Frequency of each id in the batches seen so far."""
    seen = torch.cat(batches)
    return {i: (seen == i).sum().item() / len(seen) if (seen == i).any() else 0.0 for i in range(N)}


def check_same(got, want, tensors, rtol=1e-5):
    """Compares losses, and the gradients of `tensors`."""
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-7)
    factor = torch.linspace(0.5, 2, got.numel(), dtype=got.dtype).view_as(got)
    grads = [
        torch.autograd.grad((loss * factor).sum(), tensors, allow_unused=True)
        for loss in (got, want)
    ]
    for one, other in zip(*grads):
        torch.testing.assert_close(
            torch.zeros(()) if one is None else one,
            torch.zeros(()) if other is None else other, rtol=rtol, atol=1e-7)
