"""Processes of a gloo group on this machine that run functions of tests."""

import atexit
import datetime
import os
import tempfile
import traceback

import pytest
import torch
import torch.multiprocessing as mp

needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this build of torch has no gloo")
_ranks = {}


def ranks(size):
    """Returns `size` processes, kept for all tests because starting one takes seconds."""
    if size not in _ranks:
        _ranks[size] = Ranks(size)
    return _ranks[size]


class Ranks:
    def __init__(self, size):
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, size, os.path.join(self.folder.name, "group"), theirs),
                daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        atexit.register(self.end)

    def run(self, function, *args):
        """Returns [function(rank, *args)] of all ranks, or raises the first error of a rank.

        `function` must be importable: a top-level function of a module.
        """
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = [pipe.recv() for pipe in self.pipes]
        failed = [(rank, error) for rank, (error, _) in enumerate(answers) if error is not None]
        assert not failed, f"rank {failed[0][0]}:\n{failed[0][1]}"
        return [result for _, result in answers]

    def end(self):
        for pipe, process in zip(self.pipes, self.processes):
            pipe.close()
            process.join(2)
            process.kill()
        self.folder.cleanup()


def _work(rank, size, file, pipe):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank,
                                         world_size=size, timeout=datetime.timedelta(seconds=60))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            torch.distributed.destroy_process_group()
            return
        try:
            pipe.send((None, function(rank, *args)))
        except BaseException:  # noqa: B036 (also pytest's own exceptions: they belong to the test)
            pipe.send((traceback.format_exc(), None))
