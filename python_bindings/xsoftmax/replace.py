"""Puts a loss of this package in the place of a model's output layer, and takes it out again."""

import sys
from typing import Any, Dict, List, Optional, Tuple, Type

from torch import nn

from .linear_losses import LinearLoss, Loss, check_loss_class


class MovedHead(nn.Identity):
    """Stands where :func:`replace_head` took an nn.Linear out, and returns its input.

    The loss is its submodule, so the model's `parameters()`, `train()`, `eval()` and `to()` reach
    it. In the state dict of the model the table has the keys of the nn.Linear. What the loss keeps
    besides (samplers, a learned log Z, class weights) stands under `loss.`, and a checkpoint may
    lack it.
    """

    # The model alone is scripted; the loss scripts by itself.
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
    """Names the table's keys as the state dict does, and drops missing ones of the loss."""
    prefix = head._prefix
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [prefix + key[len(prefix + _TABLE):] if key.startswith(prefix + _TABLE) else key
                    for key in names]
    keys.missing_keys[:] = [key for key in keys.missing_keys
                            if not key.startswith(prefix + "loss.")]


def replace_head(model: nn.Module, name: str, loss_class: Type[Loss], **kwargs: Any) -> Loss:
    """Takes the Linear called `name` out of `model` and returns a loss that shares its parameters.

    `model(x)` is now the hidden state that the loss takes::

        loss = xs.replace_head(model, "decoder", xs.SampledSoftmaxLoss, sampler="uniform",
                               num_samples=512)
        optimizer = xs.optim.RowAdam(model.parameters())
        loss(model(tokens), target).backward()

    The loss is a part of the model: `model.parameters()` has its parameters once, and
    `model.train()`, `model.eval()` and `model.to()` reach it. In `model.state_dict()` the table has
    the keys of the Linear, so checkpoints of the model as it was load, and load there. What
    samplers keep has keys of its own, `decoder.loss.sampler...`, which a checkpoint may lack.
    :func:`restore_head` undoes it.

    In several processes call `xs.distributed.replicate(model)` before
    `DistributedDataParallel(model)`, which then leaves the loss out, and give `fully_shard` the
    argument `ignored_params=set(loss.parameters())`.

    A model of Hugging Face Transformers keeps its Linear, its parameters and its keys: there
    :func:`xsoftmax.integrations.transformers.replace_head` is called. With `labels` the model then gives the loss of this class, without
    them the logits, so that `generate` and `save_pretrained` do what they did.

    Args:
        model: changed in place.
        name: the layer's name, as `model.named_modules()` gives it: "decoder", "lm_head", "transformer.head".
        loss_class: xs.SampledSoftmaxLoss, xs.CaneLoss or xs.LinearCrossEntropyLoss.
        **kwargs: the loss's own arguments, without in_features, num_classes and bias.

    Errors: AttributeError where the model has no such layer, TypeError where it is no nn.Linear, or loss_class is another class, or no class,
    ValueError where the head is replaced already.
    """
    check_loss_class("replace_head", loss_class)
    try:
        linear: Any = model.get_submodule(name)
    except AttributeError as error:
        layers = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise AttributeError(f"replace_head: {type(model).__name__} has no layer {name!r}; its Linear layers: {layers}") from error
    if isinstance(linear, MovedHead):
        raise ValueError(f"replace_head: expected {name!r} as an nn.Linear, got one where its head is replaced already, by a {linear.loss._name}: call "
                         "xs.restore_head(model, loss) first")
    pretrained = _pretrained(model, name)
    if pretrained is not None:
        from .integrations import transformers

        return transformers.replace_head(pretrained[0], loss_class, name=pretrained[1], **kwargs)
    loss = loss_class.from_linear(linear, **kwargs)  # an error leaves the model whole
    loss.train(model.training)
    model.set_submodule(name, MovedHead(loss))
    return loss


def restore_head(model: nn.Module, loss: LinearLoss, name: Optional[str] = None) -> nn.Linear:
    """Puts the Linear of a loss back where :func:`replace_head` took it from: `model(x)` gives logits again, and its keys are those of the old model.

    Rows are brought up to date first. The loss goes on sharing the parameters.

    Args:
        model: changed in place.
        loss: what replace_head gave.
        name: as in replace_head; None: the one place where a head was taken out.

    Returns:
        `loss.linear`.

    Errors: ValueError where no head of that name was taken out, or several were and no name says which; TypeError where the loss has no Linear.
    """
    if not isinstance(loss, LinearLoss):
        raise TypeError(f"restore_head: expected a loss with a Linear, as replace_head gives it, got {type(loss).__name__}")
    for module in model.modules():
        if getattr(module, "_xsoftmax_head", None) is not None:
            from .integrations import transformers

            return transformers.restore_head(module, loss)
    places: List[str] = [key for key, module in model.named_modules() if isinstance(module, MovedHead)]
    if name is None and len(places) != 1 or name is not None and name not in places:
        wanted = "one place where replace_head took a head out" if name is None else f"a head that was taken out of {name!r}"
        raise ValueError(f"restore_head: expected {wanted}, got {places} in {type(model).__name__}")
    loss.settle()
    model.set_submodule(places[0] if name is None else name, loss.linear)
    return loss.linear


def _pretrained(model: nn.Module, name: str) -> Optional[Tuple[nn.Module, str]]:
    """The innermost model of Transformers that `name` is in, and the name there."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    parts, found = name.split("."), None
    for depth in range(len(parts)):
        module = model.get_submodule(".".join(parts[:depth]))
        if isinstance(module, transformers.PreTrainedModel):
            found = module, ".".join(parts[depth:])
    return found
