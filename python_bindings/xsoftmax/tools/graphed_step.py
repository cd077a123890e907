"""Training steps captured as CUDA graphs."""

import functools
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .._core.capture import Cuda as _Cuda
from .._core.checks import check_count
from ..losses.cached_step import _call
from ..optim.clip_grad import clip_grad_norm_
from ..optim.row_optimizer import RowOptimizer

_MAX_GRAPHS = 16  # the largest number of input signatures with a graph; others run eagerly
_NAME = "make_graphed_step"
_OPTIONS = ("_options", "_step_options", "options")  # option texts that modules pass to operators


def _text_of(module: nn.Module, name: str) -> Optional[str]:
    text = getattr(module, name, None)
    return text if isinstance(text, str) else None


class _CapturedStep:
    """The graphs of one cycle of `accumulate` steps, for one input signature."""
    def __init__(self, inputs: List[Any]) -> None:
        self.inputs = inputs  # the buffers that the graphs read
        self.replays: List[Callable[[], None]] = []
        self.counts: List[List[Tensor]] = []  # per step, the increments of the host counters
        self.values: Dict[int, Tensor] = {}
        self.grads: Dict[int, List[Optional[Tensor]]] = {}  # after each step except the last


class GraphedStep:
    """A training step that is captured and replayed; see :func:`make_graphed_step`."""
    def __init__(
        self,
        loss: Callable[..., Tensor],
        optimizers: List[torch.optim.Optimizer],
        encoder: Optional[Callable[..., Any]],
        max_norm: Optional[float],
        norm_type: float,
        accumulate: int,
        warmup_steps: int,
    ) -> None:
        self._loss, self._optimizers, self._encoder = loss, optimizers, encoder
        self._max_norm, self._norm_type, self._accumulate, self._warmup_steps = (
            max_norm,
            norm_type,
            accumulate,
            warmup_steps,
        )
        self._find_modules()
        devices = {param.device for param in self._parameters()}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        self._device = _Cuda(device) if _Cuda.suits(device) else None
        self._in_cycle = 0
        self.reset()

    def _find_modules(self) -> None:
        parts = [part for part in (self._loss, self._encoder) if isinstance(part, nn.Module)]
        self._modules = [module for part in parts for module in part.modules()]
        self._modules_of_loss = list(self._loss.modules()) if self._loss in parts else []
        self._children = self._children_of_loss()

    def _children_of_loss(self) -> List[Tuple[int, ...]]:
        """Returns ids of all submodules of the loss, such as its sampler, to detect changes."""
        return [tuple(map(id, module._modules.values())) for module in self._modules_of_loss]

    @property
    def num_graphs(self) -> int:
        """The number of input signatures with a captured step; 0 if CUDA graphs are unavailable."""
        return len(self._graphs)

    def reset(self) -> None:
        """Drops all graphs; later steps are captured again.

        Rarely needed: a step detects replaced parameters, optimizer state and options itself.
        """
        self._graphs: Dict[Any, _CapturedStep] = {}
        self._warmups: Dict[Any, int] = {}
        self._current: Optional[Tuple[Any, _CapturedStep]] = None
        self._groups = [optimizer.param_groups for optimizer in self._optimizers]
        self._rates = self._tensor_rates() if self._device is not None else []
        self._places = self._addresses(with_state=False)
        self._all_places: Optional[List[Tuple[int, int]]] = None
        self._options = self._options_of_groups()
        self._numbers = self._numbers_of_host()

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs one step; see :func:`make_graphed_step`."""
        leaves, form = tree_flatten((inputs, args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise ValueError(
                f"{_NAME}: expected inputs without gradient, got one that requires it: "
                "compute it in the encoder")
        last = self._in_cycle == self._accumulate - 1
        if self._device is None:
            value = self._run_eagerly(leaves, form, last)
        else:
            value = self._run_on_device(self._device, leaves, form, last)
        self._in_cycle = 0 if last else self._in_cycle + 1
        return value

    # ---- a step ----

    def _parameters(self) -> List[Any]:
        return list(
            dict.fromkeys(param for optimizer in self._optimizers
                          for group in optimizer.param_groups for param in group["params"]))

    def _forward_backward(self, leaves: List[Any], form: Any) -> Tensor:
        inputs, args, kwargs = tree_unflatten(leaves, form)
        with torch.enable_grad():
            if self._encoder is None:
                value = self._loss(inputs, *args, **kwargs)
            else:
                value = self._loss(_call(self._encoder, inputs), *args, **kwargs)
            if value.dim() > 0:
                raise ValueError(f"{_NAME}: expected a loss that is a scalar, got one of shape "
                                 f'{list(value.shape)}: make it with reduction="mean" or "sum"')
            (value if self._accumulate == 1 else value / self._accumulate).backward()
        return value.detach()

    def _update(self) -> None:
        if self._max_norm is not None:
            clip_grad_norm_(self._parameters(), self._max_norm, self._norm_type)
        for optimizer in self._optimizers:
            optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _run_eagerly(self, leaves: List[Any], form: Any, last: bool) -> Tensor:
        value = self._forward_backward(leaves, form)
        if last:
            self._update()
        return value

    # ---- graphs ----

    def _run_on_device(self, device: _Cuda, leaves: List[Any], form: Any, last: bool) -> Tensor:
        self._follow_changes()
        key = self._signature(leaves, form)
        graphs = self._find_graphs(device, key, leaves, form)
        if graphs is not None:
            return self._replay(graphs, leaves)
        # The cycle continues eagerly, so it needs the gradients of its replayed steps.
        if self._in_cycle > 0 and self._current is not None:
            self._take_over(self._current[1])
        self._current = None
        value = device.run(lambda: self._run_eagerly(leaves, form, last))
        if last:
            self._warmups[key] = self._warmups.get(key, 0) + 1
        if self._all_places is not None and self._addresses(with_state=True) != self._all_places:
            self.reset()
        return value

    def _find_graphs(self, device: _Cuda, key: Any, leaves: List[Any],
                     form: Any) -> Optional[_CapturedStep]:
        """Returns the graphs to replay, after capturing them if it is time. None: the step runs
        eagerly.
        """
        if self._is_due():
            return None
        if self._in_cycle > 0:
            return (self._current[1]
                    if self._current is not None and self._current[0] == key else None)
        if any(param.grad is not None for param in self._parameters()):
            return None
        graphs = self._graphs.get(key)
        if graphs is None:
            if self._warmups.get(key, 0) < self._warmup_steps or len(self._graphs) >= _MAX_GRAPHS:
                return None
            if self._is_due_later():
                return None
            graphs = self._graphs[key] = self._capture(device, leaves, form)
            self._all_places = self._addresses(with_state=True)
        self._current = key, graphs
        return graphs

    def _is_due(self) -> bool:
        """Returns whether the next step does work that a graph cannot capture, such as a
        refresh."""
        return any(due() for due in self._find_methods("_eager_step_due"))

    def _is_due_later(self) -> bool:
        """Returns whether a later step of the cycle that begins now does such work."""
        counters = self._counters()
        old_counters = [counter.clone() for counter in counters]
        try:
            for _ in range(self._accumulate - 1):
                for counter in counters:
                    counter.add_(1)
                if self._is_due():
                    return True
            return False
        finally:
            for counter, old_counter in zip(counters, old_counters):
                counter.copy_(old_counter)

    def _capture(self, device: _Cuda, leaves: List[Any], form: Any) -> _CapturedStep:
        graphs = _CapturedStep(
            [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        pool, counters = device.pool(), self._counters()
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        old_counters = [counter.clone() for counter in counters]
        torch.clear_autocast_cache()  # a graph must not depend on casts made before its capture
        try:
            for number in range(self._accumulate):
                step_counters = [counter.clone() for counter in counters]
                graphs.replays.append(
                    device.capture(functools.partial(self._record, graphs, number, form), pool,
                                   generators))
                graphs.counts.append([
                    counter - old_counter for counter, old_counter in zip(counters, step_counters)
                ])
        except Exception as error:
            for param in self._parameters():
                param.grad = None
            raise RuntimeError(
                f"{_NAME}: expected a step that a CUDA graph can capture, got "
                f"{type(error).__name__}: {error}. Optimizers of torch.optim need "
                "capturable=True or fused=True; nothing of the step may read a value on the host"
            ) from error
        finally:
            torch.clear_autocast_cache()
            for counter, old_counter in zip(counters, old_counters):
                counter.copy_(old_counter)
        return graphs

    def _record(self, graphs: _CapturedStep, number: int, form: Any) -> None:
        graphs.values[number] = self._forward_backward(graphs.inputs, form)
        if number == self._accumulate - 1:
            self._update()
        else:
            graphs.grads[number] = [param.grad for param in self._parameters()]

    def _replay(self, graphs: _CapturedStep, leaves: List[Any]) -> Tensor:
        for buffer, leaf in zip(graphs.inputs, leaves):
            if isinstance(leaf, Tensor):
                buffer.copy_(leaf, non_blocking=True)
        graphs.replays[self._in_cycle]()
        for counter, increment in zip(self._counters(), graphs.counts[self._in_cycle]):
            counter.add_(increment)
        return graphs.values[self._in_cycle].clone()

    def _take_over(self, graphs: _CapturedStep) -> None:
        """Sets the gradients of the parameters to those of the replayed steps of this cycle."""
        for param, grad in zip(self._parameters(), graphs.grads[self._in_cycle - 1]):
            param.grad = None if grad is None else grad.clone()

    def _counters(self) -> List[Tensor]:
        """Returns the step counters that modules keep on the CPU."""
        return [
            counter for counters in self._find_methods("_host_counters") for counter in counters()
        ]

    def _numbers_of_host(self) -> List[Union[int, float]]:
        """Returns the numbers that modules keep on the CPU and that a capture makes constant."""
        return [
            number.item() for numbers in self._find_methods("_host_numbers")
            for number in numbers()
        ]

    def _find_methods(self, method: str) -> List[Callable[[], Any]]:
        return [
            function
            for module in self._modules if (function := getattr(module, method, None)) is not None
        ]

    # ---- what a graph depends on ----

    def _signature(self, leaves: List[Any], form: Any) -> Any:
        leaf_keys = tuple((leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (
            type(leaf), id(leaf) if isinstance(leaf, torch.Generator) else leaf) for leaf in leaves)
        modes = tuple((module.training, *map(functools.partial(_text_of, module), _OPTIONS))
                      for module in self._modules)
        trained_flags = tuple(param.requires_grad for param in self._parameters())
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        key = form, leaf_keys, modes, trained_flags, autocast
        try:
            hash(key)
        except TypeError:
            raise TypeError(
                f"{_NAME}: expected tensors, generators, and values that can be hashed as inputs, "
                f"got {[type(leaf).__name__ for leaf in leaves]}") from None
        return key

    def _options_of_groups(self) -> List[Any]:
        """Returns the options of parameter groups that a capture makes constant."""
        return [
            value for groups in self._groups for group in groups
            for name, value in group.items() if name != "params" and not isinstance(value, Tensor)
        ]

    def _addresses(self, with_state: bool) -> List[Tuple[int, int]]:
        """Returns address and size of the tensors that graphs write to.

        Args:
            with_state: include buffers and optimizer state, not only parameters.
        """
        tensors: List[Any] = self._parameters()
        if with_state:
            tensors += [
                buffer for module in self._modules for buffer in module.buffers(recurse=False)
            ]
            tensors += [
                value for optimizer in self._optimizers for state in optimizer.state.values()
                for value in state.values() if isinstance(value, Tensor)
            ]
        return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]

    def _follow_changes(self) -> None:
        """Applies changed learning rates, and drops graphs that depend on replaced objects."""
        for group, rate in self._rates:
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate
        is_stale = any(optimizer.param_groups is not groups
                       for optimizer, groups in zip(self._optimizers, self._groups))
        if self._children_of_loss() != self._children:
            self._find_modules()
            is_stale = True
        if (is_stale or self._addresses(with_state=False) != self._places
                or self._options_of_groups() != self._options
                or self._numbers_of_host() != self._numbers):
            if self._current is not None and self._in_cycle > 0:
                self._take_over(self._current[1])
            self.reset()

    def _tensor_rates(self) -> List[Tuple[Dict[str, Any], Tensor]]:
        """Converts learning rates to tensors, for optimizers that read them on the device.

        For other optimizers the learning rate is an option that a capture makes constant.
        """
        rates = []
        for optimizer in self._optimizers:
            is_row_optimizer = isinstance(optimizer, RowOptimizer)
            for group in optimizer.param_groups:
                if not group["params"]:
                    continue
                device = group["params"][0].device
                if isinstance(group["lr"], Tensor) and group["lr"].device != device:
                    raise ValueError(
                        f"{_NAME}: expected lr of {type(optimizer).__name__} as a number or a "
                        "tensor on "
                        f"{device}, got one on {group['lr'].device}")
                if is_row_optimizer or group.get("capturable") or group.get("fused"):
                    if not isinstance(group["lr"], Tensor):
                        group["lr"] = torch.tensor(
                            float(group["lr"]),
                            dtype=torch.float64 if is_row_optimizer else torch.float32,
                            device=device,
                        )
                    rates.append((group, group["lr"]))
        return rates


def make_graphed_step(
    loss: Callable[..., Tensor],
    optimizer: Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer]],
    encoder: Optional[Callable[..., Any]] = None,
    *,
    max_norm: Optional[float] = None,
    norm_type: float = 2.0,
    accumulate: int = 1,
    warmup_steps: int = 3,
) -> GraphedStep:
    """Returns a training step that is captured as a CUDA graph and replayed, so that the host
    launches a whole step at once.

    Each call ``step(inputs, *args, **kwargs)`` is equivalent to::

        value = loss(encoder(inputs), *args, **kwargs)  # without encoder: loss(inputs, ...)
        (value / accumulate).backward()
        if this is the last of `accumulate` calls:
            xs.clip_grad_norm_(parameters of the optimizers, max_norm, norm_type)  # unless None
            optimizer.step()
            optimizer.zero_grad()

    On a CPU the step runs these lines, with bit-identical results. On a GPU, the first
    `warmup_steps` steps for each input shape run eagerly on a side stream. The step is then
    captured (a capture executes nothing), and each further call copies its inputs and replays the
    graph. Example::

        loss = xs.SampledSoftmaxLoss(512, 100_000, sampler="log_uniform", num_samples=512).cuda()
        optimizer = xs.optim.RowAdam([*encoder.parameters(), *loss.parameters()])
        step = xs.make_graphed_step(loss, optimizer, encoder, max_norm=1.0)
        for tokens, target in batches:
            value = step(tokens, target)
            scheduler.step()

    - **Random samples** differ in each replay, because seeds are drawn by the generator on the
      device. A generator passed as an argument is registered with the graph; pass the same one in
      every call.
    - **Samplers that follow the table or a stream** refresh in place, in steps that run eagerly
      according to their schedule. The steps in between are replayed. The same holds for the steps
      that balance the edges of a :class:`BeamTreeLoss`.
    - **Learning rates** become tensors on the device, which schedulers update in place;
      ``group["lr"] = 0.1`` works too. Optimizers of torch.optim need ``capturable=True`` or
      ``fused=True`` for this. If any other option of a group changes, or a learning rate that is
      still a number, the step is captured again.
    - **Inputs of other shapes**, such as the last batch of an epoch, run eagerly until they have
      been seen `warmup_steps` times, and then get their own graph, for up to 16 different shapes.
    - **Replaced objects** are detected: parameters (``resize_classes``, ``.to()``), optimizer state
      loaded from a checkpoint, the sampler of a loss, and numbers that modules keep on the CPU,
      such as the current layer of a :class:`HierarchicalMatcher`. The step is then captured again.

    Args:
        loss: a module of this library, another module, or a function; it returns a scalar. The
            schedules of samplers are only followed for modules.
        optimizer: an optimizer or a sequence of optimizers.
        encoder: a module or a function of ``inputs``, which is a tensor, a tuple of positional
            arguments or a dict of keyword arguments. None: no encoder.
        max_norm: the gradient norm to clip to. None: no clipping.
        norm_type: as in :func:`clip_grad_norm_`.
        accumulate: the number of calls whose gradients are averaged for one optimizer step; at
            least 1.
        warmup_steps: the number of optimizer steps before a capture; at least 1, because the first
            step creates the optimizer state.

    Returns:
        The step. It returns the loss before the update, detached. ``step.num_graphs`` is the number
        of captured input signatures, and ``step.reset()`` drops all graphs.

    Restrictions: all parameters are on one GPU, in one process, without a GradScaler. Tensors of a
    call are on the device of the parameters and do not require gradients. Values that are not
    tensors are part of the input signature. Python code of the encoder and the loss runs when the
    step is captured, not when it is replayed.

    Raises:
        TypeError: optimizer is not an optimizer, or `accumulate` or `warmup_steps` is not an int.
        ValueError: `accumulate` or `warmup_steps` is below 1. Raised by a call: inputs require a
            gradient, or the loss is not a scalar.
        RuntimeError: (raised by a call) the step cannot be captured, for example because it reads a
            value on the host.
    """
    for name, part in (("loss", loss), ("encoder", encoder)):
        if not callable(part) and (name == "loss" or part is not None):
            raise TypeError(f"{_NAME}: expected {name} as a module or a function, got "
                            f"{type(part).__name__}")
    if not isinstance(optimizer, (torch.optim.Optimizer, list, tuple)):
        raise TypeError(f"{_NAME}: expected optimizer as an optimizer or a sequence of them, "
                        f"got {type(optimizer).__name__}")
    if isinstance(max_norm, str) or (max_norm is not None and not max_norm > 0):
        raise ValueError(f"{_NAME}: expected max_norm above 0 or None, got {max_norm}")
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    offender = next(
        (candidate for candidate in optimizers if not isinstance(candidate, torch.optim.Optimizer)),
        None)
    if offender is not None or not optimizers:
        raise TypeError(f"{_NAME}: expected optimizer as an optimizer or a sequence of them, "
                        f"got {'none' if offender is None else type(offender).__name__}")
    accumulate, warmup_steps = (
        check_count(_NAME, "accumulate", accumulate, 1),
        check_count(_NAME, "warmup_steps", warmup_steps, 1),
    )
    return GraphedStep(loss, optimizers, encoder, max_norm, norm_type, accumulate, warmup_steps)
