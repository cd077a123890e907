"""The loss that replaces a model's head, and the model's forward pass with that loss."""

import contextlib
import functools
import threading
from typing import Any, Callable, ContextManager, Dict, List, NoReturn, Optional, Set, Tuple, Type

import torch
from torch import Tensor, nn

from ..tables.table_module import _catch_up_linear
from ..losses.linear_loss import LinearLoss
from .logits import Logits, NoLogits, UnsupportedHeadError, is_vector_parameter

# Config options that scale or cap logits. The first call with labels shows what the model applies.
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "softcap")
SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling",)

_link_lock = threading.Lock()  # held while a loss adopts a model's bias, scale, cap or device
_active = threading.local()  # .tap: the Tap of the innermost call with labels on this thread


def _lock_changes() -> ContextManager[Any]:
    """Returns the lock to hold while a loss changes. Under torch.compile, which cannot trace locks,
    returns a null context."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else _link_lock


class Head:
    """Connects a loss to a model. It is not a Module, so the model's parameters and state dict keys
    do not change."""
    def __init__(self, loss: LinearLoss, linear: nn.Linear, bias: Optional[Tensor], name: str,
                 shift: Optional[bool], fixed_options: Set[str]) -> None:
        """Takes a loss over ``replace_bias(linear, bias)``, and the names of the options set by the
        caller."""
        self.loss, self.linear, self.bias, self.name, self.shift = loss, linear, bias, name, shift
        self.fixed_options, self.device = fixed_options, linear.weight.device
        self.transform = (loss.logit_scale, loss.softcap)  # the options last applied to the loss
        follow_table = any(sampler.follows_table for sampler in loss._samplers())
        # Samplers that follow the table are built either with or without a bias, and cannot switch.
        self.requires_bias = follow_table and loss.linear.bias is not None
        self.refuses_bias = follow_table and loss.linear.bias is None
        self.sparse_embeddings: List[nn.Embedding] = []
        self.handles = [
            linear.register_forward_pre_hook(_catch_up_linear),
            linear.register_state_dict_pre_hook(_catch_up_linear),
            linear.register_load_state_dict_pre_hook(_catch_up_linear)
        ]
        self._attach_tap()

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.is_linked(self.bias):  # deepcopy detaches the loss's view of a buffer
            self.link_bias(self.bias)

    def _attach_tap(self) -> None:
        linear: Any = self.linear
        if not isinstance(linear, _TappedLinear):
            kind: Any = type(linear)
            linear.__class__ = _derive_tapped_class(kind)

    def remove(self) -> None:
        """Restores the Linear and the embeddings."""
        for handle in self.handles:
            handle.remove()
        for embedding in self.sparse_embeddings:
            embedding.sparse = False
        linear: Any = self.linear
        base: Any = getattr(linear, "_base_class", None)  # None: removed with another model's head
        if base is not None and type(linear) is _derive_tapped_class(
                base):  # not a class derived from it
            linear.__class__ = base

    def is_linked(self, bias: Optional[Tensor]) -> bool:
        """Returns whether the loss shares the memory of the Linear's weight and of `bias`."""
        shared = self.loss.linear
        if bias is not self.bias or shared.weight is not self.linear.weight:
            return False
        if shared is self.linear or shared.bias is bias:
            return True
        return _have_same_type(shared.bias, self.linear.weight if bias is None else
                               bias) and (bias is None or _share_memory(shared.bias, bias))

    def link_bias(self, bias: Optional[Tensor]) -> None:
        """Makes the loss use a bias that the model adds after its head. None: the Linear's bias."""
        loss_bias, shared = bias, self.loss.linear
        if loss_bias is None and self.linear.bias is None and self.requires_bias:
            loss_bias = self.linear.weight.new_zeros(self.linear.out_features)
        if loss_bias is None or shared is self.linear:
            self.loss.linear = replace_bias(self.linear, loss_bias)
        else:
            shared.weight, shared.bias = self.linear.weight, make_shared_bias(loss_bias)
            shared.out_features = self.linear.out_features
        self.bias = bias  # set last, because other threads then treat the loss as ready

    def follow(self, model: nn.Module) -> None:
        """Moves the loss to the model's device, after the model was moved or cast."""
        with _lock_changes():
            if self.linear.weight.device != self.device:
                self.device = self.linear.weight.device
                self.loss.to(self.device)
            if self.loss.linear is not self.linear:
                new_bias = None if self.bias is None else find_bias(model, self.name, self.linear)
                bias = self.bias if new_bias is None else new_bias
                if not self.is_linked(bias):
                    self.link_bias(bias)

    def outputs(self, model: Any, forward: Callable[..., Any], labels: Tensor,
                kwargs: Dict[str, Any]) -> Any:
        """Runs a call with labels, and returns the model's outputs with the loss of this head."""
        if self.linear.weight.device != self.device:  # the Linear was moved without the model
            self.follow(model)
        if self.shift is not None:
            return self._call_with_shift(model, forward, labels, dict(kwargs))
        tap = Tap(self, type(model).__name__)
        outputs = self._call_with_tap(model, tap, lambda: forward(labels=labels, **kwargs))
        if not tap.losses:
            tap.refuse(f"expected the loss to be the cross entropy of the outputs of {self.name}, "
                       "got one that is computed in another way")
        return _remove_logits(outputs)

    def _call_with_shift(self, model: Any, forward: Callable[..., Any], labels: Tensor,
                         kwargs: Dict[str, Any]) -> Any:
        """Calls the model without labels, and adds the loss according to `shift`."""
        num_items = kwargs.pop("num_items_in_batch", None)
        shifted_labels, as_dict = kwargs.pop("shift_labels", None), kwargs.pop("return_dict", None)
        inputs = (kwargs.get("decoder_input_ids"), kwargs.get("decoder_inputs_embeds"))
        if model.config.is_encoder_decoder and all(value_of_input is None
                                                   for value_of_input in inputs):
            kwargs["decoder_input_ids"] = _decoder_inputs(model, labels)
        tap = Tap(self, type(model).__name__)
        outputs = self._call_with_tap(model, tap, lambda: forward(**kwargs, return_dict=True))
        logits = getattr(outputs, "logits", None)
        if not isinstance(logits, Logits):
            tap.refuse(f"expected its logits to be the outputs of {self.name}, got "
                       f"{type(logits).__name__}")
        if shifted_labels is not None:
            labels = shifted_labels
        elif self.shift:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        value = tap.cross_entropy(logits, labels, reduction="mean" if num_items is None else "sum")
        if num_items is not None and self.loss.reduction == "mean":
            is_tensor = isinstance(num_items, Tensor)
            value = value / (num_items.to(value.device) if is_tensor else num_items)
        fields = {key: entry for key, entry in outputs.items() if key not in ("loss", "logits")}
        outputs = type(outputs)(loss=value, logits=NoLogits(), **fields)
        as_dict = getattr(model.config, "return_dict", True) if as_dict is None else as_dict
        return outputs if as_dict else outputs.to_tuple()

    def _call_with_tap(self, model: nn.Module, tap: "Tap", call: Callable[[], Any]) -> Any:
        """Calls the model while the Linear returns `Logits` on this thread."""
        parent_name, _, leaf = self.name.rpartition(".")
        linear = model.get_submodule(parent_name)._modules.get(leaf)
        if linear is not self.linear:
            raise RuntimeError(
                f"{tap.owner}: expected {self.name} to be the Linear of its {self.loss._name}, got "
                f"{type(linear).__name__}: what changes a head (PEFT, set_output_embeddings) comes "
                "before xs.replace_head; xs.restore_head takes the loss out again")
        self._attach_tap()  # restoring another model that shares the Linear may have undone it
        tap.enclosing = getattr(_active, "tap", None)
        _active.tap = tap
        try:
            return call()
        finally:
            _active.tap = tap.enclosing

    def adopt(self, tap: "Tap", logits: Logits) -> None:
        """Applies the bias, scale and soft cap of the model to the loss, or raises an error."""
        if logits.bias is not None and self.linear.bias is not None:
            tap.refuse(f"expected one bias, got that of {self.name} and one after it")
        if logits.bias is not None and self.refuses_bias:
            tap.refuse("expected no bias after the head, since none was found when the sampler was "
                       "built, got one: give a sampler that does not follow the table")
        transform = logits.transform()
        if transform != self.transform or self._find_differences(transform):
            with _lock_changes():
                self._adopt_transform(tap, transform)
        if not self.is_linked(logits.bias):
            with _lock_changes():
                self.link_bias(logits.bias)

    def _find_differences(self, transform: Tuple[float,
                                                 Optional[float]]) -> Dict[str, Optional[float]]:
        """Returns the options whose value in the model differs from that of the loss."""
        return {
            option: value
            for option, value in zip(("logit_scale", "softcap"), transform)
            if not _are_close(value, getattr(self.loss, option))
        }

    def _adopt_transform(self, tap: "Tap", transform: Tuple[float, Optional[float]]) -> None:
        differences = self._find_differences(transform)
        for option, value in differences.items():
            if option in self.fixed_options:
                tap.refuse(f"expected {option} as the model has it, {value}, got "
                           f"{getattr(self.loss, option)}: leave the argument out")
        for option, value in differences.items():
            setattr(self.loss, option, value)
        self.transform = transform


def _are_close(first: Optional[float], second: Optional[float]) -> bool:
    """Returns whether two numbers are equal up to the rounding of a product and a quotient."""
    return first == second or (first is not None and second is not None
                               and abs(first - second) <= 1e-9 * abs(second))


def _have_same_type(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and first.device == second.device


def _share_memory(first: Tensor, second: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return True
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata and (
        first.storage_offset() == second.storage_offset())


class _TappedLinear(nn.Linear):
    """A Linear that returns `Logits` in a forward pass with labels, and its outputs otherwise.

    The tap is thread-local, so threads that share a model do not interfere.
    """

    _base_class: Type[nn.Linear] = nn.Linear

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tap = getattr(_active, "tap", None)
        while tap is not None and tap.head.linear is not self:
            tap = tap.enclosing
        if tap is None:
            return super().__call__(*args, **kwargs)
        return Logits(tap, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _create_tapped, (self._base_class,), self.__dict__


@functools.cache
def _derive_tapped_class(base: Any) -> Type[nn.Linear]:
    """Returns a subclass of `base`, a Linear class, that returns `Logits` while a tap is active."""
    return type(base.__name__, (_TappedLinear, base),
                {"_base_class": base, "__module__": base.__module__, "__doc__": base.__doc__})


def _create_tapped(base: Any) -> Any:
    kind = _derive_tapped_class(base)
    return kind.__new__(kind)


class Tap:
    """Receives the logits of one call with labels and computes its loss."""
    def __init__(self, head: Head, owner: str) -> None:
        self.head, self.owner, self.losses, self.num_classes = head, owner, 0, head.loss.num_classes
        self.enclosing: Optional[Tap] = None  # that of the enclosing call with labels

    def refuse(self, reason: str) -> NoReturn:
        """Raises the error for a model whose objective the loss cannot reproduce."""
        raise UnsupportedHeadError(f"replace_head of {self.owner}: {reason}")

    def cross_entropy(self, input: Logits, target: Tensor, weight: Optional[Tensor] = None,
                      size_average: Optional[bool] = None, ignore_index: int = -100,
                      reduce: Optional[bool] = None, reduction: str = "mean",
                      label_smoothing: float = 0.0) -> Tensor:
        """Returns the head's loss for the arguments of ``F.cross_entropy``."""
        loss = self.head.loss
        if weight is not None or label_smoothing or size_average is not None or reduce is not None:
            self.refuse("expected a cross entropy without class weights and label smoothing, which "
                        "are arguments of xs.replace_head, got one with them")
        if target.is_floating_point() or target.shape != input.shape[:-1]:
            self.refuse(f"expected targets of shape {list(input.shape[:-1])} that are ids, got "
                        f"{target.dtype} of shape {list(target.shape)}")
        self.losses += 1
        self.head.adopt(self, input)
        target = target.to(input.device)
        if ignore_index != loss.ignore_index:  # ignore targets of either value
            target = target.masked_fill(target == ignore_index, loss.ignore_index)
        if loss.reduction == "mean" and reduction != "mean":
            loss = loss._copy_with_reduction(reduction)
        value: Tensor = loss(input.hidden, target)
        return value


def read_transform(config: Any) -> Dict[str, float]:
    """Returns the arguments `logit_scale` and `softcap` that a model's config implies."""
    configs = [config, config.get_text_config(decoder=True)]
    values = {
        name: value
        for part in configs
        for name in (*SOFT_CAPS, *SCALES, *DIVISORS)
        if isinstance(value := getattr(part, name, None), (int, float)) and value
    }
    arguments: Dict[str, float] = {}
    for name, value in values.items():
        if name in SOFT_CAPS:
            arguments["softcap"] = float(value)
        elif value != 1.0:
            scale = 1.0 / value if name in DIVISORS else float(value)
            arguments["logit_scale"] = arguments.get("logit_scale", 1.0) * scale
    return arguments


def find_bias(model: nn.Module, name: str, linear: nn.Linear) -> Optional[Tensor]:
    """Returns the bias that a model may add to the outputs of its head, or None.

    Candidates are the parameters and buffers of shape [N] or [1, N] of the modules that contain the
    head, such as `final_logits_bias`. The forward pass with labels shows whether the bias is used.
    """
    shapes, parts = ((linear.out_features,), (1, linear.out_features)), name.split(".")[:-1]
    if linear.bias is not None:
        return None
    for depth in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:depth]))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point() and tensor.shape in shapes:
                return tensor
    return None


def replace_bias(linear: nn.Linear, bias: Optional[Tensor]) -> nn.Linear:
    """Returns a Linear with the same weight and the bias [N]; for None, `linear` itself."""
    if bias is None:
        return linear
    shared = nn.Linear(linear.in_features, linear.out_features, device="meta")
    shared.weight, shared.bias = linear.weight, make_shared_bias(bias)
    return shared


def make_shared_bias(bias: Tensor) -> nn.Parameter:
    """Returns a parameter [N] unchanged; for another bias, a frozen parameter that is a view of
    it."""
    if is_vector_parameter(bias):
        return bias  # type: ignore[return-value]
    return nn.Parameter(bias.detach().reshape(-1), False)


def _decoder_inputs(model: Any, labels: Tensor) -> Tensor:
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if make is None:
        raise ValueError(f"{type(model).__name__}: expected decoder_input_ids with the labels, "
                         "since replace_head was given shift, got none")
    inputs: Tensor = make(labels)
    return inputs


def _remove_logits(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        for key, value in list(outputs.items()):
            if isinstance(value, Logits):
                outputs[key] = NoLogits()
        return outputs
    if isinstance(outputs, tuple):
        return tuple(NoLogits() if isinstance(value, Logits) else value for value in outputs)
    return outputs


def check_loss_class(owner: str, loss_class: Any) -> None:
    """Raises TypeError unless `loss_class` derives from LinearLoss."""
    if not (isinstance(loss_class, type) and issubclass(loss_class, LinearLoss)):
        got = loss_class.__name__ if isinstance(
            loss_class, type) else f"an instance of {type(loss_class).__name__}"
        raise TypeError(f"{owner}: expected one of the classes SampledSoftmaxLoss, CaneLoss and "
                        f"LinearCrossEntropyLoss, followed by its arguments, got {got}")
