"""Long operations report their progress, and Ctrl-C ends them within a second without changes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import xsoftmax as xs
from xsoftmax._core import long_work
from xsoftmax._core.files import replace_file

KINDS = [
    "tree", "tree_of_sparse_vectors", "xr_linear", "xr_linear_predict", "midx", "training_step",
    "lsh", "rff", "search_index", "mapped_table"
]


class Child:
    def __init__(self, folder):
        self.process = subprocess.Popen([
            sys.executable,
            str(Path(__file__).parents[1] / "shared/interrupted_work.py"),
            str(folder)
        ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self):
        # if the work never ends, the process is killed and the line is empty
        alarm = threading.Timer(100, self.process.kill)
        alarm.start()
        try:
            return self.process.stdout.readline()
        finally:
            alarm.cancel()

    def interrupted(self, kind):
        """Interrupts a kind of work; returns the seconds from SIGINT to its end."""
        print(kind, file=self.process.stdin, flush=True)
        assert self.line() == "begin\n"
        time.sleep(0.05)
        sent = time.monotonic()
        os.kill(self.process.pid, signal.SIGINT)
        outcome = json.loads(self.line())
        assert "wrong" not in outcome, outcome["wrong"]
        assert "came" in outcome, outcome
        return outcome["came"] - sent


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    child = Child(tmp_path_factory.mktemp("interrupted"))
    yield child
    child.process.stdin.close()
    child.process.wait()


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_ends_long_work(child, kind):
    seconds = child.interrupted(kind)
    assert seconds < 1, f"{kind} went on for {seconds:.1f} seconds"


def test_a_signal_handler_of_the_program_is_still_called(child):
    child.interrupted("handled_otherwise")


def test_progress_of_a_tree_rises_to_its_total(monkeypatch):
    monkeypatch.setattr(long_work, "_POLL_SECONDS", 0.01)
    seen = []
    seed, vectors = torch.tensor(0), torch.randn(100_000, 16)
    options = "arity=10,iterations=10,max_leaf_size=0,spherical=true"
    long_work.run("tree", torch.ops.xsoftmax.label_tree_from_vectors, seed, vectors, options,
                  show=lambda *numbers: seen.append(numbers))
    done, totals = zip(*seen)
    assert len(seen) > 1 and set(totals) == {
        100_000
    } and list(done) == sorted(done) and done[-1] == 100_000


def test_an_error_in_the_progress_function_stops_the_work():
    def stop(done, total):
        raise MemoryError("enough")

    threads = threading.active_count()
    with pytest.raises(MemoryError, match="enough"):
        long_work.run("tree", torch.ops.xsoftmax.label_tree_from_vectors, torch.tensor(0),
                      torch.randn(20_000, 16),
                      "arity=10,iterations=1000000,max_leaf_size=0,spherical=true", show=stop)
    assert threading.active_count() == threads


def test_errors_of_the_operator_are_raised_and_the_handler_is_restored():
    # programs in the background of a shell may ignore SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(ValueError, match="label_tree_kmeans_order: expected arity of at least 2"):
        long_work.run("tree", torch.ops.xsoftmax.label_tree_from_vectors, torch.tensor(0),
                      torch.randn(20, 16), "arity=1,iterations=1,max_leaf_size=0,spherical=true")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    signal.signal(signal.SIGINT, before)


def test_progress_bars_appear_only_within_xs_progress(monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    shown = []

    class Bar:
        def __init__(self, desc, **_):
            shown.append(desc)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def refresh(self):
            pass

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    xs.LabelTree.from_vectors(torch.randn(50, 4))
    assert shown == []
    with xs.progress():
        xs.LabelTree.from_vectors(torch.randn(50, 4))
        xs.samplers.MidxSampler(50, 4, 3).refresh(torch.randn(50, 4))
    xs.LabelTree.from_vectors(torch.randn(50, 4))
    assert shown == ["tree", "refresh"]


def test_an_interrupted_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "tree"
    xs.LabelTree.balanced(30).save(path)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), replace_file("save", path) as draft:
        Path(draft).write_bytes(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    xs.LabelTree.balanced(40).save(path)
    assert xs.LabelTree.load(path).num_classes == 40 and list(tmp_path.iterdir()) == [path]
