"""Losses, batches and a model for the tests of class tables that are split over ranks."""

import torch

import xsoftmax as xs

N, D = 23, 6  # ceil(23 / 3) = 8, 8, 7; ceil(23 / 4) = 6, 6, 6, 5
COUNTS = 1.0 / torch.arange(1, N + 1)
SAMPLERS = {
    "uniform": lambda: xs.samplers.UniformSampler(N, 7),
    "log_uniform independent": lambda: xs.samplers.LogUniformSampler(N, 7, distinct=False),
    "unigram private": lambda: xs.samplers.UnigramSampler(COUNTS, 5, shared=False),
    "unigram distinct private": lambda: xs.samplers.UnigramSampler(COUNTS, 5, shared=False, distinct
                                                                   =True),
    "in_batch": lambda: xs.samplers.InBatchSampler(N),
    "in_batch streamed": lambda: xs.samplers.InBatchSampler(
        N, counts=xs.samplers.StreamingCounts(None, half_life=20, buckets=99)),
    "unigram streamed": lambda: xs.samplers.UnigramSampler(
        xs.samplers.StreamingCounts(N, half_life=20), 7, distinct=False, refresh_every=1),
    "complement": lambda: xs.samplers.ComplementSampler(
        xs.samplers.LogUniformSampler(N, 6, shared=False), 6),
    "midx": lambda: xs.samplers.MidxSampler(N, D, 5, codewords=3),
    "midx pq shared": lambda: xs.samplers.MidxSampler(N, D, 6, codewords=3, kind="pq", shared=True,
                                                      train_points=9),
    "midx shared independent": lambda: xs.samplers.MidxSampler(N, D, 6, codewords=3, shared=True,
                                                               distinct=False, mixture="rms"),
    "midx distinct": lambda: xs.samplers.MidxSampler(N, D, 5, codewords=3, distinct=True, exclude=2
                                                     ),
    "midx updates": lambda: xs.samplers.MidxSampler(N, D, 5, codewords=3, refresh_every=4,
                                                    update_every=1, train_points=9),
    "midx union": lambda: xs.samplers.UnionSampler(xs.samplers.UniformSampler(N, 4),
                                                   xs.samplers.MidxSampler(N, D, 3, codewords=2)),
    "midx union updates": lambda: xs.samplers.UnionSampler(
        xs.samplers.UniformSampler(N, 4),
        xs.samplers.MidxSampler(N, D, 3, codewords=3, refresh_every=4, update_every=1)),
    "midx shared updates": lambda: xs.samplers.MidxSampler(N, D, 3, codewords=3, shared=True,
                                                           refresh_every=4, update_every=1),
    "union": lambda: xs.samplers.UnionSampler(xs.samplers.UniformSampler(N, 4),
                                              xs.samplers.LogUniformSampler(N, 3, shared=False)),
}
OPTIONS = {
    "plain": {},
    "bias, head": dict(bias=True, head_classes=3),
    "sum": dict(reduction="sum", ignore_index=2),
    "none": dict(reduction="none", bias=True),
    "ranking": dict(estimator="ranking"),
    "smooth": dict(label_smoothing=0.1),
    "dense": dict(sparse_grad=False, bias=True),
    "weights": dict(weight=torch.arange(1, N + 1) / N),
    "nce": dict(estimator="nce", log_z="learned"),
    "negative": dict(estimator="negative_sampling"),
    "cane": dict(estimator="cane", head_classes=4),
    "cane_log_of_mean": dict(estimator="cane_log_of_mean", head_classes=4, bias=True),
    "head": dict(head_classes=3),
    "none, head": dict(reduction="none", head_classes=4),
    "ranking, head": dict(estimator="ranking", head_classes=3, bias=True),
    "keep hits": dict(remove_accidental_hits=False),
    "importance": dict(estimator="importance"),
    "one_vs_each": dict(estimator="one_vs_each"),
    "blackout": dict(estimator="blackout"),
}


def loss_of(sampler, options, seed=0):
    torch.manual_seed(seed)
    options = dict(OPTIONS[options])
    if sampler == "exact":
        return xs.LinearCrossEntropyLoss(D, N, **options)
    return xs.SampledSoftmaxLoss(D, N, sampler=SAMPLERS[sampler](), **options)


def batches(size, step, options="plain", ignored=0.0):
    """Returns a batch for each rank, of different sizes; in odd steps that of rank 0 is empty.

    Adds `ignored` to the queries whose target is ignored.
    """
    random = torch.Generator().manual_seed(step)
    result = []
    for rank in range(size):
        count = (4 + 3 * rank + 4 * step) % 8
        target = torch.randint(N, (count,), generator=random)
        target[1:2] = OPTIONS[options].get("ignore_index", -100)
        input = torch.randn(count, D, generator=random)
        input[1:2] += ignored
        result.append((input, target))
    return result


def whole(loss):
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in loss.state_dict().items()
    }


def mesh_of(size):
    return torch.distributed.device_mesh.init_device_mesh("cpu", (size,))


class Model(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.body, self.loss = torch.nn.Linear(D, D), loss

    def forward(self, input, target):
        return self.loss(self.body(input), target)


def model_of(sampler, seed):
    torch.manual_seed(0)
    loss = loss_of(sampler, "head" if "midx" in sampler else "bias, head")
    torch.manual_seed(seed)
    return Model(loss)
