"""Hooks and registries of the whole process: all that the library has torch or Python call, and all
that it remembers of other objects. Each has its home here; what is called stands where it belongs.

``import xsoftmax`` installs none of them. Each is installed once, by the first use of what needs
it, and stays. Registries hold weak references: an entry goes with its object.

Hooks on the step of every optimizer of the process, those of torch.optim included:

- ``_first_step``, before a step. Installed with the first table (a loss, a matcher) or row
  optimizer. Refuses row-sparse gradients that an optimizer cannot take before anything changes, and
  warns of gradients that are dense for no reason and of tables that no optimizer has. The first
  step of an optimizer costs a pass over its parameters; a later one a look-up in a dictionary.
- ``_resize``, before a step. Installed by the first ``resize_classes``. Refuses a step of an
  optimizer that was not resized with its table, which would write to memory of another size. A step
  costs a look-up for each resized table.
- ``tables``, before a step. Installed with the first table in a file, beside a function at exit.
  Optimizers of torch.optim do not say what they write to: the file is marked as being written to. A
  step costs a set of the optimizer's parameters while such a table lives. At exit owed steps are
  made up, since the next process does not know of them.
- ``retrieval``, after a step. Installed with the first search index. Fused optimizers of torch write
  to parameters without counting it in their version, which says whether an index is stale. A step
  costs a look at each group's option ``fused``.

Somebody who imports the library and uses none of these has no hook, and pays nothing. Hooks on
single objects (``state_dict`` and its like on a loss and its ``nn.Linear``, a gradient of a
replicated parameter) are set where the object is made and go with it. During ``load_state_dict``
of a row optimizer two hooks of its own hide tensors from a cast, and are removed after it.

Deferred work: a row optimizer that nobody holds any more makes up what it owes (``flush``). The
collector of cycles may free it while a CUDA graph is being captured, and the flush would be part of
the graph. It then waits here, with the state it needs, for the next call that looks
(``run_deferred``): a step or a flush of a row optimizer, or a read of a whole table. That costs
a look at an empty list.
"""

import atexit
import contextlib
import weakref
from typing import Any, Callable, Dict, List, MutableMapping, Tuple

import torch
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)
from torch.utils.weak import WeakTensorKeyDictionary

Optimizer = torch.optim.Optimizer
StepHook = Callable[[Optimizer, Any, Any], Any]

# Of `_first_step`.
table_modules: "weakref.WeakSet[Any]" = weakref.WeakSet()
row_optimizers: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()  # and others that a search found
Groups = MutableMapping[Optimizer, Tuple[List[Any], int]]  # the list param_groups, and its length
# The groups of optimizers whose first step is behind them, which costs a look-up a step. A load of
# state makes new groups, so the next step counts as the first.
seen_groups: Groups = weakref.WeakKeyDictionary()
# The groups of optimizers whose gradients were checked: those above, and optimizers that step while
# a table has a gradient and no optimizer has the table.
watched_groups: Groups = weakref.WeakKeyDictionary()
fixed_forms: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()  # modules -> the sparse_grad that an optimizer has set
warned_modules: "weakref.WeakSet[Any]" = weakref.WeakSet()
unowned_tables = WeakTensorKeyDictionary()  # table -> how many steps went without it

resized_tables = WeakTensorKeyDictionary()  # of `_resize`
mapped_tables = WeakTensorKeyDictionary()  # of `tables`: table -> the process that opened it
search_indices: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()  # of losses

deferred: List[Callable[[], None]] = []

_installed: Dict[Any, Any] = {}  # function -> torch's handle


def before_steps(hook: StepHook) -> None:
    """Has torch call a function before each step of each optimizer, once however often asked."""
    if hook not in _installed:
        _installed[hook] = register_optimizer_step_pre_hook(hook)


def after_steps(hook: StepHook) -> None:
    """Has torch call a function after each step of each optimizer, once however often asked."""
    if hook not in _installed:
        _installed[hook] = register_optimizer_step_post_hook(hook)


def at_exit(function: Callable[[], None]) -> None:
    """Has Python call a function when the process ends, once however often asked."""
    if function not in _installed:
        _installed[function] = atexit.register(function)


def is_capturing() -> bool:
    """Returns whether this thread's stream captures a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def defer(work: Callable[[], None]) -> None:
    """Keeps work for the next :func:`run_deferred` without a capture."""
    deferred.append(work)


def run_deferred() -> None:
    """Does the work that waited for the end of a capture."""
    while deferred and not is_capturing():
        with contextlib.suppress(Exception):  # of a table that has moved elsewhere
            deferred.pop()()
