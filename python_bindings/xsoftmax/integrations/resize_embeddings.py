"""Resizes a model's tables together with the loss, samplers and optimizers of its head."""

import copy
from typing import Any, Callable, Dict, List, Tuple, cast

import torch
from torch import Tensor, nn

from ..optim.first_step import known_optimizers
from ..tables.resize import KNOWN_OPTIMIZERS, _states, resize_parameters
from ..optim.catch_up import catch_up
from .heads import Head, find_bias


class _Snapshot:
    """References to a model's tensors, modules and sizes, to undo or redirect a resize."""
    def __init__(self, model: Any) -> None:
        self.model = model
        self.tensors = {
            name: (parameter, parameter.data)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self.modules = {
            module: (dict(module._modules), dict(module._parameters))
            for module in model.modules()
        }
        self.buffers = {module: dict(module._buffers) for module in self.modules}
        self.sizes = {
            module: {
                key: value
                for key, value in vars(module).items() if type(value) is int or key == "padding_idx"
            }
            for module in self.modules
        }
        self.configs = [(config, copy.copy(vars(config))) for config in
                        {id(each): each
                         for each in (model.config, model.config.get_text_config())}.values()]

    def find_new_values(self) -> Dict[Tensor, Tensor]:
        """Returns the new values of each parameter whose number of rows changed."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        result: Dict[Tensor, Tensor] = {}
        for name, (parameter, old_values) in self.tensors.items():
            values = parameters[name].data if name in parameters else old_values
            if values.shape != old_values.shape and values.shape[1:] == old_values.shape[1:]:
                result.setdefault(parameter, values)
        return result

    def restore_parameters(self, parameters: Any) -> None:
        """Puts the original module and parameter objects back, with their original memory."""
        for module, (modules, tensors) in self.modules.items():
            for key, child in modules.items():
                new_child = module._modules.get(key)
                if new_child is not child and isinstance(child, nn.Linear):
                    child.out_features = getattr(new_child, "out_features", child.out_features)
                module._modules[key] = child
            module._parameters.update(
                {key: value
                 for key, value in tensors.items() if value in parameters})
        for parameter, data in self.tensors.values():
            if parameter in parameters:
                parameter.data = data

    def restore(self) -> None:
        for module, (modules, tensors) in self.modules.items():
            module._modules.update(modules)
            module._parameters.update(tensors)
            module._buffers.update(self.buffers[module])
            vars(module).update(self.sizes[module])
        for parameter, data in self.tensors.values():
            parameter.data = data
        for config, options in self.configs:
            vars(config).update(options)


def resize_embeddings(model: Any, head: Head, resize: Callable[[], Any]) -> Any:
    """Calls Transformers' resize, which initialises new rows, but keeps the parameter objects.

    Parameters whose number of rows changed are resized in place, together with the state that row
    optimizers, and optimizers of ``torch.optim`` that have taken a step, hold for them. The loss
    and its samplers are resized too. An error changes nothing.
    """
    snapshot = _Snapshot(model)
    for parameter, _ in snapshot.tensors.values():
        catch_up(parameter)
    try:
        result = resize()
        new_values = snapshot.find_new_values()
        is_module = isinstance(result, nn.Module)
        snapshot.restore_parameters(new_values)
        _resize_in_place(head, new_values)
    except Exception:
        snapshot.restore()
        raise
    if head.loss.linear is not head.linear:
        head.link_bias(None if head.bias is None else find_bias(model, head.name, head.linear))
    return model.get_input_embeddings() if is_module else result


def _resize_in_place(head: Head, new_values: Dict[Tensor, Tensor]) -> None:
    loss = head.loss
    optimizers = [
        candidate for candidate in known_optimizers() if isinstance(candidate, KNOWN_OPTIMIZERS)
    ]
    for parameter, values in new_values.items():  # may raise, so it runs before the first change
        for optimizer in optimizers:
            _states(loss._name, optimizer, [cast(nn.Parameter, parameter)], len(values))
    count = len(new_values.get(head.linear.weight, head.linear.weight))
    if count != loss.num_classes:
        loss.resize_classes(count, optimizers=optimizers)  # may raise, so it runs first
    changes: List[Tuple[Tensor, Tensor]] = [(parameter, values)
                                            for parameter, values in new_values.items()
                                            if len(parameter) != len(values)]
    resize_parameters(loss._name, changes, optimizers)
    with torch.no_grad():
        for parameter in (head.linear.weight, head.linear.bias):
            if parameter in new_values:
                parameter.copy_(new_values[parameter])
    head.linear.out_features = loss.num_classes
