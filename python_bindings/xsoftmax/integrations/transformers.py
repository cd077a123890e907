"""Hugging Face Transformers: a sampled head that trains, evaluates, generates, saves and resizes as the model's own, and a Trainer with row optimizers."""

import copy
import functools
import inspect
import os
from typing import Any, Callable, Dict, Optional, Tuple, Type, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from .. import optim
from .._first_step import row_optimizer, row_sparse_tables
from .._public import public_names
from .._table import _settle_linear
from ..linear_losses import LinearLoss, check_loss_class
from .accelerate import Accelerator

__all__ = ["NoLogits", "RowTrainer", "Trainer", "replace_head", "restore_head"]
__dir__ = public_names(__all__)

Loss = TypeVar("Loss", bound=LinearLoss)
LOSS_STATE = "xsoftmax_loss.pt"


class NoLogits:
    """What stands for `outputs.logits` where a model was called with labels: it raises where logits are asked for."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise AttributeError("a model whose head xs.replace_head replaced computes its loss without the logits: call it without labels for logits "
                             "(xs.integrations.transformers.Trainer does so where compute_metrics is given)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __getitem__ = __len__ = __iter__ = __array__ = __add__ = __mul__ = __truediv__ = __matmul__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls()._refuse()

    def __repr__(self) -> str:
        return "NoLogits()"


class _Tap(nn.Module):
    """Stands in for the Linear while a loss is computed: hands its input on."""

    seen: Optional[Tensor] = None

    def forward(self, input: Tensor) -> Tensor:
        self.seen = input
        return input


class _Head:
    """What a model knows of the loss in the place of its head: no module, so the model's parameters, keys and modules stay those it had."""

    def __init__(self, loss: LinearLoss, name: str, shift: bool) -> None:
        self.loss, self.name, self.shift = loss, name, shift
        self.is_checked, self.device = False, loss.linear.weight.device
        self.made_sparse = False
        self.handles = [loss.linear.register_forward_pre_hook(_settle_linear), loss.linear.register_state_dict_pre_hook(_settle_linear),
                        loss.linear.register_load_state_dict_pre_hook(_settle_linear)]

    def outputs(self, model: Any, forward: Callable[..., Any], labels: Tensor, kwargs: Dict[str, Any]) -> Any:
        loss, kwargs = self.loss, dict(kwargs)
        num_items, shifted = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        as_dict = kwargs.pop("return_dict", None)
        if loss.training != model.training:
            loss.train(model.training)
        if loss.linear.weight.device != self.device:  # the model has moved, and with it the Linear alone
            self.device = loss.linear.weight.device
            loss.to(self.device)
        if model.config.is_encoder_decoder and kwargs.get("decoder_input_ids") is None and kwargs.get("decoder_inputs_embeds") is None:
            kwargs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        hidden, outputs = self._hidden(model, forward, kwargs)
        if shifted is not None:
            labels = shifted
        elif self.shift:
            hidden, labels = hidden[..., :-1, :], labels[..., 1:]
        value = self._value(hidden, labels.to(hidden.device), num_items)
        rest = {key: entry for key, entry in outputs.items() if key not in ("loss", "logits")}
        outputs = type(outputs)(loss=value, logits=NoLogits(), **rest)
        as_dict = getattr(model.config, "return_dict", True) if as_dict is None else as_dict
        return outputs if as_dict else outputs.to_tuple()

    def _hidden(self, model: nn.Module, forward: Callable[..., Any], kwargs: Dict[str, Any]) -> Tuple[Tensor, Any]:
        """What the head is given, and the outputs with that in the place of logits."""
        parent_name, _, leaf = self.name.rpartition(".")
        parent, tap = model.get_submodule(parent_name), _Tap()
        linear = parent._modules.get(leaf)
        if linear is not self.loss.linear:
            raise RuntimeError(f"{type(model).__name__}: expected {self.name} to be the Linear of its {self.loss._name}, got {type(linear).__name__}: what "
                               "changes a head (PEFT, set_output_embeddings) comes before xs.replace_head; xs.restore_head takes the loss out again")
        parent._modules[leaf] = tap
        try:
            outputs = forward(**kwargs, return_dict=True)
        finally:
            parent._modules[leaf] = linear
        seen = tap.seen
        logits = getattr(outputs, "logits", None)
        if seen is None or logits is None:
            raise RuntimeError(f"{type(model).__name__}: expected its logits to be those of {self.name}, got none")
        if logits is not seen and not self.is_checked and not (logits.shape == seen.shape and torch.equal(logits, seen.to(logits.dtype))):
            raise RuntimeError(f"{type(model).__name__}: expected its logits as {self.name} gives them, but it changes them before it returns them "
                               "(by a scale, a soft cap or pooling), which a loss over the table does not know")
        self.is_checked = True
        return seen, outputs

    def _value(self, hidden: Tensor, target: Tensor, num_items: Any) -> Tensor:
        loss = self.loss
        if num_items is None or loss.reduction != "mean":
            return loss(hidden, target)
        loss.reduction = "sum"  # of a batch that is a part of the step's: over the targets of all of it
        try:
            value: Tensor = loss(hidden, target)
        finally:
            loss.reduction = "mean"
        return value / (num_items.to(value.device) if isinstance(num_items, Tensor) else num_items)


class _WithLoss:
    """Comes before a model's class. The class is made for each, by :func:`_with_loss`."""

    _base_class: Type[nn.Module]
    _xsoftmax_head: _Head

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._xsoftmax_head.loss.settle()  # the Linear, and what is tied to it, come first in a copy
        return _new, (self._base_class,), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__

    def resize_token_embeddings(self, new_num_tokens: Optional[int] = None, *args: Any, **kwargs: Any) -> Any:
        model: Any = self
        head = model._xsoftmax_head
        linear, embedding = head.loss.linear, model.get_input_embeddings()
        resize = super().resize_token_embeddings  # type: ignore[misc]
        if model.get_output_embeddings() is not linear:
            return resize(new_num_tokens, *args, **kwargs)
        # Transformers resizes copies, and says how new rows begin; the table itself stays the same parameter, and optimizers and samplers follow it.
        head.loss.settle()
        is_tied, before = embedding.weight is linear.weight, model.config.get_text_config().vocab_size
        copied = copy.deepcopy({"linear": linear, "embedding": embedding})
        model.set_output_embeddings(copied["linear"])
        if is_tied:
            model.set_input_embeddings(copied["embedding"])
        try:
            resize(new_num_tokens, *args, **kwargs)
            resized = model.get_output_embeddings()
            count = len(resized.weight)
            if count != head.loss.num_classes:
                head.loss.resize_classes(count)
            with torch.no_grad():
                linear.weight.copy_(resized.weight)
                if linear.bias is not None:
                    linear.bias.copy_(resized.bias)
            if is_tied:
                embedding.num_embeddings = count
        except Exception:
            model.config.get_text_config().vocab_size = model.vocab_size = before
            raise
        finally:
            model.set_output_embeddings(linear)
            if is_tied:
                model.set_input_embeddings(embedding)
        return model.get_input_embeddings()


@functools.cache
def _with_loss(base: Any) -> Type[nn.Module]:
    signature = inspect.signature(base.forward)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            bound = signature.bind(self, *args, **kwargs).arguments
            more = next((name for name, parameter in signature.parameters.items() if parameter.kind is inspect.Parameter.VAR_KEYWORD), "")
            kwargs = {**bound.pop(more, {}), **bound}
            kwargs.pop(next(iter(signature.parameters)))  # self
        labels = kwargs.pop("labels", None)
        if labels is None:
            return base.forward(self, **kwargs)
        return self._xsoftmax_head.outputs(self, functools.partial(base.forward, self), labels, kwargs)

    # The name is what a config keeps as the architecture, and what Transformers finds a model's task by.
    return type(base.__name__, (_WithLoss, base), {"forward": forward, "_base_class": base, "__module__": base.__module__, "__doc__": base.__doc__})


def _new(base: Any) -> Any:
    made = _with_loss(base)
    return made.__new__(made)


def replace_head(model: nn.Module, loss_class: Type[Loss], *, name: Optional[str] = None, shift: Optional[bool] = None, **kwargs: Any) -> Loss:
    """Gives a model of Transformers a loss of this package in the place of its cross entropy over logits::

        loss = xs.integrations.transformers.replace_head(model, xs.SampledSoftmaxLoss, sampler="log_uniform", num_samples=512)
        model(input_ids, labels=labels).loss                    # sampled in train(), exact in eval(), without logits

    - With `labels` the model computes this loss; `outputs.logits` then raises where it is used. Labels are shifted as Transformers shifts them, -100 is
      ignored, and `num_items_in_batch` divides as in Transformers.
    - Without `labels` it gives the logits that it gave before, and so `generate()`, pipelines and beams work.
    - The Linear, the model's parameters and its keys stay. `save_pretrained` writes a plain model; `from_pretrained` reads it without this package.
    - An embedding that is tied to the head gets `sparse=True` where the loss makes row-sparse gradients, so that the gradient of both stays row-sparse.
    - `resize_token_embeddings` resizes loss, sampler and row optimizers too.
    - PEFT: call it with what `get_peft_model` returned. A head among `modules_to_save` is trained; a LoRA on the head is refused.

    Args:
        model: changed in place: a PreTrainedModel, or one of PEFT.
        loss_class: xs.SampledSoftmaxLoss, xs.CaneLoss or xs.LinearCrossEntropyLoss.
        name: of the Linear; None: the output embeddings'.
        shift: whether position t is to predict label t + 1. None: as the model's class does.
        **kwargs: the loss's own arguments, without in_features, num_classes and bias.

    Returns:
        The loss. It shares its parameters with the model: give an optimizer `model.parameters()` alone.

    Raises:
        TypeError: a head that is no Linear; a loss with parameters of its own, which no save_pretrained would keep
        ValueError: a model whose head is replaced already, or whose task does not say whether labels are shifted
        RuntimeError: at the first call with labels, a model that changes its logits after the head, by a soft cap, a scale or pooling
    """
    model = _base_model(model)
    who = f"replace_head of {type(model).__name__}"
    check_loss_class(who, loss_class)
    if getattr(model, "_xsoftmax_head", None) is not None:
        raise ValueError(f"{who}: expected a model as Transformers made it, got one whose head is a {model._xsoftmax_head.loss._name} already: "  # type: ignore[union-attr]
                         "call xs.restore_head(model, loss) first")
    if name is None:
        name = _head_name(who, model)
    name, linear = _linear(who, model, name)
    shift = _shifts(who, model, name) if shift is None else shift
    loss = loss_class.from_linear(linear, **kwargs)
    more = [key for key, parameter in loss.named_parameters() if not key.startswith("linear.")]
    if more:
        raise TypeError(f"{who}: expected a loss whose parameters are those of the Linear, got {', '.join(more)} beside them")
    head = _Head(loss, name, shift)
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if loss._row_gradients() and isinstance(embedding, nn.Embedding) and embedding.weight is linear.weight and not embedding.sparse:
        embedding.sparse = head.made_sparse = True
    object.__setattr__(model, "_xsoftmax_head", head)
    kind: Any = type(model)
    model.__class__ = _with_loss(kind)
    return loss


def restore_head(model: nn.Module, loss: LinearLoss) -> nn.Linear:
    """Makes the model what it was before :func:`replace_head`, trained: its own cross entropy, of its own logits. Returns the Linear."""
    inner = _base_model(model)
    head = getattr(inner, "_xsoftmax_head", None)
    if head is None or head.loss.linear is not loss.linear:
        raise ValueError(f"restore_head: expected the loss that replace_head gave for this {type(inner).__name__}, got another {type(loss).__name__}")
    loss.settle()
    for handle in head.handles:
        handle.remove()
    if head.made_sparse:
        inner.get_input_embeddings().sparse = False
    inner.__class__ = inner._base_class
    del inner._xsoftmax_head
    return head.loss.linear


def _base_model(model: nn.Module) -> Any:
    """Of a model of PEFT: the one of Transformers inside."""
    found = model if isinstance(model, transformers.PreTrainedModel) else next(
        (module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)), None)
    if found is None:
        raise TypeError(f"replace_head: expected a model of Transformers, got {type(model).__name__}")
    return found


def _head_name(who: str, model: Any) -> str:
    head = model.get_output_embeddings()
    name = next((key for key, module in model.named_modules() if module is head), None) if head is not None else None
    if name is None:
        layers = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise ValueError(f"{who}: expected the name of its head, since it has no output embeddings; its Linear layers end with {layers[-3:]}")
    return name


def _linear(who: str, model: Any, name: str) -> Tuple[str, nn.Linear]:
    """The Linear that is trained: inside of the copy that PEFT makes for `modules_to_save`."""
    module = model.get_submodule(name)
    if hasattr(module, "modules_to_save") and hasattr(module, "active_adapters"):
        name = f"{name}.modules_to_save.{module.active_adapters[0]}"
        module = model.get_submodule(name)
    if not isinstance(module, nn.Linear) or hasattr(module, "lora_A") or hasattr(module, "parametrizations"):
        raise TypeError(f"{who}: expected {name} to be a plain nn.Linear, got {type(module).__name__} ({type(module).__module__})"
                        + (": put the head among modules_to_save, not among target_modules" if hasattr(module, "base_layer") else ""))
    return name, module


def _shifts(who: str, model: Any, name: str) -> bool:
    names = {each.__name__ for each in type(model).__mro__}
    if model.config.is_encoder_decoder:
        return False
    for mapping, shift in ((modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, False), (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, True),
                           (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, False),
                           (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, False)):
        if names & set(mapping.values()):
            return shift
    raise ValueError(f"{who}: expected shift=True or shift=False: its task does not say whether position t predicts label t or t + 1")


class RowTrainer:
    """What a Trainer needs for row-sparse gradients, to be put before one of yours: `class MyTrainer(RowTrainer, SFTTrainer)`.

    Clipping and the norm that is logged take row-sparse gradients. Where the model has a table with row-sparse gradients, the optimizer that
    `TrainingArguments` name is the one of :mod:`xsoftmax.optim` with the same steps: RowAdam for AdamW, RowSGD, RowAdagrad. Where `compute_metrics` asks
    for logits, evaluation computes them. What samplers keep is saved beside each checkpoint, and read when training resumes.

    A ValueError: an optimizer named there that may not take row-sparse gradients; `label_smoothing_factor` or `compute_loss_func`, which compute all logits
    and go past the loss.
    """

    def create_accelerator_and_postprocess(self, *args: Any, **kwargs: Any) -> None:
        super().create_accelerator_and_postprocess(*args, **kwargs)  # type: ignore[misc]
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if not isinstance(accelerator, Accelerator):
            accelerator.__class__ = Accelerator if type(accelerator) is Accelerator.__mro__[1] else type("Accelerator", (Accelerator, type(accelerator)), {})

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Tuple[Any, Dict[str, Any]]:
        kind, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        tables = row_sparse_tables()
        if model is None or not any(id(parameter) in tables for parameter in model.parameters()):
            return kind, kwargs
        ours = row_optimizer(kind) if inspect.isclass(kind) and kind in _SAME_STEPS else None
        if ours is None:
            raise ValueError("TrainingArguments: expected optim as an Adam, AdamW, SGD or Adagrad of torch, in whose place an optimizer for row-sparse "
                             f"gradients comes, got {getattr(args.optim, 'value', args.optim)!r}, whose {getattr(kind, '__name__', kind)} may take none: give "
                             "optimizers=(xs.optim.RowAdam(model.parameters()), None) or another of yours, or make the loss with sparse_grad=False")
        known = inspect.signature(getattr(optim, ours).__init__).parameters
        return getattr(optim, ours), {name: value for name, value in kwargs.items() if name in known}

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        asked = [name for name in ("label_smoother", "compute_loss_func") if getattr(self, name, None) is not None]
        if asked and "labels" in inputs and _head_of(model) is not None:
            argument = "label_smoothing_factor of 0" if asked[0] == "label_smoother" else "no compute_loss_func"
            raise ValueError(f"{type(self).__name__}: expected {argument} for a model whose head xs.replace_head replaced: it would compute all logits and go "
                             "past the loss. Smoothing is the loss's own: xs.replace_head(..., label_smoothing=0.1)")
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        step = super().prediction_step  # type: ignore[misc]
        if prediction_loss_only or _head_of(model) is None or "labels" not in inputs:
            return step(model, inputs, prediction_loss_only, ignore_keys)
        loss, _, labels = step(model, dict(inputs), True, ignore_keys)
        without = {key: value for key, value in inputs.items() if key != "labels"}
        _, logits, _ = step(model, without, False, ignore_keys)
        return loss, logits, self._prepare_inputs(inputs)["labels"].detach() if labels is None else labels  # type: ignore[attr-defined]

    def _save(self, output_dir: Optional[str] = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        head = _head_of(self.model)  # type: ignore[attr-defined]
        state = {} if head is None else {key: value for key, value in head.loss.state_dict().items() if not key.startswith("linear.")}
        if state:
            torch.save(state, os.path.join(output_dir or self.args.output_dir, LOSS_STATE))  # type: ignore[attr-defined]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        head, path = _head_of(self.model), os.path.join(resume_from_checkpoint, LOSS_STATE)  # type: ignore[attr-defined]
        if head is not None and os.path.exists(path):
            linear = {f"linear.{key}": value for key, value in head.loss.linear.state_dict().items()}
            head.loss.load_state_dict({**linear, **torch.load(path, weights_only=True)})


_SAME_STEPS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def _head_of(model: Any) -> Optional[_Head]:
    return next((module._xsoftmax_head for module in model.modules() if getattr(module, "_xsoftmax_head", None) is not None), None)


class Trainer(RowTrainer, transformers.Trainer):
    """`transformers.Trainer` for row-sparse gradients: see :class:`RowTrainer`."""
