"""Stands in for libpecos: predicts the labels of the training examples that are nearest."""

import pickle
import sys
from pathlib import Path

import scipy.sparse as sp

for name in ("utils", "utils.smat_util", "xmc", "xmc.xlinear", "xmc.xlinear.model"):
    sys.modules[f"pecos.{name}"] = sys.modules[__name__]


class LabelEmbeddingFactory:
    @staticmethod
    def create(Y, X, method, threads):
        assert method == "pifa" and threads > 0
        return Y.T @ X


class Indexer:
    @staticmethod
    def gen(vectors, indexer_type, seed, threads):
        assert indexer_type == "hierarchicalkmeans" and threads > 0
        return vectors.shape[0], seed


class XLinearModel:
    def __init__(self, X, Y):
        self.X, self.Y = X, Y

    @classmethod
    def train(cls, X, Y, C, threads, negative_sampling_scheme):
        assert C[0] == Y.shape[1] and negative_sampling_scheme in ("tfn", "tfn+man")
        return cls(X, Y)

    def save(self, path):
        Path(path).mkdir()
        (Path(path) / "model").write_bytes(pickle.dumps((self.X, self.Y)))

    @classmethod
    def load(cls, path, is_predict_only):
        return cls(*pickle.loads((Path(path) / "model").read_bytes()))

    def predict(self, X, only_topk, beam_size, threads):
        scores = (X @ self.X.T @ self.Y).tolil()
        for i, (columns, values) in enumerate(zip(scores.rows, scores.data)):
            best = sorted(zip(values, columns), reverse=True)[:only_topk]
            scores.rows[i] = sorted(column for _, column in best)
            scores.data[i] = [value for _, value in sorted(best, key=lambda pair: pair[1])]
        return scores.tocsr()


class CsrEnsembler:
    @staticmethod
    def average(*predictions):
        return sp.csr_matrix(sum(predictions) / len(predictions))
