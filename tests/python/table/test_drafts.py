"""Draft files of killed processes: the next save under that name removes them, but no draft of a
running process."""

import fcntl
import os
import shutil
import signal
import threading
import time

import pytest
import scipy.sparse as sp
import torch
import torch.distributed.checkpoint as dcp

import xsoftmax as xs
import xsoftmax.tools.cli
from xr_linear_checks import parts, problem, same, small


def wait(*_, **__):
    time.sleep(1000)


def slow_model(path):
    model = small_model()
    model.notes["text"] = "x" * (64 << 20)
    while True:
        model.save(path)


def slow_tree(path):
    def save(state, draft):
        with open(draft, "w") as file:
            file.write("half")
        wait()

    torch.save = save
    tree().save(path)


def slow_predictions(path):
    def save(file, scores):
        file.write(b"half")
        file.flush()
        wait()

    sp.save_npz = save
    predict(path)


def slow_table(path):
    xs.tables.mapped(path, 30, 4, init=wait, progress=False)


def slow_checkpoint(path):
    def save(state, storage_writer, planner):
        open(os.path.join(storage_writer.path, "half"), "w").close()
        wait()

    dcp.save = save
    xs.distributed.save_checkpoint(path, {"a": torch.zeros(3)}, 1)


def small_model():
    return small(*problem(rows=60, labels=12))


def tree():
    return xs.LabelTree.balanced(40, 3)


def predict(path):
    """Predictions of the command line for one query, with a model saved next to the folder of
    `path`."""
    above = os.path.dirname(os.path.dirname(path))
    assert xsoftmax.tools.cli.main(["predict", f"{above}/one.npz", path, f"{above}/a_model"]) == 0


@pytest.fixture()
def half_written(tmp_path):
    """Starts a slow save of `name` in another process; returns the process once its draft
    exists."""
    processes = []

    def start(save, name):
        before = set(drafts(tmp_path, name))
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                save(str(tmp_path / name))
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        processes.append(child)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            new = set(drafts(tmp_path, name)) - before
            if save is not slow_model and any(has_content(draft) for draft in new):
                return child
            if save is slow_model and new:
                os.kill(child, signal.SIGSTOP)  # during a write of 64 MB
                time.sleep(0.02)
                # A folder without a lock is the one that the draft has just replaced.
                if any(is_locked(draft) for draft in set(drafts(tmp_path, name)) - before):
                    return child
                os.kill(child, signal.SIGCONT)
        raise AssertionError("no draft was seen")

    def stop(child):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        processes.remove(child)

    start.kill = stop
    yield start
    for child in list(processes):
        stop(child)


def is_locked(folder):
    """Returns whether a process holds the lock of a draft folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def drafts(folder, name):
    """Draft files that a save of `name` may leave next to it or inside it."""
    target = folder / name
    found = [
        path for path in target.parent.iterdir()
        if path.name.startswith(f"{target.name}.") and ".draft" in path.name
    ]
    inside = list((folder / name).glob(".step-*")) if (folder / name).is_dir() else []
    begun = [folder / name] if (folder / name).is_file() and b'"state":"begun"' in (
        folder / name).read_bytes()[:60] else []
    return [*found, *inside, *begun]


def has_content(draft):
    return any(draft.iterdir()) if draft.is_dir() else draft.stat().st_size > 0


VALUES = {"model": (small_model, slow_model), "tree": (tree, slow_tree)}


@pytest.mark.parametrize("kind", VALUES)
def test_a_save_removes_drafts_of_killed_processes_only(kind, half_written, tmp_path):
    """The draft of a running process stays."""
    make, slow = VALUES[kind]
    value = make()
    half_written.kill(half_written(slow, "saved"))  # before a model of that name exists
    shutil.rmtree(tmp_path / "saved", ignore_errors=True)
    assert len(drafts(tmp_path, "saved")) == 1
    value.save(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    half_written.kill(half_written(slow, "saved"))
    alive = half_written(slow, "saved")
    value.save(tmp_path / "saved")
    assert len(drafts(tmp_path, "saved")) == 1 and f".{alive}." in drafts(tmp_path, "saved")[0].name
    value.save(tmp_path / "other")
    half_written.kill(alive)
    value.save(tmp_path / "other")  # drafts of another name stay
    assert len(drafts(tmp_path, "saved")) == 1
    value.save(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path)) == ["other", "saved"]
    loaded = type(value).load(tmp_path / "saved")
    assert same(parts(loaded), parts(value)) if kind == "model" else same(
        loaded.tables(), value.tables())


def test_only_drafts_are_removed(tmp_path):
    """Files with similar names, and folders with other files, stay."""
    model = small_model()
    for name in ("saved", "saved.1.0", "saved.1.0.draft.bak", "other.1.0.draft", "saved.x.0.draft"):
        model.save(tmp_path / name)
    (tmp_path / "saved.7.0.draft").mkdir()
    (tmp_path / "saved.7.0.draft" / "letter.txt").write_text("dear")
    (tmp_path / "saved.8.0.draft").write_text("a file")
    (tmp_path / "saved.9.0.draft").symlink_to(tmp_path / "saved.1.0")
    before = sorted(os.listdir(tmp_path))
    model.save(tmp_path / "saved")
    assert sorted(
        os.listdir(tmp_path)) == before and (tmp_path / "saved.7.0.draft" / "letter.txt").exists()
    made = tree()
    made.save(tmp_path / "tree.pt")
    (tmp_path / "tree.pt.1.0.draft").mkdir()
    (tmp_path / "tree.pt.2.0.draft").symlink_to(tmp_path / "tree.pt")
    (tmp_path / "tree.pt.3.0.draft").touch()
    made.save(tmp_path / "tree.pt")
    left = sorted(name for name in os.listdir(tmp_path) if name.startswith("tree"))
    assert left == ["tree.pt", "tree.pt.1.0.draft", "tree.pt.2.0.draft"]


def test_threads_that_save_under_one_name(tmp_path):
    """Each save is complete: no thread writes to or removes the draft of another."""
    values = [small_model(), tree()]
    errors = []

    def save(value, name):
        try:
            for _ in range(12):
                value.save(tmp_path / name)
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=save, args=(value, f"saved{i}")) for i, value in enumerate(values)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and sorted(os.listdir(tmp_path)) == ["saved0", "saved1"]
    assert same(parts(xs.XRLinear.load(tmp_path / "saved0")), parts(values[0]))
    assert same(xs.LabelTree.load(tmp_path / "saved1").tables(), values[1].tables())


def test_predictions_of_the_command_line(half_written, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    small_model().save(tmp_path / "a_model")
    sp.save_npz(tmp_path / "one.npz", sp.csr_matrix((1, 60), dtype="f4"))
    half_written.kill(half_written(slow_predictions, "folder/p.npz"))
    assert len(os.listdir(folder)) == 1
    predict(str(folder / "p.npz"))
    assert os.listdir(folder) == ["p.npz"]


def test_a_half_created_table_is_created_again(half_written, tmp_path):
    """Only after its process has ended."""
    path = tmp_path / "saved"
    alive = half_written(slow_table, "saved")
    with pytest.raises(RuntimeError, match="in use by another process"):
        xs.tables.mapped(path, 30, 4, progress=False)
    half_written.kill(alive)
    with pytest.raises(RuntimeError, match="creation was not finished"):
        xs.tables.open(path)
    weight = xs.tables.mapped(path, 20, 3, init=torch.nn.init.ones_, progress=False)
    assert weight.shape == (20, 3) and bool((weight == 1).all())
    # as left by a process killed before the first byte
    (tmp_path / "saved.row_adagrad").touch()
    weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), weight.shape)
    xs.optim.RowAdagrad([weight]).step()
    xs.tables.flush(weight)
    for text in (b"", b"a letter"):
        (tmp_path / "letter").write_bytes(text)
        if text:
            with pytest.raises(ValueError, match="as a file that xs.tables made"):
                xs.tables.mapped(tmp_path / "letter", 20, 3, progress=False)
            assert (tmp_path / "letter").read_bytes() == text


def test_checkpoints(half_written, tmp_path):
    folder, state = str(tmp_path / "saved"), {"a": torch.ones(3)}
    os.mkdir(folder)
    alive = half_written(slow_checkpoint, "saved")
    with pytest.raises(RuntimeError, match="another process is writing"):
        xs.distributed.save_checkpoint(folder, state, 1)
    xs.distributed.save_checkpoint(folder, state, 2)
    assert len(drafts(tmp_path, "saved")) == 1, "the draft of a running job must stay"
    half_written.kill(alive)
    xs.distributed.save_checkpoint(folder, state, 1)
    assert sorted(os.listdir(folder)) == ["step-0000000001", "step-0000000002"]
    assert xs.distributed.load_checkpoint(folder, loaded := {"a": torch.zeros(3)
                                                             }) == 2 and loaded["a"].sum() == 3
