"""The class tables of a model: what ranks must agree on, and what DistributedDataParallel leaves to others."""

from typing import Any, Dict, Iterable, List

from torch import nn

from .._table import TableModule
from ..samplers import Sampler


def facts_of(tables: Iterable[nn.Module]) -> Dict[str, Any]:
    """What ranks must agree on."""
    facts: Dict[str, Any] = {}
    for place, table in enumerate(tables):
        of_table = {"type": type(table).__name__, "options": getattr(table, "_options", None)}
        of_table |= {name: f"{list(tensor.shape)} in {tensor.dtype}" for name, tensor in [*table.named_parameters(), *table.named_buffers()]}
        of_table |= {name: repr(module) for name, module in table.named_modules() if isinstance(module, Sampler)}
        facts |= {f"{name} of class table {place}": fact for name, fact in of_table.items()}
    return facts


def tables_of(model: nn.Module) -> List[TableModule]:
    """The class tables in `model`, and those of losses that :mod:`xsoftmax.integrations` gave it beside its modules."""
    heads: List[Any] = [module._xsoftmax_head for module in model.modules() if "_xsoftmax_head" in module.__dict__]
    return [module for module in model.modules() if isinstance(module, TableModule)] + [head.loss for head in heads]


def leave_out(model: Any) -> None:
    """Has ``DistributedDataParallel(model)`` leave the class tables in `model` to :func:`replicate` and :func:`shard_classes`, which call this for the
    model that they are given."""
    parts = {id(part) for table in tables_of(model) for part in [*table.parameters(), *table.buffers()]}
    # By all names: the rows of a table may be those of an embedding, too.
    names = {name for parts_of in (model.named_parameters, model.named_buffers) for name, part in parts_of(remove_duplicate=False) if id(part) in parts}
    model._ddp_params_and_buffers_to_ignore = sorted({*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names})
