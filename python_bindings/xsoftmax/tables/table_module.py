"""Base class and helpers of modules that train a table of rows: one per class, or per edge of a
tree."""

import copy
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.types import Device

from ..optim import first_step
from .._core.checks import (check_bool, check_count, check_reduction, check_tensor, class_weights,
                            refuse_assignment)
from .._core.memory import advise_huge_pages
from .._core.options import option_text
from .._core.placement import LOCAL, table_of
from ..estimators import check_estimator
from .._core.typing import Module, Numbers
from ..optim.catch_up import catch_up


class TableModule(Module):
    """Base class of modules over a table, an ``nn.Linear`` whose rows may have pending updates of a
    row optimizer (:mod:`xsoftmax.optim`).

    Everything that reads the whole table first calls :meth:`catch_up`: `eval()`, `state_dict`,
    moves to another device or dtype, and the methods that say so.
    """

    # Attributes that are part of the option text; assigning one rebuilds the text.
    _option_names: Tuple[str, ...] = ("reduction", "ignore_index", "sparse_grad")
    # Arguments of the constructor that cannot be assigned later.
    _fixed_options: Tuple[str, ...] = ()
    # Prefixes of names that may be missing from a state dict, or superfluous in it.
    _optional_state: Tuple[str, ...] = ()
    _class_table = LOCAL

    def _init_table(self, in_features: int, num_classes: int, *, reduction: str,
                    weight: Optional[Numbers] = None, ignore_index: int = -100,
                    sparse_grad: Optional[bool] = None) -> None:
        self._name = name = type(self).__name__
        self.in_features = check_count(name, "in_features", in_features, 0)
        self.num_classes = check_count(name, "num_classes", num_classes, 1)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.sparse_grad = sparse_grad
        self.register_buffer("weight", class_weights(name, weight, self.num_classes))
        self.register_state_dict_pre_hook(_catch_up_before)

    def _watch_tables(self) -> None:
        """Lets optimizers find the tables. Called as soon as the module has them."""
        first_step.watch(self)

    def _init_options(self, **others: Any) -> None:
        """Sets further options as attributes and builds the option text. From here on, assigning an
        option rebuilds the text."""
        for name, value in others.items():
            setattr(self, name, value)
        self._options = self._option_text()

    def _option_text(self) -> str:
        return option_text(**{name: getattr(self, name) for name in self._option_names})

    def _check_option(self, name: str, value: Any) -> Any:
        """Returns the value of an option, checked. A subclass adds its own options."""
        if name == "reduction":
            return check_reduction(self._name, value)
        if name == "ignore_index":
            return check_count(self._name, name, value, None)
        if name == "remove_accidental_hits" or (name == "sparse_grad" and value is not None):
            return check_bool(self._name, name, value)
        if name == "estimator":
            check_estimator(self._name, value, self.__dict__.get("label_smoothing", 0.0))
        return value

    def _is_option(self, name: str) -> bool:
        """Returns whether an attribute is checked when it is assigned."""
        return name in self._option_names

    def _update_texts(self, name: str) -> None:
        """Rebuilds the texts that an option is part of, after it was assigned."""
        if "_options" in self.__dict__:
            self._options = self._option_text()

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_option(name):
            if name in self._fixed_options and "_options" in self.__dict__:
                refuse_assignment(self._name, name)
            super().__setattr__(name, value)
            return
        super().__setattr__(name, self._check_option(name, value))
        self._update_texts(name)
        if name == "sparse_grad" and "_options" in self.__dict__:
            for table in self._tables():
                if table is not None:
                    # The assignment overrides the form that an optimizer has fixed.
                    torch.ops.xsoftmax.fix_row_gradient(table, None)

    def _tables(self) -> List[Optional[Tensor]]:
        raise NotImplementedError(f"{self._name} does not define _tables")

    @torch.jit.export
    def catch_up(self) -> None:
        """Applies the pending updates of row optimizers to all rows of the table (lazy updates).

        The library calls it before it reads a whole table. Call it before the table is read by
        other means. It touches all N rows if there are pending updates, and is only a look-up
        otherwise.
        """
        for table in self._tables():
            catch_up(table)

    def _has_row_gradients(self) -> bool:
        """Returns whether the gradients of its tables may be row-sparse in training."""
        return self.sparse_grad is not False

    def train(self, mode: bool = True) -> "TableModule":
        if not mode:
            self.catch_up()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.catch_up()  # pending updates are registered by the table's memory, which changes here
        return super()._apply(fn, recurse)

    def __getstate__(self) -> Dict[str, Any]:
        # A copy, by copy.deepcopy, torch.save or pickle, is another table, without pending updates,
        # and is not replicated.
        self.catch_up()
        state = dict(self.__dict__)
        if not table_of(self).is_split:
            state.pop("_class_table", None)
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch_tables()

    def __deepcopy__(self, memo: Dict[int, Any]) -> "TableModule":
        self.catch_up()
        with torch.no_grad():
            for table in self._tables():
                # It was copied with a module that shares it, possibly with pending updates.
                if table is not None and id(table) in memo:
                    memo[id(table)].copy_(table)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str,
                              local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        # Pending updates of the old table must not be applied to the new one.
        self.catch_up()
        for table in self._tables():
            if table is not None:
                torch.ops.xsoftmax.mapped_table_changes(table)
        error_msgs.extend(self._explain_table_size(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)
        optional = tuple(prefix + name for name in self._optional_state)
        for keys in (missing_keys, unexpected_keys):
            keys[:] = [key for key in keys if not key.startswith(optional)]

    def _explain_table_size(self, state_dict: Dict[str, Any], prefix: str) -> List[str]:
        """Returns error messages with advice for a checkpoint whose table has another number of
        rows. torch reports the shapes."""
        return []

    def _queries(self, input: Tensor, target: Optional[Tensor]) -> Tensor:
        """Returns input [*, D] as [Q, D], after checking its shape and that of target."""
        return flat_queries(self._name, self.in_features, input, target,
                            num_classes=self.num_classes)

    def _check_tensors(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns target, after checking that input and target are tensors."""
        if not torch.jit.is_scripting():
            check_tensor(self._name, "input", input)
            check_tensor(self._name, "target", target)
            if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level(
            ) is not None:
                refuse_transforms(self._name)
        return target

    def _check_k(self, k: int) -> int:
        """Returns the k of topk, checked."""
        if not torch.jit.is_scripting():
            if not torch.compiler.is_compiling():
                check_count(self._name, "k", k, None)
        if k < 0 or k > self.num_classes:
            raise ValueError(f"{self._name}: expected k in [0, {self.num_classes}], got {k}")
        return k

    def _add_excluded(self, k: int, input: Tensor, exclude: Optional[Tensor]) -> int:
        """Returns the number of best classes to search for: k plus the number that may be excluded.
        """
        if exclude is None:
            return k
        if not torch.jit.is_scripting():
            check_tensor(self._name, "exclude", exclude)
        if exclude.dim() != input.dim() or exclude.shape[:-1] != input.shape[:-1]:
            raise ValueError(f"{self._name}: expected exclude of shape {list(input.shape[:-1])} "
                             f"with one more dimension, got {list(exclude.shape)}")
        return min(k + exclude.shape[-1], self.num_classes)

    def _drop_excluded(self, values: Tensor, ids: Tensor, k: int, input: Tensor,
                       exclude: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        """Returns the best k of the results [Q, K] that are not excluded, [*, k]."""
        if exclude is None:
            values, ids = values[:, :k], ids[:, :k]
        else:
            values, ids = torch.ops.xsoftmax.exclude_topk(
                values, ids, exclude.reshape(ids.shape[0], exclude.shape[-1]), self.num_classes, k)
        shape = list(input.shape[:-1]) + [k]
        return values.reshape(shape), ids.reshape(shape)

    def _table_queries(self, input: Tensor, target: Optional[Tensor]) -> Tensor:
        """Returns :meth:`_queries`, for methods that read the whole table; applies pending updates.
        """
        queries = self._queries(input, target)
        if not torch.jit.is_scripting():
            if torch.compiler.is_exporting() and self.training and self._has_row_gradients():
                raise RuntimeError(f"{self._name}: expected the model in eval() for torch.export, "
                                   "which cannot apply the steps that rows may owe in training")
        self.catch_up()
        return queries

    def _check_step(self) -> None:
        if not torch.jit.is_scripting():
            if self.sparse_grad is not False and not torch.compiler.is_compiling():
                refuse_parametrized(self)
                refuse_data_parallel(self._name, self._tables())
                self._class_table.check(self._name, self._tables())

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, num_classes={self.num_classes}"
        text += f", reduction={self.reduction!r}" if self.reduction != "mean" else ""
        return text + (f", ignore_index={self.ignore_index}" if self.ignore_index != -100 else "")


def refuse_transforms(owner: str) -> None:
    """Raises RuntimeError inside a transform of torch.func, which cannot transform the operators'
    backward passes in C++."""
    raise RuntimeError(f"{owner}: expected a call outside of torch.func's transforms (grad, vjp, "
                       "jvp, vmap), got one inside. For gradients use "
                       "torch.autograd.grad on torch.func.functional_call(loss, parameters, "
                       "(input, target)); for a loss of each example, reduction=\"none\"")


def has_own_forward(linear: nn.Linear) -> bool:
    """Returns whether a Linear belongs to a subclass with another forward pass than nn.Linear."""
    lazy_class = nn.modules.lazy.LazyModuleMixin
    return type(linear).forward is not nn.Linear.forward and not isinstance(linear, lazy_class)


def check_linear(owner: str, linear: Any) -> None:
    """Checks the Linear passed to `from_linear`. Losses read only its weight and bias.

    A hook that computes the weight before a forward pass, or a subclass's own forward pass, would
    not run, and the parameters it depends on would not be trained.
    """
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"{owner}: expected an nn.Linear, got {type(linear).__name__}")
    if has_own_forward(linear):
        raise TypeError(f"{owner}: expected an nn.Linear with the forward pass of nn.Linear, got "
                        f"{type(linear).__name__}, which defines another")
    if isinstance(linear, nn.modules.lazy.LazyModuleMixin):
        raise TypeError(f"{owner}: expected an nn.Linear whose sizes are known, got "
                        f"{type(linear).__name__}: run the model once first")
    if "parametrizations" not in linear._modules and ("weight" not in linear._parameters
                                                      or "bias" not in linear._parameters):
        raise ValueError(f"{owner}: expected an nn.Linear whose weight and bias are parameters, "
                         "got one where a hook computes them "
                         "(torch.nn.utils.weight_norm, spectral_norm, prune): use "
                         "torch.nn.utils.parametrizations and sparse_grad=False, or prune.remove")


def refuse_parametrized(module: nn.Module) -> None:
    """Raises ValueError for a parametrized table: most backward passes of torch do not support
    sparse gradients, and the whole table would be recomputed in each step."""
    for name, child in module._modules.items():
        parametrizations: Any = child._modules.get("parametrizations") if isinstance(
            child, nn.Linear) else None
        if parametrizations is not None:
            raise ValueError(f"{module._name}: expected a table without parametrization for "
                             f"sparse_grad={module.sparse_grad}, got {name} with one "
                             f"({', '.join(parametrizations)}): make the loss with "
                             "sparse_grad=False")


def refuse_data_parallel(owner: str, tables: List[Optional[Tensor]]) -> None:
    """Raises RuntimeError for a table under DistributedDataParallel, which cannot reduce row-sparse
    gradients and would crash in the backward pass."""
    active = (nn.parallel.DistributedDataParallel._active_ddp_module
              if torch.distributed.is_available() else None)
    if active is not None and any(parameter is table for table in tables
                                  for parameter in active._module_parameters):
        raise RuntimeError(f"{owner}: expected a table with sparse_grad=False under "
                           "DistributedDataParallel, which cannot reduce row-sparse gradients, "
                           "got None or True: call xs.distributed.replicate(model) or "
                           "shard_classes(model) before DistributedDataParallel(model)")


def check_queries(owner: str, in_features: int, input: Tensor, target: Optional[Tensor],
                  several: bool, num_classes: int) -> None:
    """Checks the shapes of a call.

    Args:
        owner: named in errors.
        in_features: D.
        input: [*, D].
        target: [*], or [*, T] if several, or None.
        several: whether multiple positives are supported.
        num_classes: of the module, to detect a confusion with in_features.
    """
    if not torch.jit.is_scripting():
        for name, tensor in (("input", input), ("target", target)):
            if name == "input" or tensor is not None:
                check_tensor(owner, name, tensor)
            if tensor is not None and tensor.layout != torch.strided:
                raise TypeError(f"{owner}: expected {name} as a dense tensor, got layout "
                                f"{tensor.layout}")
    if input.dim() < 1 or input.shape[-1] != in_features:
        hint = ""
        if input.dim() >= 1 and input.shape[-1] == num_classes:
            hint = (", whose width is num_classes: in_features comes before num_classes in the "
                    "constructor")
        raise ValueError(f"{owner}: expected input of shape [*, {in_features}], got "
                         f"{list(input.shape)}{hint}")
    if target is not None:
        if input.shape[:-1] != target.shape and not (several and target.dim() == input.dim()
                                                     and target.shape[:-1] == input.shape[:-1]):
            suffix = ", or with one more dimension for several positives" if several else ""
            raise ValueError(f"{owner}: expected target of shape {list(input.shape[:-1])}{suffix}, "
                             f"got {list(target.shape)}")


def flat_queries(owner: str, in_features: int, input: Tensor, target: Optional[Tensor],
                 several: bool = False, num_classes: int = -1) -> Tensor:
    """Returns input [*, D] as [Q, D], after :func:`check_queries`."""
    check_queries(owner, in_features, input, target, several, num_classes)
    return flatten_queries(input)


def flatten_queries(input: Tensor) -> Tensor:
    """Returns input [*, D] as [Q, D]."""
    return input.unsqueeze(0).flatten(0, -2)  # reshape(-1, D) fails for D = 0


def _catch_up_before(module: TableModule, *_: Any) -> None:
    module.catch_up()


def _catch_up_linear(linear: nn.Linear, *_: Any) -> None:
    catch_up(linear.weight)
    catch_up(linear.bias)


def make_linear(owner: str, in_features: int, num_rows: int, bias: bool, device: Device,
                dtype: Optional[torch.dtype]) -> nn.Linear:
    """Returns an nn.Linear whose weight is on huge pages, and which applies pending updates before
    its state dict is saved or loaded."""
    check_bool(owner, "bias", bias)
    device = torch.get_default_device() if device is None else torch.device(device)
    with warnings.catch_warnings():
        # A tree of one class has no edges, and so an empty table.
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        try:
            linear = nn.Linear(in_features, num_rows, bias=bias, device="meta", dtype=dtype)
            if device.type != "meta":
                linear.to_empty(device=device)
        except (RuntimeError, MemoryError) as error:
            if not any(word in str(error).lower() for word in ("memory", "overflow")):
                raise
            size = num_rows * in_features * (dtype or torch.get_default_dtype()).itemsize / 2**30
            raise RuntimeError(f"{owner}: expected memory on {device} for a table of shape "
                               f"[{num_rows}, {in_features}], {size:.4g} GiB, got none: keep the "
                               "table in a file with xs.tables.mapped, or split it over ranks "
                               "with xs.distributed.shard_classes") from error
        if device.type != "meta":
            advise_huge_pages(linear.weight.detach())
            linear.reset_parameters()
    linear.register_state_dict_pre_hook(_catch_up_linear)
    linear.register_load_state_dict_pre_hook(_catch_up_linear)
    return linear


def make_rows(module: nn.Module, count: int) -> Dict[str, Any]:
    """Returns parameters with ``count`` rows, by name, initialised as by ``reset_parameters()`` of
    an nn.Linear, nn.Embedding or nn.EmbeddingBag."""
    stand_in: Any = module.__class__.__new__(module.__class__)
    rows = {
        name: None if table is None else table.new_empty(count, *table.shape[1:])
        for name, table in module._parameters.items()
    }
    # padding_idx refers to a row of the whole table, not of these rows.
    stand_in.__dict__ = {**module.__dict__, "_parameters": rows, "padding_idx": None}
    stand_in.reset_parameters()
    return rows
