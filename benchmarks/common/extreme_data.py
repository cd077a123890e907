"""Data sets for extreme multi-label classification. Each is written once to a folder, as
{name}.{train,test}.{x,y}.npz, and as {name}.train.txt for libraries that read text."""

import re
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from xsoftmax.label_vectors import unit_rows

# Sizes of published sets (Amazon-670K scaled to a tenth): training examples, test examples,
# features, labels, labels per example, features per example.
SHAPES = {
    "eurlex-4k-like": (15449, 3865, 186104, 3956, 5.3, 236),
    "wiki10-31k-like": (14146, 6616, 101938, 30938, 18.6, 673),
    "amazon-670k-like": (49045, 15302, 13591, 67009, 5.45, 75)
}


def float_rows(matrix):
    """Returns a matrix as CSR, float32, with increasing columns."""
    matrix = matrix.tocsr().astype(np.float32)
    matrix.sort_indices()
    return matrix


def make(name: str, source: str | None, folder: Path, seed: int = 0) -> None:
    """Writes a data set unless it exists. `source` is the file or folder of a real one; None for a
    generated one."""
    if (folder / f"{name}.train.txt").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    parts = generated(*SHAPES[name], seed) if name in SHAPES else split(
        *{"delicious": delicious, "gowalla": gowalla, "novels": novels}[name](Path(source)), seed)
    for part, (X, Y) in parts.items():
        for what, matrix in (("x", X), ("y", Y)):
            sp.save_npz(folder / f"{name}.{part}.{what}.npz", float_rows(matrix), compressed=False)
    unfinished = folder / f"{name}.unfinished"
    write_text(*parts["train"], unfinished)
    unfinished.replace(folder / f"{name}.train.txt")


def split(X, Y, seed: int) -> dict:
    order = np.random.default_rng(seed).permutation(X.shape[0])
    cut = int(0.8 * X.shape[0])
    return {"train": (X[order[:cut]], Y[order[:cut]]), "test": (X[order[cut:]], Y[order[cut:]])}


def tf_idf(counts):
    idf = np.log((counts.shape[0] + 1) / (np.asarray((counts > 0).sum(0)).ravel() + 1)) + 1
    X = counts.tocsr().astype(np.float64)
    X.data = 1 + np.log(X.data)
    return unit_rows(X.multiply(idf).tocsr())


def ones(rows, columns, shape):
    return sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=shape)


def read_delicious(path: Path) -> list[list[int]]:
    """Returns the indices of the features and labels of each document of Mulan's sparse ARFF file:
    500 binary features, followed by 983 labels."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    start = next((i for i, line in enumerate(lines) if line.lower() == "@data"), None)
    if start is None:
        raise SystemExit(f"{path}: expected an ARFF file with a line @data, got none")
    return [[int(pair.split()[0]) for pair in line.strip("{}").split(",") if pair.strip()]
            for line in lines[start:] if line.startswith("{")]


def delicious(path: Path):
    documents = read_delicious(path)
    rows = [row for row, found in enumerate(documents) for _ in found]
    whole = ones(rows, [index for found in documents for index in found], (len(documents), 1483))
    return unit_rows(whole[:, :500]), whole[:, 500:]


def gowalla(folder: Path):
    """Predicts a user's test items from tf-idf of their training items."""
    def pairs(name):
        lines = [list(map(int, line.split())) for line in (folder / name).read_text().splitlines()]
        return [line[0] for line in lines
                for _ in line[1:]], [item for line in lines for item in line[1:]]

    (users, items), (test_users, test_items) = pairs("train.txt"), pairs("test.txt")
    shape = max(*users, *test_users) + 1, max(*items, *test_items) + 1
    counts, Y = ones(users, items, shape), ones(test_users, test_items, shape)
    Y.data[:] = 1
    tested = np.asarray(Y.sum(1)).ravel() > 0
    return tf_idf(counts)[tested], Y[tested]


def novels(path: Path):
    """Predicts the rare words (10 to 1,000 occurrences in total) among the next 30 words, from
    tf-idf of a window of 60 words."""
    if path.is_dir():
        texts = [file.read_text(errors="ignore") for file in sorted(path.glob("*.txt"))]
    else:
        with tarfile.open(path) as archive:
            members = sorted((m for m in archive if m.isfile() and m.name.endswith(".txt")),
                             key=lambda m: m.name)
            texts = [archive.extractfile(m).read().decode(errors="ignore") for m in members]
    texts = [re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower()) for text in texts]
    seen = Counter(word for text in texts for word in text)
    feature = {word: i for i, (word, count) in enumerate(seen.most_common()) if count >= 5}
    label = {
        word: i
        for i, word in enumerate(word for word, count in seen.items() if 10 <= count <= 1000)
    }
    x_rows, x_columns, y_rows, y_columns, n = [], [], [], [], 0
    for text in texts:
        for start in range(0, len(text) - 90, 90):
            labels = {label[word] for word in text[start + 60:start + 90] if word in label}
            if labels:
                words = [feature[word] for word in text[start:start + 60] if word in feature]
                x_rows += [n] * len(words)
                x_columns += words
                y_rows += [n] * len(labels)
                y_columns += labels
                n += 1
    return tf_idf(ones(x_rows, x_columns, (n, len(feature)))), ones(y_rows, y_columns,
                                                                    (n, len(label)))


def generated(train: int, test: int, features: int, labels: int, labels_each: float,
              features_each: int, seed: int, informative: float = 0.5) -> dict:
    """Generates examples. Labels have Zipf frequencies. Each label has 30 features, drawn from a
    Zipf distribution. The share `informative` of an example's features are those of its labels; the
    others are drawn from the same distribution."""
    random = np.random.default_rng(seed)

    def zipf(size: int, draws):
        weights = 1 / np.arange(1, size + 1)**0.9
        return random.permutation(size)[np.minimum(
            np.searchsorted(np.cumsum(weights) / weights.sum(), random.random(draws)), size - 1)]

    features_of_label = zipf(features, (labels, 30))
    n = train + test
    counts = np.maximum(random.poisson(labels_each, n), 1)
    rows = np.repeat(np.arange(n), counts)
    Y = ones(rows, zipf(labels, counts.sum()), (n, labels))
    Y.data[:] = 1
    informative_count = int(informative * features_each)
    mine = Y.indptr[:-1, None] + (random.random(
        (n, informative_count)) * np.diff(Y.indptr)[:, None]).astype(int)
    chosen = features_of_label[Y.indices[mine], random.integers(0, 30, mine.shape)]
    others = zipf(features, (n, features_each - informative_count))
    columns = np.hstack([chosen, others])
    X = tf_idf(ones(np.repeat(np.arange(n), columns.shape[1]), columns.ravel(), (n, features)))
    return {"train": (X[:train], Y[:train]), "test": (X[train:], Y[train:])}


def write_text(X, Y, path: Path) -> None:
    with open(path, "w") as file:
        file.write(f"{X.shape[0]} {X.shape[1]} {Y.shape[1]}\n")
        for i in range(X.shape[0]):
            x, y = slice(*X.indptr[i:i + 2]), slice(*Y.indptr[i:i + 2])
            pairs = "".join(f" {j}:{v:.7g}"
                            for j, v in zip(X.indices[x].tolist(), X.data[x].tolist()))
            file.write(",".join(map(str, Y.indices[y].tolist())) + pairs + "\n")
