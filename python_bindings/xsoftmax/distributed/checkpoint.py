"""Checkpoints in a folder, written with torch.distributed.checkpoint. A checkpoint appears
atomically: completely or not at all."""

import contextlib
import os
import re
import shutil
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from .._core.checks import check_count
from .._core.files import is_locked, is_named
from .._core.placement import state_of_rank, table_of, whole_state
from ..optim.row_optimizer import RowOptimizer
from .state import ShardedTable, rows_of_all

_GENERATORS_NAME = "random"  # the name of the generator states, which each rank saves
_HIDDEN_PREFIX = ".step-"  # prefix of folders that are being written or removed


def save_checkpoint(folder: str, state: Dict[str, Any], step: int, *, keep: int = 2) -> str:
    """Saves a checkpoint to ``folder/step-<step>``.

    All ranks call it together; a single process can call it without torch.distributed. The folder
    appears under this name only when everything is on disk, so a rank can be killed at any time
    without harm to existing checkpoints.

    In addition to `state`, the checkpoint holds torch's default generators of each rank. Rows of
    sharded tables and of their optimizers' state are written by the ranks that hold them,
    everything else by the first rank.

    Args:
        folder: a folder on a file system that all ranks share; created if missing. Only one job at
            a time may write there. Remains of a killed job are removed; files that another job is
            writing are kept if the file system supports locks (flock).
        state: a dict of names and objects: objects with a `state_dict()` (a model, which may be
            wrapped in DistributedDataParallel, whose prefix is dropped; any optimizer; a
            scheduler), a torch.Generator (saved per rank), a tensor, a number, or a dict of those.
            Everything except sharded tables and generators must be the same on all ranks.
        step: the training step, at least 0. Must not be saved yet.
        keep: the number of checkpoints to keep, this one and earlier ones. Checkpoints of later
            steps are kept too.

    Returns:
        The path of the checkpoint.

    Raises:
        FileExistsError: a checkpoint of this step exists.
        TypeError: `state` is not a dict with string keys, or an optimizer of a sharded table has
            state that is neither one row per class nor a number.
        OSError, RuntimeError: (on all ranks) writing failed, or another job is writing this step.
            Existing checkpoints are kept.
    """
    owner = "save_checkpoint"
    step, keep = check_count(owner, "step", step, 0), check_count(owner, "keep", keep, 1)
    _check_names(owner, state)
    path, hidden = _path(folder, step), os.path.join(folder, f"{_HIDDEN_PREFIX}{step:010d}")
    lock: List[int] = []  # locks the folder that this save writes, while the first rank is alive

    def begin() -> Any:
        os.makedirs(folder, exist_ok=True)
        if os.path.exists(path):
            raise FileExistsError(f"{owner}: expected a step that is not saved yet, got {step}, "
                                  f"which is in {path}")
        for name in os.listdir(folder):
            if name.startswith(_HIDDEN_PREFIX):
                _remove_abandoned_draft(owner, os.path.join(folder, name), hidden)
        os.mkdir(hidden)
        lock.append(os.open(hidden, os.O_RDONLY))
        if is_locked(lock[0]) or not is_named(hidden, lock[0]):
            raise RuntimeError(f"{owner}: another process is writing to {folder}")

    def end() -> Any:
        _sync(hidden)
        os.rename(hidden, path)
        _sync(folder)
        for old_step in [old_step for old_step in _steps(folder) if old_step <= step][:-keep]:
            # Rename first, because a partly removed folder is not a checkpoint.
            os.rename(_path(folder, old_step), f"{hidden}-{old_step}")
            shutil.rmtree(f"{hidden}-{old_step}")
        return path

    try:
        _call_on_first_rank(begin)
        state_dicts = {
            name: _collect_state(value)
            for name, value in _add_generators(state).items()
        }
        # values that are the same on all ranks are written by only one of them
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        with _simplify_errors(owner, hidden):
            dcp.save(state_dicts, storage_writer=dcp.FileSystemWriter(hidden), planner=planner)
        return _call_on_first_rank(end)
    finally:
        for descriptor in lock:
            os.close(descriptor)


def load_checkpoint(folder: str, state: Dict[str, Any],
                    step: Optional[int] = None) -> Optional[int]:
    """Loads a checkpoint saved by :func:`save_checkpoint` into `state`.

    All ranks call it together, and their number may differ from that of the saving job; a single
    process can call it without torch.distributed.

    Optimizers need not have any state yet; they receive the saved state. The generators of a rank
    are set to those saved by the rank of the same number, and are not changed if there was none.

    Args:
        folder: the folder of the checkpoints.
        state: names and objects as for :func:`save_checkpoint`; all that was saved or a part of it.
            Models, optimizers, generators and tensors are changed in place; numbers are stored in
            the dict.
        step: the step of the checkpoint. None: the latest one.

    Returns:
        The step that was loaded; or None if there is no checkpoint and `step` is None.

    Raises:
        FileNotFoundError: there is no checkpoint of `step`.
        KeyError: a name was not saved.
        RuntimeError: a tensor is missing or has another shape, in which case nothing is changed; or
            a file cannot be read.
        ValueError, TypeError: (on all ranks) an optimizer does not match its saved state, for
            example because its parameters differ. Nothing is changed.
    """
    owner = "load_checkpoint"
    _check_names(owner, state)

    def find() -> Any:
        steps = _steps(folder)
        if step is not None and step not in steps:
            raise FileNotFoundError(f"{owner}: expected one of the steps {steps} in {folder}, got "
                                    f"{step}")
        return step if step is not None or not steps else steps[-1]

    chosen_step = _call_on_first_rank(find)
    if chosen_step is None:
        return None
    reader = dcp.FileSystemReader(_path(folder, chosen_step))
    metadata = reader.read_metadata()
    saved_names = {path[0] for path in metadata.planner_data.values()}
    for name in state:
        if name not in saved_names:
            raise KeyError(
                f"{owner}: expected names out of {sorted(saved_names - {_GENERATORS_NAME})} of "
                f"{_path(folder, chosen_step)}, got {name!r}")
    objects = _add_generators(state)
    target = {name: _target(owner, name, value, metadata) for name, value in objects.items()}
    # Load optimizer state first, into separate memory: if an optimizer refuses it, the rest, which
    # is loaded directly into the models, has not been read yet.
    optimizers = {
        name: value
        for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)
    }
    optimizer_targets, other_targets = ({
        name: part
        for name, part in target.items() if (name in optimizers) == is_optimizer
    } for is_optimizer in (True, False))

    def check_optimizers() -> None:
        for name, optimizer in optimizers.items():
            _check_optimizer(owner, name, optimizer, optimizer_targets[name])

    with _simplify_errors(owner, _path(folder, chosen_step)):
        if optimizers:
            dcp.load(optimizer_targets, storage_reader=reader)
            _check_on_all_ranks(check_optimizers)
        for tensor in tree_leaves(other_targets):
            if isinstance(tensor, Tensor):
                torch.ops.xsoftmax.mapped_table_changes(
                    tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        dcp.load(other_targets, storage_reader=reader)
    for name, value in objects.items():
        if name in optimizers:
            value.load_state_dict(state_of_rank(value, optimizer_targets[name]))
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(other_targets[name])
        elif not isinstance(value, Tensor):
            state[name] = other_targets[name]
    return chosen_step


def latest_checkpoint(folder: str) -> Optional[str]:
    """Returns the path of the latest checkpoint in a folder written by :func:`save_checkpoint`, as
    a directory of torch.distributed.checkpoint; None if there is none."""
    steps = _steps(folder)
    return _path(folder, steps[-1]) if steps else None


def _path(folder: str, step: int) -> str:
    return os.path.join(folder, f"step-{step:010d}")


def _steps(folder: str) -> List[int]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{10,}", name))


@contextlib.contextmanager
def _simplify_errors(owner: str, path: str) -> Iterator[None]:
    """Suppresses the warning about a single process, and turns a failure on any rank into a
    RuntimeError on all ranks, because CheckpointException is not an Exception."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        reasons = "; ".join(f"{reason} (rank {rank})"
                            for rank, (reason, _) in error.failures.items())
        raise RuntimeError(f"{owner}: {path}: {reasons}") from error


def _remove_abandoned_draft(owner: str, draft: str, hidden: str) -> None:
    """Removes the remains of a killed job, unless another job holds the lock."""
    descriptor = os.open(draft, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not is_locked(descriptor):
            shutil.rmtree(draft)
        elif draft == hidden:
            raise RuntimeError(f"{owner}: another process is writing {draft}")
    finally:
        os.close(descriptor)


def _sync(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _call_on_first_rank(function: Callable[[], Any]) -> Any:
    """Calls the function on the first rank, and returns its result or raises its error on all."""
    answer = [None, None]
    if _rank() == 0:
        try:
            answer[0] = function()
        except Exception as error:
            answer[1] = error  # type: ignore[call-overload]
    if dist.is_initialized():
        dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def _check_on_all_ranks(check: Callable[[], None]) -> None:
    """Runs a check on all ranks, and raises an error of any rank on all of them."""
    reason: Optional[Exception] = None
    try:
        check()
    except Exception as error:
        reason = error
    reasons = [reason]
    if dist.is_initialized():
        reasons = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
    for error_of_rank in reasons:
        if error_of_rank is not None:
            raise error_of_rank


def _check_optimizer(owner: str, name: str, optimizer: torch.optim.Optimizer,
                     state_dict: Dict[str, Any]) -> None:
    """Raises an error if the optimizer does not match the state that was read."""
    expected, got = ([len(group["params"]) for group in groups]
                     for groups in (optimizer.param_groups, state_dict["param_groups"]))
    if expected != got:
        raise ValueError(f"{owner}: expected {name!r} with groups of {expected} parameters, got "
                         f"one that was saved with groups of {got}")
    state_dict = state_of_rank(optimizer, state_dict)
    if isinstance(optimizer, RowOptimizer):
        optimizer._check_state(state_dict)


class _Generators:
    """Generators of this rank, whose states are saved under the number of the rank."""
    def __init__(self, generators: Dict[str, torch.Generator]) -> None:
        self.generators = {
            f"{name} of rank {_rank()}": generator
            for name, generator in generators.items()
        }

    def state_dict(self) -> Dict[str, Tensor]:
        return {name: generator.get_state() for name, generator in self.generators.items()}

    def load_state_dict(self, states: Dict[str, Tensor]) -> None:
        for name, state in states.items():
            self.generators[name].set_state(state)


def _check_names(owner: str, state: Dict[str, Any]) -> None:
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise TypeError(f"{owner}: expected state as a dict of texts and what has a state_dict(), "
                        f"got {type(state).__name__}")
    if _GENERATORS_NAME in state:
        raise ValueError(
            f"{owner}: expected other names than {_GENERATORS_NAME!r}, that of torch's "
            "generators, which are saved without being named")


def _add_generators(state: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the objects to save or load under each name: with models unwrapped from
    DistributedDataParallel, and with the generators of this rank."""
    generators = {"cpu": torch.default_generator}
    if torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    objects = {_GENERATORS_NAME: _Generators(generators)}
    for name, value in state.items():
        if isinstance(value, nn.parallel.DistributedDataParallel):
            value = value.module
        objects[name] = _Generators({"generator": value}) if isinstance(value,
                                                                        torch.Generator) else value
    return objects


def _collect_state(value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        return whole_state(value, value.state_dict())
    return value.state_dict() if hasattr(value, "state_dict") else value


def _target(owner: str, name: str, value: Any, metadata: Metadata) -> Any:
    """Returns the objects into which a checkpoint is read."""
    paths = {
        path: metadata.state_dict_metadata[key]
        for key, path in metadata.planner_data.items() if path[0] == name
    }
    if isinstance(value, _Generators):
        return {text: state for text, state in value.state_dict().items() if (name, text) in paths}
    if not isinstance(value, torch.optim.Optimizer):
        return _collect_state(value)
    # An optimizer creates its state in its first step, so take the layout from the checkpoint.
    params = [param for group in value.param_groups for param in group["params"]]
    state: Dict[int, Dict[str, Any]] = {}
    for path, entry in paths.items():
        if path[1] == "state":
            number = int(path[2])
            if number >= len(params):
                raise ValueError(f"{owner}: expected an optimizer with the parameters of the "
                                 f"checkpoint, got one of {len(params)} for state of "
                                 f"parameter {number} of {name!r}")
            state.setdefault(number, {})[path[3]] = _empty_state(params[number], path[3], entry)
    return {"state": state, "param_groups": value.state_dict()["param_groups"]}


def _empty_state(param: Tensor, name: str, entry: Any) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    size, dtype = list(entry.size), entry.properties.dtype
    if isinstance(param, DTensor) and entry.size == param.shape:  # a parameter of fully_shard
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    table = table_of(param)
    if isinstance(table, ShardedTable) and size[:1] == [table.shards.num_classes
                                                        ] and name != "pending":
        rows = torch.empty([len(param), *size[1:]], dtype=dtype, device=param.device)
        return rows_of_all(rows, table.shards)
    return torch.empty(size, dtype=dtype, device=param.device)
