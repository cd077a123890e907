"""A sampled output layer for Hugging Face Transformers models, and a Trainer with row optimizers.

Training, evaluation, generation, saving and resizing of the model work as before.
"""

import functools
import inspect
import os
from typing import Any, Dict, Optional, Tuple, Type, TypeVar

import torch
import transformers
from torch import nn

from .. import optim
from ..optim.first_step import row_optimizer, row_sparse_tables
from .._core.public import public_names
from ..tables.table_module import check_linear, has_own_forward
from ..losses.linear_loss import LinearLoss
from .fast_head import FastHead, fast_head, slow_head
from .heads import Head, check_loss_class, find_bias, read_transform, replace_bias
from .logits import NoLogits, UnsupportedHeadError, explain_untrainable_bias
from .resize_embeddings import resize_embeddings
from .accelerate import Accelerator

__all__ = [
    "FastHead", "NoLogits", "RowTrainer", "Trainer", "UnsupportedHeadError", "fast_head",
    "replace_head", "restore_head", "slow_head"
]
__dir__ = public_names(__all__)

Loss = TypeVar("Loss", bound=LinearLoss)
LOSS_STATE = "xsoftmax_loss.pt"


class _WithLoss:
    """Mixin that adds the loss to a model's class; :func:`_derive_class` derives from both."""

    _base_class: Type[nn.Module]
    _xsoftmax_head: Head

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy takes the Linear and the tensors tied to it, which must be current.
        self._xsoftmax_head.loss.catch_up()
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _create, (self._base_class,), state

    def train(self, mode: bool = True) -> Any:
        super().train(mode)  # type: ignore[misc]
        # Set it here, not in calls with labels: users may call the loss directly, or its topk.
        self._xsoftmax_head.loss.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._xsoftmax_head.follow(self)  # type: ignore[arg-type]
        return self

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        resize = super().resize_token_embeddings  # type: ignore[misc]
        return resize_embeddings(self, self._xsoftmax_head, lambda: resize(*args, **kwargs))


@functools.cache
def _derive_class(base: Any) -> Type[nn.Module]:
    """Returns a subclass of a model's class that computes the loss when called with labels."""
    signature = inspect.signature(base.forward)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            arguments = signature.bind(self, *args, **kwargs).arguments
            keyword_name = next((name for name, parameter in signature.parameters.items()
                                 if parameter.kind is inspect.Parameter.VAR_KEYWORD), "")
            kwargs = {**arguments.pop(keyword_name, {}), **arguments}
            kwargs.pop(next(iter(signature.parameters)))  # self
        labels = kwargs.pop("labels", None)
        if labels is None:
            return base.forward(self, **kwargs)
        call = functools.partial(base.forward, self)
        return self._xsoftmax_head.outputs(self, call, labels, kwargs)

    # Keep the class name: configs store it as the architecture, and it identifies the model's task.
    return type(base.__name__, (_WithLoss, base), {
        "forward": forward, "_base_class": base, "__module__": base.__module__,
        "__doc__": base.__doc__
    })


def _create(base: Any) -> Any:
    kind = _derive_class(base)
    return kind.__new__(kind)


def replace_head(model: nn.Module, loss_class: Type[Loss], *, name: Optional[str] = None,
                 shift: Optional[bool] = None, **kwargs: Any) -> Loss:
    """Replaces a model's cross entropy over logits with a loss of this package::

        loss = xs.integrations.transformers.replace_head(
            model, xs.SampledSoftmaxLoss, sampler="log_uniform", num_samples=512)
        # sampled in train(), exact in eval(), without logits
        model(input_ids, labels=labels).loss

    - Called with `labels`, the model runs its own code, and this loss replaces its cross entropy:
      labels are shifted, ignored and averaged as the model's class does, and additional loss terms
      (such as router losses) are kept. `outputs.logits` then raises an error if it is used.
    - A scale or a soft cap of the logits is applied. A bias after the head is shared with the loss:
      a parameter [N] is trained, a buffer or a frozen parameter stays constant.
    - Called without `labels`, the model returns its logits as before, so `generate()`, pipelines
      and beam search work. Different threads may call the model with and without labels at once.
    - The Linear, the model's parameters and its state dict keys stay the same. `save_pretrained`
      writes a plain model, and `from_pretrained` reads it without this package.
    - An embedding tied to the head gets `sparse=True` if the loss produces row-sparse gradients, so
      that the sum of both gradients stays row-sparse.
    - `resize_token_embeddings` also resizes the loss and the sampler, and the state of row
      optimizers and of `torch.optim` optimizers that have taken a step.
    - With PEFT, call it on the result of `get_peft_model`. A head in `modules_to_save` is trained;
      a LoRA adapter on the head is not supported.

    Args:
        model: a PreTrainedModel or a PEFT model; changed in place.
        loss_class: xs.SampledSoftmaxLoss, xs.CaneLoss or xs.LinearCrossEntropyLoss.
        name: the name of the Linear. None: the output embeddings.
        shift: whether position t predicts label t + 1. None: as in the model's own code, which
            pairs logits and labels. True or False bypasses that code, for models whose loss is not
            a cross entropy.
        **kwargs: arguments of the loss, except in_features, num_classes and bias. `logit_scale` and
            `softcap` default to those of the model; different values are refused.

    Returns:
        The loss. It shares its parameters with the model, so pass only `model.parameters()` to an
        optimizer.

    Raises:
        UnsupportedHeadError: (a TypeError) the head is not a plain nn.Linear, or is followed by a
            bias that requires a gradient and is not a parameter [N]. Raised at the first call with
            labels: the model's objective is not the cross entropy of its head's logits, changed at
            most by a bias, a scale and a soft cap; or the model's `logit_scale` or `softcap`
            differs from the argument.
        TypeError: the loss has parameters of its own, which save_pretrained would not save.
        ValueError: the head is already replaced; or the model has no output embeddings and no name
            is given.
    """
    model = _base_model(model)
    owner = f"replace_head of {type(model).__name__}"
    check_loss_class(owner, loss_class)
    old_head = getattr(model, "_xsoftmax_head", None)
    if old_head is not None:
        raise ValueError(
            f"{owner}: expected a model as Transformers made it, got one whose head is "
            f"a {old_head.loss._name} already: call xs.restore_head(model, loss) first")
    name, linear = _linear(owner, model, _head_name(owner, model) if name is None else name)
    fixed_options = {"logit_scale", "softcap"} & kwargs.keys()
    if _embedding(model, "output") is linear:
        kwargs = {**read_transform(model.config), **kwargs}
    check_linear(f"{loss_class.__name__}.from_linear", linear)
    bias = find_bias(model, name, linear)
    if bias is not None and (reason := explain_untrainable_bias(bias)):
        raise UnsupportedHeadError(f"{owner}: {reason}")
    loss = loss_class.from_linear(replace_bias(linear, bias), **kwargs)
    loss.train(model.training)
    other_names = [key for key, _ in loss.named_parameters() if not key.startswith("linear.")]
    if other_names:
        raise TypeError(f"{owner}: expected a loss whose parameters are those of the Linear, got "
                        f"others, {', '.join(other_names)}")
    head = Head(loss, linear, bias, name, shift, fixed_options)
    for module in model.modules() if loss._has_row_gradients() else ():
        if not isinstance(module, nn.Embedding) or module.weight is not linear.weight:
            continue
        if not module.sparse:
            module.sparse = True
            head.sparse_embeddings.append(module)
    object.__setattr__(model, "_xsoftmax_head", head)
    kind: Any = type(model)
    model.__class__ = _derive_class(kind)
    return loss


def _embedding(model: Any, side: str) -> Any:
    """Returns the module of `get_input_embeddings` or `get_output_embeddings`, or None."""
    try:
        return getattr(model, f"get_{side}_embeddings")()
    except (AttributeError, NotImplementedError):  # Canine hashes tokens instead of using a table
        return None


def restore_head(model: nn.Module, loss: LinearLoss) -> nn.Linear:
    """Undoes :func:`replace_head`. The model keeps its trained values.

    Afterwards the model computes its own cross entropy when called with labels.

    Args:
        model: the model passed to :func:`replace_head`; changed in place.
        loss: the return value of :func:`replace_head`.

    Returns:
        The model's Linear.

    Raises:
        ValueError: the loss belongs to another model, the model's head is not replaced, or it is
            fast: call slow_head first.
    """
    base = _base_model(model)
    head = getattr(base, "_xsoftmax_head", None)
    if head is None or head.loss is not loss and head.loss.linear is not loss.linear:
        raise ValueError("restore_head: expected the loss that replace_head gave for this "
                         f"{type(base).__name__}, got another {type(loss).__name__}")
    if hasattr(base, "_fast_head"):
        raise ValueError("restore_head: expected a model whose head is not fast, got one of "
                         "fast_head: call slow_head first")
    loss.catch_up()
    head.remove()
    base.__class__ = base._base_class
    del base._xsoftmax_head
    linear: nn.Linear = head.linear
    return linear


def _base_model(model: nn.Module) -> Any:
    """Returns the PreTrainedModel: `model` itself, or the one inside a PEFT model."""
    base = next(
        (module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)),
        None)
    if base is None:
        raise TypeError("replace_head: expected a model of Transformers, got "
                        f"{type(model).__name__}")
    return base


def _head_name(owner: str, model: Any) -> str:
    """Returns the name of the output embeddings."""
    head = _embedding(model, "output")
    name = None if head is None else next(
        (key for key, module in model.named_modules() if module is head), None)
    if name is None:
        layers = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise ValueError(f"{owner}: expected the name of its head, since it has no output "
                         f"embeddings; its Linear layers end with {layers[-3:]}")
    return name


def _linear(owner: str, model: Any, name: str) -> Tuple[str, nn.Linear]:
    """Returns the name of the Linear that is trained, and the Linear. With PEFT's
    `modules_to_save` this is PEFT's copy."""
    module = model.get_submodule(name)
    if hasattr(module, "modules_to_save") and hasattr(module, "active_adapters"):
        name = f"{name}.modules_to_save.{module.active_adapters[0]}"
        module = model.get_submodule(name)
    is_plain = isinstance(module, nn.Linear) and not has_own_forward(module)
    if not is_plain or hasattr(module, "lora_A") or hasattr(module, "parametrizations"):
        hint = ""
        if hasattr(module, "base_layer"):
            hint = ": put the head among modules_to_save, not among target_modules"
        elif hasattr(module, "_fast_head"):
            hint = ": call slow_head first"
        raise UnsupportedHeadError(f"{owner}: expected {name} to be a plain nn.Linear, got "
                                   f"{type(module).__name__} ({type(module).__module__}){hint}")
    return name, module


class RowTrainer:
    """Mixin that makes a Trainer support row-sparse gradients: ``class MyTrainer(RowTrainer,
    SFTTrainer)``.

    - Gradient clipping and the logged gradient norm include row-sparse gradients.
    - If the model has a table with row-sparse gradients, the optimizer selected in
      `TrainingArguments` is replaced by its equivalent in :mod:`xsoftmax.optim`: RowAdam for Adam
      and AdamW, RowSGD or RowAdagrad.
    - If `compute_metrics` needs logits, evaluation computes them.
    - The state of samplers is saved with each checkpoint, and restored when training resumes.

    Raises:
        ValueError: `optim` selects an optimizer without row-sparse equivalent; or
            `label_smoothing_factor` or `compute_loss_func` is set, which would compute all logits
            and bypass the loss.
    """
    def create_accelerator_and_postprocess(self, *args: Any, **kwargs: Any) -> None:
        super().create_accelerator_and_postprocess(*args, **kwargs)  # type: ignore[misc]
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if not isinstance(accelerator, Accelerator):
            kind = type(accelerator)
            is_plain = kind is Accelerator.__mro__[1]
            accelerator.__class__ = Accelerator if is_plain else type("Accelerator",
                                                                      (Accelerator, kind), {})

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Tuple[Any, Dict[str, Any]]:
        kind, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        tables = row_sparse_tables()
        if model is None or not any(id(parameter) in tables for parameter in model.parameters()):
            return kind, kwargs
        row_name = row_optimizer(kind) if inspect.isclass(kind) and kind in _COUNTERPARTS else None
        if row_name is None:
            raise ValueError(
                "TrainingArguments: expected optim as an Adam, AdamW, SGD or Adagrad of torch, in "
                "whose place an optimizer for row-sparse gradients comes, got "
                f"{getattr(args.optim, 'value', args.optim)!r}, whose "
                f"{getattr(kind, '__name__', kind)} may take none: give "
                "optimizers=(xs.optim.RowAdam(model.parameters()), None) or another of yours, or "
                "make the loss with sparse_grad=False")
        row_arguments = inspect.signature(getattr(optim, row_name).__init__).parameters
        return getattr(
            optim, row_name), {key: value
                               for key, value in kwargs.items() if key in row_arguments}

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        options = [
            name for name in ("label_smoother", "compute_loss_func")
            if getattr(self, name, None) is not None
        ]
        if options and "labels" in inputs and _find_head(model) is not None:
            is_smoother = options[0] == "label_smoother"
            argument = "label_smoothing_factor of 0" if is_smoother else "no compute_loss_func"
            raise ValueError(
                f"{type(self).__name__}: expected {argument} for a model whose head "
                "xs.replace_head replaced: it would compute all logits and go past the loss. "
                "Smoothing is the loss's own: xs.replace_head(..., label_smoothing=0.1)")
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool,
                        ignore_keys: Any = None) -> Any:
        step = super().prediction_step  # type: ignore[misc]
        if prediction_loss_only or _find_head(model) is None or "labels" not in inputs:
            return step(model, inputs, prediction_loss_only, ignore_keys)
        loss, _, labels = step(model, dict(inputs), True, ignore_keys)
        unlabelled_inputs = {key: value for key, value in inputs.items() if key != "labels"}
        _, logits, _ = step(model, unlabelled_inputs, False, ignore_keys)
        if labels is None:
            prepared = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
            labels = prepared["labels"].detach()
        return loss, logits, labels

    def _save(self, output_dir: Optional[str] = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        head = _find_head(self.model)  # type: ignore[attr-defined]
        state = {} if head is None else {
            key: value
            for key, value in head.loss.state_dict().items() if not key.startswith("linear.")
        }
        if state:
            folder = output_dir or self.args.output_dir  # type: ignore[attr-defined]
            torch.save(state, os.path.join(folder, LOSS_STATE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        head = _find_head(self.model)  # type: ignore[attr-defined]
        path = os.path.join(resume_from_checkpoint, LOSS_STATE)
        if head is not None and os.path.exists(path):
            linear = {
                f"linear.{key}": value
                for key, value in head.loss.linear.state_dict().items()
            }
            head.loss.load_state_dict({**linear, **torch.load(path, weights_only=True)})


_COUNTERPARTS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def _find_head(model: Any) -> Optional[Head]:
    """Returns the replaced head of a model, or of a model inside it."""
    return next(
        (module._xsoftmax_head
         for module in model.modules() if getattr(module, "_xsoftmax_head", None) is not None),
        None)


class Trainer(RowTrainer, transformers.Trainer):
    """A `transformers.Trainer` that supports row-sparse gradients; see :class:`RowTrainer`."""
