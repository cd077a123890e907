"""Approximations of the softmax over all items for the loss of two towers. Each method is called
with the towers, the users' vectors and the target items."""

import argparse
from typing import Callable

import torch
from torch import Tensor

import xsoftmax as xs
from examples.recommend.data import Dataset
from examples.recommend.towers import Towers

Method = Callable[[Towers, Tensor, Tensor], Tensor]


class InBatch:
    """Uses the items of the batch as candidates, and `uniform` more items, sampled uniformly."""
    def __init__(self, num_items: int, temperature: float, *, estimator: str = "sampled_softmax",
                 corrected: bool = True, uniform: int = 0):
        self.loss = xs.TwoTowerLoss(num_items, estimator=estimator, temperature=temperature,
                                    counts=None if corrected else False)
        self.uniform = uniform

    def __call__(self, towers: Towers, query: Tensor, target: Tensor) -> Tensor:
        if self.uniform == 0:
            return self.loss(query, towers.items(target), target)
        drawn = torch.randint(towers.num_items, (self.uniform,))
        item, negative = towers.items(torch.cat([target, drawn])).split([len(target), len(drawn)])
        return self.loss(query, item, target, (negative, drawn))


class Drawn:
    """Uses items that a sampler draws for the batch as candidates, weighted by 1 / expected count,
    or by 1 if not `corrected`."""
    def __init__(self, sampler: xs.samplers.Sampler, temperature: float, *, corrected: bool = True):
        self.sampler, self.temperature, self.corrected = sampler, temperature, corrected

    def __call__(self, towers: Towers, query: Tensor, target: Tensor) -> Tensor:
        query = query / self.temperature
        (drawn,) = self.sampler.sample(query.detach(), target)
        if not self.corrected:
            drawn = drawn._replace(log_count=torch.zeros_like(drawn.log_count),
                                   target_log_count=None)
        item, vectors = towers.items(torch.cat([target,
                                                drawn.ids])).split([len(target),
                                                                    len(drawn.ids)])
        return xs.functional.tower_loss(query, item, target, [(vectors, drawn)])


class Adaptive(Drawn):
    """Uses a sampler that follows the vectors of all items. They are recomputed only when the
    sampler refreshes; the vectors of its samples are computed in every step."""

    every: Tensor | None = None

    def __call__(self, towers: Towers, query: Tensor, target: Tensor) -> Tensor:
        if self.sampler.refresh_due():
            with torch.no_grad():
                self.every = towers.all_items()
        self.sampler.prepare(self.every, None)
        return super().__call__(towers, query, target)


class Full:
    def __init__(self, temperature: float):
        self.temperature = temperature

    def __call__(self, towers: Towers, query: Tensor, target: Tensor) -> Tensor:
        return xs.functional.linear_cross_entropy(query / self.temperature, towers.all_items(),
                                                  target)


def uncorrected(dataset: Dataset, args: argparse.Namespace) -> Method:
    return InBatch(len(dataset.items), args.temperature, corrected=False)


def logq(dataset: Dataset, args: argparse.Namespace) -> Method:
    return InBatch(len(dataset.items), args.temperature, estimator="ranking")


def refined(dataset: Dataset, args: argparse.Namespace) -> Method:
    return InBatch(len(dataset.items), args.temperature)


def mixed(dataset: Dataset, args: argparse.Namespace) -> Method:
    return InBatch(len(dataset.items), args.temperature, uniform=args.negatives)


def uniform(dataset: Dataset, args: argparse.Namespace) -> Method:
    return Drawn(
        xs.samplers.UniformSampler(len(dataset.items), min(args.negatives, len(dataset.items))),
        args.temperature, corrected=False)


def popularity(dataset: Dataset, args: argparse.Namespace) -> Method:
    seen = int((dataset.counts > 0).sum())
    return Drawn(xs.samplers.UnigramSampler(dataset.counts, min(args.negatives, seen), power=1.0),
                 args.temperature)


def midx(dataset: Dataset, args: argparse.Namespace) -> Method:
    items = len(dataset.items)
    sampler = xs.samplers.MidxSampler(items, args.width, min(args.negatives, items), shared=True,
                                      codewords=args.codewords, refresh_every=args.refresh_every)
    return Adaptive(sampler, args.temperature)


def full(dataset: Dataset, args: argparse.Namespace) -> Method:
    return Full(args.temperature)


METHODS = {
    method.__name__: method
    for method in (uncorrected, logq, refined, mixed, uniform, popularity, midx, full)
}
