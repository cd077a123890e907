"""Measures which sampler, number of samples and estimator suit a batch."""

import math
import numbers
import time
from typing import Optional, Sequence

import torch
from torch import Tensor

from .._core.checks import as_tensor, check_count
from .._core.placement import are_local
from ..losses.linear_loss import LinearLoss
from ..losses.two_tower import TwoTowerLoss
from .advice import Advice
from .advise_bench import Bench, plans_of


def advise(loss: LinearLoss, input: Tensor, target: Tensor, seconds: float = 30.0, *,
           counts: Optional[Tensor] = None, samplers: Optional[Sequence[str]] = None,
           draws: Sequence[int] = (128, 512, 2048), model_ms: float = 0.0,
           budget_ms: Optional[float] = None, seed: int = 0) -> Advice:
    r"""Measures different ways to train an output layer on a batch, and ranks them::

        print(xs.advise(loss, hidden, target, counts=counts))

    prints the table, followed by the line of code of the best choice.

    The choices are the exact loss, the loss as it is, and sampled losses over the same table: each
    sampler with each number of samples and the suitable estimators, and with a head if ``counts``
    show which classes are frequent. Their steps are measured in turn. For each choice, this
    measures the time t of a step, and the bias and noise of its gradient relative to the exact
    gradient, as :func:`diagnose` does. Bias and noise are each a root mean square of two values,
    for the gradient of ``input`` and for that of the table (using a random projection of each row).
    Rows are ranked by the error that remains after a training time B, ``budget_ms``::

        error = sqrt(bias^2 + (1 + noise^2) (t + model_ms) / B)

    In the time B there are ``B / (t + model_ms)`` steps. Noise averages out over these steps, bias
    does not. The 1 accounts for the noise of the batch: the queries of a batch differ so much that
    the distance between the exact gradient of one batch and that of all data is about as large as
    the gradient itself. The exact loss therefore has an error of 1 after one step, and a loss that
    takes a tenth of the time and doubles the variance has an error of 0.45 at that time.

    The advice depends on the current table. In a new table all classes have about the same
    probability, and samplers look alike, so train for a few hundred steps first. An estimator whose
    optimum is the softmax, but whose gradient differs on the way there ("ranking"), does better
    than its bias suggests.

    The loss is not changed: neither its parameters, gradients, sampler and mode, nor torch's random
    state. (Pending updates of a row optimizer are applied, as always when the whole table is read.)
    The table is not copied, but the exact loss computes its dense gradient. If the exact gradient
    of the whole batch would take more than a seventh of the time, gradients are compared on a part
    of the batch. Steps are always measured on the whole batch, except exact steps, whose time is
    then extrapolated ("~").

    Args:
        loss: a :class:`SampledSoftmaxLoss`, :class:`LinearCrossEntropyLoss` or :class:`CaneLoss`.
            All choices share its class weights, label smoothing and kind of targets.
        input, target: a batch of the size used in training, [*, D] and [*], or [*, T].
        seconds: the time for the measurement. ``notes`` lists what did not fit.
        counts: [N], how often each class is a target in the training data. Without counts,
            "unigram", "in_batch" and heads cannot be measured.
        samplers: sampler names: "uniform", "log_uniform", "unigram", "in_batch", "midx", "lsh",
            "sphere", "rff", and names registered with :func:`xsoftmax.samplers.register`. None:
            "uniform", "midx" and, with counts, "unigram" and "in_batch".
        draws: numbers of samples, for samplers that do not depend on the query; numbers above half
            of the classes are skipped. Samplers that follow the table draw 20 and 100 samples per
            query.
        model_ms: milliseconds that the rest of a training step takes (encoder and optimizer). A
            larger value favours more expensive samplers.
        budget_ms: B. None: the time of one step with the exact loss, plus model_ms.
        seed: the seed of all samples. The list of choices does not depend on it.

    Returns:
        An :class:`Advice`.

    Raises:
        TypeError: the loss has no class table, such as a :class:`TwoTowerLoss` or a tree loss; or
            an argument has the wrong type.
        ValueError: a shape does not match; all targets are ignored; a query is not finite; a
            sampler name is unknown; or counts have a wrong size, are negative or all zero.
        RuntimeError: the table is sharded or replicated over ranks; or ``seconds`` is too short for
            one step of each choice.
    """
    start = time.perf_counter()
    counts = None if counts is None else as_tensor("advise", "counts", counts)
    _check(loss, seconds, counts, samplers, model_ms, budget_ms)
    if isinstance(draws, (int, str)):
        raise TypeError("advise: expected draws as a sequence of numbers, got "
                        f"{type(draws).__name__}: give [{draws}]")
    sizes = [check_count("advise", "draws", size, 1) for size in draws]
    loss._queries(input, loss._check_tensors(input, target))
    inputs, targets = input.detach(), target.detach()
    is_counted = targets != loss.ignore_index
    places = (is_counted if targets.dim() < inputs.dim() else
              is_counted.any(-1)).reshape(-1).nonzero().squeeze(1)
    if len(places) == 0:
        raise ValueError("advise: expected a target that is not ignored, got none")
    if not inputs.isfinite().all():
        raise ValueError("advise: expected input with finite values, got an infinity or NaN")
    devices = [inputs.device] if inputs.is_cuda else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(check_count("advise", "seed", seed, None))
        generator = torch.Generator(inputs.device).manual_seed(seed)
        bench = Bench(loss, inputs, targets, places, counts, start, float(seconds), generator)
        for plan in plans_of(loss, counts, sizes, samplers):
            bench.add(plan)
        bench.run()
    return bench.advice(float(model_ms), None if budget_ms is None else float(budget_ms))


def _check(loss: LinearLoss, seconds: float, counts: Optional[Tensor],
           samplers: Optional[Sequence[str]], model_ms: float, budget_ms: Optional[float]) -> None:
    if isinstance(loss, TwoTowerLoss):
        raise TypeError("advise: expected a loss over a class table, got TwoTowerLoss, whose "
                        "classes are vectors that a network makes: to compare in-batch candidates "
                        "with others, advise on xs.LinearCrossEntropyLoss.from_linear(linear) "
                        "with the vectors of all items as linear.weight")
    if not isinstance(loss, LinearLoss):
        hint = ": pass xs.LinearCrossEntropyLoss.from_linear(linear)" if isinstance(
            loss, torch.nn.Linear) else ""
        raise TypeError("advise: expected a SampledSoftmaxLoss, LinearCrossEntropyLoss or "
                        f"CaneLoss, got {type(loss).__name__}{hint}")
    for name, value, least in (("seconds", seconds, 0.0), ("model_ms", model_ms, -1e-300),
                               ("budget_ms", budget_ms, 0.0)):
        if value is None and name == "budget_ms":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"advise: expected {name} as a number, got {type(value).__name__}")
        if not math.isfinite(value) or value <= least:
            raise ValueError(f"advise: expected {name} above 0, got {value}" if least ==
                             0.0 else f"advise: expected {name} of at least 0, got {value}")
    if not are_local(loss, *loss._tables()):
        raise RuntimeError("advise: expected a table of one process, got one that is split or "
                           "replicated over ranks: call advise before xs.distributed")
    if isinstance(samplers, str):
        raise TypeError("advise: expected samplers as a sequence of names, got a string: give "
                        f"[{samplers!r}]")
    if counts is not None:
        if counts.shape != (loss.num_classes,):
            raise ValueError(f"advise: expected counts of shape [{loss.num_classes}], got "
                             f"{list(counts.shape)}")
        if not (counts.isfinite().all() and (counts >= 0).all() and (counts > 0).any()):
            raise ValueError("advise: expected counts that are finite, not negative and not all "
                             "zero, got others")
    elif samplers is not None and not {"unigram", "in_batch"}.isdisjoint(samplers):
        raise ValueError("advise: expected counts for the samplers \"unigram\" and \"in_batch\", "
                         "got none")
