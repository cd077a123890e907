"""Checkpoint folders: the steps they keep, and failed saves, refused loads and killed ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import xsoftmax as xs
from checkpoint_checks import D, N, OPTIMIZERS, Model, Run, run_of, same
from ranks import Ranks, needs_gloo, ranks

pytestmark = needs_gloo


def folder_of_checkpoints(rank, size, folder):
    save, load = xs.distributed.save_checkpoint, xs.distributed.load_checkpoint
    latest = xs.distributed.latest_checkpoint
    run = Run(size)
    assert load(folder, run.state) is None and latest(folder) is None
    for step in (1, 2, 10):
        run.train(rank, step, step + 1)
        assert save(folder, run.state, step) == latest(folder) == os.path.join(
            folder, f"step-{step:010d}")
    assert sorted(os.listdir(folder)) == ["step-0000000002", "step-0000000010"]
    before = run.whole()
    barrier(size)
    # the remains of a job that was killed in a save and while removing an old checkpoint
    if rank == 0:
        os.rename(os.path.join(folder, "step-0000000002"),
                  os.path.join(folder, ".step-0000000010-2"))
        os.mkdir(os.path.join(folder, ".step-0000000011"))
        open(os.path.join(folder, ".step-0000000011", "__0_0.distcp"), "w").close()
    barrier(size)
    assert latest(folder).endswith("step-0000000010")
    with pytest.raises(FileExistsError, match="save_checkpoint: expected a step that is not saved "
                       "yet, got 10"):
        save(folder, run.state, 10)
    with pytest.raises(FileNotFoundError, match=r"load_checkpoint: expected one of the steps "
                       r"\[10\] in .*, got 2"):
        load(folder, run.state, step=2)
    with pytest.raises(
            KeyError, match=r"load_checkpoint: expected names out of \['model', "
            r"'optimizer'\] .* got 'scheduler'"):
        load(folder, {**run.state, "scheduler": {}})
    with pytest.raises(TypeError, match="save_checkpoint: expected state as a dict of texts .* got "
                       "Module"):
        save(folder, torch.nn.Module(), 12)
    with pytest.raises(ValueError, match="save_checkpoint: expected other names than 'random'"):
        save(folder, {"random": 1}, 12)
    with pytest.raises(ValueError, match="save_checkpoint: expected keep of at least 1, got 0"):
        save(folder, run.state, 12, keep=0)
    with pytest.raises(
            RuntimeError, match=r"load_checkpoint: .*step-0000000010: Size mismatch "
            r".*\[23.* and current: .*\[24.* \(rank 0\)"):
        load(folder, {"model": other_classes(size)})
    assert same(run.whole(), before)
    run.train(rank, 11, 12)
    save(folder, run.state, 11, keep=1)
    assert os.listdir(folder) == ["step-0000000011"]
    assert load(folder, run.state, step=11) == 11
    save(folder, run.state, 5, keep=1)
    assert sorted(os.listdir(folder)) == ["step-0000000005", "step-0000000011"]


def other_classes(size):
    model = Model()
    model.loss = xs.SampledSoftmaxLoss(D, N + 1, sampler="log_uniform", num_samples=7, bias=True)
    return xs.distributed.shard_classes(model) if size > 1 else model


def barrier(size):
    if size > 1:
        torch.distributed.barrier()


@pytest.mark.parametrize("size", [1, 2])
def test_a_folder_keeps_complete_checkpoints_and_refuses_wrong_calls(size, tmp_path):
    run_of(size, folder_of_checkpoints, str(tmp_path / "new" / "folder"))


def refused_optimizers(rank, size, folder):
    """Loads state that an optimizer refuses; the model must not change."""
    run = Run(size)
    run.train(rank, 0, 1)
    xs.distributed.save_checkpoint(folder, run.state, 1)
    run.train(rank, 1, 2)
    before = run.whole()
    params = list(run.model.parameters())
    for others, message in (([*params, torch.nn.Parameter(torch.zeros(2))], r"'optimizer' with "
                             r"groups of \[5\] "
                             r"parameters, got one "
                             r"that .* groups of "
                             r"\[4\]"), (params[::-1], "RowAdam: expected exp_avg of")):
        with pytest.raises(ValueError, match=message):
            xs.distributed.load_checkpoint(
                folder, {"model": run.called, "optimizer": OPTIMIZERS["RowAdam"](others)})
    assert same(run.whole(), before)


@pytest.mark.parametrize("size", [1, 2])
def test_a_load_that_an_optimizer_refuses_changes_nothing(size, tmp_path):
    run_of(size, refused_optimizers, str(tmp_path))


def test_a_load_into_a_mapped_file_marks_it_dirty_first(tmp_path, monkeypatch):
    weight = xs.tables.mapped(tmp_path / "table", N, D, progress=False)
    loss = xs.SampledSoftmaxLoss.from_linear(xs.tables.linear(weight), sampler="log_uniform",
                                             num_samples=7)
    folder, marks = str(tmp_path / "checkpoints"), []
    xs.distributed.save_checkpoint(folder, {"loss": loss}, 1)
    xs.tables.flush(weight)
    read = dcp.FileSystemReader.read_data

    def reads(self, *args):
        with open(tmp_path / "table", "rb") as file:
            marks.append(b'"dirty"' in file.read(4096))
        return read(self, *args)

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", reads)
    xs.distributed.load_checkpoint(folder, {"loss": loss})
    assert marks == [True]


def fails_to_write(rank, folder):
    """Rank 1 fails in the middle of a save: both ranks raise an error and the last checkpoint is
    the one before."""
    run = Run(2)
    xs.distributed.save_checkpoint(folder, run.state, 1)
    run.train(rank, 0, 1)
    write = dcp.FileSystemWriter.write_data
    if rank == 1:

        def refused(self, plan, planner):
            raise OSError("no space left")

        dcp.FileSystemWriter.write_data = refused
    try:
        with pytest.raises(RuntimeError, match=r"save_checkpoint: .*: no space left \(rank 1\)$"):
            xs.distributed.save_checkpoint(folder, run.state, 2)
    finally:
        dcp.FileSystemWriter.write_data = write
    assert xs.distributed.latest_checkpoint(folder).endswith("step-0000000001")
    xs.distributed.save_checkpoint(folder, run.state, 2)
    assert xs.distributed.load_checkpoint(folder, run.state) == 2


def test_a_failed_save_keeps_the_last_checkpoint(tmp_path):
    ranks(2).run(fails_to_write, str(tmp_path))


def die(rank, where):
    """Kills rank 1 in a step; returns how long rank 0 waits for the error, and whether its table is
    unchanged."""
    run = Run(2)
    run.train(rank, 0, 2)
    before = {name: value.clone() for name, value in run.model.named_parameters()}
    if rank == 1:

        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "forward":
            run.model.body.register_forward_hook(kill)
        else:
            run.model.body.weight.register_hook(kill)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="gloo|peer|Connection"):
        run.train(rank, 2, 3)
    return time.monotonic() - begin, all(
        torch.equal(value, before[name]) for name, value in run.model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_killed_rank_raises_an_error_on_the_others(where):
    job = Ranks(2)  # a job of its own, since rank 1 dies
    for pipe in job.pipes:
        pipe.send((die, (where,)))
    error, answer = job.pipes[0].recv()
    job.end()
    assert error is None, error
    seconds, unchanged = answer
    assert seconds < 30 and unchanged


@pytest.mark.slow
def test_killed_and_restarted_ranks_train_as_if_uninterrupted():
    """Runs benchmarks/kill_ranks.py with one kill of each kind."""
    program = Path(__file__).parents[3] / "benchmarks" / "kill_ranks.py"
    result = subprocess.run([sys.executable, program, "--kills", "1", "--classes", "500", "--json"],
                            capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["kills within a step"] == report["kills within a save"] == 1
    assert report["starts"] == 3 + report["kills between"]
    assert report["losses equal"] and report["state equal"]
