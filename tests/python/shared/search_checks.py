"""Problems of a search for the best classes, and their results by scores of all classes."""

import torch


def problem(Q, D, N, dtype=torch.float32, bias=True, clusters=20, seed=0):
    """Returns queries and a clustered class table."""
    g = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(clusters, D, generator=g)
    weight = centres[torch.randint(clusters, (N,), generator=g)] + torch.randn(N, D, generator=g)
    query = centres[torch.randint(clusters,
                                  (Q,), generator=g)] / 3 + 0.5 * torch.randn(Q, D, generator=g)
    return query.to(dtype), weight.to(dtype), torch.randn(N,
                                                          generator=g).to(dtype) if bias else None


def scores_of(query, weight, bias):
    scores = query.double() @ weight.double().T
    return scores if bias is None else scores + bias.double()


def expected(query, weight, bias, k):
    """Returns the best k classes by a stable sort: of equal classes the lower id is first."""
    values, ids = scores_of(query, weight, bias).sort(dim=1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def recall(ids, want):
    return (ids.unsqueeze(2) == want.unsqueeze(1)).any(2).double().mean().item()
