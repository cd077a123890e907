"""Puts a loss of this package in the place of a model's output layer."""

from typing import Any, Type

from torch import nn

from .losses import Loss


def replace_head(model: nn.Module, name: str, loss_class: Type[Loss], **kwargs: Any) -> Loss:
    """Takes the Linear called `name` out of `model` and gives it back as a loss that shares its parameters.

    An `nn.Identity` stays in its place, so that `model(x)` is now the hidden state that the loss takes::

        loss = xs.replace_head(model, "decoder", xs.SampledSoftmaxLoss, sampler="uniform", num_samples=512)
        loss(model(tokens), target).backward()

    Load a checkpoint of the old model before this: its keys change. The parameters leave `model.parameters()` (unless they are tied to
    others there), so the optimizer needs `loss.parameters()` too.

    Args:
        model: changed in place.
        name: the layer's name, as `model.named_modules()` gives it: "decoder", "lm_head", "transformer.head".
        loss_class: xs.SampledSoftmaxLoss, xs.CaneLoss or xs.LinearCrossEntropyLoss.
        **kwargs: the loss's own arguments, without in_features, num_classes and bias.

    Errors: AttributeError where the model has no such layer, TypeError where it is no nn.Linear.
    """
    try:
        linear: Any = model.get_submodule(name)
    except AttributeError as error:
        layers = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise AttributeError(f"replace_head: {type(model).__name__} has no layer {name!r}; its Linear layers: {layers}") from error
    loss = loss_class.from_linear(linear, **kwargs)  # before the model is touched: an error leaves it whole
    model.set_submodule(name, nn.Identity())
    return loss
