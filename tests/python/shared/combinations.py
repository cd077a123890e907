"""All combinations of loss, sampler and estimator, each also with every optimizer.

The invariants of test_invariants.py and the comparison with C++ run over them. A new sampler,
estimator or optimizer is tested by a line here. A sampler is described by a dict, which C++ reads
too (tests/cpp/loss_exchange.cpp): its name, its options, and tensors or children by name.
"""

import dataclasses
import itertools
from typing import Any, Dict, Optional

import torch

import xsoftmax as xs
from xsoftmax import samplers

N, D, Q = 23, 5, 7
COUNTS = torch.arange(1, N + 1)
HEAD = torch.tensor([2, 9, 16])


def sampler(name: str, **options) -> Dict[str, Any]:
    """Returns the description of a sampler, with tensors and children apart from other options."""
    apart = {
        key: options.pop(key)
        for key in ("counts", "exclude", "parts", "sampler", "stream") if key in options
    }
    return {"name": name, "options": options, **apart}


SAMPLERS = {
    "uniform": sampler("uniform", num_samples=8),
    "uniform, private": sampler("uniform", num_samples=4, shared=False),
    "uniform, private distinct": sampler("uniform", num_samples=4, shared=False, distinct=True),
    "uniform, shared with replacement": sampler("uniform", num_samples=8, distinct=False,
                                                exclude=torch.tensor([1, 3])),
    "log_uniform": sampler("log_uniform", num_samples=8),
    "log_uniform, private": sampler("log_uniform", num_samples=4, shared=False),
    "unigram": sampler("unigram", num_samples=8, counts=COUNTS),
    "unigram, private": sampler("unigram", num_samples=4, shared=False, counts=COUNTS),
    "unigram, streamed": sampler("unigram", num_samples=8,
                                 stream=dict(half_life=30.0, refresh_every=2)),
    "unigram, streamed, private": sampler("unigram", num_samples=4, shared=False,
                                          stream=dict(half_life=None, refresh_every=4)),
    "in_batch": sampler("in_batch"),
    "in_batch, streamed": sampler("in_batch", stream=dict(half_life=30.0)),
    "in_batch, open": sampler("in_batch", stream=dict(half_life=30.0, buckets=50)),
    "outside": sampler("complement", num_samples=4),
    "outside, unigram": sampler(
        "complement", num_samples=3, sampler=sampler("unigram", num_samples=6, shared=False,
                                                     counts=COUNTS)),
    "union of shared": sampler("union",
                               parts=[sampler("uniform", num_samples=4),
                                      sampler("in_batch")]),
    "union of both": sampler(
        "union", parts=[
            sampler("uniform", num_samples=3, shared=False),
            sampler("unigram", num_samples=5, counts=COUNTS)
        ]),
    "union of unions": sampler(
        "union", parts=[
            sampler(
                "union", parts=[
                    sampler("uniform", num_samples=3, shared=False),
                    sampler("log_uniform", num_samples=4)
                ]),
            sampler("complement", num_samples=2)
        ]),
}
CLASSES = {
    "uniform": "UniformSampler", "log_uniform": "LogUniformSampler", "unigram": "UnigramSampler"
}
# Samplers that follow the table: (num_classes, dim, ...).
ADAPTIVE = {
    "midx": "MidxSampler", "exact_midx": "ExactMidxSampler", "spread_midx": "SpreadMidxSampler",
    "learnable_midx": "LearnableMidxSampler", "lsh": "LshSampler", "sphere": "SphereSampler",
    "rff": "RffSampler"
}
_MIDX = dict(codewords=4, refresh_every=2)
SAMPLERS |= {
    "midx": sampler("midx", num_samples=4, **_MIDX),
    "midx, distinct": sampler("midx", num_samples=4, distinct=True, kind="pq", **_MIDX),
    "midx, shared": sampler("midx", num_samples=6, shared=True, **_MIDX),
    "midx, updated": sampler("midx", num_samples=4, codewords=4, refresh_every=4, update_every=1,
                             exclude=torch.tensor([1, 3])),
    "exact_midx": sampler("exact_midx", num_samples=4, **_MIDX),
    "spread_midx": sampler("spread_midx", num_samples=4, **_MIDX),
    "learnable_midx": sampler("learnable_midx", num_samples=4, **_MIDX),
    "lsh": sampler("lsh", num_samples=4, tables=4, bits=2, refresh_every=2),
    "sphere": sampler("sphere", num_samples=4, refresh_every=2),
    "rff": sampler("rff", num_samples=4, features=8, refresh_every=2),
    "unigram and midx": sampler(
        "union", parts=[
            sampler("unigram", num_samples=5, counts=COUNTS),
            sampler("midx", num_samples=3, **_MIDX)
        ]),
    "outside, midx": sampler("complement", num_samples=2,
                             sampler=sampler("midx", num_samples=4, **_MIDX)),
}

OPTIMIZERS = {
    "sgd": (xs.optim.RowSGD, dict(lr=0.1, momentum=0.9, weight_decay=0.1)),
    "adam": (xs.optim.RowAdam, dict(lr=0.05, weight_decay=0.01)),
    "adagrad": (xs.optim.RowAdagrad, dict(lr=0.1)), "adagrad-row": (xs.optim.RowAdagrad,
                                                                    dict(lr=0.1, row_wise=True)),
    "adam-row": (xs.optim.RowAdam, dict(lr=0.05, row_wise=True))
}
ESTIMATORS = [*torch.ops.xsoftmax.estimator_names(), "complementary_sum"]
WEIGHT = torch.linspace(0.5, 2.0, N)


def parts_of(spec):
    """Returns the parts of a union, recursively, or else the sampler itself."""
    return [leaf for part in spec["parts"]
            for leaf in parts_of(part)] if "parts" in spec else [spec]


def adapts(spec) -> bool:
    """Whether a sampler, or a part of it, follows the class table."""
    return any(part["name"] in ADAPTIVE or ("sampler" in part and adapts(part["sampler"]))
               for part in parts_of(spec))


def private_independent(part) -> bool:
    """Whether a sampler draws for each query, with replacement."""
    options = part["options"]
    shared = options.get("shared", part["name"] not in ADAPTIVE) or part["name"] == "in_batch"
    private = part["name"] == "complement" or not shared
    return private and not options.get("distinct", False)


def stream_of(spec):
    """Returns the streaming counts of a sampler, or None, and its refresh options."""
    options = dict(spec.get("stream", {}))
    follow = {key: options.pop(key) for key in ("refresh_every",) if key in options}
    return samplers.StreamingCounts(None if "buckets" in options else N, **
                                    options) if "stream" in spec else None, follow


def make_sampler(spec, bias: bool, dim: int = D):
    """Returns the sampler of a description."""
    name, options = spec["name"], dict(spec["options"])
    if "exclude" in spec:
        options["exclude"] = spec["exclude"]
    if name == "union":
        return samplers.UnionSampler(*(make_sampler(part, bias, dim) for part in spec["parts"]))
    if name == "complement":
        inner = make_sampler(spec["sampler"], bias, dim) if "sampler" in spec else None
        return samplers.ComplementSampler(inner, options["num_samples"], num_classes=N)
    stream, follow = stream_of(spec)
    if name == "in_batch":
        return samplers.InBatchSampler(N, counts=stream)
    if name in ADAPTIVE:
        return getattr(samplers, ADAPTIVE[name])(N, dim, bias=bias, **options)
    if name == "unigram":
        return samplers.UnigramSampler(spec["counts"] if stream is None else stream, **options,
                                       **follow)
    return getattr(samplers, CLASSES[name])(N, **options)


@dataclasses.dataclass
class Combination:
    loss: str
    sampler: Optional[Dict[str, Any]]  # for CANE the noise sampler; None: uniform
    options: Dict[str, Any]  # with the same names in C++ and Python
    tensors: Dict[str, torch.Tensor]  # weight, head, candidates
    optimizer: str
    candidates: Optional[Dict[str, Any]] = None  # for CANE, a sampler
    tree: Optional[Dict[str, torch.Tensor]] = None  # parents and classes

    def make(self, dtype=torch.float64, seed: int = 0):
        torch.manual_seed(seed)
        options, tensors = dict(self.options), dict(self.tensors)
        if "weight" in tensors:
            options["weight"] = tensors["weight"].to(dtype)
        if self.loss == "SampledSoftmaxLoss":
            options["head_classes"] = tensors.get("head", 0)
            return xs.SampledSoftmaxLoss(D, N, sampler=make_sampler(self.sampler, options["bias"]),
                                         dtype=dtype, **options)
        noise = make_sampler(self.sampler, options["bias"]) if self.sampler else "uniform"
        if self.tree is not None:
            tree = xs.LabelTree.from_parents(self.tree["parents"], self.tree["classes"])
            noises = {"noise_sampler": noise} if self.loss == "BeamTreeLoss" else {}
            return getattr(xs, self.loss)(D, tree, dtype=dtype, **noises, **options)
        candidates = make_sampler(self.candidates,
                                  options["bias"]) if self.candidates else tensors["candidates"]
        return xs.CaneLoss(D, N, candidates=candidates, noise_sampler=noise, dtype=dtype, **options)

    def call(self, loss, input, target, generator):
        """Calls the loss; HierarchicalSoftmaxLoss needs no generator."""
        return loss(input, target) if self.loss == "HierarchicalSoftmaxLoss" else loss(
            input, target, generator=generator)

    @staticmethod
    def table(loss):
        """Returns the Linear whose rows the loss trains."""
        return loss.linear if hasattr(loss, "linear") else loss.edges

    def make_optimizer(self, loss):
        make, options = OPTIMIZERS[self.optimizer]
        return make(loss.parameters(), **options)

    def batch(self, dtype=torch.float64, seed: int = 1):
        """Returns queries and targets, one of them repeated and one in the head."""
        made = torch.Generator().manual_seed(seed)
        input, target = torch.randn(Q, D, dtype=dtype,
                                    generator=made), torch.randint(N, (Q,), generator=made)
        target[1], target[2] = target[0], HEAD[1]
        return input, target

    @property
    def follows_table(self) -> bool:
        return any(spec is not None and adapts(spec) for spec in (self.sampler, self.candidates))


def _turns(row: int, column: int) -> Dict[str, Any]:
    """Returns options that alternate at different rates over rows and columns, so that each row and
    column is tested with every value of every option (test_combinations.py)."""
    def turns(rows, columns):
        return (row // rows + column * columns // 2) % 2 == 0

    return dict(optimizer=list(OPTIMIZERS)[(row + column) % len(OPTIMIZERS)],
                reduction=("mean", "sum", "none")[(row + 2 * column) % 3], bias=turns(5, 2),
                head=turns(6, 3), first=turns(3, 1), second=turns(4, 1), third=turns(8, 3))


def _sampled():
    for row, (name, spec) in enumerate(SAMPLERS.items()):
        private = all(private_independent(part) for part in parts_of(spec))
        for column, estimator in enumerate(ESTIMATORS):
            turns = _turns(row, column)
            tensors, options = {}, dict(estimator=estimator, bias=turns["bias"],
                                        reduction=turns["reduction"])
            if estimator == "complementary_sum":
                if not private or spec["name"] == "union":
                    continue
            elif torch.ops.xsoftmax.estimator_has_noise(estimator):
                if not private:
                    continue
                tensors["head"] = HEAD  # the candidates of this estimator
            elif turns["head"]:
                tensors["head"] = HEAD
            smooths = estimator != "complementary_sum" and torch.ops.xsoftmax.estimator_smooths(
                estimator)
            if smooths and turns["first"]:
                options["label_smoothing"] = 0.1
            elif turns["second"]:
                tensors["weight"] = WEIGHT
            if estimator == "nce" and turns["first"]:
                options["log_z"] = "learned" if turns["third"] else 1.5
            if turns["second"] and turns["third"]:
                options["remove_accidental_hits"] = False
            if turns["first"] and turns["third"]:
                options["sparse_grad"] = False
            yield f"sampled-{name}-{estimator}", Combination("SampledSoftmaxLoss", spec, options,
                                                             tensors, turns["optimizer"])


def _cane():
    sources = {
        "ids": None, "unigram": SAMPLERS["unigram"],
        "private": SAMPLERS["uniform, private distinct"],
        "with replacement": SAMPLERS["uniform, private"], "union": SAMPLERS["union of both"]
    }
    noises = {"uniform": None, "unigram": SAMPLERS["unigram, private"]}
    if "midx" in SAMPLERS:
        sources |= {"midx": SAMPLERS["midx, distinct"], "learnable": SAMPLERS["learnable_midx"]}
        noises |= {"midx": SAMPLERS["midx"]}
    for row, (source, candidates) in enumerate(sources.items()):
        for column, ((noise, spec), reduction) in enumerate(
                itertools.product(noises.items(), ("mean_of_logs", "log_of_mean"))):
            turns = _turns(row, column)
            options = dict(num_noises=2, noise_reduction=reduction, bias=turns["bias"],
                           reduction=turns["reduction"])
            tensors = {} if candidates else {"candidates": HEAD}
            if turns["second"]:
                tensors["weight"] = WEIGHT
            yield f"cane-{source}-{noise}-{reduction}", Combination("CaneLoss", spec, options,
                                                                    tensors, turns["optimizer"],
                                                                    candidates)


TREES = {
    "even": lambda: xs.LabelTree.balanced(N, 3), "huffman": lambda: xs.LabelTree.huffman(COUNTS),
    "subsets": lambda: xs.LabelTree.from_frequencies(COUNTS, 4)
}


def _trees():
    noises = {
        "uniform": None, "unigram": SAMPLERS["unigram, private"],
        "log_uniform": SAMPLERS["log_uniform, private"]
    }
    for row, (name, make_tree) in enumerate(TREES.items()):
        made = make_tree()
        tree = {"parents": made.parent, "classes": made.node_class}
        shapes = [("beam", "BeamTreeLoss", dict(num_candidates=3)),
                  ("hierarchical", "HierarchicalSoftmaxLoss", {})]
        if name == "subsets":
            shapes.append(("routed", "BeamTreeLoss", dict(num_candidates=3, routed=True)))
        for first, (shape, loss, extra) in zip((0, 3, 4), shapes):
            for column, (noise, spec) in enumerate(
                    noises.items() if loss == "BeamTreeLoss" else [("none", None)], first):
                turns = _turns(row, column)
                options = dict(bias=(row + column) % 3 == 0, reduction=turns["reduction"], **extra)
                if loss == "BeamTreeLoss":
                    options |= dict(
                        num_noises=2,
                        noise_reduction=("mean_of_logs", "log_of_mean")[(row + column) % 2],
                        balance_every=(0, 2)[(row // 2 + column) % 2])
                if shape == "beam" and turns["first"]:
                    options["beam"] = 5
                if turns["third"]:
                    options["sparse_grad"] = False
                tensors = {"weight": WEIGHT} if turns["second"] else {}
                yield f"{shape}-{name}-{noise}", Combination(loss, spec, options, tensors,
                                                             turns["optimizer"], tree=tree)


def _transformed():
    """Yields losses with scaled and capped logits, with z-loss if the estimator has a log
    normalizer."""
    uniform, private, capped = SAMPLERS["uniform"], SAMPLERS["unigram, private"], dict(
        logit_scale=0.5, softcap=2.0)
    losses = {
        "sampled_softmax": (uniform, dict(label_smoothing=0.1), dict(z_loss=0.1), {"head": HEAD}),
        "ranking": (private, dict(sparse_grad=False), dict(z_loss=0.1), {}),
        "nce": (private, dict(log_z="learned"), {}, {"weight": WEIGHT})
    }
    for row, (estimator, (sampler, options, more, tensors)) in enumerate(losses.items()):
        made = dict(estimator=estimator, bias=row == 1, reduction=("mean", "sum", "none")[row],
                    **capped, **options, **more)
        yield f"transformed-{estimator}", Combination("SampledSoftmaxLoss", sampler, made, tensors,
                                                      list(OPTIMIZERS)[row])
    options = dict(num_noises=2, noise_reduction="mean_of_logs", bias=True, reduction="mean",
                   z_loss=0.1, **capped)
    yield "transformed-cane", Combination("CaneLoss", private, options, {"candidates": HEAD},
                                          list(OPTIMIZERS)[0])
    if "midx" in SAMPLERS:
        options = dict(estimator="sampled_softmax", bias=False, reduction="mean", logit_scale=3.0)
        yield "transformed-midx", Combination("SampledSoftmaxLoss", SAMPLERS["midx"], options, {},
                                              list(OPTIMIZERS)[0])


COMBINATIONS = {**dict(_sampled()), **dict(_cane()), **dict(_trees()), **dict(_transformed())}
