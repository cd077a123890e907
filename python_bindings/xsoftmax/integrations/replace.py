"""Replaces a model's output layer with a loss of this package, and restores it."""

import sys
from typing import Any, Dict, List, Optional, Tuple, Type

from torch import nn

from ..losses.linear_loss import LinearLoss, Loss
from .heads import check_loss_class


class MovedHead(nn.Identity):
    """A placeholder for the nn.Linear that :func:`replace_head` removed. Returns its input.

    The loss is its submodule, so the model's `parameters()`, `train()`, `eval()` and `to()` include
    it. In the model's state dict the table keeps the keys of the nn.Linear. Other state of the loss
    (samplers, a learned log_z, class weights) has keys under `loss.`, which a checkpoint may omit.
    """

    # Only the model is scripted; the loss is scripted separately.
    __jit_ignored_attributes__ = ["loss"]
    __jit_unused_properties__ = ["_linear"]

    def __init__(self, loss: LinearLoss) -> None:
        super().__init__()
        self.loss = loss
        self.register_load_state_dict_post_hook(_rename)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias", "in_features", "out_features"):
            raise AttributeError(
                f"MovedHead has no {name!r}: xs.replace_head took the nn.Linear out of here, and "
                "the model gives hidden states, no logits. It is `loss.linear` of the loss that "
                "came back; xs.restore_head(model, loss) puts it here again")
        return super().__getattr__(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state, prefix = super().state_dict(*args, **kwargs), kwargs.get("prefix", "")
        for key in [key for key in state if key.startswith(prefix + _TABLE)]:
            state[prefix + key[len(prefix + _TABLE):]] = state.pop(key)
        return state

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *args: Any) -> None:
        self._prefix = prefix
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if not key.startswith(prefix + "loss."):
                state_dict[prefix + _TABLE + key[len(prefix):]] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def _linear(self) -> nn.Linear:
        return self.loss.linear

    def _fqn_modifiers(self) -> Dict[str, str]:
        """Tells torch.distributed.checkpoint which attribute holds the tensors of these keys."""
        return {"weight": "_linear", "bias": "_linear"}


_TABLE = "loss.linear."


def _rename(head: MovedHead, keys: Any) -> None:
    """Reports the table's keys by their state dict names, and drops missing keys of the loss."""
    prefix = head._prefix
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [
            prefix + key[len(prefix + _TABLE):] if key.startswith(prefix + _TABLE) else key
            for key in names
        ]
    keys.missing_keys[:] = [
        key for key in keys.missing_keys if not key.startswith(prefix + "loss.")
    ]


def replace_head(model: nn.Module, name: str, loss_class: Type[Loss], **kwargs: Any) -> Loss:
    """Removes the Linear called `name` from `model` and returns a loss that shares its parameters.

    Afterwards `model(x)` returns the hidden states that the loss takes::

        loss = xs.replace_head(model, "decoder", xs.SampledSoftmaxLoss, sampler="uniform",
                               num_samples=512)
        optimizer = xs.optim.RowAdam(model.parameters())
        loss(model(tokens), target).backward()

    The loss becomes part of the model: `model.parameters()` contains its parameters once, and
    `model.train()`, `model.eval()` and `model.to()` include it. In `model.state_dict()` the table
    keeps the keys of the Linear, so checkpoints are compatible with the original model in both
    directions. Samplers add keys such as `decoder.loss.sampler...`, which a checkpoint may omit.
    :func:`restore_head` undoes the replacement.

    With several processes, call `xs.distributed.replicate(model)` before
    `DistributedDataParallel(model)`, which then skips the loss, or pass
    `ignored_params=set(loss.parameters())` to `fully_shard`.

    For a Hugging Face Transformers model this calls
    :func:`xsoftmax.integrations.transformers.replace_head`, and the model keeps its Linear, its
    parameters and its keys. Called with `labels`, the model then computes its loss with
    `loss_class`; without them it returns logits, so `generate` and `save_pretrained` still work.

    Args:
        model: changed in place.
        name: the name of the layer in `model.named_modules()`, such as "decoder", "lm_head" or
            "transformer.head".
        loss_class: xs.SampledSoftmaxLoss, xs.CaneLoss or xs.LinearCrossEntropyLoss.
        **kwargs: arguments of the loss, except in_features, num_classes and bias.

    Returns:
        The loss.

    Raises:
        AttributeError: the model has no layer of that name.
        TypeError: the layer is not an nn.Linear, or loss_class is not a supported class.
        ValueError: the head is already replaced.
    """
    check_loss_class("replace_head", loss_class)
    try:
        linear: Any = model.get_submodule(name)
    except AttributeError as error:
        layers = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise AttributeError(f"replace_head: {type(model).__name__} has no layer {name!r}; its "
                             f"Linear layers: {layers}") from error
    if isinstance(linear, MovedHead):
        raise ValueError(f"replace_head: expected {name!r} as an nn.Linear, got one where its head "
                         f"is replaced already, by a {linear.loss._name}: call "
                         "xs.restore_head(model, loss) first")
    pretrained = _find_pretrained(model, name)
    if pretrained is not None:
        from ..integrations import transformers

        return transformers.replace_head(pretrained[0], loss_class, name=pretrained[1], **kwargs)
    loss = loss_class.from_linear(linear, **kwargs)  # on an error the model is unchanged
    loss.train(model.training)
    model.set_submodule(name, MovedHead(loss))
    return loss


def restore_head(model: nn.Module, loss: LinearLoss, name: Optional[str] = None) -> nn.Linear:
    """Puts the Linear back that :func:`replace_head` removed. Afterwards `model(x)` returns logits
    again, and the state dict has the original keys.

    Pending updates are applied first. The loss continues to share the parameters.

    Args:
        model: changed in place.
        loss: the return value of :func:`replace_head`.
        name: as in :func:`replace_head`. None: the only replaced head of the model.

    Returns:
        `loss.linear`.

    Raises:
        ValueError: no head of that name was replaced, or name is None and the number of replaced
            heads is not one.
        TypeError: the loss has no Linear.
    """
    if not isinstance(loss, LinearLoss):
        raise TypeError("restore_head: expected a loss with a Linear, as replace_head gives it, "
                        f"got {type(loss).__name__}")
    for module in model.modules():
        if getattr(module, "_xsoftmax_head", None) is not None:
            from ..integrations import transformers

            return transformers.restore_head(module, loss)
    places: List[str] = [
        key for key, module in model.named_modules() if isinstance(module, MovedHead)
    ]
    if name is None and len(places) != 1 or name is not None and name not in places:
        expected = ("one place where replace_head took a head out"
                    if name is None else f"a head that was taken out of {name!r}")
        raise ValueError(
            f"restore_head: expected {expected}, got {places} in {type(model).__name__}")
    loss.catch_up()
    model.set_submodule(places[0] if name is None else name, loss.linear)
    return loss.linear


def _find_pretrained(model: nn.Module, name: str) -> Optional[Tuple[nn.Module, str]]:
    """Returns the innermost Transformers model that contains the layer `name`, and the layer's name
    within it."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    parts, result = name.split("."), None
    for depth in range(len(parts)):
        module = model.get_submodule(".".join(parts[:depth]))
        if isinstance(module, transformers.PreTrainedModel):
            result = module, ".".join(parts[depth:])
    return result
