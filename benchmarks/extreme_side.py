"""Runs one library for extreme_labels.py, in its own process, with an interpreter that has the
library: trains, saves, loads and predicts on one data set, and prints JSON. Also needs numpy and
scipy.

    PYTHON benchmarks/extreme_side.py {xsoftmax,libpecos,omikuji} FOLDER SET [--threads 2]
                                      [--negatives tfn] [--trees 1] [--tree-only]

With several trees, an ensemble of models whose scores are averaged, only training is timed.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import scipy.sparse as sp

TOPK, BEAM, SINGLES = 10, 10, 300
seconds = {}


class timed:
    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_) -> None:
        seconds[self.name] = time.perf_counter() - self.start


class Xsoftmax:
    def __init__(self, threads: int):
        import torch

        import xsoftmax as xs

        self.torch, self.xs = torch, xs
        torch.set_num_threads(threads)

    def tree(self, X, Y, seed=0):
        with timed("label vectors"):
            vectors = self.xs.label_vectors.pifa(X, Y)
        with timed("tree"):
            return self.xs.LabelTree.from_vectors(vectors, 16, 20,
                                                  self.torch.Generator().manual_seed(seed),
                                                  max_leaf_size=100)

    def train(self, X, Y, tree, negatives: str) -> None:
        self.model = self.xs.XRLinear.train(X, Y, tree=tree, negatives=negatives,
                                            generator=self.torch.Generator().manual_seed(0))

    def save(self, path: str) -> None:
        self.model.save(path)

    def load(self, path: str) -> None:
        self.model = self.xs.XRLinear.load(path)

    def predict(self, X):
        return self.model.predict(X, TOPK, BEAM)

    single = predict

    def average(self, predictions):
        return self.xs.combine_predictions(predictions, topk=TOPK)


class Libpecos:
    """The defaults: 16 children per node, 100 labels per leaf, squared hinge, threshold 0.1."""
    def __init__(self, threads: int):
        from pecos.utils.smat_util import CsrEnsembler
        from pecos.xmc import Indexer, LabelEmbeddingFactory
        from pecos.xmc.xlinear.model import XLinearModel

        self.indexer, self.vectors, self.kind = Indexer, LabelEmbeddingFactory, XLinearModel
        self.threads, self.ensembler = threads, CsrEnsembler

    def tree(self, X, Y, seed=0):
        with timed("label vectors"):
            vectors = self.vectors.create(Y, X, method="pifa", threads=self.threads)
        with timed("tree"):
            return self.indexer.gen(vectors, indexer_type="hierarchicalkmeans", seed=seed,
                                    threads=self.threads)

    def train(self, X, Y, tree, negatives: str) -> None:
        self.model = self.kind.train(X, Y, C=tree, threads=self.threads,
                                     negative_sampling_scheme=negatives)

    def save(self, path: str) -> None:
        self.model.save(path)

    def load(self, path: str) -> None:
        self.model = self.kind.load(path, is_predict_only=True)

    def predict(self, X):
        return self.model.predict(X, only_topk=TOPK, beam_size=BEAM, threads=self.threads).tocsr()

    def single(self, X):
        return self.model.predict(X, only_topk=TOPK, beam_size=BEAM, threads=1)

    def average(self, predictions):
        return self.ensembler.average(*predictions)


class Omikuji:
    """Default options. Training reads a text file; prediction takes one query at a time."""
    def __init__(self, threads: int):
        import omikuji

        self.kind, self.threads = omikuji.Model, threads

    def train_on(self, path: str, trees: int) -> None:
        options = self.kind.default_hyper_param()
        options.n_trees = trees
        self.model = self.kind.train_on_data(path, options, self.threads)

    def save(self, path: str) -> None:
        self.model.save(path)

    def load(self, path: str) -> None:
        self.model = self.kind.load(path)
        self.model.init_prediction_thread_pool(self.threads)

    def single(self, X):
        return self.model.predict(list(zip(X.indices.tolist(), X.data.tolist())), BEAM, TOPK)

    def predict(self, X):
        found = [self.single(X[i]) for i in range(X.shape[0])]
        ends = np.r_[0, np.cumsum([len(row) for row in found])]
        pairs = [pair for row in found for pair in row]
        return sp.csr_matrix((np.array([s for _, s in pairs],
                                       np.float32), np.array([label for label, _ in pairs]), ends))


def precision(scores, Y) -> dict:
    hits = np.zeros(5)
    for i in range(Y.shape[0]):
        part = slice(*scores.indptr[i:i + 2])
        best = scores.indices[part][np.argsort(-scores.data[part], kind="stable")[:5]]
        right = np.isin(best, Y.indices[slice(*Y.indptr[i:i + 2])])
        hits[:len(right)] += right
    sums = 100 * np.cumsum(hits) / Y.shape[0]
    return {f"P@{k}": sums[k - 1] / k for k in (1, 3, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["xsoftmax", "libpecos", "omikuji"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("set")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--negatives", default="tfn")
    parser.add_argument("--trees", type=int, default=1)
    parser.add_argument("--tree-only", action="store_true")
    args = parser.parse_args()
    X, Y, X_test, Y_test = (sp.load_npz(args.folder / f"{args.set}.{part}.npz").tocsr()
                            for part in ("train.x", "train.y", "test.x", "test.y"))
    for matrix in (X, Y, X_test, Y_test):
        matrix.sort_indices()
    side = {"xsoftmax": Xsoftmax, "libpecos": Libpecos, "omikuji": Omikuji}[args.side](args.threads)
    if args.tree_only:
        side.tree(X, Y)
        print(json.dumps({"seconds": seconds}))
        return
    if args.side == "omikuji":
        with timed("train"):
            side.train_on(str(args.folder / f"{args.set}.train.txt"), args.trees)
        if args.trees > 1:
            side.model.init_prediction_thread_pool(args.threads)
            print(json.dumps({"seconds": seconds} | precision(side.predict(X_test), Y_test)))
            return
    elif args.trees > 1:
        predictions, total = [], 0.0
        for seed in range(args.trees):
            start = time.perf_counter()
            side.train(X, Y, side.tree(X, Y, seed), args.negatives)
            total += time.perf_counter() - start
            predictions.append(side.predict(X_test))
        print(
            json.dumps({"seconds": {"train": total}}
                       | precision(side.average(predictions), Y_test)))
        return
    else:
        tree = side.tree(X, Y)
        with timed("layers"):
            side.train(X, Y, tree, args.negatives)
        seconds["train"] = sum(seconds.values())
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model")
        side.save(path)
        size = sum(
            os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(path)
            for name in names)
        side.load(path)
        singles = []
        for i in range(SINGLES + 20):
            query = X_test[i % X_test.shape[0]]
            start = time.perf_counter()
            side.single(query)
            singles.append(time.perf_counter() - start)
        batches = []
        for _ in range(1 if args.side == "omikuji" else 5):
            start = time.perf_counter()
            found = side.predict(X_test)
            batches.append(time.perf_counter() - start)
    print(
        json.dumps({
            "seconds": seconds, "single": statistics.median(singles[20:]), "batch": min(batches) /
            X_test.shape[0], "bytes": size
        }
                   | precision(found, Y_test)))


if __name__ == "__main__":
    main()
