"""The class tables of a model: the facts that must agree between ranks, and their exclusion from
DistributedDataParallel."""

from typing import Any, Dict, Iterable, List

from torch import nn

from ..tables.table_module import TableModule
from ..samplers import Sampler


def facts_of(tables: Iterable[nn.Module]) -> Dict[str, Any]:
    """Returns the facts about tables that must agree between ranks."""
    facts: Dict[str, Any] = {}
    for place, table in enumerate(tables):
        table_facts = {"type": type(table).__name__, "options": getattr(table, "_options", None)}
        table_facts |= {
            name: f"{list(tensor.shape)} in {tensor.dtype}"
            for name, tensor in [*table.named_parameters(), *table.named_buffers()]
        }
        table_facts |= {
            name: repr(module)
            for name, module in table.named_modules() if isinstance(module, Sampler)
        }
        facts |= {f"{name} of class table {place}": fact for name, fact in table_facts.items()}
    return facts


def tables_of(model: nn.Module) -> List[TableModule]:
    """Returns the class tables in `model`, including those of losses that
    :mod:`xsoftmax.integrations` attached to it, which are not submodules."""
    heads: List[Any] = [
        module._xsoftmax_head for module in model.modules() if "_xsoftmax_head" in module.__dict__
    ]
    return [module for module in model.modules() if isinstance(module, TableModule)
            ] + [head.loss for head in heads]


def leave_out(model: Any) -> None:
    """Makes ``DistributedDataParallel(model)`` ignore the class tables in `model`.
    :func:`replicate` and :func:`shard_classes` call this for the model passed to them."""
    parts = {
        id(part)
        for table in tables_of(model)
        for part in [*table.parameters(), *table.buffers()]
    }
    # Under all names, because a table may also be registered as an embedding.
    names = {
        name
        for named_tensors in (model.named_parameters, model.named_buffers)
        for name, part in named_tensors(remove_duplicate=False) if id(part) in parts
    }
    model._ddp_params_and_buffers_to_ignore = sorted(
        {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names})
