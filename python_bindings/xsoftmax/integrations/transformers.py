"""A sampled head in models of Hugging Face Transformers, and a Trainer with row optimizers.

With the head the model trains, evaluates, generates, saves and resizes as it did before.
"""

import functools
import inspect
import os
from typing import Any, Dict, Optional, Tuple, Type, TypeVar

import torch
import transformers
from torch import nn

from .. import optim
from .._first_step import row_optimizer, row_sparse_tables
from .._public import public_names
from .._table import check_linear, has_own_forward
from ..linear_losses import LinearLoss, check_loss_class
from ._heads import Head, bias_after, transform_in, with_bias
from ._logits import NoLogits, UnsupportedHeadError, unshared_training
from ._resize_embeddings import resize_embeddings
from .accelerate import Accelerator

__all__ = ["NoLogits", "RowTrainer", "Trainer", "UnsupportedHeadError", "replace_head",
           "restore_head"]
__dir__ = public_names(__all__)

Loss = TypeVar("Loss", bound=LinearLoss)
LOSS_STATE = "xsoftmax_loss.pt"


class _WithLoss:
    """Adds the loss to a model's class, which :func:`_with_loss` derives from both."""

    _base_class: Type[nn.Module]
    _xsoftmax_head: Head

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy begins with the Linear and what is tied to it, which must be up to date.
        self._xsoftmax_head.loss.settle()
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _new, (self._base_class,), state

    def train(self, mode: bool = True) -> Any:
        super().train(mode)  # type: ignore[misc]
        # Here rather than at a call with labels: the loss may be called by itself, as topk is.
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
def _with_loss(base: Any) -> Type[nn.Module]:
    """Returns a subclass of a model's class whose calls with labels compute the loss."""
    signature = inspect.signature(base.forward)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            bound = signature.bind(self, *args, **kwargs).arguments
            more = next((name for name, parameter in signature.parameters.items()
                         if parameter.kind is inspect.Parameter.VAR_KEYWORD), "")
            kwargs = {**bound.pop(more, {}), **bound}
            kwargs.pop(next(iter(signature.parameters)))  # self
        labels = kwargs.pop("labels", None)
        if labels is None:
            return base.forward(self, **kwargs)
        call = functools.partial(base.forward, self)
        return self._xsoftmax_head.outputs(self, call, labels, kwargs)

    # A config keeps the name as the architecture, and Transformers finds a model's task by it.
    return type(base.__name__, (_WithLoss, base), {
        "forward": forward, "_base_class": base, "__module__": base.__module__,
        "__doc__": base.__doc__})


def _new(base: Any) -> Any:
    kind = _with_loss(base)
    return kind.__new__(kind)


def replace_head(model: nn.Module, loss_class: Type[Loss], *, name: Optional[str] = None,
                 shift: Optional[bool] = None, **kwargs: Any) -> Loss:
    """Puts a loss of this package in the place of a model's cross entropy over logits::

        loss = xs.integrations.transformers.replace_head(
            model, xs.SampledSoftmaxLoss, sampler="log_uniform", num_samples=512)
        # sampled in train(), exact in eval(), without logits
        model(input_ids, labels=labels).loss

    - With `labels` the model's own code runs, and this loss takes the place of its cross entropy:
      labels are shifted, ignored and averaged as that class does, and terms that it adds (of
      routers) stay. `outputs.logits` then raises where it is used.
    - A scale or a soft cap of the logits is applied. A bias after the head is shared by the loss:
      a parameter [N] trains, a buffer or a frozen parameter stays as it is.
    - Without `labels` the model gives its logits as before, so `generate()`, pipelines and beam
      search work. Threads may call the model with and without labels at once.
    - The Linear, the model's parameters and its keys stay. `save_pretrained` writes a plain model;
      `from_pretrained` reads it without this package.
    - An embedding that is tied to the head gets `sparse=True` where the loss makes row-sparse
      gradients, so that the gradient of both stays row-sparse.
    - `resize_token_embeddings` resizes loss and sampler, and carries the state of row optimizers
      and of optimizers of `torch.optim` that have taken a step.
    - PEFT: call it with what `get_peft_model` returned. A head among `modules_to_save` is trained;
      a LoRA on the head is refused.

    Args:
        model: changed in place: a PreTrainedModel, or one of PEFT.
        loss_class: xs.SampledSoftmaxLoss, xs.CaneLoss or xs.LinearCrossEntropyLoss.
        name: of the Linear; None: the output embeddings'.
        shift: whether position t is to predict label t + 1. None: the model's class says so, since
            its own code pairs logits and labels. A value goes past that code, for classes whose
            loss is no cross entropy.
        **kwargs: the loss's own arguments, without in_features, num_classes and bias.
            `logit_scale` and `softcap` default to the model's; others are refused.

    Returns:
        The loss. It shares its parameters with the model: give an optimizer `model.parameters()`
        alone.

    Raises:
        UnsupportedHeadError: which is a TypeError; a head that is no plain nn.Linear, or that is followed
            by a bias that trains and is no parameter [N]; at the first call with labels, a model
            whose objective is not the cross entropy of its head's logits, changed at most by a
            bias, a scale and a soft cap, or one with another `logit_scale` or `softcap` than the
            arguments
        TypeError: a loss with parameters of its own, which no save_pretrained would keep
        ValueError: a model whose head is replaced already, or that has no output embeddings, and
            no name is given
    """
    model = _base_model(model)
    who = f"replace_head of {type(model).__name__}"
    check_loss_class(who, loss_class)
    known = getattr(model, "_xsoftmax_head", None)
    if known is not None:
        raise ValueError(f"{who}: expected a model as Transformers made it, got one whose head is "
                         f"a {known.loss._name} already: call xs.restore_head(model, loss) first")
    name, linear = _linear(who, model, _head_name(who, model) if name is None else name)
    fixed_options = {"logit_scale", "softcap"} & kwargs.keys()
    if _embedding(model, "output") is linear:
        kwargs = {**transform_in(model.config), **kwargs}
    check_linear(f"{loss_class.__name__}.from_linear", linear)
    bias = bias_after(model, name, linear)
    if bias is not None and (reason := unshared_training(bias)):
        raise UnsupportedHeadError(f"{who}: {reason}")
    loss = loss_class.from_linear(with_bias(linear, bias), **kwargs)
    loss.train(model.training)
    more = [key for key, _ in loss.named_parameters() if not key.startswith("linear.")]
    if more:
        raise TypeError(f"{who}: expected a loss whose parameters are those of the Linear, got "
                        f"{', '.join(more)} beside them")
    head = Head(loss, linear, bias, name, shift, fixed_options)
    for module in model.modules() if loss._row_gradients() else ():
        if not isinstance(module, nn.Embedding) or module.weight is not linear.weight:
            continue
        if not module.sparse:
            module.sparse = True
            head.made_sparse.append(module)
    object.__setattr__(model, "_xsoftmax_head", head)
    kind: Any = type(model)
    model.__class__ = _with_loss(kind)
    return loss


def _embedding(model: Any, side: str) -> Any:
    """Returns the module of `get_input_embeddings` or `get_output_embeddings`, or None."""
    try:
        return getattr(model, f"get_{side}_embeddings")()
    except (AttributeError, NotImplementedError):  # Canine has hashes in place of a table
        return None


def restore_head(model: nn.Module, loss: LinearLoss) -> nn.Linear:
    """Takes the loss out of a model again, which keeps its trained values; returns the Linear.

    With labels the model then computes its own cross entropy, of its own logits.

    Args:
        model: changed in place: what :func:`replace_head` was given.
        loss: what :func:`replace_head` returned.

    Raises:
        ValueError: the loss of another model, or a model whose head is not replaced
    """
    inner = _base_model(model)
    head = getattr(inner, "_xsoftmax_head", None)
    if head is None or head.loss is not loss and head.loss.linear is not loss.linear:
        raise ValueError("restore_head: expected the loss that replace_head gave for this "
                         f"{type(inner).__name__}, got another {type(loss).__name__}")
    loss.settle()
    head.remove()
    inner.__class__ = inner._base_class
    del inner._xsoftmax_head
    linear: nn.Linear = head.linear
    return linear


def _base_model(model: nn.Module) -> Any:
    """Returns the PreTrainedModel: `model`, or the one inside a PEFT model."""
    found = next((module for module in model.modules()
                  if isinstance(module, transformers.PreTrainedModel)), None)
    if found is None:
        raise TypeError("replace_head: expected a model of Transformers, got "
                        f"{type(model).__name__}")
    return found


def _head_name(who: str, model: Any) -> str:
    """Returns the name of the output embeddings."""
    head = _embedding(model, "output")
    name = None if head is None else next(
        (key for key, module in model.named_modules() if module is head), None)
    if name is None:
        layers = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise ValueError(f"{who}: expected the name of its head, since it has no output "
                         f"embeddings; its Linear layers end with {layers[-3:]}")
    return name


def _linear(who: str, model: Any, name: str) -> Tuple[str, nn.Linear]:
    """Returns the Linear that is trained, and its name: PEFT's copy for `modules_to_save`."""
    module = model.get_submodule(name)
    if hasattr(module, "modules_to_save") and hasattr(module, "active_adapters"):
        name = f"{name}.modules_to_save.{module.active_adapters[0]}"
        module = model.get_submodule(name)
    is_plain = isinstance(module, nn.Linear) and not has_own_forward(module)
    if not is_plain or hasattr(module, "lora_A") or hasattr(module, "parametrizations"):
        hint = ""
        if hasattr(module, "base_layer"):
            hint = ": put the head among modules_to_save, not among target_modules"
        raise UnsupportedHeadError(f"{who}: expected {name} to be a plain nn.Linear, got "
                                   f"{type(module).__name__} ({type(module).__module__}){hint}")
    return name, module


class RowTrainer:
    """Makes a Trainer ready for row-sparse gradients: `class MyTrainer(RowTrainer, SFTTrainer)`.

    - Clipping and the norm that is logged take row-sparse gradients.
    - Where the model has a table with row-sparse gradients, the optimizer that `TrainingArguments`
      name is the one of :mod:`xsoftmax.optim` with the same steps: RowAdam for AdamW, RowSGD,
      RowAdagrad.
    - Where `compute_metrics` asks for logits, evaluation computes them.
    - The state of samplers is saved with each checkpoint, and read when training resumes.

    Raises:
        ValueError: `optim` names an optimizer that may not take row-sparse gradients;
            `label_smoothing_factor` or `compute_loss_func`, which compute all logits and go past
            the loss
    """

    def create_accelerator_and_postprocess(self, *args: Any, **kwargs: Any) -> None:
        super().create_accelerator_and_postprocess(*args, **kwargs)  # type: ignore[misc]
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if not isinstance(accelerator, Accelerator):
            kind = type(accelerator)
            is_plain = kind is Accelerator.__mro__[1]
            accelerator.__class__ = Accelerator if is_plain else type(
                "Accelerator", (Accelerator, kind), {})

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Tuple[Any, Dict[str, Any]]:
        kind, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        tables = row_sparse_tables()
        if model is None or not any(id(parameter) in tables for parameter in model.parameters()):
            return kind, kwargs
        ours = row_optimizer(kind) if inspect.isclass(kind) and kind in _SAME_STEPS else None
        if ours is None:
            raise ValueError(
                "TrainingArguments: expected optim as an Adam, AdamW, SGD or Adagrad of torch, in "
                "whose place an optimizer for row-sparse gradients comes, got "
                f"{getattr(args.optim, 'value', args.optim)!r}, whose "
                f"{getattr(kind, '__name__', kind)} may take none: give "
                "optimizers=(xs.optim.RowAdam(model.parameters()), None) or another of yours, or "
                "make the loss with sparse_grad=False")
        known = inspect.signature(getattr(optim, ours).__init__).parameters
        return getattr(optim, ours), {key: value for key, value in kwargs.items() if key in known}

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        options = [name for name in ("label_smoother", "compute_loss_func")
                   if getattr(self, name, None) is not None]
        if options and "labels" in inputs and _head_of(model) is not None:
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
        if prediction_loss_only or _head_of(model) is None or "labels" not in inputs:
            return step(model, inputs, prediction_loss_only, ignore_keys)
        loss, _, labels = step(model, dict(inputs), True, ignore_keys)
        without = {key: value for key, value in inputs.items() if key != "labels"}
        _, logits, _ = step(model, without, False, ignore_keys)
        if labels is None:
            prepared = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
            labels = prepared["labels"].detach()
        return loss, logits, labels

    def _save(self, output_dir: Optional[str] = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        head = _head_of(self.model)  # type: ignore[attr-defined]
        state = {} if head is None else {
            key: value for key, value in head.loss.state_dict().items()
            if not key.startswith("linear.")}
        if state:
            folder = output_dir or self.args.output_dir  # type: ignore[attr-defined]
            torch.save(state, os.path.join(folder, LOSS_STATE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        head = _head_of(self.model)  # type: ignore[attr-defined]
        path = os.path.join(resume_from_checkpoint, LOSS_STATE)
        if head is not None and os.path.exists(path):
            linear = {f"linear.{key}": value
                      for key, value in head.loss.linear.state_dict().items()}
            head.loss.load_state_dict({**linear, **torch.load(path, weights_only=True)})


_SAME_STEPS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def _head_of(model: Any) -> Optional[Head]:
    """Returns the replaced head of a model, or of one inside it."""
    return next((module._xsoftmax_head for module in model.modules()
                 if getattr(module, "_xsoftmax_head", None) is not None), None)


class Trainer(RowTrainer, transformers.Trainer):
    """Trains as `transformers.Trainer`, with row-sparse gradients: see :class:`RowTrainer`."""
