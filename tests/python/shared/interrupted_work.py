"""Runs long work until it is interrupted and reports the outcome.

test_interrupts.py starts it as a separate process:

    python interrupted_work.py FOLDER

Reads the name of a kind of work from each line of standard input. Writes "begin" when the work
starts, and then a line of JSON with the time of KeyboardInterrupt (time.monotonic, which all
processes share) or the other outcome, and what is wrong with the state that the work left.

Each kind of work is a generator: it yields the work and then checks the state.
"""

import json
import os
import signal
import sys
import time

import numpy as np
import scipy.sparse as sp
import torch

import xsoftmax as xs

FOLDER = sys.argv[1]
FOREVER = 10**6
torch.manual_seed(0)


def examples(rows, features, labels):
    state = np.random.RandomState(0)
    X = sp.csr_matrix((state.rand(rows * 16).astype(
        np.float32), state.randint(0, features, rows * 16), 16 * np.arange(rows + 1)),
                      shape=(rows, features))
    X.sum_duplicates()
    Y = sp.csr_matrix(
        (np.ones(rows, np.float32), state.randint(0, labels, rows), np.arange(rows + 1)),
        shape=(rows, labels))
    return X, Y


def tree():
    """Recursive K-means."""
    vectors = torch.randn(20_000, 16)
    yield lambda: xs.LabelTree.from_vectors(vectors, 10, FOREVER)
    assert xs.LabelTree.from_vectors(vectors[:100], 10).num_classes == 100


def tree_of_sparse_vectors():
    vectors, _ = examples(200_000, 300, 10)
    yield lambda: xs.LabelTree.from_vectors(vectors, 16, FOREVER, max_leaf_size=100)
    assert xs.LabelTree.from_vectors(vectors[:300], 16, max_leaf_size=100).num_classes == 300


def xr_linear():
    X, Y = examples(4_000, 400, 400)
    yield lambda: xs.XRLinear.train(X, Y, tolerance=1e-12, sweeps=FOREVER)
    assert xs.XRLinear.train(X, Y, sweeps=2).num_labels == 400


def xr_linear_predict():
    X, Y = examples(2_000, 400, 400)
    model = xs.XRLinear.train(X, Y, sweeps=2)
    many = sp.vstack([X] * 200).tocsr()
    before = model.predict(X)
    yield lambda: model.predict(many, beam=400, topk=400)
    assert (model.predict(X) != before).nnz == 0


def refresh(make, rows, *, written=False):
    """Interrupts the second refresh of a sampler, on another table.

    Afterwards the sampler must draw the same samples with the same counts. `written`: the refresh
    writes the index early, so an interrupt resets it, and the next step refreshes it.
    """
    sampler, queries = make(rows), torch.randn(4, 32)
    tables = torch.randn(2, rows, 32)
    sampler.refresh(tables[0])
    before = {name: value.clone() for name, value in sampler.state_dict().items()}

    def drawn():
        return sampler.sample(queries, None, torch.Generator().manual_seed(1))[0]

    draws = drawn()
    yield lambda: sampler.refresh(tables[1])
    after = sampler.state_dict()
    if written:
        assert int(sampler.step) == 0
        counts = sampler.log_count(queries, torch.arange(rows)).double().exp().sum(1)
        assert torch.allclose(counts, torch.full_like(counts, 20),
                              rtol=1e-5), "counts are not those of 20 draws"
        sampler.prepare(tables[0], None)
        assert all(
            torch.equal(value, after[name]) for name, value in before.items() if name != "step")
    else:
        assert all(torch.equal(value, after[name])
                   for name, value in before.items()), "the index has changed"
    assert torch.equal(drawn().ids, draws.ids) and torch.equal(drawn().log_count, draws.log_count)


def midx():
    sampler = None

    def many_iterations(rows):
        nonlocal sampler
        sampler = xs.samplers.MidxSampler(rows, 32, 20, codewords=64, iterations=1)
        return sampler

    work = refresh(many_iterations, 20_000)
    start = next(work)
    few = sampler.options
    sampler.options = few.replace("iterations=1", f"iterations={FOREVER}")
    assert sampler.options != few
    yield start
    sampler.options = few
    yield from work


def training_step():
    """Interrupts the refresh in a training step; the step must not be counted."""
    loss = xs.SampledSoftmaxLoss(
        32, 20_000, sampler=xs.samplers.MidxSampler(20_000, 32, 20, bias=False, codewords=64,
                                                    iterations=FOREVER))
    input, target = torch.randn(8, 32), torch.arange(8)
    yield lambda: loss(input, target)
    assert int(loss.sampler.step) == 0
    loss.sampler.options = loss.sampler.options.replace(f"iterations={FOREVER}", "iterations=1")
    loss(input, target).backward()
    assert int(loss.sampler.step) == 1


def lsh():
    yield from refresh(lambda rows: xs.samplers.LshSampler(rows, 32, 20, tables=64, bits=12),
                       60_000)


def rff():
    yield from refresh(lambda rows: xs.samplers.RffSampler(rows, 32, 20, features=1024), 60_000,
                       written=True)


def search_index():
    loss = xs.LinearCrossEntropyLoss(64, 800_000)
    queries = torch.randn(3, 64)
    best = loss.topk(queries, 4)
    yield lambda: loss.search_index(codewords=256)
    for found, expected in zip(loss.topk(queries, 4), best):
        assert torch.equal(found, expected)


def mapped_table():
    path = os.path.join(FOLDER, "table")
    yield lambda: xs.tables.mapped(path, 1_000_000, 64, progress=False, init=lambda rows:
                                   [rows.normal_() for _ in range(100)])
    assert os.listdir(FOLDER) == [], "half a file is left"
    assert xs.tables.mapped(path, 10, 64, progress=False).shape == (10, 64)


def handled_otherwise():
    """With a signal handler of the program, the work finishes and the handler is called."""
    called = []
    before = signal.signal(signal.SIGINT, lambda *_: called.append(time.monotonic()))
    vectors = torch.randn(40_000, 32)

    def work():
        while not called:
            tree = xs.LabelTree.from_vectors(vectors, 10, 10)
        assert tree.num_classes == len(vectors) and len(called) == 1
        raise KeyboardInterrupt

    yield work
    signal.signal(signal.SIGINT, before)


def main():
    # programs in the background of a shell may ignore SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        steps = globals()[line.strip()]()
        work = next(steps)
        print("begin", flush=True)
        outcome = {}
        try:
            work()
            outcome["instead"] = "the work was done"
        except KeyboardInterrupt:
            outcome["came"] = time.monotonic()
        except BaseException as error:
            outcome["instead"] = f"{type(error).__name__}: {error}"
        try:
            next(steps, None)
        except BaseException as error:
            import traceback

            outcome["wrong"] = "".join(traceback.format_exception(error))[-600:]
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
