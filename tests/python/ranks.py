"""Processes of a gloo group on this machine, which do what tests ask of them."""

import atexit
import datetime
import os
import tempfile
import traceback

import torch
import torch.multiprocessing as mp

_ranks = {}


def ranks(size):
    """`size` processes that live as long as the tests do: starting one takes seconds."""
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
            process = context.Process(target=_work, args=(rank, size, os.path.join(self.folder.name, "group"), theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        atexit.register(self.end)

    def run(self, function, *args):
        """[function(rank, *args) of each rank]. `function` stands in a test file; the first error of a rank is raised."""
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
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            torch.distributed.destroy_process_group()
            return
        try:
            pipe.send((None, function(rank, *args)))
        except BaseException:  # noqa: B036 (pytest's own errors too: they belong to the test)
            pipe.send((traceback.format_exc(), None))
