"""Process-wide hooks and registries: everything that the library has torch or Python call back, and
everything that it remembers about other objects. They are kept here in one place; the callbacks
themselves are defined in the modules that need them.

``import xsoftmax`` installs no hook. Each is installed once, on first use of the feature that needs
it, and stays installed. Registries hold weak references, so an entry disappears with its object.

Hooks on the step of every optimizer of the process, including those of torch.optim:

- ``first_step``, before a step. Installed with the first table (a loss, a matcher) or row
  optimizer. Raises for row-sparse gradients that an optimizer cannot take, before anything changes.
  Warns of gradients that are dense without need, and of tables that belong to no optimizer. The
  first step of an optimizer costs a pass over its parameters; later steps cost a dictionary
  look-up.
- ``resize``, before a step. Installed by the first ``resize_classes``. Raises for an optimizer that
  was not resized together with its table, since it would write to memory of another size. A step
  costs a look-up for each resized table.
- ``mapped_tables``, before a step. Installed with the first table in a file, together with a
  function at exit. Marks the file as dirty, because optimizers of torch.optim do not report what
  they write to. While such a table lives, a step costs building a set of the optimizer's
  parameters. At exit pending updates are flushed, because the next process does not know of them.
- ``retrieval``, after a step. Installed with the first search index. Increments the version
  counters of parameters written by fused optimizers of torch, which do not do so themselves; the
  counters tell whether an index is stale. A step costs a look at the option ``fused`` of each
  group.

A program that imports the library and uses none of these has no hook and pays nothing. Hooks on
single objects (``state_dict`` and similar on a loss and its ``nn.Linear``, a gradient of a
replicated parameter) are registered where the object is created and live as long as it does. During
``load_state_dict`` of a row optimizer, two temporary hooks protect tensors from a cast.

Deferred work: a row optimizer flushes its pending updates when it is garbage-collected. That may
happen while a CUDA graph is being captured, and the flush would become part of the graph. The flush
is then stored here, with the state it needs, until the next ``run_deferred``: a step or a flush of
a row optimizer, or a read of a whole table. Without deferred work this costs a look at an empty
list.
"""

import atexit
import contextlib
import threading
import weakref
from typing import Any, Callable, Dict, List, MutableMapping, Tuple

import torch
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)
from torch.utils.weak import WeakTensorKeyDictionary

Optimizer = torch.optim.Optimizer
StepHook = Callable[[Optimizer, Any, Any], Any]

# Used by `first_step`, which holds the lock while it adds to registries or goes through them:
# threads may make and train models side by side. The lock can be taken again, since a row optimizer
# that is garbage-collected meanwhile looks at them too.
lock = threading.RLock()
table_modules: "weakref.WeakSet[Any]" = weakref.WeakSet()
# Row optimizers, and other optimizers found by a search.
row_optimizers: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
Groups = MutableMapping[Optimizer, Tuple[List[Any], int]]  # param_groups and its length
# Groups of optimizers that are past their first step; a step costs a look-up here. Loading state
# creates new groups, so the step after it counts as a first one.
seen_groups: Groups = weakref.WeakKeyDictionary()
# Groups of optimizers whose gradients have been checked: those above, and optimizers that step
# while a table that belongs to no optimizer has a gradient.
watched_groups: Groups = weakref.WeakKeyDictionary()
# module -> the value of sparse_grad that an optimizer has set
fixed_forms: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()
warned_modules: "weakref.WeakSet[Any]" = weakref.WeakSet()
unowned_tables = WeakTensorKeyDictionary()  # table -> number of steps that left it out

resized_tables = WeakTensorKeyDictionary()  # used by `resize`
mapped_tables = WeakTensorKeyDictionary()  # table -> id of the process that opened it
search_indices: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()  # loss -> index

deferred_work: List[Callable[[], None]] = []

_handles: Dict[Any, Any] = {}  # function -> torch's handle


def before_steps(hook: StepHook) -> None:
    """Registers a function that torch calls before each step of every optimizer. Repeated calls
    register it once."""
    if hook not in _handles:
        _handles[hook] = register_optimizer_step_pre_hook(hook)


def after_steps(hook: StepHook) -> None:
    """Registers a function that torch calls after each step of every optimizer. Repeated calls
    register it once."""
    if hook not in _handles:
        _handles[hook] = register_optimizer_step_post_hook(hook)


def at_exit(function: Callable[[], None]) -> None:
    """Registers a function that Python calls when the process ends. Repeated calls register it
    once."""
    if function not in _handles:
        _handles[function] = atexit.register(function)


def is_capturing() -> bool:
    """Returns whether the current stream of this thread is capturing a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def defer(work: Callable[[], None]) -> None:
    """Stores work for the next :func:`run_deferred` outside of a capture."""
    deferred_work.append(work)


def run_deferred() -> None:
    """Runs the work that was deferred during a capture."""
    while deferred_work and not is_capturing():
        with contextlib.suppress(Exception):  # a table may have moved since
            deferred_work.pop()()
