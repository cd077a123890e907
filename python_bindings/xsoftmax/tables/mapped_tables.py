"""Implementation of :mod:`xsoftmax.tables`."""

import contextlib
import os
import warnings
from typing import Any, Callable, List, Optional, Union

import torch
from torch import Tensor, nn

from .._core import hooks
from .._core.checks import check_bool, check_count, check_tensor
from .._core.memory import table_empty
from ..optim.catch_up import catch_up

_BLOCK = 64 << 20  # bytes of rows initialised at a time


def as_linear(rows: Tensor) -> None:
    """Fills rows in place like ``nn.Linear.reset_parameters``: uniform in ``1 / sqrt(D)``; a bias
    counts as D = 1."""
    bound = 1 / max(1, rows.shape[-1] if rows.dim() > 1 else 1)**0.5
    nn.init.uniform_(rows, -bound, bound)


def _table_sizes(owner: str, num_rows: int, width: Optional[int], init: Any) -> List[int]:
    """Returns the shape of a table, after checks of its arguments."""
    sizes = [check_count(owner, "num_rows", num_rows, 0)]
    if width is not None:
        sizes.append(check_count(owner, "width", width, 0))
    if init is not None and not callable(init):
        raise TypeError(f"{owner}: expected init as a function of rows, or None, got "
                        f"{type(init).__name__}")
    return sizes


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _check_dtype(owner: str, dtype: Any) -> None:
    if dtype not in _DTYPES:
        raise TypeError(f"{owner}: expected dtype as float32, float64, bfloat16 or float16, got "
                        f"{dtype}")


def _initialised(table: Tensor, init: Optional[Callable[[Tensor], object]]) -> nn.Parameter:
    """Returns a parameter of a table, filled by `init` unless that is None."""
    if init is not None:
        with torch.no_grad():
            init(table)
    return nn.Parameter(table)


def in_memory(num_rows: int, width: Optional[int] = None, dtype: torch.dtype = torch.float32, *,
              init: Optional[Callable[[Tensor], object]] = as_linear) -> nn.Parameter:
    """Returns a parameter ``[num_rows, width]``, or ``[num_rows]`` without a width, in huge pages
    of the CPU's memory, where they are supported: they make access to rows of a table of gigabytes
    faster. For an embedding::

        table = xs.tables.in_memory(100_000_000, 64, torch.bfloat16)
        embedding = nn.Embedding(*table.shape, sparse=True, _weight=table)
        optimizer = xs.optim.RowAdagrad([embedding.weight], lr=0.01, row_wise=True)

    ``embedding.weight`` is another parameter in the same memory, and the one that has a gradient.
    The losses of this package allocate their tables in this way.

    Args:
        num_rows, width: N and D.
        dtype: float32, float64, bfloat16 or float16.
        init: fills the table in place, like functions of ``torch.nn.init``; by default like
            nn.Linear. None: zeros.
    """
    name = "tables.in_memory"
    sizes = _table_sizes(name, num_rows, width, init)
    _check_dtype(name, dtype)
    table = table_empty(*sizes, dtype=dtype, device="cpu")
    return _initialised(table, torch.zero_ if init is None else init)


def pinned(num_rows: int, width: Optional[int] = None, dtype: torch.dtype = torch.float32,
           device: Union[str, torch.device] = "cuda", *,
           init: Optional[Callable[[Tensor], object]] = as_linear) -> nn.Parameter:
    """Returns a CUDA parameter ``[num_rows, width]``, or ``[num_rows]`` without a width, whose
    memory is page-locked memory of the host: a table larger than the GPU's memory. Kernels address
    it directly, so losses, layers and optimizers take it like any CUDA parameter, and a step moves
    only its rows over the bus::

        table = xs.tables.pinned(100_000_000, 64, torch.bfloat16)
        embedding = nn.Embedding(*table.shape, sparse=True, _weight=table)
        optimizer = xs.optim.RowAdagrad([embedding.weight], lr=0.01, row_wise=True)

    The update runs on the GPU too. The state of row optimizers is in the GPU's memory: with
    ``RowAdagrad(row_wise=True)`` 4 bytes per row. Copies (``deepcopy``, ``.to(dtype)``,
    ``clone()``) are in the GPU's memory, like those of any CUDA tensor; ``.cpu()`` copies.
    Operations on all rows, dense gradients among them, are as slow as the bus. Other processes
    cannot map it (``torch.multiprocessing``).

    Args:
        num_rows, width: N and D.
        dtype: float32, float64, bfloat16 or float16.
        device: the GPU that computes with the table.
        init: fills the table in place, on the GPU, like functions of ``torch.nn.init``; by default
            like nn.Linear. None: zeros.

    Raises:
        RuntimeError: there is no GPU, this build has no kernels for it, or the host cannot lock so
            much memory.
        ValueError: the device is not a GPU.
    """
    name = "tables.pinned"
    sizes = _table_sizes(name, num_rows, width, init)
    _check_dtype(name, dtype)
    if torch.device(device).type != "cuda":
        raise ValueError(f"{name}: expected device as a CUDA device, got {device}; in_memory "
                         "allocates tables of the CPU")
    if not torch.cuda.is_available():
        raise RuntimeError(f"{name}: expected a GPU, and torch finds none")
    like = torch.empty(0, dtype=dtype, device=device)
    return _initialised(torch.ops.xsoftmax.pinned_table(like, sizes), init)


def mapped(path: Union[str, "os.PathLike[str]"], num_rows: int, width: Optional[int] = None,
           dtype: torch.dtype = torch.float32, *, init: Optional[Callable[[Tensor],
                                                                          object]] = as_linear,
           progress: bool = True) -> nn.Parameter:
    """Returns a parameter ``[num_rows, width]``, or ``[num_rows]`` without a width, whose memory is
    a file.

    If the file does not exist, it is created: its space is reserved, rows are initialised in blocks
    of 64 MB, and it is flushed. If it exists, it is opened as by :func:`open`, and must have this
    shape and dtype. An error or an interrupt during creation removes the file. A file left
    unfinished by a killed process is created again.

    The state of row optimizers (:mod:`xsoftmax.optim`) for the rows is mapped too, to ``path +
    ".row_adagrad"`` and similar, created at the first step. It is complete, including counters, so
    an optimizer of the same kind continues from it, also in a later process. Delete the file to
    start afresh.

    The result is an ordinary parameter. Copies (``deepcopy``, ``.to(dtype)``, ``clone()``) are in
    memory, like those of any tensor. ``torch.save`` and ``state_dict()`` contain all of it, and
    ``load_state_dict`` writes to the file. ``resize_classes`` raises. Only one process can write to
    a file at a time: the one that opened it, but not its forks. Optimizer state of dense gradients
    (``sparse_grad=False``, the exact loss) is kept in memory.

    Args:
        path: of the file, in an existing folder.
        num_rows, width: N and D.
        dtype: float32, float64, bfloat16 or float16.
        init: fills a block [B, D] of zeros in place, like functions of ``torch.nn.init``; by
            default like nn.Linear. It is called for one block after another, from the last to the
            first. With torch's default generator, a seed determines the table. None: zeros, which
            take no time.
        progress: whether to show a tqdm bar, if tqdm is installed.

    Raises:
        RuntimeError: the system reports an error (no such folder, no space, no permission), or the
            file is in use or not whole.
        ValueError: the file has another format, shape, dtype or length.
    """
    name, path = "tables.mapped", os.fspath(path)
    sizes = _table_sizes(name, num_rows, width, init)
    check_bool(name, "progress", progress)
    if os.path.lexists(path) and not torch.ops.xsoftmax.mapped_table_remove_unfinished(path):
        weight = open(path)
        if list(weight.shape) != sizes or weight.dtype != dtype:
            raise ValueError(f"{name}: expected {path} as a table of shape {sizes} and dtype "
                             f"{dtype}, got shape {list(weight.shape)} and dtype {weight.dtype}")
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
    # From the last block to the first, because frequent classes usually come first, and the page
    # cache keeps what was written last.
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
    # disable=None: no bar unless the output is a terminal.
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        yield bar.update


def open(path: Union[str, "os.PathLike[str]"], *, writable: bool = True,
         recover: bool = False) -> nn.Parameter:
    """Returns the parameter of a file that :func:`mapped` created.

    Args:
        path: of the file.
        writable: True: the file is marked as dirty until it is flushed or closed, with the last of
            its tensors or at the end of the process. False: a private copy is mapped, which several
            processes can do at a time; what is written to it stays in memory.
        recover: also open a file whose process died while writing to it. Each value is one that was
            written, but rows may be of different steps. The file stays marked as dirty until a
            :func:`flush`; closing it is not enough.

    Raises:
        RuntimeError: the file is missing, in use or not whole.
        ValueError: the file has another format, or a length that differs from its header.
    """
    weight = torch.ops.xsoftmax.mapped_table_open(os.fspath(path),
                                                  check_bool("tables.open", "writable", writable),
                                                  check_bool("tables.open", "recover", recover))
    return _parameter(weight)


def linear(weight: Tensor, bias: Optional[Tensor] = None) -> nn.Linear:
    """Returns an nn.Linear of existing parameters ``[N, D]`` and ``[N]``, for ``from_linear`` of a
    loss."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = weight
    layer.bias = bias  # type: ignore[assignment]
    return layer


def flush(weight: Tensor) -> None:
    """Flushes pending updates of row optimizers, and waits until the table and their state are on
    the disk.

    Until the next optimizer step, the files are marked as whole and can be copied. If another
    thread is in the middle of a step, they stay marked as dirty. Writes by other means
    (``weight.data.copy_(...)``) are not noticed: flush after them.
    """
    with torch.no_grad():
        torch.ops.xsoftmax.mapped_table_flush_(weight)


def prefetch(weight: Tensor, rows: Tensor) -> None:
    """Starts to read rows, without waiting.

    Those of a table in a file are read from the disk, with their row optimizer state: for the
    targets of the next step, during the current one. Those of a contiguous table in memory are read
    into the processor's cache, the first 256 bytes of each, after which the processor goes on by
    itself: call it just before ``nn.Embedding`` looks up a batch that fits in the L2 cache, since
    the look-up waits for one row after another. The losses and row optimizers of this library do it
    themselves. On a GPU it does nothing.

    Args:
        weight: the table.
        rows: int64, any shape, in [0, N).

    Raises:
        TypeError: weight or rows is no tensor, or rows is not int64.
        IndexError: a row is out of range.
    """
    check_tensor("prefetch", "weight", weight)
    check_tensor("prefetch", "rows", rows)
    torch.ops.xsoftmax.mapped_table_prefetch(weight, rows)


def _parameter(table: Tensor) -> nn.Parameter:
    weight = nn.Parameter(table)
    hooks.mapped_tables[weight] = os.getpid()
    hooks.before_steps(_before_step)
    hooks.at_exit(_before_exit)
    return weight


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Marks files as dirty before a step, because optimizers of torch.optim do not report what they
    write to."""
    tables = list(hooks.mapped_tables.keys())
    if tables:
        params = {param for group in optimizer.param_groups for param in group["params"]}
        for table in tables:
            if table not in params:
                continue
            if not torch.ops.xsoftmax.mapped_table_path(table):
                del hooks.mapped_tables[table]
                warnings.warn(
                    "tables: a table that lay in a file has been moved to other memory "
                    "(share_memory_, torch.multiprocessing, .to()): what is "
                    "trained from here on does not reach the file", stacklevel=2)
                continue
            torch.ops.xsoftmax.mapped_table_changes(table)


def _before_exit() -> None:
    """Flushes pending updates before exit, when files are marked as whole: the next process does
    not know of them before its first step."""
    process = os.getpid()
    for table in list(hooks.mapped_tables.keys()):
        if hooks.mapped_tables[table] == process:
            catch_up(table)
