"""Class tables that lie in a file, for those that memory does not hold: only rows that are touched are read.

    weight = xs.tables.mapped("classes.safetensors", 120_000_000, 64)            # made, or opened where it is there
    loss = xs.SampledSoftmaxLoss.from_linear(xs.tables.linear(weight), sampler=..., num_samples=512)
    optimizer = xs.optim.RowAdagrad([weight], lr=0.1)                            # its state is mapped beside: classes.safetensors.row_adagrad
    ...
    xs.tables.flush(weight)                                                      # table and state are on the disk, and say that they are whole

The file is one of the safetensors format with one tensor, ``weight``, which begins at byte 4,096: ``safetensors.torch.load_file(path)`` reads it, and so does
``numpy.memmap(path, numpy.float32, "r", 4096, (N, D))``. Its metadata say under ``state`` whether it is ``whole``, ``dirty`` (written to, or left by a process
that died) or ``begun`` (its creation was not finished).
"""

import contextlib
import os
import warnings
from typing import Any, Callable, Optional, Union

import torch
from torch import Tensor, nn

from . import _hooks
from ._checks import check_bool, check_count
from ._public import public_names
from .optim.settle import settle

__all__ = ["flush", "linear", "mapped", "open", "prefetch"]
__dir__ = public_names(__all__)

_BLOCK = 64 << 20  # bytes of rows that are made at a time


def as_linear(rows: Tensor) -> None:
    """Fills rows in place as ``nn.Linear.reset_parameters`` does: uniform in ``1 / sqrt(D)``; a bias is that of D = 1."""
    bound = 1 / max(1, rows.shape[-1] if rows.dim() > 1 else 1) ** 0.5
    nn.init.uniform_(rows, -bound, bound)


def mapped(path: Union[str, "os.PathLike[str]"], num_rows: int, width: Optional[int] = None, dtype: torch.dtype = torch.float32, *,
           init: Optional[Callable[[Tensor], object]] = as_linear, progress: bool = True) -> nn.Parameter:
    """A parameter ``[num_rows, width]``, or ``[num_rows]`` without a width, whose memory is a file.

    Where the file is not there it is made: its space is reserved, rows are filled by blocks of 64 MB, and it is flushed. Where it is there it is opened, as
    by :func:`open`, and must be of this shape and dtype. An error while it is made, or an interrupt, takes the file away. A file that a killed process left
    half made is made anew.

    What row optimizers (:mod:`xsoftmax.optim`) keep for the rows is mapped beside it, in ``path + ".row_adagrad"`` and the like, made at the first step: all
    of their state, counters included. An optimizer of the same kind goes on where the file is, in a later process too; delete the file to begin anew.

    It is an ordinary parameter. Copies (``deepcopy``, ``.to(dtype)``, ``clone()``) are in memory, as those of any tensor; ``torch.save`` and ``state_dict()``
    hold all of it; ``load_state_dict`` writes to the file; ``resize_classes`` is refused. One process can write to a file at a time: the one that opened
    it, not one that it forks. Dense gradients (``sparse_grad=False``, the exact loss) keep their state in memory.

    Args:
        path: of the file, in a folder that exists.
        num_rows, width: N and D.
        dtype: float32, float64, bfloat16 or float16.
        init: fills a block [B, D] of zeros in place, as functions of ``torch.nn.init`` do; by default as nn.Linear. It is called for a block after the other,
            from the last to the first. Random numbers are those of torch's generator: a seed gives the same table. None: zeros, which cost no time.
        progress: a bar by tqdm, where it is installed.

    Raises:
        RuntimeError: what the system refuses (no such folder, no space, no permission), a file that is in use or not whole
        ValueError: a file of another kind, shape, dtype or length
    """
    name, path = "tables.mapped", os.fspath(path)
    sizes = [check_count(name, "num_rows", num_rows, 0)] + ([] if width is None else [check_count(name, "width", width, 0)])
    if init is not None and not callable(init):
        raise TypeError(f"{name}: expected init as a function of rows, or None, got {type(init).__name__}")
    check_bool(name, "progress", progress)
    if os.path.lexists(path) and not torch.ops.xsoftmax.mapped_table_remove_unfinished(path):
        weight = open(path)
        if list(weight.shape) != sizes or weight.dtype != dtype:
            raise ValueError(f"{name}: expected {path} as a table of shape {sizes} and dtype {dtype}, got shape {list(weight.shape)} and dtype {weight.dtype}")
        return weight
    table = torch.ops.xsoftmax.mapped_table_create(path, sizes, dtype)
    try:
        if init is not None:
            _fill(table, init, progress)
        torch.ops.xsoftmax.mapped_table_flush_(table)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return _parameter(table)


def _fill(table: Tensor, init: Callable[[Tensor], object], progress: bool) -> None:
    rows = len(table)
    block = max(1, _BLOCK // max(1, table.nbytes // max(1, rows)))
    # From the last to the first, as the frequent classes are the first ones as a rule: where a file system cannot write past memory, it keeps what came last.
    with torch.no_grad(), _bar(table.nbytes, progress) as bar:
        for begin in reversed(range(0, rows, block)):
            values = torch.zeros(min(block, rows - begin), *table.shape[1:], dtype=table.dtype)
            init(values)
            torch.ops.xsoftmax.mapped_table_fill_(table, begin, values)
            bar(values.nbytes)


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if not progress:
        yield lambda done: None
        return
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:  # None: quiet where it is no terminal
        yield bar.update


def open(path: Union[str, "os.PathLike[str]"], *, writable: bool = True, recover: bool = False) -> nn.Parameter:
    """The parameter of a file that :func:`mapped` made.

    Args:
        path: of the file.
        writable: from here on the file says that it is being written to, until it is flushed or closed: with the last of its tensors, or at the end of the
            process. False: a private copy is mapped, which several processes can do at a time; what is written to it stays in memory.
        recover: opens a file whose process died while it was written to as well. Each number is one that was written, but rows may be of different steps.
            The file says that it is not whole until a :func:`flush`: closing it is not enough.

    Raises:
        RuntimeError: a file that is missing, in use or not whole
        ValueError: a file of another kind, or of another length than it says
    """
    weight = torch.ops.xsoftmax.mapped_table_open(os.fspath(path), check_bool("tables.open", "writable", writable),
                                                  check_bool("tables.open", "recover", recover))
    return _parameter(weight)


def linear(weight: Tensor, bias: Optional[Tensor] = None) -> nn.Linear:
    """An nn.Linear of existing parameters ``[N, D]`` and ``[N]``, for ``from_linear`` of a loss."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = weight
    made.bias = bias  # type: ignore[assignment]
    return made


def flush(weight: Tensor) -> None:
    """Makes up what row optimizers owe the table, and waits until it and their state are on the disk: from then until the next step of an optimizer the files
    say that they are whole, and can be copied. A step of another thread that is not over leaves them as being written to. What writes to a table by other
    means (``weight.data.copy_(...)``) is not seen: flush after it."""
    with torch.no_grad():
        torch.ops.xsoftmax.mapped_table_flush_(weight)


def prefetch(weight: Tensor, rows: Tensor) -> None:
    """Starts to read rows, and what row optimizers keep for them, without waiting: the targets of the next step, while this one computes. For a table in
    memory it does nothing. ``rows``: int64, of any shape, in [0, N)."""
    torch.ops.xsoftmax.mapped_table_prefetch(weight, rows)


def _parameter(table: Tensor) -> nn.Parameter:
    weight = nn.Parameter(table)
    _hooks.mapped_tables[weight] = os.getpid()
    _hooks.before_steps(_before_step)
    _hooks.at_exit(_before_exit)
    return weight


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Optimizers of torch.optim do not say what they write to."""
    tables = list(_hooks.mapped_tables.keys())
    if tables:
        params = {param for group in optimizer.param_groups for param in group["params"]}
        for table in tables:
            if table not in params:
                continue
            if not torch.ops.xsoftmax.mapped_table_path(table):
                del _hooks.mapped_tables[table]
                warnings.warn("tables: a table that lay in a file has been moved to other memory (share_memory_, torch.multiprocessing, .to()): what is "
                              "trained from here on does not reach the file", stacklevel=2)
                continue
            torch.ops.xsoftmax.mapped_table_changes(table)


def _before_exit() -> None:
    """Files are marked as whole when the process ends: nothing may be owed then, since the next process does not know of it before its first step."""
    process = os.getpid()
    for table in list(_hooks.mapped_tables.keys()):
        if _hooks.mapped_tables[table] == process:
            settle(table)
