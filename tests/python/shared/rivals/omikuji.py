"""Stands in for omikuji: always predicts the labels that are most frequent."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace


class Model:
    def __init__(self, labels):
        self.labels = labels

    @staticmethod
    def default_hyper_param():
        return SimpleNamespace(n_trees=0)

    @classmethod
    def train_on_data(cls, path, options, threads):
        assert options.n_trees > 0 and threads > 0
        lines = Path(path).read_text().splitlines()
        examples, _, _ = map(int, lines[0].split())
        assert len(lines) == 1 + examples
        found = Counter(int(label) for line in lines[1:] for label in line.split()[0].split(","))
        return cls(found.most_common())

    def save(self, path):
        Path(path).mkdir()
        (Path(path) / "model").write_text(json.dumps(self.labels))

    @classmethod
    def load(cls, path):
        return cls(json.loads((Path(path) / "model").read_text()))

    def init_prediction_thread_pool(self, threads):
        assert threads > 0

    def predict(self, pairs, beam_size, top_k):
        assert all(isinstance(feature, int) for feature, _ in pairs)
        return self.labels[:top_k]
