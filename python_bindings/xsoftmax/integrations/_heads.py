"""The loss in the place of a model's head, and the model's forward pass with it."""

from typing import Any, Callable, Dict, List, NoReturn, Optional, Set

from torch import Tensor, nn

from .._table import _settle_linear
from ..linear_losses import LinearLoss
from ._logits import Logits, NoLogits, UnsupportedHeadError

# Options of configs that scale or cap logits. The first call with labels sees what the model does.
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "softcap")
SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling",)


class Head:
    """Ties a loss to a model. It is no module, so the model's parameters and keys stay its own."""

    def __init__(self, loss: LinearLoss, linear: nn.Linear, bias: Optional[Tensor], name: str,
                 shift: Optional[bool], given: Set[str]) -> None:
        """Takes a loss over ``with_bias(linear, bias)``, and the options that the caller gave."""
        self.loss, self.linear, self.bias, self.name, self.shift = loss, linear, bias, name, shift
        self.given, self.device = given, linear.weight.device
        follow_table = any(sampler.follows_table for sampler in loss._samplers())
        # Samplers that follow the table are built for rows with a bias or without.
        self.keeps_bias = follow_table and loss.linear.bias is not None
        self.keeps_none = follow_table and loss.linear.bias is None
        self.made_sparse: List[nn.Embedding] = []
        self.handles = [linear.register_forward_pre_hook(_settle_linear),
                        linear.register_state_dict_pre_hook(_settle_linear),
                        linear.register_load_state_dict_pre_hook(_settle_linear)]

    def link_bias(self, bias: Optional[Tensor]) -> None:
        """Makes the loss use a bias that the model adds after its head; None: the Linear's."""
        self.bias = bias
        if bias is None and self.linear.bias is None and self.keeps_bias:
            bias = self.linear.weight.new_zeros(self.linear.out_features)
        self.loss.linear = with_bias(self.linear, bias)

    def outputs(self, model: Any, forward: Callable[..., Any], labels: Tensor,
                kwargs: Dict[str, Any]) -> Any:
        """Returns what the model returns with labels, with the loss in place of its own."""
        if self.linear.weight.device != self.device:  # the model moved, and only the Linear with it
            self.device = self.linear.weight.device
            self.loss.to(self.device)
        if self.shift is not None:
            return self._shifted(model, forward, labels, dict(kwargs))
        tap = Tap(self, type(model).__name__)
        outputs = self._tapped(model, tap, lambda: forward(labels=labels, **kwargs))
        if not tap.losses:
            tap.refuse(f"expected the loss to be the cross entropy of the outputs of {self.name}, "
                       "got one that is computed in another way")
        return _without_logits(outputs)

    def _shifted(self, model: Any, forward: Callable[..., Any], labels: Tensor,
                 kwargs: Dict[str, Any]) -> Any:
        """The same for a given `shift`: the model is called without labels."""
        num_items = kwargs.pop("num_items_in_batch", None)
        shifted, as_dict = kwargs.pop("shift_labels", None), kwargs.pop("return_dict", None)
        inputs = (kwargs.get("decoder_input_ids"), kwargs.get("decoder_inputs_embeds"))
        if model.config.is_encoder_decoder and all(each is None for each in inputs):
            kwargs["decoder_input_ids"] = _decoder_inputs(model, labels)
        tap = Tap(self, type(model).__name__)
        outputs = self._tapped(model, tap, lambda: forward(**kwargs, return_dict=True))
        logits = getattr(outputs, "logits", None)
        if not isinstance(logits, Logits):
            tap.refuse(f"expected its logits to be the outputs of {self.name}, got "
                       f"{type(logits).__name__}")
        if shifted is not None:
            labels = shifted
        elif self.shift:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        value = tap.cross_entropy(logits, labels, reduction="mean" if num_items is None else "sum")
        if num_items is not None and self.loss.reduction == "mean":
            is_tensor = isinstance(num_items, Tensor)
            value = value / (num_items.to(value.device) if is_tensor else num_items)
        rest = {key: entry for key, entry in outputs.items() if key not in ("loss", "logits")}
        outputs = type(outputs)(loss=value, logits=NoLogits(), **rest)
        as_dict = getattr(model.config, "return_dict", True) if as_dict is None else as_dict
        return outputs if as_dict else outputs.to_tuple()

    def _tapped(self, model: nn.Module, tap: "Tap", call: Callable[[], Any]) -> Any:
        parent_name, _, leaf = self.name.rpartition(".")
        parent = model.get_submodule(parent_name)
        linear = parent._modules.get(leaf)
        if linear is not self.linear:
            raise RuntimeError(
                f"{tap.owner}: expected {self.name} to be the Linear of its {self.loss._name}, got "
                f"{type(linear).__name__}: what changes a head (PEFT, set_output_embeddings) comes "
                "before xs.replace_head; xs.restore_head takes the loss out again")
        parent._modules[leaf] = tap
        try:
            return call()
        finally:
            parent._modules[leaf] = linear

    def adopt(self, tap: "Tap", logits: Logits) -> None:
        """Checks the loss against the bias, the scale and the soft cap that the model applied."""
        if logits.bias is not None and self.linear.bias is not None:
            tap.refuse(f"expected one bias, got that of {self.name} and one after it")
        if logits.bias is not None and self.keeps_none:
            tap.refuse("expected no bias after the head, since none was found when the sampler was "
                       "built, got one: give a sampler that does not follow the table")
        changed = {}
        for option, seen in zip(("logit_scale", "softcap"), logits.transform()):
            known = getattr(self.loss, option)
            if not _are_close(seen, known):
                if option in self.given:
                    tap.refuse(f"expected {option} as the model has it, {seen}, got {known}: leave "
                               "the argument out")
                changed[option] = seen
        if logits.bias is not self.bias:
            self.link_bias(logits.bias)
        for option, seen in changed.items():
            setattr(self.loss, option, seen)


def _are_close(one: Optional[float], other: Optional[float]) -> bool:
    """Within the rounding of a product and a quotient."""
    return one == other or (one is not None and other is not None
                            and abs(one - other) <= 1e-9 * abs(other))


class Tap(nn.Module):
    """Stands in for the Linear during a forward pass with labels."""

    def __init__(self, head: Head, owner: str) -> None:
        super().__init__()
        object.__setattr__(self, "head", head)
        self.owner, self.losses, self.num_classes = owner, 0, head.loss.num_classes

    def __getattr__(self, name: str) -> Any:  # dtype, device and sizes are the Linear's
        return getattr(self.head.linear, name)

    def forward(self, input: Tensor) -> Any:
        return Logits(self, input)

    def refuse(self, reason: str) -> NoReturn:
        raise UnsupportedHeadError(f"replace_head of {self.owner}: {reason}")

    def cross_entropy(self, input: Logits, target: Tensor, weight: Optional[Tensor] = None,
                      size_average: Optional[bool] = None, ignore_index: int = -100,
                      reduce: Optional[bool] = None, reduction: str = "mean",
                      label_smoothing: float = 0.0) -> Tensor:
        """The loss for ``F.cross_entropy`` of the logits: its arguments, and its result's shape."""
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
        if ignore_index != loss.ignore_index:  # both are ignored
            target = target.masked_fill(target == ignore_index, loss.ignore_index)
        if loss.reduction != "mean" or reduction == "mean":
            return loss(input.hidden, target)
        loss.reduction = reduction
        try:
            return loss(input.hidden, target)
        finally:
            loss.reduction = "mean"


def transform_in(config: Any) -> Dict[str, float]:
    """The arguments `logit_scale` and `softcap` that a config's options suggest."""
    configs = [config, config.get_text_config(decoder=True)]
    found = {name: value for each in configs for name in (*SOFT_CAPS, *SCALES, *DIVISORS)
             if isinstance(value := getattr(each, name, None), (int, float)) and value}
    given: Dict[str, float] = {}
    for name, value in found.items():
        if name in SOFT_CAPS:
            given["softcap"] = float(value)
        elif value != 1.0:
            scale = 1.0 / value if name in DIVISORS else float(value)
            given["logit_scale"] = given.get("logit_scale", 1.0) * scale
    return given


def bias_after(model: nn.Module, name: str, linear: nn.Linear) -> Optional[Tensor]:
    """The bias that a model adds to the outputs of its head.

    It is a parameter or buffer of shape [N] or [1, N] of the modules that the head is in, such as
    `final_logits_bias`. The forward pass with labels shows whether it is used.
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


def with_bias(linear: nn.Linear, bias: Optional[Tensor]) -> nn.Linear:
    """Returns a Linear of the same weight with a bias [N] or [1, N]; None: `linear` itself.

    A bias that is no parameter [N] is shared as one that does not train.
    """
    if bias is None:
        return linear
    shared = nn.Linear(linear.in_features, linear.out_features, device="meta")
    shared.weight = linear.weight
    if isinstance(bias, nn.Parameter) and bias.dim() == 1:
        shared.bias = bias
    else:
        shared.bias = nn.Parameter(bias.detach().reshape(-1), False)
    return shared


def _decoder_inputs(model: Any, labels: Tensor) -> Tensor:
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if make is None:
        raise ValueError(f"{type(model).__name__}: expected decoder_input_ids with the labels, "
                         "since replace_head was given shift, got none")
    inputs: Tensor = make(labels)
    return inputs


def _without_logits(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        for key, value in list(outputs.items()):
            if isinstance(value, Logits):
                outputs[key] = NoLogits()
        return outputs
    if isinstance(outputs, tuple):
        return tuple(NoLogits() if isinstance(value, Logits) else value for value in outputs)
    return outputs
